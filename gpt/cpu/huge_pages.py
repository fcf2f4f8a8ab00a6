"""Zeroed memory in huge pages, for the KV cache and for packed weights.

Mapped anonymously, it is zero and takes no room until it is written; huge pages spare the TLB. On
other devices it is plain `torch.zeros`. Knows nothing of what is kept in it.
"""

import math
import mmap

import torch
from torch import Tensor


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that is there when it is written; large pages of it, where the machine has them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Mapped memory is zero and is not there until it is written; torch would write all of it now.
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
