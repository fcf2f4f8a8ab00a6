"""Sums over the tensor ranks of a node through memory that each can read: quick for few rows.

What a decoding step sums is some kilobytes, for which a library's ring costs more than the bytes
do. torch's symmetric memory has kernels in which each rank reads what the others hold, or a switch
adds it. Whether they are used is decided once, by all ranks alike; what they do not serve, or where
they cannot be had everything, goes to the group's own backend.
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
BUFFER_BYTES = 8 << 20  # On each rank. More is a prompt's, and the group's backend is good at that.
ALIGNED_BYTES = 16  # The kernels move so many at once.
DTYPES = (torch.bfloat16, torch.float32)  # That they add.
# Up to so many bytes each rank reads all that the others have; with more it is cheaper to add a
# share each and hand that round. Two ranks have nothing to share. Published figures, for Hopper.
ONE_SHOT_BYTES_MAX: Mapping[int, int] = MappingProxyType(
    {2: BUFFER_BYTES, 4: 512 * KIB, 8: 256 * KIB}
)


class _UnfitError(Exception):
    """These ranks cannot; why."""


def way(count_bytes: int, ranks: int, *, multicast: bool) -> str | None:
    """How so many bytes are summed; None: by the group's own backend."""
    most = ONE_SHOT_BYTES_MAX.get(ranks)
    if most is None or not 0 < count_bytes <= BUFFER_BYTES or count_bytes % ALIGNED_BYTES:
        return None
    if count_bytes <= most:
        return "one_shot"
    return "multimem" if multicast else "two_shot"


@dataclass(frozen=True)
class Shared:
    """Memory that all ranks of a group can read, and the kernels that sum it."""

    buffer: Tensor  # BUFFER_BYTES of uint8, the same on each rank.
    multicast: bool  # Whether the switch between the ranks adds.
    group: str
    kernels: Any  # torch.ops.symm_mem, or what has its functions.

    @classmethod
    def open(cls, mesh: Mesh) -> "Shared":
        """All ranks of the group together; an error says why there is none."""
        reason = _unfit(mesh)
        if reason is not None:
            raise _UnfitError(reason)
        from torch.distributed import _symmetric_memory as symmetric

        assert mesh.tp_group is not None
        buffer = symmetric.empty(BUFFER_BYTES, dtype=torch.uint8, device=mesh.device)
        handle = symmetric.rendezvous(buffer, mesh.tp_group)
        group = str(mesh.tp_group.group_name)
        return cls(buffer, handle.multicast_ptr != 0, group, torch.ops.symm_mem)


class QuickSums:
    """For `Mesh.sums`: the sum of a tensor over the ranks; None: it is not served."""

    def __init__(self, shared: Shared, ranks: int) -> None:
        self._shared, self._ranks, self.multicast = shared, ranks, shared.multicast

    def __call__(self, x: Tensor) -> Tensor | None:
        if x.dtype not in DTYPES:
            return None
        how = way(x.nbytes, self._ranks, multicast=self.multicast)
        return None if how is None else self.summed(x, how)

    def summed(self, x: Tensor, how: str) -> Tensor:
        """By one way or another. The kernels wait for all ranks before and after they read."""
        x = x.contiguous()
        kernels, group = self._shared.kernels, self._shared.group
        mine = self._shared.buffer[: x.nbytes].view(x.dtype).view(x.shape)
        if how == "one_shot":
            y: Tensor = kernels.one_shot_all_reduce_copy(mine, x, "sum", group)
            return y
        mine.copy_(x)
        if how == "two_shot":
            y = torch.empty_like(x)
            kernels.two_shot_all_reduce_out(mine, "sum", group, y)
            return y
        kernels.multimem_all_reduce_(mine, "sum", group)
        return mine.clone()  # The next sum goes through the same memory.


def quicken(mesh: Mesh, open_shared: Callable[[Mesh], Shared] = Shared.open) -> Mesh:
    """The mesh with quick sums, if all of its tensor ranks can have them; they call it together."""
    if mesh.tp == 1:
        return mesh
    found = _agreed(mesh, lambda: QuickSums(open_shared(mesh), mesh.tp))
    if isinstance(found, QuickSums):
        sums = found
        found = _agreed(mesh, lambda: _tried(sums, mesh))
    if isinstance(found, str):
        log.info("event=sums by=%s reason=%r", _backend(mesh), found)
        return mesh
    log.info(
        "event=sums by=symmetric_memory ranks=%d bytes_max=%d multicast=%s",
        *(mesh.tp, BUFFER_BYTES, found.multicast),
    )
    return replace(mesh, sums=found)


def _agreed(mesh: Mesh, work: Callable[[], QuickSums]) -> QuickSums | str:
    """What came of it if no rank has failed, else why. Ranks that disagree wait for ever."""
    found: QuickSums | str
    try:
        found = work()
    except _UnfitError as error:
        found = str(error)
    except Exception as error:  # torch, the driver's calls and old versions raise many kinds.
        found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    place = "cpu" if mesh.staged else mesh.device
    fit = torch.tensor([not isinstance(found, str)], dtype=torch.int32, device=place)
    dist.all_reduce(fit, dist.ReduceOp.MIN, group=mesh.tp_group)
    return found if isinstance(found, str) or fit else "another rank cannot"


def _unfit(mesh: Mesh) -> str | None:
    """Why these ranks cannot, as all of them see it."""
    if mesh.device.type != "cuda":
        return f"their device is {mesh.device.type}"
    if _backend(mesh) != "nccl":
        return "they share a device, or send through host memory"
    if mesh.tp not in ONE_SHOT_BYTES_MAX:
        return f"there are {mesh.tp} of them; known are {', '.join(map(str, ONE_SHOT_BYTES_MAX))}"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
        return f"torch {torch.__version__} has no such kernels"
    if not _one_host(mesh):
        return "they are on several hosts"
    return None


def _one_host(mesh: Mesh) -> bool:
    host = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    mine = torch.frombuffer(bytearray(sha256(host).digest()[:8]), dtype=torch.int64)
    mine = mine.to(mesh.device)
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.tp_group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.tp_group)
    return bool((least == most).all())


def _tried(sums: QuickSums, mesh: Mesh) -> QuickSums:
    """Each way is tried, with numbers that name their rank; to the end, as others wait there."""
    want, wrong = mesh.tp * (mesh.tp + 1) // 2, []
    for how in ("one_shot", "multimem" if sums.multicast else "two_shot"):
        for dtype in DTYPES:
            x = torch.full((3, 64), mesh.tp_rank + 1.0, dtype=dtype, device=mesh.device)
            if not bool((sums.summed(x, how) == want).all()):
                wrong.append(f"{how} sums of {str(dtype).removeprefix('torch.')} are wrong")
    if wrong:
        raise _UnfitError(wrong[0])
    return sums


def _backend(mesh: Mesh) -> str:
    return str(dist.get_backend(mesh.tp_group))
