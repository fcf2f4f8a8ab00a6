"""Counts of learning against the literature's formulas, our own table, and what torch keeps."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.config import GPTConfig
from gpt.costs.inference import parameter_count, rank_costs
from gpt.costs.training import (
    Kept,
    Recompute,
    edge_activation_bytes,
    forward_flops,
    layer_activation_bytes,
    layers_in_flight,
    recompute_flops,
    sent_elements,
    stage_parameters,
    state_bytes,
    step_flops,
)
from tests.support.models import CONFIGS


def gpt3(
    layers: int, hidden: int, heads: int, vocab: int = 51200, sequence: int = 2048
) -> GPTConfig:
    return GPTConfig(layers, hidden, heads, vocab, sequence)


LLAMA = GPTConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    vocab_size=32000,
    max_position_embeddings=4096,
    ffn_hidden_size=11008,
    gated=True,
)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "batch"),
    [(24, 2304, 24, 512), (48, 6144, 64, 4), (96, 12288, 96, 64), (128, 25600, 160, 3072)],
)
def test_operations_are_those_of_the_papers(
    layers: int, hidden: int, heads: int, batch: int
) -> None:
    s, v = 2048, 51200
    flops = forward_flops(gpt3(layers, hidden, heads), batch, s)
    whole = 72 * batch * s * layers * hidden**2
    model = step_flops(flops, "all")
    assert model == pytest.approx(whole * (1 + s / (6 * hidden) + v / (12 * layers * hidden)))
    full = model + recompute_flops(flops, "full")
    expected = 4 / 3 * whole * (1 + s / (6 * hidden) + v / (16 * layers * hidden))
    assert full == pytest.approx(expected)
    selective = model + recompute_flops(flops, "selective")
    assert selective == pytest.approx(
        whole * (1 + s / (3 * hidden) + v / (12 * layers * hidden)), rel=1e-9
    )


def test_frozen_weights_leave_four_of_six_products() -> None:
    config = gpt3(12, 768, 12, vocab=1)
    for sequence in (384, 768, 2048):
        flops = forward_flops(config, 1, sequence)
        layers = (flops.linears, flops.attention)
        r = sequence / config.hidden_size
        frozen, learning = (linears * layers[0] + 3 * layers[1] for linears in (2, 3))
        assert frozen / learning == pytest.approx((4 + r) / (6 + r))
        head = step_flops(flops, "adapter") - frozen
        assert head == pytest.approx(2 * flops.head)
    assert recompute_flops(flops, "selective", "adapter") == flops.attention


def test_a_causal_count_halves_attention_alone() -> None:
    plain = forward_flops(LLAMA, 3, 1000)
    causal = forward_flops(LLAMA, 3, 1000, causal=True)
    assert causal.attention == plain.attention / 2
    assert (causal.linears, causal.head) == (plain.linears, plain.head)


def test_every_width_counts() -> None:
    """Two operations for each weight and token, the router's and what experts skip apart."""
    for config in CONFIGS.values():
        if any(config.moe_layers):
            continue
        h, d = config.hidden_size, config.kv_channels
        heads, groups = config.num_attention_heads, config.num_query_groups
        fc1 = config.ffn_hidden_size * (2 if config.gated else 1)
        weights = h * d * (2 * heads + 2 * groups) + h * (fc1 + config.ffn_hidden_size)
        flops = forward_flops(config, 2, 7)
        assert flops.linears == 2 * 14 * config.num_layers * weights
        assert flops.attention == 4 * 14 * 7 * heads * d * config.num_layers


WAYS: dict[tuple[str, bool], Callable[[float, float, float], float]] = {
    ("none", False): lambda t, r, _: 10 + 24 / t + 5 * r / t,
    ("none", True): lambda t, r, _: (34 + 5 * r) / t,
    ("selective", False): lambda t, r, _: 10 + 24 / t,
    ("selective", True): lambda t, r, _: 34 / t,
    ("full", False): lambda t, r, _: 2,
    ("full", True): lambda t, r, _: 2 / t,
}


@settings(deadline=None)
@given(
    t=st.sampled_from([1, 2, 4, 8]),
    batch=st.integers(1, 16),
    sequence=st.sampled_from([512, 2048, 4096]),
    width=st.sampled_from([64, 128]),
    way=st.sampled_from(sorted(WAYS)),
)
def test_kept_bytes_of_a_layer_are_the_papers(
    t: int, batch: int, sequence: int, width: int, way: tuple[Recompute, bool]
) -> None:
    heads = 16
    config = gpt3(2, heads * width, heads, sequence=sequence)
    sbh = sequence * batch * config.hidden_size
    recompute, together = way
    kept = Kept(t, together)
    expected = sbh * WAYS[way](t, heads * sequence / config.hidden_size, 0)
    found = layer_activation_bytes(config, batch, sequence, recompute, kept)
    assert found == pytest.approx(expected)
    if recompute != "full":
        fused = Kept(t, together, flash=True)
        assert layer_activation_bytes(config, batch, sequence, "none", fused) == pytest.approx(
            sbh * WAYS["selective", together](t, 0, 0)
        )


def test_kept_bytes_under_frozen_weights() -> None:
    config = gpt3(2, 4096, 32)
    sbh = 2048 * 2 * 4096
    ratio = 5 * 32 * 2048 / 4096

    def kept(recompute: Recompute, **how: object) -> float:
        way = Kept(trainable="adapter", **how)  # type: ignore[arg-type]
        return layer_activation_bytes(config, 2, 2048, recompute, way) / sbh

    assert kept("none") == 20 + ratio
    assert kept("selective") == 20
    assert kept("selective", tp=8) == 6 + 14 / 8
    assert kept("selective", tp=8, sequence_parallel=True) == 20 / 8
    assert kept("none", flash=True) == 22
    assert kept("full") == 2


def test_kept_bytes_of_a_gated_layer() -> None:
    sbh = 4096 * 4096
    for trainable, expected in (("adapter", 22.75), ("all", 32.125)):
        way = Kept(flash=True, trainable=trainable, dropout=False)  # type: ignore[arg-type]
        found = layer_activation_bytes(LLAMA, 1, 4096, "none", way) / sbh
        assert found == pytest.approx(expected, abs=0.01)


class Layer(torch.nn.Module):
    """As the papers count one: dropout after softmax and after both halves."""

    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(h) for _ in range(2)])
        self.qkv, self.proj = torch.nn.Linear(h, 3 * h), torch.nn.Linear(h, h)
        self.fc1, self.fc2 = torch.nn.Linear(h, 4 * h), torch.nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (
            part.reshape(b, s, self.heads, -1).transpose(1, 2).reshape(b * self.heads, s, -1)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        start = torch.zeros(1, dtype=x.dtype)
        scores = torch.baddbmm(start, q, k.transpose(1, 2), beta=0, alpha=0.1)
        share = torch.native_dropout(scores.softmax(-1), 0.1, True)[0]
        out = (share @ v).reshape(b, self.heads, s, -1).transpose(1, 2).reshape(b, s, h)
        x = x + torch.native_dropout(self.proj(out), 0.1, True)[0]
        middle = torch.nn.functional.gelu(self.fc1(self.norms[1](x)), approximate="tanh")
        return x + torch.native_dropout(self.fc2(middle), 0.1, True)[0]


@pytest.mark.parametrize("trainable", ["all", "adapter"])
def test_torch_keeps_as_much_as_is_counted(trainable: str) -> None:
    b, s, h, heads = 2, 64, 128, 4
    torch.manual_seed(0)
    layer = Layer(h, heads).to(torch.bfloat16)
    layer.requires_grad_(trainable == "all")
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Statistics of norms are what the count leaves out.
        if storage.data_ptr() not in own and tensor.numel() > b * s:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True))
    assert out.requires_grad  # And keeps what it needs for that alive, so no address comes twice.
    config = gpt3(1, h, heads, vocab=10, sequence=s)
    way = Kept(trainable=trainable)  # type: ignore[arg-type]
    counted = layer_activation_bytes(config, b, s, "none", way)
    assert sum(held.values()) == counted


def test_layers_in_flight() -> None:
    assert layers_in_flight(48, 1, 100) == 48
    assert layers_in_flight(48, 4, 100) == 48
    assert layers_in_flight(48, 4, 2) == 24
    assert [layers_in_flight(48, 4, 100, stage=i) for i in range(4)] == [48, 36, 24, 12]
    assert layers_in_flight(105, 35, 280, 3) == pytest.approx(105 * (1 + 34 / 105))


def test_edges_keep_the_embeddings_mask_and_logits() -> None:
    config = gpt3(48, 6144, 64)
    sbh = 4 * 2048 * 6144
    first, last = edge_activation_bytes(config, 4, 2048, 1, Kept(8, True))
    assert first == sbh / 8
    assert last == pytest.approx(4 * sbh / 8 * (1 + 51200 / 6144))
    assert edge_activation_bytes(config, 4, 2048, 4, Kept(8))[0] == 4 * sbh


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (2, 5)])
def test_stages_hold_what_their_ranks_do(name: str, tp: int, pp: int) -> None:
    config = CONFIGS[name]
    if config.num_layers % pp or (pp > 1 and any(config.moe_layers)):
        return
    ranks = rank_costs(config, tp, pp)
    for stage in range(pp):
        most = max(rank.parameters for rank in ranks if rank.pp_rank == stage)
        assert stage_parameters(config, tp, pp, stage) == pytest.approx(most)


def test_states_of_every_precision() -> None:
    def per_parameter(dtype: str, shards: int = 1) -> float:
        states = state_bytes(1000, "all", 0, shards, dtype)
        return (states.weights + states.gradients + states.optimizer) / 1000

    assert [per_parameter(d) for d in ("bfloat16", "float16", "float32")] == [18, 20, 16]
    assert per_parameter("bfloat16", 8) == 6 + 12 / 8
    assert per_parameter("float16", 8) == 4 + 16 / 8
    assert per_parameter("float32", 8) == 8 + 8 / 8
    frozen = state_bytes(1000, "adapter", 10)
    assert (frozen.weights, frozen.gradients, frozen.optimizer) == (2020, 40, 120)


def test_what_is_sent() -> None:
    config, tokens = gpt3(48, 6144, 64), 4 * 2048
    sbh = tokens * 6144

    def sent(kept: Kept, recompute: Recompute = "none", **how: int) -> float:
        ways = {"dp": 4, "pp": 2, **how}
        return sent_elements(
            config, tokens, kept, dp=ways["dp"], pp=ways["pp"], recompute=recompute
        ).tensor_layer

    assert sent(Kept(8)) == 8 * sbh * 7 / 8
    assert sent(Kept(8), "full") == 12 * sbh * 7 / 8
    assert sent(Kept(8, True)) == (8 + 2) * sbh * 7 / 8
    assert sent(Kept(8, True, trainable="adapter")) == 8 * sbh * 7 / 8
    assert sent(Kept(1)) == 0
    every = sent_elements(config, tokens, Kept(8), dp=4, pp=2, vpp=3)
    assert every.pipeline_boundary == 3 * sbh / 8
    assert every.data == 2 * 3 / 4 * stage_parameters(config, 8, 2, 0)
    assert every.embedding == math.ceil(51200 / 8) * 6144
    frozen = sent_elements(config, tokens, Kept(8, trainable="adapter"), dp=4, pp=2)
    assert (frozen.data, frozen.embedding) == (0, 0)


def test_published_sizes() -> None:
    sizes = {(24, 2304, 24): 1.652, (36, 4096, 32): 7.468, (105, 20480, 128): 529.6}
    for (layers, hidden, heads), billions in sizes.items():
        found = parameter_count(gpt3(layers, hidden, heads)) / 1e9
        assert found == pytest.approx(billions, rel=5e-4)
