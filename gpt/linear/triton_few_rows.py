"""Launcher of the Triton kernel of a linear with few rows.

It owns the block sizes, which depend on the shape of the weight, but not on the number of rows. One
kernel therefore computes all numbers of rows up to `ROWS_MAX`. No launch synchronizes the device.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from gpt.cpu.packed_linear import ACTIVATIONS, GATED_PREFIX
from gpt.linear import triton_matmul_kernels as kernels
from gpt.linear.unquantized_matmul import ROWS_MAX


@dataclass(frozen=True)
class Blocks:
    """The weight block of an iteration of the kernel, and how many of them are loaded ahead."""

    columns: int  # Output columns of a program.
    channels: int
    stages: int  # Iterations in flight.

    @property
    def warps(self) -> int:
        """One warp for each 16 columns, which is the least height of a matrix product."""
        return self.columns // 16


# Chosen for an H100. Its 132 multiprocessors need at least one program each, and together several
# MB in flight.
WIDE_BLOCKS = Blocks(columns=64, channels=128, stages=6)
NARROW_BLOCKS = Blocks(columns=32, channels=512, stages=3)
GATED_BLOCKS = Blocks(columns=32, channels=128, stages=6)  # Of each half of the weight.
WIDE_COLUMNS_MIN = 8192


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `unquantized_matmul.multiply_in_torch` for 1 to ROWS_MAX rows, in one kernel.

    The number of channels must be a multiple of 16. The output is rounded once. `out`: contiguous
    memory for it.
    """
    x = x.contiguous()
    rows, channels = x.shape
    gated = activation is not None and activation.startswith(GATED_PREFIX)
    columns = len(weight) // (1 + gated)
    if out is None:
        out = x.new_empty(rows, columns)
    blocks = _blocks_for(columns, gated=gated)
    with torch.cuda.device_of(x):
        kernels.multiply_few_rows[(triton.cdiv(columns, blocks.columns),)](
            x,
            weight,
            x if bias is None else bias,  # A placeholder, if there is no bias.
            out,
            rows,
            columns,
            channels,
            HAS_BIAS=bias is not None,
            ACTIVATION=ACTIVATIONS.index((activation or "").removeprefix(GATED_PREFIX) or None),
            GATED=gated,
            IS_DIVISIBLE=channels % blocks.channels == 0,
            ROWS=ROWS_MAX,
            BLOCK_COLUMNS=blocks.columns,
            BLOCK_CHANNELS=blocks.channels,
            STAGES=blocks.stages,
            num_warps=blocks.warps,
        )
    return out


def _blocks_for(columns: int, *, gated: bool) -> Blocks:
    """Return the blocks for a number of output columns."""
    if gated:
        return GATED_BLOCKS
    return WIDE_BLOCKS if columns >= WIDE_COLUMNS_MIN else NARROW_BLOCKS
