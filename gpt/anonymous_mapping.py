"""Anonymous memory mappings in huge pages.

A mapping reads as zeros and takes no memory until it is written. Huge pages have fewer page faults
and TLB misses.
"""

import mmap
from contextlib import suppress


def map_anonymous(nbytes: int) -> mmap.mmap:
    """Return new private memory, in huge pages if the system has them."""
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # The kernel was built without transparent huge pages.
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
