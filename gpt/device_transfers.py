"""Numbers between the host and a device, without waiting for what the device does meanwhile.

A copy takes its turn behind the work that was asked for before it, and whoever asks goes on. Only
`Coming.read` waits, and for no more than its own copy. On a CPU nothing moves.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """On the device; on a CPU it is the same memory.

    What is not pinned is staged by the driver before it comes back, and may change from then on.
    """
    x = torch.from_numpy(numbers)
    return x if device.type == "cpu" else x.to(device, non_blocking=True)


class Coming:
    """A tensor on its way to the host. It may be overwritten by work that is asked for later."""

    def __init__(self, x: Tensor) -> None:
        # Where the source is another's memory on the host, it must not change under the reader.
        self._x = x.to("cpu", non_blocking=True) if x.is_cuda else x.clone()
        self._there: torch.cuda.Event | None = None
        if x.is_cuda:
            self._there = torch.cuda.Event()
            self._there.record(torch.cuda.current_stream(x.device))

    def read(self) -> Tensor:
        if self._there is not None:
            self._there.synchronize()
        return self._x
