"""A user who may not do everything, where the tests are run by one who may.

Root reads any file because of two capabilities. Without them it is the owner of its files, and
their modes hold; so what a file's mode forbids can be tested by anyone.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

VERSION = 0x20080522  # Of the interface: sets of 64 bits, in two halves.
OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.

Sets = ctypes.c_uint32 * 6  # Effective, permitted, inheritable; twice.


@contextmanager
def plain_user() -> Iterator[None]:
    """This thread, and those that it starts, without what root has over files."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(VERSION, 0)
    before, without = Sets(), Sets()
    for sets in (before, without):
        _check(libc.capget(header, sets))
    without[0] &= ~OVERRIDES
    _check(libc.capset(header, without))
    try:
        yield
    finally:
        _check(libc.capset(header, before))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
