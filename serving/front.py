"""Front: what the calls of every wire share: who may come in, a clock, a count, one bad end.

A surface turns its protocol's words into an `Ask` and pieces into answers; all between is here, so
that a limit, a metric or a reason is the same on each. Knows no protocol and no model.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal

from gpt.errors import PreambleError
from serving.access import Access, Caller
from serving.metrics import Metrics
from serving.reasons import REASONS, Reason, reason_of
from serving.request import Ask, Piece, UnavailableError
from serving.service import Service
from serving.stream import Stream

log = logging.getLogger(__name__)

State = Literal["loading", "serving", "draining"]


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

    def __init__(self, front: "Front", wire: str, caller: Caller, deadline: float | None) -> None:
        self.front, self.wire, self.caller, self.deadline = front, wire, caller, deadline
        self.arrival = time.monotonic()
        self._last: float | None = None  # When the last token came.
        self._streams: list[Stream] = []

    @property
    def service(self) -> Service:
        if self.front.service is None:
            raise UnavailableError(
                "the model is still being loaded; try again in a moment", "LOADING"
            )
        return self.front.service

    async def start(self, ask: Ask, *, whole: bool = False) -> Stream:
        """Accept what is asked, or refuse it. It ends with this call at the latest."""
        ask = replace(ask, tenant=self.caller.tenant)
        stream = await self.service.start(ask, self.deadline, whole=whole)
        self._streams.append(stream)
        return stream

    async def pieces(self, stream: Stream) -> AsyncIterator[Piece]:
        """A stream's pieces, counted and timed."""
        async for piece in stream:
            self._took(stream, piece)
            yield piece

    def _took(self, stream: Stream, piece: Piece) -> None:
        metrics, tokens = self.front.metrics, len(piece.token_ids)
        if tokens:
            now = time.monotonic()
            metrics.generated_tokens.inc(tokens)
            if self._last is None:
                metrics.first_token.labels(self.wire).observe(now - self.arrival)
                tokens -= 1  # What came along with the first took no further time.
                self._last = now
            for _ in range(tokens):
                metrics.next_token.observe((now - self._last) / tokens)
            self._last = now
        if piece.finish is not None:
            answer = stream.request.answers[piece.index]
            metrics.finished.labels(piece.finish).inc()
            metrics.prompt_tokens.inc(answer.prompt_tokens)
            metrics.virtual_tokens.inc(answer.virtual_tokens)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


class Front:
    """All surfaces' way to a service, which comes when it is loaded."""

    def __init__(self, metrics: Metrics, access: Access) -> None:
        self.metrics, self.access = metrics, access
        self.state: State = "loading"
        self.service: Service | None = None
        self.stop = asyncio.Event()  # Set: the server is to drain and end.
        self._calls = 0
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
    ) -> AsyncIterator[Call]:
        """Around each call: who calls, its count, its time, and an `Ended` if it ends badly.

        `draining`: it is answered then too.
        """
        call = Call(self, wire, Caller(), deadline)
        code = "OK"
        self._enter()
        try:
            call.caller = self.access.caller(credential)
            if self.state == "draining" and not draining:
                raise UnavailableError("this server is shutting down; try another", "DRAINING")
            yield call
        except PreambleError as error:
            ended = ended_by(error)
            code = ended.reason.code.name
            raise ended from None
        except asyncio.CancelledError:
            late = deadline is not None and time.monotonic() >= deadline
            code = REASONS["DEADLINE_PASSED" if late else "CANCELLED"].code.name
            raise
        except Exception:
            log.exception("event=call_failed wire=%s method=%s", wire, method)
            code = "INTERNAL"
            reason = "a fault of this server ended the call; its log says why"
            raise Ended(REASONS["INTERNAL"], reason) from None
        finally:
            call.close()
            self._leave()
            self.metrics.requests.labels(wire, method, code).inc()
            took_s = time.monotonic() - call.arrival
            self.metrics.duration.labels(wire, method, code).observe(took_s)

    def _enter(self) -> None:
        self._calls += 1
        self._idle.clear()
        self.metrics.in_flight.inc()

    def _leave(self) -> None:
        self._calls -= 1
        self.metrics.in_flight.dec()
        if self._calls == 0:
            self._idle.set()


def ended_by(error: PreambleError) -> Ended:
    """What an error means to a caller."""
    return Ended(
        reason_of(error),
        str(error),
        getattr(error, "field", None),
        getattr(error, "retry_s", None),
    )
