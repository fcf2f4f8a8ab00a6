"""Tensor diff: compares two tensors element by element, block by block.

A diff has the number of differing elements, the index of the first differing element, and the
largest absolute difference. Tensors of the same dtype are compared bit by bit. Tensors of different
dtypes are converted to a dtype that represents the values of both exactly; the diff then also
records whether one tensor has the values of the other tensor, rounded. The module opens no files.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt.json_output import nonfinite_to_none

# Number of elements that are compared at a time; it limits the memory for fp64 temporaries.
SLICE_ELEMENTS = 1 << 18

INT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class TensorDiff:
    """The differences of all blocks added so far; a block is a matrix of consecutive rows."""

    elements: int = 0
    differing_elements: int = 0
    first_index: tuple[int, int] | None = None  # Row and column.
    first_values: tuple[float, float] | None = None  # The two values at `first_index`.
    abs_diff_max: float = 0.0  # Infinite if a differing value is NaN or infinite.
    # Whether `right` equals `left` rounded to the dtype of `right`, and vice versa. Both fields are
    # used only if the dtypes differ.
    right_is_rounded_left: bool = True
    left_is_rounded_right: bool = True

    def add_block(self, first_row: int, left: Tensor, right: Tensor) -> None:
        """Compare two blocks of the same rows, which begin at row `first_row` of the tensors."""
        self.elements += left.numel()
        if left.dtype == right.dtype:
            if bitwise_equal(left, right):
                return
            for row, left_slice, right_slice in _row_slices(left, right):
                self._add_mismatch(
                    first_row + row,
                    left_slice,
                    right_slice,
                    int_view(left_slice) != int_view(right_slice),
                )
            return
        wide_dtype = torch.promote_types(left.dtype, right.dtype)
        for row, left_slice, right_slice in _row_slices(left, right):
            self.right_is_rounded_left = self.right_is_rounded_left and _is_rounding_of(
                left_slice, right_slice
            )
            self.left_is_rounded_right = self.left_is_rounded_right and _is_rounding_of(
                right_slice, left_slice
            )
            left_slice, right_slice = left_slice.to(wide_dtype), right_slice.to(wide_dtype)
            # Two NaNs count as equal, because a dtype conversion may change the bits of a NaN.
            mismatch = (int_view(left_slice) != int_view(right_slice)) & ~(
                left_slice.isnan() & right_slice.isnan()
            )
            if bool(mismatch.any()):
                self._add_mismatch(first_row + row, left_slice, right_slice, mismatch)

    def _add_mismatch(self, row: int, left: Tensor, right: Tensor, mismatch: Tensor) -> None:
        count = int(mismatch.sum())
        if not count:
            return
        self.differing_elements += count
        if self.first_index is None:
            flat_index = int(mismatch.flatten().to(torch.uint8).argmax())
            self.first_index = (
                row + flat_index // mismatch.shape[1],
                flat_index % mismatch.shape[1],
            )
            self.first_values = (
                float(left.flatten()[flat_index]),
                float(right.flatten()[flat_index]),
            )
        abs_diffs = (left.double() - right.double()).abs()[mismatch]
        abs_diff_max = float(abs_diffs.nan_to_num(math.inf, math.inf).max())
        self.abs_diff_max = max(self.abs_diff_max, abs_diff_max)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values; JSON has no infinity, so an infinite difference becomes null."""
        return {
            "elements": self.elements,
            "differing": self.differing_elements,
            "first": list(self.first_index) if self.first_index else None,
            "largest": nonfinite_to_none(self.abs_diff_max),
        }

    @property
    def summary(self) -> str:
        """Text with the number of differing elements, the first of them and the largest difference.

        At least one element must differ.
        """
        assert self.first_index is not None and self.first_values is not None
        if self.abs_diff_max == 0:
            magnitude = "only in the sign of zero"
        elif math.isfinite(self.abs_diff_max):
            magnitude = f"at most by {self.abs_diff_max:.3g}"
        else:
            magnitude = "some in values that are not finite"
        left_element, right_element = self.first_values
        return (
            f"{self.differing_elements:,} of {self.elements:,} values differ, the first at "
            f"{list(self.first_index)} ({left_element:.6g} and {right_element:.6g}), {magnitude}"
        )


def bitwise_equal(left: Tensor, right: Tensor) -> bool:
    """Tell whether two tensors of the same shape and dtype have the same bits."""
    return torch.equal(int_view(left), int_view(right))


def int_view(tensor: Tensor) -> Tensor:
    """View the bits as integers. Then == compares bits: NaN can equal NaN, 0.0 and -0.0 differ."""
    return tensor.view(INT_DTYPES[tensor.dtype.itemsize])


def _is_rounding_of(wide: Tensor, narrow: Tensor) -> bool:
    """Tell whether `narrow` equals `wide` rounded to the dtype of `narrow`."""
    rounded = wide.to(narrow.dtype)
    return bool(
        ((int_view(rounded) == int_view(narrow)) | (rounded.isnan() & narrow.isnan())).all()
    )


def _row_slices(left: Tensor, right: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first row, left rows, right rows) in slices of about SLICE_ELEMENTS elements."""
    slice_rows = max(1, SLICE_ELEMENTS // max(1, left.shape[1]))
    for row in range(0, left.shape[0], slice_rows):
        yield row, left[row : row + slice_rows], right[row : row + slice_rows]
