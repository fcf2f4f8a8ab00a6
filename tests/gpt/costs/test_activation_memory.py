"""Activation memory: bytes by the literature's formulas and by torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.costs.activation_memory import (
    edge_activation_bytes,
    layer_activation_bytes,
    layers_in_flight,
)
from gpt.costs.training import RecomputeMode, TrainingSetup
from tests.support.cost_configs import LLAMA_7B, gpt3_config

ACTIVATION_FORMULAS: dict[tuple[str, bool], Callable[[float, float, float], float]] = {
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
    recompute_and_sequence_parallel=st.sampled_from(sorted(ACTIVATION_FORMULAS)),
)
def test_activation_bytes_of_a_layer_equal_the_papers_formula(
    t: int,
    batch: int,
    sequence: int,
    width: int,
    recompute_and_sequence_parallel: tuple[RecomputeMode, bool],
) -> None:
    heads = 16
    config = gpt3_config(2, heads * width, heads, sequence=sequence)
    sbh = sequence * batch * config.hidden_size
    recompute, sequence_parallel = recompute_and_sequence_parallel
    setup = TrainingSetup(t, sequence_parallel)
    expected = sbh * ACTIVATION_FORMULAS[recompute_and_sequence_parallel](
        t, heads * sequence / config.hidden_size, 0
    )
    bytes_ = layer_activation_bytes(config, batch, sequence, recompute, setup)
    assert bytes_ == pytest.approx(expected)
    if recompute != "full":
        fused = TrainingSetup(t, sequence_parallel, flash=True)
        assert layer_activation_bytes(config, batch, sequence, "none", fused) == pytest.approx(
            sbh * ACTIVATION_FORMULAS["selective", sequence_parallel](t, 0, 0)
        )


def test_activation_bytes_with_frozen_weights() -> None:
    config = gpt3_config(2, 4096, 32)
    sbh = 2048 * 2 * 4096
    ratio = 5 * 32 * 2048 / 4096

    def activation_bytes(recompute: RecomputeMode, **options: object) -> float:
        setup = TrainingSetup(trainable="adapter", **options)  # type: ignore[arg-type]
        return layer_activation_bytes(config, 2, 2048, recompute, setup) / sbh

    assert activation_bytes("none") == 20 + ratio
    assert activation_bytes("selective") == 20
    assert activation_bytes("selective", tp=8) == 6 + 14 / 8
    assert activation_bytes("selective", tp=8, sequence_parallel=True) == 20 / 8
    assert activation_bytes("none", flash=True) == 22
    assert activation_bytes("full") == 2


def test_activation_bytes_of_a_gated_layer() -> None:
    sbh = 4096 * 4096
    for trainable, expected in (("adapter", 22.75), ("all", 32.125)):
        setup = TrainingSetup(flash=True, trainable=trainable, dropout=False)  # type: ignore[arg-type]
        per_token = layer_activation_bytes(LLAMA_7B, 1, 4096, "none", setup) / sbh
        assert per_token == pytest.approx(expected, abs=0.01)


class Layer(torch.nn.Module):
    """A layer as the papers count it: dropout after softmax and after both halves.

    - `norms`: 4 adds a norm after each half, as in Gemma 3.
    - `experts_per_token`: 0: a dense MLP, else the number of experts of each token, out of as many.
    """

    def __init__(
        self,
        h: int,
        heads: int,
        *,
        norms: int = 2,
        qk_norm: bool = False,
        experts_per_token: int = 0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.qk_norm = qk_norm
        self.experts_per_token = experts_per_token
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(h) for _ in range(norms)])
        self.qkv = torch.nn.Linear(h, 3 * h)
        self.proj = torch.nn.Linear(h, h)
        experts = max(1, experts_per_token)
        self.fc1 = torch.nn.ModuleList([torch.nn.Linear(h, 4 * h) for _ in range(experts)])
        self.fc2 = torch.nn.ModuleList([torch.nn.Linear(4 * h, h) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (
            part.reshape(b, s, self.heads, -1).transpose(1, 2).reshape(b * self.heads, s, -1)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        if self.qk_norm:
            q, k = (torch.nn.functional.layer_norm(part, part.shape[-1:]) for part in (q, k))
        start = torch.zeros(1, dtype=x.dtype)
        scores = torch.baddbmm(start, q, k.transpose(1, 2), beta=0, alpha=0.1)
        share = torch.native_dropout(scores.softmax(-1), 0.1, True)[0]
        out = (share @ v).reshape(b, self.heads, s, -1).transpose(1, 2).reshape(b, s, h)
        x = x + torch.native_dropout(self.post_norm(2, self.proj(out)), 0.1, True)[0]
        out = self.post_norm(3, self.mlp(self.norms[1](x)))
        return x + torch.native_dropout(out, 0.1, True)[0]

    def post_norm(self, index: int, x: Tensor) -> Tensor:
        return self.norms[index](x) if len(self.norms) == 4 else x

    def mlp(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.experts_per_token:
            rows = rows.repeat(self.experts_per_token, 1)  # A copy for each expert of a token.
        outputs = [
            fc2(torch.nn.functional.gelu(fc1(part), approximate="tanh"))
            for part, fc1, fc2 in zip(rows.chunk(len(self.fc1)), self.fc1, self.fc2, strict=True)
        ]
        return sum(outputs[1:], start=outputs[0]).reshape(x.shape)


@pytest.mark.parametrize("trainable", ["all", "adapter"])
@pytest.mark.parametrize(
    ("layer_options", "fields"),
    [
        ({}, {}),
        ({"norms": 4}, {"norm_placement": "pre_and_post"}),
        ({"qk_norm": True}, {"qk_layernorm": True}),
        ({"experts_per_token": 3}, {"num_experts": 8, "moe_router_topk": 3, "moe_layers": ()}),
    ],
    ids=["papers' layer", "norms after", "qk norm", "experts"],
)
def test_torch_keeps_the_counted_activation_bytes(
    trainable: str, layer_options: dict[str, Any], fields: dict[str, Any]
) -> None:
    b = 2
    s = 64
    h = 128
    heads = 4
    torch.manual_seed(0)
    layer = Layer(h, heads, **layer_options).to(torch.bfloat16)
    layer.requires_grad_(trainable == "all")
    own_storage = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    bytes_by_address: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # The count leaves out statistics of norms, which have one value for each row or head.
        if storage.data_ptr() not in own_storage and tensor.numel() > b * s * heads:
            bytes_by_address[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True))
    assert out.requires_grad  # Its graph keeps the tensors alive, so no address is reused.
    config = gpt3_config(1, h, heads, vocab=10, sequence=s).with_fields(**fields)
    setup = TrainingSetup(trainable=trainable)  # type: ignore[arg-type]
    expected = layer_activation_bytes(config, b, s, "none", setup)
    # The router of the experts is not in the layer; its input is that of the dense fc1.
    router_input = 2 * b * s * h if config.num_experts and trainable == "all" else 0
    assert sum(bytes_by_address.values()) == expected - router_input


def test_layers_in_flight_of_each_schedule() -> None:
    assert layers_in_flight(48, 1, 100) == 48
    assert layers_in_flight(48, 4, 100) == 48
    assert layers_in_flight(48, 4, 2) == 24
    assert [layers_in_flight(48, 4, 100, stage=i) for i in range(4)] == [48, 36, 24, 12]
    assert layers_in_flight(105, 35, 280, 3) == pytest.approx(105 * (1 + 34 / 105))


def test_edge_stages_keep_embedding_masks_and_logits() -> None:
    config = gpt3_config(48, 6144, 64)
    sbh = 4 * 2048 * 6144
    first_stage, last_stage = edge_activation_bytes(config, 4, 2048, 1, TrainingSetup(8, True))
    assert first_stage == sbh / 8
    assert last_stage == pytest.approx(4 * sbh / 8 * (1 + 51200 / 6144))
    assert edge_activation_bytes(config, 4, 2048, 4, TrainingSetup(8))[0] == 4 * sbh
