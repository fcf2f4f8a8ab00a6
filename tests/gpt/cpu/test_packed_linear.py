"""C kernels that need AVX512-bf16: prefill attention, GEMM, norms and argmax."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.attention.paged import ragged_attention
from gpt.batch import Batch
from gpt.cpu import kernels, packed_linear
from tests.support.packed_linear_cases import (
    check_fused_norm,
    check_independent_rows,
    check_matmul_argmax,
    check_packed_gemm,
)
from tests.support.paged_steps import case, draw_options

pytestmark = pytest.mark.skipif(
    kernels.isa_level() != kernels.ISA_LEVELS[-1],
    reason="a machine without AVX512-bf16 uses torch",
)


def test_a_prefill_is_bit_identical_for_any_chunks_and_threads() -> None:
    length = 700
    step = case([length], [0], (2, 2, 64), 16, torch.bfloat16)
    tables, threads = step.batch.block_tables, torch.get_num_threads()
    assert tables is not None
    try:
        for window, has_terms in ((None, False), (100, False), (None, True), (300, True)):
            options = draw_options(window, 4, sinks=has_terms, alibi=has_terms)
            unchunked = step.attend(options)
            step.batch.attention_metadata.clear()
            for count, cuts in (
                (1, [0, 5, 261, 700]),
                (2, [0, 330, 500, 506, 700]),
                (3, [0, 16, 700]),
            ):
                torch.set_num_threads(count)
                for start, end in pairwise(cuts):
                    chunk = Batch.paged([end - start], [start], tables, 16)
                    q, k, v = (x[start:end] for x in (step.q, step.k, step.v))
                    got = ragged_attention(q, k, v, chunk, step.kv, options)
                    assert torch.equal(got, unchunked[start:end])
    finally:
        torch.set_num_threads(threads)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([5, 11, 12, 20, 60]),  # New tokens.
            st.sampled_from([0, 200, 256, 300, 515, 600]),  # Past tokens.
            st.integers(0, 9),  # An earlier run with a common prefix.
            st.sampled_from([0.0, 0.4, 0.9, 1.0]),  # The common part of the past tokens.
        ),
        min_size=2,
        max_size=9,
    ),
    st.tuples(st.sampled_from([1, 3]), st.sampled_from([1, 2, 7]), st.sampled_from([6, 64, 256])),
    st.sampled_from([7, 16, 512]),
    st.sampled_from([None, 40, 300]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_runs_with_a_common_prefix_are_bit_identical_together_and_alone(
    runs: list[tuple[int, int, int, float]],
    heads: tuple[int, int, int],
    block_tokens: int,
    window: int | None,
    threads: int,
    has_terms: bool,
) -> None:
    lengths = [run[0] for run in runs]
    past = [run[1] for run in runs]
    shared = []
    for row, (_, row_past, drawn_row, common_part) in enumerate(runs):
        earlier = min(drawn_row, row)
        blocks = min(row_past, past[earlier]) // block_tokens
        shared.append((earlier, int(common_part * blocks)))
    step = case(lengths, past, heads, block_tokens, torch.bfloat16, shared=shared)
    options = draw_options(window, heads[0] * heads[1], sinks=has_terms, alibi=has_terms)
    threads_before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = step.attend(options)
    finally:
        torch.set_num_threads(threads_before)
    assert (together.double() - step.exact(options)).abs().max() < 0.02
    assert step.batch.block_tables is not None
    for row, start in enumerate(step.batch.query_starts):
        rows = slice(start, start + lengths[row])
        table = step.batch.block_tables[row : row + 1]
        batch = Batch.paged([lengths[row]], [past[row]], table, block_tokens)
        alone = ragged_attention(step.q[rows], step.k[rows], step.v[rows], batch, step.kv, options)
        assert torch.equal(alone, together[rows])


def test_tasks_cover_every_query_once_and_share_only_common_keys() -> None:
    tables = np.arange(1, 8 * 41 + 1).reshape(8, 41)
    tables[1:5, :32] = tables[0, :32]  # Two segments of 256 keys, common to 5 runs.
    tables[5, :16] = tables[0, :16]  # One segment.
    queries, past = [20, 20, 30, 20, 400, 20, 20, 20], [600, 520, 640, 200, 600, 600, 600, 10]
    tasks = kernels.plan_prefill_tasks(queries, past, tables, 16, queries_max=192, runs_max=9)
    shared = {frozenset(run for run, _, _ in parts): keys for parts, keys in tasks}
    assert shared[frozenset({0, 1, 2})] == 512
    assert all(len(runs) == 1 or keys == 512 for runs, keys in shared.items())
    parts = sorted(part for task in tasks for part in task.parts)
    assert [run for run, first, _ in parts if first == 0] == list(range(8))
    for run, run_queries in enumerate(queries):
        ranges = [(first, count) for part_run, first, count in parts if part_run == run]
        assert sum(count for _, count in ranges) == run_queries
        assert all(first + count == after for (first, count), (after, _) in pairwise(ranges))
    alone = kernels.plan_prefill_tasks(queries, past, tables, 16, queries_max=192, runs_max=1)
    assert all(len(task.parts) == 1 and task.shared_keys == 0 for task in alone)


def test_packed_gemm_equals_the_reference() -> None:
    check_packed_gemm()


@pytest.mark.parametrize("channels", [768, 3072, 4096])
def test_gemm_rows_are_independent(channels: int) -> None:
    check_independent_rows(channels)


@given(st.integers(1, 5), st.sampled_from([1, 15, 64, 130, 515]), st.integers(0, 4), st.booleans())
@settings(deadline=None)
def test_argmax_is_the_first_of_ties(rows: int, width: int, magnitude: int, padded: bool) -> None:
    generator = torch.Generator().manual_seed(rows * width)
    x = torch.randint(
        -magnitude, magnitude + 1, (rows, width + 3 * padded), generator=generator
    ).float()
    x[0, :: 1 + magnitude] = float("-inf")
    assert torch.equal(packed_linear.argmax_rows(x[:, :width]), x[:, :width].argmax(-1))
    x[0, -1] = float("nan")
    assert 0 <= int(packed_linear.argmax_rows(x[:, :width])[0]) < width


def test_matmul_argmax_is_the_first_of_ties() -> None:
    check_matmul_argmax()


def test_fused_norm_equals_torch() -> None:
    check_fused_norm()
