"""Symmetric memory of gloo ranks: buffers of each process, and kernels by the process group."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.parallel.mesh import Mesh
from gpt.parallel.symmetric_memory import BUFFER_BYTES, SymmetricBuffer, SymmetricMemory


@dataclass
class Kernels:
    """The API of torch.ops.symm_mem, by the process group; `wrong` is added to results."""

    wrong: float = 0.0
    called: list[str] = field(default_factory=list)

    def one_shot_all_reduce_copy(
        self, symm_buffer: Tensor, local_input: Tensor, reduce_op: str, group_name: str
    ) -> Tensor:
        assert symm_buffer.shape == local_input.shape and symm_buffer.dtype == local_input.dtype
        assert reduce_op == "sum" and group_name == "ours"
        return self._sum("one_shot", local_input)

    def one_shot_all_reduce(self, input: Tensor, reduce_op: str, group_name: str) -> Tensor:
        assert reduce_op == "sum" and group_name == "ours"
        return self._sum("one_shot in the buffer", input)

    def two_shot_all_reduce_(self, input: Tensor, reduce_op: str, group_name: str) -> Tensor:
        assert reduce_op == "sum" and group_name == "ours"
        return input.copy_(self._sum("two_shot in the buffer", input))

    def two_shot_all_reduce_out(
        self, input: Tensor, reduce_op: str, group_name: str, output: Tensor
    ) -> Tensor:
        assert reduce_op == "sum" and group_name == "ours"
        return output.copy_(self._sum("two_shot", input))

    def multimem_all_reduce_(self, input: Tensor, reduce_op: str, group_name: str) -> Tensor:
        assert reduce_op == "sum" and group_name == "ours"
        return input.copy_(self._sum("multimem", input))

    def _sum(self, name: str, x: Tensor) -> Tensor:
        self.called.append(name)
        y = x.clone()
        dist.all_reduce(y)
        return y + self.wrong


class FakeMemory(SymmetricMemory):
    """Buffers in the memory of each process, and kernels by the process group."""

    def __init__(self, kernels: Kernels, *, multicast: bool = False) -> None:
        self.kernels = kernels
        self.multicast = multicast
        self.has_met = False

    def allocate(self, mesh: Mesh) -> Tensor:
        return torch.empty(BUFFER_BYTES, dtype=torch.uint8)

    def rendezvous(self, buffer: Tensor, mesh: Mesh) -> SymmetricBuffer:
        self.has_met = True
        return SymmetricBuffer(buffer, self.multicast, "ours", self.kernels)
