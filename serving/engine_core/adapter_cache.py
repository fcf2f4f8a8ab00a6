"""Adapter cache: adapters' rows in host memory by digest, read by a thread, evicted LRU.

A step must not wait for a disk, so a request whose adapter is not in the cache waits until a thread
of the adapter reader has read the adapter. Adapters of live requests are pinned. The other adapters
stay in the cache until it exceeds its limit in bytes; then the least recently used ones are
evicted. The digest is checked when an adapter is read, unless its file is the one that was checked
when it was loaded. Rows are embeddings, or the keys and values of prefix adapters. The scheduler,
not this module, decides where adapters are stored on the device: in the adapter pool or in KV
blocks.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from gpt.adapters.adapter_file import (
    BUFFERS,
    Adapter,
    open_adapter,
    open_verified_adapter,
    table_width,
)
from gpt.config import GPTConfig
from gpt.errors import AdapterError, PreambleError
from gpt.files.buffer_pool import fits
from gpt.files.file_identity import file_identity
from gpt.linear_adapter import LinearAdapter
from serving.adapters.directory_layout import unloaded_path
from serving.config import AdapterConfig
from serving.engine_core.adapter_reader import AdapterReader, AdapterReadResult
from serving.messages import AdapterRef, LinearWrite, TensorBytes

log = logging.getLogger(__name__)

# "pinned": the adapter is cached, and pinned now. "reading": it is queued or being read. "full": it
# does not fit into the cache beside the adapters that are pinned or being read, so its sequence
# waits until other sequences end.
PinState = Literal["pinned", "reading", "full"]

VALUE_BYTES = 4  # Rows are fp32.
# Limit, in bytes, of the keys and values of prefix adapters in one step message. A large prefix is
# written in several steps, because the messages of a few steps must fit into the outbox of the
# socket to each rank (`Channel` in `serving.ranks.message_socket`). Embeddings have no such limit:
# one step writes all rows of an adapter.
PREFIX_WRITE_BYTES_MAX = 16 << 20


def prefix_write_tokens_max(model_config: GPTConfig) -> int:
    """The number of prefix-adapter tokens that the scheduler may write in one step."""
    return max(1, PREFIX_WRITE_BYTES_MAX // (model_config.prefix_width * VALUE_BYTES))


@dataclass
class _CachedRows:
    data: bytes
    linears: tuple[tuple[str, LinearAdapter], ...]
    nbytes: int
    pins: int = 0


class AdapterCache:
    """Adapter rows by digest.

    The engine loop calls the methods from its thread, except `prefetch`. A thread of the adapter
    reader calls `on_read` after each read; the engine loop then calls `insert`, and `pin` for each
    sequence that waits.
    """

    def __init__(
        self,
        model_config: GPTConfig,
        bytes_max: int,
        on_read: Callable[[AdapterReadResult], None],
        *,
        read_limit_s: float = AdapterConfig.adapter_read_s,
    ) -> None:
        self._model_config = model_config
        self._bytes_max = bytes_max
        # Guards `_cache`, its sizes and `_reading`. Only the loop's thread changes `_cache`, and
        # reads it without the lock.
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, _CachedRows] = OrderedDict()  # Least recently used first.
        self._cached_bytes = 0
        self._pinned_bytes = 0
        self._reading: set[AdapterRef] = set()
        self._reader = AdapterReader(self._read, on_read, read_limit_s)

    def pin(self, adapter_ref: AdapterRef) -> PinState:
        """Pin a cached adapter for one sequence; queue an adapter that is not cached for reading.

        If the state is not "pinned", the caller must call this again when an adapter was read or
        unpinned. No order is kept: smaller adapters may delay a large one that does not fit yet.
        """
        with self._lock:
            cached_rows = self._cache.get(adapter_ref.digest)
            if cached_rows is None:
                return self._begin_read(adapter_ref)
            if not cached_rows.pins:
                self._pinned_bytes += cached_rows.nbytes
            cached_rows.pins += 1
            self._cache.move_to_end(adapter_ref.digest)
            return "pinned"

    def prefetch(self, adapter_ref: AdapterRef) -> None:
        """Queue an adapter for reading before its sequence is pinned; may be called in any thread.

        The engine loop handles messages between steps; the read runs during the current step.
        """
        with self._lock:
            if adapter_ref.digest not in self._cache:
                self._begin_read(adapter_ref)

    def _begin_read(self, adapter_ref: AdapterRef) -> PinState:
        """Queue an adapter for reading if it fits. The caller must hold the lock."""
        if adapter_ref in self._reading:
            return "reading"
        # An adapter that is larger than the limit is read when no other adapter is pinned or being
        # read. If it were refused, its requests could never run.
        claimed_bytes = self._pinned_bytes + sum(
            self._size_bytes(pending) for pending in self._reading
        )
        if claimed_bytes and claimed_bytes + self._size_bytes(adapter_ref) > self._bytes_max:
            return "full"
        self._reading.add(adapter_ref)
        self._reader.request(adapter_ref)
        return "reading"

    def unpin(self, digest: str) -> None:
        """Remove the pin of one sequence, which has ended."""
        with self._lock:
            cached_rows = self._cache[digest]
            cached_rows.pins -= 1
            if not cached_rows.pins:
                self._pinned_bytes -= cached_rows.nbytes
                self._evict()

    def insert(self, read_result: AdapterReadResult) -> None:
        """Cache the rows that were read; after a failed read, cache nothing.

        The rows are not pinned yet, and the next `unpin` or `insert` may evict them. Before that,
        the caller must call `pin` for the sequences that wait.
        """
        with self._lock:
            self._reading.discard(read_result.adapter_ref)
            if read_result.reason or read_result.adapter_ref.digest in self._cache:
                return
            nbytes = len(read_result.data) + read_result.adapter_ref.linear_bytes
            self._cache[read_result.adapter_ref.digest] = _CachedRows(
                read_result.data, read_result.linears, nbytes
            )
            self._cached_bytes += nbytes
            self._evict(protected_digest=read_result.adapter_ref.digest)
            if BUFFERS.lacks(read_result.adapter_ref.linear_bytes):
                self._evict_for_buffer(read_result.adapter_ref)

    def pinned_rows(self, digest: str) -> bytes:
        """The rows of a pinned adapter."""
        return self._cache[digest].data

    def pinned_linears(self, digest: str, first: int, count: int) -> list[LinearWrite]:
        """`count` adapter weights of a pinned adapter, from the change `first` on."""
        # The cache does not keep these objects: a full garbage collection would scan hundreds for
        # each adapter, while no step runs.
        return [
            LinearWrite(key, linear.scale, _tensor_bytes(linear))
            for key, linear in self._cache[digest].linears[first : first + count]
        ]

    def pinned_prefix_rows(self, digest: str, start: int, count: int) -> bytes:
        """`count` rows of a pinned prefix adapter, from row `start` on."""
        row_bytes = table_width("prefix", self._model_config) * VALUE_BYTES
        return self._cache[digest].data[start * row_bytes : (start + count) * row_bytes]

    def close(self) -> None:
        """Let the threads of the reader end after they have read the queued adapters."""
        self._reader.close()

    def _size_bytes(self, adapter_ref: AdapterRef) -> int:
        row_bytes = table_width(adapter_ref.kind, self._model_config) * VALUE_BYTES
        return adapter_ref.row_count * row_bytes + adapter_ref.linear_bytes

    def _evict(self, protected_digest: str = "") -> None:
        """Evict adapters, least recently used first, until the limit is met.

        Pinned adapters and `protected_digest` are not evicted. The caller must hold the lock.
        """
        for digest in list(self._cache):
            if self._cached_bytes <= self._bytes_max:
                return
            if not self._cache[digest].pins and digest != protected_digest:
                self._cached_bytes -= self._cache.pop(digest).nbytes

    def _evict_for_buffer(self, protected: AdapterRef) -> None:
        """Evict the least recently used adapter whose buffer fits an adapter like `protected`.

        Until the cache is full, each adapter needs new memory, in which a thread prefaults the
        next buffers. When it is late, a read would wait for page faults, and so would the steps
        beside it. The caller must hold the lock.
        """
        for digest, cached_rows in self._cache.items():
            linear_bytes = cached_rows.nbytes - len(cached_rows.data)
            is_evictable = not cached_rows.pins and digest != protected.digest
            if is_evictable and fits(linear_bytes, protected.linear_bytes):
                self._cached_bytes -= self._cache.pop(digest).nbytes
                return

    def _read(self, adapter_ref: AdapterRef) -> AdapterReadResult:
        try:
            read_result = self._read_unchanged(adapter_ref) or self._read_and_check(adapter_ref)
            BUFFERS.prefault_next()
            return read_result
        except PreambleError as error:
            # The client receives this text. The client may see the file's name, which is the
            # adapter's name, but not the folder.
            reason = str(error).replace(f"{Path(adapter_ref.file).parent}/", "")
            return AdapterReadResult(adapter_ref, reason=reason)
        except Exception:
            log.exception("event=table_fault digest=%s", adapter_ref.digest[:12])
            reason = "the adapter could not be read because of an internal error; try again"
            return AdapterReadResult(adapter_ref, reason=reason)

    def _read_unchanged(self, adapter_ref: AdapterRef) -> AdapterReadResult | None:
        """Read a file without its digest; None if it may not be the one that was checked before.

        The digest takes most of the time of a read, in which a step has fewer cores.
        """
        file = Path(adapter_ref.file)
        with suppress(OSError, PreambleError):
            if adapter_ref.identity and file_identity(file) == adapter_ref.identity:
                adapter = open_verified_adapter(file)
                self._check(adapter, adapter_ref)
                read_result = _copy(adapter_ref, adapter)
                # The file may have been replaced after the first comparison.
                if file_identity(file) == adapter_ref.identity:
                    return read_result
        return None

    def _read_and_check(self, adapter_ref: AdapterRef) -> AdapterReadResult:
        file = Path(adapter_ref.file)
        if not file.exists():  # Unloaded (renamed) after the request was accepted.
            file = unloaded_path(file)
        adapter = open_adapter(file)
        self._check(adapter, adapter_ref)
        return _copy(adapter_ref, adapter)

    def _check(self, adapter: Adapter, adapter_ref: AdapterRef) -> None:
        """Refuse an adapter that is not the one of the reference."""
        if adapter.digest != adapter_ref.digest:
            raise AdapterError(
                f"{adapter_ref.file} now has digest {adapter.digest[:12]}, but the request needs "
                f"{adapter_ref.digest[:12]}; versions are immutable: save the changed adapter as a "
                "new version"
            )
        expected_shape = adapter_ref.row_count, table_width(adapter_ref.kind, self._model_config)
        if adapter.card.kind != adapter_ref.kind or (
            adapter_ref.row_count and adapter.table.shape != expected_shape
        ):
            raise AdapterError(
                f"{adapter_ref.file} has a table of shape {tuple(adapter.table.shape)}, but "
                f"{expected_shape} is needed; use an adapter of this model"
            )


def _copy(adapter_ref: AdapterRef, adapter: Adapter) -> AdapterReadResult:
    linears = tuple(sorted(adapter.linears.items()))
    return AdapterReadResult(adapter_ref, adapter.table.numpy().tobytes(), linears)


def _tensor_bytes(linear: LinearAdapter) -> dict[str, TensorBytes]:
    return {
        # Without a copy: a new copy costs page faults, in which a step has fewer cores.
        name: TensorBytes(
            list(tensor.shape),
            cast(bytearray, tensor.contiguous().numpy().reshape(-1).data.cast("B")),
        )
        for name, tensor in linear.tensors()
    }
