"""Triton kernels of linear adapters: the terms of all adapters of a batch in a few launches.

gpt/linear/triton_low_rank.py launches the kernels, and gpt/linear/low_rank.py describes their
inputs. The kernels read from memory which adapter acts on which rows, and where the terms of the
adapter are. So one launch serves any adapters and ranks, and a CUDA graph can replay it with other
ones. `shrink_rows` computes A x, split over the channels of x, and `expand_rows` adds the partial
sums in a fixed order and computes B (A x). No sum depends on the other rows.
"""

import triton
import triton.language as tl

# The fields of a descriptor, see gpt/linear/low_rank.py.
COLUMNS = tl.constexpr(0)
RANK = tl.constexpr(1)
FIRST_RANK = tl.constexpr(2)
SCALE = tl.constexpr(3)
OFFSET = tl.constexpr(4)
WIDTH = tl.constexpr(5)
STRIDE = tl.constexpr(6)
LORA_A = tl.constexpr(7)
LORA_B = tl.constexpr(8)
OUTPUT_FACTOR = tl.constexpr(9)
OUTPUT_SCALE = tl.constexpr(10)
INPUT_SCALE = tl.constexpr(11)
FIELDS = tl.constexpr(12)
PARTS = tl.constexpr(3)
GROUP_HEADER = tl.constexpr(4)
GROUP_FIELDS = tl.constexpr(4)
# The elements to which all tensors of adapters are aligned.
ALIGNMENT = tl.constexpr(16)


@triton.jit(do_not_specialize=["linear", "linears", "rows", "rank_stride"])
def shrink_rows(
    memory_ptr,
    table_ptr,
    groups_ptr,
    order_ptr,
    x_ptr,
    sums_ptr,
    linear,
    linears,
    rows,
    channels,
    split_channels,
    rank_stride,
    IS_DIVISIBLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store x @ A.T over a range of channels, for every program_id(1)-th group of rows.

    IS_DIVISIBLE: `channels` is a multiple of BLOCK_CHANNELS.
    """
    split = tl.program_id(0)
    split_start = split * split_channels
    split_end = tl.minimum(split_start + split_channels, channels)
    channel = tl.arange(0, BLOCK_CHANNELS)
    rank_index = tl.arange(0, BLOCK_RANKS)
    row_index = tl.arange(0, BLOCK_ROWS)
    group_count = tl.load(groups_ptr)
    for group in range(tl.program_id(1), group_count, tl.num_programs(1)):
        group_ptr = groups_ptr + GROUP_HEADER + group * GROUP_FIELDS
        slot = tl.load(group_ptr)
        position = tl.load(group_ptr + 1) + row_index
        in_group = row_index < tl.load(group_ptr + 2)
        row = tl.load(order_ptr + position, in_group, 0).to(tl.int64)
        x_ptrs = x_ptr + row[:, None] * channels + channel[None, :]
        sums_row = (split * rows + position).to(tl.int64) * rank_stride
        for part in range(PARTS):
            descriptor = table_ptr + ((slot * linears + linear) * PARTS + part) * FIELDS
            rank = tl.load(descriptor + RANK).to(tl.int32)
            first_rank = tl.load(descriptor + FIRST_RANK).to(tl.int32)
            lora_a = memory_ptr + tl.multiple_of(tl.load(descriptor + LORA_A), ALIGNMENT)
            for start in range(0, rank, BLOCK_RANKS):
                ranks = start + rank_index
                in_rank = ranks < rank
                a_ptrs = lora_a + ranks.to(tl.int64)[:, None] * channels + channel[None, :]
                sums = tl.zeros([BLOCK_ROWS, BLOCK_RANKS], tl.float32)
                for first in range(split_start, split_end, BLOCK_CHANNELS):
                    x_mask = in_group[:, None]
                    a_mask = in_rank[:, None]
                    if not IS_DIVISIBLE:
                        in_split = (first + channel < split_end)[None, :]
                        x_mask = x_mask & in_split
                        a_mask = a_mask & in_split
                    x = tl.load(x_ptrs + first, x_mask, 0.0)
                    a = tl.load(a_ptrs + first, a_mask, 0.0)
                    sums = tl.dot(x, a.T, sums, input_precision=PRECISION)
                tl.store(
                    sums_ptr + sums_row[:, None] + (first_rank + ranks)[None, :],
                    sums,
                    in_group[:, None] & in_rank[None, :],
                )


@triton.jit(do_not_specialize=["linear", "linears", "rows", "splits", "rank_stride"])
def expand_rows(
    memory_ptr,
    table_ptr,
    groups_ptr,
    order_ptr,
    sums_ptr,
    bias_ptr,
    y_ptr,
    linear,
    linears,
    rows,
    columns,
    splits,
    rank_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Apply the terms to BLOCK_COLUMNS columns of `y`, for every program_id(1)-th group of rows.

    The tiles of all parts of a linear are numbered one after another. With HAS_BIAS, `y` contains
    the bias.
    """
    row_index = tl.arange(0, BLOCK_ROWS)
    group_count = tl.load(groups_ptr)
    for group in range(tl.program_id(1), group_count, tl.num_programs(1)):
        group_ptr = groups_ptr + GROUP_HEADER + group * GROUP_FIELDS
        slot = tl.load(group_ptr)
        position = tl.load(group_ptr + 1) + row_index
        in_group = row_index < tl.load(group_ptr + 2)
        row = tl.load(order_ptr + position, in_group, 0).to(tl.int64)
        tile = tl.program_id(0)
        for part in range(PARTS):
            descriptor = table_ptr + ((slot * linears + linear) * PARTS + part) * FIELDS
            part_columns = tl.load(descriptor + COLUMNS).to(tl.int32)
            if (tile >= 0) & (tile * BLOCK_COLUMNS < part_columns):
                _expand_tile(
                    memory_ptr,
                    descriptor,
                    sums_ptr,
                    bias_ptr,
                    y_ptr + row[:, None] * columns,
                    in_group,
                    position,
                    tile,
                    part_columns,
                    rows,
                    splits,
                    rank_stride,
                    HAS_BIAS,
                    BLOCK_ROWS,
                    BLOCK_RANKS,
                    BLOCK_COLUMNS,
                    PRECISION,
                )
            tile -= tl.cdiv(part_columns, BLOCK_COLUMNS)


@triton.jit
def _expand_tile(
    memory_ptr,
    descriptor,
    sums_ptr,
    bias_ptr,
    y_row_ptrs,
    in_group,
    position,
    tile,
    part_columns,
    rows,
    splits,
    rank_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Apply the term of a descriptor to a tile of its columns."""
    column = tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    in_part = column < part_columns
    width = tl.load(descriptor + WIDTH).to(tl.int32)
    run_start = tl.load(descriptor + OFFSET).to(tl.int32)
    run_start += column // width * tl.load(descriptor + STRIDE).to(tl.int32)
    output_column = run_start + column % width
    in_tile = in_group[:, None] & in_part[None, :]
    y_ptrs = y_row_ptrs + output_column[None, :]
    y = tl.load(y_ptrs, in_tile, 0.0).to(tl.float32)
    rank = tl.load(descriptor + RANK).to(tl.int32)
    product = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    if rank > 0:
        scale = tl.load(descriptor + SCALE).to(tl.int32).to(tl.float32, bitcast=True)
        lora_b = memory_ptr + tl.multiple_of(tl.load(descriptor + LORA_B), ALIGNMENT)
        sums_rows = sums_ptr + position.to(tl.int64)[:, None] * rank_stride
        sums_rows += tl.load(descriptor + FIRST_RANK)
        rank_index = tl.arange(0, BLOCK_RANKS)
        for start in range(0, rank, BLOCK_RANKS):
            ranks = start + rank_index
            in_rank = ranks < rank
            sums_ptrs = sums_rows + ranks[None, :]
            in_sums = in_group[:, None] & in_rank[None, :]
            sums = tl.zeros([BLOCK_ROWS, BLOCK_RANKS], tl.float32)
            for split in range(splits):
                split_ptrs = sums_ptrs + (split * rows).to(tl.int64) * rank_stride
                sums += tl.load(split_ptrs, in_sums, 0.0)
            u = (sums * scale).to(memory_ptr.dtype.element_ty)
            # A rank that is a multiple of 8 lets a thread load 8 numbers at once. `tl.multiple_of`
            # would mark `rank` itself, also in the other branch.
            if rank % 8 == 0:
                aligned = rank // 8 * 8
                b_ptrs = lora_b + column.to(tl.int64)[:, None] * aligned + ranks[None, :]
                b = tl.load(b_ptrs, in_part[:, None] & (ranks < aligned)[None, :], 0.0)
            else:
                b_ptrs = lora_b + column.to(tl.int64)[:, None] * rank + ranks[None, :]
                b = tl.load(b_ptrs, in_part[:, None] & in_rank[None, :], 0.0)
            product = tl.dot(u, b.T, product, input_precision=PRECISION)
    factor_offset = tl.load(descriptor + OUTPUT_FACTOR)
    if factor_offset >= 0:
        factor = tl.load(memory_ptr + factor_offset + column, in_part, 0.0).to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + output_column, in_part, 0.0).to(tl.float32)[None, :]
            y = (y - bias + product) * factor[None, :] + bias
        else:
            y = (y + product) * factor[None, :]
    else:
        y += product
    scale_offset = tl.load(descriptor + OUTPUT_SCALE)
    if scale_offset >= 0:
        y *= tl.load(memory_ptr + scale_offset + column, in_part, 0.0).to(tl.float32)[None, :]
    tl.store(y_ptrs, y.to(y_row_ptrs.dtype.element_ty), in_tile)


@triton.jit(do_not_specialize=["linear", "linears"])
def scale_input_rows(
    memory_ptr,
    table_ptr,
    slots_ptr,
    x_ptr,
    out_ptr,
    linear,
    linears,
    channels,
    BLOCK_CHANNELS: tl.constexpr,
):
    """Store a block of channels of a row, multiplied by the input scales of the row's adapter."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    in_row = channel < channels
    offset = row.to(tl.int64) * channels + channel
    x = tl.load(x_ptr + offset, in_row, 0.0).to(tl.float32)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        for part in range(PARTS):
            descriptor = table_ptr + ((slot * linears + linear) * PARTS + part) * FIELDS
            scale_offset = tl.load(descriptor + INPUT_SCALE)
            if scale_offset >= 0:
                x *= tl.load(memory_ptr + scale_offset + channel, in_row, 0.0).to(tl.float32)
    tl.store(out_ptr + offset, x.to(out_ptr.dtype.element_ty), in_row)
