"""Parallel reader: worker threads stream tensors and files in bounded memory.

A job reads a tensor or a file block by block, and returns findings or hashes. A worker needs memory
for a few blocks only, so memory depends on the number of workers, not on the model's size. The
module is independent of the formats and of the checks.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from gpt.checkpoint.logical_tensor import BLOCK_BYTES, LogicalTensor

T = TypeVar("T")
# The argument is a number of bytes: of the last read if a job calls the function, and of all reads
# if `ProgressCounter` calls it.
ProgressCallback = Callable[[int], None]
# Opens a progress display for a total number of bytes.
OpenProgress = Callable[[int], AbstractContextManager[ProgressCallback]]


class ProgressCounter:
    """Adds up the bytes that all workers read, and passes the sum to `callback`; thread-safe."""

    def __init__(self, callback: ProgressCallback) -> None:
        self.bytes_read = 0
        self.callback = callback
        self.lock = threading.Lock()

    def add_bytes(self, byte_count: int) -> None:
        with self.lock:
            self.bytes_read += byte_count
            self.callback(self.bytes_read)


class StoppedError(Exception):
    """Ends the running jobs after a failure or an interrupt; `run_jobs` does not raise it."""


@dataclass
class WorkerScratch:
    """A worker's reusable buffers and its progress callback."""

    report_bytes: ProgressCallback
    buffers: dict[int, Tensor] = field(default_factory=dict)

    def buffer(self, index: int, size: int) -> Tensor:
        """Return scratch buffer `index` with at least `size` bytes.

        Buffers are reused, because repeated allocation fragments the heap.
        """
        if index not in self.buffers or self.buffers[index].numel() < size:
            self.buffers[index] = torch.empty(max(size, BLOCK_BYTES), dtype=torch.uint8)
        return self.buffers[index]

    def iter_row_blocks(self, *tensors: LogicalTensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Read tensors of the same shape together, in blocks of the same rows.

        Yields the number of the block's first row, and one matrix per tensor. The matrices are in
        the scratch buffers, so they are valid only until the next iteration.
        """
        block_rows = max(1, BLOCK_BYTES // max(tensor.row_bytes for tensor in tensors))
        row_count = tensors[0].shape[0]
        for start in range(0, row_count, block_rows):
            stop = min(row_count, start + block_rows)
            blocks = [
                tensor.read_rows(start, stop, self.buffer(index, block_rows * tensor.row_bytes))
                for index, tensor in enumerate(tensors)
            ]
            yield start, [block.reshape(stop - start, -1) for block in blocks]
            self.report_bytes(sum(block.nbytes for block in blocks))


Job = Callable[[WorkerScratch], T]


def run_jobs(jobs: Sequence[Job[T]], workers: int, report_progress: ProgressCallback) -> list[T]:
    """Run jobs in `workers` threads; return their results in order. A failure stops all jobs."""
    stopped, worker_state = threading.Event(), threading.local()

    def report_bytes(byte_count: int) -> None:
        if stopped.is_set():
            raise StoppedError
        report_progress(byte_count)

    def run_job(job: Job[T]) -> T:
        report_bytes(0)
        if not hasattr(worker_state, "scratch"):
            worker_state.scratch = WorkerScratch(report_bytes)
        return job(worker_state.scratch)

    previous_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's own threads would compete with the worker threads.
    pool = ThreadPoolExecutor(workers)
    try:
        futures = [pool.submit(run_job, job) for job in jobs]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        # After a failure, `done` includes the failed job, and result() raises its exception.
        return [future.result() for future in futures if future in done]
    finally:
        stopped.set()
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(previous_threads)


def format_bytes(size: float) -> str:
    """Format a size with a decimal unit, such as 1.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
