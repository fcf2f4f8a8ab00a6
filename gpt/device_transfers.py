"""Non-blocking copies between host and device; only PendingHostCopy.wait blocks.

A copy is queued on the CUDA stream after the work that was launched earlier, and the caller
continues. PendingHostCopy.wait blocks only until its own copy is complete. On a CPU, `to_device`
shares the array's memory.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device; on a CPU it shares the array's memory.

    The CUDA driver stages unpinned memory before the call returns, so the caller may change an
    unpinned array afterwards.
    """
    x = torch.from_numpy(array)
    return x if device.type == "cpu" else x.to(device, non_blocking=True)


class PendingHostCopy:
    """A pending copy of a tensor to the host. Work that is launched later may overwrite `x`."""

    def __init__(self, x: Tensor) -> None:
        # A host tensor is cloned too, because the caller may change `x` while the copy is in use.
        self._host_tensor = x.to("cpu", non_blocking=True) if x.is_cuda else x.clone()
        self._copy_event: torch.cuda.Event | None = None
        if x.is_cuda:
            self._copy_event = torch.cuda.Event()
            self._copy_event.record(torch.cuda.current_stream(x.device))

    def wait(self) -> Tensor:
        if self._copy_event is not None:
            self._copy_event.synchronize()
        return self._host_tensor
