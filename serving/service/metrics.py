"""Prometheus metrics: one registry of counters, gauges and histograms.

The front end owns the registry. Counters are incremented when an event happens; gauges (waiting
requests, adapters) are read at each scrape. Each label has a short fixed list of values, except
`adapter`: its values are at most ADAPTER_LABELS_MAX names, and OTHER_ADAPTERS. All our series have
the label `model_name`, which is added when they are rendered. The usage of each tenant
(`serving.service.usage`) is in a registry of its own, because only operators may read it.
docs/metrics.md explains each metric.

Bound of a scrape: a method adds at most (its gRPC codes + 2 x 12) series, a protocol 22, and each
of at most 100 adapter names 4; about 700 others are fixed. After calls of all 70 methods, each
ended with 8 codes, there are 3,100 series. A series takes about 5 microseconds of CPU time.
"""

import math
import platform
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    Sample,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gpt.kv_groups import KVGroup
from gpt.software_versions import library_version
from serving.engine.adapter_residency import ADAPTER_NAMES_MAX, ResidencySnapshot
from serving.engine.stream import AnswerTiming
from serving.messages import EngineStats
from serving.request import AnswerSpec, FinishReason
from serving.service.error_reasons import REASONS, Reason
from serving.service.kv_capacity import KVGroupGauges
from serving.service.metrics_text import encode_text
from serving.service.usage import UsageCollector, UsageMeter
from serving.service.vllm_metrics import vllm_families

# Without this, every counter and histogram has an extra `_created` series.
disable_created_metrics()  # type: ignore[no-untyped-call]

# With the library's default escaping, OpenMetrics would have "_" instead of ":" in vLLM's names.
_encode_openmetrics, _ = choose_encoder(
    "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8"
)

PREFIX = "preamble_"
MODEL_LABEL = "model_name"  # vLLM's name of the label.
# OpenMetrics limits the characters of an exemplar's label names and values together.
EXEMPLAR_CHARACTERS_MAX = 128
_ESCAPED_CHARACTERS = str.maketrans({'"': "_", "\\": "_"})

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
# Few bounds, because each method and protocol has series of its own. They are a part of
# PHASE_BUCKETS_S, in which `generation_duration_seconds` has the durations of generating calls.
REQUEST_BUCKETS_S = (0.01, 0.05, 0.25, 1, 2.5, 5, 10, 40, 160)
LENGTH_BUCKETS_TOKENS = tuple(2.0**power for power in range(18))  # Up to 131,072.
MESSAGE_BUCKETS_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# Maximum number of adapter names with a series each; all other names share OTHER_ADAPTERS.
ADAPTER_LABELS_MAX = 100
OTHER_ADAPTERS = "other"
ENGINE_STATES = ("loading", "serving", "restarting", "draining", "dead")
# Values of the label `code` of call durations. `preamble_requests_total` has the gRPC codes.
SUCCESS_CODE, FAILURE_CODE = "OK", "FAILED"
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


def exemplar_labels(request_id: str, trace_id: str) -> dict[str, str]:
    """Return the labels of a call's exemplars; empty if the call has no ids.

    A request id that is too long is truncated (EXEMPLAR_CHARACTERS_MAX). Quotes and backslashes in
    it are replaced, because some parsers of OpenMetrics do not read escaped characters here.
    """
    labels = {"trace_id": trace_id} if trace_id else {}
    if request_id:
        names_and_values = ["request_id", *labels, *labels.values()]
        characters_left = EXEMPLAR_CHARACTERS_MAX - sum(map(len, names_and_values))
        labels["request_id"] = request_id[:characters_left].translate(_ESCAPED_CHARACTERS)
    return labels


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


@dataclass(frozen=True)
class _AdapterResidency(Collector):
    """The adapters on the device, in two forms: one series per name, and lists as labels.

    Routers read the lists. vLLM's metrics have both forms too (`serving.service.vllm_metrics`).
    """

    read: Callable[[], ResidencySnapshot]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        snapshot = self.read()
        help_text = (
            f"Adapters on the device, at most {ADAPTER_NAMES_MAX} names, without private adapters."
        )
        family = GaugeMetricFamily(f"{PREFIX}adapter_resident", help_text, labels=["adapter"])
        for name in snapshot.resident:
            family.add_metric([name], 1)
        yield family
        help_text = "Size of the adapters on the device, in fp32, with their methods and ranks."
        family = GaugeMetricFamily(
            f"{PREFIX}adapter_size_bytes", help_text, labels=["adapter", "method", "rank"]
        )
        for name, info in snapshot.infos.items():
            family.add_metric([name, info.method, str(info.rank)], info.nbytes)
        yield family
        labels = {
            "running_lora_adapters": ",".join(snapshot.resident),
            "waiting_lora_adapters": ",".join(snapshot.waiting),
            "max_lora": str(snapshot.adapters_max),
        }
        help_text = (
            "Adapters on the device and adapters that requests wait for, as labels. The value is "
            "the Unix time of the last change."
        )
        family = GaugeMetricFamily(f"{PREFIX}adapters_info", help_text, labels=list(labels))
        family.add_metric(list(labels.values()), snapshot.changed_at)
        yield family
        help_text = "Adapters of the present average size that fit on the device."
        yield GaugeMetricFamily(
            f"{PREFIX}adapters_resident_max", help_text, value=snapshot.adapters_max
        )


class BulkHistogram(Collector):
    """A histogram without labels that records many equal observations in one call.

    With prometheus_client's histogram, each token would need its own call. Each bucket has the
    exemplar of its last observation that has one.
    """

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help_text = help_text
        self._bounds = (*map(float, bounds), math.inf)
        self._counts = [0] * len(self._bounds)
        self._exemplars: list[Exemplar | None] = [None] * len(self._bounds)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float, count: int = 1, exemplar: dict[str, str] | None = None) -> None:
        """Record `count` observations of `value`. `exemplar`: the labels of their exemplar."""
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += count
            self._sum += value * count
            if exemplar:
                self._exemplars[bucket] = Exemplar(exemplar, value, time.time())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        with self._lock:
            counts, exemplars, total = list(self._counts), list(self._exemplars), self._sum
        cumulative_count = 0
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for bound, count, exemplar in zip(self._bounds, counts, exemplars, strict=True):
            cumulative_count += count
            bucket = "+Inf" if bound == math.inf else str(bound), cumulative_count
            buckets.append(bucket if exemplar is None else (*bucket, exemplar))
        yield HistogramMetricFamily(self._name, self._help_text, buckets=buckets, sum_value=total)


def _with_labels(sample: Sample, labels: Mapping[str, str]) -> Sample:
    """Return a sample with further labels, in a third of the time of `_replace`."""
    all_labels = {**sample.labels, **labels}
    return Sample(sample.name, all_labels, sample.value, sample.timestamp, sample.exemplar)


@dataclass(frozen=True)
class _Exposition(Collector):
    """The families of a scrape: ours with the model's name as a label, and their aliases."""

    metrics: "Metrics"
    with_usage: bool

    def collect(self) -> Iterator[Metric]:
        model_label = {MODEL_LABEL: self.metrics.model_name} if self.metrics.model_name else {}
        registries = [self.metrics.registry]
        if self.with_usage:
            registries.append(self.metrics.usage_registry)
        for family in chain.from_iterable(registry.collect() for registry in registries):
            if family.name.startswith(PREFIX):
                family.samples = [_with_labels(sample, model_label) for sample in family.samples]
            yield family
            if self.metrics.aliases == "vllm":
                yield from vllm_families(family)


@dataclass
class Metrics:
    """All metrics of a server; `render` returns the text of a scrape.

    `model_name` is the label of all our series; empty: they have no such label. `aliases`: "vllm"
    adds series with vLLM's names; "off" adds none.
    """

    model_name: str = ""
    aliases: str = "off"
    registry: CollectorRegistry = field(default_factory=lambda: CollectorRegistry())
    # The usage of each tenant, which only operators may read.
    usage_registry: CollectorRegistry = field(default_factory=lambda: CollectorRegistry())
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
        self._preset_labels(self.finished, get_args(FinishReason))
        self.resumed = self._counter(
            "generation_resumed", "Accepted completions that another server had begun."
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
            f"Duration of calls, in seconds; code is {SUCCESS_CODE} or {FAILURE_CODE}.",
            REQUEST_BUCKETS_S,
            labels,
        )
        self.generation = self._bulk_histogram(
            "generation_duration_seconds",
            "Time from a call's arrival to the end of each finished completion, in seconds.",
            PHASE_BUCKETS_S,
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

    def record_call(
        self, wire: str, method: str, code: str, seconds: float, exemplar: dict[str, str]
    ) -> None:
        """Count an ended call with its gRPC code, and record its duration."""
        self.requests.labels(wire, method, code).inc()
        duration_code = SUCCESS_CODE if code == SUCCESS_CODE else FAILURE_CODE
        duration = self.duration.labels(wire, method, duration_code)
        duration.observe(seconds, exemplar or None)

    def record_first_token(self, wire: str, seconds: float, exemplar: dict[str, str]) -> None:
        """Record a call's time to first token."""
        self.first_token.labels(wire).observe(seconds, exemplar or None)

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
        answers = list(answers)
        self.resumed.inc(sum(bool(answer.resumed_tokens) for answer in answers))
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

    def record_timings(
        self, timings: Iterable[AnswerTiming], arrival: float, exemplar: dict[str, str]
    ) -> None:
        """Record the queue, prefill, decode and total times of ended completions.

        `arrival`: the time at which the call arrived, on the monotonic clock.
        """
        for timing in timings:
            self.queue.observe(timing.phases.queue_s, exemplar=exemplar)
            self.prefill.observe(timing.phases.prefill_s, exemplar=exemplar)
            if timing.finish is not None:
                self.generation.observe(timing.ended_at - arrival, exemplar=exemplar)
            if timing.finish not in (None, "scored"):
                self.decode.observe(timing.decode_s, exemplar=exemplar)

    def watch_gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read at each scrape."""
        self._gauge(name, help_text).set_function(read)

    def watch_counter(self, name: str, help_text: str, read: Callable[[], int]) -> None:
        """Add a counter whose value is read at each scrape."""
        self.registry.register(_CallbackCounter(f"{PREFIX}{name}", help_text, read))

    def watch_state(
        self, name: str, help_text: str, states: Sequence[str], read: Callable[[], str]
    ) -> None:
        """Add a state gauge: one series per state."""
        self.registry.register(_StateGauge(f"{PREFIX}{name}", help_text, states, read))

    def watch_usage(self, meter: UsageMeter) -> None:
        """Add the usage of each tenant and adapter, which is read at each scrape with usage."""
        self.usage_registry.register(UsageCollector(meter))

    def set_build_info(self, **labels: str) -> None:
        """Add the build information: labels of a series whose value is always 1."""
        torch = library_version("torch") or "not installed"
        labels |= {"python": platform.python_version(), "torch": torch}
        gauge = self._gauge(
            "build_info", "Version, model and dtype of this server, as labels.", sorted(labels)
        )
        gauge.labels(**labels).set(1)

    def watch_adapter_residency(self, read: Callable[[], ResidencySnapshot]) -> None:
        """Add the series of the adapters on the device, which are read at each scrape."""
        self.registry.register(_AdapterResidency(read))

    def watch_kv_groups(
        self, groups: Sequence[KVGroup], read_stats: Callable[[], EngineStats]
    ) -> None:
        """Add the gauges of the KV groups, which are read at each scrape."""
        self.registry.register(KVGroupGauges(PREFIX, groups, read_stats))

    def set_cache_info(self, **labels: str) -> None:
        """Add the configuration of the KV cache: labels of a series whose value is always 1."""
        gauge = self._gauge(
            "kv_cache_info", "Configuration of the KV cache, as labels.", sorted(labels)
        )
        gauge.labels(**labels).set(1)

    def render(self, *, openmetrics: bool = False, with_usage: bool = False) -> bytes:
        """Return a scrape in the text format 0.0.4, or in OpenMetrics 1.0 with exemplars.

        `with_usage`: the usage of each tenant too, for operators.
        """
        exposition = _Exposition(self, with_usage)
        return _encode_openmetrics(exposition) if openmetrics else encode_text(exposition.collect())

    def _counter(self, name: str, help_text: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"{PREFIX}{name}", help_text, labels or (), registry=self.registry)

    def _preset_labels(self, counter: Counter, labels: Iterable[str]) -> None:
        """Create the series with value 0, since PromQL's `rate` ignores a series' first value."""
        for label in labels:
            counter.labels(label)

    def _bulk_histogram(self, name: str, help_text: str, bounds: Sequence[float]) -> BulkHistogram:
        histogram = BulkHistogram(f"{PREFIX}{name}", help_text, bounds)
        self.registry.register(histogram)
        return histogram

    def _gauge(self, name: str, help_text: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(f"{PREFIX}{name}", help_text, labels or (), registry=self.registry)

    def _histogram(
        self, name: str, help_text: str, buckets: tuple[float, ...], labels: list[str] | None = None
    ) -> Histogram:
        return Histogram(
            f"{PREFIX}{name}", help_text, labels or (), buckets=buckets, registry=self.registry
        )
