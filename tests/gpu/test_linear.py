"""Linear backends on a CUDA device: fused kernels, FP8 matmuls, and Transformer Engine."""

import pytest
import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.cpu.packed_linear import GATED_PREFIX
from gpt.fp8_rows import Fp8Rows
from gpt.generation.generate import generate
from gpt.linear import fp8_linear, fused_linear, norm_activation, te_linear
from gpt.linear import selector as linear_selector
from gpt.linear.norm_activation import NormParameters
from gpt.linear.quantization_check import DivergenceProbe
from gpt.linear.unquantized_matmul import ROWS_MAX, UnquantizedMatmul, multiply_in_torch
from gpt.model.activation import UNGATED_ACTIVATIONS
from gpt.model.pipeline import forward
from gpt.parallel.mesh import Mesh
from gpt.parallel.symmetric_memory import use_symmetric_memory
from gpt.sampling_params import SamplingParams
from gpt.triton_runtime.availability import triton_unavailable_reason
from tests.support.models import CONFIGS, build, first_tie, recompute_greedy
from tests.support.ranks import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]

CUDA = torch.device("cuda")
IDS = torch.arange(24).view(2, 12)
PROMPTS = [[7, 3, 90, 12, 5], [64], list(range(1, 30))]
# Error of FP8 against bf16, relative to the spread. Both operands of each product have three bits
# of mantissa.
FP8_SPREAD_MAX = 0.08
# Wide enough for FP8, and small enough to be drawn quickly.
WIDE = GPTConfig(
    num_layers=4,
    hidden_size=1280,
    num_attention_heads=10,
    vocab_size=1000,
    max_position_embeddings=128,
)


def require_fp8() -> None:
    reason = fp8_linear.unsupported_reason(CUDA, torch.bfloat16)
    if reason is not None:
        pytest.skip(f"FP8 matmuls are unavailable: {reason}")


def require_triton() -> None:
    reason = triton_unavailable_reason(CUDA)
    if reason is not None:
        pytest.skip(f"Triton is unavailable: {reason}")


# The networks without norms behind the linears, and with an activation that the kernels compute.
FUSED_CONFIGS = [
    name for name in CONFIGS if name not in ("layered", "post norms", "sinks", "xIELU")
]


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_greedy_tokens_in_fp32_equal_the_cpus_up_to_the_first_near_tie(name: str) -> None:
    require_triton()
    torch.backends.cuda.matmul.allow_tf32 = False
    oracle = build(CONFIGS[name], dtype=torch.float32)
    model = build(CONFIGS[name], Mesh.single("cuda"), dtype=torch.float32)
    is_fusable = fused_linear.unsupported_reason(model) is None
    assert is_fusable == (name in FUSED_CONFIGS)
    linear_selector.apply_backend(model, "auto")
    backend = model.decoder_layers[0].self_attention.linear_qkv.backend
    assert isinstance(backend, fused_linear.FusedLinear) == is_fusable
    if isinstance(backend, fused_linear.FusedLinear):
        assert isinstance(backend.matmul, UnquantizedMatmul)
    completions = generate(model, PROMPTS, SamplingParams(20))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        want = recompute_greedy(oracle, prompt, 20)
        until = first_tie(want)
        assert completion.token_ids[:until] == want.tokens[:until]


@pytest.mark.parametrize("name", FUSED_CONFIGS)
def test_fused_bf16_logits_are_as_close_to_fp64_as_plain_bf16(name: str) -> None:
    require_triton()
    exact = build(CONFIGS[name]).logits(IDS)
    model = build(CONFIGS[name], Mesh.single("cuda"), dtype=torch.bfloat16)
    plain = model.logits(IDS.cuda()).cpu()
    fused_linear.fuse_layers(model)
    fused = model.logits(IDS.cuda()).cpu()
    assert (fused - exact).std() < 1.2 * (plain - exact).std()


def is_close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    return torch.allclose(got.cpu().double(), want.double(), rtol=tolerance, atol=tolerance)


def is_close_fp8(got: Fp8Rows, want: Fp8Rows) -> bool:
    """Casts of equal numbers are equal. Another order of sums may move a number to the next FP8."""
    got_rows = got.values.cpu().float() * got.scales.cpu()
    want_rows = want.values.cpu().float() * want.scales.cpu()
    moved = float((got.values.cpu().float() != want.values.float()).double().mean())
    return (
        is_close(got.scales, want.scales, 1e-5)
        and moved < 0.02
        and is_close(got_rows, want_rows, 0.13)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [30, 768, 4096, 12288])
@pytest.mark.parametrize("rms", [False, True])
def test_norm_kernels_equal_the_torch_reference(width: int, rms: bool, dtype: torch.dtype) -> None:
    require_triton()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-4
    x = draw(5, width).to(dtype)
    y = draw(5, width).to(dtype)
    bias = draw(width).to(dtype)
    shift = None if rms else draw(width)
    norm = NormParameters(draw(width).abs() + 0.5, shift, 1e-5, rms)
    cuda_shift = None if shift is None else shift.cuda()
    cuda_norm = NormParameters(norm.scale.cuda(), cuda_shift, 1e-5, rms)
    total, rows = norm_activation.add_norm(y.cuda(), bias.cuda(), x.cuda(), cuda_norm)
    want_total, want_rows = norm_activation.add_norm(y, bias, x, norm)
    assert isinstance(rows, Tensor) and isinstance(want_rows, Tensor)
    assert is_close(total, want_total, tolerance)
    assert is_close(rows, want_rows, 2 * tolerance)
    fp8_rows = norm_activation.norm_rows(x.cuda(), cuda_norm, fp8=True)
    want_fp8_rows = norm_activation.norm_rows(x, norm, fp8=True)
    assert isinstance(fp8_rows, Fp8Rows) and isinstance(want_fp8_rows, Fp8Rows)
    assert is_close_fp8(fp8_rows, want_fp8_rows)
    assert is_close_fp8(norm_activation.quantize_rows(x.cuda()), norm_activation.quantize_rows(x))


@pytest.mark.parametrize("name", UNGATED_ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_activation_kernels_equal_the_torch_reference(name: str, gated: bool) -> None:
    require_triton()
    name = GATED_PREFIX * gated + name
    x = 3 * torch.randn(3, 2 * 5000, generator=torch.Generator().manual_seed(0))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        rows = x.to(dtype)
        cuda_rows = rows.cuda()
        assert is_close(
            norm_activation.activate_rows(cuda_rows, name),
            norm_activation.activate_rows(rows, name),
            tolerance,
        )
        assert is_close_fp8(
            norm_activation.quantize_rows(cuda_rows, name),
            norm_activation.quantize_rows(rows, name),
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "has_bias", "activation"),
    [
        ((2, 16), False, None),
        ((70, 1040), True, None),
        ((70, 1040), True, "gated_silu"),
        ((4096, 4096), False, None),
        ((8200, 5008), True, "gelu_tanh"),
        ((2000, 4096), False, "gated_silu"),
    ],
)
def test_a_matmul_of_few_rows_equals_the_torch_reference(
    shape: tuple[int, int], has_bias: bool, activation: str | None, dtype: torch.dtype
) -> None:
    require_triton()
    from gpt.linear import triton_few_rows

    generator = torch.Generator(CUDA).manual_seed(sum(shape))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=CUDA).to(dtype)

    x, weight = draw(ROWS_MAX, shape[1]), draw(*shape) / 16
    bias = draw(shape[0]) if has_bias else None
    y = triton_few_rows.multiply(x, weight, bias, activation)
    single_row = triton_few_rows.multiply(x[:1], weight, bias, activation)
    wide_bias = None if bias is None else bias.cpu().double()
    want = multiply_in_torch(x.cpu().double(), weight.cpu().double(), wide_bias, activation)
    assert torch.allclose(y.cpu().double(), want, rtol=2**-7, atol=4e-3)
    assert torch.allclose(single_row.cpu().double(), want[:1], rtol=2**-7, atol=4e-3)
    for rows in (2, 5):  # A row does not depend on the other rows.
        assert torch.equal(triton_few_rows.multiply(x[:rows], weight, bias, activation), y[:rows])


def test_zero_and_nan_rows_do_not_leak_into_other_rows_of_an_fp8_matmul() -> None:
    require_fp8()
    x = torch.randn(5, 512, device="cuda", dtype=torch.bfloat16)
    x[0] = 0
    x[2, 7] = float("nan")
    x[4, 9] = float("inf")
    matmul = fp8_linear.Fp8Matmul(torch.randn(256, 512, device="cuda", dtype=torch.bfloat16))
    y = matmul(x, None, None)
    assert not y[0].any()
    assert y.isfinite().all(-1).tolist() == [True, True, False, True, False]


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 64, 300])
@pytest.mark.parametrize("shape", [(64, 64), (48, 44), (4096, 1024), (1536, 2000), (4096, 16384)])
def test_an_fp8_matmul_equals_the_torch_reference(rows: int, shape: tuple[int, int]) -> None:
    """Tensor cores accumulate FP8 products with fewer digits than fp32; the limit allows for it.

    The result is rounded to bf16, an error of up to 2^-9. With `use_fast_accum`, Hopper adds 32
    products at a time to a sum with 14 bits, an error of up to 2^-13 of the sum each time.
    """
    require_fp8()
    generator = torch.Generator().manual_seed(rows)
    columns, channels = shape
    x = torch.randn(rows, channels, generator=generator).to(CUDA, torch.bfloat16)
    weight = torch.randn(shape, generator=generator).to(CUDA, torch.bfloat16)
    bias = torch.randn(columns, generator=generator).to(CUDA, torch.bfloat16)
    matmul = fp8_linear.Fp8Matmul(weight)
    got = matmul(x, bias, None)
    fp8_rows = norm_activation.quantize_rows(x)
    padded_bias = torch.nn.functional.pad(bias, (0, len(matmul.weight.values) - columns))
    reference = fp8_linear.reference_matmul(fp8_rows, matmul.weight, padded_bias, torch.float32)
    want = reference[:, :columns]
    limit = max(5e-3, 2**-9 + channels / 32 * 2**-13)  # At 2000 channels: 1e-2.
    error = float((got - want).std() / want.std())
    print(f"fp8 matmul of {rows} rows and {shape}: error {error:.2e}, limit {limit:.2e}")
    assert error < limit
    exact = x.double() @ weight.double().t() + bias.double()
    assert (got - exact).std() < FP8_SPREAD_MAX * exact.std()


def test_fp8_layers_pass_the_divergence_check_and_are_close_to_bf16() -> None:
    require_fp8()
    model = build(WIDE, Mesh.single("cuda"), dtype=torch.bfloat16)
    model.head_weight.mul_(0.1)  # Logits of trained models are flatter than those of random models.
    ids = torch.arange(64, device="cuda").view(4, 16)
    before = model.logits(ids)
    probe = DivergenceProbe(model)
    freed_bytes = fused_linear.fuse_layers(model, fp8_linear.fp8_layers(model))
    after = model.logits(ids)
    divergence = probe.measure(model)
    assert (after - before).std() < FP8_SPREAD_MAX * before.std()
    assert divergence is not None
    print(f"fp8: {divergence}, {freed_bytes / 2**20:.0f} MiB freed")
    # Two of the four layers are in FP8: 12 h^2 weights each, a byte instead of two.
    assert freed_bytes == pytest.approx(2 * 12 * WIDE.hidden_size**2, rel=0.01)
    for length in (1, 3):  # Decode steps have few rows.
        assert bool(model.logits(ids[:, :length]).isfinite().all())


def test_fp8_quantization_of_a_row_is_independent_of_other_rows() -> None:
    """FP8 values and scales are equal. Only the matmul's order of sums may depend on the batch."""
    require_fp8()
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    batch = norm_activation.quantize_rows(x)
    single = norm_activation.quantize_rows(x[5:6])
    assert torch.equal(batch.values[5:6].view(torch.uint8), single.values.view(torch.uint8))
    assert torch.equal(batch.scales[5:6], single.scales)


def require_transformer_engine() -> te_linear.TransformerEngine:
    engine = te_linear.import_transformer_engine()
    if isinstance(engine, str):
        pytest.skip(f"Transformer Engine is unavailable: {engine}")
    return engine


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_transformer_engine_are_close_to_those_of_torch(name: str) -> None:
    engine = require_transformer_engine()
    exact = build(CONFIGS[name]).logits(IDS)
    model = build(CONFIGS[name], Mesh.single("cuda"), dtype=torch.bfloat16)
    plain = model.logits(IDS.cuda()).cpu()
    te_linear.replace_linears(model, engine, "none", range(0))
    te_logits = model.logits(IDS.cuda()).cpu()
    assert (te_logits - exact).std() < 1.5 * (plain - exact).std()


@pytest.mark.parametrize("recipe", [name for name in te_linear.RECIPES if name != "none"])
def test_transformer_engine_in_fp8_is_close_to_bf16(recipe: str) -> None:
    engine = require_transformer_engine()
    reason = te_linear.unsupported_recipe_reason(engine, recipe)
    if reason is not None:
        pytest.skip(f"Transformer Engine does not support {recipe}: {reason}")
    require_fp8()
    model = build(WIDE, Mesh.single("cuda"), dtype=torch.bfloat16)
    ids = torch.arange(64, device="cuda").view(4, 16)
    before = model.logits(ids)
    freed_bytes = te_linear.replace_linears(model, engine, recipe, fp8_linear.fp8_layers(model))
    # Two of the four layers are in fp8: 12 h^2 weights each, a byte instead of two, but for scales.
    assert freed_bytes == pytest.approx(2 * 12 * WIDE.hidden_size**2, rel=0.05)
    assert (model.logits(ids) - before).std() < 2 * FP8_SPREAD_MAX * before.std()
    assert bool(model.logits(ids[:1, :3]).isfinite().all())


def split_logits(rank: int, backend: str) -> Tensor | None:
    """Two tensor ranks on one device: all-reduces go over gloo, through host memory."""
    mesh = Mesh.create(2, 1, device="cuda")
    assert use_symmetric_memory(mesh) is mesh and mesh.stages_through_host
    model = build(WIDE, mesh, dtype=torch.bfloat16)
    if backend == "fp8":
        fused_linear.fuse_layers(model, fp8_linear.fp8_layers(model))
    else:
        linear_selector.apply_backend(model, backend)
    with torch.inference_mode():
        logits = forward(model, torch.arange(15).cuda(), Batch.unpaged([5, 1, 9], "cuda"))
    return None if logits is None else logits.cpu()


@pytest.mark.parametrize("backend", ["auto", "fp8"])
def test_ranks_on_one_device_use_the_linear_backends_too(backend: str) -> None:
    if backend == "fp8":
        require_fp8()
    model = build(WIDE, Mesh.single("cuda"), dtype=torch.bfloat16)
    plain = model(torch.arange(15).cuda(), Batch.unpaged([5, 1, 9], "cuda")).cpu()
    for got in ranks(2, split_logits, backend, timeout_s=120):
        assert got is not None
        assert (got - plain).std() < FP8_SPREAD_MAX * plain.std()
