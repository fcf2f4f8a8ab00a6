"""Products on a CUDA device: fused ones, fp8, Transformer Engine if it is there; their kernels."""

import pytest
import torch
from torch import Tensor

from gpt.backends import fp8_linear, fused_linear, linear_selector, norm_activation, te_linear
from gpt.backends.norm_activation import Narrow, Norm
from gpt.backends.quantization_check import Gate
from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.cpu.packed_linear import ACTIVATIONS, GATED
from gpt.generation.generate import generate
from gpt.model.pipeline import forward
from gpt.parallel.mesh import Mesh
from gpt.parallel.symmetric_memory import quicken
from gpt.sampling_params import Sampling
from tests.support.models import CONFIGS, build, first_tie, recompute_greedy
from tests.support.ranks import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]

CUDA = torch.device("cuda")
IDS = torch.arange(24).view(2, 12)
PROMPTS = [[7, 3, 90, 12, 5], [64], list(range(1, 30))]
# fp8 against bf16, relative to the spread: three bits of mantissa on either side of each product.
FP8_SPREAD_MAX = 0.08
# A width that fp8 is meant for, small enough to draw quickly.
BROAD = GPTConfig(
    num_layers=4,
    hidden_size=1280,
    num_attention_heads=10,
    vocab_size=1000,
    max_position_embeddings=128,
)


def fp8_or_skip() -> None:
    reason = fp8_linear.unfit(CUDA, torch.bfloat16)
    if reason is not None:
        pytest.skip(f"no products in fp8: {reason}")


def kernels_or_skip() -> None:
    reason = norm_activation.kernels_missing()
    if reason is not None:
        pytest.skip(f"Triton cannot be had: {reason}")


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_fp32_greedy_agrees_up_to_the_first_near_tie(name: str) -> None:
    kernels_or_skip()
    torch.backends.cuda.matmul.allow_tf32 = False
    oracle = build(CONFIGS[name], dtype=torch.float32)
    model = build(CONFIGS[name], Mesh.single("cuda"), dtype=torch.float32)
    linear_selector.place(model, "auto")
    assert isinstance(model.blocks[0].self_attention.linear_qkv.product, fused_linear.Wide)
    for prompt, completion in zip(PROMPTS, generate(model, PROMPTS, Sampling(20)), strict=True):
        want = recompute_greedy(oracle, prompt, 20)
        until = first_tie(want)
        assert completion.token_ids[:until] == want.tokens[:until]


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_bf16_is_no_further_from_fp64_than_plain_bf16(name: str) -> None:
    kernels_or_skip()
    exact = build(CONFIGS[name]).logits(IDS)
    model = build(CONFIGS[name], Mesh.single("cuda"), dtype=torch.bfloat16)
    plain = model.logits(IDS.cuda()).cpu()
    fused_linear.fuse(model)
    fused = model.logits(IDS.cuda()).cpu()
    assert (fused - exact).std() < 1.2 * (plain - exact).std()


def twins(x: Tensor) -> tuple[Tensor, Tensor]:
    """On the device, where kernels serve, and on the host, where torch does."""
    return x.cuda(), x


def near(got: Tensor, want: Tensor, digits: float) -> bool:
    return torch.allclose(got.cpu().double(), want.double(), rtol=digits, atol=digits)


def narrow_near(got: Narrow, want: Narrow) -> bool:
    """Casts are the same where what is cast is; sums in another order may move a number a step."""
    a, b = (x.numbers.cpu().float() * x.scales.cpu() for x in (got, want))
    moved = float((a != b).double().mean())
    return near(got.scales, want.scales, 1e-5) and moved < 0.02 and near(a, b, 0.13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [30, 768, 4096, 12288])
@pytest.mark.parametrize("rms", [False, True])
def test_kernels_between_products_are_their_twins(
    width: int, rms: bool, dtype: torch.dtype
) -> None:
    kernels_or_skip()
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    digits = 2**-7 if dtype == torch.bfloat16 else 1e-4
    x, y, bias = (one.to(dtype) for one in (drawn(5, width), drawn(5, width), drawn(width)))
    shift = None if rms else drawn(width)
    here = Norm(drawn(width).abs() + 0.5, shift, 1e-5, rms)
    there = Norm(here.scale.cuda(), None if shift is None else shift.cuda(), 1e-5, rms)
    total, rows = norm_activation.added(y.cuda(), bias.cuda(), x.cuda(), there)
    want, twin = norm_activation.added(y, bias, x, here)
    assert isinstance(rows, Tensor) and isinstance(twin, Tensor)
    assert near(total, want, digits) and near(rows, twin, 2 * digits)
    narrow, wide = (
        norm_activation.normed(x.cuda(), there, narrow=True),
        norm_activation.normed(x, here, narrow=True),
    )
    assert isinstance(narrow, Narrow) and isinstance(wide, Narrow)
    assert narrow_near(narrow, wide)
    assert narrow_near(norm_activation.narrowed(x.cuda()), norm_activation.narrowed(x))


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name])
@pytest.mark.parametrize("gated", [False, True])
def test_kernels_of_activations_are_their_twins(name: str, gated: bool) -> None:
    kernels_or_skip()
    name = GATED * gated + name
    x = 3 * torch.randn(3, 2 * 5000, generator=torch.Generator().manual_seed(0))
    for dtype, digits in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        there, here = twins(x.to(dtype))
        assert near(
            norm_activation.activated(there, name), norm_activation.activated(here, name), digits
        )
        assert narrow_near(
            norm_activation.narrowed(there, name), norm_activation.narrowed(here, name)
        )


def test_rows_of_zeros_and_rows_that_are_not_finite_harm_no_other() -> None:
    fp8_or_skip()
    x = torch.randn(5, 512, device="cuda", dtype=torch.bfloat16)
    x[0], x[2, 7], x[4, 9] = 0, float("nan"), float("inf")
    product = fp8_linear.Fp8(torch.randn(256, 512, device="cuda", dtype=torch.bfloat16))
    y = product(x, None, None, None)
    assert not y[0].any()
    assert y.isfinite().all(-1).tolist() == [True, True, False, True, False]


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 64, 300])
@pytest.mark.parametrize("shape", [(64, 64), (48, 44), (4096, 1024), (1536, 2000)])
def test_a_product_in_fp8_is_its_twin(rows: int, shape: tuple[int, int]) -> None:
    """Tensor cores add fp8 in fewer digits than fp32 has; so far apart, and no further."""
    fp8_or_skip()
    generator = torch.Generator().manual_seed(rows)
    columns, channels = shape
    x = torch.randn(rows, channels, generator=generator).to(CUDA, torch.bfloat16)
    weight = torch.randn(shape, generator=generator).to(CUDA, torch.bfloat16)
    bias = torch.randn(columns, generator=generator).to(CUDA, torch.bfloat16)
    product = fp8_linear.Fp8(weight)
    got = product(x, bias, None, None)
    narrow = norm_activation.narrowed(x)
    padded = torch.nn.functional.pad(bias, (0, len(product.weight.numbers) - columns))
    want = fp8_linear.plain(narrow, product.weight, padded, torch.float32)[:, :columns]
    assert (got - want).std() < 5e-3 * want.std()
    exact = x.double() @ weight.double().t() + bias.double()
    assert (got - exact).std() < FP8_SPREAD_MAX * exact.std()


def test_fp8_layers_pass_the_gate_and_stay_near_bf16() -> None:
    fp8_or_skip()
    model = build(BROAD, Mesh.single("cuda"), dtype=torch.bfloat16)
    model.head_weight.mul_(0.1)  # Trained models are less sure of themselves than drawn ones.
    ids = torch.arange(64, device="cuda").view(4, 16)
    before, gate = model.logits(ids), Gate(model)
    freed = fused_linear.fuse(model, linear_selector.narrow_layers(model))
    after, drift = model.logits(ids), gate.drift(model)
    assert (after - before).std() < FP8_SPREAD_MAX * before.std()
    assert drift is not None
    print(f"fp8: {drift}, {freed / 2**20:.0f} MiB freed")
    # Two layers of four; 12 h^2 weights each, a byte instead of two.
    assert freed == pytest.approx(2 * 12 * BROAD.hidden_size**2, rel=0.01)
    for length in (1, 3):  # Decoding has few rows.
        assert bool(model.logits(ids[:, :length]).isfinite().all())


def test_fp8_rows_do_not_depend_on_their_scales_company() -> None:
    """A row's narrow numbers and its scale are its own: only the library's order of sums varies."""
    fp8_or_skip()
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    many, one = norm_activation.narrowed(x), norm_activation.narrowed(x[5:6])
    assert torch.equal(many.numbers[5:6].view(torch.uint8), one.numbers.view(torch.uint8))
    assert torch.equal(many.scales[5:6], one.scales)


def te_or_skip() -> te_linear.Engine:
    found = te_linear.find()
    if isinstance(found, str):
        pytest.skip(f"Transformer Engine cannot be had: {found}")
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_transformer_engine_says_what_torch_does(name: str) -> None:
    engine = te_or_skip()
    exact = build(CONFIGS[name]).logits(IDS)
    model = build(CONFIGS[name], Mesh.single("cuda"), dtype=torch.bfloat16)
    plain = model.logits(IDS.cuda()).cpu()
    te_linear.swap(model, engine, "none", range(0))
    other = model.logits(IDS.cuda()).cpu()
    assert (other - exact).std() < 1.5 * (plain - exact).std()


@pytest.mark.parametrize("recipe", ["current", "block", "delayed"])
def test_transformer_engine_in_fp8_stays_near_bf16(recipe: str) -> None:
    engine = te_or_skip()
    fp8_or_skip()
    model = build(BROAD, Mesh.single("cuda"), dtype=torch.bfloat16)
    ids = torch.arange(64, device="cuda").view(4, 16)
    before = model.logits(ids)
    te_linear.swap(model, engine, recipe, linear_selector.narrow_layers(model))
    model.logits(ids)
    assert (model.logits(ids) - before).std() < 2 * FP8_SPREAD_MAX * before.std()
    assert bool(model.logits(ids[:1, :3]).isfinite().all())


def split_logits(rank: int, backend: str) -> Tensor | None:
    """Two tensor ranks on one device: sums go over gloo, through host memory."""
    mesh = Mesh.create(2, 1, device="cuda")
    assert quicken(mesh) is mesh and mesh.staged
    model = build(BROAD, mesh, dtype=torch.bfloat16)
    if backend == "fp8":
        fused_linear.fuse(model, linear_selector.narrow_layers(model))
    else:
        linear_selector.place(model, backend)
    with torch.inference_mode():
        logits = forward(model, torch.arange(15).cuda(), Batch.plain([5, 1, 9], "cuda"))
    return None if logits is None else logits.cpu()


@pytest.mark.parametrize("backend", ["auto", "fp8"])
def test_ranks_that_share_a_device_over_gloo_have_these_products_too(backend: str) -> None:
    if backend == "fp8":
        fp8_or_skip()
    want = build(BROAD, Mesh.single("cuda"), dtype=torch.bfloat16)
    plain = want(torch.arange(15).cuda(), Batch.plain([5, 1, 9], "cuda")).cpu()
    for got in ranks(2, split_logits, backend, timeout_s=120):
        assert got is not None
        assert (got - plain).std() < FP8_SPREAD_MAX * plain.std()
