"""Mirror folder: the local copies of the adapters of an object store.

The folder is an adapter directory, which `serving.adapters.directory_scan` reads. Each copy has a
hidden file with the ETag of its object, written before the copy gets its name, so a process that is
killed leaves no copy of unknown origin. A copy that is not needed any more gets a hidden name,
since accepted requests may still use it, and is removed later. One server at a time uses a folder.
This module sends no requests.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpt.errors import ConfigError
from gpt.files.abandoned_files import remove_abandoned_partials
from gpt.files.atomic_files import open_atomic, rename_durable, write_atomic
from serving.adapters.adapter_storage import hide_file
from serving.adapters.alias_record import alias_path, write_alias_content
from serving.adapters.directory_layout import (
    UNLOADED_PREFIX,
    adapter_file_name,
    parse_file_name,
    unloaded_path,
)
from serving.adapters.object_index import OwnedName

MARKER = ".mirror"  # Has the URL of the store, and is locked by the server.
ETAG_PREFIX = ".etag-"
ETAG_BYTES_MAX = 1024


@dataclass(frozen=True)
class LocalCopy:
    """A complete local copy of an object."""

    path: Path
    etag: str
    size: int


@dataclass(frozen=True)
class HiddenCopy:
    """A copy with a hidden name."""

    size: int
    hidden_at: float  # On the monotonic clock.


class MirrorFolder:
    """The copies in `folder`, which must be empty or a mirror of `url`."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._lock_file = _lock_folder(folder, url)
        # Guards `_copies` and `_hidden`; never held during a file access.
        self._lock = threading.Lock()
        self._copies: dict[OwnedName, dict[int, LocalCopy]] = {}
        # By the path before the copy was hidden, which adapter references have.
        self._hidden: dict[Path, HiddenCopy] = {}
        # Held while a copy is hidden or removed: a later copy can get the same hidden name.
        self._hide_lock = threading.Lock()
        # The state of each alias file; a file of an earlier process has no known state.
        self._alias_etags: dict[OwnedName, str] = {}
        self._find_copies()

    def close(self) -> None:
        self._lock_file.close()

    @property
    def nbytes(self) -> int:
        """The bytes of all copies, including hidden ones."""
        with self._lock:
            nbytes = sum(copy.size for copies in self._copies.values() for copy in copies.values())
            return nbytes + sum(copy.size for copy in self._hidden.values())

    def bytes_hidden_since(self, time_s: float) -> int:
        """Return the bytes of the copies that were hidden after a time on the monotonic clock."""
        with self._lock:
            return sum(copy.size for copy in self._hidden.values() if copy.hidden_at > time_s)

    def names(self) -> list[OwnedName]:
        with self._lock:
            return list(self._copies)

    def copies(self, name: OwnedName) -> Mapping[int, LocalCopy]:
        with self._lock:
            return dict(self._copies.get(name, {}))

    def add(
        self, name: OwnedName, version: int, etag: str, write: Callable[[BinaryIO], object]
    ) -> LocalCopy:
        """Create the copy of a version, whose content `write` writes."""
        path = self._copy_path(name, version)
        path.parent.mkdir(exist_ok=True)
        with open_atomic(path) as file:
            write(file)
            size = file.tell()
            self._write_etag(path, etag)
        return self._record(name, version, LocalCopy(path, etag, size))

    def adopt(self, name: OwnedName, version: int, etag: str, partial_path: Path) -> LocalCopy:
        """Make a complete file of this folder the copy of a version."""
        path = self._copy_path(name, version)
        self._write_etag(path, etag)
        size = partial_path.stat().st_size
        rename_durable(partial_path, path)
        return self._record(name, version, LocalCopy(path, etag, size))

    def hide(self, name: OwnedName, version: int) -> None:
        """Give a copy a hidden name. Requests may still use it; `remove_hidden` removes it."""
        copy = self._forget(name, version)
        if copy is not None:
            with self._hide_lock, suppress(FileNotFoundError):
                hide_file(copy.path)
                with self._lock:
                    self._hidden[copy.path] = HiddenCopy(copy.size, time.monotonic())
            _etag_path(copy.path).unlink(missing_ok=True)

    def remove_hidden(self, before_s: float, used_files: Collection[str]) -> None:
        """Remove the copies that were hidden before a time on the monotonic clock.

        `used_files`: the absolute paths, before they were hidden, of copies that must stay.
        """
        with self._hide_lock:
            with self._lock:
                hidden = list(self._hidden.items())
            for path, copy in hidden:
                if copy.hidden_at < before_s and str(path.absolute()) not in used_files:
                    unloaded_path(path).unlink(missing_ok=True)
                    with self._lock:
                        self._hidden.pop(path, None)

    def remove(self, name: OwnedName, version: int) -> None:
        copy = self._forget(name, version)
        if copy is not None:
            copy.path.unlink(missing_ok=True)
            _etag_path(copy.path).unlink(missing_ok=True)

    def write_alias(self, name: OwnedName, content: bytes, etag: str) -> bool:
        """Write an alias record; return whether it has changed."""
        if self._alias_etags.get(name) == etag:
            return False
        write_alias_content(self.folder / name.tenant, name.name, content)
        self._alias_etags[name] = etag
        return True

    def remove_alias(self, name: OwnedName) -> bool:
        """Remove an alias record; return whether it existed."""
        self._alias_etags.pop(name, None)
        try:
            alias_path(self.folder / name.tenant, name.name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _copy_path(self, name: OwnedName, version: int) -> Path:
        return self.folder / name.tenant / adapter_file_name(name.name, version)

    def _write_etag(self, path: Path, etag: str) -> None:
        write_atomic(_etag_path(path), etag.encode())

    def _record(self, name: OwnedName, version: int, copy: LocalCopy) -> LocalCopy:
        with self._lock:
            self._copies.setdefault(name, {})[version] = copy
        return copy

    def _forget(self, name: OwnedName, version: int) -> LocalCopy | None:
        with self._lock:
            copies = self._copies.get(name, {})
            copy = copies.pop(version, None)
            if not copies:
                self._copies.pop(name, None)
            return copy

    def _find_copies(self) -> None:
        """Find the copies of an earlier process; remove its hidden copies, and other files."""
        for tenant, folder in self._folders():
            remove_abandoned_partials(folder)
            for path in sorted(folder.iterdir()):
                if path.name.startswith(UNLOADED_PREFIX):  # Its requests have ended.
                    path.unlink()
                adapter_name = None if path.name.startswith(".") else parse_file_name(path.name)
                if adapter_name is None or not adapter_name.version:
                    continue
                try:
                    etag = _etag_path(path).read_bytes()[:ETAG_BYTES_MAX].decode()
                except (FileNotFoundError, UnicodeDecodeError):
                    path.unlink()
                    continue
                copy = LocalCopy(path, etag, path.stat().st_size)
                self._record(OwnedName(tenant, adapter_name.name), adapter_name.version, copy)

    def _folders(self) -> Iterator[tuple[str, Path]]:
        yield "", self.folder
        for path in sorted(self.folder.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                yield path.name, path


def _etag_path(path: Path) -> Path:
    return path.with_name(f"{ETAG_PREFIX}{path.name}")


@contextmanager
def opened_mirror_folder(folder: Path, url: str) -> Iterator[MirrorFolder]:
    mirror_folder = MirrorFolder(folder, url)
    try:
        yield mirror_folder
    finally:
        mirror_folder.close()


def _lock_folder(folder: Path, url: str) -> BinaryIO:
    """Mark and lock the folder, and return the file that has the lock."""
    marker = folder / MARKER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_other = not marker.exists() and any(folder.iterdir())
        file = None if is_other else open(marker, "a+b")  # noqa: SIM115, closed by `close`.
    except OSError as error:
        raise ConfigError(
            f"adapter_mirror: {folder} cannot be used ({error.strerror}); give a writable directory"
        ) from None
    if file is None:
        raise ConfigError(
            f"adapter_mirror: {folder} has files that are not copies of an object store; give "
            "an empty directory"
        )
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"adapter_mirror: {folder} is used by another server; give each server its own "
            "directory"
        ) from None
    except OSError:  # A file system without locks.
        pass
    file.seek(0)
    recorded_url = file.read().decode(errors="replace")
    if recorded_url and recorded_url != url:
        file.close()
        raise ConfigError(
            f"adapter_mirror: {folder} has copies of {recorded_url}, not of {url}; give another "
            "directory, or remove this one"
        )
    if not recorded_url:
        file.write(url.encode())
        file.flush()
        os.fsync(file.fileno())
    return file
