"""The memory of a process as the targets measure it: anonymous and shared, not mapped.

`HeapUsage` counts allocated bytes exactly: a leak shows there long before it shows in pages, which
allocators keep for reasons of their own.
"""

import ctypes
import gc
import mmap
import platform
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

KERNEL_RELEASE = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdecimal())
CAN_PREFAULT = KERNEL_RELEASE >= (5, 14)  # It has MADV_POPULATE_WRITE.


def anonymous_bytes(pid: int | str = "self") -> int:
    """RssAnon + RssShmem of a process. Pages of mapped files are not counted."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def resident_bytes(address: int, size: int) -> int | None:
    """Resident bytes of an address range; None if a part of the range is not mapped."""
    pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
        return None
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, of all arenas together."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@dataclass(frozen=True)
class HeapUsage:
    """What this process has allocated and not freed. Needs glibc 2.33."""

    bytes: int  # By malloc.
    blocks: int  # By Python's own allocator, which passes sizes over 512 bytes to malloc.
    objects: int  # Tracked by the garbage collector.

    @classmethod
    def now(cls) -> Self:
        gc.collect()
        # A list of all objects would leave a large hole in the heap, which small objects would
        # fill, so that the next list needs new pages: the measurement would increase the count.
        gc.freeze()
        objects = gc.get_freeze_count()
        gc.unfreeze()
        mallinfo = ctypes.CDLL(None).mallinfo2
        mallinfo.restype = _MallocInfo
        info = mallinfo()
        return cls(info.uordblks + info.hblkhd, sys.getallocatedblocks(), objects)


class PeakMemory:
    """The peak memory inside a `with`, sampled every few milliseconds."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.003):
            self.bytes = max(self.bytes, anonymous_bytes())
        self.bytes = max(self.bytes, anonymous_bytes())
