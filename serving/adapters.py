"""The adapters that a server answers with: what lies in one directory, read again and again.

The directory is the truth. A file is `name@version.safetensors`, or `name.safetensors` for version
1; what it holds never changes, and `name` alone means the newest version. A file that cannot be
used is logged once and passed over; so is one too many, until there is room for it. Cards are kept
and tables are not: of ten thousand adapters a few are in use, and who runs the model reads those.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpt.adapter import SUFFIX, Adapter, Card, Name, open_adapter, parse_name
from gpt.errors import ConfigError, PreambleError
from serving.messages import Rows
from serving.request import UnknownAdapterError

log = logging.getLogger(__name__)

COARSE_NS = 2_000_000_000  # No file system's times are coarser.


@dataclass(frozen=True, eq=False)
class Resident:
    """An adapter that was found good, under the name that its file has."""

    name: str
    version: int
    card: Card
    rows: Rows

    @property
    def key(self) -> str:
        return f"{self.name}@{self.version}"


class Adapters:
    """Those of `directory` that pass `check`, which raises what is wrong with one.

    There are none before the first `scan`.
    """

    def __init__(
        self, directory: Path | None, check: Callable[[Adapter], None], *, adapters_max: int
    ) -> None:
        if directory is not None and not directory.is_dir():
            raise ConfigError(f"adapters: {directory} is not a directory; make it, or name another")
        self._directory, self._check, self._max = directory, check, adapters_max
        self._scanning = threading.Lock()
        self._looked_ns, self._changed_ns = 0, 0  # When, and the directory's own time then.
        self._seen: dict[str, tuple[int, int]] = {}  # Each file's time and size, when last read.
        self._crowded: set[str] = set()  # Files for which there was no room, or no name left.
        # Replaced whole, never changed, so that readers need no lock.
        self._residents: dict[str, Resident] = {}
        self._newest: dict[str, Resident] = {}
        self.failures = 0  # Files that were refused, each time they changed.

    def __len__(self) -> int:
        return len(self._residents)

    def resolve(self, name: str) -> Resident:
        """The adapter called `name` or `name@version`; an unknown one may be new on disk."""
        parse_name(name)  # What cannot be a name costs no look at the disk.
        found = self._find(name)
        if found is None:
            try:
                if self._stale():
                    self.scan()
            except OSError:  # A network file system may be away for a while.
                log.exception("event=adapters_not_scanned")
            found = self._find(name)
        if found is None:
            way = "ask for one that ListAdapters names"
            if self._directory is None:
                way = "no directory of adapters was given (--adapters DIR)"
            raise UnknownAdapterError(f"there is no adapter {name!r} here; {way}")
        return found

    def _find(self, name: str) -> Resident | None:
        return self._residents.get(name) or self._newest.get(name)

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
            looked_ns, changed_ns = time.time_ns(), os.stat(self._directory).st_mtime_ns
            found = _listed(self._directory)
            self._looked_ns, self._changed_ns = looked_ns, changed_ns
            if found == self._seen:
                return
            before, self._seen = self._seen, found
            self._crowded &= found.keys()
            loaded = {Path(resident.rows.file).name for resident in self._residents.values()}
            residents: dict[str, Resident] = {}
            # What is loaded keeps its place; new files take what room is left, by their names.
            for file in sorted(found, key=lambda name: (name not in loaded, name)):
                known = before.get(file) == found[file]
                self._take(self._directory / file, known, residents)
            if residents != self._residents:
                self._publish(residents)

    def _stale(self) -> bool:
        """Whether a file may be there that no scan has seen: names that nobody has must be cheap.

        A directory that changed shortly before it was looked at may have changed again since, and
        its own time be too coarse to tell.
        """
        if self._directory is None:
            return False
        changed_ns = os.stat(self._directory).st_mtime_ns
        return changed_ns != self._changed_ns or self._looked_ns - changed_ns < COARSE_NS

    def _take(self, file: Path, known: bool, residents: dict[str, Resident]) -> None:
        """Put the adapter of a file among `residents`, from memory if it was read before."""
        try:
            name, version = parse_name(file.name.removesuffix(SUFFIX))
            key = f"{name}@{version or 1}"
            held = self._residents.get(key)
            if held is not None and Path(held.rows.file).name != file.name:
                held = None  # Another file was that adapter.
            taken, full = key in residents, held is None and len(residents) >= self._max
            if held is None and known:
                if taken or full or file.name not in self._crowded:
                    return  # It was refused before, and nothing has changed.
                known = False  # There is room for it now.
            self._crowded.discard(file.name)
            if taken or full:
                self._crowded.add(file.name)
            if taken:
                raise ConfigError(f"another file is {key} already; rename one of them")
            if full:
                raise ConfigError(
                    f"{self._max} adapters are loaded already; take one away, or raise adapters_max"
                )
            residents[key] = held or self._read(file, Name(name, version or 1))
            if held is not None and not known:
                raise ConfigError(
                    "it changed, and is served as it was as long as that is in memory; write a "
                    "new version"
                )
        except PreambleError as error:
            if not known:
                self._refuse(file, str(error))
        except Exception:  # Whatever is wrong with one file must not take the others along.
            log.exception("event=adapter_fault file=%s", file.name)
            self._refuse(file, "it could not be read, by a fault of this server")

    def _read(self, file: Path, name: Name) -> Resident:
        # All of it, so that its digest is checked: what is listed can be used.
        adapter = open_adapter(file)
        self._check(adapter)
        rows = Rows(adapter.digest, len(adapter.table), str(file.absolute()))
        resident = Resident(name.name, name.version or 1, adapter.card, rows)
        log.info("event=adapter_loaded adapter=%s rows=%d", resident.key, rows.count)
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
        self._residents, self._newest = residents, newest


def _listed(directory: Path) -> dict[str, tuple[int, int]]:
    """The adapter files there, each with its time and size; in one sweep, as there may be many."""
    found: dict[str, tuple[int, int]] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                try:
                    status = entry.stat()
                except OSError:  # Gone between the listing and now.
                    continue
                found[entry.name] = (status.st_mtime_ns, status.st_size)
    return found
