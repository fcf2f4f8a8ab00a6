"""Buffer pool: memory for files that are read, which is used again when nothing refers to it.

The page faults of new memory take more time than a read of the page cache, and the processor does
not compute meanwhile.
"""

import ctypes
import mmap
import threading
import weakref
from contextlib import suppress

# The allocator of the C library uses smaller blocks again by itself.
POOLED_BYTES_MIN = 1 << 20


class BufferPool:
    """Free buffers, of at most `free_bytes_max` together, for any thread."""

    def __init__(self, free_bytes_max: int) -> None:
        self._free_bytes_max = free_bytes_max
        self._free: list[mmap.mmap] = []
        # A garbage collection in `_take` may call `_release`.
        self._lock = threading.RLock()

    @property
    def free_bytes(self) -> int:
        return sum(map(len, self._free))

    def allocate(self, size: int) -> memoryview:
        """Return `size` bytes, with any content.

        They return to the pool with the last object that refers to the view, such as a tensor.
        """
        if size < POOLED_BYTES_MIN:
            return memoryview(bytearray(size))
        buffer = self._take(size) or _map_huge_pages(size)
        # The view, and a tensor from it, own the array.
        array = (ctypes.c_ubyte * size).from_buffer(buffer)
        weakref.finalize(array, self._release, buffer).atexit = False
        return memoryview(array).cast("B")

    def _take(self, size: int) -> mmap.mmap | None:
        """Remove and return the smallest free buffer for `size` bytes.

        A much larger one stays free, because its memory would be wasted.
        """
        with self._lock:
            sizes = [len(buffer) for buffer in self._free]
            fitting = [index for index, n in enumerate(sizes) if size <= n <= 2 * size]
            return self._free.pop(min(fitting, key=sizes.__getitem__)) if fitting else None

    def _release(self, buffer: mmap.mmap) -> None:
        with self._lock:
            if self.free_bytes + len(buffer) <= self._free_bytes_max:
                self._free.append(buffer)


def _map_huge_pages(size: int) -> mmap.mmap:
    """Return new memory, in huge pages where the system has them: it has fewer page faults."""
    buffer = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # A kernel may have no huge pages.
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
