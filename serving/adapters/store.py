"""What changes the directory of adapters while a server runs: uploads, promotions, taking away.

Each change is one rename or link, so that every server that reads the directory sees all of it or
none. A caller changes its own tenant's folder and no other. What is there is
`serving.adapters.registry`' business; after each change that looks at once. All of this reads and
writes files: for threads.
"""

import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gpt.adapters.adapter_file import SUFFIX, Adapter, Name, open_adapter, parse_name
from gpt.adapters.card import NAME
from gpt.errors import AdapterError, ConfigError, RequestError
from serving.adapters.files import (
    GONE,
    UPLOAD,
    Note,
    files_of,
    note_file,
    read_note,
    sync,
    unloaded,
    write_note,
)
from serving.adapters.registry import Adapters, Resident
from serving.config import ServerConfig
from serving.request import OverloadedError, RefusedError, UnknownAdapterError

log = logging.getLogger(__name__)

VERSION_MAX = 999_999  # Names have no room for more.
LOCKED_S = 1.0  # An upload's file is locked at most so long after it was made.
GONE_S = 3600.0  # Whoever was accepted before an adapter was taken away has ended by then.


class AdapterStore:
    """Changes what `adapters` reads."""

    def __init__(self, adapters: Adapters, config: ServerConfig) -> None:
        self.adapters, self.config = adapters, config
        self.changing = threading.Lock()  # One change at a time, of this server's.
        self._uploads = 0

    def upload(self, name: str, tenant: str) -> "Upload":
        """A place for an upload, which its `drop` gives back. Touches no file yet."""
        wanted, folder = self._named(name, "name"), self._folder(tenant)
        with self.changing:
            if self._uploads >= self.config.uploads_max:
                raise OverloadedError(
                    f"{self._uploads} uploads are on their way (uploads_max); try again later"
                )
            self._uploads += 1
        return Upload(self, wanted, tenant, folder)

    def ended(self) -> None:
        with self.changing:
            self._uploads -= 1

    def show(self, name: str, tenant: str) -> Resident:
        self._named(name, "name")
        return self.adapters.resolve(name, tenant)

    def load(self, name: str, tenant: str) -> Resident:
        """Look at once; what is there and cannot be used is said, with its reason."""
        wanted = self._named(name, "name")
        with _writable():
            self.adapters.scan(tenant)
        try:
            return self.adapters.resolve(name, tenant)
        except UnknownAdapterError:
            reason = self.adapters.refusal(wanted, tenant)
            if reason is None:
                raise
            raise RefusedError("ADAPTER_UNUSABLE", f"{name}: {reason}", "name") from None

    def unload(self, name: str, tenant: str) -> None:
        """Take a version away. Its file stays hidden for a while, for those who wait with it."""
        wanted, folder = self._versioned(name), self._folder(tenant)
        with self.changing, _writable():
            file = (
                files_of(folder, wanted.name).get(wanted.version or 1) if folder.is_dir() else None
            )
            if file is None:
                raise self._not_own(name, tenant)
            note = _note(folder, wanted.name)
            gone = max(note.gone, wanted.version or 1)
            # First, so that the number is never free between the two.
            write_note(folder, wanted.name, Note(note.current, note.before, gone))
            hidden = unloaded(file)
            os.replace(file, hidden)
            os.utime(hidden)  # `sweep` counts from here.
            sync(folder)
        self._look(tenant)
        self.sweep(tenant)
        log.info("event=adapter_unloaded adapter=%s tenant=%s", name, tenant)

    def promote(self, name: str, tenant: str) -> Resident:
        """From now on the name alone means this version."""
        wanted, folder = self._versioned(name), self._folder(tenant)
        resident = self._own(name, tenant)
        with self.changing, _writable():
            note = _note(folder, wanted.name)
            current = self._own(wanted.name, tenant)
            write_note(folder, wanted.name, note.promoted(resident.version, current.version))
        self._look(tenant)
        log.info("event=adapter_promoted adapter=%s tenant=%s", name, tenant)
        return resident

    def rollback(self, name: str, tenant: str) -> Resident:
        """The name alone means again what it meant before the last promotion."""
        wanted, folder = self._named(name, "name"), self._folder(tenant)
        if wanted.version is not None:
            raise RequestError(f"name is {name!r}; give it without a version", "name")
        self._own(name, tenant)
        with self.changing, _writable():
            note = _note(folder, name)
            there = files_of(folder, name)
            before = [version for version in note.before if version in there]
            if not before:
                raise RefusedError(
                    "NOT_POSSIBLE_NOW",
                    f"no promotion of {name!r} can be taken back; promote the version that is "
                    "to be current",
                    "name",
                )
            write_note(folder, name, Note(before[0], tuple(before[1:]), note.gone))
        self._look(tenant)
        log.info("event=adapter_rolled_back adapter=%s@%d tenant=%s", name, before[0], tenant)
        return self._own(name, tenant)

    def sweep(self, tenant: str | None = None) -> None:
        """Remove what uploads left that nobody writes any more, and what is long gone."""
        directory = self.adapters.directory
        if directory is None:
            return
        with suppress(OSError):
            folders = [directory, *(one for one in directory.iterdir() if one.is_dir())]
            for folder in folders if tenant is None else [self._folder(tenant)]:
                with suppress(OSError):  # A directory that is not ours to write: nothing to do.
                    _sweep(folder)

    def _named(self, name: str, field: str) -> Name:
        try:
            return parse_name(name)
        except RequestError as error:
            raise RequestError(str(error), field) from None

    def _versioned(self, name: str) -> Name:
        wanted = self._named(name, "name")
        if wanted.version is None:
            raise RequestError(f"name is {name!r}; give it with a version, as name@3", "name")
        return wanted

    def _folder(self, tenant: str) -> Path:
        """Where a caller's own adapters lie."""
        directory = self.adapters.directory
        if directory is None:
            raise RefusedError(
                "NOT_POSSIBLE_NOW", "this server has no directory of adapters (--adapters DIR)"
            )
        if not tenant:
            return directory
        if not NAME.fullmatch(tenant):
            raise RefusedError(
                "NOT_POSSIBLE_NOW",
                "this tenant's name cannot be a folder's; give it one of letters, digits, dots, "
                "dashes and underscores",
            )
        return directory / tenant

    def _look(self, tenant: str) -> None:
        with _writable():
            self.adapters.scan(tenant)

    def _own(self, name: str, tenant: str) -> Resident:
        resident = self.adapters.resolve(name, tenant)
        if resident.tenant != tenant:
            raise self._not_own(name, tenant)
        return resident

    def _not_own(self, name: str, tenant: str) -> RefusedError | UnknownAdapterError:
        try:
            shared = self.adapters.resolve(name, tenant).tenant != tenant
        except UnknownAdapterError as error:
            return error
        if not shared:
            return UnknownAdapterError(f"there is no adapter {name!r} here any more")
        return RefusedError(
            "PERMISSION_DENIED",
            f"{name!r} is everybody's, and not this tenant's to change; upload one of your own",
            "name",
        )


class Upload:
    """One upload. `begin`, `write` and `finish` are for threads, one after the other; `drop` may
    come at any time, and must.
    """

    def __init__(self, store: AdapterStore, name: Name, tenant: str, folder: Path) -> None:
        self._store, self._name, self._tenant, self._folder = store, name, tenant, folder
        self._part = folder / f"{UPLOAD}{secrets.token_hex(8)}{SUFFIX}"
        self._file: BinaryIO | None = None
        self._size = 0
        self._working = threading.Lock()
        self._dropped = False

    def begin(self) -> None:
        """Refuses what need not be read to be refused."""
        with self._at_work():
            self._folder.mkdir(exist_ok=True)
            self._choose()
            with self._store.changing:
                _sweep(self._folder)
                self._file = open(self._part, "xb")  # noqa: SIM115, closed by drop.
                with suppress(OSError):  # As long as it is locked, nobody sweeps it away.
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, data: bytes) -> None:
        with self._at_work():
            assert self._file is not None
            self._size += len(data)
            limit = self._store.config.upload_bytes_max
            if self._size > limit:
                raise RequestError(
                    f"data is over {limit} bytes (upload_bytes_max); an adapter this large goes "
                    "into the server's directory by other ways",
                    "data",
                )
            self._file.write(data)

    def finish(self) -> Resident:
        """Check all of it, and give it its name."""
        with self._at_work():
            assert self._file is not None
            if not self._size:
                raise RequestError("data is empty; send the adapter's file", "data")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._check(self._read())
            key = self._publish()
            adapters = self._store.adapters
            adapters.scan(self._tenant)
            resident = adapters.resolve(key, self._tenant)
        log.info("event=adapter_uploaded adapter=%s tenant=%s", key, self._tenant)
        return resident

    def drop(self) -> None:
        """Give its place back; what is not finished is removed."""
        with self._working:
            if self._dropped:
                return
            self._dropped = True
            if self._file is not None:
                with suppress(OSError):
                    self._part.unlink(missing_ok=True)
                with suppress(OSError):  # What was not written yet has no room.
                    self._file.close()
            self._store.ended()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._working, _writable():
            if self._dropped:
                raise RefusedError("CANCELLED", "the upload was given up; begin anew")
            yield

    def _read(self) -> Adapter:
        try:
            return open_adapter(self._part)
        except AdapterError as error:
            raise RequestError(str(error).replace(str(self._part), "the upload"), "data") from None

    def _check(self, adapter: Adapter) -> None:
        # A prefix's row is of all layers: each number may be as large as all of a row's together.
        prefix = adapter.card.kind == "prefix"
        size = float((adapter.table.abs() if prefix else adapter.table.norm(dim=1)).max())
        limit = self._store.config.row_norm_max
        if not size <= limit:
            what = "a key or value" if prefix else "a row of norm"
            raise RequestError(
                f"data has {what} {size:.3g}; a virtual token's may be {limit:g} "
                "(row_norm_max): train it again, with a lower learning rate",
                "data",
            )
        adapters = self._store.adapters
        try:
            adapters.check(adapter)
        except AdapterError as error:
            raise RefusedError("ADAPTER_UNUSABLE", str(error), "data") from None
        if len(adapters) >= adapters.adapters_max:
            raise RefusedError(
                "NOT_POSSIBLE_NOW",
                f"this server has as many adapters as it may, {adapters.adapters_max} "
                "(adapters_max); unload one first",
            )

    def _choose(self) -> int:
        """The version it will have, as things are now."""
        name, wanted = self._name
        versions, gone = files_of(self._folder, name), _note(self._folder, name).gone
        if wanted is None:
            version = max([gone, *versions]) + 1
            if version > VERSION_MAX:
                raise RefusedError(
                    "NOT_POSSIBLE_NOW", f"{name!r} has no version left; use a new name", "name"
                )
            return version
        if wanted in versions or wanted <= gone:
            what = "is there already" if wanted in versions else "was given before"
            raise RefusedError(
                "ALREADY_EXISTS",
                f"{name}@{wanted} {what}, and a version never changes; leave the version out for "
                "the next one",
                "name",
            )
        return wanted

    def _publish(self) -> str:
        with self._store.changing:
            while True:
                key = f"{self._name.name}@{self._choose()}"
                try:
                    # Fails if the name is taken, by another server's upload at this moment.
                    os.link(self._part, self._folder / f"{key}{SUFFIX}")
                except FileExistsError:
                    continue
                self._part.unlink()
                sync(self._folder)
                return key


def _note(folder: Path, name: str) -> Note:
    try:
        return read_note(folder, name)
    except ConfigError as error:
        # Written over, numbers that were taken away would be given again.
        raise RefusedError(
            "NOT_POSSIBLE_NOW",
            f"{note_file(folder, name).name} in the server's directory cannot be read; its "
            "operator must mend or remove it",
        ) from error


@contextmanager
def _writable() -> Iterator[None]:
    """Where a file system's refusal becomes the caller's; the log has the path."""
    try:
        yield
    except OSError as error:
        log.warning("event=adapters_not_changed error=%r", str(error))
        raise RefusedError(
            "NOT_POSSIBLE_NOW",
            f"the server's directory of adapters cannot be changed ({error.strerror}); its "
            "operator must give it room, or the right to write",
        ) from None


def _sweep(folder: Path) -> None:
    now = time.time()
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # Another server may be sweeping too.
                if entry.name.startswith(UPLOAD):
                    idle_s = now - entry.stat().st_mtime
                    if idle_s > LOCKED_S and _abandoned(entry.path):
                        log.info("event=upload_swept file=%s", entry.name)
                        os.unlink(entry.path)
                elif entry.name.startswith(GONE):
                    status = entry.stat()
                    if now - max(status.st_mtime, status.st_ctime) > GONE_S:
                        os.unlink(entry.path)


def _abandoned(path: str) -> bool:
    """Whether no process writes it: the lock of one that was killed is free."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
