"""Non-blocking copies of tensors between host memory and GPU memory.

A copy is queued on the CUDA stream behind the work launched earlier, and the caller continues. Only
`PendingHostCopy.wait` blocks: it waits until its copy is complete.
"""

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(x: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Return the host array or tensor `x` as a tensor on the device.

    On a CPU the result shares the memory of `x`. For a GPU, `x` must be in unpinned memory. It is
    first copied to pinned memory, because the CUDA driver may wait for the device before it copies
    unpinned memory. So the caller may change `x` afterwards. torch reuses the pinned memory only
    when the copy to the device is complete.
    """
    host_tensor = x if isinstance(x, Tensor) else torch.from_numpy(x)
    if device.type == "cpu":
        return host_tensor
    return host_tensor.pin_memory().to(device, non_blocking=True)


def record_event(device: torch.device) -> Callable[[], None]:
    """Return a function that blocks until the work that is now queued on the stream is complete.

    On a CPU no work is queued, so the function returns at once.
    """
    if device.type == "cpu":
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


class PendingHostCopy:
    """A copy of the tensor `x` to the host; it may not be complete yet.

    After the constructor returns, the caller may launch work that overwrites `x`: this does not
    change the copy.
    """

    def __init__(self, x: Tensor) -> None:
        # A host tensor is cloned, because the caller may change `x` while the copy is in use.
        self._host_tensor = x.to("cpu", non_blocking=True) if x.is_cuda else x.clone()
        self._wait_for_copy = record_event(x.device)

    def wait(self) -> Tensor:
        """Block until the copy is complete, and return the host tensor."""
        self._wait_for_copy()
        return self._host_tensor
