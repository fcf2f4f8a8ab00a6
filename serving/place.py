"""Where a rank stands, and what its process is told when it is started.

Also what a rank's process does first: see that it ends with its parent. Nothing here takes time to
import.
"""

import ctypes
import os
import signal
from dataclasses import dataclass

import msgspec

from serving.config import ServerConfig

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Place:
    """A rank among all of the mesh, and among those of its node, who share cores and devices."""

    rank: int
    ranks: int
    local: int
    locals: int


class Charge(msgspec.Struct, frozen=True):
    """What a rank's process reads from its standard input. Numbers of files are its own."""

    place: Place
    parent: int  # A process; the rank ends with it.
    config: ServerConfig
    store: int  # The file through which the ranks find each other.
    front: int | None = None  # Rank 0's socket to the front end.


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG is not to be had")
    if os.getppid() != parent:  # It ended before.
        os._exit(1)
