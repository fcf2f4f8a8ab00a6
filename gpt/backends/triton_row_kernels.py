"""Rows between two products in Triton: what gpt/backends/triton_norm_activation.py launches.

A program takes a row. One that is normed stays in registers; one that is only activated goes by in
pieces, twice if it leaves in e4m3, since its largest number must be known first. Bound by memory:
each number is read once and written once. A NaN stays one, so that whoever looks for it finds it.
"""

import triton
import triton.language as tl

from gpt.backends.norm_activation import LEAST, NARROW_MAX

NARROW_MOST = tl.constexpr(NARROW_MAX)
LEAST_MOST = tl.constexpr(LEAST)


@triton.jit
def end_row(
    x_ptr,
    y_ptr,
    bias_ptr,
    sum_ptr,
    scale_ptr,
    shift_ptr,
    out_ptr,
    scales_ptr,
    width,
    out_width,
    epsilon,
    ADDS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RMS: tl.constexpr,
    SHIFT: tl.constexpr,
    NARROW: tl.constexpr,
    PIECE: tl.constexpr,
):
    """A row: added to, normed, and perhaps in e4m3."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PIECE)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(y_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            x += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + at, total, mask=inside)
        x = total.to(tl.float32)  # What is normed is what others read.
    if NORM:
        if not RMS:
            x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
        x = x * tl.load(scale_ptr + at, mask=inside, other=0.0)
        if SHIFT:
            x += tl.load(shift_ptr + at, mask=inside, other=0.0)
        if NARROW:
            largest = tl.maximum(tl.max(tl.abs(x), 0), LEAST_MOST)
            tl.store(scales_ptr + row, tl.div_rn(largest, NARROW_MOST))
            x = x * tl.div_rn(NARROW_MOST, largest)
        tl.store(out_ptr + row * out_width + at, x.to(out_ptr.dtype.element_ty), at < out_width)


@triton.jit
def activate(
    x_ptr,
    out_ptr,
    scales_ptr,
    width,
    out_width,
    KIND: tl.constexpr,
    GATES: tl.constexpr,
    NARROW: tl.constexpr,
    PIECE: tl.constexpr,
):
    """A row, or a piece of one: activated, and perhaps in e4m3."""
    row = tl.program_id(0).to(tl.int64)
    here = x_ptr + row * width * (2 if GATES else 1)
    if NARROW:
        most = tl.zeros([PIECE], tl.float32)
        for start in range(0, width, PIECE):
            x = activated(here, start + tl.arange(0, PIECE), width, KIND, GATES)
            most = tl.maximum(most, tl.abs(x))
        largest = tl.maximum(tl.max(most, 0), LEAST_MOST)
        tl.store(scales_ptr + row, tl.div_rn(largest, NARROW_MOST))
        factor = tl.div_rn(NARROW_MOST, largest)
        for start in range(0, out_width, PIECE):
            at = start + tl.arange(0, PIECE)
            x = activated(here, at, width, KIND, GATES) * factor
            out = out_ptr + row * out_width + at
            tl.store(out, x.to(out_ptr.dtype.element_ty), at < out_width)
    else:
        at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
        x = activated(here, at, width, KIND, GATES)
        out = out_ptr + row * out_width + at
        tl.store(out, x.to(out_ptr.dtype.element_ty), at < out_width)


@triton.jit
def activated(here, at, width, KIND: tl.constexpr, GATES: tl.constexpr):
    """Some numbers of a row after the activation, numbered as in gpt.cpu.packed_linear."""
    inside = at < width
    x = tl.load(here + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:  # x (1 + tanh u) / 2 is x sigmoid(2 u).
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == 3:
        x = x * tl.sigmoid(x)
    elif KIND == 4:
        x = tl.where(x < 0, 0.0, x)  # A maximum would lose a NaN.
        x = x * x
    if GATES:
        x = x * tl.load(here + width + at, mask=inside, other=0.0).to(tl.float32)
    return x
