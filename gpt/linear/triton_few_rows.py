"""Launchers of the Triton kernels of a linear with few rows.

They own the block sizes, which depend on the shape of the weight. One kernel computes one row, and
another one all larger numbers of rows up to `ROWS_MAX`. No launch synchronizes the device.
"""

from dataclasses import dataclass

from torch import Tensor

from gpt.cpu.packed_linear import ACTIVATIONS, GATED_PREFIX
from gpt.linear import triton_matmul_kernels as kernels
from gpt.linear.unquantized_matmul import ROWS_MAX
from gpt.triton_runtime import launcher


@dataclass(frozen=True)
class Blocks:
    """The weight block of an iteration of `multiply_few_rows`, and how many are loaded ahead."""

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
# The weight block of an iteration of `multiply_single_row`, in rows of the weight and in channels.
# An iteration loads the whole block at once. A thread has 64 of the 8192 sums of a block, so that
# four programs fit into a multiprocessor, and together load enough ahead. Times on an H100 for the
# linears of a GPT with 4096 channels, in us, and of the kernel of few rows: fc1 46.8 and 49.8,
# qkv 36.0 and 39.4, proj 13.6 and 14.6, fc2 48.1 and 50.0, head 139.7 and 148.
SINGLE_ROW_WEIGHT_ROWS = 4
SINGLE_ROW_CHANNELS = 2048
SINGLE_ROW_WARPS = 4


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `unquantized_matmul.multiply_in_torch` for 1 to ROWS_MAX rows, in one kernel.

    The number of channels must be a multiple of 16. The output is rounded once. A row's output does
    not depend on the other rows, except that a single row is summed in another order. `out`:
    contiguous memory for the output.
    """
    x = x.contiguous()
    rows, channels = x.shape
    gated = activation is not None and activation.startswith(GATED_PREFIX)
    columns = len(weight) // (1 + gated)
    if out is None:
        out = x.new_empty(rows, columns)
    # `x` is a placeholder, if there is no bias.
    tensors = (x, weight, x if bias is None else bias, out)
    epilogue = {
        "HAS_BIAS": bias is not None,
        "ACTIVATION": ACTIVATIONS.index((activation or "").removeprefix(GATED_PREFIX) or None),
        "GATED": gated,
    }
    if rows == 1:
        block_columns = SINGLE_ROW_WEIGHT_ROWS // (1 + gated)
        launcher.launch(
            kernels.multiply_single_row,
            (-(-columns // block_columns),),
            *tensors,
            columns,
            channels,
            **epilogue,
            IS_DIVISIBLE=channels % SINGLE_ROW_CHANNELS == 0,
            BLOCK_COLUMNS=block_columns,
            BLOCK_CHANNELS=SINGLE_ROW_CHANNELS,
            num_warps=SINGLE_ROW_WARPS,
            num_stages=1,
        )
        return out
    blocks = _blocks_for(columns, gated=gated)
    launcher.launch(
        kernels.multiply_few_rows,
        (-(-columns // blocks.columns),),
        *tensors,
        rows,
        columns,
        channels,
        **epilogue,
        IS_DIVISIBLE=channels % blocks.channels == 0,
        ROWS=ROWS_MAX,
        BLOCK_COLUMNS=blocks.columns,
        BLOCK_CHANNELS=blocks.channels,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
    )
    return out


def _blocks_for(columns: int, *, gated: bool) -> Blocks:
    """Return the blocks of `multiply_few_rows` for a number of output columns."""
    if gated:
        return GATED_BLOCKS
    return WIDE_BLOCKS if columns >= WIDE_COLUMNS_MIN else NARROW_BLOCKS
