"""The rows of adapters, in host memory, by digest: read from their files by a thread of its own.

A step must not wait for a disk, so a request whose adapter is not at hand waits aside until it is.
What a live request names stays; the rest is kept, the most recently used first, within a number of
bytes. An adapter is read with its digest checked. Where on the device rows stand is not known here.
"""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpt.adapters.adapter_file import open_adapter, table_width
from gpt.config import GPTConfig
from gpt.errors import AdapterError, PreambleError
from serving.adapters.files import unloaded
from serving.messages import Rows

log = logging.getLogger(__name__)

# "here": it is pinned until it is released. "coming": it is being read. "full": others must end.
State = Literal["here", "coming", "full"]

VALUE_BYTES = 4
# Of keys and values that one step brings to every rank: a few steps' must fit into what a channel
# lets wait, and large prefixes come in several.
FILL_BYTES_MAX = 16 << 20


def fill_tokens_max(network: GPTConfig) -> int:
    """How many tokens of prefixes one step may have written."""
    return max(1, FILL_BYTES_MAX // (network.prefix_width * VALUE_BYTES))


@dataclass(frozen=True)
class Loaded:
    """An adapter's rows have been read; or why not."""

    rows: Rows
    data: bytes = b""  # fp32, packed, one row after another.
    reason: str = ""


@dataclass
class _Held:
    data: bytes
    pins: int = 0


class Tables:
    """Used by one thread; `done` is called from the one that reads."""

    def __init__(self, network: GPTConfig, bytes_max: int, done: Callable[[Loaded], None]) -> None:
        self._network, self._bytes_max, self._done = network, bytes_max, done
        self._held: OrderedDict[str, _Held] = OrderedDict()  # The least recently used first.
        self._bytes = 0
        self._pinned_bytes = 0
        self._coming: set[Rows] = set()
        self._wanted: queue.SimpleQueue[Rows | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read_all, name="tables", daemon=True)

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def pin(self, rows: Rows) -> State:
        """Hold an adapter for one request, if it is here; else have it read."""
        held = self._held.get(rows.digest)
        if held is not None:
            if not held.pins:
                self._pinned_bytes += len(held.data)
            held.pins += 1
            self._held.move_to_end(rows.digest)
            return "here"
        if rows in self._coming:
            return "coming"
        # One alone may be larger than all may be together: else it would never run.
        claimed = self._pinned_bytes + sum(self._size(one) for one in self._coming)
        if claimed and claimed + self._size(rows) > self._bytes_max:
            return "full"
        self._coming.add(rows)
        self._wanted.put(rows)
        if not self._thread.is_alive():
            self._thread.start()
        return "coming"

    def release(self, digest: str) -> None:
        """One request that named it has ended."""
        held = self._held[digest]
        held.pins -= 1
        if not held.pins:
            self._pinned_bytes -= len(held.data)
            self._shrink()

    def take(self, loaded: Loaded) -> None:
        """Keep what was read. Whoever waited for it must ask for it again, before others do."""
        self._coming.discard(loaded.rows)
        if loaded.reason or loaded.rows.digest in self._held:
            return
        self._held[loaded.rows.digest] = _Held(loaded.data)
        self._bytes += len(loaded.data)
        self._shrink(spare=loaded.rows.digest)

    def data(self, digest: str) -> bytes:
        """The rows of an adapter that is pinned."""
        return self._held[digest].data

    def prefix(self, digest: str, start: int, count: int) -> bytes:
        """Some rows of a prefix that is pinned."""
        size = table_width("prefix", self._network) * VALUE_BYTES
        return self._held[digest].data[start * size : (start + count) * size]

    def close(self) -> None:
        """End the thread, when it has read what it reads."""
        self._wanted.put(None)

    def _size(self, rows: Rows) -> int:
        return rows.count * table_width(rows.kind, self._network) * VALUE_BYTES

    def _shrink(self, spare: str = "") -> None:
        """Forget what nobody names, the longest unused first, down to the limit."""
        for digest in list(self._held):
            if self._bytes <= self._bytes_max:
                return
            if not self._held[digest].pins and digest != spare:
                self._bytes -= len(self._held.pop(digest).data)

    def _read_all(self) -> None:
        while (rows := self._wanted.get()) is not None:
            try:
                self._done(Loaded(rows, self._read(rows)))
            except PreambleError as error:
                # Callers are told the file's name, which is the adapter's, and not where it lies.
                reason = str(error).replace(f"{Path(rows.file).parent}/", "")
                self._done(Loaded(rows, reason=reason))
            except Exception:
                log.exception("event=table_fault digest=%s", rows.digest[:12])
                reason = "the adapter could not be read, by a fault of this server; try again"
                self._done(Loaded(rows, reason=reason))

    def _read(self, rows: Rows) -> bytes:
        file = Path(rows.file)
        if not file.exists():  # It was taken away after the request was accepted.
            file = unloaded(file)
        adapter = open_adapter(file)
        if adapter.digest != rows.digest:
            raise AdapterError(
                f"{rows.file} is {adapter.digest[:12]} now, {rows.digest[:12]} was asked for; a "
                "version must not change: save the new one under the next number"
            )
        needed = rows.count, table_width(rows.kind, self._network)
        if adapter.card.kind != rows.kind or adapter.table.shape != needed:
            raise AdapterError(
                f"{rows.file} has a table of {tuple(adapter.table.shape)}, needed is "
                f"{needed}; use an adapter of this model"
            )
        return adapter.table.numpy().tobytes()
