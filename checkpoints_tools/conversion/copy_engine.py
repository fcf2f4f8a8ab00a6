"""Copy engine: reads each logical tensor once, hashes it and writes all its placements.

A logical tensor is a whole, unsharded parameter. A placement is a part of a logical tensor at a
byte offset of a target file. A tensor is read in blocks of rows. Each block is hashed, checked for
NaN and infinity, and written to every placement that contains rows of the block. Therefore a worker
needs memory for a few blocks only. The exceptions are tensors whose rows are transposed or
reordered. These tensors are read completely into memory, and share one memory budget. Tensors may
be copied in any order. The module does not depend on the format.

The module relies on these properties of a layout:

- The literals and placements of a file do not overlap.
- All placements of a tensor have the same dtype.
- The ranges of a placement do not overlap.
- A placement has padding only if it is split by rows and not transposed.
- A placement that is split by columns is not transposed, and has one range.
- Tensors have one or two dimensions, each with a size of at least 1.
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

from checkpoints_tools.conversion.crc32 import combine_crc32
from checkpoints_tools.conversion.journal import FinishedTensor, Journal
from checkpoints_tools.layout.layout import Layout, Placement, TargetFile, placements_by_tensor
from gpt.checkpoint.logical_tensor import Checkpoint, LogicalTensor, allocate_scratch, as_bytes
from gpt.dtypes import is_finite
from gpt.errors import CheckpointError
from gpt.files.atomic_files import fsync_folders
from gpt.parallel.weight_sharding import layer_number

# Finished tensors are committed (fsync, then journal) when this time has passed, or this number of
# bytes was copied, since the last commit. A killed run loses the work since the last commit.
COMMIT_SECONDS = 5.0
COMMIT_BYTES = 2 << 30
SPARE_DESCRIPTORS = 64  # File descriptors for files other than the target's.
PROGRESS_SECONDS = 0.2  # Interval of progress reports.
ZERO_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class CopyResult:
    source_hashes: dict[str, str]  # SHA-256 of each logical tensor in the source's dtype.
    stored_hashes: dict[str, str]  # SHA-256 of each logical tensor in the target's dtype.
    nonfinite_tensors: tuple[str, ...]  # Tensors whose source has NaN or infinite values.
    overflowed_tensors: tuple[str, ...]  # Tensors for which FinishedTensor.fits is false.
    file_crcs: dict[str, int]  # CRC-32 of each file, by path.


class MemoryBudget:
    """Limit on the memory that all workers together use for tensors that are read completely.

    The buffers for blocks of rows are not counted. A reservation larger than the limit waits until
    there is no other reservation.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = total_bytes
        self.changed = threading.Condition()

    @contextmanager
    def reserve(self, byte_count: int) -> Iterator[None]:
        byte_count = min(byte_count, self.total_bytes)
        with self.changed:
            self.changed.wait_for(lambda: self.free_bytes >= byte_count)
            self.free_bytes -= byte_count
        try:
            yield
        finally:
            with self.changed:
                self.free_bytes += byte_count
                self.changed.notify_all()


class TargetFiles:
    """The target's open files, created at their final sizes; any offset can be written."""

    def __init__(self, files: Sequence[TargetFile], folder: Path) -> None:
        self.files = files
        self.folder = folder
        self.descriptors: list[int] = []
        self.dirty: set[int] = set()  # Indices of files that were written after the last `sync`.
        self.lock = threading.Lock()

    def __enter__(self) -> "TargetFiles":
        _raise_descriptor_limit(len(self.files))
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

    def write(self, file_index: int, offset: int, content: memoryview | bytes) -> None:
        view = memoryview(content)
        while view:
            written = os.pwrite(self.descriptors[file_index], view, offset)
            view, offset = view[written:], offset + written
        with self.lock:
            self.dirty.add(file_index)

    def sync(self) -> None:
        with self.lock:
            dirty, self.dirty = self.dirty, set()
        for file_index in sorted(dirty):
            os.fsync(self.descriptors[file_index])


def _raise_descriptor_limit(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + SPARE_DESCRIPTORS
    if soft < needed <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    elif needed > hard:
        raise CheckpointError(
            f"the target has {count} files, but this process may open only {hard} files; raise the "
            f"limit (ulimit -n {needed}), or choose a target with fewer ranks"
        )


class PlacementWriter:
    """Writes one placement, from the blocks of rows of the placement's logical tensor."""

    def __init__(
        self, files: TargetFiles, file_index: int, placement: Placement, shape: tuple[int, ...]
    ):
        self.files = files
        self.file_index = file_index
        self.placement = placement
        self.crc = 0
        self.part = placement.part
        stored_shape = self.part.local_shape(shape)
        row_elements = torch.Size(stored_shape[1:]).numel()
        self.row_bytes = row_elements * placement.dtype.itemsize
        # Number of rows of the part, without padding. If `part.dim` is 1: number of columns.
        self.filled_rows = sum(stop - start for start, stop in self.part.ranges)

    @property
    def needs_all_rows(self) -> bool:
        """Whether the rows are transposed or reordered.

        Then the copy needs all rows at once, because `crc` requires that bytes are written in the
        order of the file.
        """
        return self.placement.transposed or any(a[0] > b[0] for a, b in pairwise(self.part.ranges))

    def write_block(self, rows: Tensor, first_row: int) -> None:
        """Write the elements of a block that belong to the placement.

        rows[0] is row `first_row` of the logical tensor.
        """
        if self.placement.transposed:
            self._write_rows(self._transpose(rows), 0)
            return
        end_row = first_row + rows.shape[0]
        row_offset = 0  # The row of the placement at which the current range begins.
        for start, stop in self.part.ranges:
            if self.part.dim == 1:
                assert len(self.part.ranges) == 1, "a column split has one range"
                self._write_rows(rows[:, start:stop], first_row)
            elif start < end_row and first_row < stop:
                overlap_start, overlap_stop = max(first_row, start), min(end_row, stop)
                self._write_rows(
                    rows[overlap_start - first_row : overlap_stop - first_row],
                    row_offset + overlap_start - start,
                )
            row_offset += stop - start

    def _transpose(self, rows: Tensor) -> Tensor:
        assert self.part.dim == 0, "a transposed part is split by rows"
        transposed = torch.empty(rows.shape[1], self.filled_rows, dtype=rows.dtype)
        column_offset = 0
        for start, stop in self.part.ranges:
            transposed[:, column_offset : column_offset + stop - start] = rows[start:stop].T
            column_offset += stop - start
        return transposed

    def finish(self) -> int:
        """Write zeros for the padding rows, and return the CRC-32 of the placement."""
        if self.part.dim == 0 and not self.placement.transposed:
            padding_bytes = (self.part.size - self.filled_rows) * self.row_bytes
            offset = self.placement.offset + self.filled_rows * self.row_bytes
            for start in range(0, padding_bytes, ZERO_BLOCK_BYTES):
                self._write_bytes(
                    bytes(min(ZERO_BLOCK_BYTES, padding_bytes - start)), offset + start
                )
        return self.crc

    def _write_rows(self, rows: Tensor, row_offset: int) -> None:
        content = as_bytes(rows.contiguous())
        self._write_bytes(content, self.placement.offset + row_offset * self.row_bytes)

    def _write_bytes(self, content: memoryview | bytes, offset: int) -> None:
        self.crc = zlib.crc32(content, self.crc)
        self.files.write(self.file_index, offset, content)


class TensorCopier:
    """Copies one tensor per call; several worker threads share the object."""

    def __init__(self, checkpoint: Checkpoint, files: TargetFiles, memory_bytes: int) -> None:
        self.checkpoint = checkpoint
        self.files = files
        self.placements_by_tensor = placements_by_tensor(files.files)
        self.budget = MemoryBudget(memory_bytes)
        self.copied_bytes = 0
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.thread_buffers = threading.local()

    def copy_tensor(self, name: str) -> FinishedTensor | None:
        """Copy one tensor; return None if `stopped` was set before the end of the copy."""
        logical = self.checkpoint.tensors[name]
        writers = [
            PlacementWriter(
                self.files,
                file_index,
                self.files.files[file_index].placements[placement_index],
                logical.shape,
            )
            for file_index, placement_index in self.placements_by_tensor[name]
        ]
        dtype = writers[0].placement.dtype
        assert all(writer.placement.dtype == dtype for writer in writers), f"{name} in two dtypes"
        source_hash = hashlib.sha256()
        finite = True
        fits = True
        stored_hash = source_hash if dtype == logical.dtype else hashlib.sha256()
        with self._row_buffer(
            logical, dtype, needs_all_rows=any(writer.needs_all_rows for writer in writers)
        ) as buffer:
            block_rows = buffer.numel() // logical.row_bytes
            for start in range(0, logical.shape[0], block_rows):
                if self.stopped.is_set():
                    return None
                rows = logical.read_rows(start, min(logical.shape[0], start + block_rows), buffer)
                content = as_bytes(rows)
                source_hash.update(content)
                block_is_finite = is_finite(rows)
                finite = finite and block_is_finite
                if stored_hash is not source_hash:
                    rows = rows.to(dtype)
                    stored_hash.update(as_bytes(rows))
                    fits = fits and (not block_is_finite or is_finite(rows))
                for writer in writers:
                    writer.write_block(rows, start)
                with self.lock:
                    self.copied_bytes += len(content)
        return FinishedTensor(
            name,
            sha256=source_hash.hexdigest(),
            stored=stored_hash.hexdigest(),
            finite=finite,
            fits=fits,
            crcs=tuple(writer.finish() for writer in writers),
        )

    @contextmanager
    def _row_buffer(
        self, logical: LogicalTensor, dtype: torch.dtype, needs_all_rows: bool
    ) -> Iterator[Tensor]:
        if needs_all_rows:
            # Memory for the tensor, its transposed copy, and its copy in another dtype, if any.
            stored_bytes = logical.nbytes // logical.dtype.itemsize * dtype.itemsize
            copies = 1 if dtype == logical.dtype else 2
            with self.budget.reserve(logical.nbytes + copies * stored_bytes):
                yield torch.empty(max(1, logical.nbytes), dtype=torch.uint8)
            return
        if (
            not hasattr(self.thread_buffers, "bytes")
            or self.thread_buffers.bytes.numel() < logical.row_bytes
        ):
            self.thread_buffers.bytes = allocate_scratch(logical.row_bytes)
        yield self.thread_buffers.bytes


def copy_tensors(
    checkpoint: Checkpoint,
    layout: Layout,
    folder: Path,
    journal: Journal,
    *,
    workers: int,
    memory_bytes: int,
    report_progress: Callable[[int], None],
    check_tensor: Callable[[FinishedTensor], None],
) -> CopyResult:
    """Write and fsync all files of the layout, except `last_files`, in `folder`.

    `report_progress` is called with the number of source bytes copied so far. `check_tensor` is
    called with each finished tensor, and may raise an exception to stop the copy.
    """
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The copy is already parallel: it has `workers` threads.
    try:
        with TargetFiles(layout.files, folder) as files:
            for file_index, file in enumerate(layout.files):
                for literal in file.literals:
                    files.write(file_index, literal.offset, literal.content)
            fsync_folders(folder)
            copier = TensorCopier(checkpoint, files, memory_bytes)
            _copy_all(copier, journal, workers, report_progress, check_tensor)
            crcs = _patch_checksums(files, copier, journal)
            files.sync()
    finally:
        torch.set_num_threads(previous_threads)
    tensors = [journal.finished[name] for name in checkpoint.tensors]
    return CopyResult(
        {tensor.name: tensor.sha256 for tensor in tensors},
        {tensor.name: tensor.stored for tensor in tensors},
        tuple(tensor.name for tensor in tensors if not tensor.finite),
        tuple(tensor.name for tensor in tensors if not tensor.fits),
        crcs,
    )


def _copy_all(
    copier: TensorCopier,
    journal: Journal,
    workers: int,
    report_progress: Callable[[int], None],
    check_tensor: Callable[[FinishedTensor], None],
) -> None:
    tensors = copier.checkpoint.tensors
    for tensor in journal.finished.values():
        check_tensor(tensor)
    copier.copied_bytes = sum(tensors[name].nbytes for name in journal.finished)
    # Embedding and head are usually the largest tensors, so they are copied first. If they were
    # last, the other workers would be idle while one worker still copies such a tensor.
    names = sorted(
        (name for name in tensors if name not in journal.finished),
        key=lambda name: layer_number(name) is not None,
    )
    with ThreadPoolExecutor(workers) as pool:
        futures: set[Future[FinishedTensor | None]] = {
            pool.submit(copier.copy_tensor, name) for name in names
        }
        try:
            _commit_finished(copier, journal, futures, report_progress, check_tensor)
        finally:
            copier.stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _commit_finished(
    copier: TensorCopier,
    journal: Journal,
    pending: set[Future[FinishedTensor | None]],
    report_progress: Callable[[int], None],
    check_tensor: Callable[[FinishedTensor], None],
) -> None:
    """Commit each finished tensor to the journal, but only after an fsync of its files."""
    uncommitted: list[FinishedTensor] = []
    committed_bytes, committed_at = copier.copied_bytes, time.monotonic()
    while pending:
        completed, pending = wait(pending, PROGRESS_SECONDS, FIRST_COMPLETED)
        for future in completed:
            tensor = future.result()
            if tensor is not None:
                check_tensor(tensor)
                uncommitted.append(tensor)
        report_progress(copier.copied_bytes)
        is_commit_due = (
            time.monotonic() - committed_at > COMMIT_SECONDS
            or copier.copied_bytes - committed_bytes > COMMIT_BYTES
        )
        if uncommitted and is_commit_due:
            copier.files.sync()
            journal.commit(uncommitted)
            uncommitted = []
            committed_bytes = copier.copied_bytes
            committed_at = time.monotonic()
    copier.files.sync()
    journal.commit(uncommitted)


def _patch_checksums(files: TargetFiles, copier: TensorCopier, journal: Journal) -> dict[str, int]:
    """Write each placement's CRC-32 at the offsets that the layout reserves for it (`patches`).

    Returns the CRC-32 of each file.
    """
    crcs: dict[tuple[int, int], int] = {}
    for name, placements in copier.placements_by_tensor.items():
        crcs |= dict(zip(placements, journal.finished[name].crcs, strict=True))
    file_crcs = {}
    for file_index, file in enumerate(files.files):
        for patch in file.patches:
            crc = crcs[file_index, patch.placement_index].to_bytes(4, "little")
            files.write(file_index, patch.offset, crc)
        file_crcs[file.path] = combine_crc32(_file_segments(files, file_index, copier, crcs))
    return file_crcs


def _file_segments(
    files: TargetFiles, file_index: int, copier: TensorCopier, crcs: dict[tuple[int, int], int]
) -> Iterable[tuple[int, int]]:
    """Yield the CRC-32 and length of each segment of a file, in order.

    A segment is a literal, a placement, or a gap of zeros. Literals are read back from the file,
    because the CRCs of placements were written into some of them after the tensors.
    """
    file = files.files[file_index]
    end = 0  # The end of the previous segment.
    spans: list[tuple[int, int, int | None]] = [
        (literal.offset, len(literal.content), None) for literal in file.literals
    ]
    for index, placement in enumerate(file.placements):
        shape = placement.part.local_shape(copier.checkpoint.tensors[placement.name].shape)
        size = torch.Size(shape).numel() * placement.dtype.itemsize
        spans.append((placement.offset, size, index))
    for offset, size, placement_index in [
        *sorted(spans, key=lambda span: span[:2]),
        (file.size, 0, None),
    ]:
        assert offset >= end, f"{file.path}: the segment at byte {offset} overlaps another"
        if offset > end:
            yield zlib.crc32(bytes(offset - end)), offset - end
        if placement_index is not None:
            yield crcs[file_index, placement_index], size
        else:
            yield zlib.crc32(os.pread(files.descriptors[file_index], size, offset)), size
        end = offset + size
