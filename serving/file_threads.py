"""File threads: daemon threads for file accesses of the front end that may not answer.

A disk or a network file system may not answer for hours, and Python cannot interrupt a thread that
waits for it. The default threads of asyncio are unsuitable for such accesses: a few of them would
take all threads, and a process does not exit before its default threads end. Here a caller waits
for a limited time, an owner (for example a tenant) has a limited share of the threads, and the exit
does not wait. The module does not know which files are read or written.
"""

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from serving.logs import LogThrottle
from serving.request import UnavailableError

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS_MAX = 32
OWNER_THREADS_MAX = 4
# Owners that are not tenants. A tenant's name has no slash.
POLL_OWNER, TOKENS_OWNER, TLS_OWNER, FLIGHT_OWNER = "/poll", "/tokens", "/tls", "/flight"
CHANGE_LOG_OWNER, MIRROR_OWNER = "/changes", "/mirror"
DROPPED_LOG_PERIOD_S = 60.0  # Minimum time between two warnings about dropped accesses.


@dataclass(frozen=True, eq=False)
class _Access:
    """A file access that waits for a thread or runs in one."""

    owner: str
    function: Callable[[], Any]
    future: "Future[Any]"


class FileThreads:
    """Runs file accesses, each in a new daemon thread, at most `OWNER_THREADS_MAX` per owner."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: the time that a caller waits for an access, if it gives no other limit."""
        self.limit_s = limit_s
        self._lock = threading.Lock()
        self._waiting: deque[_Access] = deque()
        self._running: Counter[str] = Counter()  # Accesses in threads, by owner.
        self._log_throttle = LogThrottle(DROPPED_LOG_PERIOD_S)

    async def run(self, owner: str, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`; raise UnavailableError if it takes longer than the limit.

        A call that runs continues in its thread; a call that waits for a thread is dropped.
        """
        return await self.result(self.submit(owner, function, *args))

    async def result(
        self,
        access: "Future[T]",
        limit_s: float | None = None,
        running_limit_s: float | None = None,
    ) -> T:
        """Return the result of a submitted access; raise UnavailableError if it takes too long.

        An access that has no thread after `limit_s` (default: the constructor's) is dropped. An
        access that has a thread continues; it is waited for up to `running_limit_s` (default:
        `limit_s`). If this method raises an error, or the task of the caller is cancelled,
        `access.cancelled()` tells whether the access was dropped, and so will never run.
        """
        limit_s = self.limit_s if limit_s is None else limit_s
        result = asyncio.wrap_future(access)
        try:
            await asyncio.wait([result], timeout=limit_s)
            if not access.done() and not access.cancel() and running_limit_s is not None:
                await asyncio.wait([result], timeout=max(running_limit_s - limit_s, 0.0))
                limit_s = max(running_limit_s, limit_s)
            if access.done() and not access.cancelled():
                return await result
            raise UnavailableError(
                f"the server's storage did not answer within {limit_s:g} s; try again later",
                "STORAGE_TIMEOUT",
            )
        finally:
            result.cancel()
            if access.cancel():
                self._drop_cancelled()

    async def run_to_end(self, owner: str, function: Callable[[], object]) -> None:
        """Call `function`, and wait for its end, but not longer than the limit.

        The call is never dropped, not even if the task of the caller is cancelled. An error of the
        call is logged.
        """
        await self.wait(self.submit(owner, _call_logged, function))

    async def wait(self, access: "Future[None]") -> None:
        """Wait for the end of a submitted access, but not longer than the limit."""
        await asyncio.wait([asyncio.wrap_future(access)], timeout=self.limit_s)

    def submit_logged(
        self, owner: str, function: Callable[[], object], waiting_max: int
    ) -> "Future[None]":
        """Like `submit`, but an error of the call is logged, and the number of calls is bounded.

        If `waiting_max` accesses of the owner wait for a thread, the call is dropped, which is
        logged too.
        """
        with self._lock:
            waiting = sum(access.owner == owner for access in self._waiting)
        if waiting < waiting_max:
            return self.submit(owner, _call_logged, function)
        if (suppressed := self._log_throttle.claim_line(owner)) is not None:
            log.warning("event=file_access_dropped owner=%s suppressed=%d", owner, suppressed)
        dropped: Future[None] = Future()
        dropped.cancel()
        return dropped

    def submit(self, owner: str, function: Callable[..., T], *args: Any) -> "Future[T]":
        """Call `function(*args)` in a thread as soon as the owner has a free one."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append(_Access(owner, partial(function, *args), future))
            self._start_waiting()
        return future

    def _start_waiting(self) -> None:
        """Start the accesses whose owners have a free thread. The caller holds the lock."""
        for access in list(self._waiting):
            if self._running.total() >= THREADS_MAX:
                return
            if self._running[access.owner] < OWNER_THREADS_MAX:
                self._waiting.remove(access)
                self._running[access.owner] += 1
                threading.Thread(
                    target=self._run_access, args=(access,), name="files", daemon=True
                ).start()

    def _run_access(self, access: _Access) -> None:
        try:
            if access.future.set_running_or_notify_cancel():
                access.future.set_result(access.function())
        except BaseException as error:
            access.future.set_exception(error)
        finally:
            with self._lock:
                self._running -= Counter([access.owner])
                self._start_waiting()

    def _drop_cancelled(self) -> None:
        """Drop waiting accesses whose callers have stopped waiting."""
        with self._lock:
            self._waiting = deque(
                access for access in self._waiting if not access.future.cancelled()
            )


def _call_logged(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:
        log.exception("event=file_access_failed")
