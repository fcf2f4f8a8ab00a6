"""Non-blocking copies of tensors between host memory and GPU memory.

A copy is queued on the CUDA stream behind the work launched earlier, and the caller continues. Only
`PendingHostCopy.wait` blocks: it waits until its copy is complete.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device. On a CPU the tensor shares the array's memory.

    For a GPU the array must be in unpinned memory: the CUDA driver stages such an array before the
    call returns, so the caller may change it afterwards.
    """
    x = torch.from_numpy(array)
    return x if device.type == "cpu" else x.to(device, non_blocking=True)


class PendingHostCopy:
    """A copy of the tensor `x` to the host; it may not be complete yet.

    After the constructor returns, the caller may launch work that overwrites `x`: this does not
    change the copy.
    """

    def __init__(self, x: Tensor) -> None:
        # A host tensor is cloned, because the caller may change `x` while the copy is in use.
        self._host_tensor = x.to("cpu", non_blocking=True) if x.is_cuda else x.clone()
        self._copy_event: torch.cuda.Event | None = None
        if x.is_cuda:
            self._copy_event = torch.cuda.Event()
            self._copy_event.record(torch.cuda.current_stream(x.device))

    def wait(self) -> Tensor:
        """Block until the copy is complete, and return the host tensor."""
        if self._copy_event is not None:
            self._copy_event.synchronize()
        return self._host_tensor
