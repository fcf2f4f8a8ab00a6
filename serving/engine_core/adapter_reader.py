"""Adapter reader: reads adapter files in threads, so that a slow file does not delay the others.

Normally one thread reads the files in the order of the requests. If a file takes longer than
`STALL_S`, for example because its disk does not answer, another thread reads the next files. If a
request is not completed within its time limit, its result is an error text; the thread that reads
the file cannot be interrupted, and ends when the disk answers. The module does not know the format
of the files.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gpt.linear_adapter import LinearAdapter
from serving.messages import AdapterRef

# A thread whose file takes longer than this is replaced by another thread.
STALL_S = 1.0
READ_THREADS_MAX = 16


@dataclass(frozen=True)
class AdapterReadResult:
    """The content of an adapter, or the reason why it could not be read."""

    adapter_ref: AdapterRef
    data: bytes = b""  # The rows in fp32, contiguous.
    linears: tuple[tuple[str, LinearAdapter], ...] = ()  # In the order of their keys.
    reason: str = ""  # Empty: the adapter was read.


class AdapterReader:
    """Reads adapters with `read`, and calls `on_read` once for each request, in a thread."""

    def __init__(
        self,
        read: Callable[[AdapterRef], AdapterReadResult],
        on_read: Callable[[AdapterReadResult], None],
        limit_s: float,
    ) -> None:
        """`limit_s`: time limit of a request, after which its result is an error text."""
        self._read = read
        self._on_read = on_read
        self._limit_s = limit_s
        self._changed = threading.Condition()  # Guards all attributes below.
        self._queue: deque[AdapterRef] = deque()
        self._requested_at: dict[AdapterRef, float] = {}  # Requests without a result.
        self._began_at: dict[AdapterRef, float] = {}  # Reads that run in threads.
        self._stalled: set[AdapterRef] = set()  # Reads whose threads were replaced.
        self._is_started = False
        self._is_closed = False

    def request(self, adapter_ref: AdapterRef) -> None:
        """Read an adapter; a request during a read of the same adapter gets that read's result."""
        with self._changed:
            self._requested_at[adapter_ref] = time.monotonic()
            if adapter_ref not in self._began_at:
                self._queue.append(adapter_ref)
            if not self._is_started:
                self._is_started = True
                self._start_thread(self._read_queue)
                self._start_thread(self._watch)
            self._changed.notify_all()

    def close(self) -> None:
        """Let the threads end after they have read the queued adapters."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _start_thread(self, function: Callable[[], None]) -> None:
        threading.Thread(target=function, name="tables", daemon=True).start()

    def _read_queue(self) -> None:
        """Read the queued adapters until the reader is closed, or this thread is replaced."""
        is_replaced = False
        while not is_replaced:
            with self._changed:
                while not self._queue:
                    if self._is_closed:
                        return
                    self._changed.wait()
                adapter_ref = self._queue.popleft()
                self._began_at[adapter_ref] = time.monotonic()
            read_result = self._read(adapter_ref)
            with self._changed:
                del self._began_at[adapter_ref]
                is_replaced = adapter_ref in self._stalled
                self._stalled.discard(adapter_ref)
                is_requested = self._requested_at.pop(adapter_ref, None) is not None
            if is_requested:
                self._on_read(read_result)

    def _watch(self) -> None:
        """Replace threads whose reads are stalled, and end requests at their time limit."""
        while True:
            with self._changed:
                if self._is_closed:
                    return
                now = time.monotonic()
                self._replace_stalled(now)
                expired = self._remove_expired(now)
                if not expired:
                    self._changed.wait(STALL_S / 2 if self._requested_at else None)
            for adapter_ref in expired:
                reason = f"its file could not be read within {self._limit_s:g} s; try again later"
                self._on_read(AdapterReadResult(adapter_ref, reason=reason))

    def _replace_stalled(self, now: float) -> None:
        for adapter_ref, began_at in self._began_at.items():
            if (
                adapter_ref not in self._stalled
                and now - began_at >= STALL_S
                and len(self._began_at) < READ_THREADS_MAX
            ):
                self._stalled.add(adapter_ref)
                self._start_thread(self._read_queue)

    def _remove_expired(self, now: float) -> list[AdapterRef]:
        expired = [
            adapter_ref
            for adapter_ref, requested_at in self._requested_at.items()
            if now - requested_at >= self._limit_s
        ]
        for adapter_ref in expired:
            del self._requested_at[adapter_ref]
            with suppress(ValueError):  # It is not queued, but being read.
                self._queue.remove(adapter_ref)
        return expired
