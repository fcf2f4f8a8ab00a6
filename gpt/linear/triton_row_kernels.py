"""Triton kernels over rows: residual-add + norm and activation, optionally quantized to fp8.

gpt/linear/triton_norm_activation.py launches the kernels. In the norm kernel, a program processes
one row, which it keeps in registers. In the activation kernel, a program processes one block of a
row; with fp8 output it processes a whole row, because the absolute maximum is needed first: it
keeps the row in registers, or reads a very wide row twice. The kernels are memory-bound. NaN values
stay NaN, so that later checks find them.
"""

import triton
import triton.language as tl

from gpt.fp8_rows import ABSMAX_MIN, FP8_MAX

FP8_MAX_CONST = tl.constexpr(FP8_MAX)
ABSMAX_MIN_CONST = tl.constexpr(ABSMAX_MIN)


@triton.jit
def add_norm_row(
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
    ADD_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_RMS: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Add matmul output and bias to one row of the residual, and apply the norm to the sum.

    The sum and the norm are both optional. With QUANTIZE, the norm is stored in e4m3.
    """
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < width
    x = tl.load(x_ptr + row * width + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD_RESIDUAL:
        x += tl.load(y_ptr + row * width + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        residual_sum = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + offsets, residual_sum, mask=mask)
        x = residual_sum.to(tl.float32)  # The norm reads the rounded sum, as stored.
    if HAS_NORM:
        if not IS_RMS:
            x = tl.where(mask, x - tl.sum(x, 0) / width, 0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
        x = x * tl.load(scale_ptr + offsets, mask=mask, other=0.0)
        if HAS_SHIFT:
            x += tl.load(shift_ptr + offsets, mask=mask, other=0.0)
        if QUANTIZE:
            absmax = tl.maximum(tl.max(tl.abs(x), 0), ABSMAX_MIN_CONST)
            tl.store(scales_ptr + row, tl.div_rn(absmax, FP8_MAX_CONST))
            x = x * tl.div_rn(FP8_MAX_CONST, absmax)
        tl.store(
            out_ptr + row * out_width + offsets, x.to(out_ptr.dtype.element_ty), offsets < out_width
        )


@triton.jit
def activate_row(
    x_ptr,
    out_ptr,
    scales_ptr,
    width,
    out_width,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    SINGLE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Apply the activation to one block of a row, or with e4m3 output to a whole row.

    SINGLE_BLOCK: the block has all columns of the output, so that the row is read only once.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = x_ptr + row * width * (2 if GATED else 1)
    if QUANTIZE and SINGLE_BLOCK:
        offsets = tl.arange(0, BLOCK_SIZE)
        x = apply_activation(row_ptr, offsets, width, ACTIVATION, GATED)
        absmax = tl.maximum(tl.max(tl.abs(x), 0), ABSMAX_MIN_CONST)
        tl.store(scales_ptr + row, tl.div_rn(absmax, FP8_MAX_CONST))
        x = x * tl.div_rn(FP8_MAX_CONST, absmax)
        out = out_ptr + row * out_width + offsets
        tl.store(out, x.to(out_ptr.dtype.element_ty), offsets < out_width)
    elif QUANTIZE:
        block_absmax = tl.zeros([BLOCK_SIZE], tl.float32)
        for start in range(0, width, BLOCK_SIZE):
            x = apply_activation(
                row_ptr, start + tl.arange(0, BLOCK_SIZE), width, ACTIVATION, GATED
            )
            block_absmax = tl.maximum(block_absmax, tl.abs(x))
        absmax = tl.maximum(tl.max(block_absmax, 0), ABSMAX_MIN_CONST)
        tl.store(scales_ptr + row, tl.div_rn(absmax, FP8_MAX_CONST))
        inverse_scale = tl.div_rn(FP8_MAX_CONST, absmax)
        for start in range(0, out_width, BLOCK_SIZE):
            offsets = start + tl.arange(0, BLOCK_SIZE)
            x = apply_activation(row_ptr, offsets, width, ACTIVATION, GATED) * inverse_scale
            out = out_ptr + row * out_width + offsets
            tl.store(out, x.to(out_ptr.dtype.element_ty), offsets < out_width)
    else:
        offsets = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        x = apply_activation(row_ptr, offsets, width, ACTIVATION, GATED)
        out = out_ptr + row * out_width + offsets
        tl.store(out, x.to(out_ptr.dtype.element_ty), offsets < out_width)


@triton.jit
def apply_activation(row_ptr, offsets, width, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """Return the activation of some elements of a row, in fp32."""
    mask = offsets < width
    x = tl.load(row_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x = activate(x, ACTIVATION)
    if GATED:
        x = x * tl.load(row_ptr + width + offsets, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return the activation of numbers in fp32.

    ACTIVATION is an index of ACTIVATIONS in gpt.cpu.packed_linear.
    """
    if ACTIVATION == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 2:  # GELU by tanh: x (1 + tanh u) / 2 = x sigmoid(2 u).
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == 3:
        x = x * tl.sigmoid(x)
    elif ACTIVATION == 4 or ACTIVATION == 5:
        x = tl.where(x < 0, 0.0, x)  # tl.maximum would drop a NaN.
        if ACTIVATION == 4:
            x = x * x
    return x
