"""Traces: where each call's time went, told to OpenTelemetry.

A span for each call, under the caller's own if it sent one, and below it one for each phase of its
answers. They leave by a thread of their own: what finds the queue full is dropped and counted, and
no call waits. Names and numbers only: no prompt and no text. Needs the extra `traces`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.engine.stream import Stream
from serving.frontend.call_origin import Came
from serving.logs import Sparing
from serving.service.error_reasons import Reason

log = logging.getLogger(__name__)

NAME = "preamble"
QUEUE_SPANS_MAX = 8192
BATCH_SPANS_MAX = 512
PERIOD_S = 1.0  # As long may a span wait for others.
SEND_S = 5.0  # As long may a receiver take for a batch, tries included.
CLOSE_S = 2.0  # As long may the last ones take, when the server ends.
SILENCE_S = 60.0  # Between two lines of the log about a receiver.
ANSWERS_TOLD_MAX = 8  # Of a call, with spans of their phases.


class Trace:
    """One call's span, while the call is on its way."""

    def __init__(self, traces: "Traces", span: "Span") -> None:
        self._traces, self.span = traces, span
        self._zero_ns = time.time_ns() - time.monotonic_ns()
        self._facts: dict[str, Any] = {}
        self._adapters: dict[str, None] = {}
        self._finishes: list[str] = []
        self._told = 0  # Answers with spans of their own.

    @property
    def id(self) -> str:
        return f"{self.span.get_span_context().trace_id:032x}"

    def admitted(self, began: float) -> None:
        """A request of the call was accepted; when somebody began to look at it."""
        self._phase("admission", began, time.monotonic(), {})

    def answered(self, model: str, stream: Stream, made: int) -> None:
        """A request of the call is over; so many tokens were taken of its answers."""
        if not self.span.is_recording():
            return
        answers, spent = stream.request.answers, stream.spent
        # A prompt counts once, however many answers it has: with the first of them.
        firsts: dict[tuple[str, tuple[int, ...]], int] = {}
        for place, answer in enumerate(answers):
            firsts.setdefault((answer.adapter, answer.prompt), place)
        counted = set(firsts.values())
        prompts = [answers[place] for place in firsts.values()]
        cached = sum(one.cached_tokens for one in spent if one.index in counted)
        for name, count in (
            ("gen_ai.request.choice.count", len(answers)),
            ("gen_ai.usage.input_tokens", sum(one.prompt_tokens for one in prompts)),
            ("gen_ai.usage.output_tokens", made),
            ("gen_ai.usage.cache_read.input_tokens", cached),
            ("preamble.virtual_tokens", sum(one.virtual_tokens for one in prompts)),
        ):
            self._facts[name] = self._facts.get(name, 0) + count
        sampling = answers[0].sampling
        self._facts |= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": NAME,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.max_tokens": sampling.max_new_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
        self._adapters |= {one.adapter: None for one in answers if one.adapter}
        self._finishes += [one.finish for one in spent if one.finish is not None]
        for one in spent[: ANSWERS_TOLD_MAX - self._told]:
            self._told += 1
            begun = one.first_at - one.phases.prefill_s
            facts: dict[str, Any] = {"preamble.answer": one.index}
            if adapter := answers[one.index].adapter:
                facts["preamble.adapter"] = adapter
            self._phase("queue", begun - one.phases.queue_s, begun, facts)
            self._phase("prefill", begun, one.first_at, facts)
            self._phase("decode", one.first_at, one.ended_at, facts)

    def end(self, came: Came, tenant: str, reason: Reason | None) -> None:
        """The call is over: well, or for a reason."""
        span = self.span
        if span.is_recording():
            facts = {**self._facts, **came.facts}  # The wire knows better what it was.
            if "rpc.method" in facts:
                facts["rpc.response.status_code"] = "OK" if reason is None else reason.code.name
            if "http.route" in facts:
                facts["http.response.status_code"] = 200 if reason is None else reason.status
            if self._adapters:
                facts["preamble.adapters"] = list(self._adapters)[:ANSWERS_TOLD_MAX]
            if self._finishes:
                facts["gen_ai.response.finish_reasons"] = self._finishes[:ANSWERS_TOLD_MAX]
            if tenant:
                facts["preamble.tenant"] = tenant
            if label := came.label:
                facts["preamble.request_id"] = label
            if reason is not None:
                facts["error.type"] = reason.name
                if reason.status >= 500:  # By the conventions a caller's own errors are none here.
                    span.set_status(StatusCode.ERROR, reason.name)
            span.set_attributes(facts)
        span.end(self._zero_ns + time.monotonic_ns())

    def _phase(self, name: str, began: float, ended: float, facts: Mapping[str, Any]) -> None:
        """A span below the call's; times are on the monotonic clock."""
        if self.span.is_recording():
            start_ns, end_ns = (self._zero_ns + round(1e9 * at) for at in (began, ended))
            self._traces.below(self.span, name, facts, start_ns).end(end_ns)


class Traces:
    """Makes the spans of calls and has them sent. `close` sends what is left, if it can."""

    def __init__(self, address: str, share: float, version: str) -> None:
        """`share` is of calls that bring no trace; for others their caller has decided."""
        _quiet()
        self.outbox = Outbox(OTLPSpanExporter(endpoint=address, timeout=SEND_S), address)
        facts = Resource.create({"service.name": NAME, "service.version": version})
        provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(share),
            # What OpenTelemetry's own variables say of this deployment goes before.
            resource=facts.merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self.outbox)
        self._tracer = provider.get_tracer(NAME, version)
        self._words = TraceContextTextMapPropagator()

    def begin(self, came: Came, within: Trace | None) -> Trace:
        """`within`: it is a part of that call."""
        if within is None:
            above, kind = self._words.extract(came.headers, Context()), SpanKind.SERVER
        else:
            above, kind = set_span_in_context(within.span, Context()), SpanKind.INTERNAL
        return Trace(self, self._tracer.start_span(came.name, above, kind))

    def below(self, span: Span, name: str, facts: Mapping[str, Any], start_ns: int) -> Span:
        above = set_span_in_context(span, Context())
        return self._tracer.start_span(name, above, attributes=facts, start_time=start_ns)

    def close(self) -> None:
        """Takes little more than CLOSE_S, whatever the receiver does."""
        self.outbox.shutdown()


class Outbox(SpanProcessor):
    """Spans that have ended, until they are sent: by a thread, so many at once."""

    def __init__(self, exporter: SpanExporter, address: str) -> None:
        self._exporter, self._address = exporter, address
        self._queue: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._sparing = Sparing(SILENCE_S)
        self.sent = self.dropped = 0
        self._losing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """From the event loop, so it never waits."""
        if self._closing or len(self._queue) >= QUEUE_SPANS_MAX:
            self._lose(1, "the queue is full")
            return
        self._queue.append(span)
        if len(self._queue) >= BATCH_SPANS_MAX:
            self._wake.set()

    def shutdown(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()  # Ends a sending that hangs.
        self._thread.join(CLOSE_S / 4)
        if self._queue:
            self._lose(len(self._queue), "the server ends")

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(PERIOD_S)
            self._wake.clear()
            while self._queue and self._send():
                pass

    def _send(self) -> bool:
        """Send a batch; whether that was possible."""
        count = min(BATCH_SPANS_MAX, len(self._queue))
        batch = [self._queue.popleft() for _ in range(count)]
        try:
            well = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # Its channel was closed under it, say.
            log.debug("event=traces_not_sent reason=%r", error)
            well = False
        if well:
            self.sent += count
        else:
            self._lose(count, "the receiver does not take them")
        return well

    def _lose(self, count: int, why: str) -> None:
        with self._losing:
            self.dropped += count
            unsaid = self._sparing.due(why)
        if unsaid is not None:
            log.warning(
                "event=traces_dropped spans=%d reason=%r address=%s unsaid=%d",
                *(count, why, self._address, unsaid),
            )


def _quiet() -> None:
    """The library would have a line for each batch that fails, and for what callers send wrong."""
    theirs = logging.getLogger("opentelemetry")
    theirs.propagate = False
    theirs.addHandler(logging.NullHandler())
