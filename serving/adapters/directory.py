"""One directory of adapters, read again and again: what lies there is what can be asked for.

A file is `name@version.safetensors`, or `name.safetensors` for version 1; what it holds never
changes. `name` alone is the version that its note says, else the newest. A file that cannot be used
is logged once and passed over. Cards are kept and tables are not: of ten thousand adapters a few
are in use, and who runs the model reads those. Whose directory it is, is not known.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpt.adapters.adapter_file import SUFFIX, Adapter, Card, Name, open_adapter, parse_name
from gpt.errors import ConfigError, PreambleError
from serving.adapters.files import CURRENT, Note, name_of, read_note
from serving.messages import Rows

log = logging.getLogger(__name__)

COARSE_NS = 2_000_000_000  # No file system's times are coarser.


@dataclass(frozen=True, eq=False)
class Resident:
    """An adapter that was found good, under the name that its file has."""

    name: str
    version: int
    card: Card
    rows: Rows
    tenant: str = ""  # Whose it is. "": everybody's.

    @property
    def key(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True)
class _View:
    """Replaced whole, never changed, so that readers need no lock."""

    residents: Mapping[str, Resident] = field(default_factory=dict)
    current: Mapping[str, Resident] = field(default_factory=dict)
    entries: Sequence[tuple[Resident, bool]] = ()


class Shelf:
    """Those of `directory` that pass `check`, which raises what is wrong with one.

    There are none before the first `scan`. One thread at a time scans; any may read.
    """

    def __init__(
        self,
        directory: Path,
        check: Callable[[Adapter], None],
        tenant: str = "",
        ripe: Callable[[Resident], bool] = lambda resident: True,
    ) -> None:
        """`ripe`: whether an adapter may be current where another one can be."""
        self.directory, self._ripe = directory, ripe
        self._check, self._tenant, self._max = check, tenant, 0
        self._looked_ns, self._changed_ns = 0, 0  # When, and the directory's own time then.
        self._seen: dict[str, tuple[int, int]] = {}  # Each file's time and size, when last read.
        self._marks: dict[str, tuple[int, int]] = {}  # The same of notes.
        self._notes: dict[str, Note] = {}
        self._crowded: set[str] = set()  # Files for which there was no room, or no name left.
        self._refused: dict[str, str] = {}  # Why.
        self._view = _View()
        self.folders: tuple[str, ...] = ()  # Directories in it, when last read.
        self.failures = 0  # Files that were refused, each time they changed.

    def __len__(self) -> int:
        return len(self._view.residents)

    @property
    def entries(self) -> Sequence[tuple[Resident, bool]]:
        """All by name and version, each with whether its name alone means it."""
        return self._view.entries

    def find(self, name: str) -> Resident | None:
        view = self._view
        return view.residents.get(name) or view.current.get(name)

    def has(self, name: str) -> bool:
        """Whether there is any version."""
        return name in self._view.current

    def is_current(self, resident: Resident) -> bool:
        return self._view.current.get(resident.name) is resident

    def refusal(self, name: Name) -> str | None:
        """Why the newest file of that name, or the one of that version, cannot be used."""
        refused = {name_of(file): reason for file, reason in list(self._refused.items())}
        versions = [one.version or 1 for one in refused if one and one.name == name.name]
        return refused.get(Name(name.name, name.version or max(versions, default=1)))

    def stale(self) -> bool:
        """Whether a file may be there that no scan has seen: names that nobody has must be cheap.

        A directory that changed shortly before it was looked at may have changed again since, and
        its own time be too coarse to tell.
        """
        changed_ns = os.stat(self.directory).st_mtime_ns
        return changed_ns != self._changed_ns or self._looked_ns - changed_ns < COARSE_NS

    def scan(self, adapters_max: int) -> None:
        """Look at the directory: read what is new, drop what is gone. At most so many are held."""
        self._max = adapters_max
        looked_ns, changed_ns = time.time_ns(), os.stat(self.directory).st_mtime_ns
        found, marks, self.folders = _listed(self.directory)
        self._looked_ns, self._changed_ns = looked_ns, changed_ns
        held = self._view.residents
        room = bool(self._crowded) and len(held) < adapters_max
        if found == self._seen and marks == self._marks and not room:
            return
        self._read_notes(marks)
        before, self._seen = self._seen, found
        self._crowded &= found.keys()
        self._refused = {file: why for file, why in self._refused.items() if file in found}
        loaded = {Path(resident.rows.file).name for resident in held.values()}
        residents: dict[str, Resident] = {}
        # What is loaded keeps its place; new files take what room is left, by their names.
        for file in sorted(found, key=lambda name: (name not in loaded, name)):
            known = before.get(file) == found[file]
            self._take(self.directory / file, known, residents)
        self._publish(residents)

    def _read_notes(self, marks: dict[str, tuple[int, int]]) -> None:
        notes: dict[str, Note] = {}
        for file, mark in marks.items():
            name = file.removesuffix(CURRENT)
            if self._marks.get(file) == mark and name in self._notes:
                notes[name] = self._notes[name]
                continue
            try:
                notes[name] = read_note(self.directory, name)
            except (OSError, ConfigError) as error:
                # It is passed over: the name alone is then the newest again.
                log.warning("event=adapter_note_refused file=%s reason=%r", file, str(error))
                notes[name] = Note()
        self._marks, self._notes = marks, notes

    def _take(self, file: Path, known: bool, residents: dict[str, Resident]) -> None:
        """Put the adapter of a file among `residents`, from memory if it was read before."""
        try:
            name, version = parse_name(file.name.removesuffix(SUFFIX))
            key = f"{name}@{version or 1}"
            held = self._view.residents.get(key)
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
        where = str(file.absolute())
        rows = Rows(adapter.digest, len(adapter.table), where, adapter.card.kind)
        resident = Resident(name.name, name.version or 1, adapter.card, rows, self._tenant)
        log.info("event=adapter_loaded adapter=%s rows=%d", resident.key, rows.count)
        self._refused.pop(file.name, None)
        return resident

    def _refuse(self, file: Path, reason: str) -> None:
        self.failures += 1
        self._refused[file.name] = reason.replace(f"{file.parent}/", "")
        log.warning("event=adapter_refused file=%s reason=%r", file.name, reason)

    def weigh(self) -> None:
        """Choose again what is current, as other adapters are ripe now."""
        self._publish(dict(self._view.residents))

    def _rank(self, resident: Resident) -> tuple[bool, int]:
        return self._ripe(resident), resident.version

    def _publish(self, residents: dict[str, Resident]) -> None:
        current: dict[str, Resident] = {}
        for resident in residents.values():
            other = current.get(resident.name)
            if other is None or self._rank(resident) > self._rank(other):
                current[resident.name] = resident
        for name, note in self._notes.items():
            if note.current is None or name not in current:
                continue
            promoted = residents.get(f"{name}@{note.current}")
            if promoted is not None:
                current[name] = promoted
            else:
                log.warning(
                    "event=adapter_current_missing adapter=%s@%d used=%s",
                    *(name, note.current, current[name].key),
                )
        for key in self._view.residents.keys() - residents.keys():
            log.info("event=adapter_dropped adapter=%s", key)
        ordered = sorted(residents.values(), key=lambda r: (r.name, r.version))
        entries = [(resident, current[resident.name] is resident) for resident in ordered]
        self._view = _View(residents, current, entries)


_Listing = tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]], tuple[str, ...]]


def _listed(directory: Path) -> _Listing:
    """The adapter files and the notes there, each with what tells that it changed, and the folders.

    In one sweep, as there may be many.
    """
    found: dict[str, tuple[int, int]] = {}
    marks: dict[str, tuple[int, int]] = {}
    folders: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                if entry.is_dir():
                    folders.append(entry.name)
                elif entry.name.endswith(SUFFIX):
                    status = entry.stat()
                    found[entry.name] = (status.st_mtime_ns, status.st_size)
                elif entry.name.endswith(CURRENT):
                    status = entry.stat()
                    # It is replaced, and by one of the same size.
                    marks[entry.name] = (status.st_mtime_ns, status.st_ino)
            except OSError:  # Gone between the listing and now.
                continue
    return found, marks, tuple(sorted(folders))
