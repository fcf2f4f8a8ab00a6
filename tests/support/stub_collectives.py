"""A tensor parallel rank without the others: each collective is counted, and changes nothing.

The functions of torch.distributed, torch's key-value store and the kernels of symmetric memory are
replaced, because a device without memory has no process group. The other ranks always agree.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.parallel import collectives
from gpt.parallel.mesh import Mesh, ProcessGroup
from gpt.parallel.rank_agreement import _COMPLETE, _SUCCESS
from gpt.parallel.symmetric_memory import BUFFER_BYTES, SymmetricAllReduce, SymmetricBuffer

Launch = Callable[[str], None]


class StubGroup:
    """A process group of NCCL."""

    group_name = "stub"

    def name(self) -> str:
        return "nccl"


class StubStore:
    """A key-value store in which every other rank has written that it has succeeded.

    An agreement is complete when this rank waits for its result.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def add(self, key: str, amount: int) -> int:
        return amount

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def wait(self, keys: list[str], timeout: object) -> None:
        """Do nothing."""

    def get(self, key: str) -> bytes:
        return self._values.get(key, _COMPLETE if key.endswith("/result") else _SUCCESS.encode())


class CountedKernels:
    """The API of torch.ops.symm_mem that `SymmetricAllReduce` uses; each call is one launch."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def one_shot_all_reduce(self, input: Tensor, reduce_op: str, group_name: str) -> Tensor:
        self._launch("one_shot_all_reduce")
        return torch.empty_like(input)

    def one_shot_all_reduce_copy(
        self, symm_buffer: Tensor, local_input: Tensor, reduce_op: str, group_name: str
    ) -> Tensor:
        self._launch("one_shot_all_reduce_copy")
        return torch.empty_like(local_input)

    def two_shot_all_reduce_(self, input: Tensor, reduce_op: str, group_name: str) -> Tensor:
        self._launch("two_shot_all_reduce_")
        return input

    def two_shot_all_reduce_out(
        self, input: Tensor, reduce_op: str, group_name: str, output: Tensor
    ) -> Tensor:
        self._launch("two_shot_all_reduce_out")
        return output

    def multimem_all_reduce_(self, input: Tensor, reduce_op: str, group_name: str) -> Tensor:
        self._launch("multimem_all_reduce_")
        return input


def stub_mesh(device: torch.device, tp: int, rank: int = 0) -> Mesh:
    """The mesh of one of `tp` tensor ranks, whose process group does not exist."""
    return Mesh(device, tp=tp, rank=rank, tp_group=cast(ProcessGroup, StubGroup()))


def with_symmetric_memory(mesh: Mesh, launch: Launch, *, multicast: bool = False) -> Mesh:
    """The mesh with an all-reduce whose kernels are counted."""
    buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=mesh.device)
    symmetric = SymmetricBuffer(buffer, multicast, "stub", CountedKernels(launch))
    return replace(mesh, symmetric_all_reduce=SymmetricAllReduce(symmetric, mesh.tp))


@contextmanager
def stub_collectives(launch: Launch) -> Iterator[None]:
    """Replace the collectives of torch; `launch` is called with the name of each."""

    def counted(name: str) -> Callable[..., None]:
        return lambda *_, **__: launch(name)

    owners: list[tuple[Any, str]] = [
        (dist, "all_reduce"),
        (dist, "broadcast"),
        (dist, "gather"),
        (collectives, "_all_gather_into_tensor"),
    ]
    with ExitStack() as stack:
        for owner, name in owners:
            stack.enter_context(mock.patch.object(owner, name, counted(name)))
        stack.enter_context(
            mock.patch.object(dist.distributed_c10d, "_get_default_store", StubStore)
        )
        yield
