"""Object storage: makes the changes of adapters in an object store.

A version is created with `If-None-Match: *`, so that one of two uploads of the same version fails.
An alias record is replaced with `If-Match`, so that a change never overwrites the change of another
server. An unloaded version gets a tombstone (`serving.adapters.object_index`).
"""

import json
import secrets
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path

from gpt.object_store.object_store import ObjectInfo, ObjectStoreError, unconfirmed_writes
from serving.adapters.adapter_storage import AliasChangedError, StoredAlias
from serving.adapters.alias_record import ALIAS_BYTES_MAX, AliasRecord, encode_alias
from serving.adapters.object_index import OwnedName
from serving.adapters.object_mirror import AliasContent, ObjectMirror

WRITE_FIELD = "write"  # Identifies the call that has written an alias record.


class ObjectStorage:
    """The store of `mirror`."""

    def __init__(self, mirror: ObjectMirror) -> None:
        self._mirror = mirror
        self._store = mirror.store

    def lock(self, tenant: str) -> AbstractContextManager[None]:
        """Exclude nothing: the store refuses a change that was computed from a former state."""
        return nullcontext()

    def refresh(self, tenant: str, name: str) -> None:
        owned_name = OwnedName(tenant, name)
        self._mirror.refresh(owned_name)
        self._mirror.sync_copies(owned_name)

    def versions(self, tenant: str, name: str) -> Collection[int]:
        return self._mirror.objects(OwnedName(tenant, name)).versions.keys()

    def selected_version(self, tenant: str, name: str) -> int | None:
        return self._mirror.selected_version(OwnedName(tenant, name))

    def read_alias(self, tenant: str, name: str) -> StoredAlias:
        owned_name = OwnedName(tenant, name)
        alias = self._mirror.alias(owned_name)
        if not alias.etag:
            return StoredAlias(AliasRecord())
        return StoredAlias(alias.parse(owned_name), alias.etag)

    def write_alias(self, tenant: str, name: str, alias: AliasRecord, state: str) -> None:
        owned_name, token = OwnedName(tenant, name), secrets.token_hex(8)
        content, key = encode_alias(alias, **{WRITE_FIELD: token}), owned_name.alias_key
        try:
            if state:
                etag = self._store.replace(key, content, etag=state)
            else:
                etag = self._store.create(key, content)
        except ObjectStoreError as error:
            if error.problem not in ("exists", "changed"):
                raise
            # If the response of a write is lost, the request is sent again, and then finds the
            # record that it has written.
            stored_content, etag = self._read_written(key)
            if not _is_written_by(stored_content, token):
                raise AliasChangedError from None
        self._mirror.set_alias(owned_name, AliasContent(content, etag))

    def free_capacity(self, tenant: str, name: str, size: int) -> None:
        self._mirror.free_capacity(OwnedName(tenant, name), size)

    def publish(self, tenant: str, name: str, version: int, partial_path: Path) -> None:
        owned_name = OwnedName(tenant, name)
        key, size = owned_name.version_key(version), partial_path.stat().st_size
        try:
            etag = self._store.create(key, partial_path)
        except ObjectStoreError as error:
            if error.problem != "exists":
                raise
            raise FileExistsError(key) from None
        try:  # The server can serve its own upload without fetching it.
            self._mirror.folder.adopt(owned_name, version, etag, partial_path)
        except OSError as error:  # The version is published.
            self._mirror.record_failure(error)
        self._mirror.add_version(owned_name, version, _new_object(key, size, etag))
        self._mirror.sync_copies_after_change(owned_name)

    def unload(self, tenant: str, name: str, version: int) -> None:
        owned_name = OwnedName(tenant, name)
        key, etag = owned_name.tombstone_key(version), ""
        try:
            etag = self._store.create(key, b"")
        except ObjectStoreError as error:
            if error.problem != "exists":  # Another server has unloaded it at the same time.
                raise
        self._mirror.remove_version(owned_name, version, _new_object(key, 0, etag))

    def _read_written(self, key: str) -> tuple[bytes, str]:
        """Return the content and the ETag of an object that may have been written."""
        try:
            with unconfirmed_writes():
                return self._store.read(key, ALIAS_BYTES_MAX)
        except ObjectStoreError as error:
            if error.problem != "missing":
                raise
            return b"", ""


def _is_written_by(content: bytes, token: str) -> bool:
    with suppress(ValueError, RecursionError):
        record = json.loads(content)
        return isinstance(record, dict) and record.get(WRITE_FIELD) == token
    return False


def _new_object(key: str, size: int, etag: str) -> ObjectInfo:
    return ObjectInfo(key, size, etag, datetime.now(UTC))
