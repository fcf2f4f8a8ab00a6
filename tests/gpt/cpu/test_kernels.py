"""The C kernels equal the torch references, on every instruction set that they support."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.attention.paged import ragged_attention
from gpt.batch import Batch
from gpt.cpu import kernels
from tests.support.paged_steps import FULL, case, draw_options

COMPILER = shutil.which("cc")
if COMPILER is None:
    pytest.skip("the C library cannot be built: no C compiler", allow_module_level=True)

# Limit of the error against fp64, relative to the largest value. Sums are in fp32; in bf16 each
# probability and the output are rounded, by about 2^-9 each.
ERROR_MAX = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True, params=[*kernels.ISA_LEVELS])
def isa_level(request: pytest.FixtureRequest) -> Iterator[None]:
    assert kernels.library() is not None, "the C library is not built; run make kernels"
    kernels.force_isa_level(request.param)
    if kernels.isa_level() != request.param:
        kernels.force_isa_level(None)
        pytest.skip(f"this machine does not support {request.param}")
    yield
    kernels.force_isa_level(None)


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
    st.fixed_dictionaries({"sinks": st.booleans(), "alibi": st.booleans()}),
)
def test_paged_attention_equals_the_reference(
    sizes: list[tuple[int, int]],
    heads: tuple[int, int, int],
    block_tokens: int,
    window: int | None,
    dtype: torch.dtype,
    softmax_terms: dict[str, Any],
) -> None:
    lengths = [length for length, _ in sizes]
    past = [count for _, count in sizes]
    step = case(lengths, past, heads, block_tokens, dtype)
    options = draw_options(window, heads[0] * heads[1], **softmax_terms)
    error = (step.attend(options).double() - step.exact(options)).abs().max()
    assert error < ERROR_MAX[dtype] * max(step.v.abs().max(), step.kv.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_bit_identical_in_any_batch_and_thread_count(
    dtype: torch.dtype,
) -> None:
    """With few rows several threads share a long context."""
    past = [5, 700, 33, 1023, 256]
    step = case([1] * 5, past, (1, 2, 64), 32, dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        batched = step.attend()
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for row in range(5):
                assert step.batch.block_tables is not None
                alone = Batch.paged(
                    [1], past[row : row + 1], step.batch.block_tables[row : row + 1], 32
                )
                x = [y[row : row + 1] for y in (step.q, step.k, step.v)]
                assert torch.equal(
                    ragged_attention(x[0], x[1], x[2], alone, step.kv, FULL)[0], batched[row]
                )
    finally:
        torch.set_num_threads(threads)


def test_nan_in_prefill_does_not_leak_and_unused_slots_are_not_read() -> None:
    step = case([40, 40, 40], [40, 40, 40], (2, 2, 64), 32, torch.bfloat16)
    tables = step.batch.block_tables
    assert tables is not None
    want = step.attend()
    if kernels.isa_level() == "avx512_bf16":  # torch multiplies unused slots of a block by 0.
        step.kv[tables[0, 2], :, :, 16:] = float("nan")  # Behind the end of the first context.
    step.kv[tables[1, 0], 0, 1, 3] = float("nan")
    step.kv[tables[2, 0], 1, 0, 3] = float("inf")
    got = step.attend()
    assert torch.equal(got[:40], want[:40])
    assert not got[40:80, 2:].isfinite().any() and not got[80:, :2].isfinite().all(-1).any()
    assert torch.equal(got[40:80, :2], want[40:80, :2])
    assert torch.equal(got[80:, 2:], want[80:, 2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_decode_does_not_leak_and_unused_slots_are_not_read(
    dtype: torch.dtype,
) -> None:
    step = case([1, 1, 1, 1], [40, 40, 40, 70], (2, 2, 64), 32, dtype)
    tables = step.batch.block_tables
    assert tables is not None
    want = step.attend()
    step.kv[tables[0, 1], 0, :, 9:] = float("nan")  # Behind the end of the first context.
    step.kv[tables[1, 0], 0, 1, 3] = float("nan")
    step.kv[tables[2, 0], 1, 0, 3] = float("inf")
    got = step.attend()
    assert torch.equal(got[[0, 3]], want[[0, 3]])
    assert got[1].isfinite().all(-1).tolist() == [True, True, False, False]
    assert got[2].isfinite().all(-1).tolist() == [False, False, True, True]


def test_a_missing_library_is_logged_and_torch_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = case([1, 3], [40, 7], (2, 2, 64), 32, torch.float32)
    want = step.attend()
    other_version = tmp_path / "other.so"
    (tmp_path / "other.c").write_text(
        "int preamble_abi(void) { return -1; }\n"
        "void preamble_decode_attention(void) {}\nvoid preamble_store_kv(void) {}\n"
    )
    assert COMPILER is not None
    command = [COMPILER, "-shared", "-fPIC", str(tmp_path / "other.c"), "-o", str(other_version)]
    subprocess.run(command, check=True)
    step.batch.attention_metadata.clear()
    for path, reason in (
        (tmp_path / "none.so", "was not built"),
        (other_version, f"has ABI -1, not {kernels.ABI}; rebuild it"),
    ):
        monkeypatch.setattr(kernels, "LIBRARY", path)
        kernels.library.cache_clear()
        with caplog.at_level("INFO"):
            assert not kernels.supports_tensors(step.q, step.kv)
        assert reason in caplog.messages[-1]
        assert torch.allclose(step.attend(), want, atol=1e-5)
    monkeypatch.undo()
    kernels.library.cache_clear()
