"""Zeroed memory in huge pages, for the KV cache, packed weights and adapters on a CPU.

It is an anonymous mapping. On other devices the memory comes from `torch.zeros`.
"""

import ctypes
import math
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from gpt.anonymous_mapping import map_anonymous
from gpt.thread_priority import use_lowest_priority

_PREFAULT_CHUNK_BYTES = 1 << 23  # Bytes per madvise() call of a prefault thread.
_MADV_POPULATE_WRITE = 23  # Linux 5.14 and later; Python's mmap module does not define it.


def huge_page_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zeroed tensor; the first write allocates its memory, in huge pages if available."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would write, and so allocate, all of the memory at once.
    size_bytes = math.prod(shape) * dtype.itemsize
    pages = map_anonymous(size_bytes)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def prefault(memory: Tensor, free_bytes: Callable[[], int], thread_name: str) -> None:
    """Pre-fault the OS pages of memory on a CPU in a low-priority background thread.

    Another server that starts at the same time may have counted the same free memory for its own
    use. To leave it enough memory, the thread stops when `free_bytes()` is less than the size of
    the memory. It also stops when the memory is freed.
    """
    arguments = (weakref.ref(memory), free_bytes)
    thread = threading.Thread(target=_prefault, args=arguments, name=thread_name, daemon=True)
    thread.start()


def _prefault(memory_ref: "weakref.ref[Tensor]", free_bytes: Callable[[], int]) -> None:
    use_lowest_priority()
    start, has_more = 0, True
    while has_more:
        memory = memory_ref()
        has_more = memory is not None and _prefault_chunk(memory, start, free_bytes)
        start += _PREFAULT_CHUNK_BYTES
        # Drop the reference, so that the memory can be freed between two chunks.
        del memory


def _prefault_chunk(memory: Tensor, start: int, free_bytes: Callable[[], int]) -> bool:
    """Pre-fault the chunk at byte `start`, and return True.

    Return False if `start` is not inside the memory, `free_bytes()` is less than the size of the
    memory, or madvise() fails.
    """
    length = min(_PREFAULT_CHUNK_BYTES, memory.nbytes - start)
    if length <= 0 or free_bytes() < memory.nbytes:
        return False
    return _madvise(memory.data_ptr() + start, length, _MADV_POPULATE_WRITE) == 0


def _madvise(address: int, length: int, advice: int) -> int:
    """Call libc's madvise(). Return 0 on success, -1 on failure or if libc has no madvise().

    ctypes releases the GIL during the call; Python's mmap.madvise() would hold it.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return -1
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(madvise(address, length, advice))
