"""Triton kernels of a linear with few rows: matmul, bias and activation in one launch.

gpt/linear/triton_few_rows.py launches the kernels. With few rows, the time of a linear is the time
to read its weight. A program computes some output columns of all rows: it reads the weight of these
columns once, and accumulates in fp32. No sum is split over programs, so no second kernel adds
partial sums, and a row's output does not depend on the values of the other rows. One row has a
kernel of its own, which does not use the tensor cores.
"""

import triton
import triton.language as tl

from gpt.linear.triton_row_kernels import activate


@triton.jit(do_not_specialize=["rows"])
def multiply_few_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    channels,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    IS_DIVISIBLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute activation(x @ weight.T + bias) for BLOCK_COLUMNS output columns.

    `rows` is at most ROWS. IS_DIVISIBLE: `channels` is a multiple of BLOCK_CHANNELS. With
    GATED, the weight has 2 * `columns` rows, and the second half is multiplied with the activation.
    """
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK_CHANNELS)
    # Rows and columns behind the end read the last one. They are not stored.
    x_ptrs = x_ptr + (tl.minimum(row, rows - 1) * channels)[:, None] + channel[None, :]
    weight_row = tl.minimum(column, columns - 1).to(tl.int64) * channels
    weight_ptrs = weight_ptr + weight_row[:, None] + channel[None, :]
    up_ptrs = weight_ptrs + columns.to(tl.int64) * channels
    # The weight block is the first factor, because a matrix product has at least 16 rows, but only
    # 8 columns.
    y = tl.zeros([BLOCK_COLUMNS, ROWS], tl.float32)
    if GATED:
        up = tl.zeros([BLOCK_COLUMNS, ROWS], tl.float32)
    for start in tl.range(0, channels, BLOCK_CHANNELS, num_stages=STAGES):
        mask = None if IS_DIVISIBLE else (start + channel < channels)[None, :]
        other = None if IS_DIVISIBLE else 0.0
        x = tl.load(x_ptrs + start, mask, other)
        weight = tl.load(weight_ptrs + start, mask, other)
        y = tl.dot(weight, x.T, y)
        if GATED:
            weight = tl.load(up_ptrs + start, mask, other)
            up = tl.dot(weight, x.T, up)
    in_columns = column < columns
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, in_columns, 0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias_ptr + columns + column, in_columns, 0.0).to(tl.float32)[:, None]
    y = activate(y, ACTIVATION)
    if GATED:
        y *= up
    tl.store(
        out_ptr + (row * columns)[None, :] + column[:, None],
        y.to(out_ptr.dtype.element_ty),
        in_columns[:, None] & (row < rows)[None, :],
    )


@triton.jit
def multiply_single_row(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    columns,
    channels,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    IS_DIVISIBLE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """Compute `multiply_few_rows` for one row, on the CUDA cores.

    A thread multiplies the weights that it has loaded, and adds each product to a sum of its own.
    Threads exchange their sums only once, at the end. For the tensor cores, each block of the
    weight would be moved to other threads through shared memory.
    """
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    channel = tl.arange(0, BLOCK_CHANNELS)
    # Columns behind the end read the last one. They are not stored.
    weight_row = tl.minimum(column, columns - 1).to(tl.int64) * channels
    weight_ptrs = weight_ptr + weight_row[:, None] + channel[None, :]
    up_ptrs = weight_ptrs + columns.to(tl.int64) * channels
    sums = tl.zeros([BLOCK_COLUMNS, BLOCK_CHANNELS], tl.float32)
    if GATED:
        up_sums = tl.zeros([BLOCK_COLUMNS, BLOCK_CHANNELS], tl.float32)
    for start in range(0, channels, BLOCK_CHANNELS):
        mask = None if IS_DIVISIBLE else (start + channel < channels)[None, :]
        other = None if IS_DIVISIBLE else 0.0
        x = tl.load(x_ptr + start + channel[None, :], mask, other).to(tl.float32)
        sums += tl.load(weight_ptrs + start, mask, other).to(tl.float32) * x
        if GATED:
            up_sums += tl.load(up_ptrs + start, mask, other).to(tl.float32) * x
    in_columns = column < columns
    y = tl.sum(sums, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, in_columns, 0.0).to(tl.float32)
    y = activate(y, ACTIVATION)
    if GATED:
        up = tl.sum(up_sums, 1)
        if HAS_BIAS:
            up += tl.load(bias_ptr + columns + column, in_columns, 0.0).to(tl.float32)
        y *= up
    tl.store(out_ptr + column, y.to(out_ptr.dtype.element_ty), in_columns)
