"""Pages of mapped files, asked for in one call instead of one fault after the other.

Touching a mapped file page by page costs more than reading it; a kernel that can (Linux 5.14) maps
a whole range at once, and reads what is not in memory yet. Elsewhere nothing happens, and the pages
come as they are touched. It knows no formats.
"""

import ctypes
import mmap

from torch import Tensor

POPULATE_READ = 22  # Python's mmap has no name for it.
WORTH_BYTES = 1 << 16
# A view of columns spans bytes that are not its own; beyond this they are not worth it.
SPREAD_MAX = 2

_libc = ctypes.CDLL(None, use_errno=True)


def fault_in(view: Tensor) -> None:
    """Have the pages under a view of a mapped file in memory."""
    if view.nbytes < WORTH_BYTES or view.device.type != "cpu":
        return
    steps = ((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    span = (sum(steps) + 1) * view.itemsize
    if span > SPREAD_MAX * view.nbytes:
        return
    start = view.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = view.data_ptr() + span - start
    # A kernel that does not know the advice says so, and nothing is lost.
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), POPULATE_READ)
