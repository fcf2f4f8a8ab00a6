"""All-reduce latencies of a node in a GPU proof, by size: symmetric memory, NCCL or gloo."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import spawn

from bench.gpu_proof.proof_sizes import ProofSizes
from bench.gpu_proof.stage_context import StageContext, StageFailure
from bench.suites.gpu import time_call
from gpt.cpu_threads import set_thread_count
from gpt.parallel.collectives import warm_up_groups
from gpt.parallel.mesh import Mesh, join_world
from gpt.parallel.symmetric_memory import (
    BUFFER_BYTES,
    SymmetricAllReduce,
    select_kernel,
    use_symmetric_memory,
)
from serving.logs import log_to_stderr

AllReduce = Callable[[torch.Tensor], torch.Tensor]

DTYPE = torch.bfloat16  # It represents the sums exactly.
TIMEOUT_S = 60.0
REPEATS = 20


@dataclass
class SumTimes:
    """The times of all-reduces of one size with one number of ranks, in seconds by method."""

    ranks: int
    tensor_bytes: int
    chosen: str = ""  # The method that `all_reduce_no_grad` uses.
    eager_s: dict[str, float] = field(default_factory=dict)
    graph_s: dict[str, float] = field(default_factory=dict)  # A replayed CUDA graph; on GPUs only.
    wrong: list[str] = field(default_factory=list)  # Methods whose sums are wrong on any rank.


def measure_all_reduces(stage: StageContext) -> None:
    """Time all methods with 2, 4, ... ranks; skip if the GPUs do not support symmetric memory."""
    sizes = ProofSizes.of(stage.device).all_reduce_bytes
    lines: list[list[str]] = []
    faults, without_kernels = [], []
    ranks = 2
    while ranks <= stage.ranks:
        times = _times_of_ranks(ranks, stage.device, sizes)
        for size_times in times:
            lines += _table_lines(size_times)
            faults += [
                f"{ranks} ranks, {size_times.tensor_bytes} bytes: wrong sums of {method}"
                for method in size_times.wrong
            ]
        if all(len(size_times.eager_s) == 1 for size_times in times):
            without_kernels.append(str(ranks))
        stage.figures.add_table(
            ["ranks", "KiB", "method", "eager, us", "in a CUDA graph, us", "chosen"], lines
        )
        ranks *= 2
    if faults:
        raise StageFailure("; ".join(faults))
    if stage.on_gpu and without_kernels:
        stage.figures.skip(
            f"no symmetric memory with {', '.join(without_kernels)} ranks (its reason is in the "
            "stage's log); only NCCL was measured there"
        )


def _times_of_ranks(ranks: int, device: str, sizes: tuple[int, ...]) -> list[SumTimes]:
    """Start the ranks, and return what the first one measured."""
    queue: SimpleQueue[list[SumTimes]] = get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="gpu-proof-") as folder:
        spawn(_run_rank, (ranks, device, Path(folder) / "store", sizes, queue), nprocs=ranks)
    return queue.get()


def _run_rank(
    rank: int,
    ranks: int,
    device_name: str,
    store: Path,
    sizes: tuple[int, ...],
    queue: "SimpleQueue[list[SumTimes]]",
) -> None:
    log_to_stderr("text", rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    set_thread_count(ranks)
    device = torch.device(device_name)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    file_store = dist.FileStore(str(store), ranks)  # type: ignore[attr-defined]
    join_world(device, timeout_s=TIMEOUT_S, stages=1, store=file_store, rank=rank, world_size=ranks)
    mesh = use_symmetric_memory(Mesh.create(ranks, 1, device=device))
    warm_up_groups(mesh)
    times = [measure_size(mesh, tensor_bytes) for tensor_bytes in sizes]
    if rank == 0:
        queue.put(times)
    dist.barrier(mesh.tp_group)  # A rank must not exit while another one reads its memory.
    dist.destroy_process_group()


@torch.inference_mode()
def measure_size(mesh: Mesh, tensor_bytes: int) -> SumTimes:
    """Check the sums of each method, and time it. All ranks must call this together."""
    methods = _methods(mesh, tensor_bytes)
    backend, *kernels = methods
    times = SumTimes(mesh.tp, tensor_bytes, backend)
    reducer = mesh.symmetric_all_reduce
    if isinstance(reducer, SymmetricAllReduce):
        kernel = select_kernel(tensor_bytes, mesh.tp, multicast=reducer.has_multicast)
        times.chosen = kernel if kernel in kernels else backend
    x = torch.full((tensor_bytes // DTYPE.itemsize,), mesh.rank + 1.0, dtype=DTYPE)
    x, expected = x.to(mesh.device), mesh.tp * (mesh.tp + 1) // 2
    for method, all_reduce in methods.items():
        # All ranks call every method, because a sum waits for all of them.
        is_wrong = (all_reduce(x.clone()) != expected).any().int()
        dist.all_reduce(is_wrong, dist.ReduceOp.MAX, group=mesh.tp_group)
        if is_wrong:
            times.wrong.append(method)
        y = torch.zeros_like(x)  # Sums of zeros never overflow.

        call = partial(all_reduce, y)
        times.eager_s[method] = time_call(mesh.device, call, REPEATS)
        if mesh.device.type == "cuda":
            times.graph_s[method] = _time_in_graph(mesh.device, call)
    return times


def _methods(mesh: Mesh, tensor_bytes: int) -> dict[str, AllReduce]:
    """Return the sums of the process group's backend, and those of the kernels that fit."""

    def sum_by_backend(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=mesh.tp_group)
        return x

    methods: dict[str, AllReduce] = {str(dist.get_backend(mesh.tp_group)): sum_by_backend}
    reducer = mesh.symmetric_all_reduce
    if not isinstance(reducer, SymmetricAllReduce) or tensor_bytes > BUFFER_BYTES:
        return methods
    kernels = ["one_shot", "two_shot"] + ["multimem"] * reducer.has_multicast

    def sum_by(kernel: str) -> AllReduce:
        return lambda x: reducer.all_reduce(x, kernel)

    return methods | {kernel: sum_by(kernel) for kernel in kernels}


def _time_in_graph(device: torch.device, call: Callable[[], torch.Tensor]) -> float:
    """Return the seconds of one call in a replayed CUDA graph, without the launches of the host."""
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL and torch may call CUDA during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(REPEATS):
            call()
    return time_call(device, graph.replay) / REPEATS


def _table_lines(times: SumTimes) -> list[list[str]]:
    return [
        [
            str(times.ranks),
            f"{times.tensor_bytes / 1024:g}",
            method,
            f"{1e6 * seconds:.1f}",
            f"{1e6 * times.graph_s[method]:.1f}" if method in times.graph_s else "",
            "yes" if method == times.chosen else "",
        ]
        for method, seconds in times.eager_s.items()
    ]
