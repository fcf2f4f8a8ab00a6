"""Two tensors, element by element, as their blocks go by: how many differ, where, and by how much.

Tensors of one dtype are held against each other bit by bit. Of two dtypes both are widened, which
changes no value, and it is noted whether one is just the other, rounded. It knows no files.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Elements that are looked at in fp64 at once.
SLICE = 1 << 18

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Comparison:
    """What was found so far; blocks are matrices of whole rows, in their order."""

    elements: int = 0
    differing: int = 0
    first: tuple[int, int] | None = None  # Row and column.
    values: tuple[float, float] | None = None  # What stood there.
    largest: float = 0.0  # Of the differences; infinite where one of two is not finite.
    left_rounded: bool = True  # Whether the right one is the left one, rounded; or the reverse.
    right_rounded: bool = True

    def add(self, start: int, left: Tensor, right: Tensor) -> None:
        """A band of rows, the first of which is `start`."""
        self.elements += left.numel()
        if left.dtype == right.dtype:
            if same_bits(left, right):
                return
            for row, mine, its in _slices(left, right):
                self._look(start + row, mine, its, bits_of(mine) != bits_of(its))
            return
        wide = torch.promote_types(left.dtype, right.dtype)
        for row, mine, its in _slices(left, right):
            self.left_rounded = self.left_rounded and _is_rounded(mine, its)
            self.right_rounded = self.right_rounded and _is_rounded(its, mine)
            mine, its = mine.to(wide), its.to(wide)
            # What is not a number has many bit patterns, and conversion may choose another.
            differ = (bits_of(mine) != bits_of(its)) & ~(mine.isnan() & its.isnan())
            if bool(differ.any()):
                self._look(start + row, mine, its, differ)

    def _look(self, row: int, mine: Tensor, its: Tensor, differ: Tensor) -> None:
        count = int(differ.sum())
        if not count:
            return
        self.differing += count
        if self.first is None:
            at = int(differ.flatten().to(torch.uint8).argmax())
            self.first = (row + at // differ.shape[1], at % differ.shape[1])
            self.values = (float(mine.flatten()[at]), float(its.flatten()[at]))
        gaps = (mine.double() - its.double()).abs()[differ]
        largest = float(gaps.nan_to_num(math.inf, math.inf).max())
        self.largest = max(self.largest, largest)

    def record(self) -> dict[str, Any]:
        """For programs. JSON has no infinity, and none is written."""
        return {
            "elements": self.elements,
            "differing": self.differing,
            "first": list(self.first) if self.first else None,
            "largest": self.largest if math.isfinite(self.largest) else None,
        }

    @property
    def sentence(self) -> str:
        """How many, where, and by how much. Only if any differ."""
        assert self.first is not None and self.values is not None
        by = f"by {self.largest:.3g}" if math.isfinite(self.largest) else "in what is not finite"
        if self.largest == 0:
            by = "only in the sign of zero"
        mine, its = self.values
        return (
            f"{self.differing:,} of {self.elements:,} values differ, the first at "
            f"{list(self.first)} ({mine:.6g} and {its:.6g}), at most {by}"
        )


def same_bits(left: Tensor, right: Tensor) -> bool:
    """At the speed of memory, for tensors of one shape and dtype."""
    return torch.equal(bits_of(left), bits_of(right))


def bits_of(tensor: Tensor) -> Tensor:
    """The same bytes as whole numbers, of which each is equal only to itself."""
    return tensor.view(INTEGERS[tensor.dtype.itemsize])


def _is_rounded(wide: Tensor, narrow: Tensor) -> bool:
    """Whether the second is the first in the second's dtype."""
    made = wide.to(narrow.dtype)
    return bool(((bits_of(made) == bits_of(narrow)) | (made.isnan() & narrow.isnan())).all())


def _slices(left: Tensor, right: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Fewer rows at a time: what is computed of them takes many times their room."""
    count = max(1, SLICE // max(1, left.shape[1]))
    for row in range(0, left.shape[0], count):
        yield row, left[row : row + count], right[row : row + count]
