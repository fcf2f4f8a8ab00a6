"""Where a rank stands, and what its process is told when it is started.

Nothing here takes time to import: a rank reads it before it loads torch, and should by then know
whose child it is.
"""

from dataclasses import dataclass

import msgspec

from serving.config import ServerConfig


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
