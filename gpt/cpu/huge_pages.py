"""Zeroed memory in huge pages, for the KV cache and packed weights on a CPU.

An anonymous mapping reads as zeros and takes no memory until it is written; huge pages reduce TLB
misses. On other devices the memory comes from `torch.zeros`.
"""

import math
import mmap

import torch
from torch import Tensor


def huge_page_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zeroed tensor; the first write allocates its memory, in huge pages if available."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would write, and so allocate, all of the memory at once.
    size_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
