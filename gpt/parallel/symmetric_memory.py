"""Symmetric-memory all-reduce: low-latency sums over the tensor parallel ranks of one node.

A decode step sums a few kilobytes. For this size the latency of NCCL's ring exceeds the transfer
time. torch's symmetric memory has faster kernels: each rank reads the buffers of the other ranks,
or an NVLink switch adds them (multicast). All ranks decide together, once, whether they use these
kernels. Tensors and machines that the kernels do not support use the process group's own backend.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.parallel.mesh import Mesh

log = logging.getLogger(__name__)

KIB = 1 << 10
# Size per rank. Larger tensors occur only in prefill, for which NCCL is fast enough.
BUFFER_BYTES = 8 << 20
ALIGNMENT_BYTES = 16  # Size of the kernels' vector loads and stores.
DTYPES = (torch.bfloat16, torch.float32)  # The dtypes that the kernels support.
# Up to this size the one-shot kernel is faster, in which each rank reads the whole buffers of all
# others. Above it the two-shot kernel is faster, in which each rank sums one part and reads the
# sums of the other parts. With two ranks one-shot is always faster. The values are published
# thresholds for Hopper GPUs, by number of ranks.
ONE_SHOT_BYTES_MAX: Mapping[int, int] = MappingProxyType(
    {2: BUFFER_BYTES, 4: 512 * KIB, 8: 256 * KIB}
)


class _UnsupportedError(Exception):
    """Symmetric memory is unavailable on these ranks; the message is the reason."""


def algorithm(count_bytes: int, world_size: int, *, multicast: bool) -> str | None:
    """Return the kernel for a tensor of `count_bytes`; None means the group's own backend."""
    bytes_max = ONE_SHOT_BYTES_MAX.get(world_size)
    if bytes_max is None or not 0 < count_bytes <= BUFFER_BYTES or count_bytes % ALIGNMENT_BYTES:
        return None
    if count_bytes <= bytes_max:
        return "one_shot"
    return "multimem" if multicast else "two_shot"


@dataclass(frozen=True)
class SymmetricBuffer:
    """Memory that all ranks of a group can read, and the kernels that sum its contents."""

    buffer: Tensor  # A uint8 tensor of BUFFER_BYTES; each rank has one.
    has_multicast: bool  # Whether the NVLink switch can add buffers (multimem).
    group: str
    kernels: Any  # torch.ops.symm_mem, or an object with its functions.

    @classmethod
    def open(cls, mesh: Mesh) -> "SymmetricBuffer":
        """Allocate the buffer; all ranks must call this. Raises _UnsupportedError."""
        reason = _unsupported_reason(mesh)
        if reason is not None:
            raise _UnsupportedError(reason)
        from torch.distributed import _symmetric_memory as symmetric

        assert mesh.tp_group is not None
        buffer = symmetric.empty(BUFFER_BYTES, dtype=torch.uint8, device=mesh.device)
        handle = symmetric.rendezvous(buffer, mesh.tp_group)
        group = str(mesh.tp_group.group_name)
        return cls(buffer, handle.multicast_ptr != 0, group, torch.ops.symm_mem)


class SymmetricAllReduce:
    """Callable for `Mesh.symmetric_all_reduce`; returns None for unsupported tensors."""

    def __init__(self, buffer: SymmetricBuffer, world_size: int) -> None:
        self._buffer = buffer
        self._world_size = world_size
        self.has_multicast = buffer.has_multicast

    def __call__(self, x: Tensor) -> Tensor | None:
        if x.dtype not in DTYPES:
            return None
        kernel = algorithm(x.nbytes, self._world_size, multicast=self.has_multicast)
        return None if kernel is None else self.all_reduce(x, kernel)

    def all_reduce(self, x: Tensor, kernel: str) -> Tensor:
        """All-reduce by `kernel`, which synchronizes all ranks before and after reading buffers."""
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
        return local.clone()  # Cloned, because the next sum reuses the buffer.


def use_symmetric_memory(
    mesh: Mesh, open_buffer: Callable[[Mesh], SymmetricBuffer] = SymmetricBuffer.open
) -> Mesh:
    """Return the mesh with a symmetric-memory all-reduce if all tensor ranks support it.

    Otherwise the mesh is returned unchanged. All tensor ranks must call this function.
    """
    if mesh.tp == 1:
        return mesh
    reducer_or_reason = _run_on_all_ranks(
        mesh, lambda: SymmetricAllReduce(open_buffer(mesh), mesh.tp)
    )
    if isinstance(reducer_or_reason, SymmetricAllReduce):
        reducer = reducer_or_reason
        reducer_or_reason = _run_on_all_ranks(mesh, lambda: _self_test(reducer, mesh))
    if isinstance(reducer_or_reason, str):
        log.info("event=sums by=%s reason=%r", _backend(mesh), reducer_or_reason)
        return mesh
    log.info(
        "event=sums by=symmetric_memory ranks=%d bytes_max=%d multicast=%s",
        mesh.tp,
        BUFFER_BYTES,
        reducer_or_reason.has_multicast,
    )
    return replace(mesh, symmetric_all_reduce=reducer_or_reason)


def _run_on_all_ranks(
    mesh: Mesh, work: Callable[[], SymmetricAllReduce]
) -> SymmetricAllReduce | str:
    """Run `work` on all ranks; return its result if it succeeded on all ranks, else the reason.

    All ranks must make the same decision: if only one rank used the kernels, it would wait forever.
    """
    reducer_or_reason: SymmetricAllReduce | str
    try:
        reducer_or_reason = work()
    except _UnsupportedError as error:
        reducer_or_reason = str(error)
    except Exception as error:  # torch and the driver raise many kinds of exceptions.
        reducer_or_reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    device = "cpu" if mesh.stages_through_host else mesh.device
    succeeded = torch.tensor(
        [not isinstance(reducer_or_reason, str)], dtype=torch.int32, device=device
    )
    dist.all_reduce(succeeded, dist.ReduceOp.MIN, group=mesh.tp_group)
    return (
        reducer_or_reason
        if isinstance(reducer_or_reason, str) or succeeded
        else "symmetric memory failed on another rank"
    )


def _unsupported_reason(mesh: Mesh) -> str | None:
    """Return why these ranks cannot use symmetric memory, or None; equal on all ranks."""
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
    return None


def _is_single_host(mesh: Mesh) -> bool:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    digest = torch.frombuffer(bytearray(sha256(boot_id).digest()[:8]), dtype=torch.int64)
    digest = digest.to(mesh.device)
    smallest, largest = digest.clone(), digest.clone()
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=mesh.tp_group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.tp_group)
    return bool((smallest == largest).all())


def _self_test(reducer: SymmetricAllReduce, mesh: Mesh) -> SymmetricAllReduce:
    """Sum known numbers with each kernel; raise _UnsupportedError if a sum is wrong.

    Every rank runs all kernels, even after a failure, because the other ranks wait in each kernel.
    """
    expected, failures = mesh.tp * (mesh.tp + 1) // 2, []
    for kernel in ("one_shot", "multimem" if reducer.has_multicast else "two_shot"):
        for dtype in DTYPES:
            x = torch.full((3, 64), mesh.tp_rank + 1.0, dtype=dtype, device=mesh.device)
            if not bool((reducer.all_reduce(x, kernel) == expected).all()):
                failures.append(f"{kernel} sums of {str(dtype).removeprefix('torch.')} are wrong")
    if failures:
        raise _UnsupportedError(failures[0])
    return reducer


def _backend(mesh: Mesh) -> str:
    return str(dist.get_backend(mesh.tp_group))
