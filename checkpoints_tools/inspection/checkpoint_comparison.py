"""Checkpoint comparison: two checkpoints of any formats and splits, or one with its checksums.

The comparison reads each logical tensor once: the same pass compares the tensor in both checkpoints
and hashes it for the digests. (`deep` adds a full scan, which reads the tensors again.) The report
names every tensor and config field that differs. A single checkpoint is compared with the checksums
of its own manifest.
"""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from checkpoints_tools.inspection.finding import Finding
from checkpoints_tools.inspection.full_scan import (
    manifest_tasks,
    scan_checkpoint,
    scan_tasks,
    source_location,
)
from checkpoints_tools.inspection.parallel_read import (
    Job,
    OpenProgress,
    ProgressCounter,
    WorkerScratch,
    run_jobs,
)
from checkpoints_tools.inspection.tensor_diff import TensorDiff
from gpt.checkpoint.digest import cache_digest, combine_digests, fingerprint, functional_config
from gpt.checkpoint.logical_tensor import Checkpoint, LogicalTensor, ModelIdentity, as_bytes
from gpt.dtypes import FLOAT_DTYPE_NAMES
from gpt.formats.manifest import MANIFEST
from gpt.formats.mappings.megatron_names import EMBEDDING


@dataclass(frozen=True)
class Difference:
    """One config field or tensor that differs.

    `kind` is "config", "missing", "shape", "dtype" or "values".
    """

    name: str
    kind: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "what": self.message, **self.details}


@dataclass(frozen=True)
class TensorComparison:
    """The SHA-256 of a tensor in A and in B, and the difference of the two tensors."""

    # A missing tensor has the SHA-256 of empty input. Without B, both values are A's hash.
    hashes: tuple[str, str]
    difference: Difference | None = None  # None: the tensors are equal, or there is no B.


@dataclass
class VerifiedCheckpoint:
    """One checkpoint, A or B, and the results of its checks."""

    label: str  # "A" or "B".
    checkpoint: Checkpoint
    digest: str = ""  # Computed from the bytes that were read.
    findings: list[Finding] = field(default_factory=list)
    proof_summary: str = ""  # Empty if no proof was replayed.
    proof_passed: bool = True

    def to_dict(self) -> dict[str, Any]:
        identity = self.checkpoint.identity
        return {
            "path": str(self.checkpoint.path),
            "format": self.checkpoint.format,
            "digest": self.digest,
            "recorded_digest": identity.digest if identity else None,
            "faults": [finding.line for finding in self.findings if finding.is_fault],
            "remarks": [finding.line for finding in self.findings if not finding.is_fault],
            "proof": self.proof_summary or None,
            "proven": self.proof_passed if self.proof_summary else None,
        }


@dataclass
class VerifyReport:
    """The result of a verification. --json prints `to_dict`, so its keys must not change."""

    sides: list[VerifiedCheckpoint]
    differences: list[Difference] = field(default_factory=list)
    tensor_count: int = 0
    byte_count: int = 0
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        faults = any(finding.is_fault for side in self.sides for finding in side.findings)
        return not self.differences and not faults and all(side.proof_passed for side in self.sides)

    def to_dict(self) -> dict[str, Any]:
        side_records = {side.label.lower(): side.to_dict() for side in self.sides}
        return {
            "a": side_records["a"],
            "b": side_records.get("b"),
            "good": self.passed,
            "equal": not self.differences if len(self.sides) == 2 else None,
            "tensors": self.tensor_count,
            "bytes": self.byte_count,
            "seconds": round(self.seconds, 3),
            "differences": [difference.to_dict() for difference in self.differences],
        }


def compare_checkpoints(
    sides: list[VerifiedCheckpoint], *, deep: bool, workers: int, open_progress: OpenProgress
) -> VerifyReport:
    """Compare the checkpoints A and B, or check A alone; `deep` adds a full scan of each.

    `sides` is [A, B] or [A].
    """
    left = sides[0].checkpoint
    right = sides[1].checkpoint if len(sides) == 2 else None
    names = list(dict.fromkeys(name for side in sides for name in side.checkpoint.tensors))
    jobs: list[Job[TensorComparison]] = []
    for name in names:
        if right is None:
            jobs.append(partial(_hash_single, left.tensors[name]))
        else:
            jobs.append(
                partial(_compare_tensors, name, left.tensors.get(name), right.tensors.get(name))
            )
    sizes = [tensor.nbytes for side in sides for tensor in side.checkpoint.tensors.values()]
    checksum_tasks = manifest_tasks(left.path) if right is None and not deep else []
    deep_bytes = (
        sum(size for side in sides for size, _ in scan_tasks(side.checkpoint)) if deep else 0
    )
    verify_report = VerifyReport(sides, tensor_count=len(names), byte_count=sum(sizes))
    with open_progress(
        sum(sizes) + deep_bytes + sum(size for size, _ in checksum_tasks)
    ) as report_progress:
        counter, started = ProgressCounter(report_progress), time.monotonic()
        comparisons = dict(zip(names, run_jobs(jobs, workers, counter.add_bytes), strict=True))
        verify_report.seconds = time.monotonic() - started
        for findings in run_jobs([job for _, job in checksum_tasks], workers, counter.add_bytes):
            sides[0].findings += findings
        if deep:
            for side in sides:
                side.findings += scan_checkpoint(side.checkpoint, workers, counter.add_bytes)
    for side_index, side in enumerate(sides):
        hashes = {name: comparisons[name].hashes[side_index] for name in side.checkpoint.tensors}
        side.digest = combine_digests(side.checkpoint, hashes)
        side.findings += _check_recorded_digest(side)
        if side.checkpoint.identity is None:
            sampled = fingerprint(side.checkpoint)
            cache_digest(side.checkpoint, ModelIdentity(side.digest, sampled, sampled=sampled))
    if right is not None:
        tensor_differences = [
            tensor.difference for tensor in comparisons.values() if tensor.difference
        ]
        verify_report.differences = [*_config_differences(left, right), *tensor_differences]
    return verify_report


def _check_recorded_digest(side: VerifiedCheckpoint) -> Iterator[Finding]:
    """Compare the computed digest with the digest that the manifest records for these weights.

    If the weights were converted to another dtype, the manifest also has the digest of the original
    weights. A remark reports this digest.
    """
    identity, path = side.checkpoint.identity, str(side.checkpoint.path)
    if identity is None:
        return
    # The recorded digest of these weights:
    # - `stored`, if it is set.
    # - `digest`, if `stored` is empty and the weights were not converted (no `note`).
    # - Unknown, if `stored` is empty and the weights were converted: an older manifest does not
    #   record the digest of converted weights. Then nothing is compared.
    recorded_digest = identity.stored or ("" if identity.note else identity.digest)
    if identity.note:
        message = (
            f"{MANIFEST} records the digest of the original checkpoint, {identity.digest}: "
            f"{identity.note}"
        )
        yield Finding(path, message, is_fault=False)
    if recorded_digest and recorded_digest != side.digest:
        message = (
            f"{MANIFEST} records the digest {recorded_digest}, but the weights have {side.digest}"
        )
        yield Finding(path, f"{message}; the weights were changed after they were written")


def _config_differences(left: Checkpoint, right: Checkpoint) -> Iterator[Difference]:
    """Yield the differences of config fields that affect the outputs.

    Other fields are not compared, because readers of different formats set them differently.
    """
    left_fields, right_fields = functional_config(left.config), functional_config(right.config)
    for name in dict.fromkeys([*left_fields, *right_fields]):
        if (
            name not in left_fields
            or name not in right_fields
            or left_fields[name] != right_fields[name]
        ):
            values = [getattr(checkpoint.config, name) for checkpoint in (left, right)]
            message = f"is {values[0]!r} in A, {values[1]!r} in B"
            if name not in left_fields or name not in right_fields:
                message += f", and is used only in {'A' if name in left_fields else 'B'}"
            yield Difference(name, "config", message)


def _compare_tensors(
    name: str, left: LogicalTensor | None, right: LogicalTensor | None, scratch: WorkerScratch
) -> TensorComparison:
    """Compare and hash one tensor; `left` is None if A lacks it, `right` is None if B lacks it."""
    if left is None or right is None or left.shape != right.shape:
        return TensorComparison(
            (_hash_tensor(left, scratch), _hash_tensor(right, scratch)),
            _structural_difference(name, left, right),
        )
    # If the dtypes are equal, both tensors have the same bytes before the first difference. Until
    # then, `left_hash` is the hash of both, and `right_hash` is None.
    same_dtype = left.dtype == right.dtype
    left_hash = hashlib.sha256()
    right_hash = None if same_dtype else hashlib.sha256()
    diff = TensorDiff()
    for first_row, (left_rows, right_rows) in scratch.iter_row_blocks(left, right):
        diff.add_block(first_row, left_rows, right_rows)
        if diff.differing_elements and right_hash is None:
            right_hash = left_hash.copy()
        left_hash.update(as_bytes(left_rows))
        if right_hash is not None:
            right_hash.update(as_bytes(right_rows))
    hashes = (left_hash.hexdigest(), (right_hash or left_hash).hexdigest())
    if not diff.differing_elements and same_dtype:
        return TensorComparison(hashes)
    return TensorComparison(hashes, _numeric_difference(name, left, right, diff))


def _hash_tensor(logical: LogicalTensor | None, scratch: WorkerScratch) -> str:
    hasher = hashlib.sha256()
    if logical is not None:
        for _, (rows,) in scratch.iter_row_blocks(logical):
            hasher.update(as_bytes(rows))
    return hasher.hexdigest()


def _hash_single(logical: LogicalTensor, scratch: WorkerScratch) -> TensorComparison:
    digest = _hash_tensor(logical, scratch)
    return TensorComparison((digest, digest))


def _structural_difference(
    name: str, left: LogicalTensor | None, right: LogicalTensor | None
) -> Difference:
    if left is None or right is None:
        present, absent = ("A", "B") if right is None else ("B", "A")
        return Difference(name, "missing", f"is in {present}, but not in {absent}")
    message = f"has shape {left.shape} in A, {right.shape} in B"
    if name == EMBEDDING:
        message += "; if one of them includes padding rows, give --true-vocab-size"
    return Difference(name, "shape", message)


def _numeric_difference(
    name: str, left: LogicalTensor, right: LogicalTensor, diff: TensorDiff
) -> Difference:
    details, clauses = diff.to_dict(), []
    if left.dtype != right.dtype:
        dtype_names = (FLOAT_DTYPE_NAMES[left.dtype], FLOAT_DTYPE_NAMES[right.dtype])
        clauses.append(f"is {dtype_names[0]} in A, {dtype_names[1]} in B")
        rounded = diff.right_is_rounded_left or diff.left_is_rounded_right
        details |= {
            "dtypes": list(dtype_names),
            "same_values": not diff.differing_elements,
            "rounded": rounded,
        }
        if not diff.differing_elements:
            return Difference(name, "dtype", f"{clauses[0]}, with the same values", details)
        if rounded:
            owners = ("B's", "A's") if diff.right_is_rounded_left else ("A's", "B's")
            clauses.append(f"{owners[0]} values are {owners[1]}, rounded")
    assert diff.first_index is not None
    sources = [source_location(logical, diff.first_index) for logical in (left, right)]
    details["sources"] = sources
    clauses.append(f"{diff.summary}, in {sources[0]} and in {sources[1]}")
    return Difference(name, "values", "; ".join(clauses), details)
