"""INT8 weights: GEMMs against a slow reference, whole models, and the quantization check."""

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import serving
from gpt.cpu import int8_linear, packed_linear
from gpt.cpu.int8_linear import CODE_MAX, GROUP_CHANNELS, Int8PackedLinear
from gpt.cpu_inference.weight_packing import is_batch_invariant, pack_int8_weights, weight_bytes
from gpt.errors import ConfigError
from gpt.generation.generate import generate
from gpt.linear.cpu_linear import CpuLinear
from gpt.linear.quantization_check import DIVERGENCE_MAX
from gpt.model.activation import ACTIVATIONS
from gpt.model.gpt_model import GPT
from gpt.model.linear import ColumnParallelLinear, Linear
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.request import Ask
from serving.worker.startup import prepare_weights
from tests.support.models import CLASSIC, CONFIGS, EXPERTS, MODERN, build
from tests.support.packed_models import MORE, STEPS, packed_model, run_step
from tests.support.ranks import ranks
from tests.support.tolerance import assert_within, epilogue_limits

DEMO = Path("examples/demo/checkpoint")

if not int8_linear.has_int8_gemm():
    pytest.skip("this machine has no int8 GEMM", allow_module_level=True)


def pack_linear(
    weight: Tensor,
    kind: type[packed_linear.PackedLinear] = Int8PackedLinear,
    *,
    fp32_output: bool = True,
    gated: bool = False,
) -> packed_linear.PackedLinear:
    if kind is packed_linear.PackedLinear:
        size = packed_linear.packed_numel(weight, gated=gated)
        memory = torch.empty(size, dtype=torch.bfloat16)
    else:
        size = int8_linear.packed_bytes(weight, gated=gated)
        memory = torch.empty(size, dtype=torch.uint8)
    return kind(weight, memory, fp32_output=fp32_output, gated=gated)


def reference_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """The product of int8-quantized rows and an int8-quantized weight, with exact sums in fp64."""

    def channel_groups(matrix: Tensor) -> Tensor:
        groups = -(-matrix.shape[1] // GROUP_CHANNELS)
        padded = F.pad(matrix, (0, groups * GROUP_CHANNELS - matrix.shape[1]))
        return padded.view(len(matrix), groups, GROUP_CHANNELS).float()

    column_scales = weight.float().abs().amax(1) / CODE_MAX
    codes = channel_groups((weight.float() / column_scales.clamp(min=1e-38)[:, None]).round())
    rows = channel_groups(x)
    largest = rows.abs().amax(-1)
    # torch computes a Python number over a tensor as the reciprocal times the number.
    inverse_scales = torch.where(largest > 1e-30, torch.tensor(float(CODE_MAX)) / largest, 0)
    row_codes = (rows * inverse_scales[..., None]).round()
    sums = torch.einsum("rgk,cgk->rcg", row_codes.double(), codes.double())
    return (sums * (largest / CODE_MAX).double()[:, None]).sum(-1) * column_scales.double()


@given(
    st.sampled_from([0, 1, 2, 5, 6, 7, 12, 13, 31, 100]),
    st.sampled_from([(2, 1), (6, 31), (64, 32), (97, 33), (130, 100), (515, 70)]),
    st.sampled_from([None, *ACTIVATIONS]),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@settings(max_examples=100, deadline=None)
def test_gemm_equals_the_reference_and_rows_are_independent(
    rows: int, shape: tuple[int, int], activation: str | None, options: tuple[bool, bool, bool]
) -> None:
    channels, columns = shape
    has_bias, has_residual, fp32_output = options
    gated = activation is not None and activation.startswith(packed_linear.GATED_PREFIX)
    generator = torch.Generator().manual_seed(rows * channels)
    weight = torch.randn(columns * (1 + gated), channels, generator=generator).bfloat16()
    x = torch.randn(rows, channels, generator=generator)
    x = (x * torch.randn(rows, channels, generator=generator).exp()).bfloat16()
    bias = torch.randn(len(weight), generator=generator).bfloat16() if has_bias else None
    residual = torch.randn(rows, columns, generator=generator).bfloat16() if has_residual else None
    linear = pack_linear(weight, fp32_output=fp32_output, gated=gated)
    got = linear(x, bias, activation, residual)
    assert got.dtype == (torch.float32 if fp32_output else torch.bfloat16)
    # The sums within a group of channels are sums of integers, and exact. The sums over groups are
    # in fp32; the scales of rows and columns, and products with them, are rounded too.
    want, limit = epilogue_limits(
        reference_matmul(x, weight),
        reference_matmul(x.abs(), weight.abs()),
        -(-channels // GROUP_CHANNELS) + 4,
        bias=bias,
        activation=activation,
        residual=residual,
        dtype=got.dtype,
    )
    assert_within(got, want, limit)
    for row in range(rows)[::5]:
        row_residual = None if residual is None else residual[row : row + 1]
        alone = linear(x[row : row + 1], bias, activation, row_residual)
        assert torch.equal(alone[0], got[row])


def test_rows_are_normed_before_quantization() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(n, 130, generator=generator).bfloat16() for n in (40, 7))
    scale, shift = torch.randn(2, 130, generator=generator)
    norm = packed_linear.CpuNorm(scale, shift, 1e-5, rms=False)
    identity = pack_linear(torch.eye(130).bfloat16(), packed_linear.PackedLinear, fp32_output=False)
    normed = identity(x, None, None, None, norm=norm)
    linear = pack_linear(weight)
    got = linear(x, None, None, None, norm=norm)
    assert torch.equal(got, linear(normed, None, None, None))


def test_an_outlier_affects_its_channel_group_only() -> None:
    x = torch.ones(1, 4 * GROUP_CHANNELS).bfloat16()
    x[0, 5] = 10_000.0
    weight = torch.ones(32, 4 * GROUP_CHANNELS).bfloat16()
    weight[:, :GROUP_CHANNELS] = 0
    got = pack_linear(weight)(x, None, None, None)
    assert torch.allclose(got, torch.full((1, 32), 3.0 * GROUP_CHANNELS))


@pytest.mark.parametrize("element", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_value_makes_only_its_row_non_finite(element: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(n, 130, generator=generator).bfloat16() for n in (70, 9))
    linear = pack_linear(weight)
    finite = linear(x, None, None, None)
    x[4, 100] = element
    got = linear(x, None, None, None)
    assert not got[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(got[others], finite[others])


@pytest.mark.parametrize("gated", [False, True])
def test_quantization_error_is_half_a_step_and_returned(gated: bool) -> None:
    weight = torch.randn(2 * 45, 70, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[3] = 0
    memory = torch.empty(int8_linear.packed_bytes(weight, gated=gated), dtype=torch.uint8)
    scales, errors = int8_linear.pack_int8(weight, memory, gated=gated)
    halves = 1 + gated
    columns = len(weight) // halves
    lanes = packed_linear.PANEL_COLUMNS // halves

    def unpacked(per_column: Tensor) -> Tensor:
        panels = per_column.view(-1, halves, lanes).transpose(0, 1)
        return panels.reshape(halves, -1)[:, :columns].reshape(-1, 1)

    # Four adjacent channels of a column are adjacent in memory.
    code_panels = memory.view(-1, 128 // 4, halves, lanes, 4).permute(2, 0, 3, 1, 4)
    codes = code_panels.reshape(halves, -1, 128)[:, :columns].reshape(-1, 128)
    steps = unpacked(scales)
    differences = weight.float() - (codes[:, :70].float() - 128) * steps
    assert (differences.abs() <= steps * 0.501).all()
    assert torch.allclose(differences.norm(dim=1, keepdim=True), unpacked(errors), rtol=1e-4)
    assert (codes[:, 70:] == 128).all()


@pytest.mark.parametrize("name", ["classic", "modern", "odd", "experts", "biases"])
def test_fused_decoder_equals_the_modules(name: str) -> None:
    model = packed_model((CONFIGS | MORE)[name], int8=True)
    assert is_batch_invariant(model)
    for lengths, past in (STEPS["several"], STEPS["all kinds"]):
        got, pool = run_step(model, lengths, past, fused=True)
        want, plain_pool = run_step(model, lengths, past, fused=False)
        if not model.config.uses_rope and not model.config.qk_layernorm:
            assert torch.equal(got, want)
            assert all(torch.equal(a, b) for a, b in zip(pool, plain_pool, strict=True))
        exact, _ = run_step(build(model.config, dtype=torch.float64), lengths, past, fused=False)
        assert (got - exact).std() < 1.5 * (want - exact).std() + 1e-3


# Norms behind the linears and the square in xIELU enlarge the rounding of these small, random
# weights.
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("post norms", "xIELU")])
def test_an_int8_model_stays_close_to_bf16(name: str) -> None:
    model = build(CONFIGS[name], dtype=torch.bfloat16)
    divergence = pack_int8_weights(model)
    assert divergence is not None
    assert 0 < divergence.mean_kl_nats < divergence.limit
    assert divergence.top1_agreement > 0.9
    unpacked = [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and "linear" in name
    ]
    assert not unpacked
    for module in model.modules():
        if isinstance(module, Linear):
            assert isinstance(module.backend, CpuLinear)
            assert isinstance(module.backend.packed, Int8PackedLinear)


def check_split_models(_rank: int) -> None:
    torch.set_num_threads(1)
    for config, mesh in ((EXPERTS, Mesh.create(2, 1)), (MODERN, Mesh.create(1, 2))):
        model = build(config, mesh, dtype=torch.bfloat16)
        divergence = pack_int8_weights(model)
        assert (divergence is None) == (not model.is_last_stage)
        assert divergence is None or divergence.top1_agreement > 0.9


def test_split_models_are_checked_too() -> None:
    ranks(2, check_split_models)


def outlier_model() -> GPT:
    """A model that is accurate in bf16 only: a channel that is always 0 has the largest weights."""
    model = build(CLASSIC, dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            assert module.layer_norm_weight is not None and module.layer_norm_bias is not None
            with torch.no_grad():
                module.layer_norm_weight[0] = module.layer_norm_bias[0] = 0
                module.weight[:, 0] = 500.0
    return model


def test_a_model_over_the_divergence_limit_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = outlier_model()
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(ConfigError, match="with weights int8 the model"),
    ):
        pack_int8_weights(model)
    assert "event=accuracy setting='weights int8'" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "device", "reason"),
    [
        ("float32", "cpu", "the model's dtype is float32"),
        ("bfloat16", "cuda", "the device is cuda"),
    ],
)
def test_int8_is_refused_where_unsupported(dtype: str, device: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        int8_linear.check_supported(torch.device(device), getattr(torch, dtype))


def test_a_service_runs_int8_and_reports_the_divergence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ask = Ask("past: I walk ->", max_new_tokens=0, prompt_logprobs=0)
    scores = {}
    for weights in ("auto", "int8"):
        config = ServerConfig(str(DEMO), dtype="bfloat16", weights=weights, kv_tokens_max=400)
        with caplog.at_level(logging.INFO), serving.open_engine(config) as engine:
            prompt_scores = engine.generate([ask])[0].prompt_scores
        scores[weights] = torch.tensor(
            [score.logprob for score in prompt_scores if score is not None]
        )
    assert len(scores["int8"]) > 5
    assert torch.allclose(scores["int8"], scores["auto"], atol=0.3)
    assert not torch.equal(scores["int8"], scores["auto"])
    assert "event=accuracy setting='weights int8'" in caplog.text
    with pytest.raises(ConfigError, match="the model's dtype is float32"):
        serving.open_engine(ServerConfig(str(DEMO), dtype="float32", weights="int8"))
    with pytest.raises(ConfigError, match="remove one of them"):
        ServerConfig(str(DEMO), weights="int8", linear_backend="torch")


def test_freed_bytes_and_divergence_are_reported() -> None:
    config = ServerConfig("model", weights="int8")
    model = build(MODERN, dtype=torch.bfloat16)
    stored = weight_bytes(model)
    assert stored == sum(parameter.nbytes for parameter in model.parameters())
    prepared = prepare_weights(model, config.model_config)
    assert stored - prepared.freed_bytes == weight_bytes(model)
    assert (
        prepared.divergence_numbers is not None
        and 0 < prepared.divergence_numbers[0] < DIVERGENCE_MAX
    )
    assert generate(model, [[5, 6, 7]], SamplingParams(max_new_tokens=5))[0].token_ids
