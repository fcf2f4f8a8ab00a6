"""The library in C says what the plain attention says, on every kind of machine it has code for."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.attention.paged import ragged
from gpt.batch import Batch
from gpt.cpu import kernels
from tests.support.paged_steps import case

COMPILER = shutil.which("cc")
if COMPILER is None:
    pytest.skip("there is no C compiler here, so no library in C", allow_module_level=True)

# Beside fp64, of the largest value: sums in fp32; in bf16 each probability and what comes out are
# rounded, by 2^-9 and more at most.
FAR_MAX = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True, params=[*kernels.MACHINES])
def machine(request: pytest.FixtureRequest) -> Iterator[None]:
    assert kernels.library() is not None, "it can be built here: make kernels"
    kernels.choose_machine(request.param)
    if kernels.machine() != request.param:
        kernels.choose_machine(None)
        pytest.skip(f"this machine is less than {request.param}")
    yield
    kernels.choose_machine(None)


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
        st.sampled_from([5, 6, 16, 32, 64, 80, 96, 128, 130, 256]),
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
    assert far < FAR_MAX[dtype] * max(one.v.abs().max(), one.kv.abs().max())


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
