"""Buffer pool: memory for files that are read, which is used again when nothing refers to it.

The page faults of new memory take more time than a read of the page cache, and the processor does
not compute meanwhile.
"""

import ctypes
import mmap
import threading
import weakref
from contextlib import suppress

from gpt.anonymous_mapping import map_anonymous
from gpt.thread_priority import use_lowest_priority

# The allocator of the C library uses smaller blocks again by itself.
POOLED_BYTES_MIN = 1 << 20
# `prefault_next` prepares the next buffer, and one more for a user that keeps the next one.
PREFAULTED_MAX = 2


def fits(buffer_bytes: int, size: int) -> bool:
    """Whether a buffer is used for `size` bytes; most of a much larger one would be wasted."""
    return size <= buffer_bytes <= 2 * size


class BufferPool:
    """Free buffers, of at most `free_bytes_max` together, for any thread."""

    def __init__(self, free_bytes_max: int) -> None:
        self._free_bytes_max = free_bytes_max
        self._free: list[mmap.mmap] = []
        self._last_size = 0  # Of the pooled buffer that was allocated last.
        self._prefaulting: threading.Thread | None = None
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
        self._last_size = size
        buffer = self._take(size) or map_anonymous(size)
        # The view, and a tensor from it, own the array.
        array = (ctypes.c_ubyte * size).from_buffer(buffer)
        weakref.finalize(array, self._release, buffer).atexit = False
        return memoryview(array).cast("B")

    def lacks(self, size: int) -> bool:
        """Whether the pool has no buffer for `size` bytes, although it may have one."""
        with self._lock:
            return POOLED_BYTES_MIN <= size <= self._free_bytes_max and not self._fitting(size)

    def prefault_next(self) -> threading.Thread | None:
        """Let a thread add free buffers of the size of the last one, until `PREFAULTED_MAX` fit.

        The page faults then do not delay the next `allocate`. Returns the thread, if one started.
        """
        with self._lock:
            size = self._last_size
            is_prefaulting = self._prefaulting is not None and self._prefaulting.is_alive()
            if is_prefaulting or not self._has_space(size):
                return None
            thread = threading.Thread(target=self._prefault, args=(size,), daemon=True)
            try:
                thread.start()
            except RuntimeError:  # The process may start no more threads.
                return None
            self._prefaulting = thread
            return thread

    def _prefault(self, size: int) -> None:
        """Add prefaulted buffers."""
        # At normal priority, the page faults would delay the steps, which use all cores.
        use_lowest_priority()
        with suppress(OSError):  # There is no memory: `allocate` reports it.
            for _ in range(PREFAULTED_MAX):
                if self._has_space(size):
                    buffer = map_anonymous(size)
                    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), 0, size)
                    self._release(buffer)

    def _has_space(self, size: int) -> bool:
        """Whether one more buffer of `size` bytes may be prefaulted."""
        with self._lock:
            return (
                0 < size <= self._free_bytes_max - self.free_bytes
                and len(self._fitting(size)) < PREFAULTED_MAX
            )

    def _take(self, size: int) -> mmap.mmap | None:
        """Remove and return the smallest free buffer for `size` bytes."""
        with self._lock:
            fitting = self._fitting(size)
            return self._free.pop(fitting[0]) if fitting else None

    def _fitting(self, size: int) -> list[int]:
        """Return the indices of the free buffers for `size` bytes, the smallest buffer first."""
        sizes = [len(buffer) for buffer in self._free]
        fitting = [index for index, n in enumerate(sizes) if fits(n, size)]
        return sorted(fitting, key=sizes.__getitem__)

    def _release(self, buffer: mmap.mmap) -> None:
        with self._lock:
            if self.free_bytes + len(buffer) <= self._free_bytes_max:
                self._free.append(buffer)
