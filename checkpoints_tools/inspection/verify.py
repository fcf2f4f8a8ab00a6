"""`preamble verify`: the command that compares two checkpoints, or checks a single one.

This module opens the checkpoints, replays proofs, and prints the report as text or as one JSON
object. `checkpoint_comparison` compares the tensors.
"""

import argparse
import json
from collections.abc import Callable, Iterator

from checkpoints_tools.flags import source_overrides
from checkpoints_tools.inspection.checkpoint_comparison import (
    VerifiedCheckpoint,
    VerifyReport,
    compare_checkpoints,
)
from checkpoints_tools.inspection.parallel_read import OpenProgress, format_bytes
from gpt.errors import CheckpointError
from gpt.formats.manifest import MANIFEST
from gpt.formats.registry import open_checkpoint
from gpt.reference_logits.proof_file import PROOF_FILE as PROOF
from gpt.reference_logits.proof_file import find_proof
from gpt.reference_logits.replay import check_proof

PrintLine = Callable[[str], None]


def verify(flags: argparse.Namespace, print_line: PrintLine, open_progress: OpenProgress) -> int:
    """Run `preamble verify` with parsed flags.

    Return exit status 1 if there is a difference, a fault or a failed proof, else 0.
    """
    overrides = source_overrides(flags)
    paths = [path for path in (flags.a, flags.b) if path is not None]
    checkpoints = [open_checkpoint(path, overrides) for path in paths]
    sides = [
        VerifiedCheckpoint(label, checkpoint)
        for label, checkpoint in zip("AB", checkpoints, strict=False)
    ]
    first = sides[0].checkpoint
    proof = find_proof(first) if flags.prove else None
    if flags.prove and proof is None:
        raise CheckpointError(
            f"{first.path} has no {PROOF}, the file with the reference logits that --prove needs; "
            "write the checkpoint with `preamble convert --prove`, or remove --prove"
        )
    if len(sides) == 1 and not (first.path / MANIFEST).is_file() and not flags.deep and not proof:
        raise CheckpointError(
            f"{first.path} has no {MANIFEST} with checksums; give a second checkpoint to compare "
            "it with, or give --deep to find faults that are visible without checksums"
        )
    report = compare_checkpoints(
        sides, deep=flags.deep, workers=flags.workers, open_progress=open_progress
    )
    for side in sides if proof else ():
        assert proof is not None
        proof_diff = check_proof(side.checkpoint, proof)
        side.proof_summary = proof_diff.summary
        side.proof_passed = proof_diff.is_within_limit
    if flags.json:
        print_line(json.dumps(report.to_dict(), indent=2))
    else:
        for line in _format_report(report):
            print_line(line)
    return 0 if report.passed else 1


def _format_report(report: VerifyReport) -> Iterator[str]:
    """Yield the lines of the report: one per difference and finding, then a summary."""
    for side in report.sides:
        size = sum(tensor.nbytes for tensor in side.checkpoint.tensors.values())
        contents = f"{format_bytes(size)} of {side.checkpoint.config.dtype}"
        yield f"{side.label}  {side.checkpoint.path} ({side.checkpoint.format}, {contents})"
    for difference in report.differences:
        yield f"different: {difference.name} {difference.message}"
    for side in report.sides:
        for finding in side.findings:
            yield f"{'fault' if finding.is_fault else 'remark'} in {side.label}: {finding.line}"
    for side in report.sides:
        if side.proof_summary:
            verb = "holds" if side.proof_passed else "fails"
            yield f"the proof {verb} for {side.label}: {side.proof_summary}"
    for side in report.sides:
        yield f"digest of {side.label}: {side.digest}"
    speed = format_bytes(report.byte_count / max(report.seconds, 1e-9))
    throughput = f"{format_bytes(report.byte_count)} in {report.seconds:.1f} s, {speed}/s"
    if len(report.sides) == 1:
        yield (
            f"{'intact' if report.passed else 'damaged'}: {report.tensor_count} tensors, "
            f"{throughput}"
        )
        return
    field_count = sum(difference.kind == "config" for difference in report.differences)
    unequal_tensors = len(report.differences) - field_count
    if not report.differences:
        faults = sum(finding.is_fault for side in report.sides for finding in side.findings)
        qualifier = f", but {faults} faults" if faults else ""
        yield f"equal: {report.tensor_count} tensors{qualifier}, {throughput}"
    else:
        equal_tensors = report.tensor_count - unequal_tensors
        difference_counts = (
            f"{unequal_tensors} of {report.tensor_count} tensors and {field_count} fields of the "
            "config"
        )
        rounded = all(difference.details.get("rounded") for difference in report.differences)
        qualifier = ", all of them only by rounding to another dtype" if rounded else ""
        yield (
            f"different: {difference_counts}{qualifier}; {equal_tensors} tensors are equal; "
            f"{throughput}"
        )
