"""What C does for learning says what torch says, in bf16 and beside fp64: alone, and in a model."""

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.attention.paged import reference
from gpt.attention.varlen import lean
from gpt.batch import Batch
from gpt.checkpoint.random_init import fresh
from gpt.config import GPTConfig
from gpt.cpu import kernels, training_kernels
from gpt.model.activation_checkpointing import Recompute
from gpt.model.gpt_model import GPT
from gpt.model.layers import ACTIVATIONS
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from ptuning.training.pipeline import prefix_at

if shutil.which("cc") is None or kernels.machine() != kernels.MACHINES[-1]:
    pytest.skip("no library in C, or no machine that it is for", allow_module_level=True)

BF16 = torch.bfloat16
# What bf16 says beside what it rounds: a few roundings of 2^-9 of each number.
FAR_MAX = 5e-3
SMALL = GPTConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=2,
    vocab_size=96,
    max_position_embeddings=256,
    dtype="bfloat16",
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def far(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def gradients(y: Tensor, dy: Tensor, *wanted: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, wanted, dy.to(y.dtype))]


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("rows", "channels", "columns"), [(64, 32, 96), (65, 96, 32), (131, 128, 64), (300, 64, 160)]
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_product_and_its_gradient_are_those_of_torch(
    rows: int, channels: int, columns: int, activation: str | None, whole: bool
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, channels), torch.randn(columns, channels) * channels**-0.5
    bias, residual = torch.randn(columns), torch.randn(rows, columns)
    given = [one.to(BF16) for one in (x, weight, bias, residual)]
    dy = torch.randn(rows, columns).to(BF16)

    def plain(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> list[Tensor]:
        x, residual = x.clone().requires_grad_(), residual.clone().requires_grad_()
        y = F.linear(x, weight, bias if whole else None)
        y = y if activation is None else ACTIVATIONS[activation](y)
        y = y + residual if whole else y
        return gradients(y, dy, x, *([residual] if whole else []))

    def ours() -> list[Tensor]:
        x, weight, bias, residual = given
        x, residual = x.clone().requires_grad_(), residual.clone().requires_grad_()
        assert training_kernels.multiplies(x, weight)
        end = (bias, activation, residual) if whole else (None, activation, None)
        y = training_kernels.multiply(x, weight, *end)
        return gradients(y, dy, x, *([residual] if whole else []))

    right = plain(*(one.double() for one in given))
    made = ours()
    for found, torchs, exact in zip(made, plain(*given), right, strict=True):
        assert far(found, exact) <= max(1.1 * far(torchs, exact), 1e-9)
        assert far(found, exact) < FAR_MAX
    torch.set_num_threads(2)
    try:
        assert all(map(torch.equal, made, ours()))
    finally:
        torch.set_num_threads(1)


def test_only_frozen_bf16_weights_in_whole_panels_are_served() -> None:
    x, weight = torch.zeros(64, 32, dtype=BF16, requires_grad=True), torch.zeros(32, 32, dtype=BF16)
    serves = training_kernels.multiplies
    assert serves(x, weight)
    assert not serves(x.detach(), weight)
    assert not serves(x[:63], weight)
    assert not serves(x.float(), weight.float())
    assert not serves(x, weight.clone().requires_grad_())
    assert not serves(x, weight[:16])
    assert not serves(x, weight.t()[:, :31].t())
    with torch.no_grad():
        assert not serves(x, weight)
    kernels.choose_machine("avx2")
    try:
        assert not serves(x, weight)
    finally:
        kernels.choose_machine(None)


FAMILIES: list[tuple[list[int], list[int | None]]] = [
    ([1], []),
    ([33], []),
    ([5, 64, 1, 100], []),
    ([20, 127, 31, 1, 33], [None, 0, 0, 0, 0]),
    ([7, 1, 40, 12, 2, 9], [None, 0, None, 2, 0, None]),
]


@pytest.mark.parametrize(("lengths", "parents"), FAMILIES)
@pytest.mark.parametrize(("heads", "groups", "width"), [(2, 2, 64), (4, 2, 32), (3, 1, 96)])
def test_attention_and_its_gradients_are_those_of_the_plain_one(
    lengths: list[int], parents: list[int | None], heads: int, groups: int, width: int
) -> None:
    torch.manual_seed(0)
    batch = Batch.plain(lengths, parents=parents)
    given = [torch.randn(batch.tokens, n, width).to(BF16) for n in (heads, groups, groups)]
    given[0] *= 2  # So that some probabilities are large.
    dy = torch.randn(batch.tokens, heads, width).to(BF16)

    def made(attend: Callable[..., Tensor], dtype: torch.dtype = BF16) -> list[Tensor]:
        q, k, v = (one.to(dtype).requires_grad_() for one in given)
        return gradients(attend(q, k, v), dy, q, k, v)

    right = made(lambda q, k, v: reference(q, k, v, batch, None, None), torch.float64)
    torchs = made(lambda q, k, v: lean(q, k, v, batch, None))
    ours = made(lambda q, k, v: training_kernels.attend(q, k, v, batch))
    for found, other, exact in zip(ours, torchs, right, strict=True):
        if exact.norm() < 1e-9:  # One key alone: nothing depends on its score.
            assert float(found.norm()) < 1e-2
            continue
        assert far(found, exact) <= max(1.1 * far(other, exact), FAR_MAX)
    torch.set_num_threads(2)
    try:
        again = made(lambda q, k, v: training_kernels.attend(q, k, v, batch))
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, ours, again))


def test_large_scores_and_hidden_tokens_do_no_harm() -> None:
    """Sharp probabilities stay numbers, and what comes later is not seen, whatever it is."""
    torch.manual_seed(0)
    batch = Batch.plain([40, 3])
    q, k, v = (torch.randn(43, 1, 32) * 60 for _ in range(3))
    q, k, v = (x.to(BF16).requires_grad_() for x in (q, k, v))
    y = training_kernels.attend(q, k, v, batch)
    assert all(one.isfinite().all() for one in gradients(y, torch.ones_like(y), q, k, v))
    with torch.no_grad():
        other = k.clone()
        other[39] = 1e30
    assert torch.equal(training_kernels.attend(q, other, v, batch)[:39], y[:39])


def learned(model: GPT, what: str = "table") -> tuple[Tensor, Tensor]:
    """The loss of a batch, and the gradient of a table; or of a prefix in every layer."""
    torch.manual_seed(0)
    batch = Batch.plain([6, 70, 33, 40], parents=[None, 0, 0, 0])
    ids = torch.randint(SMALL.vocab_size, (batch.tokens,))
    ids[:6] = SMALL.vocab_size + torch.arange(6)
    wide = torch.promote_types(model.dtype, torch.float32)
    shape = (6, 64) if what == "table" else (6, SMALL.num_layers, 2, 2, 32)
    table = torch.randn(shape).to(wide).requires_grad_()
    if what == "table":
        x = model.hidden(ids, batch, table=table)
    else:
        prefix = prefix_at(dict(enumerate(table.unbind(1))), ids, SMALL.vocab_size)
        x = model.hidden(ids, batch, prefix=prefix)
    # What a virtual token itself says is not learned, nor is one ever predicted.
    loss = F.cross_entropy(model.head(x, batch)[6:-1], ids[7:])
    loss.backward()
    assert table.grad is not None
    return loss.detach(), table.grad


@pytest.mark.parametrize("what", ["table", "prefix"])
def test_a_model_learns_the_same_with_the_library_and_without(what: str) -> None:
    exact = learned(load_model(fresh(SMALL, 0), Mesh.single(), dtype=torch.float64), what)
    model = load_model(fresh(SMALL, 0), Mesh.single())
    ours = learned(model, what)
    kernels.choose_machine("plain")
    try:
        plain = learned(model, what)
    finally:
        kernels.choose_machine(None)
    assert not torch.equal(ours[1], plain[1]), "the library served neither"
    for mine, torchs, right in zip(ours, plain, exact, strict=True):
        assert far(mine, right) <= max(1.3 * far(torchs, right), 1e-3)


@pytest.mark.slow  # What torch imports for it takes seconds.
def test_what_is_computed_again_is_the_same_to_the_bit() -> None:
    once, again = (
        learned(load_model(fresh(SMALL, 0), Mesh.single(), recompute=Recompute(kind)))
        for kind in ("none", "full")
    )
    assert all(map(torch.equal, once, again))
