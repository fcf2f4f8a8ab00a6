"""Checkpoint and adapter files: opens regular files without blocking, and refuses other files.

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
    # The first check precedes `open`, because opening a device can have an effect on it.
    _refuse_special_file(path, os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_special_file(path, os.fstat(descriptor))  # The name may mean another file now.
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular_file(path: Path) -> bytes:
    """Return the content of a file; raise an OSError at once if it is not a regular file."""
    with open_regular_file(path) as file:
        return file.read()


def _refuse_special_file(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
