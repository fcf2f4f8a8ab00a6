"""gpt/backends/norm_activation.py by our own Triton kernels: memory for results, and launches.

How many programs and warps a row has follows from its width alone, never from how many rows there
are, so its numbers do not depend on its company, and nothing here waits for the device.
"""

import torch
import triton
from torch import Tensor

from gpt.backends import triton_row_kernels as kernels
from gpt.backends.norm_activation import MULTIPLE, NARROW, Narrow, Norm, Rows
from gpt.cpu.packed_linear import ACTIVATIONS, GATED

PIECE = 4096  # Of a row that goes by.
PIECE_ALONE = 1024  # Of one whose pieces are programs of their own.
WARP_NUMBERS = 512  # Of a row, for each warp.


def added(
    y: Tensor, bias: Tensor | None, x: Tensor, norm: Norm | None, narrow: bool
) -> tuple[Tensor, Rows | None]:
    """As in gpt/backends/norm_activation.py."""
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    out = None if norm is None else _room(x, x.shape[1], narrow)
    _end(x, norm, out, (y.contiguous(), bias, total))
    return total, out


def normed(x: Tensor, norm: Norm, narrow: bool) -> Rows:
    """As in gpt/backends/norm_activation.py."""
    out = _room(x, x.shape[1], narrow)
    _end(x, norm, out, None)
    return out


def activated(x: Tensor, activation: str) -> Tensor:
    """As in gpt/backends/norm_activation.py."""
    out = _room(x, x.shape[1] // (1 + activation.startswith(GATED)), narrow=False)
    assert isinstance(out, Tensor)
    _activate(x, activation, out)
    return out


def narrowed(x: Tensor, activation: str | None) -> Narrow:
    """As in gpt/backends/norm_activation.py."""
    out = _room(x, x.shape[1] // (1 + (activation or "").startswith(GATED)), narrow=True)
    assert isinstance(out, Narrow)
    _activate(x, activation, out)
    return out


def _room(x: Tensor, width: int, narrow: bool, dtype: torch.dtype = NARROW) -> Rows:
    if not narrow:
        return x.new_empty(len(x), width)
    numbers = x.new_empty(len(x), width + -width % MULTIPLE, dtype=dtype)
    return Narrow(numbers, x.new_empty(len(x), 1, dtype=torch.float32))


def _end(
    x: Tensor,
    norm: Norm | None,
    out: Rows | None,
    sums: tuple[Tensor, Tensor | None, Tensor] | None,
) -> None:
    """`sums`: what is added to `x`, the bias of that, and where the sum goes."""
    x = x.contiguous()
    y, bias, total = sums or (x, None, x)
    scale = x if norm is None else norm.scale
    shift = None if norm is None else norm.shift
    numbers, scales = _parts(out, x)
    piece = max(triton.next_power_of_2(numbers.shape[1]), 16)
    with torch.cuda.device_of(x):
        kernels.end_row[(len(x),)](
            *(x, y, x if bias is None else bias, total),
            *(scale, x if shift is None else shift, numbers, scales),
            *(x.shape[1], numbers.shape[1], 0.0 if norm is None else norm.epsilon),
            ADDS=sums is not None,
            BIAS=bias is not None,
            NORM=norm is not None,
            RMS=norm is not None and norm.rms,
            SHIFT=shift is not None,
            NARROW=isinstance(out, Narrow),
            PIECE=piece,
            num_warps=_warps(piece),
        )


def _activate(x: Tensor, activation: str | None, out: Rows) -> None:
    x = x.contiguous()
    gated = activation is not None and activation.startswith(GATED)
    kind = ACTIVATIONS.index((activation or "").removeprefix(GATED) or None)
    numbers, scales = _parts(out, x)
    narrow = isinstance(out, Narrow)
    width = x.shape[1] // (1 + gated)
    # One program must see all of a row that leaves in e4m3. Others share even a single row.
    piece = min(max(triton.next_power_of_2(width), 16), PIECE if narrow else PIECE_ALONE)
    pieces = 1 if narrow else triton.cdiv(width, piece)
    with torch.cuda.device_of(x):
        kernels.activate[(len(x), pieces)](
            *(x, numbers, scales, width, numbers.shape[1]),
            KIND=kind,
            GATES=gated,
            NARROW=narrow,
            PIECE=piece,
            num_warps=_warps(piece),
        )


def _parts(out: Rows | None, other: Tensor) -> tuple[Tensor, Tensor]:
    """Where numbers and scales go; what is not written is any tensor."""
    if out is None:
        return other, other
    return (out.numbers, out.scales) if isinstance(out, Narrow) else (out, other)


def _warps(numbers: int) -> int:
    return min(max(numbers // WARP_NUMBERS, 1), 16)
