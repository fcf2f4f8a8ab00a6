"""Front: what the calls of every wire share: who may come in, a clock, a count, one bad end.

A surface turns its protocol's words into an `Ask` and pieces into answers; all between is here, so
that a limit, a metric or a reason is the same on each. Knows no protocol and no model.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from gpt.errors import PreambleError
from serving.admission.auth import Access, Caller
from serving.admission.rate_limits import Ordered, Quotas, Tab
from serving.engine.stream import Stream
from serving.frontend.call_origin import NOWHERE, Came
from serving.logs import Sparing
from serving.request import Ask, Piece, RefusedError, UnavailableError
from serving.service.error_reasons import REASONS, Reason, reason_of
from serving.service.metrics import Metrics
from serving.service.service import Service

if TYPE_CHECKING:
    from serving.frontend.tracing import Trace, Traces

log = logging.getLogger(__name__)

State = Literal["loading", "serving", "draining"]

# Of HTTP: overload, and faults of ours. Such ends are logged; the caller's own are counted only.
LOGGED = (429, 500, 503)


class Ended(Exception):
    """A call that ends badly, as every wire says it in its own way."""

    def __init__(
        self, reason: Reason, message: str, field: str | None = None, retry_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason, self.field = reason, field
        self.retry_s = reason.retry_s if retry_s is None else retry_s


class Call:
    """One call on its way. `deadline` is on the monotonic clock."""

    def __init__(
        self, front: "Front", wire: str, caller: Caller, deadline: float | None, came: Came
    ) -> None:
        self.front, self.wire, self.caller, self.deadline = front, wire, caller, deadline
        self.came = came
        self.trace: Trace | None = None  # None: nobody wants any.
        self.arrival = time.monotonic()
        self._silent = True  # No token came yet.
        self.tab: Tab | None = None  # From when it was let in.
        self.stalled = False  # Whether its client took nothing for too long.
        self.task = asyncio.current_task()
        self._sending: float | None = None  # Since when a part of the answer waits for its client.
        self._alarm: asyncio.TimerHandle | None = None
        self.accepted = False  # Whether something of it was.
        self._ordered: dict[Stream, Ordered] = {}  # What of it goes on.
        self._whole: set[Stream] = set()  # Those whose pieces nobody sees one by one.

    @property
    def service(self) -> Service:
        if self.front.service is None:
            raise UnavailableError(
                "the model is still being loaded; try again in a moment", "LOADING"
            )
        return self.front.service

    def part(self, method: str) -> AbstractAsyncContextManager["Call"]:
        """One of many requests that come on this call: a clock, a count, an end of its own."""
        came = Came(method, self.came.headers)
        return self.front.call(self.wire, method, None, self.deadline, within=self, came=came)

    @property
    def names(self) -> tuple[str, str]:
        """What it is called where somebody looks for it: by its caller, and among traces."""
        came = self.came
        return came.label, came.trace_id if self.trace is None else self.trace.id

    async def start(self, ask: Ask, *, whole: bool = False) -> Stream:
        """Accept what is asked, or refuse it. It ends with this call at the latest."""
        ask = replace(ask, tenant=self.caller.tenant)
        assert self.tab is not None, "nobody was let in"
        ordered, began = self.tab.begin(), time.monotonic()
        try:
            stream = await self.service.start(
                ask, self.deadline, whole=whole, charge=ordered.charge
            )
        except BaseException:
            ordered.close(void=True)
            raise
        self.accepted = True
        self._ordered[stream] = ordered
        if whole:
            self._whole.add(stream)
        if self.trace is not None:
            self.trace.admitted(began)
        self.front.metrics.accepted(stream.request.answers)
        return stream

    async def pieces(self, stream: Stream) -> AsyncIterator[Piece]:
        """A stream's pieces, counted and timed."""
        timing = _Timing(self, stream, whole=stream in self._whole)
        ordered = self._ordered[stream]
        try:
            async for piece in stream:
                timing.took(piece)
                ordered.made += len(piece.token_ids)
                yield piece
        finally:
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        stream.close()
        self._whole.discard(stream)
        if (ordered := self._ordered.pop(stream, None)) is not None:
            ordered.close()
            self.front.metrics.spent(stream.spent)
            if self.trace is not None:
                self.trace.answered(self.service.name, stream, ordered.made)

    async def send(self, sending: Awaitable[object]) -> None:
        """A part of the answer, to a client that has only so long to take some of it."""
        self._sending = time.monotonic()
        if self._alarm is None:  # One for the whole call: most parts are taken at once.
            self._alarm = asyncio.get_running_loop().call_later(
                self.front.slow_reader_s, self._look
            )
        try:
            await sending
        finally:
            self._sending = None

    def _look(self) -> None:
        """Whether the client takes what is sent; if it does not, the call ends here."""
        loop, patience_s = asyncio.get_running_loop(), self.front.slow_reader_s
        waited_s = 0.0 if self._sending is None else time.monotonic() - self._sending
        if waited_s < patience_s:
            self._alarm = loop.call_later(patience_s - waited_s, self._look)
        elif self.task is not None:
            self.stalled = True
            self.task.cancel()

    def first(self, now: float) -> None:
        """A token came; the first one is timed."""
        if self._silent:
            self._silent = False
            self.front.metrics.first_token.labels(self.wire).observe(now - self.arrival)

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        for stream in list(self._ordered):
            self._end(stream)
        if self.tab is not None:
            self.tab.close()


class _Timing:
    """Counts and times of one stream. A piece costs the same however many tokens it has."""

    def __init__(self, call: Call, stream: Stream, *, whole: bool) -> None:
        self._call, self._whole = call, whole
        self._answers = stream.request.answers
        self._last: dict[int, float] = {}  # When each answer's last token came,
        self._made = [0] * len(self._answers)  # and how many have.

    def took(self, piece: Piece) -> None:
        metrics, tokens = self._call.front.metrics, len(piece.token_ids)
        if tokens:
            now = time.monotonic()
            self._call.first(now)
            metrics.generated_tokens.inc(tokens)
            if not self._whole:
                metrics.message_tokens.observe(tokens)
            last = self._last.get(piece.index)
            # What came along with an answer's first token took no further time.
            gaps = tokens if last is not None else tokens - 1
            if gaps:
                metrics.next_token.observe((now - (last or now)) / gaps, gaps)
            self._last[piece.index] = now
            self._made[piece.index] += tokens
        if piece.cached_tokens:
            metrics.cached_tokens.inc(piece.cached_tokens)
        if piece.finish is not None:
            answer = self._answers[piece.index]
            metrics.answered(answer, piece.finish, self._made[piece.index])


class Front:
    """All surfaces' way to a service, which comes when it is loaded."""

    def __init__(
        self,
        metrics: Metrics,
        access: Access,
        *,
        calls_max: int | None = None,
        slow_reader_s: float = 30.0,
    ) -> None:
        self.metrics, self.access = metrics, access
        self.calls_max, self.slow_reader_s = calls_max, slow_reader_s
        self._quotas = Quotas()
        self.traces: Traces | None = None  # None: nobody wants any.
        self.state: State = "loading"
        self.service: Service | None = None
        self.stop = asyncio.Event()  # Set: the server is to drain and end.
        self._calls = 0
        self._sparing = Sparing()
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, service: Service) -> None:
        self.service, self.state = service, "serving"

    async def drained(self) -> None:
        """Refuse calls from now on; returns when the last one that was accepted has ended."""
        self.state = "draining"
        await self._idle.wait()

    @asynccontextmanager
    async def call(
        self,
        wire: str,
        method: str,
        credential: str | None = None,
        deadline: float | None = None,
        *,
        draining: bool = False,
        within: Call | None = None,
        came: Came = NOWHERE,
    ) -> AsyncIterator[Call]:
        """Around each call: who calls, its count, its time, and an `Ended` if it ends badly.

        `draining`: it is answered then too. `within`: it is a part of that call, let in with it.
        """
        call = Call(self, wire, Caller(), deadline, came)
        reason: Reason | None = None
        self._enter()
        try:
            if self.traces is not None:
                call.trace = self.traces.begin(came, within.trace if within else None)
            call.caller = caller = within.caller if within else self.access.caller(credential)
            if not draining:
                self._check_room()
            call.tab = within.tab if within else Tab(self._quotas.of(caller.tenant, caller.limits))
            yield call
        except PreambleError as error:
            ended = ended_by(error)
            reason = ended.reason
            raise ended from None
        except Ended as said:  # By the surface itself.
            reason = said.reason
            raise
        except asyncio.CancelledError:
            if call.stalled:
                assert call.task is not None
                call.task.uncancel()
                slow = _slow(self.slow_reader_s)
                reason = slow.reason
                raise slow from None
            late = deadline is not None and time.monotonic() >= deadline
            reason = REASONS["DEADLINE_PASSED" if late else "CANCELLED"]
            raise
        except Exception:
            names = call.names
            log.exception(
                "event=call_failed wire=%s method=%s label=%r trace=%r", wire, method, *names
            )
            reason = REASONS["INTERNAL"]
            message = "a fault of this server ended the call; its log says why"
            raise Ended(reason, message) from None
        finally:
            if within is not None:
                call.tab = None  # It is not this one's to close.
            call.close()
            self._leave()
            self._count(call, method, reason)

    def _count(self, call: Call, method: str, reason: Reason | None) -> None:
        """A call ended: well, or for a reason."""
        took_s, labels = time.monotonic() - call.arrival, (call.wire, method)
        code = "OK" if reason is None else reason.code.name
        self.metrics.requests.labels(*labels, code).inc()
        self.metrics.duration.labels(*labels, code).observe(took_s)
        if call.trace is not None:
            call.trace.end(call.came, call.caller.tenant, reason)
        if reason is None:
            return
        self.metrics.ended(reason, accepted=call.accepted)
        if reason.status in LOGGED and (unsaid := self._sparing.due(reason.name)) is not None:
            log.warning(
                "event=call_ended reason=%s wire=%s method=%s tenant=%r accepted=%s took_ms=%.1f "
                "label=%r trace=%r unsaid=%d",
                *(reason.name, *labels, call.caller.tenant, call.accepted, 1e3 * took_s),
                *(*call.names, unsaid),
            )

    def _check_room(self) -> None:
        if self.state == "draining":
            raise UnavailableError("this server is shutting down; try another", "DRAINING")
        if self.calls_max is not None and self._calls > self.calls_max:
            raise RefusedError(
                "QUEUE_FULL",
                f"this server has {self._calls - 1} calls at once, and takes {self.calls_max} "
                "(calls_max); try again in a moment",
            )

    def _enter(self) -> None:
        self._calls += 1
        self._idle.clear()
        self.metrics.in_flight.inc()

    def _leave(self) -> None:
        self._calls -= 1
        self.metrics.in_flight.dec()
        if self._calls == 0:
            self._idle.set()


def _slow(patience_s: float) -> Ended:
    return Ended(
        REASONS["SLOW_READER"],
        f"this client took nothing of the answer for {patience_s:g} s (slow_reader_s); read it as "
        "it comes, or ask for it whole",
    )


def ended_by(error: PreambleError) -> Ended:
    """What an error means to a caller."""
    return Ended(
        reason_of(error),
        str(error),
        getattr(error, "field", None),
        getattr(error, "retry_s", None),
    )
