"""Front end: runs every call with authentication, quota, deadline, metrics and error reasons.

A protocol only converts its messages to an `Ask`, and pieces of output to its responses. The front
end runs the call itself, so limits, metrics and error reasons are the same in every protocol. The
module is independent of protocols and models.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

from gpt.adapters.change_log import UNWRITTEN_RECORDS_MAX, ChangeAction, ChangeAuthor
from gpt.errors import PreambleError
from serving.admission.auth import Authenticator, Caller, Role
from serving.admission.rate_limits import QuotaTable, RequestReservation, TenantUsage
from serving.engine.stream import Stream
from serving.file_threads import CHANGE_LOG_OWNER
from serving.frontend.call_origin import UNKNOWN_ORIGIN, CallOrigin
from serving.logs import LogThrottle
from serving.request import Ask, Piece, RefusedError, UnavailableError
from serving.service.error_reasons import REASONS, Reason, reason_of
from serving.service.metrics import Metrics, exemplar_labels
from serving.service.service import Service
from serving.service.usage import RequestUsage, UsageMeter

if TYPE_CHECKING:
    from serving.frontend.tracing import CallTrace, CallTracer

log = logging.getLogger(__name__)

ServerState = Literal["loading", "serving", "draining"]

# HTTP statuses of overload, rate limits and server errors. A failed call is logged only if the
# reason of its error has one of these statuses.
LOGGED_STATUSES = (429, 500, 503)


class CallFailure(Exception):
    """The failure of a call. Each transport converts it to its own error format."""

    def __init__(
        self, reason: Reason, message: str, field: str | None = None, retry_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field
        self.retry_s = reason.retry_s if retry_s is None else retry_s

    def release_frames(self) -> None:
        """Delete the references to the frames of the call, which can hold a message of many MiB.

        Where a frame also refers to the failure, only the garbage collector would find them, and it
        rarely looks at old objects.
        """
        self.__context__ = self.__traceback__ = None


class Call:
    """A call in progress. `deadline` is on the monotonic clock."""

    def __init__(
        self,
        frontend: "Frontend",
        protocol: str,
        caller: Caller,
        deadline: float | None,
        origin: CallOrigin,
    ) -> None:
        self.frontend = frontend
        self.protocol = protocol
        self.caller = caller
        self.deadline = deadline
        self.origin = origin
        self.trace: CallTrace | None = None  # None: tracing is off.
        self.arrival = time.monotonic()
        self._awaiting_first_token = True
        # Set when the caller is authenticated; None for a probe.
        self.tenant_usage: TenantUsage | None = None
        self.client_stalled = False  # Whether the client read nothing for `slow_reader_s`.
        self.task = asyncio.current_task()
        # Start time of the write that waits for the client; None: no write in progress.
        self._send_started: float | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self.has_accepted_request = False
        self._reservations: dict[Stream, RequestReservation] = {}  # By open stream.
        self._usages: dict[Stream, RequestUsage] = {}  # By open stream.
        self._final_only_streams: set[Stream] = set()  # Streams that are sent as one response.

    @property
    def service(self) -> Service:
        if self.frontend.service is None:
            raise UnavailableError("the model is still loading; try again in a moment", "LOADING")
        return self.frontend.service

    def requested_adapters(self, model: str | None) -> tuple[str, ...]:
        """Return the `Ask.adapters` of a request for `model`; empty for the base model."""
        adapter_name = self.service.adapter_name(model, self.caller.tenant)
        return () if adapter_name is None else (adapter_name,)

    def subcall(self, method: str) -> AbstractAsyncContextManager["Call"]:
        """Open a nested call, with its own metrics and errors, for one of this call's requests."""
        origin = CallOrigin(method, self.origin.headers, peer=self.origin.peer)
        return self.frontend.call(
            self.protocol, method, None, self.deadline, parent=self, origin=origin
        )

    @property
    def log_ids(self) -> tuple[str, str]:
        """The caller's request id and the trace id, for log lines."""
        origin = self.origin
        return origin.request_id, origin.trace_id if self.trace is None else self.trace.trace_id

    @cached_property
    def exemplar(self) -> dict[str, str]:
        """The labels of this call's exemplars in latency histograms."""
        return exemplar_labels(*self.log_ids)

    @property
    def change_author(self) -> ChangeAuthor:
        """The author of a change that this call makes, for the adapter change log."""
        return ChangeAuthor(
            tenant=self.caller.tenant,
            token=self.caller.token_name,
            protocol=self.protocol,
            method=self.origin.name,
            peer=self.origin.peer,
            request_id=self.origin.request_id,
        )

    async def require_role(self, role: Role, change: ChangeAction | None = None) -> None:
        """Raise PERMISSION_DENIED if the caller lacks the role.

        `change`: the change of an adapter that the call would make; its refusal is recorded.
        """
        try:
            self.caller.require_role(role)
        except RefusedError as error:
            if change is not None and self.frontend.service is not None:
                await self.service.file_threads.wait(self.record_refusal(change, "", error))
            raise

    def record_refusal(
        self, change: ChangeAction, name: str, error: BaseException
    ) -> "Future[None]":
        """Record in the change log, in a thread, that a change of adapter `name` was refused."""
        record = partial(self.service.store.record_refusal, change, name, self.change_author, error)
        # A client may repeat its call faster than a disk that does not answer takes the records.
        return self.service.file_threads.submit_logged(
            CHANGE_LOG_OWNER, record, UNWRITTEN_RECORDS_MAX
        )

    async def start(self, ask: Ask, *, final_only: bool = False) -> Stream:
        """Admit an ask, submit it, and return its stream; raise if it is refused.

        The stream is closed when this call ends. `final_only`: the client gets the whole output in
        one response at the end.
        """
        ask = replace(ask, tenant=self.caller.tenant)
        assert self.tenant_usage is not None, "not authenticated, or a probe"
        reservation = self.tenant_usage.begin_request()
        started_at = time.monotonic()
        try:
            stream = await self.service.start(
                ask, self.deadline, final_only=final_only, charge=reservation.charge
            )
        except BaseException:
            reservation.close(rejected=True)
            raise
        self.has_accepted_request = True
        self._reservations[stream] = reservation
        self._usages[stream] = self.frontend.usage.open_request(stream.request)
        if final_only:
            self._final_only_streams.add(stream)
        if self.trace is not None:
            self.trace.add_admission_span(started_at)
        self.frontend.metrics.record_accepted(stream.request.answers)
        return stream

    async def pieces(self, stream: Stream) -> AsyncIterator[Piece]:
        """Iterate a stream's pieces and record their metrics."""
        timer = _StreamTimer(self, stream, final_only=stream in self._final_only_streams)
        reservation, usage = self._reservations[stream], self._usages[stream]
        try:
            async for piece in stream:
                timer.record_piece(piece)
                usage.record_piece(piece)
                reservation.generated_tokens += len(piece.token_ids)
                yield piece
        finally:
            self._end_stream(stream)

    def _end_stream(self, stream: Stream) -> None:
        stream.close()
        self._final_only_streams.discard(stream)
        if (reservation := self._reservations.pop(stream, None)) is not None:
            reservation.close()
            self._usages.pop(stream).close()
            self.frontend.metrics.record_timings(stream.timings, self.arrival, self.exemplar)
            if self.trace is not None:
                self.trace.add_request(self.service.name, stream, reservation.generated_tokens)

    async def send_part(self, write: Awaitable[object]) -> None:
        """Await a write of the response; a write longer than `slow_reader_s` ends the call."""
        self._send_started = time.monotonic()
        # Most writes finish immediately, so a timer for each write would be a waste. Therefore one
        # timer serves all writes of a call.
        if self._stall_timer is None:
            self._stall_timer = asyncio.get_running_loop().call_later(
                self.frontend.slow_reader_s, self._check_client
            )
        try:
            await write
        finally:
            self._send_started = None

    def _check_client(self) -> None:
        """Timer callback: cancel the call if a write has waited for at least `slow_reader_s`."""
        loop, timeout_s = asyncio.get_running_loop(), self.frontend.slow_reader_s
        waited_s = 0.0 if self._send_started is None else time.monotonic() - self._send_started
        if waited_s < timeout_s:
            self._stall_timer = loop.call_later(timeout_s - waited_s, self._check_client)
        elif self.task is not None:
            self.client_stalled = True
            self.task.cancel()

    def observe_token(self, now: float) -> None:
        """Record the time to first token, once per call."""
        if self._awaiting_first_token:
            self._awaiting_first_token = False
            self.frontend.metrics.record_first_token(
                self.protocol, now - self.arrival, self.exemplar
            )

    def close(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        for stream in list(self._reservations):
            self._end_stream(stream)
        if self.tenant_usage is not None:
            self.tenant_usage.close()


class _StreamTimer:
    """Records the metrics of one stream. The cost per piece is independent of the token count."""

    def __init__(self, call: Call, stream: Stream, *, final_only: bool) -> None:
        self._call = call
        self._final_only = final_only
        self._answers = stream.request.answers
        self._last_token_at: dict[int, float] = {}  # Time of the last token, by answer index.
        self._token_counts = [0] * len(self._answers)  # Tokens so far, by answer index.

    def record_piece(self, piece: Piece) -> None:
        metrics, tokens = self._call.frontend.metrics, len(piece.token_ids)
        if tokens:
            now = time.monotonic()
            self._call.observe_token(now)
            metrics.generated_tokens.inc(tokens)
            if not self._final_only:
                metrics.message_tokens.observe(tokens)
            last_at = self._last_token_at.get(piece.index)
            # No gap precedes an answer's first token; the gaps within the first piece are 0 s.
            gaps = tokens if last_at is not None else tokens - 1
            if gaps:
                gap_s = (now - (last_at or now)) / gaps
                metrics.next_token.observe(gap_s, gaps, self._call.exemplar)
            self._last_token_at[piece.index] = now
            self._token_counts[piece.index] += tokens
        if piece.cached_tokens:
            metrics.cached_tokens.inc(piece.cached_tokens)
        if piece.finish is not None:
            answer = self._answers[piece.index]
            metrics.record_answer(answer, piece.finish, self._token_counts[piece.index])


class Frontend:
    """The front end of all protocols. `service` is None until the model is loaded."""

    def __init__(
        self,
        metrics: Metrics,
        access: Authenticator,
        *,
        calls_max: int | None = None,
        slow_reader_s: float = 30.0,
        message_bytes_max: int = 16 << 20,
        usage: UsageMeter | None = None,
    ) -> None:
        self.metrics = metrics
        self.usage = usage or UsageMeter()
        self.access = access
        self.calls_max = calls_max
        self.slow_reader_s = slow_reader_s
        self.message_bytes_max = message_bytes_max
        self._quotas = QuotaTable()
        self.tracer: CallTracer | None = None  # None: tracing is off.
        self.state: ServerState = "loading"
        self.service: Service | None = None
        self.stop_requested = asyncio.Event()  # Set: drain, then stop the server.
        self._open_calls = 0
        self._log_throttle = LogThrottle()
        self._idle = asyncio.Event()
        self._idle.set()

    def attach_service(self, service: Service) -> None:
        self.service = service
        self.state = "serving"

    @property
    def is_live(self) -> bool:
        """False after a permanent failure of the engine: only a restart of the server helps."""
        return self.service is None or not self.service.engine.has_failed

    @property
    def is_ready(self) -> bool:
        """Whether the server accepts requests and its ranks run."""
        return self.state == "serving" and self.service is not None and self.service.engine.up

    async def drain(self) -> None:
        """Refuse new calls from now on, and wait until the last accepted call has ended."""
        self.state = "draining"
        await self._idle.wait()

    @asynccontextmanager
    async def call(
        self,
        protocol: str,
        method: str,
        credential: str | None = None,
        deadline: float | None = None,
        *,
        while_draining: bool = False,
        is_probe: bool = False,
        parent: Call | None = None,
        origin: CallOrigin = UNKNOWN_ORIGIN,
    ) -> AsyncIterator[Call]:
        """Run a call: authenticate it, record its metrics, and raise `CallFailure` on an error.

        `while_draining`: accept the call even if the server drains or has `calls_max` open calls.
        `is_probe`: the call only reads the state, the models, the adapters or the load of the
        server, and is not charged to its tenant.
        `parent`: the call that contains this call; its caller is authenticated already.
        """
        call = Call(self, protocol, Caller(), deadline, origin)
        reason: Reason | None = None
        self._begin_call()
        try:
            if self.tracer is not None:
                call.trace = self.tracer.start_call(origin, parent.trace if parent else None)
            call.caller = caller = parent.caller if parent else self.access.authenticate(credential)
            if not while_draining:
                self._check_capacity()
            if parent:
                call.tenant_usage = parent.tenant_usage
            elif not is_probe:
                quota = self._quotas.quota_for(caller.tenant, caller.limits)
                call.tenant_usage = TenantUsage(quota)
            yield call
        except PreambleError as error:
            # A variable of a raised exception would be a reference cycle, which keeps the frames of
            # `error`, with a message of many MiB, until the garbage collector finds it.
            reason = reason_of(error)
            raise to_call_failure(error) from None
        except CallFailure as protocol_failure:  # Raised by the protocol.
            reason = protocol_failure.reason
            raise
        except asyncio.CancelledError:
            if call.client_stalled:
                assert call.task is not None
                call.task.uncancel()
                reason = REASONS["SLOW_READER"]
                raise _slow_reader_error(self.slow_reader_s) from None
            deadline_passed = deadline is not None and time.monotonic() >= deadline
            reason = REASONS["DEADLINE_PASSED" if deadline_passed else "CANCELLED"]
            raise
        except Exception:
            log_ids = call.log_ids  # `label` in the log line is the request ID.
            log.exception(
                "event=call_failed wire=%s method=%s label=%r trace=%r", protocol, method, *log_ids
            )
            reason = REASONS["INTERNAL"]
            message = "internal error of this server; see the server log"
            raise CallFailure(reason, message) from None
        finally:
            if parent is not None:
                call.tenant_usage = None  # The parent call closes the tenant usage.
            call.close()
            self._end_call()
            self._record_end(call, method, reason)

    def _record_end(self, call: Call, method: str, reason: Reason | None) -> None:
        """Record metrics, trace and log line of an ended call; `reason` None: success."""
        duration_s, labels = time.monotonic() - call.arrival, (call.protocol, method)
        code = "OK" if reason is None else reason.code.name
        self.metrics.record_call(*labels, code, duration_s, call.exemplar)
        if call.trace is not None:
            call.trace.end(call.origin, call.caller.tenant, reason)
        if reason is None:
            return
        self.metrics.record_call_error(reason, accepted=call.has_accepted_request)
        if (
            reason.status in LOGGED_STATUSES
            and (suppressed := self._log_throttle.claim_line(reason.name)) is not None
        ):
            # `label` is the request ID, and `suppressed` the number of suppressed lines.
            log.warning(
                "event=call_ended reason=%s wire=%s method=%s tenant=%r accepted=%s took_ms=%.1f "
                "label=%r trace=%r suppressed=%d",
                reason.name,
                *labels,
                call.caller.tenant,
                call.has_accepted_request,
                1e3 * duration_s,
                *call.log_ids,
                suppressed,
            )

    def _check_capacity(self) -> None:
        if self.state == "draining":
            raise UnavailableError("this server is shutting down; try another server", "DRAINING")
        if self.calls_max is not None and self._open_calls > self.calls_max:
            raise RefusedError(
                "QUEUE_FULL",
                f"this server has {self._open_calls - 1} concurrent calls and takes at most "
                f"{self.calls_max} (calls_max); try again in a moment",
            )

    def _begin_call(self) -> None:
        self._open_calls += 1
        self._idle.clear()
        self.metrics.in_flight.inc()

    def _end_call(self) -> None:
        self._open_calls -= 1
        self.metrics.in_flight.dec()
        if self._open_calls == 0:
            self._idle.set()


def _slow_reader_error(timeout_s: float) -> CallFailure:
    return CallFailure(
        REASONS["SLOW_READER"],
        f"this client read nothing of the response for {timeout_s:g} s (slow_reader_s); read the "
        "stream continuously, or request an unstreamed response",
    )


def to_call_failure(error: PreambleError) -> CallFailure:
    """Convert an error to a `CallFailure` with its reason, field and retry delay."""
    return CallFailure(
        reason_of(error),
        str(error),
        getattr(error, "field", None),
        getattr(error, "retry_s", None),
    )
