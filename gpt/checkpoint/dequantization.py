"""Dequantized weights: FP8 with scales and MXFP4, as stored tensors of an ordinary float dtype.

A dequantized tensor refers to the stored values and their scales. A read dequantizes only the box
that it needs, in fp32, and rounds once. So each rank dequantizes only its shard, and no complete
weight is in memory twice. The module knows neither file formats nor the names of tensors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.checkpoint.logical_tensor import (
    ComputedTensor,
    StoredTensor,
    block_bytes_of,
    read_box,
)

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# Dtypes of FP8 scales. Some files store e8m0 exponents as uint8.
SCALE_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e8m0fnu,
    torch.uint8,
)

MXFP4_GROUP = 32  # Consecutive inputs with one scale: 16 bytes of two values each.
MXFP4_EXPONENT_BIAS = 127
# FP4 (e2m1) by code; bit 3 is the sign.
FP4_VALUES = tuple(
    sign * magnitude for sign in (1.0, -1.0) for magnitude in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6)
)


def _fp8_values(dtype: torch.dtype) -> Tensor:
    """Return the fp32 value of each byte; the table is faster than the conversion in torch."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


def _fp4_pairs() -> Tensor:
    """Return the two fp32 values of each byte, low nibble first, as one int64 per byte."""
    codes = torch.arange(256)
    values = torch.tensor(FP4_VALUES)
    return torch.stack([values[codes & 15], values[codes >> 4]], -1).view(torch.int64).flatten()


_FP8_VALUES = {dtype: _fp8_values(dtype) for dtype in FP8_DTYPES}
_FP4_PAIRS = _fp4_pairs()


def _look_up(table: Tensor, stored: Tensor) -> Tensor:
    """Look up each byte of `stored` in a table of 256 entries."""
    indices = stored.view(torch.uint8).flatten().int()
    return table.index_select(0, indices).view(stored.shape)


@dataclass(frozen=True)
class Fp8Tensor(ComputedTensor):
    """FP8 values with one scale for each block of `block_shape`; the last blocks may be smaller.

    The values have two dimensions, or three if experts are stacked. The scales have as many
    dimensions, or none if there is one scale for all values.
    """

    values: StoredTensor
    scales: StoredTensor
    block_shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def location(self) -> str:
        return self.values.location

    @property
    def stored_dtype_name(self) -> str:
        return str(self.values.dtype).removeprefix("torch.")

    @property
    def block_bytes(self) -> int:
        return block_bytes_of(self.values)

    def compute_box(self, *box: slice) -> Tensor:
        values = _look_up(_FP8_VALUES[self.values.dtype], read_box(self.values, *box))
        if not values.numel():
            return values.to(self.dtype)
        scales = _scales_in_float32(self.scales.tensor())
        if scales.numel() > 1:
            scales = self._expand_scales(scales, *box)
        return values.mul_(scales).to(self.dtype)

    def _expand_scales(self, scales: Tensor, *box: slice) -> Tensor:
        """Return the scale of each value in a box; a dimension of size 1 is broadcast."""
        *experts, rows, columns = box
        block_rows, block_columns = self.block_shape
        row_blocks = torch.arange(*rows.indices(self.shape[-2])) // block_rows
        first, last = columns.start // block_columns, (columns.stop - 1) // block_columns
        scales = scales[tuple(experts)][..., row_blocks, first : last + 1]
        if first == last:
            return scales
        expanded = scales.unsqueeze(-1).expand(*scales.shape, block_columns).flatten(-2)
        offset = first * block_columns
        return expanded[..., columns.start - offset : columns.stop - offset : columns.step]


def _scales_in_float32(scales: Tensor) -> Tensor:
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.to(torch.float32)


@dataclass(frozen=True)
class Mxfp4Tensor(ComputedTensor):
    """Stacked MXFP4 weights of experts, as (experts, inputs, outputs).

    The files have (experts, outputs, inputs): `blocks` (experts, outputs, inputs / 32, 16) has the
    FP4 values of two inputs per byte, and `scales` (experts, outputs, inputs / 32) the exponents.
    The result is transposed, because GPT-OSS stores unquantized weights as (inputs, outputs).
    """

    blocks: StoredTensor
    scales: StoredTensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, groups, _ = self.blocks.shape
        return experts, groups * MXFP4_GROUP, outputs

    @property
    def location(self) -> str:
        return self.blocks.location

    @property
    def stored_dtype_name(self) -> str:
        return "mxfp4"

    @property
    def block_bytes(self) -> int:
        return block_bytes_of(self.blocks)

    def compute_box(self, *box: slice) -> Tensor:
        experts, inputs, outputs = box
        first, last = inputs.start // MXFP4_GROUP, (inputs.stop - 1) // MXFP4_GROUP
        groups = slice(first, last + 1)
        blocks = read_box(self.blocks, experts, outputs, groups, slice(0, MXFP4_GROUP // 2))
        exponents = read_box(self.scales, experts, outputs, groups).int() - MXFP4_EXPONENT_BIAS
        values = _look_up(_FP4_PAIRS, blocks).view(torch.float32)
        values = values.mul_(torch.pow(2.0, exponents).unsqueeze(-1)).flatten(-2).to(self.dtype)
        offset = first * MXFP4_GROUP
        values = values[..., inputs.start - offset : inputs.stop - offset : inputs.step]
        return values.transpose(1, 2)
