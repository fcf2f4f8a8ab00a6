"""Pipeline parallelism: point-to-point sends and receives between stages, and broadcasts.

Adjacent stages exchange hidden states and their gradients; the first or the last stage broadcasts a
tensor to all stages. The operations have no backward pass. `gpt.model.pipeline` and
`ptuning.training.pipeline` decide what is exchanged.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.parallel.collectives import to_backend_memory
from gpt.parallel.mesh import Mesh


def send_to_stage(x: Tensor, mesh: Mesh, stage: int) -> None:
    """Send hidden states, or their gradient, to another stage of this pipeline."""
    dist.send(to_backend_memory(x, mesh), mesh.stage_rank(stage), group=mesh.pp_group)


class AsyncSender:
    """Sends tensors to another stage of this pipeline without waiting until they are received.

    A copy of each tensor is stored until its send is complete. `send` blocks while more than
    `in_flight_max` sends are incomplete.
    """

    def __init__(self, mesh: Mesh, stage: int, in_flight_max: int) -> None:
        self._mesh = mesh
        self._target_rank = mesh.stage_rank(stage)
        self._in_flight_max = in_flight_max
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        # The buffer is a copy, because the next step may reuse the memory of `x` before the send is
        # complete. The copy is contiguous, because gloo refuses tensors that are not.
        buffer = (
            to_backend_memory(x, self._mesh)
            if self._mesh.stages_through_host
            else x.detach().clone(memory_format=torch.contiguous_format)
        )
        work = dist.isend(buffer, self._target_rank, group=self._mesh.pp_group)
        assert work is not None, "this rank is not a member of the pipeline's process group"
        self._in_flight.append((work, buffer))
        # The oldest send is usually complete, so waiting for it returns at once. Polling all sends
        # would cost more.
        while len(self._in_flight) > self._in_flight_max:
            self._in_flight.popleft()[0].wait()

    def wait(self) -> None:
        """Wait for all sends.

        A sender must not be freed before: with gloo, later messages would never arrive.
        """
        while self._in_flight:
            self._in_flight.popleft()[0].wait()


def receive_from_stage(
    shape: tuple[int, ...], dtype: torch.dtype, mesh: Mesh, stage: int
) -> Tensor:
    """Receive a tensor of this shape and dtype from another stage of this pipeline."""
    x = torch.empty(shape, dtype=dtype, device="cpu" if mesh.stages_through_host else mesh.device)
    dist.recv(x, mesh.stage_rank(stage), group=mesh.pp_group)
    return x.to(mesh.device)


def broadcast_from_last_stage(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the last stage's `x` on every stage; `x` must have the same shape on all stages."""
    return _broadcast_from_stage(x, mesh, mesh.pp - 1)


def broadcast_from_first_stage(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the first stage's `x` on every stage; `x` must have the same shape on all stages."""
    return _broadcast_from_stage(x, mesh, 0)


def _broadcast_from_stage(x: Tensor, mesh: Mesh, stage: int) -> Tensor:
    if mesh.pp == 1:
        return x
    buffer = to_backend_memory(x, mesh)
    dist.broadcast(buffer, mesh.stage_rank(stage), group=mesh.pp_group)
    return buffer.to(x.device)
