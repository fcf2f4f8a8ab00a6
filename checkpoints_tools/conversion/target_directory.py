"""Target directory of a checkpoint conversion: path and disk-space checks, lock, earlier runs.

A conversion writes to a hidden partial directory beside the target. A lock on this directory
prevents two runs at a time. A resumed run reuses an earlier run's files only if all of them exist
at their full sizes; it then skips the tensors that the journal lists as finished.

An existing target counts as complete if its files have the planned sizes and literal bytes (headers
and small files), and if it has the fingerprint of the converted source. The manifest records the
fingerprint. A single-file target has no manifest, so its fingerprint is computed from the file.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoints_tools.layout.layout import Layout, TargetFile
from gpt.checkpoint.digest import fingerprint, identify
from gpt.checkpoint.logical_tensor import Checkpoint, ModelIdentity
from gpt.errors import CheckpointError
from gpt.formats.manifest import MANIFEST, read_manifest
from gpt.formats.registry import open_checkpoint
from gpt.reference_logits.proof_file import PROOF_FILE as PROOF

# Disk space for file-system metadata, in addition to the bytes of the files.
SPARE_BYTES = 16 << 20


def partial_directory(target: Path) -> Path:
    """Return the path of the hidden directory that a run writes to.

    This directory is beside the target, because a rename works only within one file system.
    """
    return target.parent / f".{target.name}.partial"


def check_target(source: Checkpoint, target: Path, layout: Layout, resume: bool = False) -> None:
    """Refuse a target that exists, has files of an interrupted run, or does not fit on the disk.

    Symbolic links, mount points and paths inside the source are refused too. An empty directory is
    accepted, except for a single-file layout. With `resume`, the files of an interrupted run are
    accepted.
    """
    try:
        _check_target_path(source, target, layout)
        if not resume:
            _check_no_interrupted_run(target)
        _check_disk_space(target, layout)
    except OSError as error:
        raise CheckpointError(
            f"cannot check the target {target}: {error.strerror or error}; choose another target"
        ) from None


def _check_target_path(source: Checkpoint, target: Path, layout: Layout) -> None:
    if target.is_symlink():
        raise CheckpointError(f"{target} is a symbolic link; give the path that it points to")
    if target.is_mount():
        raise CheckpointError(
            f"{target} is a mount point, which cannot be replaced by a rename; give a directory "
            "inside it"
        )
    is_empty = target.is_dir() and not layout.is_single_file and not any(target.iterdir())
    if target.exists() and not is_empty:
        raise CheckpointError(f"{target} already exists; remove it or choose another target")
    if source.files and target.resolve().is_relative_to(source.path.resolve()):
        raise CheckpointError(
            f"{target} is inside the source, {source.path}, so readers would read it as a part of "
            "the source; choose a path outside the source"
        )


def _check_no_interrupted_run(target: Path) -> None:
    partial = partial_directory(target)
    if (partial / "journal").exists():
        raise CheckpointError(
            f"{partial} exists: an earlier conversion was interrupted or is still running; add "
            "--resume to continue the conversion, or remove the directory"
        )


def _check_disk_space(target: Path, layout: Layout) -> None:
    partial = partial_directory(target)
    existing_parent = target.parent
    while not existing_parent.exists():
        existing_parent = existing_parent.parent
    free_bytes = shutil.disk_usage(existing_parent).free
    written_bytes = sum(
        file.stat().st_blocks * 512 for file in partial.rglob("*") if file.is_file()
    )
    needed_bytes = layout.nbytes + SPARE_BYTES - written_bytes
    if needed_bytes > free_bytes:
        raise CheckpointError(
            f"{target} needs {needed_bytes:,} bytes, but the disk of {existing_parent} has only "
            f"{free_bytes:,} free bytes; free disk space, or choose a target on another disk"
        )


@contextmanager
def lock_partial(partial: Path) -> Iterator[None]:
    """Create and lock the partial directory; raise if another run holds the lock."""
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            _lock_directory(descriptor, partial)
            if _is_same_file(descriptor, partial):
                yield
                return
            # Another run removed the directory between `open` and the lock, so try again.
        finally:
            os.close(descriptor)


def _lock_directory(descriptor: int, partial: Path) -> None:
    """Lock the directory; on a file system without locks, only log a warning."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"another run is writing to {partial}; wait until it ends, or stop it"
        ) from None
    except OSError as error:
        log = logging.getLogger(__name__)
        log.warning("event=no_lock path=%s reason=%s", partial, error.strerror)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def has_all_files(content: Path, layout: Layout) -> bool:
    """Return whether all files of the layout, except `last_files`, exist at their full sizes.

    If a file is missing or has another size, the files may lack bytes of tensors that the journal
    lists as finished.
    """
    return all(
        (content / file.path).is_file() and (content / file.path).stat().st_size == file.size
        for file in layout.files
    )


def read_finished_identity(
    converted: Checkpoint, target: Path, layout: Layout, with_proof: bool
) -> ModelIdentity | None:
    """Return the identity of a target that an earlier run of this plan completed, else None."""
    if not target.exists():
        return None
    for file in (*layout.files, *layout.last_files):
        if not _matches_file(target if layout.is_single_file else target / file.path, file):
            return None
    folder = target / layout.folder
    if layout.is_single_file:
        checkpoint = open_checkpoint(target)
        return identify(checkpoint) if fingerprint(checkpoint) == fingerprint(converted) else None
    if not (folder / MANIFEST).is_file() or (with_proof and not (folder / PROOF).is_file()):
        return None
    manifest = read_manifest(folder)
    return manifest.identity if manifest.identity.sampled == fingerprint(converted) else None


def _matches_file(path: Path, file: TargetFile) -> bool:
    """Tell whether a file has the planned size and literal bytes.

    The CRCs that are written after the tensors (`patches`) are not compared.
    """
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    patches = sorted(patch.offset for patch in file.patches)
    with open(path, "rb") as stream:
        for literal in file.literals:
            stream.seek(literal.offset)
            actual = bytearray(stream.read(len(literal.content)))
            expected = bytearray(literal.content)
            for offset in patches:
                position = offset - literal.offset
                if 0 <= position < len(expected):
                    actual[position : position + 4] = bytes(4)
                    expected[position : position + 4] = bytes(4)
            if actual != expected:
                return False
    return True
