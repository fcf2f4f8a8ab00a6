"""What lies in a directory of adapters besides them, and what each file's name means.

A note, `name.current`, says which version of a name is current. It is replaced whole, so that every
server that reads the directory sees the old one or the new one. Hidden files are uploads on their
way, and adapters that were taken away while somebody may still use them. Opens no adapter.
"""

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpt.adapters.adapter_file import SUFFIX, Name, parse_name
from gpt.errors import ConfigError, RequestError

CURRENT = ".current"
UPLOAD = ".upload-"
GONE = ".gone-"

BEFORE_MAX = 16  # Promotions that can be taken back.
NOTE_BYTES_MAX = 4096


@dataclass(frozen=True)
class Note:
    """What was decided about a name."""

    current: int | None = None  # None: the newest.
    before: tuple[int, ...] = ()  # What was current before, the last one first.
    gone: int = 0  # The highest version that was taken away: no number means two things.

    def promoted(self, version: int, last: int) -> "Note":
        if version == self.current:
            return self
        before = self.before if last == version else (last, *self.before)
        return Note(version, before[:BEFORE_MAX], self.gone)


def note_file(folder: Path, name: str) -> Path:
    return folder / f"{name}{CURRENT}"


def read_note(folder: Path, name: str) -> Note:
    """What the file says; nothing was decided where there is none."""
    path = note_file(folder, name)
    try:
        with open(path, "rb") as file:
            record = json.loads(file.read(NOTE_BYTES_MAX + 1))
    except FileNotFoundError:
        return Note()
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, Mapping):
        raise _broken(path)
    current, before, gone = (record.get(key) for key in ("current", "before", "gone"))
    numbers = [*(before if isinstance(before, list) else [None]), gone, current or 0]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise _broken(path)
    return Note(current or None, tuple(numbers[:-2]), numbers[-2])


def _broken(path: Path) -> ConfigError:
    return ConfigError(f"{path.name} is no note of a promotion; promote a version again")


def write_note(folder: Path, name: str, note: Note) -> None:
    path = note_file(folder, name)
    record = {"current": note.current, "before": list(note.before), "gone": note.gone}
    part = folder / f"{UPLOAD}{secrets.token_hex(8)}{CURRENT}"
    try:
        with open(part, "x") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync(folder)


def sync(folder: Path) -> None:
    """Bring the names in a folder to the disk: they, too, must survive a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def unloaded(file: Path) -> Path:
    """Where an adapter's file lies for a while when it was taken away."""
    return file.with_name(f"{GONE}{file.name}")


def name_of(file: str) -> Name | None:
    """Which adapter a file is by its name; None: it is none."""
    if not file.endswith(SUFFIX):
        return None
    try:
        name, version = parse_name(file.removesuffix(SUFFIX))
    except RequestError:
        return None
    return Name(name, version or 1)


def files_of(folder: Path, name: str) -> dict[int, Path]:
    """The files of one name by their versions, whether or not they can be used."""
    found: dict[int, Path] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(name):
                known = name_of(entry.name)
                if known is not None and known.name == name and known.version:
                    found[known.version] = Path(entry.path)
    return found
