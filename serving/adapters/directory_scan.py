"""Adapter directory: scans a folder's adapter files and selects each name's current version.

An adapter version is a file `name@version.safetensors`, or `name.safetensors` for version 1; its
content never changes. `name` without a version means the version in the name's alias record, or the
newest version if there is no record. A file that cannot be used is logged once and skipped. A
directory may have ten thousand adapters, and requests use only a few of them at a time. Therefore
only the cards (metadata) stay in memory; the engine loop reads the tables (rows) when requests need
them. One `AdapterDirectory` has the adapters of one tenant, or the adapters that all tenants share.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpt.adapters.adapter_file import SUFFIX, Adapter, AdapterName, Card, open_adapter, parse_name
from gpt.errors import ConfigError, PreambleError
from gpt.files.file_identity import TIME_RESOLUTION_NS, file_identity
from serving.adapters.alias_record import AliasRecord, read_alias
from serving.adapters.directory_layout import ALIAS_SUFFIX, parse_file_name
from serving.messages import AdapterRef
from serving.request import NO_INFO, AdapterInfo

log = logging.getLogger(__name__)

REJECTIONS_LOGGED_MAX = 100  # Rejected files that one scan logs with their reasons.

_Listing = tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]], tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter whose file passed all checks. Name and version come from the file name."""

    name: str
    version: int
    card: Card
    adapter_ref: AdapterRef
    tenant: str = ""  # The tenant that owns the adapter. "": all tenants share it.
    info: AdapterInfo = NO_INFO

    @property
    def key(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True)
class _Snapshot:
    """The result of a scan. Immutable, so that readers need no lock."""

    adapters: Mapping[str, LoadedAdapter] = field(default_factory=dict)  # By `name@version`.
    current: Mapping[str, LoadedAdapter] = field(default_factory=dict)  # By name.
    # Pairs of (adapter, whether it is the current version), sorted by name and version.
    listing: Sequence[tuple[LoadedAdapter, bool]] = ()


class AdapterDirectory:
    """The adapters of `directory` that pass `check`, which raises an error to reject an adapter.

    There are no adapters before the first `scan`. A thread that scans must hold `scan_lock`; any
    thread may read.
    """

    def __init__(
        self,
        directory: Path,
        check: Callable[[Adapter], None],
        reserve: "Callable[[AdapterDirectory, int], None]",
        rank_bytes: Callable[[Adapter], int],
        tenant: str = "",
        eligible: Callable[[LoadedAdapter], bool] = lambda adapter: True,
    ) -> None:
        """`reserve` sets `reserved` to the given number, or to less if a limit requires that.

        `rank_bytes` returns an upper bound of the bytes that an adapter's weights need
        on a rank.

        `eligible` returns whether a version is eligible as the current version of its name. If no
        alias record names a loaded version, the newest eligible version is current. If no version
        is eligible, the newest version is current.
        """
        self.directory = directory
        self._eligible = eligible
        self._check = check
        self._reserve = reserve
        self._rank_bytes = rank_bytes
        self._tenant = tenant
        # Number of adapters that count against the limit of all directories: during a scan the
        # number that it may keep and load, and then the number that it kept and loaded.
        self.reserved = 0
        self.scan_lock = threading.Lock()
        self.scan_began_at = -math.inf  # Start of the last complete scan, on the monotonic clock.
        self.scan_progress = 0  # Increases while the directory is scanned.
        self._publish_lock = threading.Lock()  # Never held during a file access.
        self._scanned_ns = 0  # Time of the last scan.
        self._directory_mtime_ns = 0  # The directory's modification time at that scan.
        # By file name, at the last scan: (modification time, size) of each adapter file, and
        # (modification time, inode) of each alias file.
        self._file_stamps: dict[str, tuple[int, int]] = {}
        self._alias_stamps: dict[str, tuple[int, int]] = {}
        self._aliases: dict[str, AliasRecord] = {}
        self._skipped_files: set[str] = set()  # Duplicates, and files over `adapters_max`.
        self._rejection_reasons: dict[str, str] = {}  # By file name.
        self._snapshot = _Snapshot()
        self.folders: tuple[str, ...] = ()  # Subdirectories at the last scan.
        # Number of rejected files; a file that is rejected again after a change counts again.
        self.failures = 0
        self._failures_before_scan = 0

    def __len__(self) -> int:
        return len(self._snapshot.adapters)

    @property
    def listing(self) -> Sequence[tuple[LoadedAdapter, bool]]:
        """Pairs of (adapter, whether it is the current version), sorted by name and version."""
        return self._snapshot.listing

    def find(self, name: str) -> LoadedAdapter | None:
        snapshot = self._snapshot
        return snapshot.adapters.get(name) or snapshot.current.get(name)

    def has(self, name: str) -> bool:
        """Return whether any version of the name is loaded."""
        return name in self._snapshot.current

    def is_current(self, adapter: LoadedAdapter) -> bool:
        return self._snapshot.current.get(adapter.name) is adapter

    def rejection_reason(self, name: AdapterName) -> str | None:
        """Return why the file of a version cannot be used; None: the file is not rejected.

        Without a version, `name` means the newest rejected version.
        """
        reasons = {
            parse_file_name(file): reason for file, reason in list(self._rejection_reasons.items())
        }
        versions = [
            rejected_name.version or 1
            for rejected_name in reasons
            if rejected_name and rejected_name.name == name.name
        ]
        return reasons.get(AdapterName(name.name, name.version or max(versions, default=1)))

    def is_stale(self) -> bool:
        """Return whether the directory may contain files that the last scan did not see.

        This costs one `stat`, so that requests with unknown names stay cheap. The answer is also
        True if the directory changed shortly before the scan, because a change after the scan may
        have the same coarse mtime.
        """
        mtime_ns = os.stat(self.directory).st_mtime_ns
        return (
            mtime_ns != self._directory_mtime_ns or self._scanned_ns - mtime_ns < TIME_RESOLUTION_NS
        )

    def scan(self) -> None:
        """Load new adapter files and drop removed files."""
        began_at = time.monotonic()
        self._load_changes()
        self.reserved = len(self)
        self.scan_began_at = began_at

    def _load_changes(self) -> None:
        now_ns, mtime_ns = time.time_ns(), os.stat(self.directory).st_mtime_ns
        file_stamps, alias_stamps, self.folders = self._list_files()
        self._scanned_ns = now_ns
        self._directory_mtime_ns = mtime_ns
        has_changed = file_stamps != self._file_stamps or alias_stamps != self._alias_stamps
        if not has_changed and not self._skipped_files:
            return
        previous_adapters = self._snapshot.adapters
        # The adapters of removed files count until this scan has dropped them.
        self._reserve(self, max(len(file_stamps), len(previous_adapters)))
        if not has_changed and len(previous_adapters) >= self.reserved:
            return  # There is no capacity for the skipped files.
        self._read_aliases(alias_stamps)
        previous_stamps, self._file_stamps = self._file_stamps, file_stamps
        self._skipped_files &= file_stamps.keys()
        self._rejection_reasons = {
            file: reason for file, reason in self._rejection_reasons.items() if file in file_stamps
        }
        loaded_files = {
            Path(adapter.adapter_ref.file).name for adapter in previous_adapters.values()
        }
        adapters: dict[str, LoadedAdapter] = {}
        # Loaded adapters stay loaded; new files fill the remaining capacity in name order.
        self._failures_before_scan = self.failures
        for file in sorted(file_stamps, key=lambda name: (name not in loaded_files, name)):
            is_unchanged = previous_stamps.get(file) == file_stamps[file]
            self._load_file(self.directory / file, is_unchanged, adapters)
            self.scan_progress += 1
        unlogged = self.failures - self._failures_before_scan - REJECTIONS_LOGGED_MAX
        if unlogged > 0:
            log.warning("event=adapters_refused files=%d tenant=%s", unlogged, self._tenant)
        with self._publish_lock:
            self._publish(adapters)

    def _read_aliases(self, stamps: dict[str, tuple[int, int]]) -> None:
        aliases: dict[str, AliasRecord] = {}
        for file, stamp in stamps.items():
            self.scan_progress += 1
            name = file.removesuffix(ALIAS_SUFFIX)
            if self._alias_stamps.get(file) == stamp and name in self._aliases:
                aliases[name] = self._aliases[name]
                continue
            try:
                aliases[name] = read_alias(self.directory, name)
            except (OSError, ConfigError) as error:
                # The record is ignored, so the newest version is current.
                log.warning("event=adapter_note_refused file=%s reason=%r", file, str(error))
                aliases[name] = AliasRecord()
        self._alias_stamps = stamps
        self._aliases = aliases

    def _load_file(
        self, file: Path, is_unchanged: bool, adapters: dict[str, LoadedAdapter]
    ) -> None:
        """Add the adapter of a file to `adapters`; read the file only if it is not loaded yet."""
        try:
            name, version = parse_name(file.name.removesuffix(SUFFIX))
            key = f"{name}@{version or 1}"
            loaded_adapter = self._snapshot.adapters.get(key)
            if (
                loaded_adapter is not None
                and Path(loaded_adapter.adapter_ref.file).name != file.name
            ):
                loaded_adapter = None  # The loaded adapter is from another file.
            is_duplicate = key in adapters
            is_full = loaded_adapter is None and len(adapters) >= self.reserved
            if loaded_adapter is None and is_unchanged:
                if is_duplicate or is_full or file.name not in self._skipped_files:
                    return  # The file was rejected before, and has not changed.
                is_unchanged = False  # There is capacity now: treat the file as a new file.
            self._skipped_files.discard(file.name)
            if is_duplicate or is_full:
                self._skipped_files.add(file.name)
            if is_duplicate:
                raise ConfigError(
                    f"another file has the name and version {key} too; rename one of them"
                )
            if is_full:
                raise ConfigError(
                    "the number of adapters is at its limit (adapters_max); remove one, or raise "
                    "adapters_max"
                )
            adapters[key] = loaded_adapter or self._read_adapter(
                file, AdapterName(name, version or 1)
            )
            if loaded_adapter is not None and not is_unchanged:
                raise ConfigError(
                    "the file changed after it was loaded; requests use its old content as long as "
                    "this content is in memory, and fail after that: restore the file, and write "
                    "the change as a new version"
                )
        except PreambleError as error:
            if not is_unchanged:
                self._reject(file, str(error))
        except Exception:  # A bug that one file triggers must not affect the other files.
            log.exception("event=adapter_fault file=%s", file.name)
            self._reject(file, "internal error while reading the file; see the server log")

    def _read_adapter(self, file: Path, name: AdapterName) -> LoadedAdapter:
        # This reads the whole file to verify its digest, so that every listed adapter is usable.
        # The identity is read first: if the file changes meanwhile, it has another one later.
        identity = file_identity(file)
        adapter = open_adapter(file)
        self._check(adapter)
        path = str(file.absolute())
        adapter_ref = AdapterRef(
            adapter.digest,
            len(adapter.table),
            path,
            adapter.card.kind,
            len(adapter.linears),
            adapter.nbytes - adapter.table.nbytes,
            self._rank_bytes(adapter),
            identity,
        )
        loaded_adapter = LoadedAdapter(
            name.name,
            name.version or 1,
            adapter.card,
            adapter_ref,
            self._tenant,
            AdapterInfo(adapter.method, adapter.rank, adapter.nbytes),
        )
        log.info(
            "event=adapter_loaded adapter=%s rows=%d rank=%d",
            loaded_adapter.key,
            adapter_ref.row_count,
            adapter.rank,
        )
        self._rejection_reasons.pop(file.name, None)
        return loaded_adapter

    def _reject(self, file: Path, reason: str) -> None:
        self.failures += 1
        self._rejection_reasons[file.name] = reason.replace(f"{file.parent}/", "")
        if self.failures - self._failures_before_scan <= REJECTIONS_LOGGED_MAX:
            log.warning("event=adapter_refused file=%s reason=%r", file.name, reason)

    def reselect_current(self) -> None:
        """Select the current versions again after eligibility has changed."""
        with self._publish_lock:
            self._publish(dict(self._snapshot.adapters))

    def _selection_key(self, adapter: LoadedAdapter) -> tuple[bool, int]:
        return self._eligible(adapter), adapter.version

    def _publish(self, adapters: dict[str, LoadedAdapter]) -> None:
        current: dict[str, LoadedAdapter] = {}
        for adapter in adapters.values():
            other = current.get(adapter.name)
            if other is None or self._selection_key(adapter) > self._selection_key(other):
                current[adapter.name] = adapter
        for name, alias in self._aliases.items():
            if alias.current is None or name not in current:
                continue
            alias_target = adapters.get(f"{name}@{alias.current}")
            if alias_target is not None:
                current[name] = alias_target
            else:
                log.warning(
                    "event=adapter_current_missing adapter=%s@%d used=%s",
                    name,
                    alias.current,
                    current[name].key,
                )
        for key in self._snapshot.adapters.keys() - adapters.keys():
            log.info("event=adapter_dropped adapter=%s", key)
        ordered = sorted(adapters.values(), key=lambda adapter: (adapter.name, adapter.version))
        listing = [(adapter, current[adapter.name] is adapter) for adapter in ordered]
        self._snapshot = _Snapshot(adapters, current, listing)

    def _list_files(self) -> _Listing:
        """Return the stamps of adapter files, the stamps of alias files, and the subdirectories.

        A file's stamp changes when the file changes.
        """
        file_stamps: dict[str, tuple[int, int]] = {}
        alias_stamps: dict[str, tuple[int, int]] = {}
        folders: list[str] = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                self.scan_progress += 1
                if entry.name.startswith("."):
                    continue
                try:
                    if entry.is_dir():
                        folders.append(entry.name)
                    elif entry.name.endswith(SUFFIX):
                        status = entry.stat()
                        file_stamps[entry.name] = (status.st_mtime_ns, status.st_size)
                    elif entry.name.endswith(ALIAS_SUFFIX):
                        status = entry.stat()
                        # A rename replaces an alias file, often by a file of equal size. Therefore
                        # the inode is compared, not the size.
                        alias_stamps[entry.name] = (status.st_mtime_ns, status.st_ino)
                except OSError:  # The file was removed after it was listed.
                    continue
        return file_stamps, alias_stamps, tuple(sorted(folders))
