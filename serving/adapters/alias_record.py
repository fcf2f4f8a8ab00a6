"""Alias record: the current version of an adapter name, and its former current versions.

The record is the file `name.current`. It is replaced by a rename, so that every server that reads
the directory sees either the old record or the new record. A change holds the lock of the folder
(`AdapterStore.change_lock`). This module does not open adapter files.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpt.errors import ConfigError
from gpt.files.atomic_files import write_atomic
from gpt.files.regular_files import open_regular_file
from serving.adapters.directory_layout import ALIAS_SUFFIX, UPLOAD_PREFIX, version_files

# Number of promotions (changes of the current version) that can be rolled back.
PREVIOUS_VERSIONS_MAX = 16
ALIAS_BYTES_MAX = 4096


@dataclass(frozen=True)
class AliasRecord:
    """A name's current version, its former current versions, and its highest unloaded version."""

    current: int | None = None  # None: the newest version.
    previous: tuple[int, ...] = ()  # Formerly current versions, the latest first.
    # Highest version that was unloaded; 0: none. Uploads get higher numbers.
    unloaded_max: int = 0

    def with_current(self, version: int, replaced: int) -> "AliasRecord":
        """Return the record after `version` has become the current version.

        `replaced`: the version that was current, if the record names none. Otherwise it is the
        record's, because another server may have promoted it since this one read the directory.
        """
        if version == self.current:
            return self
        replaced = self.current or replaced
        previous = self.previous if replaced == version else (replaced, *self.previous)
        return AliasRecord(version, previous[:PREVIOUS_VERSIONS_MAX], self.unloaded_max)


def alias_path(folder: Path, name: str) -> Path:
    return folder / f"{name}{ALIAS_SUFFIX}"


def read_alias(folder: Path, name: str) -> AliasRecord:
    """Read the alias record; return an empty record if the file does not exist."""
    path = alias_path(folder, name)
    try:
        with open_regular_file(path) as file:
            content = file.read(ALIAS_BYTES_MAX + 1)
    except FileNotFoundError:
        return AliasRecord()
    return parse_alias(content, path.name)


def parse_alias(content: bytes, file_name: str) -> AliasRecord:
    """Parse the content of an alias record; `file_name` is for the error."""
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, Mapping):
        raise _alias_error(file_name)
    current, previous, unloaded_max = (record.get(key) for key in ("current", "before", "gone"))
    versions = [*(previous if isinstance(previous, list) else [None]), unloaded_max, current or 0]
    if not all(type(version) is int and version >= 0 for version in versions):
        raise _alias_error(file_name)
    return AliasRecord(current or None, tuple(versions[:-2]), versions[-2])


def _alias_error(file_name: str) -> ConfigError:
    return ConfigError(f"{file_name} is not a valid alias record; repair or remove the file")


def write_alias(folder: Path, name: str, alias: AliasRecord) -> None:
    write_alias_content(folder, name, encode_alias(alias))


def write_alias_content(folder: Path, name: str, content: bytes) -> None:
    partial_path = folder / f"{UPLOAD_PREFIX}{secrets.token_hex(8)}{ALIAS_SUFFIX}"
    write_atomic(alias_path(folder, name), content, partial_path=partial_path)


def encode_alias(alias: AliasRecord, **fields: str) -> bytes:
    """Return the content of an alias record; readers ignore further `fields`."""
    record = {"current": alias.current, "before": list(alias.previous), "gone": alias.unloaded_max}
    return json.dumps({**record, **fields}).encode()


def selected_version(folder: Path, name: str) -> int | None:
    """Return the version that the files select for a name without a version; None: no file.

    This function opens no adapter. A server selects another version if the file of this one cannot
    be used, or if its golden examples must pass first.
    """
    versions = version_files(folder, name) if folder.is_dir() else {}
    try:
        current = read_alias(folder, name).current
    except ConfigError:  # A scan ignores an invalid record too.
        current = None
    return current if current in versions else max(versions, default=None)
