"""Native experts on a CPU equal torch's loop over the experts, in packed models too."""

import logging
import math

import pytest
import torch

from gpt.cpu.kernels import ISA_LEVELS, force_isa_level, isa_level
from gpt.cpu.packed_linear import supports_weight
from gpt.cpu_inference.weight_packing import pack_weights, weight_bytes
from gpt.linear.cpu_experts import CpuExperts
from gpt.linear_adapter import AdaptedRows
from gpt.model.gpt_model import GPT
from gpt.model.moe import ExpertsBackend, MoELayer, TorchExperts
from gpt.parallel.mesh import Mesh
from tests.support.experts_cases import CONFIGS, ROW_COUNTS, SMALL, moe_layer, routings
from tests.support.linear_adapters import mixed_expert_rows
from tests.support.models import CONFIGS as MODELS
from tests.support.models import EXPERTS, build
from tests.support.packed_models import STEPS, packed_model, run_step
from tests.support.ranks import ranks

IDS = torch.arange(2, 26).view(2, 12)
# The largest difference, relative to the largest output, between sums of fp32 in different orders.
FP32_ERROR_MAX = 5e-6
# One layer with experts, after attention that the fused decoder computes bit for bit.
FUSED = EXPERTS.with_fields(
    num_layers=1, moe_layers=(True,), position_embedding_type="learned_absolute"
)
LIMITED = {"activation_func_clamp_value": 0.6, "glu_linear_offset": 1.0}
CPU_CONFIGS = CONFIGS | {"limited gates": SMALL.with_fields(activation="quick_gelu", **LIMITED)}
FUSED_CONFIGS = {
    "shared expert and gate": FUSED,
    "no gate": FUSED.with_fields(moe_shared_expert_gate=False),
    "no shared expert": FUSED.with_fields(
        moe_shared_expert_gate=False, moe_shared_expert_intermediate_size=0
    ),
    "sigmoid": FUSED.with_fields(
        moe_router_score_function="sigmoid",
        moe_router_expert_bias=True,
        moe_router_topk_scaling_factor=2.5,
    ),
    "router bias": FUSED.with_fields(moe_router_bias=True, moe_router_pre_softmax=True),
    "parallel residual": FUSED.with_fields(parallel_residual=True),
    "limited gates": FUSED.with_fields(activation="quick_gelu", **LIMITED),
    "no biases": FUSED.with_fields(mlp_bias=False, gated=False, activation="relu2"),
}
# From 24 rows of an expert on, the library interleaves them.
ADAPTED_CASES = [
    (name, 5) if name != "many experts" else pytest.param(name, 5, marks=pytest.mark.slow)
    for name in CPU_CONFIGS
] + [
    (name, 150) if name == "limited gates" else pytest.param(name, 150, marks=pytest.mark.slow)
    for name in CPU_CONFIGS
]
pytestmark = pytest.mark.skipif(
    not supports_weight(torch.empty(32, 32, dtype=torch.bfloat16)),
    reason="the C library has no bf16 GEMM for this CPU",
)


def backends(model: GPT) -> set[type[ExpertsBackend]]:
    layers = (layer.mlp for layer in model.decoder_layers)
    return {type(layer.experts_backend) for layer in layers if isinstance(layer, MoELayer)}


def use_torch_experts(model: GPT) -> None:
    """Compute the experts one after the other, from the packed weights."""
    for layer in model.decoder_layers:
        if isinstance(layer.mlp, MoELayer):
            moe = layer.mlp
            moe.use_experts_backend(
                TorchExperts(moe.local_experts, moe.router, moe.config, moe.mesh)
            )


def std(error: torch.Tensor) -> float:
    return math.sqrt(error.double().square().mean())


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("name", CPU_CONFIGS)
def test_native_experts_are_as_accurate_as_the_loop(name: str, rows: int) -> None:
    config = CPU_CONFIGS[name]
    model, exact = build(config, dtype=torch.bfloat16), build(config)
    for values, weight in zip(exact.parameters(), model.parameters(), strict=True):
        values.data.copy_(weight)  # Rounded to bf16.
    layer, exact_experts = moe_layer(model), moe_layer(exact).experts_backend
    looped = layer.experts_backend
    x = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    cases = {key: value.bfloat16() for key, value in routings(rows, config.num_experts).items()}
    plain = {key: looped.forward(x, logits, rows) for key, logits in cases.items()}
    pack_weights(model)
    assert type(layer.experts_backend) is CpuExperts
    for key, logits in cases.items():
        want = exact_experts.forward(x.double(), logits.double(), rows)
        native = layer.experts_backend.forward(x, logits, rows)
        assert std(native - want) < 1.1 * std(plain[key] - want), key


def test_equal_scores_choose_the_experts_of_the_loop() -> None:
    model = build(SMALL, dtype=torch.bfloat16)
    pack_weights(model)
    layer = moe_layer(model)
    x = torch.randn(5, SMALL.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = torch.zeros(5, SMALL.num_experts, dtype=torch.bfloat16)
    native = layer.experts_backend.forward(x, logits, 5)
    use_torch_experts(model)
    looped = layer.experts_backend.forward(x, logits, 5)
    assert std(native - looped) < 0.01 * std(looped)


@pytest.mark.parametrize("name", ["experts", "sigmoid experts"])
def test_a_packed_model_is_as_close_to_fp64_as_with_the_loop(name: str) -> None:
    exact = build(MODELS[name]).logits(IDS)
    model = build(MODELS[name], dtype=torch.bfloat16)
    pack_weights(model)
    assert backends(model) == {CpuExperts}
    native = model.logits(IDS)
    use_torch_experts(model)
    assert std(native - exact) < 1.2 * std(model.logits(IDS) - exact)


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("name", CPU_CONFIGS)
def test_fp32_experts_equal_the_loop(name: str, rows: int) -> None:
    config = CPU_CONFIGS[name]
    model = build(config, dtype=torch.float32)
    layer = moe_layer(model)
    looped = layer.experts_backend
    x = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(0))
    cases = routings(rows, config.num_experts)
    plain = {key: looped.forward(x, logits, rows) for key, logits in cases.items()}
    plain_output = layer(x, rows)
    pack_weights(model)
    assert type(layer.experts_backend) is CpuExperts
    for key, logits in cases.items():
        native = layer.experts_backend.forward(x, logits, rows)
        assert (native - plain[key]).abs().max() < FP32_ERROR_MAX * plain[key].abs().max(), key
    assert (layer(x, rows) - plain_output).abs().max() < FP32_ERROR_MAX * plain_output.abs().max()


def prepared(model: GPT, adapted_rows: tuple[AdaptedRows, ...]) -> tuple[AdaptedRows, ...]:
    return tuple(AdaptedRows(model.prepare_adapter(x.adapter), x.rows) for x in adapted_rows)


@pytest.mark.parametrize(("name", "rows"), ADAPTED_CASES)
def test_fp32_experts_apply_adapters_as_the_loop(name: str, rows: int) -> None:
    config = CPU_CONFIGS[name]
    model = build(config, dtype=torch.float32)
    layer, adapted_rows = moe_layer(model), mixed_expert_rows(model, rows)
    x = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(0))
    looped = layer(x, rows, None, adapted_rows)
    pack_weights(model)
    assert type(layer.experts_backend) is CpuExperts
    native, base = layer(x, rows, None, prepared(model, adapted_rows)), layer(x, rows)
    assert (native - looped).abs().max() < FP32_ERROR_MAX * looped.abs().max()
    assert std(native - base) > 0.1 * std(base)
    last = -(-3 * rows // 4)
    assert torch.equal(native[last:], base[last:])


@pytest.mark.parametrize("isa", ISA_LEVELS[1:])
@pytest.mark.parametrize(("name", "rows"), ADAPTED_CASES)
def test_native_experts_apply_adapters_as_accurately_as_the_loop(
    name: str, rows: int, isa: str
) -> None:
    config = CPU_CONFIGS[name]
    force_isa_level(isa)
    try:
        if isa_level() != isa:
            pytest.skip(f"this CPU has no {isa}")
        model, exact = build(config, dtype=torch.bfloat16), build(config)
        for values, weight in zip(exact.parameters(), model.parameters(), strict=True):
            values.data.copy_(weight)
        x = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(0))
        x = x.bfloat16()
        exact_experts = moe_layer(exact).experts_backend
        experts = config.num_experts
        logits = torch.randn(rows, experts, generator=torch.Generator().manual_seed(1)).bfloat16()
        mixed = mixed_expert_rows(model, rows)
        # The same terms, rounded to bf16.
        wide = tuple(
            AdaptedRows(
                {
                    key: [term.map_tensors(torch.Tensor.double) for term in terms]
                    for key, terms in x.adapter.items()
                },
                x.rows,
            )
            for x in mixed
        )
        want = exact_experts.forward(x.double(), logits.double(), rows, wide)
        looped = moe_layer(model).experts_backend.forward(x, logits, rows, mixed)
        pack_weights(model)
        backend = moe_layer(model).experts_backend
        native = backend.forward(x, logits, rows, prepared(model, mixed))
        base = backend.forward(x, logits, rows)
    finally:
        force_isa_level(None)
    assert type(backend) is CpuExperts
    assert std(native - want) < 1.1 * std(looped - want)
    assert std(native.double() - base) > 0.1 * std(base)
    last = -(-3 * rows // 4)
    assert torch.equal(native[last:], base[last:])


@pytest.mark.parametrize("kind", ["one", "several", "all kinds"])
@pytest.mark.parametrize("name", FUSED_CONFIGS)
def test_a_fused_layer_is_as_accurate_as_the_modules(name: str, kind: str) -> None:
    model, exact = packed_model(FUSED_CONFIGS[name]), build(FUSED_CONFIGS[name])
    plain = build(FUSED_CONFIGS[name], dtype=torch.bfloat16)
    for values, weight in zip(exact.parameters(), plain.parameters(), strict=True):
        values.data.copy_(weight)  # Rounded to bf16.
    want, _ = run_step(exact, *STEPS[kind], fused=False)
    fused, _ = run_step(model, *STEPS[kind], fused=True)
    layerwise, _ = run_step(model, *STEPS[kind], fused=False)
    assert std(layerwise - want) < 0.02 * std(want)
    assert std(fused - want) < 1.15 * std(layerwise - want)


def check_tensor_parallel_model(_rank: int) -> None:
    # Each of two ranks has 12 of the 24 columns of an expert.
    exact = build(EXPERTS).logits(IDS)
    model = build(EXPERTS, Mesh.create(2, 1), dtype=torch.bfloat16)
    pack_weights(model)
    assert backends(model) == {CpuExperts}
    native = model.logits(IDS)
    use_torch_experts(model)
    assert std(native - exact) < 1.2 * std(model.logits(IDS) - exact)


def test_a_split_model_adds_the_biases_once() -> None:
    ranks(2, check_tensor_parallel_model)


def check_expert_parallel_model(_rank: int, sizes: list[tuple[int, int]]) -> None:
    config, rows = SMALL.with_fields(num_experts=8), 40
    exact = moe_layer(build(config, dtype=torch.bfloat16).double()).experts_backend
    x = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    for tp, ep in sizes:
        model = build(config, Mesh.create(tp, 1, ep=ep), dtype=torch.bfloat16)
        layer = moe_layer(model)
        looped = layer.experts_backend
        cases = {key: value.bfloat16() for key, value in routings(rows, 8).items()}
        plain = {key: looped.forward(x, logits, rows) for key, logits in cases.items()}
        pack_weights(model)
        assert type(layer.experts_backend) is CpuExperts
        for key, logits in cases.items():
            want = exact.forward(x.double(), logits.double(), rows)
            native = layer.experts_backend.forward(x, logits, rows)
            assert std(native - want) < 1.1 * std(plain[key] - want), (key, tp, ep)


def test_ranks_compute_whole_experts() -> None:
    ranks(2, check_expert_parallel_model, [(2, 2), (1, 2)])


@pytest.mark.slow
def test_ranks_compute_parts_of_some_experts() -> None:
    ranks(4, check_expert_parallel_model, [(4, 2), (2, 4), (1, 4)])


def test_no_second_copy_of_the_weights_stays() -> None:
    model = build(SMALL, dtype=torch.bfloat16)
    pack_weights(model)
    names = [name for name, _ in model.named_parameters()]
    is_packed = (".experts." in name or ".router." in name for name in names)
    assert not any(
        packed and name.endswith("weight") for packed, name in zip(is_packed, names, strict=True)
    )
    packed_bytes = weight_bytes(model)
    use_torch_experts(model)
    assert weight_bytes(model) == packed_bytes


def test_the_reason_for_the_loop_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = build(SMALL, dtype=torch.float32)
    force_isa_level("plain")
    try:
        with caplog.at_level(logging.INFO):
            pack_weights(model)
    finally:
        force_isa_level(None)
    assert backends(model) == {TorchExperts}
    assert "event=experts backend=torch" in caplog.text
    assert "the experts' weights are not packed by the C library" in caplog.text
