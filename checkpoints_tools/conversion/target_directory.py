"""Where a target goes: whether the place is free, and the hidden directory in which it grows.

One run has that directory at a time, by a lock on the directory itself. What an earlier run left in
it counts only if all of its files are there at their sizes; then the journal says which tensors.
A target is complete if every byte that the plan knows is in it, and its weights are the source's.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoints_tools.layout.layout import File, Layout
from gpt.checkpoint.digest import fingerprint, identify
from gpt.checkpoint.logical_tensor import Checkpoint, Identity
from gpt.errors import CheckpointError
from gpt.formats.manifest import MANIFEST, read_manifest
from gpt.formats.registry import open_checkpoint
from gpt.model.reference_logits import FILE as PROOF

# What a filesystem needs besides the files' own bytes.
ROOM_SPARE = 16 << 20


def partial_of(target: Path) -> Path:
    """Where the target grows, on the same disk."""
    return target.parent / f".{target.name}.partial"


def check_place(source: Checkpoint, target: Path, layout: Layout, resume: bool = False) -> None:
    """Refuse a place that is taken, that cannot be, or that has no room."""
    try:
        _check_name(source, target, layout)
        _check_room(target, layout, resume)
    except OSError as error:
        raise CheckpointError(
            f"cannot look for {target}: {error.strerror or error}; choose another target"
        ) from None


def _check_name(source: Checkpoint, target: Path, layout: Layout) -> None:
    if target.is_symlink():
        raise CheckpointError(f"{target} is a link; give the place that it leads to")
    if target.is_mount():
        raise CheckpointError(
            f"{target} is where a disk is mounted, so it cannot appear at once; give a directory "
            "in it"
        )
    empty = target.is_dir() and not layout.alone and not any(target.iterdir())
    if target.exists() and not empty:
        raise CheckpointError(f"{target} exists already; remove it or choose another target")
    if source.files and target.resolve().is_relative_to(source.path.resolve()):
        raise CheckpointError(
            f"{target} is inside the source, {source.path}, where readers would take it for a "
            "part of it; choose a place beside it"
        )


def _check_room(target: Path, layout: Layout, resume: bool) -> None:
    partial = partial_of(target)
    if (partial / "journal").exists() and not resume:
        raise CheckpointError(
            f"{partial} is what an earlier run left, or one that is running; add --resume to go on "
            "with it, or remove it"
        )
    place = target.parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    there = sum(file.stat().st_blocks * 512 for file in partial.rglob("*") if file.is_file())
    need = layout.nbytes + ROOM_SPARE - there
    if need > free:
        raise CheckpointError(
            f"{target} needs {need:,} bytes, {place} has {free:,} free; make room, or choose a "
            "place on another disk"
        )


@contextmanager
def held(partial: Path) -> Iterator[None]:
    """Have the hidden directory for oneself; another run that has it is an error."""
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            _lock(descriptor, partial)
            if _is_same(descriptor, partial):
                yield
                return
            # Whoever had it has finished, and removed it, since we opened it.
        finally:
            os.close(descriptor)


def _lock(descriptor: int, partial: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"{partial} is being written by another run; wait for it, or stop it first"
        ) from None
    except OSError as error:
        log = logging.getLogger(__name__)
        log.warning("event=no_lock path=%s reason=%s", partial, error.strerror)


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def is_begun(content: Path, layout: Layout) -> bool:
    """Whether all files are there at their sizes, so that a journal of them can be believed."""
    return all(
        (content / file.path).is_file() and (content / file.path).stat().st_size == file.size
        for file in layout.files
    )


def complete(made: Checkpoint, target: Path, layout: Layout, proven: bool) -> Identity | None:
    """Which model a target is that an earlier run of this plan finished; None if none did."""
    if not target.exists():
        return None
    for file in (*layout.files, *layout.last):
        if not _fits(target if layout.alone else target / file.path, file):
            return None
    folder = target / layout.folder
    if layout.alone:
        found = open_checkpoint(target)
        return identify(found) if fingerprint(found) == fingerprint(made) else None
    if not (folder / MANIFEST).is_file() or (proven and not (folder / PROOF).is_file()):
        return None
    manifest = read_manifest(folder)
    return manifest.identity if manifest.identity.sampled == fingerprint(made) else None


def _fits(path: Path, file: File) -> bool:
    """A file's size, and every byte of it that is known, but for the checksums in it."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    patches = sorted(patch.offset for patch in file.patches)
    with open(path, "rb") as opened:
        for text in file.texts:
            opened.seek(text.offset)
            found, meant = bytearray(opened.read(len(text.content))), bytearray(text.content)
            for offset in patches:
                at = offset - text.offset
                if 0 <= at < len(meant):
                    found[at : at + 4] = meant[at : at + 4] = bytes(4)
            if found != meant:
                return False
    return True


def sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sync_folders(root: Path) -> None:
    """The names of files are on the disk only when their folders are."""
    for path in (root, *(path for path in root.rglob("*") if path.is_dir())):
        sync_folder(path)
