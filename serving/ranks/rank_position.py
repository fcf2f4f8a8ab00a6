"""Rank position (rank, world size, local rank), and the spec that a rank's process starts with.

This module must not import torch, which takes seconds. A rank process first reads its spec, which
contains the ID of its parent process, and arranges to be killed when the parent exits. Only then
does it import torch. Therefore the rank also ends if its parent exits during this import.
"""

from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True)
class RankPosition:
    """A rank's number in the mesh, and its number among the ranks of its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


class WorkerSpec(msgspec.Struct, frozen=True):
    """Start-up data that a rank process reads from stdin.

    The rank process inherits the descriptors `store_fd` and `frontend_fd` under these numbers.
    The ranks find each other by a store of torch: a file, or for ranks of several nodes a server.
    """

    position: RankPosition
    parent_pid: int  # When the process with this ID exits, the rank process is killed.
    config: dict[str, Any]  # The settings of ServerConfig, by key.
    store_fd: int | None = None  # The file of torch's FileStore.
    store_port: int | None = None  # The port of torch's TCPStore on `host`.
    host: str = "127.0.0.1"  # The address of rank 0's node.
    frontend_fd: int | None = None  # Rank 0's socket to the front end.
