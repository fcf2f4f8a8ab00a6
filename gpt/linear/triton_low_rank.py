"""Launchers of the Triton kernels that apply the terms of adapters to the output of a linear.

They own the block sizes and the number of programs. Both depend on the shape of the linear and on
the number of rows, but not on the adapters, so that a CUDA graph can be replayed with others. No
launch synchronizes the device.
"""

import torch
from torch import Tensor

from gpt.linear import triton_low_rank_kernels as kernels
from gpt.linear.low_rank import FEW_ROWS_MAX, PARTS_MAX, LowRankKernels
from gpt.triton_runtime import launcher

BLOCK_RANKS = 16  # The least size of a factor of the tensor cores.
BLOCK_CHANNELS = 128
BLOCK_COLUMNS = 64
WARPS = 4
# The channels that a program of `shrink_rows` sums: at least this number, in at most this number of
# ranges. With few rows more programs read A at the same time. With many rows, a program for each
# group suffices, and fewer partial sums need less memory.
FEW_ROWS_SPLIT_CHANNELS = 256
FEW_ROWS_SPLITS_MAX = 16
MANY_ROWS_SPLIT_CHANNELS = 1024
MANY_ROWS_SPLITS_MAX = 4
# A launch has about this number of programs at most: they fill a GPU once. A program computes
# several groups of rows, if there are more.
PROGRAMS_MAX = 2048
SCALED_CHANNELS = 1024  # Of a program of `scale_input_rows`.


def add_terms(
    y: Tensor, x: Tensor, bias: Tensor | None, adapters: LowRankKernels, linear: str
) -> Tensor:
    """Compute `TermKernels.add_terms` in two launches; the sums are in fp32."""
    table, rows = adapters.table, adapters.rows
    x, y = x.contiguous(), y.contiguous()
    row_count, channels = x.shape
    columns = y.shape[1]
    split_channels = split_size(row_count, channels)
    splits = -(-channels // split_channels)
    # fp32 matrices must not be rounded to tf32.
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    indices = table.linears[linear], len(table.linears), row_count
    # Without low-rank products, one number per row is allocated and not used.
    rank_stride = max(adapters.ranks, 1)
    sums = x.new_empty(splits, row_count, rank_stride, dtype=torch.float32)
    inputs = table.memory, table.descriptors, rows.groups, rows.order
    if adapters.ranks:
        launcher.launch(
            kernels.shrink_rows,
            (splits, _group_programs(splits, rows.group_count_max)),
            *inputs,
            x,
            sums,
            *indices,
            channels,
            split_channels,
            rank_stride,
            IS_DIVISIBLE=channels % BLOCK_CHANNELS == 0,
            BLOCK_ROWS=rows.group_rows,
            BLOCK_RANKS=BLOCK_RANKS,
            BLOCK_CHANNELS=BLOCK_CHANNELS,
            PRECISION=precision,
            num_warps=WARPS,
        )
    # The last tile of each part may be partly empty.
    tiles = -(-columns // BLOCK_COLUMNS) + PARTS_MAX - 1
    launcher.launch(
        kernels.expand_rows,
        (tiles, _group_programs(tiles, rows.group_count_max)),
        *inputs,
        sums,
        y if bias is None else bias,
        y,
        *indices,
        columns,
        splits,
        rank_stride,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=rows.group_rows,
        BLOCK_RANKS=BLOCK_RANKS,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        PRECISION=precision,
        num_warps=WARPS,
    )
    return y


def split_size(rows: int, channels: int) -> int:
    """Return the number of channels of each partial sum, a multiple of BLOCK_CHANNELS."""
    least, splits_max = (
        (FEW_ROWS_SPLIT_CHANNELS, FEW_ROWS_SPLITS_MAX)
        if rows <= FEW_ROWS_MAX
        else (MANY_ROWS_SPLIT_CHANNELS, MANY_ROWS_SPLITS_MAX)
    )
    size = max(least, -(-channels // splits_max))
    return size + -size % BLOCK_CHANNELS


def _group_programs(tiles: int, group_count: int) -> int:
    """Return the number of programs among which the groups of rows are divided."""
    return max(1, min(group_count, PROGRAMS_MAX // tiles))


def scale_input(x: Tensor, adapters: LowRankKernels, linear: str) -> Tensor:
    """Compute `TermKernels.scale_input` in one launch."""
    table, x = adapters.table, x.contiguous()
    rows, channels = x.shape
    out = torch.empty_like(x)
    launcher.launch(
        kernels.scale_input_rows,
        (rows, -(-channels // SCALED_CHANNELS)),
        table.memory,
        table.descriptors,
        adapters.rows.slots,
        x,
        out,
        table.linears[linear],
        len(table.linears),
        channels,
        BLOCK_CHANNELS=SCALED_CHANNELS,
        num_warps=WARPS,
    )
    return out
