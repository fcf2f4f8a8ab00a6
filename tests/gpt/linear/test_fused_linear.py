"""Fused layers equal unfused layers, computed with the torch references of the kernels."""

import weakref
from typing import Any

import pytest
import torch

from gpt.config import GPTConfig
from gpt.fp8_rows import Fp8Rows
from gpt.generation.generate import generate
from gpt.linear import fused_linear, norm_activation
from gpt.linear.fp8_linear import Fp8Matmul, quantize_weight
from gpt.linear.fused_linear import PreparedRows, fuse_layers, unsupported_reason
from gpt.linear.norm_activation import NormParameters, add_norm, quantize_e4m3, quantize_rows
from gpt.model.linear import Linear
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams
from tests.support.models import CLASSIC, CONFIGS, EXPERTS, MODERN, ODD, build
from tests.support.ranks import ranks
from tests.support.tolerance import assert_within, roundoff

IDS = torch.arange(2, 26).view(2, 12)
PROMPTS = [[5, 6, 7], [1], list(range(30, 45))]
EXACT = 1e-9


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fused_model_equals_the_unfused_one(name: str) -> None:
    model = build(CONFIGS[name])
    logits = model.logits(IDS)
    rule = SamplingParams(max_new_tokens=8)
    tokens = [completion.token_ids for completion in generate(model, PROMPTS, rule)]
    assert fuse_layers(model) == 0
    assert (model.logits(IDS) - logits).abs().max() < EXACT
    fused_tokens = [completion.token_ids for completion in generate(model, PROMPTS, rule)]
    assert fused_tokens == tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_bf16_is_as_accurate_as_unfused_bf16(name: str) -> None:
    exact = build(CONFIGS[name]).logits(IDS)
    model = build(CONFIGS[name], dtype=torch.bfloat16)
    plain = model.logits(IDS)
    fuse_layers(model)
    assert (model.logits(IDS) - exact).std() < 1.2 * (plain - exact).std()


def check_tensor_parallel_models(_rank: int) -> None:
    mesh = Mesh.create(2, 1)
    for config in (CLASSIC, MODERN, ODD, EXPERTS):
        model = build(config, mesh)
        fuse_layers(model)
        assert (model.logits(IDS) - build(config).logits(IDS)).abs().max() < EXACT


def test_a_split_model_adds_bias_and_residual_once() -> None:
    ranks(2, check_tensor_parallel_models)


@pytest.mark.parametrize(
    ("config", "separate_norms"),
    [
        (CLASSIC, 1),  # The embedding's output.
        (ODD, 1 + ODD.num_layers),  # With a parallel residual two linears norm the same rows.
        (EXPERTS, 3),  # Layer 0, and layers 1 and 3, which follow experts.
    ],
)
def test_the_residual_epilogue_norms_rows_for_the_next_linear(
    config: GPTConfig, separate_norms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_prenormed_rows: list[bool] = []
    consume = PreparedRows.consume

    def recording_consume(self: PreparedRows, x: Any) -> Any:
        rows = consume(self, x)
        has_prenormed_rows.append(rows is not None)
        return rows

    monkeypatch.setattr(PreparedRows, "consume", recording_consume)
    model = build(config)
    fuse_layers(model)
    model.logits(IDS)
    assert has_prenormed_rows.count(False) == separate_norms


class Kernels:
    """Stand-in for the Triton kernels: records launches and runs the torch references."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launched: list[str] = []
        self._in_reference = False  # A reference is running, which must not launch kernels.

        def kernels_for(_x: Any, _width_max: int | None = None) -> Any:
            return None if self._in_reference else self

        patch.setattr(norm_activation, "_triton_module_for", kernels_for)

    def __getattr__(self, name: str) -> Any:
        def launch(*arguments: Any) -> Any:
            self.launched.append(name)
            self._in_reference = True
            reference = getattr(norm_activation, name)
            if name in ("add_norm", "norm_rows"):
                output = reference(*arguments[:-1], fp8=arguments[-1])
            else:
                output = reference(*arguments)
            self._in_reference = False
            return output

        return launch


def test_a_fused_layer_launches_the_minimum_of_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(CLASSIC, dtype=torch.bfloat16)
    fuse_layers(model, range(1, 4))
    kernels = Kernels(monkeypatch)
    model.logits(IDS)
    bf16_launches = ["add_norm", "activate_rows", "add_norm"]
    fp8_launches = ["quantize_rows", "add_norm"] * 2
    assert kernels.launched == ["norm_rows", *bf16_launches, *fp8_launches * 3, *bf16_launches]


def test_prenormed_rows_are_consumed_once_by_their_own_rows() -> None:
    prenormed, x, rows = PreparedRows(), torch.ones(2, 3), torch.zeros(2, 3)
    prenormed.store(x, rows)
    assert prenormed.consume(x.clone()) is None
    assert prenormed.consume(x) is None, "a call with other rows must discard the stored rows"
    prenormed.store(x, rows)
    assert prenormed.consume(x) is rows
    assert prenormed.consume(x) is None


@pytest.mark.parametrize("name", CONFIGS)
def test_fp8_layers_stay_close_to_the_unquantized_model(name: str) -> None:
    """Both factors have 3 bits of mantissa; the logits have a standard deviation of at least 5."""
    config = CONFIGS[name]
    exact = build(config).logits(IDS)
    model = build(config, dtype=torch.bfloat16)
    fuse_layers(model, range(1, config.num_layers - 1))
    drift = (model.logits(IDS) - exact).std() / exact.std()
    assert 0.001 < drift < 0.25


def check_tensor_parallel_fp8_models(_rank: int) -> None:
    """Each rank has scales of its own channels, so its sums differ by rounding errors."""
    mesh = Mesh.create(2, 1)
    for config in (CLASSIC, MODERN, EXPERTS):
        exact = build(config).logits(IDS)
        model = build(config, mesh, dtype=torch.bfloat16)
        fuse_layers(model, range(1, config.num_layers - 1))
        assert (model.logits(IDS) - exact).std() < 0.25 * exact.std()


def test_fp8_layers_support_tensor_parallelism() -> None:
    ranks(2, check_tensor_parallel_fp8_models)


def test_each_weight_is_freed_before_the_next_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(EXPERTS, dtype=torch.bfloat16)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    weights = [weakref.ref(module.weight) for module in linears]
    size = sum(module.weight.nbytes for module in linears)
    live_weights: list[int] = []

    class RecordingMatmul(Fp8Matmul):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            live_weights.append(sum(weight() is not None for weight in weights))
            super().__init__(*arguments, **keywords)

    monkeypatch.setattr(fused_linear, "Fp8Matmul", RecordingMatmul)
    freed = fuse_layers(model, model.layers)
    assert live_weights == list(range(len(weights), 0, -1))
    assert not any("linear" in name and ".weight" in name for name, _ in model.named_parameters())
    fp8_bytes = sum(module.backend.matmul.nbytes for module in linears)  # type: ignore[attr-defined]
    assert freed == size - fp8_bytes


def test_unsupported_models_have_a_reason() -> None:
    assert unsupported_reason(build(CLASSIC)) == "the model's dtype is torch.float64"
    trained = build(CLASSIC, dtype=torch.float32, trainable=True)
    assert unsupported_reason(trained) == "the model has trainable weights"
    assert unsupported_reason(build(CLASSIC, dtype=torch.float32)) is None


# ----------------------------------------------------------------------------------- fp8 matmul


def dequantized(x: Fp8Rows) -> torch.Tensor:
    """The dequantized rows in fp64."""
    return x.values.double() * x.scales.double()


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 64, 48), (1, 33, 100), (40, 16, 16)])
def test_fp8_matmul_error_is_within_rounding(shape: tuple[int, int, int]) -> None:
    rows, columns, channels = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, channels, generator=generator, dtype=torch.float64)
    weight = torch.randn(columns, channels, generator=generator, dtype=torch.float64)
    bias = torch.randn(columns, generator=generator, dtype=torch.float64)
    matmul = Fp8Matmul(weight.float())
    got = matmul(x.float(), bias.float(), None).double()
    # Each factor keeps 4 bits, so its error is at most 1/16. The error of a subnormal number is at
    # most half of the smallest step, which is 2 ** -9 of a scale.
    x_half_step = quantize_rows(x.float()).scales.double() * 2**-10
    weight_half_step = matmul.weight.scales[:columns].double() * 2**-10
    x_error = x.abs() / 16 + x_half_step
    weight_error = weight.abs() / 16 + weight_half_step
    limit = x_error @ weight.abs().t() + (x.abs() + x_error) @ weight_error.t()
    assert bool(((got - (x @ weight.t() + bias)).abs() <= limit + 1e-5).all())
    # The output equals the product of the dequantized factors, except for fp32's rounding.
    exact = (
        dequantized(quantize_rows(x.float())) @ dequantized(matmul.weight).t()[:, :columns] + bias
    )
    assert torch.allclose(got, exact, rtol=1e-5, atol=1e-5)


def test_weight_scales_are_per_column() -> None:
    weight = torch.tensor([[1.0, -448.0], [0.25, 0.5], [0.0, 0.0]])
    quantized = quantize_weight(weight)
    assert quantized.values.shape == (16, 16)
    assert quantized.scales[:2].flatten().tolist() == pytest.approx([1.0, 0.5 / 448])
    assert torch.allclose(dequantized(quantized)[:3, :2], weight.double(), rtol=1e-6)
    assert not quantized.values.float()[3:].any() and not quantized.values.float()[:, 2:].any()


def test_non_finite_rows_do_not_leak_into_other_rows() -> None:
    x = torch.randn(4, 20)
    x[1, 3], x[2, 4] = float("nan"), float("inf")
    matmul = Fp8Matmul(torch.randn(8, 20))
    y = matmul(x, None, None)
    assert bool(y[[0, 3]].isfinite().all())
    assert not bool(y[[1, 2]].isfinite().any())
    alone = matmul(x[3:], None, None)
    assert torch.equal(alone[0], y[3])


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu2", "relu", "gated_silu"])
def test_an_activation_can_be_deferred_to_the_next_matmul(activation: str) -> None:
    x, gated = torch.randn(5, 24), activation.startswith("gated_")
    first, second = torch.randn(64, 24), torch.randn(16, 32 if gated else 64)
    deferring_matmul = Fp8Matmul(first, deferred_activation=activation)
    activating_matmul = Fp8Matmul(second, input_activation=activation)
    preactivation = deferring_matmul(x, None, activation)
    assert torch.equal(preactivation, Fp8Matmul(first)(x, None, None))
    activated = Fp8Matmul(first)(x, None, activation)
    want = Fp8Matmul(second)(activated, None, None)
    assert torch.allclose(activating_matmul(preactivation, None, None), want, rtol=1e-4, atol=1e-3)


def test_torch_fp8_matmul_on_a_cpu_equals_the_reference() -> None:
    x, weight = quantize_e4m3(torch.randn(6, 64)), quantize_weight(torch.randn(32, 64))
    try:
        got = torch._scaled_mm(
            x.values,
            weight.values.t(),
            scale_a=x.scales,
            scale_b=weight.scales.t(),
            out_dtype=torch.bfloat16,
        )
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch {torch.__version__}: {str(error).splitlines()[0]}")
    assert torch.allclose(
        got.double(), dequantized(x) @ dequantized(weight).t(), rtol=1e-2, atol=1e-1
    )


def test_a_residual_sum_is_rounded_once_before_the_norm() -> None:
    x, y = (torch.randn(4, 32).bfloat16() for _ in range(2))
    bias = torch.randn(32).bfloat16()
    norm = NormParameters(torch.rand(32) + 0.5, torch.randn(32), 1e-5, is_rms=False)
    total, rows = add_norm(y, bias, x, norm)
    assert torch.equal(total, (x.double() + y.double() + bias.double()).bfloat16())
    assert isinstance(rows, torch.Tensor)
    fp64_total = total.double()
    centred = fp64_total - fp64_total.mean(-1, keepdim=True)
    want = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert isinstance(norm.shift, torch.Tensor)
    want = want * norm.scale.double() + norm.shift.double()
    # Computed in fp32 and rounded once; a row of 32, a root and a scale cost about 40 roundings.
    error = 40 * roundoff(torch.float32) * (want.abs() + norm.shift.double().abs() + 1)
    assert_within(rows, want, error + roundoff(rows.dtype) * (want.abs() + error))
