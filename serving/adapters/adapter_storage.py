"""Adapter storage: the versions and alias records of adapters, in a directory or an object store.

`DirectoryStorage` is a directory that one or several servers share: each change is one rename or
link, and a lock file excludes the changes of other servers. `serving.adapters.object_storage` is an
object store, where a change of an alias record names the record that it was computed from; if
another server has changed the record meanwhile, the change fails and is computed again. So no
change is lost. Tenants are folders (`registry`); the tenant "" is the directory itself. The module
checks no adapter and no permission.
"""

import os
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from gpt.adapters.change_log import FOLDER as CHANGES_FOLDER
from gpt.files.atomic_files import rename_durable
from gpt.files.file_locks import lock_file
from serving.adapters.alias_record import AliasRecord, read_alias, selected_version, write_alias
from serving.adapters.directory_layout import adapter_file_name, unloaded_path, version_files


class AliasChangedError(Exception):
    """Another server has changed the alias record since it was read."""


class StoredAlias(NamedTuple):
    """An alias record, and what identifies its state in the storage."""

    record: AliasRecord
    state: str = ""


class AdapterStorage(Protocol):
    """The versions and alias records of all tenants. All methods may wait for a disk or a network.

    They raise an OSError or an `ObjectStoreError` if the storage cannot be read or changed, and
    `read_alias` raises a ConfigError if the record is not valid.
    """

    def lock(self, tenant: str) -> AbstractContextManager[None]:
        """Exclude changes by other servers, if `write_alias` cannot detect them.

        Raises a TimeoutError if another server keeps the lock.
        """

    def refresh(self, tenant: str, name: str) -> None:
        """Read the state of a name again, so that a change is computed from the newest state."""

    def versions(self, tenant: str, name: str) -> Collection[int]:
        """Return the versions of a name, including those whose files cannot be used."""

    def selected_version(self, tenant: str, name: str) -> int | None:
        """Return the version that the stored records select for a name; None: no version."""

    def read_alias(self, tenant: str, name: str) -> StoredAlias: ...

    def write_alias(self, tenant: str, name: str, alias: AliasRecord, state: str) -> None:
        """Replace the record that was read with `state`; raise AliasChangedError if it changed."""

    def free_capacity(self, tenant: str, name: str, size: int) -> None:
        """Remove local files that are not needed, if a new one of `size` bytes exceeds a limit."""

    def publish(self, tenant: str, name: str, version: int, partial_path: Path) -> None:
        """Store a new version, and give its local file `partial_path` the name of the version.

        Raises a FileExistsError if another server has published the version.
        """

    def unload(self, tenant: str, name: str, version: int) -> None:
        """Remove a version. Its local file gets a hidden name, since requests may still use it."""


class DirectoryStorage:
    """The folders below `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def lock(self, tenant: str) -> AbstractContextManager[None]:
        """Hold a lock file beside the change log, whose folder must exist."""
        return lock_file(self._directory / CHANGES_FOLDER / f"folder-{tenant}.lock")

    def refresh(self, tenant: str, name: str) -> None:
        """Do nothing: every method reads the disk."""

    def versions(self, tenant: str, name: str) -> Collection[int]:
        return self._files(tenant, name).keys()

    def selected_version(self, tenant: str, name: str) -> int | None:
        return selected_version(self._folder(tenant), name)

    def read_alias(self, tenant: str, name: str) -> StoredAlias:
        return StoredAlias(read_alias(self._folder(tenant), name))

    def write_alias(self, tenant: str, name: str, alias: AliasRecord, state: str) -> None:
        write_alias(self._folder(tenant), name, alias)

    def free_capacity(self, tenant: str, name: str, size: int) -> None:
        """Do nothing: every file is needed."""

    def publish(self, tenant: str, name: str, version: int, partial_path: Path) -> None:
        path = self._folder(tenant) / adapter_file_name(name, version)
        rename_durable(partial_path, path, overwrite=False)

    def unload(self, tenant: str, name: str, version: int) -> None:
        hide_file(self._files(tenant, name)[version])

    def _files(self, tenant: str, name: str) -> dict[int, Path]:
        folder = self._folder(tenant)
        return version_files(folder, name) if folder.is_dir() else {}

    def _folder(self, tenant: str) -> Path:
        return self._directory / tenant


def hide_file(file: Path) -> None:
    """Give the file of an unloaded version a hidden name. Requests may still use it."""
    hidden_path = unloaded_path(file)
    rename_durable(file, hidden_path)
    os.utime(hidden_path)  # Its age is measured from this time.
