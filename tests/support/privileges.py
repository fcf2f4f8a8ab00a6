"""An unprivileged user, also where the tests run as root.

Root reads any file because of two capabilities. Without them root is only the owner of its files,
and their modes apply; so every user can test what a file's mode forbids.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

VERSION = 0x20080522  # Of the kernel's interface: sets of 64 bits, in two halves.
OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.

Sets = ctypes.c_uint32 * 6  # Effective, permitted, inheritable; twice.


@contextmanager
def plain_user() -> Iterator[None]:
    """This thread and its children, without root's capabilities over files."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION, 0)
    original = Sets()
    reduced = Sets()
    for sets in (original, reduced):
        _check(libc.capget(header, sets))
    reduced[0] &= ~OVERRIDES
    _check(libc.capset(header, reduced))
    try:
        yield
    finally:
        _check(libc.capset(header, original))


def _check(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
