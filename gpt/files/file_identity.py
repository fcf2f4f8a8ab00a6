"""File identity: tells without a checksum whether a file has changed since it was checked.

The identity has the inode, the size and the times of the last changes. A file that is replaced,
renamed or written gets other times, but times have a resolution. Therefore a file that has changed
shortly before has no identity.
"""

import os
import time
from pathlib import Path

# The coarsest resolution of the times of a file system.
TIME_RESOLUTION_NS = 2_000_000_000

FileIdentity = tuple[int, ...]
UNKNOWN: FileIdentity = ()


def file_identity(path: Path) -> FileIdentity:
    """Return the identity of a file; UNKNOWN if the file has changed shortly before."""
    status = os.stat(path)
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) < TIME_RESOLUTION_NS:
        return UNKNOWN
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
