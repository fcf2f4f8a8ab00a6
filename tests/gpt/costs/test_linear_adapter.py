"""Costs of linear adapters: equal to the tensors of random adapters on every rank."""

from collections.abc import Mapping
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.costs.linear_adapter import (
    LinearAdapterSpec,
    LinearMethod,
    check_spec,
    linear_adapter_cost,
    lowest_layer,
    served_bytes,
    stage_costs,
)
from gpt.errors import ConfigError
from gpt.linear_adapter import LinearAdapter, LinearTerm, ModelAdapter
from gpt.linear_parts import LOCAL_EXPERTS, split_key
from gpt.parallel.adaptable_linears import AdaptableLinear, adaptable_linears, aligned_bytes
from gpt.parallel.adapter_sharding import largest_rank_bytes, part_rows, shard_adapter
from gpt.parallel.pipeline_stages import stage_layers
from planning.model_presets import find_preset
from tests.support.linear_adapters import DENSE_TARGETS, EXPERT_TARGETS, random_linears

GPT2 = GPTConfig(3, 64, 8, 96, 32)
# Fewer KV heads than tensor ranks, and a gated MLP.
LLAMA = GPTConfig(
    4,
    64,
    8,
    96,
    32,
    num_query_groups=2,
    ffn_hidden_size=96,
    gated=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
)
EXPERTS = LLAMA.with_fields(
    num_experts=4,
    moe_router_topk=2,
    moe_layers=(True, False, True, False),
    moe_shared_expert_intermediate_size=32,
)
MODELS = {"gpt2": GPT2, "llama": LLAMA, "experts": EXPERTS}
# For the default targets, and with the linears of experts.
TARGETS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gpt2": ((),),
    "llama": ((),),
    "experts": ((), (*DENSE_TARGETS, *EXPERT_TARGETS), ("linear_fc2", "experts.linear_fc1")),
}
CASES = [
    (name, LinearAdapterSpec(method, 3, targets))
    for name in MODELS
    for method in get_args(LinearMethod)
    for targets in TARGETS[name]
    if method != "bottleneck" or not targets  # Experts have no bottlenecks.
]


def adapter_of(config: GPTConfig, spec: LinearAdapterSpec) -> dict[str, LinearAdapter]:
    """Random changes of whole linears, as the method makes them."""
    return random_linears(
        config,
        "lora" if spec.method == "alora" else spec.method,
        rank=spec.rank,
        targets=spec.targets or DENSE_TARGETS,
    )


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_numbers_equal_those_of_an_adapters_tensors(name: str, spec: LinearAdapterSpec) -> None:
    config = MODELS[name]
    tensors = [
        (key, tensor_name, tensor)
        for key, linear in adapter_of(config, spec).items()
        for tensor_name, tensor in linear.tensors()
    ]
    cost = linear_adapter_cost(config, spec)
    assert cost.stored == sum(tensor.numel() for _, _, tensor in tensors)
    assert cost.trained == sum(t.numel() for _, name, t in tensors if name != "weight_norm")
    factors = ("lora", "bottleneck_down", "bottleneck_up")
    matrices = [(key, t.numel()) for key, name, t in tensors if name.startswith(factors)]
    # Each token has two of four experts.
    active = sum(size // 2 if LOCAL_EXPERTS in key else size for key, size in matrices)
    assert cost.flops_per_token == 2 * active


@pytest.mark.parametrize(("name", "spec"), CASES)
@pytest.mark.parametrize(
    ("tp", "pp", "ep"),
    [
        (1, 1, 1),
        (4, 2, 1),
        (4, 1, 2),
        *(
            pytest.param(*split, marks=pytest.mark.slow)
            for split in ((2, 1, 1), (1, 3, 1), (2, 1, 2))
        ),
    ],
)
def test_memory_of_a_server_equals_that_of_an_adapters_terms(
    name: str, spec: LinearAdapterSpec, tp: int, pp: int, ep: int
) -> None:
    config = MODELS[name]
    stages = [chunks[0] for chunks in stage_layers(config.num_layers, pp)]
    adapter = adapter_of(config, spec)
    ep = ep if config.num_experts else 1
    terms = [
        shard_adapter(adapter, config, layers, rank=rank, tp=tp, ep=ep)
        for rank in range(tp)
        for layers in stages
    ]
    for itemsize in (2, 4):
        want = largest_rank_bytes(adapter, config, stages, tp=tp, itemsize=itemsize, ep=ep)
        assert served_bytes(config, spec, tp, pp, itemsize, ep) == want
        assert max(map(partial(bytes_of, itemsize=itemsize), terms)) == want


def bytes_of(adapter: ModelAdapter, itemsize: int) -> int:
    return sum(
        aligned_bytes(tensor.numel() * itemsize)
        for terms in adapter.values()
        for term in terms
        for tensor in term.tensors()
    )


def test_an_adapter_of_one_expert_needs_memory_on_the_ranks_of_the_expert() -> None:
    spec = LinearAdapterSpec("lora", 3, TARGETS["experts"][-1])
    adapter = {
        key: linear
        for key, linear in adapter_of(EXPERTS, spec).items()
        if "local_experts.3.linear_fc1" in key
    }
    assert len(adapter) == 2
    for tp, ep, expert_tp in ((1, 1, 1), (2, 2, 1), (4, 2, 2), (1, 4, 1)):
        rank_bytes = [
            bytes_of(shard_adapter(adapter, EXPERTS, range(4), rank=rank, tp=tp, ep=ep), 2)
            for rank in range(max(tp, ep))
        ]
        assert [size > 0 for size in rank_bytes[-expert_tp:]] == [True] * expert_tp
        assert ep == 1 or not any(rank_bytes[:-expert_tp])
        assert largest_rank_bytes(adapter, EXPERTS, [range(4)], tp=tp, ep=ep, itemsize=2) == max(
            rank_bytes
        )


@pytest.mark.parametrize(("name", "spec"), CASES)
@pytest.mark.parametrize(("tp", "pp", "ep"), [(2, 2, 1), (4, 1, 1), (4, 1, 2), (2, 2, 2)])
def test_numbers_of_each_stage_equal_those_of_its_shards(
    name: str, spec: LinearAdapterSpec, tp: int, pp: int, ep: int
) -> None:
    config = MODELS[name]
    ep = ep if config.num_experts else 1
    adapter = adapter_of(config, spec)
    costs = stage_costs(config, spec, tp, pp, ep=ep)
    no_tensors = LinearTerm()
    for (layers,), cost in zip(stage_layers(config.num_layers, pp), costs, strict=True):
        for rank in range(tp):
            terms = shard_adapter(adapter, config, layers, rank=rank, tp=tp, ep=ep)
            values = [
                (linear, name, tensor.numel())
                for linear, linear_terms in terms.items()
                for term in linear_terms
                for name, tensor in {**vars(term.bottleneck or no_tensors), **vars(term)}.items()
                if isinstance(tensor, Tensor)
            ]
            # A magnitude and a norm are one factor in a term.
            assert cost.trained == sum(size for _, _, size in values)
            assert cost.replicated == sum(
                size
                for linear, name, size in values
                if (
                    name == ("lora_b" if linear.endswith(("proj", "fc2")) else "lora_a")
                    and not (LOCAL_EXPERTS in linear and ep == tp)
                )
                or spec.method == "bottleneck"
            )


def test_parts_of_fused_linears_have_their_own_matrices() -> None:
    spec = LinearAdapterSpec("lora", 4, ("linear_qkv.query", "linear_qkv.value", "linear_fc1.up"))
    linears = adaptable_linears(LLAMA)
    keys = [
        f"{name}.{part}"
        for name, linear in linears.items()
        for part in {"linear_qkv": ("query", "value"), "linear_fc1": ("up",)}.get(linear.module, ())
    ]
    adapter = {key: lora(linears, key, 4) for key in keys}
    numbers = sum(t.numel() for linear in adapter.values() for _, t in linear.tensors())
    assert linear_adapter_cost(LLAMA, spec).trained == numbers
    for tp in (1, 2, 4):
        want = largest_rank_bytes(adapter, LLAMA, [range(4)], tp=tp, itemsize=2)
        assert served_bytes(LLAMA, spec, tp, 1, 2) == want


def lora(linears: Mapping[str, AdaptableLinear], key: str, rank: int) -> LinearAdapter:
    name, part = split_key(key)
    outputs = len(part_rows(linears[name], part, LLAMA))
    inputs = linears[name].in_features
    return LinearAdapter(torch.ones(rank, inputs), torch.ones(outputs, rank))


def test_layers_select_the_changed_layers() -> None:
    spec = LinearAdapterSpec("lora", 4, (), (1, 3))
    assert lowest_layer(LLAMA, spec) == 1
    layer_cost = linear_adapter_cost(LLAMA, spec, [3])
    assert linear_adapter_cost(LLAMA, spec, [0, 2]).trained == 0
    assert linear_adapter_cost(LLAMA, spec).trained == 2 * layer_cost.trained
    assert [cost.trained for cost in stage_costs(LLAMA, spec, 1, 4)] == [
        *(0, layer_cost.trained, 0, layer_cost.trained),
    ]


def test_sizes_of_published_models() -> None:
    """The bounds of bf16 adapters of rank 16 with separate q, k, v, gate and up matrices."""
    separate = (
        *("linear_qkv.query", "linear_qkv.key", "linear_qkv.value", "linear_proj"),
        *("linear_fc1.gate", "linear_fc1.up", "linear_fc2"),
    )
    for preset, megabytes in (("llama3-8b", 83.9), ("llama3-70b", 414)):
        spec = LinearAdapterSpec("lora", 16, separate)
        assert served_bytes(find_preset(preset), spec, 1, 1, 2) / 1e6 == pytest.approx(
            megabytes, rel=0.005
        )
    gpt2 = GPTConfig(12, 768, 12, 50257, 1024)
    spec = LinearAdapterSpec("lora", 16, (*separate[:4], "linear_fc1", "linear_fc2"))
    assert served_bytes(gpt2, spec, 1, 1, 2) / 1e6 == pytest.approx(5.31, rel=0.005)


@pytest.mark.parametrize(
    ("config", "targets", "layers", "message"),
    [
        (GPT2, ("linear_q",), (), "linear_q, which this model does not have"),
        (GPT2, ("linear_fc1.gate",), (), "linear_fc1.gate, which this model does not have"),
        (LLAMA, ("linear_fc1", "linear_fc1.up"), (), "linear_fc1 and its part linear_fc1.up"),
        (GPT2, (), (3,), "layer 3, but the model has 3 layers"),
        (EXPERTS, ("experts.linear_fc1",), (1,), "changes no linear"),
    ],
)
def test_linears_that_the_model_does_not_have_are_refused(
    config: GPTConfig, targets: tuple[str, ...], layers: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_spec(config, LinearAdapterSpec("lora", 4, targets, layers))


def test_kept_numbers_of_lora_are_the_inputs_and_the_low_rank_activations() -> None:
    cost = linear_adapter_cost(GPT2, LinearAdapterSpec("lora", 16), [0])
    h, ffn = 64, 256
    assert cost.activations_per_token == 3 * h + ffn + 4 * 16
    assert cost.attention_outputs_per_token == h
    sharded = linear_adapter_cost(GPT2, LinearAdapterSpec("lora", 16), [0], tp=4)
    assert sharded.activations_per_token == 2 * h + (h + ffn) // 4 + 4 * 16
    column = (h + 3 * h // 4) + (h + ffn // 4)
    row = (h // 4 + h) + (ffn // 4 + h)
    assert sharded.flops_per_token == 2 * 16 * (column + row)
