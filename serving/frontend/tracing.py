"""Tracing: OpenTelemetry spans of calls and their queue, prefill and decode phases.

Each call has a span, with child spans for the phases of its completions. If a call has a trace
context, the call's span is a child of the caller's span. A thread exports the spans. If the queue
of this thread is full, spans are dropped and counted; calls never wait. Attributes contain names
and numbers, never prompts or completions. The module needs the optional dependencies
`preamble[traces]`.
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
from serving.frontend.call_origin import CallOrigin
from serving.logs import LogThrottle
from serving.service.error_reasons import Reason

log = logging.getLogger(__name__)

SERVICE_NAME = "preamble"
QUEUE_SPANS_MAX = 8192
BATCH_SPANS_MAX = 512
EXPORT_INTERVAL_S = 1.0  # An incomplete batch is exported after this time.
EXPORT_TIMEOUT_S = 5.0  # Time limit of a batch's export, retries included.
SHUTDOWN_TIMEOUT_S = 2.0  # Time limit of the last export when the server stops.
LOG_INTERVAL_S = 60.0  # Minimum time between two log lines about failed exports.
# At most this number of answers per call get phase spans. At most this number of adapters and of
# finish reasons become attributes.
ANSWERS_TRACED_MAX = 8


class CallTrace:
    """The span of a call in progress."""

    def __init__(self, tracer: "CallTracer", span: "Span") -> None:
        self._tracer = tracer
        self.span = span
        self._clock_offset_ns = time.time_ns() - time.monotonic_ns()
        self._attributes: dict[str, Any] = {}
        self._adapters: dict[str, None] = {}
        self._finish_reasons: list[str] = []
        self._answers_traced = 0  # Answers that have phase spans.

    @property
    def trace_id(self) -> str:
        return f"{self.span.get_span_context().trace_id:032x}"

    def add_admission_span(self, started_at: float) -> None:
        """Add the admission span of an accepted request, from `started_at` to now."""
        self._add_phase_span("admission", started_at, time.monotonic(), {})

    def add_request(self, model: str, stream: Stream, output_tokens: int) -> None:
        """Add the attributes and phase spans of an ended request of the call."""
        if not self.span.is_recording():
            return
        answers, timings = stream.request.answers, stream.timings
        # If several answers have the same adapter and prompt, the tokens of this prompt count once.
        first_index_by_prompt: dict[tuple[str, tuple[int, ...]], int] = {}
        for index, answer in enumerate(answers):
            first_index_by_prompt.setdefault((answer.adapter, answer.prompt), index)
        first_indices = set(first_index_by_prompt.values())
        first_answers = [answers[index] for index in first_index_by_prompt.values()]
        cached_tokens = sum(
            timing.cached_tokens for timing in timings if timing.index in first_indices
        )
        for name, count in (
            ("gen_ai.request.choice.count", len(answers)),
            ("gen_ai.usage.input_tokens", sum(answer.prompt_tokens for answer in first_answers)),
            ("gen_ai.usage.output_tokens", output_tokens),
            ("gen_ai.usage.cache_read.input_tokens", cached_tokens),
            ("preamble.virtual_tokens", sum(answer.virtual_tokens for answer in first_answers)),
        ):
            self._attributes[name] = self._attributes.get(name, 0) + count
        sampling = answers[0].sampling
        self._attributes |= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": SERVICE_NAME,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.max_tokens": sampling.max_new_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
        self._adapters |= {answer.adapter: None for answer in answers if answer.adapter}
        self._finish_reasons += [timing.finish for timing in timings if timing.finish is not None]
        for timing in timings[: ANSWERS_TRACED_MAX - self._answers_traced]:
            self._answers_traced += 1
            prefill_at = timing.first_token_at - timing.phases.prefill_s
            queued_at = prefill_at - timing.phases.queue_s
            attributes: dict[str, Any] = {"preamble.answer": timing.index}
            if adapter := answers[timing.index].adapter:
                attributes["preamble.adapter"] = adapter
            self._add_phase_span("queue", queued_at, prefill_at, attributes)
            self._add_phase_span("prefill", prefill_at, timing.first_token_at, attributes)
            self._add_phase_span("decode", timing.first_token_at, timing.ended_at, attributes)

    def end(self, origin: CallOrigin, tenant: str, reason: Reason | None) -> None:
        """Set the call's attributes and end its span; `reason` None: success."""
        span = self.span
        if span.is_recording():
            # Attributes of the protocol take precedence.
            attributes = {**self._attributes, **origin.attributes}
            if "rpc.method" in attributes:
                attributes["rpc.response.status_code"] = (
                    "OK" if reason is None else reason.code.name
                )
            if "http.route" in attributes:
                attributes["http.response.status_code"] = 200 if reason is None else reason.status
            if self._adapters:
                attributes["preamble.adapters"] = list(self._adapters)[:ANSWERS_TRACED_MAX]
            if self._finish_reasons:
                attributes["gen_ai.response.finish_reasons"] = self._finish_reasons[
                    :ANSWERS_TRACED_MAX
                ]
            if tenant:
                attributes["preamble.tenant"] = tenant
            if request_id := origin.request_id:
                attributes["preamble.request_id"] = request_id
            if reason is not None:
                attributes["error.type"] = reason.name
                # OpenTelemetry's conventions: a client error (4xx) leaves a server span's status
                # unset.
                if reason.status >= 500:
                    span.set_status(StatusCode.ERROR, reason.name)
            span.set_attributes(attributes)
        span.end(self._clock_offset_ns + time.monotonic_ns())

    def _add_phase_span(
        self, name: str, started_at: float, ended_at: float, attributes: Mapping[str, Any]
    ) -> None:
        """Add a child span of the call's span; times are on the monotonic clock."""
        if self.span.is_recording():
            start_ns = self._clock_offset_ns + round(1e9 * started_at)
            end_ns = self._clock_offset_ns + round(1e9 * ended_at)
            self._tracer.start_child_span(self.span, name, attributes, start_ns).end(end_ns)


class CallTracer:
    """Creates and exports the spans of calls. `close` tries to export the remaining spans."""

    def __init__(self, endpoint: str, sample_ratio: float, version: str) -> None:
        """`sample_ratio`: the fraction of calls that are traced, from 0 to 1.

        It applies to calls without a trace context. In a call with a trace context, the context's
        `sampled` flag decides.
        """
        _silence_library_log()
        self.processor = SpanBatchExporter(
            OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S), endpoint
        )
        resource = Resource.create({"service.name": SERVICE_NAME, "service.version": version})
        provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample_ratio),
            # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME take precedence.
            resource=resource.merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self.processor)
        self._tracer = provider.get_tracer(SERVICE_NAME, version)
        self._propagator = TraceContextTextMapPropagator()

    def start_call(self, origin: CallOrigin, parent: CallTrace | None) -> CallTrace:
        """Start the trace of a call; `parent` is the trace of the call that contains this call."""
        if parent is None:
            parent_context = self._propagator.extract(origin.headers, Context())
            span_kind = SpanKind.SERVER
        else:
            parent_context = set_span_in_context(parent.span, Context())
            span_kind = SpanKind.INTERNAL
        return CallTrace(self, self._tracer.start_span(origin.name, parent_context, span_kind))

    def start_child_span(
        self, span: Span, name: str, attributes: Mapping[str, Any], start_ns: int
    ) -> Span:
        parent_context = set_span_in_context(span, Context())
        return self._tracer.start_span(
            name, parent_context, attributes=attributes, start_time=start_ns
        )

    def close(self) -> None:
        """Export the remaining spans; drop them after about SHUTDOWN_TIMEOUT_S."""
        self.processor.shutdown()


class SpanBatchExporter(SpanProcessor):
    """Queues ended spans; a thread exports them in batches."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._queue: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._log_throttle = LogThrottle(LOG_INTERVAL_S)
        self.exported = self.dropped = 0
        self._drop_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Queue or drop a span. Never blocks, since it is called on the event loop."""
        if self._closing or len(self._queue) >= QUEUE_SPANS_MAX:
            self._drop(1, "the queue is full or closed")
            return
        self._queue.append(span)
        if len(self._queue) >= BATCH_SPANS_MAX:
            self._wake.set()

    def shutdown(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(SHUTDOWN_TIMEOUT_S)
        self._exporter.shutdown()  # Aborts a hanging export.
        self._thread.join(SHUTDOWN_TIMEOUT_S / 4)
        if self._queue:
            self._drop(len(self._queue), "the server stops")

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(EXPORT_INTERVAL_S)
            self._wake.clear()
            while self._queue and self._export_batch():
                pass

    def _export_batch(self) -> bool:
        """Export a batch and return True. If the export fails, drop the batch and return False."""
        count = min(BATCH_SPANS_MAX, len(self._queue))
        batch = [self._queue.popleft() for _ in range(count)]
        try:
            is_exported = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # For example, the channel was closed by `shutdown`.
            log.debug("event=traces_not_sent reason=%r", error)
            is_exported = False
        if is_exported:
            self.exported += count
        else:
            self._drop(count, "the receiver does not accept the spans")
        return is_exported

    def _drop(self, count: int, reason: str) -> None:
        with self._drop_lock:
            self.dropped += count
            suppressed = self._log_throttle.claim_line(reason)
        if suppressed is not None:
            log.warning(
                "event=traces_dropped spans=%d reason=%r address=%s suppressed=%d",
                count,
                reason,
                self._endpoint,
                suppressed,
            )


def _silence_library_log() -> None:
    """Silence the library's log, which has a line per failed batch and invalid trace context."""
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
