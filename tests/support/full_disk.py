"""A full disk, simulated for this process: RLIMIT_FSIZE limits the size of each file.

As on a full disk, the system writes the bytes that fit, and the next write fails.
"""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(bytes_max: int) -> Iterator[None]:
    """Fail every write that would make a file larger than `bytes_max`."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
