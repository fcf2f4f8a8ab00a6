"""Full scan: reads every byte of a checkpoint to find NaNs, unequal replicas and bad checksums.

The scan finds problems that headers do not show: NaN and infinite values, tensors of one constant
value, unequal replicas on different ranks, files that do not match their checksums, and swapped
rank files (`swapped_ranks`). It repairs nothing. It reads in blocks, so memory is bounded.
"""

import hashlib
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from checkpoints_tools.inspection.finding import Finding
from checkpoints_tools.inspection.parallel_read import (
    Job,
    ProgressCallback,
    WorkerScratch,
    run_jobs,
)
from checkpoints_tools.inspection.swapped_ranks import find_swapped_ranks
from checkpoints_tools.inspection.tensor_diff import TensorDiff
from gpt.checkpoint.files.file_tree import Span, scan_folder
from gpt.checkpoint.files.torch_save import ZIP_MAGIC
from gpt.checkpoint.files.torch_zip import MemoryFile
from gpt.checkpoint.logical_tensor import (
    BLOCK_BYTES,
    Checkpoint,
    LogicalTensor,
    ReplicaPair,
    summarize_names,
)
from gpt.errors import CheckpointError
from gpt.formats.manifest import MANIFEST, read_manifest
from gpt.formats.mappings.megatron_names import EMBEDDING, HEAD
from gpt.formats.megatron.torch_dist import INTEGRITY_FILE, ChunkSlice, read_json
from gpt.formats.nemo.archive import open_nemo_archive

ScanTask = tuple[int, Job[list[Finding]]]  # The number of bytes that the job reads, and the job.


def scan_tasks(checkpoint: Checkpoint) -> list[ScanTask]:
    """Return the scan jobs for all tensors, replicas, archives and recorded checksums."""
    task_list: list[ScanTask] = []
    for name, logical in checkpoint.tensors.items():
        task_list.append((logical.nbytes, partial(_scan_values, name, logical)))
    for replica in checkpoint.copies:
        size = math.prod(replica.primary.shape) * replica.primary.dtype.itemsize
        task_list.append((2 * size, partial(_compare_replica, replica)))
    head, embedding = (checkpoint.tensors.get(name) for name in (HEAD, EMBEDDING))
    if head is not None and embedding is not None and head.dtype == embedding.dtype:
        task_list.append((2 * head.nbytes, partial(_check_untied_head, head, embedding)))
    for file in checkpoint.files:
        if not _is_distcp(file):
            task_list.append((file.stat().st_size, partial(_scan_archive_file, file)))
    for archive in _distcp_archives(checkpoint):
        location = f"{archive.path} at byte {archive.offset}"
        task_list.append((archive.length, partial(_scan_span, location, archive)))
    return [*task_list, *manifest_tasks(checkpoint.path), *integrity_tasks(checkpoint.path)]


def scan_checkpoint(
    checkpoint: Checkpoint, workers: int, report: ProgressCallback
) -> list[Finding]:
    """Run all scan jobs, and return the findings: first the faults, then the remarks."""
    jobs = [job for _, job in scan_tasks(checkpoint)]
    findings = [
        finding for job_findings in run_jobs(jobs, workers, report) for finding in job_findings
    ]
    findings += find_swapped_ranks(checkpoint)
    # A constant matrix is a fault. Constant vectors, such as zero biases, are common, so one remark
    # lists all of them.
    constant_vectors = [finding for finding in findings if finding.message == CONSTANT_VECTOR]
    other_findings = [finding for finding in findings if finding.message != CONSTANT_VECTOR]
    if constant_vectors:
        names = summarize_names([finding.location for finding in constant_vectors])
        message = (
            f"{len(constant_vectors)} vectors are constant, as in a model that was not trained"
        )
        other_findings.append(Finding(names, message, is_fault=False))
    return sorted(other_findings, key=lambda finding: not finding.is_fault)


# Exceptions that zipfile raises for a damaged archive. A damaged header may ask for what zipfile
# cannot do: NotImplementedError is raised for an unknown compression method or version, and
# RuntimeError for an encrypted member.
ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    NotImplementedError,
    RuntimeError,
    EOFError,
    ValueError,
)
CONSTANT_VECTOR = "constant vector"


def _scan_values(name: str, logical: LogicalTensor, scratch: WorkerScratch) -> list[Finding]:
    """Report NaN and infinite values; in a tensor without them, report a constant value."""
    nan_count = inf_count = 0
    first_index: tuple[int, int] | None = None
    tensor_min, tensor_max = math.inf, -math.inf
    try:
        for first_row, (rows,) in scratch.iter_row_blocks(logical):
            if not rows.numel():
                continue
            block_min, block_max = rows.aminmax()
            if bool(block_min.isfinite()) and bool(block_max.isfinite()):
                tensor_min, tensor_max = (
                    min(tensor_min, float(block_min)),
                    max(tensor_max, float(block_max)),
                )
                continue
            if first_index is None:
                flat_index = int((~rows.isfinite()).flatten().to(torch.uint8).argmax())
                first_index = (first_row + flat_index // rows.shape[1], flat_index % rows.shape[1])
            nan_count += int(rows.isnan().sum())
            inf_count += int(rows.isinf().sum())
    except (CheckpointError, OSError) as error:
        return [Finding(name, f"cannot be read: {error}")]
    if first_index is not None:
        counts = []
        if nan_count:
            counts.append(f"{nan_count:,} NaN")
        if inf_count:
            counts.append(f"{inf_count:,} infinite")
        size = math.prod(logical.shape)
        location = f"the first at {list(first_index)}, in {source_location(logical, first_index)}"
        return [Finding(name, f"{' and '.join(counts)} of {size:,} values, {location}")]
    if tensor_min != tensor_max or math.prod(logical.shape) < 2:
        return []
    if len(logical.shape) == 1:
        return [Finding(name, CONSTANT_VECTOR, is_fault=False)]
    value = "zero" if tensor_min == 0 else f"{tensor_min:g}"
    return [Finding(name, f"all {math.prod(logical.shape):,} values are {value}")]


def source_location(logical: LogicalTensor, index: tuple[int, int]) -> str:
    """Return the source file and key of the element at (row, column)."""
    for piece in logical.slices:
        column_start, column_stop = piece.columns or (0, index[1] + 1)
        if piece.rows[0] <= index[0] < piece.rows[1] and column_start <= index[1] < column_stop:
            return piece.source.location
    return "no file"


def _compare_replica(replica: ReplicaPair, scratch: WorkerScratch) -> list[Finding]:
    """Compare the replica, which readers ignore, with the primary, which readers use."""
    try:
        primary_tensor, replica_tensor = (
            _as_matrix(source.tensor()) for source in (replica.primary, replica.replica)
        )
    except (CheckpointError, OSError) as error:
        return [Finding(replica.replica.location, f"cannot be read: {error}")]
    reference = f"{replica.primary.location}, although both store {replica.name}"
    if primary_tensor.shape != replica_tensor.shape or primary_tensor.dtype != replica_tensor.dtype:
        replica_type, primary_type = (
            (tensor.dtype, tuple(tensor.shape)) for tensor in (replica_tensor, primary_tensor)
        )
        return [
            Finding(
                replica.replica.location,
                f"has dtype and shape {replica_type}, not {primary_type} like {reference}",
            )
        ]
    diff = TensorDiff()
    row_bytes = primary_tensor.shape[1] * primary_tensor.itemsize
    block_rows = max(1, BLOCK_BYTES // max(1, row_bytes))
    for first_row in range(0, primary_tensor.shape[0], block_rows):
        left = primary_tensor[first_row : first_row + block_rows]
        right = replica_tensor[first_row : first_row + block_rows]
        diff.add_block(first_row, left, right)
        scratch.report_bytes(2 * left.nbytes)
    if not diff.differing_elements:
        return []
    return [Finding(replica.replica.location, f"is not equal to {reference}: {diff.summary}")]


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)


def _check_untied_head(
    head: LogicalTensor, embedding: LogicalTensor, scratch: WorkerScratch
) -> list[Finding]:
    """Return a remark if an untied head equals the embedding."""
    diff = TensorDiff()
    try:
        for first_row, (left, right) in scratch.iter_row_blocks(head, embedding):
            diff.add_block(first_row, left, right)
            if diff.differing_elements:
                return []
    except (CheckpointError, OSError):
        return []  # `_scan_values` reports unreadable tensors.
    return [Finding(HEAD, tied_head_message(head), is_fault=False)]


def tied_head_message(head: LogicalTensor) -> str:
    return (
        "equals the embedding although the config unties them; a tied model would be "
        f"{head.nbytes:,} bytes smaller"
    )


def _scan_archive_file(path: Path, scratch: WorkerScratch) -> list[Finding]:
    """Check the CRCs of a `torch.save` file, or of all `torch.save` files in a `.nemo`.

    A file of another format has no CRCs, so it counts as scanned.
    """
    try:
        with open(path, "rb") as file:
            magic = file.read(len(ZIP_MAGIC))
            file.seek(0)
            if magic == ZIP_MAGIC:
                return _scan_zip(str(path), file, scratch)
        if path.suffix == ".nemo":
            spans = open_nemo_archive(path)[0].spans.values()
            zip_spans = (
                span
                for span in spans
                if not _is_distcp(span.path) and span.peek(len(ZIP_MAGIC)) == ZIP_MAGIC
            )
            return [
                finding
                for span in zip_spans
                for finding in _scan_span(str(span.path), span, scratch)
            ]
        scratch.report_bytes(path.stat().st_size)
        return []
    except (OSError, CheckpointError) as error:
        return [Finding(str(path), f"cannot be read ({error})")]


def _is_distcp(path: Path) -> bool:
    """Tell whether a file is a `.distcp` file: a sequence of `torch.save` archives.

    `_distcp_archives` returns the archives, which are scanned one by one.
    """
    return path.suffix == ".distcp"


def _distcp_archives(checkpoint: Checkpoint) -> Iterable[Span]:
    """Return the archives inside `.distcp` files that contain the model's tensors."""
    sources = (piece.source for logical in checkpoint.tensors.values() for piece in logical.slices)
    archives = (source.chunk.span for source in sources if isinstance(source, ChunkSlice))
    return {id(archive): archive for archive in archives}.values()


def _scan_span(location: str, span: Span, scratch: WorkerScratch) -> list[Finding]:
    try:
        with io.BufferedReader(MemoryFile(span.memory())) as file:
            return _scan_zip(location, file, scratch)
    except OSError as error:
        return [Finding(location, f"cannot be read ({error.strerror})")]


def _scan_zip(location: str, file: IO[bytes], scratch: WorkerScratch) -> list[Finding]:
    findings = []
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                # torch can be configured to write no checksums. The CRC is then 0.
                if member.CRC and not _has_valid_crc(archive, member, scratch):
                    reason = f"its bytes do not match its CRC-32, {member.CRC:08x}"
                    findings.append(Finding(location, f"{member.filename} is damaged: {reason}"))
    except ZIP_ERRORS as error:
        findings.append(Finding(location, f"is a broken archive ({error})"))
    return findings


def _has_valid_crc(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, scratch: WorkerScratch
) -> bool:
    try:
        with archive.open(member) as stream:
            while block := stream.read(BLOCK_BYTES):
                scratch.report_bytes(len(block))
    except zipfile.BadZipFile:
        return False
    return True


def manifest_tasks(folder: Path) -> list[ScanTask]:
    """Return jobs that check the checksums in `preamble.json`; none if this file is missing."""
    if not (folder / MANIFEST).is_file():
        return []
    files = read_manifest(folder).files
    return [
        (entry["bytes"], partial(_check_checksums, folder / name, entry, MANIFEST))
        for name, entry in files.items()
    ]


def integrity_tasks(folder: Path) -> list[ScanTask]:
    """Return jobs that check the SHA-256 of the files that INTEGRITY_FILE lists.

    Newer versions of Megatron write this file into `torch_dist` checkpoints.
    """
    record = (
        read_json(scan_folder(folder), INTEGRITY_FILE)
        if (folder / INTEGRITY_FILE).is_file()
        else {}
    )
    files = record.get("files")
    if record.get("algorithm") != "sha256" or not isinstance(files, dict):
        return []
    task_list: list[ScanTask] = []
    for name, sha256 in sorted(files.items()):
        path = folder / name
        if Path(name).name == name and path.is_file():
            job = partial(_check_checksums, path, {"sha256": sha256}, INTEGRITY_FILE)
            task_list.append((path.stat().st_size, job))
    return task_list


def _check_checksums(
    path: Path, expected_checksums: Mapping[str, Any], list_name: str, scratch: WorkerScratch
) -> list[Finding]:
    """Compare a file with the checksums (SHA-256, CRC-32) that the file `list_name` records."""
    sha256, crc32 = hashlib.sha256(), 0
    expected = {
        kind: str(expected_checksums[kind])
        for kind in ("sha256", "crc32")
        if kind in expected_checksums
    }
    try:
        for block in _read_blocks(path, scratch):
            if "sha256" in expected:
                sha256.update(block)
            if "crc32" in expected:
                crc32 = zlib.crc32(block, crc32)
    except OSError as error:
        return [Finding(str(path), f"cannot be read ({error.strerror})")]
    actual = {"sha256": sha256.hexdigest(), "crc32": f"{crc32:08x}"}
    for kind, value in expected.items():
        if actual[kind] != value:
            mismatch = f"its {kind} is {actual[kind][:12]}, but {list_name} records {value[:12]}"
            return [Finding(str(path), f"{mismatch}; the file was changed after it was written")]
    return []


def _read_blocks(path: Path, scratch: WorkerScratch) -> Iterator[memoryview]:
    buffer = scratch.buffer(0, BLOCK_BYTES).numpy().data
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            yield buffer[:size]
            scratch.report_bytes(size)
