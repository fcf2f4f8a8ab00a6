"""File locks: exclude other processes, also on other machines that share the file system.

The kernel releases the lock of a process that ends. The module imports only the standard library.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt.files.regular_files import open_regular_descriptor

# Time to wait for a lock. Its holder keeps it for milliseconds, unless its process is stopped or
# its disk does not answer.
LOCK_S = 5.0
LOCK_POLL_S = 0.005
# Errors of file systems without locks, such as some network file systems. Nothing is excluded
# there: an operation without a lock is better than none.
NO_LOCKS_ERRORS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
# Permissions of a lock file before the umask.
FILE_MODE = 0o660


@contextmanager
def lock_file(path: Path, *, is_shared: bool = False) -> Iterator[None]:
    """Hold the lock of `path`: alone, or with other holders that share it.

    The file is created, unless the lock is shared. If another process keeps the lock for LOCK_S,
    this raises an OSError.
    """
    operation = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    descriptor = _open_lock_file(path, is_shared)
    try:
        end = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in NO_LOCKS_ERRORS:
                    break
                if error.errno != errno.EWOULDBLOCK:
                    raise
                if time.monotonic() > end:
                    message = "another process holds the lock"
                    raise OSError(errno.ETIMEDOUT, message, str(path)) from None
                time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _open_lock_file(path: Path, is_shared: bool) -> int:
    if is_shared:
        return open_regular_descriptor(path, os.O_RDONLY)
    try:
        return open_regular_descriptor(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
    except PermissionError:
        if not path.exists():
            raise
        # Another user's file. To read it is enough for a lock on a local disk.
        return open_regular_descriptor(path, os.O_RDONLY)
