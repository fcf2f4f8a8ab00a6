"""The likeliest token of some rows without the whole head: by its bytes, then some of itself.

Bytes take half of the memory that the head has, are multiplied in half of the time, and say in
which bounds each logit lies. Only panels with a token that can be the likeliest are then computed
from the head, as its product would: the token is that product's, to the last tie
(gpt/cpu/src/exact_argmax.c).
"""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.cpu import int8_linear
from gpt.cpu.huge_pages import zeros
from gpt.cpu.kernels import BRIEF_NUMBERS, POINTER, brief, library
from gpt.cpu.packed_linear import COLUMNS, Norm, Panels, Weight

ROWS_MAX = 256  # As in gpt/cpu/src/exact_argmax.c.
ROWS_READ = 12  # So many are multiplied while memory brings what they are multiplied by.
# In which norms of a head's columns bounds are sure: floats' squares must not come to nothing.
NORMS = (1e-10, 1e10)
ROWS_AT_ONCE = 4096  # Of a head, while it is read.
# Where it was not quicker, it is not tried for so many steps, and for twice as many the next time.
PAUSE_MIN, PAUSE_MAX = 8, 1024


class _Record(ctypes.Structure):
    """As in gpt/cpu/src/exact_argmax.c."""

    _fields_ = (
        ("bytes", Weight),
        *((name, POINTER) for name in ("errors", "norms", "mean", "exact")),
        ("norm_max", ctypes.c_double),
    )


class Shortlist:
    """Of a head in panels of bf16: `weight` is the same as it was, and is not kept."""

    def __init__(
        self,
        weight: Tensor,
        head: Panels,
        norm: Norm | None,
        mean: Tensor,
        norms: Tensor,
        norm_max: float,
    ) -> None:
        """Bytes lack the `mean` of all columns, whose `norms` without it are these. See `of`."""
        assert head.record.scales is None and head.record.channels == weight.shape[1]
        self._memory = zeros((int8_linear.size(weight),), torch.uint8, torch.device("cpu"))
        scales, errors = int8_linear.lay(weight, self._memory, less=mean)
        # A norm may have been rounded down. What bytes are has one of no more than both together.
        errors *= 1.001
        norms = F.pad(norms * 1.001, (0, len(errors) - len(norms))) + errors
        self._kept, self._norm = (head, scales, errors, norms, mean), norm
        memory, (columns, channels) = self._memory.data_ptr(), weight.shape
        self._record = _Record(
            Weight(memory, channels, columns, True, False, scales.data_ptr()),
            *(errors.data_ptr(), norms.data_ptr(), mean.data_ptr(), head.record.panels, norm_max),
        )
        self._panels = -(-len(weight) // COLUMNS)
        self._pause, self._again = 0, PAUSE_MIN
        self.steps, self.looked = 0, 0  # That it answered, and the head's panels that it took.

    @classmethod
    def of(cls, weight: Tensor, head: Panels, norm: Norm | None = None) -> "Shortlist | None":
        """Of a head, and the norm that rows go through first, if any.

        None: this machine cannot, or there is a number in such a head that spoils all bounds.
        """
        if not int8_linear.multiplies():
            return None
        # What all have in common, often much, decides nothing: finer steps are left for the rest.
        parts = weight.detach().split(ROWS_AT_ONCE)
        mean = torch.stack([part.float().sum(0) for part in parts]).sum(0) / len(weight)
        largest = torch.stack([part.float().norm(dim=1).amax() for part in parts]).amax()
        norms = torch.cat([(part.float() - mean).norm(dim=1) for part in parts])
        # Bytes are off by half a step in each channel, and a step is at most a 127th of the norm.
        slack = 1 + weight.shape[1] ** 0.5 / (2 * int8_linear.CODE_MAX)
        most = 1.001 * slack * float(torch.maximum(largest, norms.amax()))
        return cls(weight, head, norm, mean, norms, most) if NORMS[0] < most < NORMS[1] else None

    def best(self, x: Tensor) -> Tensor | None:
        """The token of each row, the first of equals, for at most ROWS_MAX rows.

        None: it would not be quicker just now, or there are numbers that allow no bounds.
        """
        assert x.dtype == torch.bfloat16 and len(x) <= ROWS_MAX
        if self._pause:
            self._pause -= 1
            return None
        x, places = x.contiguous(), torch.empty(len(x), dtype=torch.int64)
        short = self._memory.numel() * len(x) <= BRIEF_NUMBERS
        found = brief() if short else library()
        assert found is not None
        looked = found.preamble_shortlist(
            ctypes.byref(self._record),
            None if self._norm is None else ctypes.byref(self._norm.record),
            *(x.data_ptr(), len(x), places.data_ptr(), torch.get_num_threads()),
        )
        if looked < 0:
            return None
        self.steps, self.looked = self.steps + 1, self.looked + looked
        # A panel of the head is twice one of bytes, and that is what many rows take in work, too.
        if 2 * looked > self._panels * max(1, len(x) / ROWS_READ):
            self._pause, self._again = self._again, min(2 * self._again, PAUSE_MAX)
        else:
            self._again = PAUSE_MIN
        return places
