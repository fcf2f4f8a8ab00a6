"""Training costs: FLOPs, parameters, states and communication by the literature's formulas."""

import math

import pytest

from gpt.costs.inference import parameter_count, rank_costs
from gpt.costs.training import (
    RecomputeMode,
    TrainingSetup,
    communication_volume,
    forward_flops,
    recompute_flops,
    stage_parameters,
    state_bytes,
    step_flops,
)
from tests.support.cost_configs import LLAMA_7B, gpt3_config
from tests.support.models import CONFIGS, SERVED_CONFIGS


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "batch"),
    [(24, 2304, 24, 512), (48, 6144, 64, 4), (96, 12288, 96, 64), (128, 25600, 160, 3072)],
)
def test_flops_equal_the_papers_formula(layers: int, hidden: int, heads: int, batch: int) -> None:
    s = 2048
    v = 51200
    flops = forward_flops(gpt3_config(layers, hidden, heads), batch, s)
    dense_flops = 72 * batch * s * layers * hidden**2
    model = step_flops(flops, "all")
    assert model == pytest.approx(dense_flops * (1 + s / (6 * hidden) + v / (12 * layers * hidden)))
    full = model + recompute_flops(flops, "full")
    expected = 4 / 3 * dense_flops * (1 + s / (6 * hidden) + v / (16 * layers * hidden))
    assert full == pytest.approx(expected)
    selective = model + recompute_flops(flops, "selective")
    assert selective == pytest.approx(
        dense_flops * (1 + s / (3 * hidden) + v / (12 * layers * hidden)), rel=1e-9
    )


def test_frozen_weights_need_four_of_six_matmuls() -> None:
    config = gpt3_config(12, 768, 12, vocab=1)
    for sequence in (384, 768, 2048):
        flops = forward_flops(config, 1, sequence)
        layers = (flops.linears, flops.attention)
        r = sequence / config.hidden_size
        frozen, learning = (linears * layers[0] + 3 * layers[1] for linears in (2, 3))
        assert frozen / learning == pytest.approx((4 + r) / (6 + r))
        head = step_flops(flops, "adapter") - frozen
        assert head == pytest.approx(2 * flops.head)
    assert recompute_flops(flops, "selective", "adapter") == flops.attention


def test_causal_counting_halves_attention_only() -> None:
    plain = forward_flops(LLAMA_7B, 3, 1000)
    causal = forward_flops(LLAMA_7B, 3, 1000, causal=True)
    assert causal.attention == plain.attention / 2
    assert (causal.linears, causal.head) == (plain.linears, plain.head)


@pytest.mark.parametrize("name", ["layered", "mixed windows"])
@pytest.mark.parametrize("sequence", [3, 7, 40])
def test_flops_of_window_layers_count_the_pairs_in_the_window(name: str, sequence: int) -> None:
    config = SERVED_CONFIGS[name]
    flops = forward_flops(config, 2, sequence)
    # Each query of a window layer computes `window` scores, and each query of another layer all.
    pairs = sum(
        min(layer.window_size or sequence, sequence)
        for layer in config.layers
        for _ in range(sequence)
    )
    per_pair = 4 * config.num_attention_heads * config.kv_channels
    assert flops.attention == pytest.approx(2 * pairs * per_pair)
    # The causal count, as the literature's, counts half of the diagonal.
    causal_pairs = sum(
        query - key < (layer.window_size or sequence)
        for layer in config.layers
        for query in range(sequence)
        for key in range(query + 1)
    )
    diagonal = sum(min(layer.window_size or sequence, sequence) for layer in config.layers)
    causal = forward_flops(config, 2, sequence, causal=True)
    assert causal.attention == pytest.approx(2 * (causal_pairs - diagonal / 2) * per_pair)
    no_windows = config.with_fields(window_size=None, window_layers=(), window_rope=None)
    assert causal.linears == forward_flops(no_windows, 2, sequence).linears


def test_flops_count_every_width() -> None:
    """Two FLOPs for each weight and token; the router and skipped experts are counted apart."""
    for config in CONFIGS.values():
        if any(config.moe_layers):
            continue
        h = config.hidden_size
        d = config.kv_channels
        heads = config.num_attention_heads
        groups = config.num_query_groups
        fc1 = config.ffn_hidden_size * (2 if config.gated else 1)
        weights = h * d * (2 * heads + 2 * groups) + h * (fc1 + config.ffn_hidden_size)
        flops = forward_flops(config, 2, 7)
        assert flops.linears == 2 * 14 * config.num_layers * weights
        assert flops.attention == 4 * 14 * 7 * heads * d * config.num_layers


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (2, 5)])
def test_stage_parameters_equal_those_of_their_ranks(name: str, tp: int, pp: int) -> None:
    config = CONFIGS[name]
    if config.num_layers % pp or (pp > 1 and any(config.moe_layers)):
        return
    ranks = rank_costs(config, tp, pp)
    for stage in range(pp):
        parameters_max = max(rank.parameters for rank in ranks if rank.pp_rank == stage)
        assert stage_parameters(config, tp, pp, stage) == pytest.approx(parameters_max)


def test_optimizer_state_bytes_of_every_precision() -> None:
    def per_parameter(dtype: str, shards: int = 1) -> float:
        states = state_bytes(1000, "all", 0, shards, dtype)
        return (states.weights + states.gradients + states.optimizer) / 1000

    assert [per_parameter(d) for d in ("bfloat16", "float16", "float32")] == [18, 20, 16]
    assert per_parameter("bfloat16", 8) == 6 + 12 / 8
    assert per_parameter("float16", 8) == 4 + 16 / 8
    assert per_parameter("float32", 8) == 8 + 8 / 8
    frozen = state_bytes(1000, "adapter", 10)
    assert (frozen.weights, frozen.gradients, frozen.optimizer) == (2020, 40, 120)


def test_communication_volume() -> None:
    config = gpt3_config(48, 6144, 64)
    tokens = 4 * 2048
    sbh = tokens * 6144

    def volume(setup: TrainingSetup, recompute: RecomputeMode = "none", **sizes: int) -> float:
        sizes_with_defaults = {"dp": 4, "pp": 2, **sizes}
        return communication_volume(
            config,
            tokens,
            setup,
            dp=sizes_with_defaults["dp"],
            pp=sizes_with_defaults["pp"],
            recompute=recompute,
        ).tensor_parallel_per_layer

    assert volume(TrainingSetup(8)) == 8 * sbh * 7 / 8
    assert volume(TrainingSetup(8), "full") == 12 * sbh * 7 / 8
    assert volume(TrainingSetup(8, True)) == (8 + 2) * sbh * 7 / 8
    assert volume(TrainingSetup(8, True, trainable="adapter")) == 8 * sbh * 7 / 8
    assert volume(TrainingSetup(1)) == 0
    full_volume = communication_volume(config, tokens, TrainingSetup(8), dp=4, pp=2, vpp=3)
    assert full_volume.pipeline_per_boundary == 3 * sbh / 8
    assert full_volume.data_parallel == 2 * 3 / 4 * stage_parameters(config, 8, 2, 0)
    assert full_volume.embedding == math.ceil(51200 / 8) * 6144
    frozen = communication_volume(config, tokens, TrainingSetup(8, trainable="adapter"), dp=4, pp=2)
    assert (frozen.data_parallel, frozen.embedding) == (0, 0)


def test_parameter_counts_equal_published_sizes() -> None:
    sizes = {(24, 2304, 24): 1.652, (36, 4096, 32): 7.468, (105, 20480, 128): 529.6}
    for (layers, hidden, heads), billions in sizes.items():
        parameters_1e9 = parameter_count(gpt3_config(layers, hidden, heads)) / 1e9
        assert parameters_1e9 == pytest.approx(billions, rel=5e-4)
