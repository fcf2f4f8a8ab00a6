"""Atomic files: a file or folder is written under another name, then renamed to its target.

A reader sees either the complete old content or the complete new content, even if the process is
killed or the disk is full. The one exception: a folder that is replaced is absent for an instant. A
durable write also flushes the content and the folder's entries to disk, so that the new content
survives a power failure. A partial file or folder is locked, so that `gpt.files.abandoned_files`
can distinguish it from one that a killed process left.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gpt.files.abandoned_files import lock_descriptor, locked

DEFAULT_MODE = 0o666  # Permissions before the umask, as for any new file.


def write_atomic(
    path: Path,
    content: bytes,
    *,
    overwrite: bool = True,
    durable: bool = True,
    mode: int = DEFAULT_MODE,
    partial_path: Path | None = None,
) -> Path:
    """Write `content` to the file `path`, and return `path`. `open_atomic` explains the options."""
    with open_atomic(
        path, overwrite=overwrite, durable=durable, mode=mode, partial_path=partial_path
    ) as file:
        file.write(content)
    return path


@contextmanager
def open_atomic(
    path: Path,
    *,
    overwrite: bool = True,
    durable: bool = True,
    mode: int = DEFAULT_MODE,
    partial_path: Path | None = None,
) -> Iterator[BinaryIO]:
    """Open a new file that is renamed to `path` if the `with` block ends without an error.

    Args:
        overwrite: Replace an existing file. False: FileExistsError is raised if `path` exists at
            the time of the rename.
        durable: Flush the file and the entries of its folder to disk.
        mode: The permissions of a new file, before the umask.
        partial_path: The path of the file until the rename, in the folder of `path`. None: a new
            hidden name. If a killed process left a file at the given path, the new file replaces
            it. Only one process at a time may use the given path.
    """
    partial = partial_path or _hidden_path(path, "part")
    file = open(  # noqa: SIM115, closed by the `with` below.
        partial,
        "wb" if partial_path else "xb",
        opener=lambda name, flags: os.open(name, flags, mode),
    )
    lock = os.dup(file.fileno())  # The lock outlives `file`, which is closed before the rename.
    try:
        lock_descriptor(lock)
        with file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        _rename(partial, path, overwrite)
        if durable:
            fsync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(lock)


@contextmanager
def stage_folder(
    folder: Path, *, overwrite: bool = False, partial_path: Path | None = None
) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `folder` if the `with` block ends without an error.

    The rename is durable. If `folder` exists and is not empty, `overwrite=True` replaces it, and
    `overwrite=False` raises an OSError. If a replacement fails, the old folder is restored.
    `partial_path` is the path of the new folder until the rename; an existing folder at this path
    is deleted first.
    """
    partial = partial_path or _hidden_path(folder, "part")
    if partial_path is not None:
        shutil.rmtree(partial_path, ignore_errors=True)
    partial.mkdir()
    try:
        with locked(partial):
            yield partial
            _fsync_files(partial)
            fsync_folders(partial)
            if overwrite and folder.exists():
                _replace_folder(partial, folder)
            else:
                rename_durable(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def rename_durable(source: Path, target: Path, *, overwrite: bool = True) -> None:
    """Rename a file or folder within one file system, and flush the folder of `target` to disk.

    `overwrite=False` supports only files, and raises FileExistsError if `target` exists.
    """
    _rename(source, target, overwrite)
    fsync_folder(target.parent)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file in a folder that is renamed later, and flush the file to disk.

    The write itself is not atomic. The later rename of the folder publishes all its files at once.
    """
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a power failure cannot undo a rename in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folders(root: Path) -> None:
    """Flush the entries of `root` and of all folders below it, so that new names are durable."""
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        fsync_folder(folder)


def _fsync_files(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def _replace_folder(partial: Path, folder: Path) -> None:
    # A rename cannot replace a folder with content, so `folder` is absent for an instant.
    backup = _hidden_path(folder, "old")
    _rename(folder, backup)
    try:
        _rename(partial, folder)
    except OSError:
        _rename(backup, folder)
        raise
    fsync_folder(folder.parent)
    shutil.rmtree(backup, ignore_errors=True)


def _rename(source: Path, target: Path, overwrite: bool = True) -> None:
    if overwrite:
        os.replace(source, target)
    else:
        os.link(source, target)  # A link fails if the target exists; a rename would replace it.
        source.unlink()


def _hidden_path(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{suffix}")
