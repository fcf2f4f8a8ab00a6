"""Rank resources: the device and the CPU threads of its node that a rank uses.

Ranks on one node share its cores, its memory and, if it has fewer devices than ranks, its devices.
"""

import os
from dataclasses import dataclass

import torch

from gpt.host_limits import usable_cores
from gpt.model.loading import parse_device
from serving.ranks.rank_position import RankPosition


@dataclass(frozen=True)
class RankDevice:
    """A rank's device, and what it shares with other ranks."""

    device: torch.device
    ranks_sharing_memory: int  # Number of ranks that share this rank's memory, including itself.
    is_shared: bool = False  # Another rank runs on the same GPU.


def select_rank_device(name: str, position: RankPosition) -> RankDevice:
    """The device of a rank for the configured name; also sets torch's current CUDA device."""
    device = parse_device(name)
    local_ranks = position.local_world_size
    if device.type == "cpu":
        return RankDevice(device, local_ranks)
    if device.index is not None:
        return RankDevice(device, local_ranks, is_shared=local_ranks > 1)
    count = torch.cuda.device_count()
    own_device = torch.device("cuda", position.local_rank % count)
    torch.cuda.set_device(own_device)
    return RankDevice(own_device, -(-local_ranks // count), is_shared=local_ranks > count)


def set_thread_count(position: RankPosition, *, respect_environment: bool) -> None:
    """Set torch's number of threads to this rank's share of the node's CPU cores.

    `respect_environment`: use OMP_NUM_THREADS instead, if it is set.
    """
    environment_threads = os.environ.get("OMP_NUM_THREADS", "") if respect_environment else ""
    torch.set_num_threads(
        int(environment_threads)
        if environment_threads.isdecimal()
        else max(1, usable_cores() // position.local_world_size)
    )
