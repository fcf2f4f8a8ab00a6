"""Rows in e4m3 with one scale per row: the input of fp8 matmuls.

Kernels of gpt/attention and gpt/linear write such rows, and gpt/linear/fp8_linear.py multiplies
them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0  # The largest e4m3 value.
ABSMAX_MIN = 1e-12  # Lower bound of a row's absolute maximum, so that no scale is 0.
FP8_ALIGNMENT = 16  # fp8 matmuls need a multiple of this number of channels.
# cuBLASLt has no fp8 kernel for some shapes with fewer rows, such as 16 rows of 16384 channels.
MATMUL_ROWS_MIN = 32


@dataclass(frozen=True)
class Fp8Rows:
    """Rows in e4m3, which represent the numbers `values * scales`."""

    # (rows, channels); the channels are padded with zeros to a multiple of FP8_ALIGNMENT.
    values: Tensor
    scales: Tensor  # (rows, 1), fp32

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @staticmethod
    def allocate(
        rows: int, channels: int, device: torch.device, dtype: torch.dtype = FP8_DTYPE
    ) -> "Fp8Rows":
        """Allocate rows for a kernel to write, with memory for at least MATMUL_ROWS_MIN rows."""
        rows_allocated = max(rows, MATMUL_ROWS_MIN)
        shape = rows_allocated, channels + -channels % FP8_ALIGNMENT
        values = torch.empty(shape, dtype=dtype, device=device)
        scales = torch.empty(rows_allocated, 1, dtype=torch.float32, device=device)
        return Fp8Rows(values[:rows], scales[:rows])
