"""Reads all of a checkpoint's bytes with a few workers, each of which has memory of its own.

A job streams through a tensor or a file block by block and gives what it found; none holds more
than a few blocks, so memory is bounded by the number of workers, whatever the model's size.
It knows no formats, and not what is looked for.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from gpt.checkpoint.logical_tensor import BLOCK_BYTES, Logical

WORKERS = 2

T = TypeVar("T")
Report = Callable[[int], None]  # Told how many bytes went by.


class Tally:
    """All bytes that went by, told to who shows a progress. Any thread may add."""

    def __init__(self, report: Report) -> None:
        self.passed, self.report, self.lock = 0, report, threading.Lock()

    def add(self, size: int) -> None:
        with self.lock:
            self.passed += size
            self.report(self.passed)


class StoppedError(Exception):
    """Another job failed, or the user wants no more; never seen outside."""


@dataclass
class Desk:
    """What one worker has: room for blocks, and someone to report to."""

    report: Report
    rooms: dict[int, Tensor] = field(default_factory=dict)

    def room(self, number: int, size: int) -> Tensor:
        """Scratch bytes; freeing and taking large blocks by turns leaves holes in the heap."""
        if number not in self.rooms or self.rooms[number].numel() < size:
            self.rooms[number] = torch.empty(max(size, BLOCK_BYTES), dtype=torch.uint8)
        return self.rooms[number]

    def bands(self, *tensors: Logical) -> Iterator[tuple[int, list[Tensor]]]:
        """Tensors of one shape in bands of rows: the first row, and the band of each as a matrix.

        A band is valid only until the next is asked for.
        """
        count = max(1, BLOCK_BYTES // max(tensor.row_bytes for tensor in tensors))
        rows = tensors[0].shape[0]
        for start in range(0, rows, count):
            stop = min(rows, start + count)
            bands = [
                tensor.rows(start, stop, self.room(number, count * tensor.row_bytes))
                for number, tensor in enumerate(tensors)
            ]
            yield start, [band.reshape(stop - start, -1) for band in bands]
            self.report(sum(band.nbytes for band in bands))


Job = Callable[[Desk], T]


def run(jobs: Sequence[Job[T]], workers: int, report: Report) -> list[T]:
    """What each job gives, in their order; the first that fails stops all."""
    stopped, own = threading.Event(), threading.local()

    def tell(size: int) -> None:
        if stopped.is_set():
            raise StoppedError
        report(size)

    def one(job: Job[T]) -> T:
        tell(0)
        if not hasattr(own, "desk"):
            own.desk = Desk(tell)
        return job(own.desk)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The workers are the threads.
    pool = ThreadPoolExecutor(workers)
    try:
        futures = [pool.submit(one, job) for job in jobs]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        # Without a failure all are done.
        return [future.result() for future in futures if future in done]
    finally:
        stopped.set()
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)


def in_words(size: float) -> str:
    """Bytes as people say them."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
