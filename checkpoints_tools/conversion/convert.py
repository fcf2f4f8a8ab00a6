"""Checkpoint conversion: plans the target, copies the tensors, publishes the target by one rename.

An invalid source, a target format that cannot express the model, and a full disk are reported
before any byte is written. All files are written to a hidden partial directory beside the target.
When the files are on disk and Preamble's own reader finds the expected model in them, one rename
publishes them as the target. A journal in the partial directory records the copied tensors. If a
run is killed, the directory and its journal remain, and a run with `resume` continues from there.
"""

import errno
import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints_tools.conversion.copy_engine import CopyResult, copy_tensors
from checkpoints_tools.conversion.journal import FinishedTensor, Journal
from checkpoints_tools.conversion.target_directory import (
    check_target,
    has_all_files,
    lock_partial,
    partial_directory,
    read_finished_identity,
)
from checkpoints_tools.layout.layout import Layout, TargetFile, unplaced_tensors
from checkpoints_tools.layout.tokenizer_files import plan_tokenizer_files
from checkpoints_tools.writers.registry import ConversionOptions, plan_target
from gpt.checkpoint.digest import combine_digests, fingerprint, functional_config, identify
from gpt.checkpoint.logical_tensor import (
    Checkpoint,
    ModelIdentity,
    checkpoint_from_tensors,
    summarize_names,
)
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPES
from gpt.errors import CheckpointError
from gpt.files.atomic_files import fsync_folders, rename_durable, write_synced
from gpt.formats.manifest import MANIFEST, Manifest
from gpt.formats.registry import open_checkpoint
from gpt.reference_logits.proof_file import PROOF_FILE as PROOF
from gpt.reference_logits.proof_file import Proof
from gpt.reference_logits.replay import compute_proof
from gpt.tokenizers.tokenizer import check_tokenizer, open_tokenizer

DEFAULT_MEMORY_BYTES = 1 << 30
DEFAULT_WORKERS = 2  # For library callers; the command line uses one thread per CPU, at most 8.
# Part of the plan's hash. Increase it when layouts change: journals of older versions are then
# refused.
PLAN_VERSION = 1
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)

ProgressCallback = Callable[[int], None]


@dataclass(frozen=True)
class ConversionPlan:
    """A planned conversion: the source checkpoint, and the layout of the target's files."""

    source: Checkpoint
    converted: Checkpoint  # The source in the dtypes of the target.
    target: Path
    layout: Layout
    with_proof: bool = False

    @property
    def partial_dir(self) -> Path:
        return partial_directory(self.target)

    @property
    def source_stamps(self) -> list[str]:
        """Path, size and modification time of each source file, to detect changes."""
        files = [(file.resolve(), file.stat()) for file in self.source.files]
        return [f"{file} {status.st_size} {status.st_mtime_ns}" for file, status in files]

    @property
    def plan_hash(self) -> str:
        """Hash of everything that determines the bytes of the target's files."""
        hasher = hashlib.sha256(f"{PLAN_VERSION} {fingerprint(self.source)}".encode())
        hasher.update(repr(self.source_stamps).encode())
        for file in (*self.layout.files, *self.layout.last_files):
            hasher.update(_hashed_text(file).encode())
            for literal in file.literals:
                hasher.update(literal.content)
        return hasher.hexdigest()


@dataclass(frozen=True)
class ConversionResult:
    identity: ModelIdentity
    nonfinite_tensors: tuple[str, ...] = ()
    overflowed_tensors: tuple[str, ...] = ()
    already_complete: bool = False  # Whether an earlier run had already completed the target.


def _hashed_text(file: TargetFile) -> str:
    """Return the text that represents a planned file in the plan's hash.

    The names in this text (File, Text, ...) must never change, even when the classes themselves are
    renamed: journals store the hash, and a conversion that an earlier release began must be able to
    resume.
    """
    literals = _tuple_text([f"Text(offset={literal.offset!r})" for literal in file.literals])
    placements = _tuple_text(
        [
            f"Placement(name={placement.name!r}, part=Part(dim={placement.part.dim!r}, "
            f"ranges={placement.part.ranges!r}, size={placement.part.size!r}), "
            f"offset={placement.offset!r}, dtype={placement.dtype!r}, "
            f"transposed={placement.transposed!r})"
            for placement in file.placements
        ]
    )
    patches = _tuple_text(
        [
            f"Patch(offset={patch.offset!r}, placement={patch.placement_index!r})"
            for patch in file.patches
        ]
    )
    return (
        f"File(path={file.path!r}, size={file.size!r}, texts={literals}, "
        f"placements={placements}, patches={patches})"
    )


def _tuple_text(elements: list[str]) -> str:
    return f"({', '.join(elements)}{',' if len(elements) == 1 else ''})"


def plan(source: Checkpoint, target: Path, options: ConversionOptions) -> ConversionPlan:
    """Plan the target; raise if the target format cannot express the model."""
    target = Path(os.path.abspath(target))
    tokenizer = options.tokenizer or source.tokenizer
    converted = replace(source, tokenizer=tokenizer)
    if options.dtype is not None:
        converted = converted.in_dtype(FLOAT_DTYPES[options.dtype])
    layout = plan_target(converted, options)
    if lost_tensors := unplaced_tensors(converted, layout):
        raise RuntimeError(
            f"the writer of --to {options.target_format} places these tensors in no file: "
            f"{summarize_names(lost_tensors)}"
        )
    converted = _in_stored_dtypes(converted, layout)
    if tokenizer is None:
        note = "the source has no tokenizer; give one with --tokenizer, or add it later"
        return ConversionPlan(
            source, converted, target, replace(layout, notes=(*layout.notes, note)), options.prove
        )
    if not layout.includes_tokenizer:
        files = plan_tokenizer_files(tokenizer, layout)
        notes = layout.notes
        try:
            check_tokenizer(open_tokenizer(tokenizer), converted.config.vocab_size, tokenizer)
        except CheckpointError as error:
            notes = (*notes, f"the tokenizer is copied unchanged, but {error}")
        layout = replace(layout, files=(*layout.files, *files), notes=notes)
    return ConversionPlan(source, converted, target, layout, options.prove)


def _in_stored_dtypes(converted: Checkpoint, layout: Layout) -> Checkpoint:
    """Return the checkpoint in the dtypes of the layout's placements.

    These dtypes can differ from the requested dtype. For example, a format may require that a
    parameter has the same dtype in all layers.
    """
    dtypes = {
        placement.name: placement.dtype for file in layout.files for placement in file.placements
    }
    tensors = {
        name: logical if logical.dtype == dtypes[name] else replace(logical, dtype=dtypes[name])
        for name, logical in converted.tensors.items()
    }
    return replace(converted, tensors=tensors)


def convert(
    plan: ConversionPlan,
    *,
    resume: bool = False,
    workers: int = DEFAULT_WORKERS,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    refuse_nan: bool = False,
    keep_partial: bool = True,
    report_progress: ProgressCallback = lambda _: None,
) -> ConversionResult:
    """Write the target. One rename publishes it, so an incomplete target never appears.

    After a failure the partial directory remains, so that a run with `resume` can continue. There
    are two exceptions: the directory is removed if `keep_partial` is false, and if a run without
    `resume` raised a CheckpointError. After a killed run the directory remains in any case.

    A reader raises CheckpointError if it cannot read a source file. Therefore an OSError is
    reported as an error of the target. A source file that is removed during the run also causes an
    OSError; the message then has the path of this file.
    """
    recorded_identity = _recorded_identity(plan.source)
    try:
        if resume and (finished_identity := _finished_identity(plan)) is not None:
            return ConversionResult(finished_identity, already_complete=True)
        check_target(plan.source, plan.target, plan.layout, resume)
        plan_hash = plan.plan_hash
        source_stamps = plan.source_stamps
        proof = compute_proof(plan.source, ModelIdentity("", "")) if plan.with_proof else None
        with lock_partial(plan.partial_dir):
            remove_partial = False
            try:
                # Another run may have completed the target before the lock was taken.
                check_target(plan.source, plan.target, plan.layout, resume=True)
                with Journal(plan.partial_dir / "journal", plan_hash) as journal:
                    copy_result = _copy_tensors(
                        plan, journal, workers, memory_bytes, refuse_nan, report_progress
                    )
                identity = _target_identity(plan, copy_result, recorded_identity)
                _finish_target(plan, copy_result, identity, proof)
                if plan.source_stamps != source_stamps:
                    raise CheckpointError(
                        f"{plan.source.path} was changed while it was read; convert it again when "
                        "no process writes to it"
                    )
                _publish(plan)
                remove_partial = True
            except CheckpointError:
                # The files of this run are of no use: the source or the options are wrong, or the
                # source was changed during the copy. A run with `resume` keeps the directory,
                # because the files of the earlier run may still be of use.
                remove_partial = not resume
                raise
            finally:
                if remove_partial or not keep_partial or not any(plan.partial_dir.iterdir()):
                    shutil.rmtree(plan.partial_dir, ignore_errors=True)
    except OSError as error:
        location = f"{error.filename}: " if error.filename else ""
        advice = (
            "free disk space"
            if error.errno in DISK_FULL_ERRNOS
            else "correct the cause (or choose another target)"
        )
        raise CheckpointError(
            f"cannot write {plan.target}: {location}{error.strerror or error}; {advice}, and run "
            "again with --resume"
        ) from None
    return ConversionResult(identity, copy_result.nonfinite_tensors, copy_result.overflowed_tensors)


def _recorded_identity(source: Checkpoint) -> ModelIdentity | None:
    """Return the identity that the source's manifest records; None without a manifest.

    Raises CheckpointError if the fingerprint of the weights differs from the recorded fingerprint.
    """
    return identify(source) if source.identity is not None else None


def _finished_identity(plan: ConversionPlan) -> ModelIdentity | None:
    """Return the identity of a target that an earlier run completed, else None.

    If that run was killed after its rename, its partial directory still exists and is removed.
    """
    identity = read_finished_identity(plan.converted, plan.target, plan.layout, plan.with_proof)
    if identity is not None and plan.partial_dir.exists():
        with lock_partial(plan.partial_dir):
            shutil.rmtree(plan.partial_dir, ignore_errors=True)
    return identity


def _copy_tensors(
    plan: ConversionPlan,
    journal: Journal,
    workers: int,
    memory_bytes: int,
    refuse_nan: bool,
    report_progress: ProgressCallback,
) -> CopyResult:
    """Copy to the partial directory the tensors that the journal does not list as finished."""
    content = plan.partial_dir / "content"
    if not (journal.finished and has_all_files(content, plan.layout)):
        journal.reset()
        shutil.rmtree(content, ignore_errors=True)
    content.mkdir(exist_ok=True)

    def check_tensor(tensor: FinishedTensor) -> None:
        if refuse_nan and not (tensor.finite and tensor.fits):
            problem = "holds values that are not finite"
            if tensor.finite:
                problem = f"holds values that overflow in {plan.converted.config.dtype}"
            raise CheckpointError(
                f"{plan.source.path}: {tensor.name} {problem}, which --refuse-nan forbids; use an "
                "earlier checkpoint, or remove --refuse-nan to copy these values"
            )

    return copy_tensors(
        plan.source,
        plan.layout,
        content,
        journal,
        workers=workers,
        memory_bytes=memory_bytes,
        report_progress=report_progress,
        check_tensor=check_tensor,
    )


def _publish(plan: ConversionPlan) -> None:
    """Rename the finished content to the target, so that the complete target appears at once.

    If another process creates the target after the last `check_target`, the result depends on the
    layout. A single-file layout replaces an existing file. Any other layout replaces only an empty
    directory; otherwise the rename raises OSError.

    If the run is killed after the rename, the partial directory still holds the journal. A later
    run with `resume` finds the complete target and removes that directory.
    """
    content = plan.partial_dir / "content"
    finished_path = content / plan.layout.files[0].path if plan.layout.is_single_file else content
    rename_durable(finished_path, plan.target)


def _target_identity(
    plan: ConversionPlan, copy_result: CopyResult, source_identity: ModelIdentity | None
) -> ModelIdentity:
    """Return the identity for the target's manifest.

    Raises CheckpointError if the source's weights do not have the digest that its manifest records.
    """
    digest = combine_digests(plan.source, copy_result.source_hashes)
    recorded_digest = ""
    if source_identity is not None:
        # The recorded digest of the source's weights:
        # - `stored`, if it is set.
        # - `digest`, if `stored` is empty and the weights were not converted (no `note`).
        # - Unknown, if `stored` is empty and the weights were converted: an older manifest does not
        #   record the digest of converted weights. Then nothing is compared.
        recorded_digest = source_identity.stored or (
            "" if source_identity.note else source_identity.digest
        )
    if recorded_digest and recorded_digest != digest:
        raise CheckpointError(
            f"{plan.source.path}: the weights have digest {digest[:12]}, but the manifest records "
            f"{recorded_digest[:12]}: files were changed after they were written; run `preamble "
            "verify` to find the changed files"
        )
    identity = source_identity or ModelIdentity(digest, fingerprint(plan.source))
    stored_digest = combine_digests(plan.converted, copy_result.stored_hashes)
    note = identity.note
    if stored_digest != digest:
        source_dtype = plan.source.config.dtype
        target_dtype = plan.converted.config.dtype
        if source_dtype != target_dtype:
            conversion_note = f"converted from {source_dtype} to {target_dtype}"
        else:
            conversion_note = f"some weights were converted to another dtype than {source_dtype}"
        note = f"{note}; {conversion_note}" if note else conversion_note
    return replace(
        identity,
        note=note,
        sampled=fingerprint(plan.converted),
        stored="" if stored_digest == identity.digest else stored_digest,
    )


def _finish_target(
    plan: ConversionPlan, copy_result: CopyResult, identity: ModelIdentity, proof: Proof | None
) -> None:
    """Write the manifest and `last_files`, then check the target with Preamble's reader.

    A single-file layout has no manifest and no `last_files`.
    """
    content = plan.partial_dir / "content"
    if not plan.layout.is_single_file:
        _write_small_files(plan, content, copy_result, identity, proof)
    fsync_folders(content)
    checkpoint_path = content / plan.layout.files[0].path if plan.layout.is_single_file else content
    _check_written(plan, open_checkpoint(checkpoint_path), identity)


def _write_small_files(
    plan: ConversionPlan,
    content: Path,
    copy_result: CopyResult,
    identity: ModelIdentity,
    proof: Proof | None,
) -> None:
    """Write the proof, the manifest, and last the files by which software detects the format."""
    folder = content / plan.layout.folder
    files = {
        _path_in_folder(file.path, plan): {
            "bytes": file.size,
            "crc32": f"{copy_result.file_crcs[file.path]:08x}",
        }
        for file in plan.layout.files
    }
    if proof is not None:
        proof_bytes = replace(proof, base=identity.digest).to_bytes()
        write_synced(folder / PROOF, proof_bytes)
        files[PROOF] = _manifest_entry(proof_bytes)
    last_files = {
        file.path: b"".join(literal.content for literal in file.literals)
        for file in plan.layout.last_files
    }
    files |= {
        _path_in_folder(path, plan): _manifest_entry(content_bytes)
        for path, content_bytes in last_files.items()
        if not plan.layout.folder or path.startswith(f"{plan.layout.folder}/")
    }
    manifest = Manifest(plan.layout.format, plan.converted.config, identity, files)
    write_synced(folder / MANIFEST, manifest.to_bytes())
    for path, content_bytes in last_files.items():
        write_synced(content / path, content_bytes)


def _check_written(plan: ConversionPlan, written: Checkpoint, identity: ModelIdentity) -> None:
    """Raise RuntimeError if the written checkpoint is not the planned model (a writer's bug).

    The check reads a few elements of each tensor (`fingerprint`), which is enough to find a wrong
    layout. It does not find every damaged byte; `preamble verify` reads all weights.
    """
    expected_fields = functional_config(plan.converted.config)
    written_fields = functional_config(written.config)
    wrong_fields = [
        name for name, value in expected_fields.items() if written_fields.get(name) != value
    ]
    if wrong_fields:
        raise RuntimeError(
            f"the written config differs from the planned one in {summarize_names(wrong_fields)}"
        )
    if fingerprint(written) != identity.sampled:
        raise RuntimeError("the written weights differ from the source's")


def _path_in_folder(path: str, plan: ConversionPlan) -> str:
    folder = f"{plan.layout.folder}/" if plan.layout.folder else ""
    return path.removeprefix(folder)


def _manifest_entry(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}


def write_native(
    source: Checkpoint | tuple[GPTConfig, Mapping[str, Tensor]],
    target: Path,
    *,
    tokenizer: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes_max: int | None = None,
) -> ModelIdentity:
    """Write a checkpoint, or a config with tensors in memory, in the native format.

    This function is for library callers, such as the planner's calibration. A `dtype` that is not
    in `FLOAT_DTYPES` has no effect. The function cannot resume: if a call was killed, remove the
    partial directory that the next call's error names.
    """
    checkpoint = source if isinstance(source, Checkpoint) else checkpoint_from_tensors(*source)
    checkpoint.check()
    dtype_name = next(
        (name for name, float_dtype in FLOAT_DTYPES.items() if float_dtype == dtype), None
    )
    options = ConversionOptions(
        dtype=dtype_name, tokenizer=tokenizer, shard_bytes_max=shard_bytes_max
    )
    return convert(plan(checkpoint, target, options), keep_partial=False).identity
