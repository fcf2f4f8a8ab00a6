"""Training kernels equal torch, in bf16 and against fp64: alone, and in a model."""

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.attention.options import AttentionOptions
from gpt.attention.paged import reference_attention
from gpt.attention.varlen import memory_efficient
from gpt.batch import Batch
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from gpt.cpu import kernels, training_kernels
from gpt.model.activation import ACTIVATIONS
from gpt.model.activation_checkpointing import RecomputePolicy
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.model.rotary_embedding import apply_rotary_embedding
from gpt.parallel.mesh import Mesh
from ptuning.training.pipeline import micro_batch_prefix
from tests.support.gradients import ERROR_MAX, output_and_gradients, relative_error
from tests.support.threads import num_threads

if shutil.which("cc") is None or kernels.isa_level() != kernels.ISA_LEVELS[-1]:
    pytest.skip("no C compiler, or no AVX512-bf16", allow_module_level=True)

BF16 = torch.bfloat16
SMALL = GPTConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=2,
    vocab_size=96,
    max_position_embeddings=256,
    dtype="bfloat16",
)


@pytest.fixture(autouse=True, scope="module")
def _single_thread() -> Iterator[None]:
    with num_threads(1):
        yield


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "gated_silu"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 34), (70, 96)])
def test_activation_equals_torch(activation: str, shape: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(2)
    x = (3 * torch.randn(shape, generator=draw)).to(BF16).requires_grad_()
    columns = shape[1] // 2 if activation == "gated_silu" else shape[1]
    dy = torch.randn(shape[0], columns, generator=draw).to(BF16)
    assert training_kernels.supports_activation(x, activation)
    wide = x.detach().double().requires_grad_()
    expected = output_and_gradients(ACTIVATIONS[activation](wide), dy, wide)
    actual = output_and_gradients(training_kernels.apply_activation(x, activation), dy, x)
    for value, exact in zip(actual, expected, strict=True):
        assert relative_error(value, exact) < ERROR_MAX


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "gated_silu"])
def test_activation_gradients_of_large_numbers_are_finite(activation: str) -> None:
    large = torch.tensor([-1e18, -1e14, -300.0, -20.0, 20.0, 300.0, 1e14, 1e18])
    x = torch.cat([large, torch.ones(8)]).to(BF16).view(1, -1).requires_grad_()
    y = training_kernels.apply_activation(x, activation)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.isfinite(y).all() and torch.isfinite(grad).all()
    slopes = grad[0, :8].tolist()
    assert slopes == pytest.approx([0.0] * 4 + [1.0] * 4, abs=1e-6)


@pytest.mark.parametrize("shape", [(1, 16), (5, 3, 20), (70, 192)])
def test_rms_norm_equals_torch(shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(4)
    x = (3 * torch.randn(shape, generator=draw)).to(BF16).requires_grad_()
    weight = torch.randn(shape[-1:], generator=draw).to(BF16)
    dy = torch.randn(shape, generator=draw).to(BF16)
    assert training_kernels.supports_rms_norm(x, weight)
    wide = x.detach().double().requires_grad_()
    exact = F.rms_norm(wide, shape[-1:], weight.double(), 0.1)
    expected = output_and_gradients(exact, dy, wide)
    actual = output_and_gradients(training_kernels.rms_norm(x, weight, 0.1), dy, x)
    for value, reference in zip(actual, expected, strict=True):
        assert relative_error(value, reference) < ERROR_MAX


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 16), (5, 100), (70, 192)])
def test_scale_backward_equals_torch(shape: tuple[int, int], activation: str | None) -> None:
    draw = torch.Generator().manual_seed(3)
    dy, y = (torch.randn(shape, generator=draw).to(BF16) for _ in range(2))
    factor, bias = (torch.randn(shape[1], generator=draw).to(BF16) for _ in range(2))
    late_bias = None if activation is None else bias
    scaled, sums = training_kernels.scale_backward(
        dy, y, factor, late_bias=late_bias, activation=activation
    )
    wide_y, wide_factor = (tensor.double().requires_grad_() for tensor in (y, factor))
    product = wide_y * wide_factor
    if activation is not None:
        product = ACTIVATIONS[activation](product + bias.double())
    _, *expected = output_and_gradients(product, dy, wide_y, wide_factor)
    assert relative_error(scaled, expected[0]) < ERROR_MAX
    assert sums.dtype == torch.float32
    assert relative_error(sums, expected[1]) < 1e-5


@pytest.mark.parametrize("rotary_channels", [0, 8, 32, 48])
@pytest.mark.parametrize("shape", [(5, 1, 4, 48), (70, 2, 3, 64)])
def test_split_qkv_equals_torch(shape: tuple[int, int, int, int], rotary_channels: int) -> None:
    draw = torch.Generator().manual_seed(6)
    tokens, groups, heads, d = shape
    qkv = torch.randn(shape, generator=draw).to(BF16).requires_grad_()
    dy = [torch.randn(tokens, n, d, generator=draw) for n in (groups * (heads - 2), groups, groups)]
    angles = torch.randn(tokens, rotary_channels // 2, generator=draw)
    cos_sin = (angles.cos().to(BF16), angles.sin().to(BF16)) if rotary_channels else None
    assert training_kernels.supports_split_qkv(qkv)
    q, k, v = training_kernels.split_qkv(qkv, cos_sin)
    (actual,) = torch.autograd.grad((q, k, v), qkv, [grad.to(BF16) for grad in dy])

    wide = qkv.detach().double().requires_grad_()
    parts = [wide[:, :, :-2].reshape(tokens, -1, d), wide[:, :, -2], wide[:, :, -1]]
    if cos_sin is not None:
        wide_cos_sin = cos_sin[0].double(), cos_sin[1].double()
        parts[:2] = [apply_rotary_embedding(y, wide_cos_sin, False) for y in parts[:2]]
    (expected,) = torch.autograd.grad(parts, wide, [grad.to(BF16).double() for grad in dy])
    for value, exact in zip((q, k, v, actual), (*parts, expected), strict=True):
        assert relative_error(value.detach(), exact.detach()) < ERROR_MAX
    if not rotary_channels:
        assert torch.equal(q.double(), parts[0]) and torch.equal(actual.double(), expected)


# Lengths of sequences, and the parents of the sequences.
BATCHES: list[tuple[list[int], list[int | None]]] = [
    ([1], []),
    ([33], []),
    ([5, 64, 1, 100], []),
    ([20, 127, 31, 1, 33], [None, 0, 0, 0, 0]),
    ([7, 1, 40, 12, 2, 9], [None, 0, None, 2, 0, None]),
]


@pytest.mark.parametrize(("lengths", "parents"), BATCHES)
@pytest.mark.parametrize(("heads", "groups", "width"), [(2, 2, 64), (4, 2, 32), (3, 1, 96)])
def test_attention_and_its_gradients_equal_the_reference(
    lengths: list[int], parents: list[int | None], heads: int, groups: int, width: int
) -> None:
    torch.manual_seed(0)
    batch = Batch.unpaged(lengths, parents=parents)
    qkv = [torch.randn(batch.tokens, n, width).to(BF16) for n in (heads, groups, groups)]
    qkv[0] *= 2  # Makes some probabilities large.
    dy = torch.randn(batch.tokens, heads, width).to(BF16)

    def run(attend: Callable[..., Tensor], dtype: torch.dtype = BF16) -> list[Tensor]:
        q, k, v = (tensor.to(dtype).requires_grad_() for tensor in qkv)
        return output_and_gradients(attend(q, k, v), dy, q, k, v)

    def by_kernels() -> list[Tensor]:
        return run(lambda q, k, v: training_kernels.varlen_attention(q, k, v, batch))

    exact_outputs = run(
        lambda q, k, v: reference_attention(q, k, v, batch, None, AttentionOptions()), torch.float64
    )
    torch_outputs = run(lambda q, k, v: memory_efficient(q, k, v, batch, AttentionOptions()))
    outputs = by_kernels()
    for output, torch_output, exact in zip(outputs, torch_outputs, exact_outputs, strict=True):
        if exact.norm() < 1e-9:  # The gradient of the score of a single key is zero.
            assert float(output.norm()) < 1e-2
            continue
        torch_error = relative_error(torch_output, exact)
        assert relative_error(output, exact) <= max(1.1 * torch_error, ERROR_MAX)
    torch.set_num_threads(2)
    try:
        again = by_kernels()
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, outputs, again))


def test_large_scores_stay_finite_and_later_keys_are_masked() -> None:
    """Gradients of large scores stay finite, and a large later key does not change earlier rows."""
    torch.manual_seed(0)
    batch = Batch.unpaged([40, 3])
    q, k, v = (torch.randn(43, 1, 32) * 60 for _ in range(3))
    q, k, v = (x.to(BF16).requires_grad_() for x in (q, k, v))
    y = training_kernels.varlen_attention(q, k, v, batch)
    gradients = output_and_gradients(y, torch.ones_like(y), q, k, v)
    assert all(gradient.isfinite().all() for gradient in gradients)
    with torch.no_grad():
        changed_k = k.clone()
        changed_k[39] = 1e30
    assert torch.equal(training_kernels.varlen_attention(q, changed_k, v, batch)[:39], y[:39])


def loss_and_gradient(model: GPT, prompt: str = "table") -> tuple[Tensor, Tensor]:
    """The loss of a batch, and the gradient of an embedding table or of a prefix in every layer."""
    torch.manual_seed(0)
    batch = Batch.unpaged([6, 70, 33, 40], parents=[None, 0, 0, 0])
    ids = torch.randint(SMALL.vocab_size, (batch.tokens,))
    ids[:6] = SMALL.vocab_size + torch.arange(6)
    dtype = torch.promote_types(model.dtype, torch.float32)
    shape = (6, 64) if prompt == "table" else (6, SMALL.num_layers, 2, 2, 32)
    table = torch.randn(shape).to(dtype).requires_grad_()
    if prompt == "table":
        x = model.forward_hidden(ids, batch, virtual_embeddings=table)
    else:
        prefix = micro_batch_prefix(dict(enumerate(table.unbind(1))), ids, SMALL.vocab_size)
        x = model.forward_hidden(ids, batch, prefix=prefix)
    # Virtual tokens have no loss and are never targets.
    loss = F.cross_entropy(model.compute_logits(x, batch)[6:-1], ids[7:])
    loss.backward()
    assert table.grad is not None
    return loss.detach(), table.grad


@pytest.mark.parametrize("prompt", ["table", "prefix"])
def test_training_gradients_are_as_accurate_as_those_without_the_library(prompt: str) -> None:
    fp64_model = load_model(random_init_checkpoint(SMALL, 0), Mesh.single(), dtype=torch.float64)
    exact_tensors = loss_and_gradient(fp64_model, prompt)
    model = load_model(random_init_checkpoint(SMALL, 0), Mesh.single())
    tensors = loss_and_gradient(model, prompt)
    kernels.force_isa_level("plain")
    try:
        torch_tensors = loss_and_gradient(model, prompt)
    finally:
        kernels.force_isa_level(None)
    assert not torch.equal(tensors[1], torch_tensors[1]), "the library was not used"
    for tensor, torch_tensor, exact in zip(tensors, torch_tensors, exact_tensors, strict=True):
        assert relative_error(tensor, exact) <= max(1.3 * relative_error(torch_tensor, exact), 1e-3)


@pytest.mark.slow  # torch imports modules for seconds.
def test_recomputation_is_bit_identical() -> None:
    once, again = (
        loss_and_gradient(
            load_model(
                random_init_checkpoint(SMALL, 0), Mesh.single(), recompute=RecomputePolicy(kind)
            )
        )
        for kind in ("none", "full")
    )
    assert all(map(torch.equal, once, again))
