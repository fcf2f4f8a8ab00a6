"""Checks of the packed GEMM for every instruction set: the tests of each set run them.

Each check compares with torch in fp64, or with the same kernel on fewer rows.
"""

from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.cpu import packed_linear
from gpt.model.activation import ACTIVATIONS
from tests.support.tolerance import assert_within, epilogue_limits, exact_matmul


@given(
    st.sampled_from([0, 1, 2, 11, 12, 13, 31, 100]),
    st.sampled_from([(2, 1), (6, 31), (64, 32), (96, 33), (130, 100), (2048, 40)]),
    st.sampled_from([None, *ACTIVATIONS]),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@settings(max_examples=100, deadline=None)
def check_packed_gemm(
    rows: int, shape: tuple[int, int], activation: str | None, parts: tuple[bool, bool, bool]
) -> None:
    channels, columns = shape
    has_bias, has_residual, wide = parts
    gated = activation is not None and activation.startswith(packed_linear.GATED_PREFIX)
    generator = torch.Generator().manual_seed(rows * channels)
    weight = torch.randn(columns * (1 + gated), channels, generator=generator).bfloat16()
    x = torch.randn(rows, channels, generator=generator).bfloat16()
    bias = torch.randn(len(weight), generator=generator).bfloat16() if has_bias else None
    residual = torch.randn(rows, columns, generator=generator).bfloat16() if has_residual else None
    memory = torch.empty(packed_linear.packed_numel(weight, gated=gated), dtype=torch.bfloat16)
    product = packed_linear.PackedLinear(weight, memory, fp32_output=wide, gated=gated)
    got = product(x, bias, activation, residual)
    assert got.dtype == (torch.float32 if wide else torch.bfloat16)
    sums, magnitudes = exact_matmul(x, weight)
    want, limit = epilogue_limits(
        sums,
        magnitudes,
        channels,
        bias=bias,
        activation=activation,
        residual=residual,
        dtype=got.dtype,
    )
    assert_within(got, want, limit)
    if rows == 0:
        return
    alone = product(x[-1:], bias, activation, residual if residual is None else residual[-1:])
    assert torch.equal(alone[0], got[-1])


def check_independent_rows(channels: int) -> None:
    """A row's result depends neither on the other rows of the batch nor on the number of threads.

    The kernel multiplies blocks of rows by all panels; a thread that has finished its panels takes
    panels of other threads.
    """
    generator, threads = torch.Generator().manual_seed(channels), torch.get_num_threads()
    weight = torch.randn(650, channels, generator=generator).bfloat16()
    x = torch.randn(601, channels, generator=generator).bfloat16()
    product = packed_linear.PackedLinear(
        weight, torch.empty(packed_linear.packed_numel(weight)).bfloat16()
    )
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            got = product(x, None, None, None)
            for row in (0, 11, 12, 251, 252, 299, 300, 600):
                assert torch.equal(product(x[row : row + 1], None, None, None)[0], got[row])
    finally:
        torch.set_num_threads(threads)
    sums, magnitudes = exact_matmul(x, weight)
    assert_within(got, *epilogue_limits(sums, magnitudes, channels, dtype=got.dtype))


@given(
    st.sampled_from([1, 4, 12, 13, 40]),
    st.sampled_from([(1, 1), (33, 20), (100, 100), (700, 650)]),
    st.sampled_from([0, 1, 200]),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def check_matmul_argmax(rows: int, columns: tuple[int, int], kinds: int, threads: int) -> None:
    padded, real = columns
    generator, before = torch.Generator().manual_seed(rows * padded), torch.get_num_threads()
    draw_integers = partial(torch.randint, -kinds, kinds + 1, generator=generator)
    weight, x = draw_integers((padded, 16)).bfloat16(), draw_integers((rows, 16)).bfloat16()
    weight[real:] = 99  # Padding columns must not win.
    head = packed_linear.PackedLinear(
        weight, torch.empty(packed_linear.packed_numel(weight)).bfloat16(), fp32_output=True
    )
    norm = packed_linear.CpuNorm(torch.ones(16), None, 1e-5, rms=True)
    torch.set_num_threads(threads)
    try:
        for norm_or_none in (None, norm):
            got = head.matmul_argmax(x, norm_or_none, real)
            logits = head(x, None, None, None, norm=norm_or_none)[:, :real]
            assert got is not None and torch.equal(got, logits.argmax(-1))
        for wrong in ("nan", "inf", "-inf"):
            spoilt = x.clone()
            spoilt[-1, 3] = float(wrong)
            assert head.matmul_argmax(spoilt, None, real) is None
    finally:
        torch.set_num_threads(before)


@given(st.sampled_from([2, 6, 32, 80, 130]), st.booleans(), st.booleans())
@settings(deadline=None)
def check_fused_norm(width: int, rms: bool, shifted: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    weight, x = (torch.randn(n, width, generator=generator).bfloat16() for n in (40, 7))
    scale, shift = torch.randn(2, width, generator=generator)
    product = packed_linear.PackedLinear(
        weight, torch.empty(packed_linear.packed_numel(weight)).bfloat16(), fp32_output=True
    )
    norm = packed_linear.CpuNorm(scale, shift if shifted else None, 1e-5, rms=rms)
    got = product(x, None, None, None, norm=norm)
    y, wide = x.double(), (width,)
    y = F.rms_norm(y, wide, eps=1e-5) if rms else F.layer_norm(y, wide, eps=1e-5)
    y = y * scale.double() + (shift.double() if shifted else 0)
    want = y @ weight.double().t()
    # The output of the norm is rounded to bf16 once.
    limit = 2**-8 * (y.abs() @ weight.double().abs().t()) + 1e-4
    assert ((got.double() - want).abs() <= limit).all()
