"""The library in C says what the plain attention says, on every kind of machine it has code for."""

import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt import kernels
from gpt.attention import ragged, reference, store
from gpt.batch import Batch
from gpt.layers import ACTIVATIONS

COMPILER = shutil.which("cc")
if COMPILER is None:
    pytest.skip("there is no C compiler here, so no library in C", allow_module_level=True)

# Beside fp64: sums in fp32, and the rounding of numbers of up to four to bf16.
FAR_MAX = {torch.float32: 1e-5, torch.bfloat16: 0.02}


@pytest.fixture(autouse=True, params=[*kernels.MACHINES])
def machine(request: pytest.FixtureRequest) -> Iterator[None]:
    assert kernels.library() is not None, "it can be built here: make kernels"
    kernels.choose_machine(request.param)
    if kernels.machine() != request.param:
        kernels.choose_machine(None)
        pytest.skip(f"this machine is less than {request.param}")
    yield
    kernels.choose_machine(None)


@dataclass
class Case:
    """A step, its queries, and a pool with random numbers also where nobody wrote."""

    batch: Batch
    q: Tensor
    k: Tensor
    v: Tensor
    kv: Tensor

    def attend(self, window: int | None) -> Tensor:
        store(self.k, self.v, self.batch, self.kv)
        return ragged(self.q, self.k, self.v, self.batch, self.kv, window)

    def exact(self, window: int | None) -> Tensor:
        q, k, v, kv = (x.double() for x in (self.q, self.k, self.v, self.kv))
        return reference(q, k, v, self.batch, kv, window)


def case(
    lengths: list[int], past: list[int], heads: tuple[int, int, int], size: int, dtype: torch.dtype
) -> Case:
    """`heads`: groups, queries of each, channels. `size`: tokens of a block."""
    groups, queries, width = heads
    draw, generator = random.Random(size), torch.Generator().manual_seed(width)
    needs = [-(-(n + p) // size) for n, p in zip(lengths, past, strict=True)]
    blocks = draw.sample(range(1, sum(needs) + 1), sum(needs))
    tables = torch.zeros(len(needs), max(needs), dtype=torch.long)
    for row, need in enumerate(needs):
        tables[row, :need] = torch.tensor([blocks.pop() for _ in range(need)])
    kv = torch.randn(sum(needs) + 1, 2, groups, size, width, generator=generator).to(dtype)
    x = torch.randn(sum(lengths), groups, queries + 2, width, generator=generator).to(dtype)
    q = x[:, :, :-2].reshape(len(x), -1, width)
    batch = Batch.paged(lengths, past, tables, size)
    return Case(batch, q, x[:, :, -2], x[:, :, -1], kv)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 1, 1, 2, 4, 9, 40, 130]),
            st.sampled_from([0, 1, 31, 32, 200, 300, 600]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.tuples(
        st.sampled_from([1, 2, 3]),
        st.sampled_from([1, 2, 5, 9]),
        st.sampled_from([6, 16, 32, 64, 80, 96, 128]),
    ),
    st.sampled_from([4, 7, 16, 32]),
    st.sampled_from([None, 1, 5, 40, 256, 300]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_paged_attention_equals_the_plain_twin(
    sizes: list[tuple[int, int]],
    heads: tuple[int, int, int],
    size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    one = case([n for n, _ in sizes], [p for _, p in sizes], heads, size, dtype)
    got = one.attend(window)
    far = (got.double() - one.exact(window)).abs().max()
    assert far < FAR_MAX[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_to_the_bit_in_any_batch_and_on_any_number_of_threads(
    dtype: torch.dtype,
) -> None:
    """With few rows a long context is shared out among threads."""
    past = [5, 700, 33, 1023, 256]
    one = case([1] * 5, past, (1, 2, 64), 32, dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = one.attend(None)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for row in range(5):
                assert one.batch.tables is not None
                alone = Batch.paged([1], past[row : row + 1], one.batch.tables[row : row + 1], 32)
                x = [y[row : row + 1] for y in (one.q, one.k, one.v)]
                assert torch.equal(ragged(x[0], x[1], x[2], alone, one.kv, None)[0], whole[row])
    finally:
        torch.set_num_threads(threads)


def test_a_prompt_is_the_same_to_the_bit_however_it_is_cut_and_on_any_number_of_threads() -> None:
    if kernels.machine() != "avx512_bf16":
        pytest.skip("runs of new tokens are torch's on a machine without AVX512-bf16")
    length = 700
    one = case([length], [0], (2, 2, 64), 16, torch.bfloat16)
    tables, threads = one.batch.tables, torch.get_num_threads()
    assert tables is not None
    for window in (None, 100):
        whole = one.attend(window)
        one.batch.kept.clear()
        for count, cuts in ((1, [0, 5, 261, 700]), (2, [0, 330, 500, 506, 700]), (3, [0, 16, 700])):
            torch.set_num_threads(count)
            for start, end in pairwise(cuts):
                part = Batch.paged([end - start], [start], tables, 16)
                x = [y[start:end] for y in (one.q, one.k, one.v)]
                got = ragged(x[0], x[1], x[2], part, one.kv, window)
                assert torch.equal(got, whole[start:end])
        torch.set_num_threads(threads)


def test_a_prompt_with_what_is_not_finite_harms_no_other_and_no_garbage_is_read() -> None:
    one = case([40, 40, 40], [40, 40, 40], (2, 2, 64), 32, torch.bfloat16)
    tables = one.batch.tables
    assert tables is not None
    want = one.attend(None)
    if kernels.machine() == "avx512_bf16":  # Torch multiplies by 0 what it gathered of a block.
        one.kv[tables[0, 2], :, :, 16:] = float("nan")  # Behind the end of the first.
    one.kv[tables[1, 0], 0, 1, 3] = float("nan")
    one.kv[tables[2, 0], 1, 0, 3] = float("inf")
    got = one.attend(None)
    assert torch.equal(got[:40], want[:40])
    assert not got[40:80, 2:].isfinite().any() and not got[80:, :2].isfinite().all(-1).any()
    assert torch.equal(got[40:80, :2], want[40:80, :2])
    assert torch.equal(got[80:, 2:], want[80:, 2:])


@given(
    st.sampled_from([1, 2, 11, 12, 13, 31, 100]),
    st.sampled_from([(2, 1), (6, 31), (64, 32), (96, 33), (130, 100)]),
    st.sampled_from([None, "gelu", "gelu_tanh"]),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@settings(max_examples=60, deadline=None)
def test_products_with_panels_are_the_plain_ones(
    rows: int, shape: tuple[int, int], activation: str | None, parts: tuple[bool, bool, bool]
) -> None:
    channels, columns = shape
    has_bias, has_residual, wide = parts
    generator = torch.Generator().manual_seed(rows * channels)
    weight = torch.randn(columns, channels, generator=generator).bfloat16()
    if not kernels.multiplies(weight):
        pytest.skip("products are oneDNN's on a machine without AVX512-bf16")
    x = torch.randn(rows, channels, generator=generator).bfloat16()
    bias = torch.randn(columns, generator=generator).bfloat16() if has_bias else None
    residual = torch.randn(rows, columns, generator=generator).bfloat16() if has_residual else None
    memory = torch.empty(kernels.panels_size(weight), dtype=torch.bfloat16)
    panels = kernels.Panels(weight, memory, wide=wide)
    got = panels.multiply(x, bias, activation, residual)
    y = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    y = y if activation is None else ACTIVATIONS[activation](y)
    y = y if residual is None else y + residual.double()
    assert got.dtype == (torch.float32 if wide else torch.bfloat16)
    assert torch.allclose(got.double(), y, rtol=1e-4 if wide else 1e-2, atol=1e-4)
    alone = panels.multiply(
        x[-1:], bias, activation, residual if residual is None else residual[-1:]
    )
    assert torch.equal(alone[0], got[-1])


@given(st.integers(1, 5), st.sampled_from([1, 15, 64, 130, 515]), st.integers(0, 4), st.booleans())
@settings(deadline=None)
def test_the_best_is_the_first_of_the_largest(
    rows: int, width: int, kinds: int, padded: bool
) -> None:
    generator = torch.Generator().manual_seed(rows * width)
    x = torch.randint(-kinds, kinds + 1, (rows, width + 3 * padded), generator=generator).float()
    x[0, :: 1 + kinds] = float("-inf")
    assert torch.equal(kernels.best(x[:, :width]), x[:, :width].argmax(-1))
    x[0, -1] = float("nan")
    assert 0 <= int(kernels.best(x[:, :width])[0]) < width


@given(st.sampled_from([2, 6, 32, 80, 130]), st.booleans(), st.booleans())
@settings(deadline=None)
def test_rows_are_normed_as_torch_norms_them(width: int, rms: bool, shifted: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    weight, x = (torch.randn(n, width, generator=generator).bfloat16() for n in (40, 7))
    if not kernels.multiplies(weight):
        pytest.skip("products are oneDNN's on a machine without AVX512-bf16")
    scale, shift = torch.randn(2, width, generator=generator)
    panels = kernels.Panels(weight, torch.empty(kernels.panels_size(weight)).bfloat16(), wide=True)
    norm = kernels.Norm(scale, shift if shifted else None, 1e-5, rms=rms)
    got = panels.multiply(x, None, None, None, norm=norm)
    y, wide = x.double(), (width,)
    y = F.rms_norm(y, wide, eps=1e-5) if rms else F.layer_norm(y, wide, eps=1e-5)
    y = y * scale.double() + (shift.double() if shifted else 0)
    want = y @ weight.double().t()
    # What is normed is rounded to bf16, once.
    limit = 2**-8 * (y.abs() @ weight.double().abs().t()) + 1e-4
    assert ((got.double() - want).abs() <= limit).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_with_its_sequence_and_what_lies_behind_the_end_is_not_read(
    dtype: torch.dtype,
) -> None:
    one = case([1, 1, 1, 1], [40, 40, 40, 70], (2, 2, 64), 32, dtype)
    tables = one.batch.tables
    assert tables is not None
    want = one.attend(None)
    one.kv[tables[0, 1], 0, :, 9:] = float("nan")  # Behind the end of the first.
    one.kv[tables[1, 0], 0, 1, 3] = float("nan")
    one.kv[tables[2, 0], 1, 0, 3] = float("inf")
    got = one.attend(None)
    assert torch.equal(got[[0, 3]], want[[0, 3]])
    assert got[1].isfinite().all(-1).tolist() == [True, True, False, False]
    assert got[2].isfinite().all(-1).tolist() == [False, False, True, True]


def test_without_the_library_the_log_says_why_and_torch_does_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = case([1, 3], [40, 7], (2, 2, 64), 32, torch.float32)
    want = one.attend(None)
    other = tmp_path / "other.so"
    (tmp_path / "other.c").write_text(
        "int preamble_abi(void) { return -1; }\n"
        "void preamble_attend(void) {}\nvoid preamble_store(void) {}\n"
    )
    assert COMPILER is not None
    command = [COMPILER, "-shared", "-fPIC", str(tmp_path / "other.c"), "-o", str(other)]
    subprocess.run(command, check=True)
    one.batch.kept.clear()
    for path, reason in ((tmp_path / "none.so", "was not built"), (other, "another version")):
        monkeypatch.setattr(kernels, "LIBRARY", path)
        kernels.library.cache_clear()
        with caplog.at_level("INFO"):
            assert not kernels.serves(one.q, one.kv)
        assert reason in caplog.messages[-1]
        assert torch.allclose(one.attend(None), want, atol=1e-5)
    monkeypatch.undo()
    kernels.library.cache_clear()
