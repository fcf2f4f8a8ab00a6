"""Adapter store: uploads, loads, unloads, promotes and rolls back adapter versions.

The storage (`serving.adapters.adapter_storage`) makes each change atomic for every server that
reads it. A caller changes only its own tenant's folder. The registry scans the directory
immediately after each change. The adapter change log (`gpt.adapters.change_log`) records each
change and each refusal; a change that cannot be recorded is refused. Methods that access files are
blocking; call them in a thread.
"""

import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gpt.adapters.adapter_file import (
    SUFFIX,
    Adapter,
    AdapterName,
    encode_adapter,
    open_adapter,
    parse_name,
)
from gpt.adapters.card import NAME_PATTERN
from gpt.adapters.change_log import (
    AdapterChange,
    AdapterChangeLog,
    ChangeAction,
    ChangeAuthor,
    LogError,
    RecordLog,
)
from gpt.errors import AdapterError, ConfigError, RequestError
from gpt.files.abandoned_files import is_abandoned, lock_descriptor, remove_abandoned_partials
from gpt.object_store.object_store import ObjectStoreError
from serving.adapters.adapter_storage import (
    AdapterStorage,
    AliasChangedError,
    DirectoryStorage,
    StoredAlias,
)
from serving.adapters.alias_record import AliasRecord
from serving.adapters.directory_layout import ALIAS_SUFFIX, UNLOADED_PREFIX, UPLOAD_PREFIX
from serving.adapters.registry import AdapterRegistry, LoadedAdapter
from serving.config import AdapterConfig
from serving.logs import LogThrottle
from serving.request import (
    OverloadedError,
    RefusedError,
    UnavailableError,
    UnknownAdapterError,
)

log = logging.getLogger(__name__)

VERSION_MAX = 999_999  # A version in a name has at most six digits.
# Time after which the file of an unloaded adapter is deleted. Requests that were accepted before
# the adapter was unloaded are expected to end within this time.
UNLOADED_KEEP_S = 3600.0
# Attempts to change an alias record that other servers change at the same time.
ALIAS_ATTEMPTS_MAX = 50
ALIAS_RETRY_S = 0.05  # Largest random delay before the second attempt; it grows with each attempt.
UNWRITTEN_LOG_PERIOD_S = 60.0  # Minimum time between two warnings about unwritten records.


class AdapterStore:
    """Changes the directory that the registry `adapters` reads.

    `author`, in the methods that change it, is recorded in the change log; None: only the tenant
    is known. `reason_name` returns the name of an error's reason, for the change log. `storage`:
    where the versions are stored; None: in the directory. `changes_log`: where the changes are
    recorded; None: in the directory.
    """

    def __init__(
        self,
        adapters: AdapterRegistry,
        config: AdapterConfig,
        reason_name: Callable[[BaseException], str],
        storage: AdapterStorage | None = None,
        changes_log: RecordLog | None = None,
    ) -> None:
        self.adapters = adapters
        self.config = config
        self.storage = storage or DirectoryStorage(adapters.directory or Path())
        self.changes = AdapterChangeLog(
            adapters.directory,
            changes_log=changes_log,
            bytes_max=config.adapter_log_bytes_max,
            files_max=config.adapter_log_files_max,
            reason_name=reason_name,
            on_unwritten=self._warn_of_unwritten_records,
        )
        # By tenant, since a tenant's folder may be on a disk that does not answer.
        self._change_locks: dict[str, threading.Lock] = {}
        self._upload_count_lock = threading.Lock()  # Never held during a file access.
        self._active_uploads = 0
        self._log_throttle = LogThrottle(UNWRITTEN_LOG_PERIOD_S)

    @contextmanager
    def change_lock(self, tenant: str) -> Iterator[None]:
        """Exclude other changes in a tenant's folder, of this server and of others."""
        with self._change_locks.setdefault(tenant, threading.Lock()), ExitStack() as lock:
            try:
                self.changes.create_folder()
                lock.enter_context(self.storage.lock(tenant))
            except TimeoutError as error:
                raise RefusedError(
                    "NOT_POSSIBLE_NOW",
                    "another server has been changing the adapter directory for seconds; try "
                    "again later",
                ) from error
            except OSError:
                pass  # The change cannot be recorded in this folder, and is refused for it.
            yield

    def prepare(self) -> None:
        """Create the folder of the change log, if that is permitted, and call `sweep`."""
        with suppress(OSError):  # For example, a read-only directory, in which changes fail anyway.
            self.changes.create_folder()
        self.sweep()

    def record_refusal(
        self, action: ChangeAction, name: str, author: ChangeAuthor, error: BaseException
    ) -> None:
        """Record a change that was refused outside of this class."""
        self.changes.start_change(action, name, author, author.tenant).fail(error)

    def start_upload(
        self, name: str, tenant: str, author: ChangeAuthor | None = None
    ) -> "AdapterUpload":
        """Reserve an upload slot, which `AdapterUpload.discard` releases; no file is accessed.

        If this raises an error, the caller records it (`record_refusal`).
        """
        adapter_name, folder = self._parse_name(name, "name"), self._tenant_folder(tenant)
        with self._upload_count_lock:
            if self._active_uploads >= self.config.uploads_max:
                raise OverloadedError(
                    f"{self._active_uploads} uploads are in progress (uploads_max); try again later"
                )
            self._active_uploads += 1
        change = self.changes.start_change("upload", name, author or ChangeAuthor(tenant), tenant)
        return AdapterUpload(self, adapter_name, tenant, folder, change)

    def release_upload(self) -> None:
        with self._upload_count_lock:
            self._active_uploads -= 1

    def get(self, name: str, tenant: str) -> LoadedAdapter:
        self._parse_name(name, "name")
        return self.adapters.resolve(name, tenant)

    def load(self, name: str, tenant: str) -> LoadedAdapter:
        """Scan now and return the adapter; if its file is unusable, the error has the reason."""
        adapter_name = self._parse_name(name, "name")
        with _reraise_storage_errors():
            self.adapters.scan(tenant)
        try:
            return self.adapters.resolve(name, tenant)
        except UnknownAdapterError:
            reason = self.adapters.rejection_reason(adapter_name, tenant)
            if reason is None:
                raise
            raise RefusedError("ADAPTER_UNUSABLE", f"{name}: {reason}", "name") from None

    def unload(self, name: str, tenant: str, author: ChangeAuthor | None = None) -> None:
        """Remove a version.

        Requests may still use its file, so the file gets a hidden name, and is deleted after
        UNLOADED_KEEP_S.
        """
        with self._recording("unload", name, tenant, author) as change:
            self._unload(name, tenant, change)
        log.info("event=adapter_unloaded adapter=%s tenant=%s", name, tenant)

    def _unload(self, name: str, tenant: str, change: AdapterChange) -> None:
        adapter_name, _ = self._parse_versioned_name(name), self._tenant_folder(tenant)
        base_name, version = adapter_name.name, adapter_name.version or 1
        storage = self.storage

        def remove_version() -> None:
            if version not in storage.versions(tenant, base_name):
                raise self._not_own_error(name, tenant)
            alias, state = self.read_alias(tenant, base_name)
            unloaded_max = max(alias.unloaded_max, version)
            change.begin(version, storage.selected_version(tenant, base_name))
            # The alias record is written before the removal, so that no upload gets this version
            # number.
            record = AliasRecord(alias.current, alias.previous, unloaded_max)
            storage.write_alias(tenant, base_name, record, state)
            storage.unload(tenant, base_name, version)
            change.finish(storage.selected_version(tenant, base_name))

        self._change_alias(tenant, base_name, remove_version)
        self._rescan(tenant)
        self.sweep(tenant)

    def promote(self, name: str, tenant: str, author: ChangeAuthor | None = None) -> LoadedAdapter:
        """Make this version the current version of its name."""
        with self._recording("promote", name, tenant, author) as change:
            adapter = self._promote(name, tenant, change)
        log.info("event=adapter_promoted adapter=%s tenant=%s", name, tenant)
        return adapter

    def _promote(self, name: str, tenant: str, change: AdapterChange) -> LoadedAdapter:
        adapter_name, _ = self._parse_versioned_name(name), self._tenant_folder(tenant)
        base_name = adapter_name.name
        adapter = self._resolve_own(name, tenant)

        def set_current() -> None:
            alias, state = self.read_alias(tenant, base_name)
            current = self._resolve_own(base_name, tenant)
            current_in_storage = self.storage.selected_version(tenant, base_name)
            change.begin(adapter.version, current_in_storage, adapter.adapter_ref.digest)
            record = alias.with_current(adapter.version, current.version)
            self.storage.write_alias(tenant, base_name, record, state)
            change.finish(adapter.version)

        self._change_alias(tenant, base_name, set_current)
        self._rescan(tenant)
        return adapter

    def rollback(self, name: str, tenant: str, author: ChangeAuthor | None = None) -> LoadedAdapter:
        """Restore the version that was current before the last promotion."""
        with self._recording("rollback", name, tenant, author) as change:
            return self._rollback(name, tenant, change)

    def _rollback(self, name: str, tenant: str, change: AdapterChange) -> LoadedAdapter:
        adapter_name, _ = self._parse_name(name, "name"), self._tenant_folder(tenant)
        if adapter_name.version is not None:
            raise RequestError(f"name is {name!r}; give it without a version", "name")
        adapter = self._resolve_own(name, tenant)

        def restore_previous() -> None:
            nonlocal adapter
            alias, state = self.read_alias(tenant, name)
            versions = self.storage.versions(tenant, name)
            previous = [version for version in alias.previous if version in versions]
            if not previous:
                raise RefusedError(
                    "NOT_POSSIBLE_NOW",
                    f"{name!r} has no earlier promotion that can be rolled back; promote the "
                    "version that should be current",
                    "name",
                )
            change.begin(previous[0], self.storage.selected_version(tenant, name))
            # Before the change, so that nothing is changed if this server cannot fetch the version.
            adapter = self._resolve_own(f"{name}@{previous[0]}", tenant)
            record = AliasRecord(previous[0], tuple(previous[1:]), alias.unloaded_max)
            self.storage.write_alias(tenant, name, record, state)
            change.finish(adapter.version)

        self._change_alias(tenant, name, restore_previous)
        self._rescan(tenant)
        log.info("event=adapter_rolled_back adapter=%s tenant=%s", adapter.key, tenant)
        return adapter

    def _change_alias(self, tenant: str, name: str, change: Callable[[], None]) -> None:
        """Call `change`, which changes the alias record of a name, under the tenant's lock.

        If another server has changed the record at the same time, the call is repeated.
        """
        for attempt in range(1, ALIAS_ATTEMPTS_MAX + 1):
            with (
                self.change_lock(tenant),
                _reraise_storage_errors(),
                suppress(AliasChangedError),
            ):
                self.storage.refresh(tenant, name)
                change()
                return
            time.sleep(random.uniform(0.0, attempt * ALIAS_RETRY_S))
        raise RefusedError(
            "NOT_POSSIBLE_NOW",
            f"other servers change the alias record of {name!r} all the time; try again later",
            "name",
        )

    def read_alias(self, tenant: str, name: str) -> StoredAlias:
        try:
            return self.storage.read_alias(tenant, name)
        except ConfigError as error:
            # Overwriting an invalid record would allow unloaded version numbers to be used again.
            raise RefusedError(
                "NOT_POSSIBLE_NOW",
                f"{name}{ALIAS_SUFFIX} in the server's adapter directory is not a valid alias "
                "record; the server's operator must repair or remove the file",
            ) from error

    def sweep(self, tenant: str | None = None) -> None:
        """Remove abandoned upload files and the hidden files of long-unloaded adapters."""
        directory = self.adapters.directory
        if directory is None:
            return
        with suppress(OSError):
            folders = [directory, *(child for child in directory.iterdir() if child.is_dir())]
            for folder in folders if tenant is None else [self._tenant_folder(tenant)]:
                with suppress(OSError):  # For example, no write permission.
                    _sweep_folder(folder)

    def _recording(
        self, action: ChangeAction, name: str, tenant: str, author: ChangeAuthor | None
    ) -> AbstractContextManager[AdapterChange]:
        return self.changes.recording(action, name, author or ChangeAuthor(tenant), tenant)

    def _warn_of_unwritten_records(self, error: LogError) -> None:
        suppressed = self._log_throttle.claim_line("adapter_log")
        if suppressed is not None:
            log.warning(
                "event=adapter_log_not_written reason=%r suppressed=%d", str(error), suppressed
            )

    def _parse_name(self, name: str, field: str) -> AdapterName:
        try:
            return parse_name(name)
        except RequestError as error:
            raise RequestError(str(error), field) from None

    def _parse_versioned_name(self, name: str) -> AdapterName:
        adapter_name = self._parse_name(name, "name")
        if adapter_name.version is None:
            raise RequestError(f"name is {name!r}; give it with a version, such as name@3", "name")
        return adapter_name

    def _tenant_folder(self, tenant: str) -> Path:
        """Return the directory of a tenant's own adapters, or raise."""
        directory = self.adapters.directory
        if directory is None:
            raise RefusedError(
                "NOT_POSSIBLE_NOW",
                "this server has no adapter directory; start it with --adapters DIR",
            )
        if not tenant:
            return directory
        if not NAME_PATTERN.fullmatch(tenant):
            raise RefusedError(
                "NOT_POSSIBLE_NOW",
                "this tenant's name is not a valid folder name; rename it with only letters, "
                "digits, dots, dashes and underscores",
            )
        return directory / tenant

    def _rescan(self, tenant: str) -> None:
        with _reraise_storage_errors():
            self.adapters.scan(tenant)

    def _resolve_own(self, name: str, tenant: str) -> LoadedAdapter:
        adapter = self.adapters.resolve(name, tenant)
        if adapter.tenant != tenant:
            raise self._not_own_error(name, tenant)
        return adapter

    def _not_own_error(self, name: str, tenant: str) -> RefusedError | UnknownAdapterError:
        try:
            is_shared = self.adapters.resolve(name, tenant).tenant != tenant
        except UnknownAdapterError as error:
            return error
        if not is_shared:
            return UnknownAdapterError(f"adapter {name!r} does not exist any more")
        return RefusedError(
            "PERMISSION_DENIED",
            f"{name!r} is shared by all tenants, so this tenant cannot change it; upload your own "
            "adapter",
            "name",
        )


class AdapterUpload:
    """One upload. Call `create_file`, `write_chunk` and `finish` in this order, in threads.

    `discard` must be called at the end, and may be called at any time.
    """

    def __init__(
        self,
        store: AdapterStore,
        name: AdapterName,
        tenant: str,
        folder: Path,
        change: AdapterChange,
    ) -> None:
        self._store = store
        self._name = name
        self._tenant = tenant
        self._change = change
        self._folder = folder
        self._partial_path = folder / f"{UPLOAD_PREFIX}{secrets.token_hex(8)}{SUFFIX}"
        self._file: BinaryIO | None = None
        self._size = 0
        self._lock = threading.Lock()
        self._discarded = False

    def create_file(self) -> None:
        """Create the temporary file; raise at once if the version is already taken."""
        with self._locked():
            self._folder.mkdir(exist_ok=True)
            self._store.storage.refresh(self._tenant, self._name.name)
            self._choose_version()
            with self._store.change_lock(self._tenant):
                _sweep_folder(self._folder)
                self._file = open(self._partial_path, "xb")  # noqa: SIM115, closed by discard.
                lock_descriptor(self._file.fileno())  # Keeps `sweep` from removing the file.

    def write_chunk(self, data: bytes) -> None:
        with self._locked():
            assert self._file is not None
            self._size += len(data)
            limit = self._store.config.upload_bytes_max
            if self._size > limit:
                raise RequestError(
                    f"data is over {limit} bytes (upload_bytes_max); copy an adapter this large "
                    "into the server's adapter directory",
                    "data",
                )
            self._file.write(data)

    def write_adapter(self, adapter: Adapter) -> None:
        """Write the file of an adapter that this server has read; its size is not limited."""
        with self._locked():
            assert self._file is not None
            content = encode_adapter(adapter)
            self._size += len(content)
            self._file.write(content)

    def finish(self) -> LoadedAdapter:
        """Check the whole file and publish it under its final name."""
        with self._locked():
            assert self._file is not None
            if not self._size:
                raise RequestError("data is empty; send the adapter's file", "data")
            self._file.flush()
            os.fsync(self._file.fileno())
            adapter_content = self._open_adapter()
            self._check_adapter(adapter_content)
            key = self._publish_version(adapter_content.digest)
            registry = self._store.adapters
            registry.scan(self._tenant)
            adapter = registry.resolve(key, self._tenant)
        log.info("event=adapter_uploaded adapter=%s tenant=%s", key, self._tenant)
        return adapter

    def discard(self, error: BaseException | None = None) -> None:
        """Release the upload slot and remove the temporary file.

        `error`: the error that ended the upload. None: the upload was finished or cancelled.
        """
        with self._lock:
            if self._discarded:
                return
            self._discarded = True
            self._store.release_upload()
            if self._file is not None:
                with suppress(OSError):
                    self._partial_path.unlink(missing_ok=True)
                with suppress(OSError):  # Flushing fails on a full disk.
                    self._file.close()
            self._change.fail(error or _cancelled_upload_error())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock, _reraise_storage_errors():
            if self._discarded:
                raise _cancelled_upload_error()
            yield

    def _open_adapter(self) -> Adapter:
        try:
            return open_adapter(self._partial_path)
        except AdapterError as error:
            raise RequestError(
                str(error).replace(str(self._partial_path), "the upload"), "data"
            ) from None

    def _check_adapter(self, adapter: Adapter) -> None:
        if len(adapter.table):
            self._check_row_norms(adapter)
        registry = self._store.adapters
        try:
            registry.check(adapter)
        except AdapterError as error:
            raise RefusedError("ADAPTER_UNUSABLE", str(error), "data") from None
        self._store.storage.free_capacity(self._tenant, self._name.name, self._size)
        if len(registry) >= registry.adapters_max:
            raise RefusedError(
                "NOT_POSSIBLE_NOW",
                f"this server has {registry.adapters_max} adapters, the limit (adapters_max); "
                "unload one first",
            )

    def _check_row_norms(self, adapter: Adapter) -> None:
        # `row_norm_max` limits the norm of a virtual token's row. A prefix row has the keys and
        # values of all layers, so each of its elements is compared with the limit instead.
        is_prefix = adapter.card.kind == "prefix"
        magnitude = float((adapter.table.abs() if is_prefix else adapter.table.norm(dim=1)).max())
        limit = self._store.config.row_norm_max
        if not magnitude <= limit:
            measure = "a key or value of" if is_prefix else "a row with norm"
            raise RequestError(
                f"data has {measure} {magnitude:.3g}, over the limit {limit:g} (row_norm_max); "
                "train the adapter again with a lower learning rate",
                "data",
            )

    def _choose_version(self) -> int:
        """Return the requested version, or the next free version if none was requested.

        Raises an error if the requested version is or was in use, or if no version is free.
        """
        name, requested = self._name
        versions = self._store.storage.versions(self._tenant, name)
        unloaded_max = self._store.read_alias(self._tenant, name).record.unloaded_max
        if requested is None:
            version = max([unloaded_max, *versions]) + 1
            if version > VERSION_MAX:
                raise RefusedError(
                    "NOT_POSSIBLE_NOW",
                    f"{name!r} has no free version number left; use a new name",
                    "name",
                )
            return version
        if requested in versions or requested <= unloaded_max:
            problem = "exists already" if requested in versions else "was used before"
            raise RefusedError(
                "ALREADY_EXISTS",
                f"{name}@{requested} {problem}, and a version never changes; send the name without "
                "a version to get the next version number",
                "name",
            )
        return requested

    def _publish_version(self, digest: str) -> str:
        name = self._name.name
        storage, tenant = self._store.storage, self._tenant
        with self._store.change_lock(tenant):
            while True:
                storage.refresh(tenant, name)
                version = self._choose_version()
                self._change.begin(version, storage.selected_version(tenant, name), digest)
                try:
                    # This fails if another server has published the same version meanwhile.
                    storage.publish(tenant, name, version, self._partial_path)
                except FileExistsError:
                    continue
                self._change.finish(storage.selected_version(tenant, name))
                return f"{name}@{version}"


def _cancelled_upload_error() -> RefusedError:
    return RefusedError("CANCELLED", "the upload was cancelled; start a new upload")


@contextmanager
def _reraise_storage_errors() -> Iterator[None]:
    """Convert an error of the storage to a RefusedError without the path, which the log has."""
    try:
        yield
    except ObjectStoreError as error:
        log.warning("event=adapters_not_changed error=%r", str(error))
        if error.problem == "unavailable" and error.may_be_written:  # Clients must not retry it.
            raise RefusedError(
                "DEADLINE_PASSED",
                "the server's adapter store did not confirm the change, which may have been made; "
                "see `preamble adapters log` before you repeat it",
            ) from None
        if error.problem == "unavailable":
            raise UnavailableError(
                "the server's adapter store does not answer; try again later", "STORAGE_TIMEOUT"
            ) from None
        raise RefusedError(
            "NOT_POSSIBLE_NOW",
            f"the server's adapter store refused the change ({error.problem}); the server's "
            "operator must grant write permission",
        ) from None
    except OSError as error:
        log.warning("event=adapters_not_changed error=%r", str(error))
        raise RefusedError(
            "NOT_POSSIBLE_NOW",
            f"the server's adapter directory cannot be changed ({error.strerror}); the server's "
            "operator must free disk space or grant write permission",
        ) from None


def _sweep_folder(folder: Path) -> None:
    remove_abandoned_partials(folder)
    now = time.time()
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # Another server may remove the file meanwhile.
                if entry.name.startswith(UPLOAD_PREFIX):
                    if is_abandoned(Path(entry.path)):
                        log.info("event=upload_swept file=%s", entry.name)
                        os.unlink(entry.path)
                elif entry.name.startswith(UNLOADED_PREFIX):
                    status = entry.stat()
                    if now - max(status.st_mtime, status.st_ctime) > UNLOADED_KEEP_S:
                        os.unlink(entry.path)
