"""Regular files: opened without waiting for another process; FIFOs and devices are refused.

In a directory that other programs write to, a name can be a FIFO, a socket or a device. To open a
FIFO blocks until a program opens its other end, and a device may never end. The module imports only
the standard library, and knows no file format.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular_file(path: Path) -> BinaryIO:
    """Open a file for reading; raise an OSError at once if it is not a regular file.

    Symbolic links are followed.
    """
    # Opening a device can have an effect on it. The file is checked again after it is opened,
    # because the name may mean another file then.
    _refuse_special_file(path, os.stat(path))
    return os.fdopen(open_regular_descriptor(path, os.O_RDONLY), "rb")


def open_regular_descriptor(path: Path, flags: int, mode: int = 0o666) -> int:
    """Call `os.open`; raise an OSError at once if `path` is not a regular file."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        _refuse_special_file(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular_file(path: Path) -> bytes:
    """Return the content of a file; raise an OSError at once if it is not a regular file."""
    with open_regular_file(path) as file:
        return file.read()


def _refuse_special_file(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
