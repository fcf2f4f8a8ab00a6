"""Rank resources: the device of a rank, and the ranks that share its memory.

The ranks of a node share its memory. They also share its GPUs if the node has fewer GPUs than
ranks, or if the configured device is one GPU, such as "cuda:0".
"""

from dataclasses import dataclass

import torch

from gpt.model.loading import parse_device
from serving.ranks.rank_position import RankPosition


@dataclass(frozen=True)
class RankDevice:
    """A rank's device, and the number of ranks that use the memory of the device."""

    device: torch.device
    # Includes this rank. If the device is a CPU, this is the number of ranks of the node.
    ranks_sharing_memory: int
    is_shared: bool = False  # Another rank uses the same GPU.


def with_index(device: torch.device) -> torch.device:
    """Return the device with its index. A GPU without one is the calling thread's current GPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def select_rank_device(name: str, position: RankPosition) -> RankDevice:
    """Return the device of a rank for the configured name.

    Also make a GPU the current device of the calling thread, which must be the thread that runs the
    steps: libraries and pinned memory use the current device.
    """
    device = parse_device(name)
    local_ranks = position.local_world_size
    if device.type == "cpu":
        return RankDevice(device, local_ranks)
    if device.index is not None:
        torch.cuda.set_device(device)
        return RankDevice(device, local_ranks, is_shared=local_ranks > 1)
    count = torch.cuda.device_count()
    own_device = torch.device("cuda", position.local_rank % count)
    torch.cuda.set_device(own_device)
    ranks_per_device = -(-local_ranks // count)  # Rounded up.
    return RankDevice(own_device, ranks_per_device, is_shared=local_ranks > count)
