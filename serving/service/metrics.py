"""Prometheus metrics: one registry of counters, gauges and histograms.

The front end owns the registry. Counters are incremented when an event happens; gauges (waiting
requests, adapters) are read at each scrape. Each label has a short fixed list of values, except
`adapter`: its values are at most ADAPTER_LABELS_MAX names, and OTHER_ADAPTERS. docs/metrics.md
explains each metric.
"""

import math
import platform
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from gpt.software_versions import library_version
from serving.engine.stream import AnswerTiming
from serving.request import AnswerSpec
from serving.service.error_reasons import REASONS, Reason

# Without this, every counter and histogram has an extra `_created` series.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    60,
)
INTER_TOKEN_BUCKETS_S = (
    0.0005,
    0.001,
    0.002,
    0.003,
    0.004,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.2,
    0.5,
    1,
    5,
)
STEP_BUCKETS_S = (
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    30,
)
PHASE_BUCKETS_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
    160,
    320,
)
REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
LENGTH_BUCKETS_TOKENS = tuple(2.0**power for power in range(18))  # Up to 131,072.
MESSAGE_BUCKETS_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# Maximum number of adapter names with a series each; all other names share OTHER_ADAPTERS.
ADAPTER_LABELS_MAX = 100
OTHER_ADAPTERS = "other"
ENGINE_STATES = ("loading", "serving", "restarting", "draining", "dead")
# A call that fails for one of these reasons counts as rejected because of load, if none of its
# requests was accepted before.
OVERLOAD_REASONS = (
    "QUEUE_FULL",
    "RATE_LIMITED",
    "LOADING",
    "ENGINE_RESTARTING",
    "DRAINING",
    "STOPPED",
    "DEADLINE_PASSED",
)


@dataclass(frozen=True)
class _CallbackCounter(Collector):
    """A counter that calls `read` at each scrape to get its value."""

    name: str
    help_text: str
    read: Callable[[], int]

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self.name, self.help_text, value=self.read())


@dataclass(frozen=True)
class _StateGauge(Collector):
    """One series per state: 1 for the current state, 0 for the others."""

    name: str
    help_text: str
    states: Sequence[str]
    read: Callable[[], str]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(self.name, self.help_text, labels=["state"])
        current_state = self.read()
        for state in self.states:
            family.add_metric([state], float(state == current_state))
        yield family


class BulkHistogram(Collector):
    """A histogram without labels that records many equal observations in one call.

    With prometheus_client's histogram, each token would need its own call.
    """

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help_text = help_text
        self._bounds = (*map(float, bounds), math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float, count: int = 1) -> None:
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += count
            self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        with self._lock:
            counts, total = list(self._counts), self._sum
        cumulative_count, buckets = 0, []
        for bound, count in zip(self._bounds, counts, strict=True):
            cumulative_count += count
            buckets.append(("+Inf" if bound == math.inf else str(bound), cumulative_count))
        yield HistogramMetricFamily(self._name, self._help_text, buckets=buckets, sum_value=total)


@dataclass
class Metrics:
    """All metrics of a server; `render` returns the text of a scrape."""

    registry: CollectorRegistry = field(default_factory=lambda: CollectorRegistry())
    last_step_at: float = 0.0  # Unix time of the last step's end; 0: no step yet.

    def __post_init__(self) -> None:
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        labels = ["wire", "method", "code"]
        self.requests = self._counter("requests", "Finished calls, by gRPC code.", labels)
        self.errors = self._counter("request_errors", "Failed calls, by error reason.", ["reason"])
        self.rejections = self._counter(
            "admission_rejections",
            "Calls rejected because of load before any of their requests was accepted.",
            ["reason"],
        )
        self._preset_labels(self.errors, REASONS)
        self._preset_labels(self.rejections, OVERLOAD_REASONS)
        self.finished = self._counter(
            "generation_finished", "Finished completions, by finish reason.", ["reason"]
        )
        self.adapter_requests = self._counter(
            "adapter_requests",
            "Accepted requests by adapter name, summed over versions.",
            ["adapter"],
        )
        self.golden = self._counter(
            "adapter_golden", "Adapters whose golden examples were replayed, by result.", ["result"]
        )
        self._preset_labels(self.golden, ("passed", "failed"))
        self._adapter_labels: set[str] = set()
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens without virtual tokens.")
        self.virtual_tokens = self._counter(
            "virtual_tokens", "Virtual tokens of adapters in prompts."
        )
        self.cached_tokens = self._counter(
            "cached_tokens", "Prompt tokens reused from the prefix cache."
        )
        self.generated_tokens = self._counter("generated_tokens", "Generated tokens.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds",
            "Time to first token, from a call's arrival, in seconds.",
            FIRST_TOKEN_BUCKETS_S,
            ["wire"],
        )
        self.next_token = self._bulk_histogram(
            "inter_token_latency_seconds",
            "Time between consecutive tokens of a completion, in seconds.",
            INTER_TOKEN_BUCKETS_S,
        )
        self.duration = self._histogram(
            "request_duration_seconds",
            "Duration of calls, in seconds.",
            REQUEST_BUCKETS_S,
            labels,
        )
        self.prompt_length = self._bulk_histogram(
            "prompt_length_tokens",
            "Prompt length per completion, virtual tokens included.",
            LENGTH_BUCKETS_TOKENS,
        )
        self.generated_length = self._bulk_histogram(
            "generated_length_tokens",
            "Generated tokens per finished completion.",
            LENGTH_BUCKETS_TOKENS,
        )
        self.message_tokens = self._bulk_histogram(
            "stream_message_tokens",
            "Tokens per stream message.",
            MESSAGE_BUCKETS_TOKENS,
        )
        self.queue = self._bulk_histogram(
            "queue_duration_seconds",
            "Time that a completion waited in the queue, in seconds.",
            PHASE_BUCKETS_S,
        )
        self.prefill = self._bulk_histogram(
            "prefill_duration_seconds",
            "Time to the first token without the queue duration, in seconds.",
            PHASE_BUCKETS_S,
        )
        self.decode = self._bulk_histogram(
            "decode_duration_seconds",
            "Time from the first token to the end of finished completions, in seconds.",
            PHASE_BUCKETS_S,
        )
        self.step = self._bulk_histogram(
            "step_duration_seconds", "Duration of engine steps, in seconds.", STEP_BUCKETS_S
        )
        self.in_flight = self._gauge("requests_in_flight", "Calls in progress.")

    def record_step(self, seconds: float) -> None:
        """Record the duration of an engine step."""
        self.step.observe(seconds)
        self.last_step_at = time.time()

    def record_call_error(self, reason: Reason, *, accepted: bool) -> None:
        """Count a failed call; `accepted`: the call had an accepted request before it failed."""
        self.errors.labels(reason.name).inc()
        if not accepted and reason.name in OVERLOAD_REASONS:
            self.rejections.labels(reason.name).inc()

    def record_golden_check(self, *, passed: bool) -> None:
        """Count an adapter whose golden examples were replayed."""
        self.golden.labels("passed" if passed else "failed").inc()

    def record_accepted(self, answers: Iterable[AnswerSpec]) -> None:
        """Count an accepted request, once for each of its adapter names.

        Each of the first ADAPTER_LABELS_MAX adapter names gets a series. All other names are
        counted as OTHER_ADAPTERS, which bounds the number of series. A tenant's private adapters
        are counted as OTHER_ADAPTERS too, because other tenants may read the metrics.
        """
        names = {
            OTHER_ADAPTERS if answer.is_private else answer.adapter.partition("@")[0]
            for answer in answers
        }
        for name in names - {""}:
            if name != OTHER_ADAPTERS and len(self._adapter_labels) < ADAPTER_LABELS_MAX:
                self._adapter_labels.add(name)
            self.adapter_requests.labels(
                name if name in self._adapter_labels else OTHER_ADAPTERS
            ).inc()

    def record_answer(self, answer: AnswerSpec, finish: str, generated_tokens: int) -> None:
        """Count a finished completion and its tokens."""
        self.finished.labels(finish).inc()
        self.prompt_tokens.inc(answer.prompt_tokens)
        self.virtual_tokens.inc(answer.virtual_tokens)
        self.prompt_length.observe(len(answer.prompt))
        self.generated_length.observe(generated_tokens)

    def record_timings(self, timings: Iterable[AnswerTiming]) -> None:
        """Record the queue, prefill and decode times of ended completions."""
        for timing in timings:
            self.queue.observe(timing.phases.queue_s)
            self.prefill.observe(timing.phases.prefill_s)
            if timing.finish not in (None, "scored"):
                self.decode.observe(timing.decode_s)

    def watch_gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read at each scrape."""
        self._gauge(name, help_text).set_function(read)

    def watch_counter(self, name: str, help_text: str, read: Callable[[], int]) -> None:
        """Add a counter whose value is read at each scrape."""
        self.registry.register(_CallbackCounter(f"preamble_{name}", help_text, read))

    def watch_state(
        self, name: str, help_text: str, states: Sequence[str], read: Callable[[], str]
    ) -> None:
        """Add a state gauge: one series per state."""
        self.registry.register(_StateGauge(f"preamble_{name}", help_text, states, read))

    def set_build_info(self, **labels: str) -> None:
        """Add the build information: labels of a series whose value is always 1."""
        torch = library_version("torch") or "not installed"
        labels |= {"python": platform.python_version(), "torch": torch}
        gauge = self._gauge(
            "build_info", "Version, model and dtype of this server, as labels.", sorted(labels)
        )
        gauge.labels(**labels).set(1)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"preamble_{name}", help_text, labels or (), registry=self.registry)

    def _preset_labels(self, counter: Counter, labels: Iterable[str]) -> None:
        """Create the series with value 0, since PromQL's `rate` ignores a series' first value."""
        for label in labels:
            counter.labels(label)

    def _bulk_histogram(self, name: str, help_text: str, bounds: Sequence[float]) -> BulkHistogram:
        histogram = BulkHistogram(f"preamble_{name}", help_text, bounds)
        self.registry.register(histogram)
        return histogram

    def _gauge(self, name: str, help_text: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(f"preamble_{name}", help_text, labels or (), registry=self.registry)

    def _histogram(
        self, name: str, help_text: str, buckets: tuple[float, ...], labels: list[str] | None = None
    ) -> Histogram:
        return Histogram(
            f"preamble_{name}", help_text, labels or (), buckets=buckets, registry=self.registry
        )
