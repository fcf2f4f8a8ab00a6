"""The one loop of every conversion: logical tensors in, placements out, block by block.

A tensor is read once, in bands of rows; each band is hashed, looked at for values that are not
finite, and written to wherever parts of it go, at its place in each file. So memory is a few
blocks per worker, whatever the model's size; only a tensor that is turned on the way is held whole,
under one budget. It knows no formats, and no order among tensors matters.
"""

import hashlib
import os
import resource
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_tools.conversion.crc32 import joined
from checkpoints_tools.conversion.journal import Done, Journal
from checkpoints_tools.conversion.target_directory import sync_folders
from checkpoints_tools.layout.layout import File, Layout, Placement, placed
from gpt.checkpoint.logical_tensor import Checkpoint, Logical, as_bytes, make_room
from gpt.errors import CheckpointError
from gpt.parallel.sharding import layer_of

# What is on its way is brought to the disk, and noted, this often: as much is done again at most.
COMMIT_SECONDS, COMMIT_BYTES = 5.0, 2 << 30
SPARE_DESCRIPTORS = 64
PROGRESS_SECONDS = 0.2
ZEROS_BYTES = 1 << 20


@dataclass(frozen=True)
class Copied:
    hashes: dict[str, str]  # Of the logical tensors, as the source stores them.
    stored: dict[str, str]  # The same in the target's dtype.
    not_finite: tuple[str, ...]  # Tensors that hold NaN or an infinity.
    overflown: tuple[str, ...]  # Those that hold one only in the target's dtype.
    crcs: dict[str, int]  # Of the files.


class Budget:
    """Bytes that all workers may hold together; one that needs more than all waits to be alone."""

    def __init__(self, size: int) -> None:
        self.size, self.free = size, size
        self.changed = threading.Condition()

    @contextmanager
    def hold(self, wanted: int) -> Iterator[None]:
        wanted = min(wanted, self.size)
        with self.changed:
            self.changed.wait_for(lambda: self.free >= wanted)
            self.free -= wanted
        try:
            yield
        finally:
            with self.changed:
                self.free += wanted
                self.changed.notify_all()


class Files:
    """The target's files, made at their final sizes, written anywhere."""

    def __init__(self, files: Sequence[File], folder: Path) -> None:
        self.files, self.folder = files, folder
        self.descriptors: list[int] = []
        self.dirty: set[int] = set()
        self.lock = threading.Lock()

    def __enter__(self) -> "Files":
        _allow_descriptors(len(self.files))
        try:
            for file in self.files:
                path = self.folder / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                self.descriptors.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
                os.ftruncate(self.descriptors[-1], file.size)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def write(self, number: int, offset: int, content: memoryview | bytes) -> None:
        view = memoryview(content)
        while view:
            written = os.pwrite(self.descriptors[number], view, offset)
            view, offset = view[written:], offset + written
        with self.lock:
            self.dirty.add(number)

    def sync(self) -> None:
        with self.lock:
            dirty, self.dirty = self.dirty, set()
        for number in sorted(dirty):
            os.fsync(self.descriptors[number])


def _allow_descriptors(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = count + SPARE_DESCRIPTORS
    if soft < need <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
    elif need > hard:
        raise CheckpointError(
            f"the target has {count} files, and this user may open {hard}; raise the limit "
            f"(ulimit -n {need}) or choose a smaller split"
        )


class _Goal:
    """One placement on its way: takes bands of the tensor's rows, keeps what is its own."""

    def __init__(self, files: Files, number: int, placement: Placement, shape: tuple[int, ...]):
        self.files, self.number, self.placement = files, number, placement
        self.crc, self.part = 0, placement.part
        held = self.part.shape(shape)
        elements = torch.Size(held[1:]).numel()
        self.row_bytes = elements * placement.dtype.itemsize
        self.filled = sum(stop - start for start, stop in self.part.ranges)

    @property
    def whole(self) -> bool:
        """Whether it needs all rows at once: to turn them, or to put them in another order."""
        return self.placement.transposed or any(a[0] > b[0] for a, b in pairwise(self.part.ranges))

    def take(self, rows: Tensor, first: int) -> None:
        last, filled = first + rows.shape[0], 0
        if self.placement.transposed:
            self._put(self._turned(rows), 0)
            return
        for start, stop in self.part.ranges:
            if self.part.dim == 1:
                assert len(self.part.ranges) == 1, "columns lie in one run"
                self._put(rows[:, start:stop], first)
            elif start < last and first < stop:
                top, bottom = max(first, start), min(last, stop)
                self._put(rows[top - first : bottom - first], filled + top - start)
            filled += stop - start

    def _turned(self, rows: Tensor) -> Tensor:
        assert self.part.dim == 0, "only rows are put in order before they are turned"
        turned, filled = torch.empty(rows.shape[1], self.filled, dtype=rows.dtype), 0
        for start, stop in self.part.ranges:
            turned[:, filled : filled + stop - start] = rows[start:stop].T
            filled += stop - start
        return turned

    def finish(self) -> int:
        """The rows beyond its ranges, then the checksum."""
        if self.part.dim == 0 and not self.placement.transposed:
            left = (self.part.size - self.filled) * self.row_bytes
            offset = self.placement.offset + self.filled * self.row_bytes
            for start in range(0, left, ZEROS_BYTES):
                self._write(bytes(min(ZEROS_BYTES, left - start)), offset + start)
        return self.crc

    def _put(self, rows: Tensor, at: int) -> None:
        content = as_bytes(rows.contiguous())
        self._write(content, self.placement.offset + at * self.row_bytes)

    def _write(self, content: memoryview | bytes, offset: int) -> None:
        self.crc = zlib.crc32(content, self.crc)
        self.files.write(self.number, offset, content)


class Copying:
    """A copy under way."""

    def __init__(self, checkpoint: Checkpoint, files: Files, memory: int) -> None:
        self.checkpoint, self.files = checkpoint, files
        self.places = placed(files.files)
        self.budget = Budget(memory)
        self.passed, self.lock = 0, threading.Lock()
        self.stopped = threading.Event()
        self.rooms = threading.local()

    def tensor(self, name: str) -> Done | None:
        """Copy one; None if the copy was stopped before its end."""
        logical = self.checkpoint.tensors[name]
        goals = [
            _Goal(self.files, number, self.files.files[number].placements[place], logical.shape)
            for number, place in self.places[name]
        ]
        dtype = goals[0].placement.dtype
        assert all(goal.placement.dtype == dtype for goal in goals), f"{name} in two dtypes"
        own, finite, fits = hashlib.sha256(), True, True
        converted = own if dtype == logical.dtype else hashlib.sha256()
        with self._room(logical, dtype, whole=any(goal.whole for goal in goals)) as room:
            step = room.numel() // logical.row_bytes
            for start in range(0, logical.shape[0], step):
                if self.stopped.is_set():
                    return None
                rows = logical.rows(start, min(logical.shape[0], start + step), room)
                content = as_bytes(rows)
                own.update(content)
                ours = is_finite(rows)
                finite = finite and ours
                if converted is not own:
                    rows = rows.to(dtype)
                    converted.update(as_bytes(rows))
                    fits = fits and (not ours or is_finite(rows))
                for goal in goals:
                    goal.take(rows, start)
                with self.lock:
                    self.passed += len(content)
        hashes = own.hexdigest(), converted.hexdigest()
        return Done(name, *hashes, finite, fits, tuple(goal.finish() for goal in goals))

    @contextmanager
    def _room(self, logical: Logical, dtype: torch.dtype, whole: bool) -> Iterator[Tensor]:
        if whole:
            # The tensor, the same in another dtype, and turned.
            made = logical.nbytes // logical.dtype.itemsize * dtype.itemsize
            with self.budget.hold(logical.nbytes + (1 + (dtype != logical.dtype)) * made):
                yield torch.empty(max(1, logical.nbytes), dtype=torch.uint8)
            return
        if not hasattr(self.rooms, "bytes") or self.rooms.bytes.numel() < logical.row_bytes:
            self.rooms.bytes = make_room(logical.row_bytes)
        yield self.rooms.bytes


def is_finite(rows: Tensor) -> bool:
    """Both extremes are NaN if any element is."""
    return rows.numel() == 0 or all(bool(extreme.isfinite()) for extreme in rows.aminmax())


def copy(
    checkpoint: Checkpoint,
    layout: Layout,
    folder: Path,
    journal: Journal,
    *,
    workers: int,
    memory: int,
    report: Callable[[int], None],
    found: Callable[[Done], None],
) -> Copied:
    """Write all that the layout has but `last` into `folder`, and bring it to the disk.

    `report` is told the bytes that went by, `found` each tensor that is done and may refuse it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The workers are the threads.
    try:
        with Files(layout.files, folder) as files:
            for number, file in enumerate(layout.files):
                for text in file.texts:
                    files.write(number, text.offset, text.content)
            sync_folders(folder)
            copying = Copying(checkpoint, files, memory)
            _run(copying, journal, workers, report, found)
            crcs = _patched(files, copying, journal)
            files.sync()
    finally:
        torch.set_num_threads(threads)
    done = [journal.done[name] for name in checkpoint.tensors]
    return Copied(
        {one.name: one.sha256 for one in done},
        {one.name: one.stored for one in done},
        tuple(one.name for one in done if not one.finite),
        tuple(one.name for one in done if not one.fits),
        crcs,
    )


def _run(
    copying: Copying,
    journal: Journal,
    workers: int,
    report: Callable[[int], None],
    found: Callable[[Done], None],
) -> None:
    tensors = copying.checkpoint.tensors
    for done in journal.done.values():
        found(done)
    copying.passed = sum(tensors[name].nbytes for name in journal.done)
    # What stands outside the layers is large; one that comes last would keep one worker alone.
    names = sorted(
        (name for name in tensors if name not in journal.done),
        key=lambda n: layer_of(n) is not None,
    )
    with ThreadPoolExecutor(workers) as pool:
        left: set[Future[Done | None]] = {pool.submit(copying.tensor, name) for name in names}
        try:
            _collect(copying, journal, left, report, found)
        finally:
            copying.stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _collect(
    copying: Copying,
    journal: Journal,
    left: set[Future[Done | None]],
    report: Callable[[int], None],
    found: Callable[[Done], None],
) -> None:
    """Note what is done, but only when it is on the disk."""
    ready: list[Done] = []
    noted, since = copying.passed, time.monotonic()
    while left:
        ended, left = wait(left, PROGRESS_SECONDS, FIRST_COMPLETED)
        for future in ended:
            done = future.result()
            if done is not None:
                found(done)
                ready.append(done)
        report(copying.passed)
        late = time.monotonic() - since > COMMIT_SECONDS or copying.passed - noted > COMMIT_BYTES
        if ready and late:
            copying.files.sync()
            journal.commit(ready)
            ready, noted, since = [], copying.passed, time.monotonic()
    copying.files.sync()
    journal.commit(ready)


def _patched(files: Files, copying: Copying, journal: Journal) -> dict[str, int]:
    """Checksums to where they are noted inside the files, and then those of the files."""
    crcs: dict[tuple[int, int], int] = {}
    for name, places in copying.places.items():
        crcs |= dict(zip(places, journal.done[name].crcs, strict=True))
    whole = {}
    for number, file in enumerate(files.files):
        for patch in file.patches:
            crc = crcs[number, patch.placement].to_bytes(4, "little")
            files.write(number, patch.offset, crc)
        whole[file.path] = joined(_segments(files, number, copying, crcs))
    return whole


def _segments(
    files: Files, number: int, copying: Copying, crcs: dict[tuple[int, int], int]
) -> Iterable[tuple[int, int]]:
    """Checksum and length of each stretch of a file; texts are read again, for their patches."""
    file, end = files.files[number], 0
    spans: list[tuple[int, int, int | None]] = [
        (text.offset, len(text.content), None) for text in file.texts
    ]
    for place, placement in enumerate(file.placements):
        shape = placement.part.shape(copying.checkpoint.tensors[placement.name].shape)
        size = torch.Size(shape).numel() * placement.dtype.itemsize
        spans.append((placement.offset, size, place))
    for offset, size, held in [*sorted(spans, key=lambda span: span[:2]), (file.size, 0, None)]:
        assert offset >= end, f"{file.path}: what stands at byte {offset} overlaps"
        if offset > end:
            yield zlib.crc32(bytes(offset - end)), offset - end
        if held is not None:
            yield crcs[number, held], size
        else:
            yield zlib.crc32(os.pread(files.descriptors[number], size, offset)), size
        end = offset + size
