"""Abandoned files: removes partial files and temporary folders of processes that were killed.

A process locks each partial file or temporary folder that it creates. The lock ends with the
process, however it ends. So a partial file without a lock is abandoned, and a later process may
remove it. Where the file system has no locks, nothing is removed. The module imports only the
standard library.
"""

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A process creates a file and then locks it. Therefore a file without a lock is abandoned only if
# nothing was written to it for this time.
LOCK_DELAY_MAX_S = 1.0
# The names of files and folders that `gpt.files.atomic_files` has not renamed yet.
PARTIAL_NAME = re.compile(r"\..+\.[0-9a-f]{8}\.part")
# The end of the names of temporary folders. Folders of releases that did not lock them lack it.
LOCKED_SUFFIX = ".locked"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file or folder that this process has created, until the end of the block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock_descriptor(descriptor)
        yield
    finally:
        os.close(descriptor)


def lock_descriptor(descriptor: int) -> None:
    """Lock an open file or folder until it is closed; do nothing on a file system without locks."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_abandoned(path: Path) -> bool:
    """Return whether a partial file or folder has no lock, and has not changed recently."""
    if time.time() - _last_change(path) <= LOCK_DELAY_MAX_S:
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def remove_abandoned_partials(folder: Path) -> None:
    """Remove the abandoned partial files and folders of `gpt.files.atomic_files` in a folder."""
    _remove_abandoned(folder, PARTIAL_NAME)


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Yield a new folder `preamble-KIND-*` in the system's temporary directory.

    The folder is removed at the end of the block. Abandoned folders of this kind are removed at the
    beginning.
    """
    parent = Path(tempfile.gettempdir())
    _remove_abandoned(
        parent, re.compile(rf"preamble-{re.escape(kind)}-.+{re.escape(LOCKED_SUFFIX)}")
    )
    with (
        tempfile.TemporaryDirectory(
            prefix=f"preamble-{kind}-", suffix=LOCKED_SUFFIX, dir=parent
        ) as name,
        locked(Path(name)),
    ):
        yield Path(name)


def _remove_abandoned(folder: Path, names: re.Pattern[str]) -> None:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if names.fullmatch(entry.name):
                with suppress(OSError):  # For example, another process removes it meanwhile.
                    _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(path: Path) -> None:
    status = path.lstat()
    if status.st_uid != os.getuid() or not is_abandoned(path):
        return
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def _last_change(path: Path) -> float:
    """Return the time of the last change of a file, or of a folder and the files in it."""
    return max(file.lstat().st_mtime for file in (path, *path.rglob("*")))
