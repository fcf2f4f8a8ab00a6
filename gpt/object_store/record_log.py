"""Object record log: a log whose records are objects in a store.

Each append creates one object with its records as JSON lines. Its key has the time of the append,
so the keys sort by time. An object is never changed or deleted by this module; a lifecycle rule of
the bucket can delete old ones.
"""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpt.object_store.object_store import ObjectStore, ObjectStoreError

OBJECT_BYTES_MAX = 16 << 20  # A reader skips what is behind this size.


@dataclass(frozen=True)
class ObjectRecordLog:
    """The objects of the folder `folder`, which has no other objects."""

    store: ObjectStore
    folder: str

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Create an object with the records; raise an ObjectStoreError if that is impossible."""
        lines = b"".join(
            json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records
        )
        if not lines:
            return
        time = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        try:
            self.store.create(f"{self.folder}/{time}-{secrets.token_hex(4)}.jsonl", lines)
        except ObjectStoreError as error:
            # `may_be_written` is false: it is about the change, which is made after its record.
            raise ObjectStoreError(str(error), error.problem) from None

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield all records, the oldest first; damaged lines are skipped."""
        for entry in self.store.list(self.folder):
            content, _ = self.store.read(entry.key, OBJECT_BYTES_MAX)
            for line in content.splitlines():
                with suppress(ValueError, RecursionError):
                    record = json.loads(line)
                    if isinstance(record, dict):
                        yield record
