"""Object index: the versions, alias records and tombstones in a listing of an object store.

A key is `[TENANT/]FILE`, with the names of the files of an adapter directory
(`serving.adapters.directory_layout`), so a directory can be copied into a store as it is. A
tombstone `NAME@VERSION.unloaded` marks an unloaded version: its object is removed later, because
an upload of the same version that is still in progress must find the key in use. This module sends
no requests.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpt.adapters.adapter_file import SUFFIX, parse_name
from gpt.adapters.card import NAME_PATTERN
from gpt.errors import RequestError
from gpt.object_store.object_store import ObjectInfo
from serving.adapters.directory_layout import ALIAS_SUFFIX, adapter_file_name, parse_file_name

TOMBSTONE_SUFFIX = ".unloaded"


class OwnedName(NamedTuple):
    """The name of an adapter of a tenant; the tenant "" owns the shared adapters."""

    tenant: str
    name: str

    @property
    def folder(self) -> str:
        """The beginning of the keys of the tenant's objects."""
        return f"{self.tenant}/" if self.tenant else ""

    def version_key(self, version: int) -> str:
        return f"{self.folder}{adapter_file_name(self.name, version)}"

    def tombstone_key(self, version: int) -> str:
        return f"{self.folder}{self.name}@{version}{TOMBSTONE_SUFFIX}"

    @property
    def alias_key(self) -> str:
        return f"{self.folder}{self.name}{ALIAS_SUFFIX}"

    @property
    def unversioned_key(self) -> str:
        """The key of a file without a version number, which is version 1."""
        return f"{self.folder}{self.name}{SUFFIX}"


@dataclass(frozen=True)
class NameObjects:
    """The objects of a name."""

    stored: Mapping[int, ObjectInfo] = field(default_factory=dict)  # Also unloaded versions.
    alias: ObjectInfo | None = None
    tombstones: Mapping[int, ObjectInfo] = field(default_factory=dict)

    @property
    def versions(self) -> Mapping[int, ObjectInfo]:
        if not self.tombstones:
            return self.stored
        return {
            version: entry
            for version, entry in self.stored.items()
            if version not in self.tombstones
        }


NO_OBJECTS = NameObjects()


def build_index(entries: Iterable[ObjectInfo]) -> dict[OwnedName, NameObjects]:
    """Return the objects of each name in a listing; other keys are ignored."""
    stored: dict[OwnedName, dict[int, ObjectInfo]] = {}
    tombstones: dict[OwnedName, dict[int, ObjectInfo]] = {}
    aliases: dict[OwnedName, ObjectInfo] = {}
    for entry in entries:
        tenant, separator, file = entry.key.rpartition("/")
        if separator and not NAME_PATTERN.fullmatch(tenant):
            continue
        if file.endswith(SUFFIX):
            adapter_name = parse_file_name(file)
            if adapter_name is not None:
                owned_name = OwnedName(tenant, adapter_name.name)
                stored.setdefault(owned_name, {}).setdefault(adapter_name.version or 1, entry)
        elif file.endswith(ALIAS_SUFFIX):
            name = file.removesuffix(ALIAS_SUFFIX)
            if NAME_PATTERN.fullmatch(name):
                aliases[OwnedName(tenant, name)] = entry
        elif file.endswith(TOMBSTONE_SUFFIX):
            try:
                name, version = parse_name(file.removesuffix(TOMBSTONE_SUFFIX))
            except RequestError:
                continue
            tombstones.setdefault(OwnedName(tenant, name), {})[version or 1] = entry
    return {
        owned_name: NameObjects(
            stored.get(owned_name, {}), aliases.get(owned_name), tombstones.get(owned_name, {})
        )
        for owned_name in stored.keys() | aliases.keys() | tombstones.keys()
    }
