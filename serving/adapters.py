"""The adapters that a server answers with: what lies in one directory, read again and again.

The directory is the truth. A file is `name@version.safetensors`, or `name.safetensors` for version
1; what it holds never changes, and `name` alone means the newest version. A file that cannot be
used is logged once and passed over. What a template or a table is for is not known here.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gpt.adapter import SUFFIX, Adapter, Name, open_adapter, parse_name
from gpt.errors import ConfigError, PreambleError
from serving.request import UnknownAdapterError

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Resident:
    """An adapter in memory, under the name that its file has."""

    name: str
    version: int
    adapter: Adapter

    @property
    def key(self) -> str:
        return f"{self.name}@{self.version}"


class Adapters:
    """Those of `directory` that pass `check`, which raises what is wrong with one."""

    def __init__(
        self, directory: Path | None, check: Callable[[Adapter], None], *, adapters_max: int
    ) -> None:
        if directory is not None and not directory.is_dir():
            raise ConfigError(f"adapters: {directory} is not a directory; make it, or name another")
        self._directory, self._check, self._max = directory, check, adapters_max
        self._scanning = threading.Lock()
        self._seen: dict[Path, tuple[int, int]] = {}  # Each file's time and size, when last read.
        # Replaced whole, never changed, so that readers need no lock.
        self._residents: dict[str, Resident] = {}
        self._newest: dict[str, Resident] = {}
        self._tables: dict[str, Tensor] = {}
        self.failures = 0  # Files that were refused, each time they changed.
        self.scan()

    def __len__(self) -> int:
        return len(self._residents)

    def resolve(self, name: str) -> Resident:
        """The adapter called `name` or `name@version`; an unknown one may be new on disk."""
        parse_name(name)  # What cannot be a name costs no look at the disk.
        found = self._find(name)
        if found is None:
            self.scan()
            found = self._find(name)
        if found is None:
            way = "ask for one that ListAdapters names"
            if self._directory is None:
                way = "no directory of adapters was given (--adapters DIR)"
            raise UnknownAdapterError(f"there is no adapter {name!r} here; {way}")
        return found

    def _find(self, name: str) -> Resident | None:
        return self._residents.get(name) or self._newest.get(name)

    def table(self, digest: str) -> Tensor:
        """The rows of an adapter that `resolve` gave a moment ago."""
        try:
            return self._tables[digest]
        except KeyError:
            raise UnknownAdapterError("the adapter was just removed from this server") from None

    def list(self) -> list[tuple[Resident, bool]]:
        """All of them by name and version, each with whether its name alone means it."""
        ordered = sorted(self._residents.values(), key=lambda r: (r.name, r.version))
        newest = self._newest
        return [(resident, newest.get(resident.name) is resident) for resident in ordered]

    def scan(self) -> None:
        """Look at the directory: read what is new, drop what is gone."""
        if self._directory is None:
            return
        with self._scanning:
            files = sorted(self._directory.glob(f"*{SUFFIX}"))
            for gone in self._seen.keys() - set(files):
                del self._seen[gone]
            residents: dict[str, Resident] = {}
            for file in files:
                self._take(file, residents)
            if residents.keys() != self._residents.keys():
                self._publish(residents)

    def _take(self, file: Path, residents: dict[str, Resident]) -> None:
        """Put the adapter of a file among `residents`, from memory if it was read before."""
        try:
            status = file.stat()
        except OSError:  # Gone between the listing and now.
            return
        stamp = (status.st_mtime_ns, status.st_size)
        known = self._seen.get(file) == stamp
        self._seen[file] = stamp
        try:
            name, version = parse_name(file.name.removesuffix(SUFFIX))
            key = f"{name}@{version or 1}"
            held = self._residents.get(key)
            if held is None and known:
                return  # It was refused before, and has not changed.
            if key in residents:
                raise ConfigError(f"another file is {key} already; rename one of them")
            residents[key] = held or self._read(file, Name(name, version or 1), len(residents))
            if held is not None and not known:
                raise ConfigError("it changed, and is served as it was; write a new version")
        except PreambleError as error:
            if not known:
                self._refuse(file, str(error))
        except Exception:  # Whatever is wrong with one file must not take the others along.
            log.exception("event=adapter_fault file=%s", file.name)
            self._refuse(file, "it could not be read, by a fault of this server")

    def _read(self, file: Path, name: Name, others: int) -> Resident:
        if others >= self._max:
            raise ConfigError(f"{self._max} adapters are loaded already (adapters_max)")
        adapter = open_adapter(file)
        self._check(adapter)
        resident = Resident(name.name, name.version or 1, adapter)
        log.info("event=adapter_loaded adapter=%s rows=%d", resident.key, len(adapter.table))
        return resident

    def _refuse(self, file: Path, reason: str) -> None:
        self.failures += 1
        log.warning("event=adapter_refused file=%s reason=%r", file.name, reason)

    def _publish(self, residents: dict[str, Resident]) -> None:
        newest: dict[str, Resident] = {}
        for resident in residents.values():
            other = newest.get(resident.name)
            if other is None or resident.version > other.version:
                newest[resident.name] = resident
        for key in self._residents.keys() - residents.keys():
            log.info("event=adapter_dropped adapter=%s", key)
        self._tables = {r.adapter.digest: r.adapter.table for r in residents.values()}
        self._residents, self._newest = residents, newest
