"""Products of bf16 rows with weights in panels, the order in which a CPU of today reads them best.

Written in C, for machines that multiply bf16 (gpt/cpu/src/gemm_bf16.c) and for those that have AVX2
alone (gpt/cpu/src/gemm_avx2.c): whoever asks hears from `multiplies` whether this is one. A product
ends with a bias, an activation and what is to be added while its sums are in registers, and may
begin with a norm.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.cpu.kernels import (
    BRIEF_NUMBERS,
    BRIEF_ROWS,
    INT,
    MACHINES,
    POINTER,
    brief,
    library,
    machine,
)

# Columns of a weight that lie together; of a gated one as many gates as what they multiply.
COLUMNS = 32
# What a product can end with, as the library counts it.
ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "relu2")
GATED = "gated_"  # So begins the name of one that multiplies half of the columns by the others.


class Weight(ctypes.Structure):
    """As in gpt/cpu/src/packed_weight.h."""

    _fields_ = (
        ("panels", POINTER),
        *((name, INT) for name in ("channels", "columns", "wide", "gated")),
        ("scales", POINTER),
    )


class NormRecord(ctypes.Structure):
    """As in gpt/cpu/src/packed_weight.h."""

    _fields_ = (
        ("scale", POINTER),
        ("shift", POINTER),
        ("epsilon", ctypes.c_double),
        ("rms", INT),
    )


def multiplies(weight: Tensor) -> bool:
    """Whether the library is there and has products with such a weight."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.shape[1] % 2 == 0
        and machine() in MACHINES[1:]
    )


def size(weight: Tensor, *, gated: bool = False) -> int:
    """How many numbers `Panels` holds of a weight."""
    columns, channels = weight.shape
    columns //= 1 + gated
    return -(-columns * (1 + gated) // COLUMNS) * COLUMNS * channels


class Norm:
    """LayerNorm, or RMSNorm, by a scale and perhaps a shift."""

    def __init__(self, scale: Tensor, shift: Tensor | None, epsilon: float, *, rms: bool) -> None:
        # Kept, since the library is given their addresses.
        self._numbers = [x.detach().float().contiguous() for x in (scale, shift) if x is not None]
        addresses = [x.data_ptr() for x in self._numbers]
        second = addresses[1] if shift is not None else None
        self.record = NormRecord(addresses[0], second, epsilon, rms)


class Panels:
    """A weight (columns, channels) in the order in which a product reads it, and the product.

    A row's sums are the same to the bit, however many rows there are.
    """

    def __init__(
        self, weight: Tensor, memory: Tensor, *, wide: bool = False, gated: bool = False
    ) -> None:
        """`memory` has room for `size` numbers, and becomes the weight.

        `wide`: what comes out is fp32, and not rounded to the weight's dtype. `gated`: the first
        half of the columns are gates of the second.
        """
        lanes, channels = COLUMNS // (1 + gated), weight.shape[1]
        halves = weight.detach().view(1 + gated, -1, channels)
        padded = F.pad(halves, (0, 0, 0, -halves.shape[1] % lanes))
        pairs = padded.view(1 + gated, -1, lanes, channels // 2, 2).permute(1, 3, 0, 2, 4)
        memory.view(pairs.shape).copy_(pairs)
        self._hold(weight, memory, None, wide=wide, gated=gated)

    def _hold(
        self, weight: Tensor, memory: Tensor, scales: Tensor | None, *, wide: bool, gated: bool
    ) -> None:
        """What such a weight became. With `scales`, of columns, it is bytes."""
        self._dtype = torch.float32 if wide else weight.dtype
        self._columns = weight.shape[0] // (1 + gated)
        # Kept, since the library is given their addresses.
        self._memory, self._scales = memory, scales
        self.numbers = memory.numel()
        self.nbytes = memory.nbytes + (0 if scales is None else scales.nbytes)
        self.record = Weight(
            *(memory.data_ptr(), weight.shape[1], self._columns, wide, gated),
            None if scales is None else scales.data_ptr(),
        )
        found = library()
        assert found is not None, "ask `multiplies` first"
        self._at_length = found.preamble_multiply
        small = memory.numel() <= BRIEF_NUMBERS
        self._in_brief = brief().preamble_multiply if small else self._at_length
        self._best_of = found.preamble_best_of

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        *,
        norm: Norm | None = None,
    ) -> Tensor:
        """The product of rows, or of normed ones."""
        x, rows, weight = x.contiguous(), x.shape[0], self.record
        if residual is not None:
            residual = residual.contiguous()
        assert x.dtype == torch.bfloat16 and x.shape[1] == weight.channels
        assert bias is None or bias.dtype == x.dtype
        assert residual is None or (residual.dtype == x.dtype and residual.shape[0] == rows)
        y = torch.empty((rows, self._columns), dtype=self._dtype)
        multiply = self._in_brief if rows <= BRIEF_ROWS else self._at_length
        multiply(
            ctypes.byref(weight),
            *(x.data_ptr(), rows),
            None if bias is None else bias.data_ptr(),
            number(activation, gated=bool(weight.gated)),
            None if residual is None else residual.data_ptr(),
            *(y.data_ptr(), torch.get_num_threads()),
            None if norm is None else ctypes.byref(norm.record),
        )
        return y

    def best(self, x: Tensor, norm: Norm | None, columns: int) -> Tensor | None:
        """The place of each row's largest result among the first `columns`, the first of equals.

        None: not every result is finite.
        """
        x, rows = x.contiguous(), x.shape[0]
        places = torch.empty(rows, dtype=torch.int64)
        whole = self.record
        weight = Weight(
            *(whole.panels, whole.channels, columns, whole.wide, whole.gated), whole.scales
        )
        odd = self._best_of(
            *(ctypes.byref(weight), x.data_ptr(), rows),
            None if norm is None else ctypes.byref(norm.record),
            *(places.data_ptr(), torch.get_num_threads()),
        )
        return None if odd else places


def number(activation: str | None, *, gated: bool) -> int:
    """An activation as the library counts it; a weight with gates has one that uses them."""
    name = activation or ""
    assert name.startswith(GATED) == gated, (activation, gated)
    return ACTIVATIONS.index(name.removeprefix(GATED) or None)


def best(logits: Tensor) -> Tensor:
    """The place of each row's largest number (R, V), the first of equals; NaN is never it."""
    fits = logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.stride(1) == 1
    if not fits or machine() != MACHINES[-1]:
        return logits.argmax(-1)
    rows, width = logits.shape
    places = torch.empty(rows, dtype=torch.int64)
    brief().preamble_best(
        *(logits.data_ptr(), logits.stride(0), rows, width),
        *(places.data_ptr(), torch.get_num_threads()),
    )
    return places
