"""Adapter registry: resolves adapter names, versions and aliases for each tenant.

Adapters in the directory itself are shared: visible to every tenant. A subfolder belongs to the
tenant of the same name. For this tenant, the subfolder's adapters hide the shared adapters of the
same names. An adapter of a different tenant is reported as unknown, like a name that does not
exist. `serving.adapters.directory_scan` scans the folders.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import NamedTuple, Protocol

from gpt.adapters.adapter_file import Adapter, AdapterName, parse_name
from gpt.adapters.card import NAME_PATTERN
from gpt.errors import ConfigError, RequestError
from serving.adapters.directory_scan import AdapterDirectory, LoadedAdapter
from serving.file_threads import POLL_OWNER, FileThreads
from serving.request import UnknownAdapterError

__all__ = ["AdapterRegistry", "LoadedAdapter", "check_directory"]

log = logging.getLogger(__name__)

CHECK_LIMIT_S = 5.0  # Time limit of `check_directory`.


def check_directory(directory: Path, setting: str = "adapters") -> None:
    """Raise ConfigError if `directory`, the value of `setting`, is not a directory.

    If the disk does not answer within the time limit, raise no error: the server then starts
    without adapters, and loads them when the disk answers.
    """
    is_directory = FileThreads(CHECK_LIMIT_S).submit(POLL_OWNER, directory.is_dir)
    wait([is_directory], CHECK_LIMIT_S)
    if is_directory.done() and not is_directory.result():
        raise ConfigError(
            f"{setting}: {directory} is not a directory; create it, or name another directory"
        )


class AdapterCatalog(Protocol):
    """The adapters that exist elsewhere, of which the directory has those in use."""

    def has(self, tenant: str, name: str) -> bool:
        """Return whether a tenant owns an adapter of this name, without a file access."""

    def record_use(self, adapter: LoadedAdapter) -> None:
        """Record that a request uses a loaded adapter."""

    def listing(self, tenant: str) -> Sequence[tuple[str, int, bool]]:
        """Return (name, version, whether it is current) of a tenant's own adapters, sorted."""

    def find(self, names: Iterable[str], tenant: str) -> None:
        """Copy the adapters of these names to the directory, and scan it."""


class ListedAdapter(NamedTuple):
    """An adapter in a listing."""

    name: str
    version: int
    is_current: bool
    adapter: LoadedAdapter | None  # None: its file has not been read yet.

    @property
    def key(self) -> str:
        return f"{self.name}@{self.version}"


class AdapterRegistry:
    """The adapters of `directory` that pass `check`, which raises an error to reject an adapter.

    Empty before the first `scan`. Contains at most `adapters_max` adapters over all tenants.
    """

    def __init__(
        self,
        directory: Path | None,
        check: Callable[[Adapter], None],
        *,
        adapters_max: int,
        rank_bytes: Callable[[Adapter], int] = lambda adapter: adapter.nbytes,
        eligible: Callable[[LoadedAdapter], bool] = lambda adapter: True,
        catalog: AdapterCatalog | None = None,
    ) -> None:
        """`rank_bytes` and `eligible` are described at `AdapterDirectory.__init__`.

        `catalog` has the adapters that are not in the directory yet.
        """
        self._catalog = catalog
        self.directory = directory
        self.check = check
        self.adapters_max = adapters_max
        self._rank_bytes = rank_bytes
        self._eligible = eligible
        self._update_lock = threading.Lock()  # Guards updates of `_directories`.
        self._capacity_lock = threading.Lock()  # Serializes `_reserve`.
        self._removed_failures = 0  # Failures counted in directories that were removed.
        # By tenant. The mapping is replaced and never mutated, so that readers need no lock.
        self._directories: dict[str, AdapterDirectory] = (
            {} if directory is None else {"": self._open_directory(directory)}
        )

    def __len__(self) -> int:
        return sum(len(directory) for directory in self._directories.values())

    @property
    def failures(self) -> int:
        """Number of rejected files; a file that is rejected again after a change counts again."""
        return self._removed_failures + sum(
            directory.failures for directory in self._directories.values()
        )

    @property
    def scan_progress(self) -> int:
        """A number that increases with each file of a scan, as long as the disk answers."""
        return sum(directory.scan_progress for directory in self._directories.values())

    def lookup(self, name: str, tenant: str = "") -> LoadedAdapter:
        """Return the adapter `name` or `name@version`, without reading the disk."""
        base_name, _ = parse_name(name)
        adapter = self._find(base_name, name, tenant)
        if adapter is not None and self._catalog is not None:
            self._catalog.record_use(adapter)
        if adapter is None:
            advice = "choose an adapter that ListAdapters returns"
            if self.directory is None:
                advice = "this server has no adapter directory (--adapters DIR)"
            raise UnknownAdapterError(f"adapter {name!r} does not exist; {advice}")
        return adapter

    def resolve(self, name: str, tenant: str = "") -> LoadedAdapter:
        """Return the adapter `name` or `name@version`.

        If the name is unknown and a directory may have changed, the directories in which the tenant
        looks up names are scanned.
        """
        try:
            return self.lookup(name, tenant)
        except UnknownAdapterError:
            self.find_new([name], tenant)
            return self.lookup(name, tenant)

    def needs_scan(self, names: Iterable[str], tenant: str) -> bool:
        """Return whether a scan may load adapters of these names; empty names are ignored.

        False if an invalid name precedes the unknown ones: the request is refused for that name.
        """
        if self.directory is None:
            return False
        try:
            for name in dict.fromkeys(names):
                if name:
                    self.lookup(name, tenant)
        except UnknownAdapterError:
            return True
        except RequestError:  # An invalid name.
            return False
        return False

    def find_new(self, names: Iterable[str], tenant: str) -> None:
        """Load the adapters of unknown names, if they exist."""
        if self._catalog is not None:
            self._catalog.find(self._record_loaded(names, tenant), tenant)
        self.scan_if_stale(tenant)

    def _record_loaded(self, names: Iterable[str], tenant: str) -> list[str]:
        """Record the use of the names that are loaded, and return the unknown ones.

        The loaded ones must stay while the others are copied for the same request.
        """
        unknown: list[str] = []
        for name in names:
            try:
                if name:
                    self.lookup(name, tenant)
            except UnknownAdapterError:
                unknown.append(name)
            except RequestError:  # The admission refuses the name.
                continue
        return unknown

    def scan_if_stale(self, tenant: str) -> None:
        """Scan the directories in which the tenant looks up names, if they may have changed."""
        try:
            if any(directory.is_stale() for directory in self._directories_of(tenant)):
                self.scan(tenant)
        except OSError:  # For example, a network file system is unavailable.
            log.exception("event=adapters_not_scanned")

    def has(self, name: str, tenant: str = "") -> bool:
        """Return whether a tenant can see an adapter of this name, without reading the disk."""
        return any(self._owns(owner, name) for owner in (tenant, ""))

    def has_loaded(self, owner: str, name: str) -> bool:
        """Return whether a version of a tenant's own name is loaded."""
        directory = self._directories.get(owner)
        return directory is not None and directory.has(name)

    def is_loaded(self, owner: str, key: str) -> bool:
        """Return whether the version `name@version` of a tenant's own name is loaded."""
        directory = self._directories.get(owner)
        return directory is not None and directory.find(key) is not None

    def _owns(self, owner: str, name: str) -> bool:
        """Return whether a tenant (or "") owns an adapter of this name, loaded or not."""
        return self.has_loaded(owner, name) or (
            self._catalog is not None and self._catalog.has(owner, name)
        )

    def list_visible(self, tenant: str = "") -> list[tuple[LoadedAdapter, bool]]:
        """Return the adapters that a tenant can see, sorted by name and version.

        An adapter is returned as a pair: (adapter, whether it is the current version).
        """
        if not self._directories:
            return []
        own_directory, *other_directories = self._directories_of(tenant)
        shared_listing = [
            entry
            for directory in other_directories
            for entry in directory.listing
            if not own_directory.has(entry[0].name)
        ]
        if not shared_listing:
            return [*own_directory.listing]
        return sorted(
            [*own_directory.listing, *shared_listing],
            key=lambda entry: (entry[0].name, entry[0].version),
        )

    def list_all(self, tenant: str = "") -> list[ListedAdapter]:
        """Return all adapters that a tenant can use, sorted by name and version.

        Those of the catalog that no request has needed yet are not loaded.
        """
        if self._catalog is None:
            return [
                ListedAdapter(adapter.name, adapter.version, is_current, adapter)
                for adapter, is_current in self.list_visible(tenant)
            ]
        listing = self._list_own(tenant)
        if tenant:
            own_names = {entry.name for entry in listing}
            listing += [entry for entry in self._list_own("") if entry.name not in own_names]
            listing.sort(key=lambda entry: (entry.name, entry.version))
        return listing

    def _list_own(self, owner: str) -> list[ListedAdapter]:
        assert self._catalog is not None
        directory = self._directories.get(owner)
        loaded = {} if directory is None else {entry[0].key: entry for entry in directory.listing}
        listing: list[ListedAdapter] = []
        for name, version, is_current in self._catalog.listing(owner):
            adapter, is_selected = loaded.pop(f"{name}@{version}", (None, is_current))
            # The directory selects the current version of a name that it has.
            if adapter is None and directory is not None and directory.has(name):
                is_selected = False
            listing.append(ListedAdapter(name, version, is_selected, adapter))
        for adapter, is_current in loaded.values():  # Not listed yet.
            listing.append(ListedAdapter(adapter.name, adapter.version, is_current, adapter))
        if loaded:
            listing.sort(key=lambda entry: (entry.name, entry.version))
        return listing

    def all_adapters(self) -> Sequence[LoadedAdapter]:
        """Return the adapters of all tenants."""
        directories = self._directories.values()
        return [adapter for directory in directories for adapter, _ in directory.listing]

    def is_current(self, adapter: LoadedAdapter) -> bool:
        directory = self._directories.get(adapter.tenant)
        return directory is not None and directory.is_current(adapter)

    def rejection_reason(self, name: AdapterName, tenant: str) -> str | None:
        """Return why the file of `name` in the tenant's own directory cannot be used, or None."""
        directory = self._directories.get(tenant)
        return None if directory is None else directory.rejection_reason(name)

    def scan(self, tenant: str | None = None) -> None:
        """Scan the shared directory and the folder of `tenant` (None: all folders).

        Several threads may scan, but each directory is scanned by one of them at a time. A scan of
        all folders skips a folder that another thread scans, since its disk may not answer, and
        ends at once if another thread scans the shared directory.
        """
        if self.directory is None:
            return
        requested_at = time.monotonic()
        shared_directory = self._directories[""]
        blocking = tenant is not None
        if not self._scan_directory(shared_directory, requested_at, blocking=blocking):
            return
        self._update_tenant_directories(shared_directory)
        for name, directory in list(self._directories.items()):
            if name and tenant in (None, name):
                try:
                    self._scan_directory(directory, requested_at, blocking=blocking)
                except OSError as error:  # An error must not affect other tenants' adapters.
                    log.warning("event=adapters_not_scanned tenant=%s error=%s", name, error)

    def reselect_current(self) -> None:
        """Select the current versions again after eligibility has changed."""
        for directory in self._directories.values():
            directory.reselect_current()

    def _open_directory(self, directory: Path, tenant: str = "") -> AdapterDirectory:
        return AdapterDirectory(
            directory, self.check, self._reserve, self._rank_bytes, tenant, self._eligible
        )

    def _reserve(self, directory: AdapterDirectory, count: int) -> None:
        """Let a directory have `count` adapters, or fewer if the others leave less capacity."""
        with self._capacity_lock:
            others = sum(
                other.reserved for other in self._directories.values() if other is not directory
            )
            directory.reserved = max(0, min(count, self.adapters_max - others))

    def _scan_directory(
        self, directory: AdapterDirectory, requested_at: float, *, blocking: bool
    ) -> bool:
        """Scan a directory, unless a scan that began after `requested_at` has completed.

        `requested_at` is on the monotonic clock. Return False if another thread scans the directory
        and `blocking` is false.
        """
        if not directory.scan_lock.acquire(blocking=blocking):
            return False
        try:
            if directory.scan_began_at <= requested_at:
                directory.scan()
        finally:
            directory.scan_lock.release()
        return True

    def _update_tenant_directories(self, shared_directory: AdapterDirectory) -> None:
        """Add and remove `AdapterDirectory`s, one for each folder with a valid tenant name."""
        with self._update_lock:
            tenants = [name for name in shared_directory.folders if NAME_PATTERN.fullmatch(name)]
            directories, previous = {"": shared_directory}, self._directories
            for name in tenants:
                if name in previous:
                    directories[name] = previous[name]
                else:
                    folder = shared_directory.directory / name
                    directories[name] = self._open_directory(folder, name)
            removed = [directory for name, directory in previous.items() if name not in directories]
            self._removed_failures += sum(directory.failures for directory in removed)
            self._directories = directories

    def _directories_of(self, tenant: str) -> Sequence[AdapterDirectory]:
        """Return the directories in which a tenant's adapter names are looked up, in order.

        If the tenant has a folder, its directory is first. The shared directory is last.
        """
        directories = self._directories
        return [directories[owner] for owner in dict.fromkeys((tenant, "")) if owner in directories]

    def _find(self, base_name: str, name: str, tenant: str) -> LoadedAdapter | None:
        """Look up a name in the first of the tenant's directories that has any version of it."""
        for owner in dict.fromkeys((tenant, "")):
            if self._owns(owner, base_name):
                directory = self._directories.get(owner)
                return None if directory is None else directory.find(name)
        return None
