"""Products of bf16 rows with weights of one byte each, in panels: half of what bf16 reads.

Each column of a weight has a scale, and so has each run of 64 channels of a row, which is brought
to bytes on its way in (gpt/cpu/src/gemm_int8.c). A row's result does not depend on the rows beside
it. Whether a model still says the same with such weights is not known here: see
gpt/backends/quantization_check.py.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.cpu.kernels import library
from gpt.cpu.packed_linear import COLUMNS, Panels
from gpt.errors import ConfigError

# Channels of a row that share a scale: as in gpt/cpu/src/gemm.h.
GROUP = 64
# The largest code of a weight, on both sides of 0; the library is given it with 128 added.
CODE_MAX = 127
# How many numbers are brought to bytes at once, so that little memory is needed besides.
NUMBERS_MAX = 1 << 22


def multiplies() -> bool:
    """Whether this machine multiplies bytes, and the library is there."""
    found = library()
    # Where the library was built for another kind of machine it has no such thing to ask.
    ask = getattr(found, "preamble_multiplies_int8", None)
    return ask is not None and bool(ask())


def refuse_unfit(device: torch.device, dtype: torch.dtype) -> None:
    """Raise what a user should hear who asks for such weights where they cannot be."""
    if device.type != "cpu":
        reason, remedy = f"its device is {device.type}", "take linear_backend fp8 there"
    elif dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        reason, remedy = f"its dtype is {name}", "say dtype bfloat16 with it"
    elif library() is None:
        reason, remedy = "the library in C was not built", "build it (make kernels)"
    elif not multiplies():
        reason, remedy = "this CPU lacks AVX512-VNNI or AVX512-bf16", "leave it out"
    else:
        return
    raise ConfigError(f"weights is int8, and cannot be had: {reason}; {remedy}")


def size(weight: Tensor, *, gated: bool = False) -> int:
    """How many bytes `Int8Panels` holds of a weight."""
    columns, channels = weight.shape
    columns //= 1 + gated
    return -(-columns * (1 + gated) // COLUMNS) * COLUMNS * -(-channels // GROUP) * GROUP


class Int8Panels(Panels):
    """A weight as bytes with a scale for each column, and the product with it."""

    def __init__(
        self, weight: Tensor, memory: Tensor, *, wide: bool = False, gated: bool = False
    ) -> None:
        """`memory` has room for `size` bytes, and becomes the weight."""
        scales, _ = lay(weight, memory, gated=gated)
        self._hold(weight, memory, scales, wide=wide, gated=gated)


def lay(
    weight: Tensor, memory: Tensor, *, gated: bool = False, less: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Write a weight into `memory` as bytes, in panels, a few at a time; without `less` (channels).

    Of each column its scale, and the norm of what its bytes lack, as columns stand in panels.
    """
    _, channels = weight.shape
    lanes = COLUMNS // (1 + gated)
    halves = weight.detach().view(1 + gated, -1, channels)
    each = max(1, NUMBERS_MAX // (COLUMNS * channels))  # Panels at once.
    told: list[tuple[Tensor, Tensor]] = []
    words = memory.view(torch.int32)
    for start in range(0, halves.shape[1], each * lanes):
        part = halves[:, start : start + each * lanes].float()
        part = part if less is None else part - less
        part = F.pad(part, (0, -channels % GROUP, 0, -part.shape[1] % lanes))
        scales = part.abs().amax(-1, keepdim=True) / CODE_MAX
        codes = (part / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_()
        codes.clamp_(-CODE_MAX, CODE_MAX)
        errors = (part - codes * scales).norm(dim=-1, keepdim=True)
        # Four channels of a column lie together, as one word.
        four = codes.add_(128).to(torch.uint8).view(torch.int32)
        four = four.view(1 + gated, -1, lanes, four.shape[-1]).permute(1, 3, 0, 2)
        here, words = words[: four.numel()], words[four.numel() :]
        here.view(four.shape).copy_(four)
        told.append((_in_panels(scales, lanes), _in_panels(errors, lanes)))
    assert not len(words), "the memory is as large as `size` says"
    return torch.cat([scales for scales, _ in told]), torch.cat([errors for _, errors in told])


def _in_panels(numbers: Tensor, lanes: int) -> Tensor:
    """Numbers of columns, (halves, columns, 1), in the order in which columns stand in panels."""
    return numbers.view(len(numbers), -1, lanes).transpose(0, 1).flatten()
