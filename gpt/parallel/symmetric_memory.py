"""Symmetric-memory all-reduce: low-latency sums over the tensor parallel ranks of one node.

An all-reduce of a decode step sums a few kilobytes, for which the latency of NCCL's ring exceeds
the transfer time. torch's symmetric memory has faster kernels: each rank reads the buffers of the
other ranks, or an NVLink switch adds the buffers (multicast). All ranks decide once, together,
whether they use these kernels. Where the kernels do not support a tensor or the machine, the
process group's backend (NCCL or gloo) computes the sum.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.parallel.mesh import FastAllReduce, Mesh
from gpt.parallel.rank_agreement import gather_failures

log = logging.getLogger(__name__)

T = TypeVar("T")

KIB = 1 << 10
# The size of each rank's buffer. Larger tensors occur only in prefill, where NCCL is fast enough.
BUFFER_BYTES = 8 << 20
ALIGNMENT_BYTES = 16  # Size of the kernels' vector loads and stores.
DTYPES = (torch.bfloat16, torch.float32)  # The dtypes that the kernels support.
# By number of ranks: the largest tensor, in bytes, for which the one-shot kernel is the fastest, as
# published for Hopper GPUs. The kernels are:
# - one-shot: each rank reads the complete buffers of all other ranks. With two ranks this kernel is
#   the fastest for all tensors that fit in a buffer.
# - two-shot: each rank sums one slice of the tensor, then reads the sums of the other slices.
# - multimem: an NVLink switch adds the buffers (multicast).
ONE_SHOT_BYTES_MAX: Mapping[int, int] = MappingProxyType(
    {2: BUFFER_BYTES, 4: 512 * KIB, 8: 256 * KIB}
)


# The ranks exchange the addresses of their buffers through torch's store. A rank waits this long
# for the others, not the time-out of collectives, which is as long as the loading of a model.
RENDEZVOUS_S = 60.0
# After a phase, a rank waits this long for the others: longer than for the rendezvous.
AGREEMENT_S = 2 * RENDEZVOUS_S


class _UnsupportedError(Exception):
    """Symmetric memory is unavailable on these ranks; the message is the reason."""


def select_kernel(tensor_bytes: int, world_size: int, *, multicast: bool) -> str | None:
    """Return the name of the fastest kernel for a tensor; None if no kernel supports it."""
    bytes_max = ONE_SHOT_BYTES_MAX.get(world_size)
    if bytes_max is None or not 0 < tensor_bytes <= BUFFER_BYTES or tensor_bytes % ALIGNMENT_BYTES:
        return None
    if tensor_bytes <= bytes_max:
        return "one_shot"
    return "multimem" if multicast else "two_shot"


@dataclass(frozen=True)
class SymmetricBuffer:
    """Memory that all ranks of a group can read, and the kernels that sum its contents."""

    buffer: Tensor  # (BUFFER_BYTES,) uint8: this rank's memory.
    has_multicast: bool  # Whether the multimem kernel is available.
    group: str  # Name of the process group.
    kernels: Any  # torch.ops.symm_mem, or in tests an object with the same functions.


class SymmetricMemory:
    """torch's symmetric memory; tests replace it."""

    def allocate(self, mesh: Mesh) -> Tensor:
        """Allocate this rank's buffer; all tensor ranks must call this together.

        Raise _UnsupportedError if the ranks cannot use symmetric memory.
        """
        reason = _unsupported_reason(mesh)
        if reason is not None:
            raise _UnsupportedError(reason)
        from torch.distributed import _symmetric_memory as symmetric

        return symmetric.empty(BUFFER_BYTES, dtype=torch.uint8, device=mesh.device)

    def rendezvous(self, buffer: Tensor, mesh: Mesh) -> SymmetricBuffer:
        """Make the buffers readable by all tensor ranks, which must call this together."""
        from torch.distributed import _symmetric_memory as symmetric

        assert mesh.tp_group is not None
        handle = symmetric.rendezvous(buffer, mesh.tp_group)
        group = str(mesh.tp_group.group_name)
        return SymmetricBuffer(buffer, handle.multicast_ptr != 0, group, torch.ops.symm_mem)


class SymmetricAllReduce(FastAllReduce):
    """The all-reduce `Mesh.symmetric_all_reduce`, with one buffer for all tensors.

    Each kernel synchronizes all ranks before and after it reads the buffers. Therefore a rank may
    overwrite its buffer as soon as the kernel has ended.
    """

    def __init__(self, buffer: SymmetricBuffer, world_size: int) -> None:
        self._buffer = buffer
        self._world_size = world_size
        self.has_multicast = buffer.has_multicast

    def __call__(self, x: Tensor) -> Tensor | None:
        if x.dtype not in DTYPES:
            return None
        kernel = select_kernel(x.nbytes, self._world_size, multicast=self.has_multicast)
        return None if kernel is None else self.all_reduce(x, kernel)

    def allocate(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
        row_bytes = columns * dtype.itemsize
        if dtype not in DTYPES or row_bytes % ALIGNMENT_BYTES:
            return None
        if not 0 < rows * row_bytes <= BUFFER_BYTES:
            return None
        return self._buffer.buffer[: rows * row_bytes].view(dtype).view(rows, columns)

    def sum_allocated(self, x: Tensor) -> Tensor:
        kernel = select_kernel(x.nbytes, self._world_size, multicast=self.has_multicast)
        assert kernel is not None, "`allocate` returns memory only for supported tensors"
        return self.all_reduce_buffer(x, kernel)

    def all_reduce_buffer(self, x: Tensor, kernel: str) -> Tensor:
        """Return the sum of `x`, which is in the buffer; `two_shot` and `multimem` overwrite it."""
        kernels, group = self._buffer.kernels, self._buffer.group
        if kernel == "one_shot":
            y: Tensor = kernels.one_shot_all_reduce(x, "sum", group)
            return y
        if kernel == "two_shot":
            kernels.two_shot_all_reduce_(x, "sum", group)
        else:
            kernels.multimem_all_reduce_(x, "sum", group)
        return x

    def all_reduce(self, x: Tensor, kernel: str) -> Tensor:
        """Return the sum of `x` over the ranks, computed by `kernel`."""
        x = x.contiguous()
        kernels, group = self._buffer.kernels, self._buffer.group
        local = self._buffer.buffer[: x.nbytes].view(x.dtype).view(x.shape)
        if kernel == "one_shot":
            y: Tensor = kernels.one_shot_all_reduce_copy(local, x, "sum", group)
            return y
        local.copy_(x)
        if kernel == "two_shot":
            y = torch.empty_like(x)
            kernels.two_shot_all_reduce_out(local, "sum", group, y)
            return y
        kernels.multimem_all_reduce_(local, "sum", group)
        return local.clone()  # A copy, because the next all-reduce overwrites the buffer.


def use_symmetric_memory(mesh: Mesh, memory: SymmetricMemory | None = None) -> Mesh:
    """Return the mesh with a symmetric-memory all-reduce if all tensor ranks support it.

    If a rank does not support it, return the mesh unchanged and log the reason. In the log, `by` is
    the library that sums over the tensor ranks. All tensor ranks must call this function together.
    """
    if mesh.tp == 1:
        return mesh
    try:
        reducer = _open_all_reduce(mesh, memory or SymmetricMemory())
    except _UnsupportedError as error:
        log.info("event=sums by=%s reason=%r", _backend(mesh), str(error))
        return mesh
    log.info(
        "event=sums by=symmetric_memory ranks=%d bytes_max=%d multicast=%s",
        mesh.tp,
        BUFFER_BYTES,
        reducer.has_multicast,
    )
    return replace(mesh, symmetric_all_reduce=reducer)


def _open_all_reduce(mesh: Mesh, memory: SymmetricMemory) -> SymmetricAllReduce:
    """Return the all-reduce; raise _UnsupportedError on all ranks if a phase fails on any rank.

    The ranks agree after each phase, so that no rank waits in the next one for a rank that failed.
    """
    buffer = _run_on_all_ranks(mesh, lambda: memory.allocate(mesh))

    def rendezvous() -> SymmetricBuffer:
        with _store_timeout(RENDEZVOUS_S):
            return memory.rendezvous(buffer, mesh)

    reducer = SymmetricAllReduce(_run_on_all_ranks(mesh, rendezvous), mesh.tp)
    return _run_on_all_ranks(mesh, lambda: _self_test(reducer, mesh))


def _run_on_all_ranks(mesh: Mesh, phase: Callable[[], T]) -> T:
    """Run a phase, and return its value if it succeeded on all tensor ranks.

    Else raise _UnsupportedError on all of them. They must use the kernels together or not at all: a
    kernel waits until every rank has called it.
    """
    failure: str | None = None
    try:
        value = phase()
    except _UnsupportedError as error:
        failure = str(error)
    except Exception as error:  # torch and the driver raise many kinds of exceptions.
        failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    failures = gather_failures(mesh, failure, AGREEMENT_S)
    if failure is not None:
        raise _UnsupportedError(failure)
    if failures:
        rank, text = min(failures.items())
        raise _UnsupportedError(f"tensor rank {rank} cannot use symmetric memory: {text}")
    return value


@contextmanager
def _store_timeout(seconds: float) -> Iterator[None]:
    """Limit the time that torch waits for keys of its store."""
    store = dist.distributed_c10d._get_default_store()
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        store.set_timeout(timeout)


def _unsupported_reason(mesh: Mesh) -> str | None:
    """Return why the ranks cannot use symmetric memory; None if they can.

    The reason is the same on all ranks.
    """
    if mesh.device.type != "cuda":
        return f"the device is {mesh.device.type}"
    if _backend(mesh) != "nccl":
        return "the ranks share a device, or communicate through host memory"
    if mesh.tp not in ONE_SHOT_BYTES_MAX:
        supported = ", ".join(map(str, ONE_SHOT_BYTES_MAX))
        return f"there are {mesh.tp} tensor ranks; the kernels support {supported}"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
        return f"torch {torch.__version__} has no symmetric-memory kernels"
    if not _is_single_host(mesh):
        return "the ranks are on several hosts"
    if not _has_peer_access(mesh):
        return "a GPU cannot access the memory of another one"
    return None


def _is_single_host(mesh: Mesh) -> bool:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    digest = torch.frombuffer(bytearray(sha256(boot_id).digest()[:8]), dtype=torch.int64)
    digest = digest.to(mesh.device)
    smallest, largest = digest.clone(), digest.clone()
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=mesh.tp_group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.tp_group)
    return bool((smallest == largest).all())


def _has_peer_access(mesh: Mesh) -> bool:
    """Return whether each GPU can access the memory of the GPUs of the other tensor ranks."""
    own = torch.tensor([mesh.device.index], device=mesh.device)
    indices = [torch.empty_like(own) for _ in range(mesh.tp)]
    dist.all_gather(indices, own, group=mesh.tp_group)
    # Ranks of which each sees only one GPU have equal indices; then the rendezvous decides.
    peers = {int(index) for index in indices} - {mesh.device.index}
    has_access = all(torch.cuda.can_device_access_peer(mesh.device, peer) for peer in peers)
    all_have_access = torch.tensor([has_access], dtype=torch.int32, device=mesh.device)
    dist.all_reduce(all_have_access, dist.ReduceOp.MIN, group=mesh.tp_group)
    return bool(all_have_access)


def _self_test(reducer: SymmetricAllReduce, mesh: Mesh) -> SymmetricAllReduce:
    """Return `reducer` if each kernel sums test tensors correctly; else raise _UnsupportedError.

    A kernel waits until all ranks have called it. Therefore a rank calls the next kernel even after
    a wrong sum.
    """
    expected, failures = mesh.tp * (mesh.tp + 1) // 2, []
    for kernel in ("one_shot", "multimem" if reducer.has_multicast else "two_shot"):
        for dtype in DTYPES:
            x = torch.full((3, 64), mesh.tp_rank + 1.0, dtype=dtype, device=mesh.device)
            allocated = reducer.allocate(x.shape[0], x.shape[1], dtype)
            assert allocated is not None
            is_correct = bool((reducer.all_reduce(x, kernel) == expected).all())
            in_buffer = reducer.all_reduce_buffer(allocated.copy_(x), kernel)
            if not (bool((in_buffer == expected).all()) and is_correct):
                failures.append(f"{kernel} sums of {str(dtype).removeprefix('torch.')} are wrong")
    if failures:
        raise _UnsupportedError(failures[0])
    return reducer


def _backend(mesh: Mesh) -> str:
    return str(dist.get_backend(mesh.tp_group))
