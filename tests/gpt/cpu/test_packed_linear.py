"""What only machines with AVX512-bf16 do in C: prompts, products, norms and the best token."""

import os
import subprocess
import sys
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.attention.paged import ragged
from gpt.batch import Batch
from gpt.cpu import kernels, packed_linear
from gpt.model.layers import ACTIVATIONS
from tests.support.paged_steps import case

pytestmark = pytest.mark.skipif(
    kernels.machine() != kernels.MACHINES[-1],
    reason="torch does this on a machine without AVX512-bf16",
)


def test_a_prompt_is_the_same_to_the_bit_however_it_is_cut_and_on_any_number_of_threads() -> None:
    length = 700
    one = case([length], [0], (2, 2, 64), 16, torch.bfloat16)
    tables, threads = one.batch.tables, torch.get_num_threads()
    assert tables is not None
    try:
        for window in (None, 100):
            whole = one.attend(window)
            one.batch.kept.clear()
            for count, cuts in (
                (1, [0, 5, 261, 700]),
                (2, [0, 330, 500, 506, 700]),
                (3, [0, 16, 700]),
            ):
                torch.set_num_threads(count)
                for start, end in pairwise(cuts):
                    part = Batch.paged([end - start], [start], tables, 16)
                    x = [y[start:end] for y in (one.q, one.k, one.v)]
                    got = ragged(x[0], x[1], x[2], part, one.kv, window)
                    assert torch.equal(got, whole[start:end])
    finally:
        torch.set_num_threads(threads)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([5, 11, 12, 20, 60]),  # New tokens,
            st.sampled_from([0, 200, 256, 300, 515, 600]),  # those before them,
            st.integers(0, 9),  # an earlier sequence that has some of these too,
            st.sampled_from([0.0, 0.4, 0.9, 1.0]),  # and how many of them.
        ),
        min_size=2,
        max_size=9,
    ),
    st.tuples(st.sampled_from([1, 3]), st.sampled_from([1, 2, 7]), st.sampled_from([6, 64, 256])),
    st.sampled_from([7, 16, 512]),
    st.sampled_from([None, 40, 300]),
    st.sampled_from([1, 2]),
)
def test_runs_with_the_same_blocks_before_them_get_together_what_each_gets_alone(
    runs: list[tuple[int, int, int, float]],
    heads: tuple[int, int, int],
    size: int,
    window: int | None,
    threads: int,
) -> None:
    lengths, past = [run[0] for run in runs], [run[1] for run in runs]
    shared = []
    for row, (_, own, other, part) in enumerate(runs):
        other = min(other, row)
        shared.append((other, int(part * (min(own, past[other]) // size))))
    one = case(lengths, past, heads, size, torch.bfloat16, shared=shared)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = one.attend(window)
    finally:
        torch.set_num_threads(before)
    assert (together.double() - one.exact(window)).abs().max() < 0.02
    assert one.batch.tables is not None
    for row, begin in enumerate(one.batch.starts):
        rows = slice(begin, begin + lengths[row])
        batch = Batch.paged([lengths[row]], [past[row]], one.batch.tables[row : row + 1], size)
        alone = ragged(one.q[rows], one.k[rows], one.v[rows], batch, one.kv, window)
        assert torch.equal(alone, together[rows])


def test_pieces_hold_every_query_once_and_share_no_more_than_all_of_their_runs_know() -> None:
    tables = np.arange(1, 8 * 41 + 1).reshape(8, 41)
    tables[1:5, :32] = tables[0, :32]  # Two segments of 256 keys, of five runs.
    tables[5, :16] = tables[0, :16]  # One.
    queries, past = [20, 20, 30, 20, 400, 20, 20, 20], [600, 520, 640, 200, 600, 600, 600, 10]
    pieces = kernels.cut(queries, past, tables, 16, queries_max=192, runs_max=9)
    shared = {frozenset(run for run, _, _ in parts): keys for parts, keys in pieces}
    assert shared[frozenset({0, 1, 2})] == 512
    assert all(len(runs) == 1 or keys == 512 for runs, keys in shared.items())
    held = sorted(part for piece in pieces for part in piece.parts)
    assert [run for run, first, _ in held if first == 0] == list(range(8))
    for run, count in enumerate(queries):
        parts = [(first, many) for one, first, many in held if one == run]
        assert sum(many for _, many in parts) == count
        assert all(a + many == b for (a, many), (b, _) in pairwise(parts))
    alone = kernels.cut(queries, past, tables, 16, queries_max=192, runs_max=1)
    assert all(len(piece.parts) == 1 and piece.shared == 0 for piece in alone)


def test_threads_with_little_stack_attend_as_well() -> None:
    """OMP_STACKSIZE is the user's to say, and is read once by a process."""
    work = (
        "import torch; torch.set_num_threads(2); from tests.support.paged_steps import case; "
        "one = case([300], [300], (2, 2, 512), 16, torch.bfloat16); "
        "assert (one.attend(None).double() - one.exact(None)).abs().max() < 0.02"
    )
    small = os.environ | {"OMP_STACKSIZE": "128k"}
    subprocess.run([sys.executable, "-c", work], env=small, check=True, timeout=60)


@given(
    st.sampled_from([0, 1, 2, 11, 12, 13, 31, 100]),
    st.sampled_from([(2, 1), (6, 31), (64, 32), (96, 33), (130, 100), (2048, 40)]),
    st.sampled_from([None, *ACTIVATIONS]),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@settings(max_examples=100, deadline=None)
def test_products_with_panels_are_the_plain_ones(
    rows: int, shape: tuple[int, int], activation: str | None, parts: tuple[bool, bool, bool]
) -> None:
    channels, columns = shape
    has_bias, has_residual, wide = parts
    gated = activation is not None and activation.startswith(packed_linear.GATED)
    generator = torch.Generator().manual_seed(rows * channels)
    weight = torch.randn(columns * (1 + gated), channels, generator=generator).bfloat16()
    x = torch.randn(rows, channels, generator=generator).bfloat16()
    bias = torch.randn(len(weight), generator=generator).bfloat16() if has_bias else None
    residual = torch.randn(rows, columns, generator=generator).bfloat16() if has_residual else None
    memory = torch.empty(packed_linear.size(weight, gated=gated), dtype=torch.bfloat16)
    product = packed_linear.Panels(weight, memory, wide=wide, gated=gated)
    got = product(x, bias, activation, residual)
    y = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    y = y if activation is None else ACTIVATIONS[activation](y)
    y = y if residual is None else y + residual.double()
    assert got.dtype == (torch.float32 if wide else torch.bfloat16)
    near = max(1e-3, 3e-6 * channels)
    assert torch.allclose(got.double(), y, rtol=1e-4 if wide else 1e-2, atol=near)
    if rows == 0:
        return
    alone = product(x[-1:], bias, activation, residual if residual is None else residual[-1:])
    assert torch.equal(alone[0], got[-1])


@pytest.mark.parametrize("channels", [768, 3072, 4096])
def test_many_rows_are_multiplied_as_each_is_alone(channels: int) -> None:
    """They go in blocks, each past all panels; a thread takes panels of another's share as well."""
    generator, threads = torch.Generator().manual_seed(channels), torch.get_num_threads()
    weight = torch.randn(650, channels, generator=generator).bfloat16()
    x = torch.randn(601, channels, generator=generator).bfloat16()
    product = packed_linear.Panels(weight, torch.empty(packed_linear.size(weight)).bfloat16())
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            got = product(x, None, None, None)
            for row in (0, 11, 12, 251, 252, 299, 300, 600):
                assert torch.equal(product(x[row : row + 1], None, None, None)[0], got[row])
    finally:
        torch.set_num_threads(threads)
    assert torch.allclose(got.float(), x.float() @ weight.float().t(), rtol=1e-2, atol=0.1)


@given(st.integers(1, 5), st.sampled_from([1, 15, 64, 130, 515]), st.integers(0, 4), st.booleans())
@settings(deadline=None)
def test_the_best_is_the_first_of_the_largest(
    rows: int, width: int, kinds: int, padded: bool
) -> None:
    generator = torch.Generator().manual_seed(rows * width)
    x = torch.randint(-kinds, kinds + 1, (rows, width + 3 * padded), generator=generator).float()
    x[0, :: 1 + kinds] = float("-inf")
    assert torch.equal(packed_linear.best(x[:, :width]), x[:, :width].argmax(-1))
    x[0, -1] = float("nan")
    assert 0 <= int(packed_linear.best(x[:, :width])[0]) < width


@given(
    st.sampled_from([1, 4, 12, 13, 40]),
    st.sampled_from([(1, 1), (33, 20), (100, 100), (700, 650)]),
    st.sampled_from([0, 1, 200]),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_the_best_without_logits_is_the_first_of_the_largest(
    rows: int, columns: tuple[int, int], kinds: int, threads: int
) -> None:
    padded, real = columns
    generator, before = torch.Generator().manual_seed(rows * padded), torch.get_num_threads()
    whole = partial(torch.randint, -kinds, kinds + 1, generator=generator)
    weight, x = whole((padded, 16)).bfloat16(), whole((rows, 16)).bfloat16()
    weight[real:] = 99  # Which nobody may choose.
    head = packed_linear.Panels(
        weight, torch.empty(packed_linear.size(weight)).bfloat16(), wide=True
    )
    norm = packed_linear.Norm(torch.ones(16), None, 1e-5, rms=True)
    torch.set_num_threads(threads)
    try:
        for one in (None, norm):
            got = head.best(x, one, real)
            logits = head(x, None, None, None, norm=one)[:, :real]
            assert got is not None and torch.equal(got, logits.argmax(-1))
        for wrong in ("nan", "inf", "-inf"):
            spoilt = x.clone()
            spoilt[-1, 3] = float(wrong)
            assert head.best(spoilt, None, real) is None
    finally:
        torch.set_num_threads(before)


@given(st.sampled_from([2, 6, 32, 80, 130]), st.booleans(), st.booleans())
@settings(deadline=None)
def test_rows_are_normed_as_torch_norms_them(width: int, rms: bool, shifted: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    weight, x = (torch.randn(n, width, generator=generator).bfloat16() for n in (40, 7))
    scale, shift = torch.randn(2, width, generator=generator)
    product = packed_linear.Panels(
        weight, torch.empty(packed_linear.size(weight)).bfloat16(), wide=True
    )
    norm = packed_linear.Norm(scale, shift if shifted else None, 1e-5, rms=rms)
    got = product(x, None, None, None, norm=norm)
    y, wide = x.double(), (width,)
    y = F.rms_norm(y, wide, eps=1e-5) if rms else F.layer_norm(y, wide, eps=1e-5)
    y = y * scale.double() + (shift.double() if shifted else 0)
    want = y @ weight.double().t()
    # What is normed is rounded to bf16, once.
    limit = 2**-8 * (y.abs() @ weight.double().abs().t()) + 1e-4
    assert ((got.double() - want).abs() <= limit).all()
