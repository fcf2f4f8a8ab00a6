"""Object mirror: the adapters of an object store, of which a local folder has those in use.

A poll lists the keys of the store. An adapter is fetched when a request needs it; after that, each
poll fetches the version that becomes current. All other adapters are known by their keys only. A
name that is in use always has its current version in the folder, so that the folder selects the
same version as the store. If the store does not answer, the folder stays as it is, and the server
serves what it has. The mirror changes nothing in the store but the objects of versions that were
unloaded long ago; `serving.adapters.object_storage` makes the other changes.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from gpt.adapters.adapter_file import AdapterName, parse_name
from gpt.errors import ConfigError, PreambleError, RequestError
from gpt.object_store.object_store import ObjectInfo, ObjectStore, ObjectStoreError
from serving.adapters.alias_record import (
    ALIAS_BYTES_MAX,
    PREVIOUS_VERSIONS_MAX,
    AliasRecord,
    parse_alias,
)
from serving.adapters.mirror_folder import MirrorFolder
from serving.adapters.object_index import NO_OBJECTS, NameObjects, OwnedName, build_index
from serving.adapters.registry import AdapterRegistry, LoadedAdapter
from serving.logs import LogThrottle
from serving.request import RefusedError, UnavailableError

log = logging.getLogger(__name__)

# Hidden keys, such as those of the change log, sort before this key; names of adapters sort after.
HIDDEN_KEYS_END = ".~"
FAILURE_DELAY_S = 0.5  # Delay after the first failure of the store; it doubles with each failure.
FAILURE_DELAY_S_MAX = 5.0
ABSENT_S = 1.0  # Time for which the store is not asked again for a name that it does not have.
ABSENT_NAMES_MAX = 10_000
ALIASES_READ_MAX = 1000  # Alias records that one poll reads for the listing of adapters.
ALIAS_READERS = 8
NAME_LOCKS = 64
# Time for which a request waits while another thread fetches its adapter. A waiting request takes
# one of the few threads of its tenant.
LOCK_WAIT_S = 5.0
# An adapter that was used within this time is not evicted.
EVICTION_IDLE_S = 60.0
# A hidden copy is not removed within this time. A request that looked up its adapter before is then
# in the engine, or has ended.
HIDDEN_KEEP_S = 60.0
# Time after which the object of an unloaded version is deleted. It exceeds the time that an upload
# of the same version can take.
UNLOADED_OBJECT_KEEP_S = 3600.0
UNLOADED_DELETES_MAX = 100  # Versions whose objects one poll deletes.
REFUSED_DELETION_DELAY_S = 3600.0  # Time until the next deletion if the store refuses one.
FAILURE_LOG_PERIOD_S = 10.0


@dataclass
class MirrorCounts:
    """Counters for the metrics. Only approximate if two threads count at once."""

    fetches: int = 0
    fetched_bytes: int = 0
    errors: int = 0
    evictions: int = 0


@dataclass(frozen=True)
class AliasContent:
    """The content of an alias record in the store."""

    content: bytes
    etag: str

    def parse(self, name: OwnedName) -> AliasRecord:
        return parse_alias(self.content, name.alias_key)


NO_ALIAS = AliasContent(b"{}", "")


@dataclass
class _Listing:
    """The adapters of a tenant in the store, computed from one state of the index."""

    state: int
    entries: list[tuple[str, int, bool]] = field(default_factory=list)


class ObjectMirror:
    """The adapters of `store`, with copies in `folder`. All methods may be called in any thread."""

    def __init__(
        self, store: ObjectStore, folder: MirrorFolder, *, bytes_max: int, adapters_max: int
    ) -> None:
        self.store = store
        self.folder = folder
        self.counts = MirrorCounts()
        self.listed_at: float | None = None  # Unix time at which the last listing began.
        self.listing_error: ObjectStoreError | None = None  # Of the last listing.
        self._bytes_max = bytes_max
        self._adapters_max = adapters_max
        self._registry: AdapterRegistry | None = None
        self._used_files: Callable[[], Collection[str]] = frozenset
        # Guards the fields below; never held during a request or a file access.
        self._lock = threading.Lock()
        self._index: dict[OwnedName, NameObjects] = {}
        self._state = 0  # Changes with the index and with the alias records.
        self._listed_entries: list[ObjectInfo] = []
        self._refreshed_at: dict[OwnedName, float] = {}
        self._aliases: dict[OwnedName, AliasContent] = {}
        self._listings: dict[str, _Listing] = {}
        self._absent_at: dict[tuple[str, str], float] = {}
        self._used_at: dict[OwnedName, float] = {}
        self._failures = 0
        self._retry_at = 0.0
        # The objects with which each name in use was last made equal.
        self._synced: dict[OwnedName, NameObjects] = {}
        self._next_deletion_at = 0.0
        self._poll_lock = threading.Lock()
        # Each name has one of these locks, which is held during its requests and file accesses.
        self._name_locks = [threading.RLock() for _ in range(NAME_LOCKS)]
        self._log_throttle = LogThrottle(FAILURE_LOG_PERIOD_S)

    def attach(
        self, registry: AdapterRegistry, used_files: Callable[[], Collection[str]] = frozenset
    ) -> None:
        """Set the registry, which scans the folder.

        `used_files` returns the absolute paths of the files that unfinished requests use.
        """
        self._registry = registry
        self._used_files = used_files

    @property
    def registry(self) -> AdapterRegistry:
        assert self._registry is not None, "attach is called before any request"
        return self._registry

    def check_access(self) -> None:
        """Raise ConfigError if the last listing was refused, and there are no local copies.

        A server with local copies serves them. If the store does not answer, it may do so later.
        """
        error = self.listing_error
        if error is not None and error.problem != "unavailable" and not self.folder.names():
            raise ConfigError(f"adapters: {error}; check the bucket, and the credentials")

    @property
    def stored_versions(self) -> int:
        """The number of versions in the store."""
        return sum(len(objects.versions) for objects in list(self._index.values()))

    def listing_age_s(self) -> float:
        """Seconds since the beginning of the last complete listing; -1: there was none."""
        return -1.0 if self.listed_at is None else time.time() - self.listed_at

    # Names, without a request. The registry calls these methods for every request.

    def has(self, tenant: str, name: str) -> bool:
        """Return whether the store has a version of a tenant's own name."""
        return bool(self._index.get(OwnedName(tenant, name), NO_OBJECTS).versions)

    def record_use(self, adapter: LoadedAdapter) -> None:
        """Record that a request uses an adapter, which is then not evicted for some time."""
        self._used_at[OwnedName(adapter.tenant, adapter.name)] = time.monotonic()

    def listing(self, tenant: str) -> Sequence[tuple[str, int, bool]]:
        """Return the (name, version, whether it is current) of a tenant's own adapters, sorted.

        If an alias record has not been read yet, the newest version of its name counts as current.
        """
        with self._lock:
            state, index = self._state, self._index
            listing = self._listings.get(tenant)
        if listing is None or listing.state != state:
            listing = _Listing(state)
            for name, objects in index.items():
                if name.tenant == tenant:
                    selected = self.selected_version(name)
                    listing.entries += [
                        (name.name, version, version == selected) for version in objects.versions
                    ]
            listing.entries.sort()
            with self._lock:
                self._listings[tenant] = listing
        return listing.entries

    def objects(self, name: OwnedName) -> NameObjects:
        return self._index.get(name, NO_OBJECTS)

    def selected_version(self, name: OwnedName) -> int | None:
        """Return the version that the store's records select, as far as they were read."""
        versions = self.objects(name).versions
        current = _current_of(name, self._aliases.get(name, NO_ALIAS))
        return current if current in versions else max(versions, default=None)

    # Requests to the store for single names.

    def find(self, names: Iterable[str], tenant: str) -> None:
        """Fetch the adapters of these names that a tenant can use, and load them.

        Raises UnavailableError if the store does not answer. Names that the store does not have
        are ignored.
        """
        owned: list[tuple[OwnedName, int | None]] = []
        with self._unavailable_errors():
            for text in names:
                try:
                    requested = parse_name(text)
                except RequestError:  # The admission refuses the name.
                    continue
                owner = self._find_owner(requested, tenant)
                if owner is not None:
                    owned.append((owner, requested.version))
                    # Before any fetch, which must not evict another adapter of the same request.
                    self.record_name_use(owner)
            for owner, version in owned:
                self._load(owner, version)

    def _find_owner(self, requested: AdapterName, tenant: str) -> OwnedName | None:
        """Return the owner of a name; look for an unknown name or version in the store."""
        owner = self._owner_in_index(requested, tenant)
        if owner is not None:
            return owner
        absent = tenant, f"{requested.name}@{requested.version or ''}"
        if time.monotonic() - self._absent_at.get(absent, -ABSENT_S) < ABSENT_S:
            return None
        for name in _owned_names(requested, tenant):
            self.refresh(name)
        owner = self._owner_in_index(requested, tenant)
        if owner is None:
            with self._lock:
                if len(self._absent_at) >= ABSENT_NAMES_MAX:
                    self._absent_at.clear()
                self._absent_at[absent] = time.monotonic()
        return owner

    def _owner_in_index(self, requested: AdapterName, tenant: str) -> OwnedName | None:
        """Return the first owner that has the name, if it has the requested version."""
        for name in _owned_names(requested, tenant):
            if versions := self.objects(name).versions:
                has_version = requested.version is None or requested.version in versions
                return name if has_version else None
        return None

    def _load(self, name: OwnedName, version: int | None) -> None:
        with self._limited_lock(name, LOCK_WAIT_S):
            try:
                self._sync(name, {version} if version else set())
            except ObjectStoreError as error:
                if error.problem not in ("missing", "changed"):
                    raise
                self.refresh(name)  # The objects have changed since the listing.
                self._sync(name, {version} if version else set())
            self.record_name_use(name)  # The fetch may have taken long.
            self.registry.scan(name.tenant)
            if version is not None or self.registry.has_loaded(name.tenant, name.name):
                return
            # The files of the newest versions cannot be used.
            older_versions = sorted(self.objects(name).versions, reverse=True)
            for older_version in older_versions[:PREVIOUS_VERSIONS_MAX]:
                if self._sync(name, {older_version}):
                    self.registry.scan(name.tenant)
                    if self.registry.has_loaded(name.tenant, name.name):
                        return

    def refresh(self, name: OwnedName) -> None:
        """Read the keys of a name, and its alias record."""
        with self._requests():
            entries: list[ObjectInfo] = []
            # Keys of other names are between the keys of this name, so there are three requests.
            first_key = f"{name.folder}{name.name}@"
            for entry in self.store.list(name.tenant, after=first_key):
                if not entry.key.startswith(first_key):
                    break
                entries.append(entry)
            others = (self.store.find(key) for key in (name.unversioned_key, name.alias_key))
            entries += [entry for entry in others if entry is not None]
        self._set_objects(name, build_index(entries).get(name, NO_OBJECTS))
        self._read_alias(name)

    def alias(self, name: OwnedName) -> AliasContent:
        """Return the alias record that the last refresh of a name has read."""
        return self._aliases.get(name, NO_ALIAS)

    def set_alias(self, name: OwnedName, alias: AliasContent) -> None:
        """Record an alias record that this server has written."""
        entry = ObjectInfo(name.alias_key, len(alias.content), alias.etag, datetime.now(UTC))
        objects = self.objects(name)
        with self._lock:
            self._aliases[name] = alias
        self._set_objects(name, NameObjects(objects.stored, entry, objects.tombstones))
        self.sync_copies_after_change(name)

    def add_version(self, name: OwnedName, version: int, entry: ObjectInfo) -> None:
        """Record a version that this server has uploaded."""
        objects = self.objects(name)
        stored = {**objects.stored, version: entry}
        self._set_objects(name, NameObjects(stored, objects.alias, objects.tombstones))
        self.record_name_use(name)

    def remove_version(self, name: OwnedName, version: int, tombstone: ObjectInfo) -> None:
        """Record a version that this server has unloaded, and hide its copy."""
        objects = self.objects(name)
        tombstones = {**objects.tombstones, version: tombstone}
        self._set_objects(name, NameObjects(objects.stored, objects.alias, tombstones))
        self.sync_copies_after_change(name)

    def record_name_use(self, name: OwnedName) -> None:
        self._used_at[name] = time.monotonic()

    def sync_copies(self, name: OwnedName) -> None:
        """Make the copies of a name that is in use equal to the store, and load them."""
        with self._limited_lock(name, LOCK_WAIT_S):
            if not self.folder.copies(name):
                return
            try:
                has_changed = self._sync(name, set())
            except (PreambleError, OSError):
                self.registry.scan(name.tenant)  # A part may have changed.
                raise
            if has_changed:
                self.registry.scan(name.tenant)

    def sync_copies_after_change(self, name: OwnedName) -> None:
        """Do the same after a change that the store has made; the next poll repeats a failure.

        The failure must not reach the caller, who would make the change again.
        """
        try:
            self.sync_copies(name)
        except ObjectStoreError:  # It is recorded, or another thread fetches an adapter.
            return
        except (PreambleError, OSError) as error:
            self.record_failure(error)

    # The poll.

    def poll(self) -> bool:
        """List the store, and fetch what has become current; return whether the store answered."""
        with self._poll_lock:
            self._remove_hidden()  # Also while the store does not answer.
            began_at, began_monotonic = time.time(), time.monotonic()
            try:
                with self._requests(is_poll=True):
                    entries = list(self.store.list(after=HIDDEN_KEYS_END))
            except ObjectStoreError as error:  # It is recorded.
                self.listing_error = error
                return False
            self.listed_at = began_at
            self.listing_error = None
            self._set_index(entries, began_monotonic)
            self._read_new_aliases()
            self._sync_names()
            self._delete_unloaded()
            return True

    @property
    def delay_s(self) -> float:
        """The time after which the store may be asked again after a failure; 0: no failure."""
        return max(0.0, self._retry_at - time.monotonic())

    def _set_index(self, entries: list[ObjectInfo], began_at: float) -> None:
        with self._lock:
            is_unchanged = entries == self._listed_entries and not self._refreshed_at
        if is_unchanged:
            return
        index = build_index(entries)
        with self._lock:
            # What was read or changed after the listing began is newer than the listing.
            recent = {name: at for name, at in self._refreshed_at.items() if at >= began_at}
            for name in recent:
                index.pop(name, None)
                if name in self._index:
                    index[name] = self._index[name]
            self._refreshed_at = recent
            self._listed_entries = entries
            self._index = index
            self._aliases = {name: alias for name, alias in self._aliases.items() if name in index}
            self._state += 1

    def _read_new_aliases(self) -> None:
        """Read alias records that have changed, so that listings have the current versions."""
        in_use = set(self.folder.names())
        names = [
            name
            for name, objects in list(self._index.items())
            if objects.alias is not None and objects.alias.etag != self.alias(name).etag
        ]
        names.sort(key=lambda name: name not in in_use)

        def read(name: OwnedName) -> None:
            # An error is logged; the next poll reads the record.
            with suppress(ObjectStoreError):
                self._read_alias(name)

        if names:
            with ThreadPoolExecutor(ALIAS_READERS) as readers:
                list(readers.map(read, names[:ALIASES_READ_MAX]))
            with self._lock:
                self._state += 1

    def _read_alias(self, name: OwnedName) -> None:
        """Read the alias record of a name, unless the record of its listed object was read."""
        entry = self.objects(name).alias
        if entry is not None and entry.etag == self.alias(name).etag:
            return
        alias = NO_ALIAS
        if entry is not None:
            with self._requests():
                alias = self._read_stored_alias(name)
        with self._lock:
            self._aliases[name] = alias

    def _read_stored_alias(self, name: OwnedName) -> AliasContent:
        try:
            return AliasContent(*self.store.read(name.alias_key, ALIAS_BYTES_MAX + 1))
        except ObjectStoreError as error:
            if error.problem != "missing":
                raise
            return NO_ALIAS

    def _sync_names(self) -> None:
        """Make the copies of all names in use equal to the store."""
        changed_tenants: set[str] = set()
        for name in self.folder.names():
            objects = self.objects(name)
            if self._synced.get(name) == objects:
                continue
            try:
                # Without a wait: a slow fetch must not delay the other names.
                with self._limited_lock(name, 0.0):
                    if self._sync(name, set()):
                        changed_tenants.add(name.tenant)
            except ObjectStoreError:  # An error of the store is recorded. The next poll retries.
                continue
            except (PreambleError, OSError) as error:
                self.record_failure(error)
                continue
            self._synced[name] = objects
        for tenant in changed_tenants:
            with suppress(OSError):  # The poll of the directory scans again.
                self.registry.scan(tenant)
        for name in self._synced.keys() - set(self.folder.names()):
            self._synced.pop(name, None)

    def _delete_unloaded(self) -> None:
        """Delete the objects of versions that were unloaded long ago, and their tombstones."""
        if time.monotonic() < self._next_deletion_at:
            return
        now, deleted = datetime.now(UTC), 0
        for objects in list(self._index.values()):
            for version, tombstone in objects.tombstones.items():
                age_s = (now - tombstone.modified).total_seconds()
                if age_s < UNLOADED_OBJECT_KEEP_S or deleted >= UNLOADED_DELETES_MAX:
                    continue
                deleted += 1
                try:
                    with self._requests():
                        # The alias record has the number of the version, so no upload uses it
                        # again.
                        if version in objects.stored:
                            self.store.delete(objects.stored[version].key)
                        self.store.delete(tombstone.key)
                        log.info("event=adapter_object_deleted key=%s", tombstone.key)
                except ObjectStoreError as error:
                    if error.problem == "denied":  # This server may not delete objects.
                        self._next_deletion_at = time.monotonic() + REFUSED_DELETION_DELAY_S
                        return

    # Copies. The caller holds the lock of the name.

    def _sync(self, name: OwnedName, requested_versions: set[int]) -> bool:
        """Make the copies of a name equal to the store; return whether a file has changed.

        Afterwards the folder has the current version, the versions that it had and that still
        exist, and the `requested_versions` that exist.
        """
        objects = self.objects(name)
        versions = objects.versions
        has_changed = False
        try:
            if versions:
                self._read_alias(name)
                selected = self.selected_version(name)
                for version in sorted({*requested_versions, selected or 0} & versions.keys()):
                    has_changed |= self._fetch(name, version, versions[version])
            alias = self.alias(name)
            # After its version, so that the folder never selects a version that it does not have.
            if versions and alias.etag:
                has_changed |= self.folder.write_alias(name, alias.content, alias.etag)
            else:
                has_changed |= self.folder.remove_alias(name)
        finally:  # An unloaded version is not served any more, even if no other can be fetched.
            for version in self.folder.copies(name).keys() - versions.keys():
                self.folder.hide(name, version)
                has_changed = True
        return has_changed

    def _fetch(self, name: OwnedName, version: int, entry: ObjectInfo) -> bool:
        """Fetch a version, unless the folder has it; return whether it was fetched."""
        copy = self.folder.copies(name).get(version)
        if copy is not None and copy.etag == entry.etag:
            return False
        key = f"{name.name}@{version}"
        if copy is not None and self.registry.is_loaded(name.tenant, key):
            if self._log_throttle.claim_line(entry.key) is not None:
                log.warning("event=adapter_object_changed key=%s", entry.key)
            return False
        if entry.size > self._bytes_max:
            raise RefusedError(
                "ADAPTER_UNUSABLE",
                f"{key} has {entry.size} bytes, over the limit of the mirror "
                f"({self._bytes_max} bytes, adapter_mirror_bytes_max)",
                "adapter",
            )
        if copy is not None:  # It was refused, and its object has been replaced.
            self.folder.remove(name, version)
        self.free_capacity(name, entry.size)
        began = time.monotonic()
        with self._requests():
            self.folder.add(name, version, entry.etag, partial(self.store.download, entry))
        self.counts.fetches += 1
        self.counts.fetched_bytes += entry.size
        log.info(
            "event=adapter_fetched adapter=%s tenant=%s bytes=%d s=%.3f",
            key,
            name.tenant,
            entry.size,
            time.monotonic() - began,
        )
        return True

    def _remove_hidden(self) -> None:
        try:
            self.folder.remove_hidden(time.monotonic() - HIDDEN_KEEP_S, self._used_files())
        except OSError as error:  # The next poll tries again.
            self.record_failure(error)

    def free_capacity(self, new_name: OwnedName, size: int) -> None:
        """Hide the copies of names that have not been used for the longest time.

        Names that were used a short time ago, or that an unfinished request uses, stay, even if a
        limit is exceeded.
        """
        self._remove_hidden()
        # Copies that were hidden a short time ago are removed soon, so no others are evicted for
        # them.
        soon_removed = self.folder.bytes_hidden_since(time.monotonic() - HIDDEN_KEEP_S)
        nbytes = self.folder.nbytes - soon_removed + size
        count = 1 + sum(len(self.folder.copies(name)) for name in self.folder.names())
        if nbytes <= self._bytes_max and count <= self._adapters_max:
            return
        idle_before, used_files = time.monotonic() - EVICTION_IDLE_S, self._used_files()
        tenants: set[str] = set()
        for name in sorted(self.folder.names(), key=lambda name: self._used_at.get(name, 0.0)):
            if nbytes <= self._bytes_max and count <= self._adapters_max:
                break
            lock = self._lock_of(name)
            is_recent = self._used_at.get(name, 0.0) > idle_before
            if name == new_name or is_recent or not lock.acquire(blocking=False):
                continue
            try:
                copies = self.folder.copies(name)
                if any(str(copy.path.absolute()) in used_files for copy in copies.values()):
                    continue
                for version, copy in copies.items():
                    # A request may look the adapter up until the scan below.
                    self.folder.hide(name, version)
                    nbytes -= copy.size
                    count -= 1
                self.folder.remove_alias(name)
                self._used_at.pop(name, None)
            finally:
                lock.release()
            tenants.add(name.tenant)
            self.counts.evictions += 1
            log.info("event=adapter_evicted adapter=%s tenant=%s", name.name, name.tenant)
        for tenant in tenants:  # The adapters count until a scan drops them.
            self.registry.scan(tenant)

    # Failures.

    @contextmanager
    def _requests(self, *, is_poll: bool = False) -> Iterator[None]:
        """Record whether the store answers; except for a poll, do not wait for it again at once."""
        if not is_poll:
            self._check_answers()
        try:
            yield
        except ObjectStoreError as error:
            self.record_failure(error)
            raise
        with self._lock:
            has_recovered, self._failures, self._retry_at = self._failures > 0, 0, 0.0
        if has_recovered:
            log.info("event=adapter_store_answers url=%s", self.store.url)

    def record_failure(self, error: Exception) -> None:
        """Count and log an error of the store or of the folder."""
        self.counts.errors += 1
        if not isinstance(error, ObjectStoreError):
            if (suppressed := self._log_throttle.claim_line("mirror")) is not None:
                log.warning("event=adapter_mirror_failed error=%r suppressed=%d", error, suppressed)
            return
        if error.problem == "unavailable":
            with self._lock:
                delay_s = min(FAILURE_DELAY_S * 2**self._failures, FAILURE_DELAY_S_MAX)
                self._failures = min(self._failures + 1, 16)  # The delay has its maximum.
                self._retry_at = time.monotonic() + delay_s
        if (suppressed := self._log_throttle.claim_line("store")) is not None:
            text = str(error)
            log.warning("event=adapter_store_failed error=%r suppressed=%d", text, suppressed)

    def _check_answers(self) -> None:
        """Raise an error if the store did not answer a short time ago."""
        if self.delay_s > 0.0:
            raise ObjectStoreError(f"{self.store.url} did not answer a moment ago", "unavailable")

    @contextmanager
    def _unavailable_errors(self) -> Iterator[None]:
        """Convert an error of the store or of the disk to the error of a request."""
        try:
            yield
        except ObjectStoreError as error:
            raise UnavailableError(
                "the server cannot read its adapter store; try again later", "STORAGE_TIMEOUT"
            ) from error
        except OSError as error:
            self.record_failure(error)
            raise UnavailableError(
                "the server cannot store the adapter; try again later", "STORAGE_TIMEOUT"
            ) from error

    def _set_objects(self, name: OwnedName, objects: NameObjects) -> None:
        with self._lock:
            self._refreshed_at[name] = time.monotonic()
            if self._index.get(name, NO_OBJECTS) == objects:
                return
            index = dict(self._index)
            index.pop(name, None)
            if objects != NO_OBJECTS:
                index[name] = objects
            self._index = index
            self._state += 1

    def _lock_of(self, name: OwnedName) -> "threading.RLock":
        return self._name_locks[hash(name) % NAME_LOCKS]

    @contextmanager
    def _limited_lock(self, name: OwnedName, wait_s: float) -> Iterator[None]:
        """Hold the lock of a name; raise an error if another thread holds it for too long."""
        lock = self._lock_of(name)
        if not lock.acquire(timeout=wait_s):
            raise ObjectStoreError(f"{name.name} is being fetched", "unavailable")
        try:
            yield
        finally:
            lock.release()


def _owned_names(requested: AdapterName, tenant: str) -> list[OwnedName]:
    """Return the names that a tenant may mean: its own, and the shared one."""
    return [OwnedName(owner, requested.name) for owner in dict.fromkeys((tenant, ""))]


def _current_of(name: OwnedName, alias: AliasContent) -> int | None:
    """Return the version in an alias record; None: no version, or the record is not valid."""
    if not alias.etag:
        return None
    try:
        return alias.parse(name).current
    except ConfigError:  # The scan of the folder logs it.
        return None
