"""What a server says about itself to Prometheus.

One registry, owned by the front end. Counts are made where things happen; what is a state (how many
wait, how many adapters) is read at the scrape. Labels come from short fixed lists; of adapters only
so many have a series of their own. docs/metrics.md explains each.
"""

import math
import platform
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

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

from serving.engine.stream import Spent
from serving.request import Answer
from serving.service.error_reasons import REASONS, Reason

# Else every counter and histogram has a second series that says when it was made.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 10, 20, 60),
)
NEXT_TOKEN_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.2, 0.5, 1, 5),
)
STEP_S = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
)
PHASE_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 20, 40, 80, 160, 320),
)
REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
LENGTH_TOKENS = tuple(2.0**power for power in range(18))  # Up to 131,072.
MESSAGE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

ADAPTERS_SHOWN_MAX = 100  # Adapters with a series of their own; the rest are one, OTHER.
OTHER = "other"
ENGINE_STATES = ("loading", "serving", "restarting", "draining", "dead")
# Of a server that takes no more just now, or none of this caller.
REFUSALS = (
    *("QUEUE_FULL", "RATE_LIMITED", "LOADING", "ENGINE_RESTARTING", "DRAINING", "STOPPED"),
    "DEADLINE_PASSED",
)


def version() -> str:
    """Which Preamble this is."""
    try:
        return installed("preamble")
    except PackageNotFoundError:
        return "0+checkout"  # Run from a checkout that was never installed.


@dataclass(frozen=True)
class _Count(Collector):
    """A counter that is kept elsewhere."""

    name: str
    text: str
    read: Callable[[], int]

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self.name, self.text, value=self.read())


@dataclass(frozen=True)
class _State(Collector):
    """One series for each state, of which one is 1."""

    name: str
    text: str
    states: Sequence[str]
    read: Callable[[], str]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family, now = GaugeMetricFamily(self.name, self.text, labels=["state"]), self.read()
        for state in self.states:
            family.add_metric([state], float(state == now))
        yield family


class Spread(Collector):
    """A histogram without labels that takes many equal values at once, at the cost of one.

    The library's own would have to be called once for each token.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = (*map(float, bounds), math.inf)
        self._counts, self._sum = [0] * len(self._bounds), 0.0
        self._lock = threading.Lock()

    def observe(self, value: float, times: int = 1) -> None:
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += times
            self._sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        with self._lock:
            counts, total = list(self._counts), self._sum
        seen, buckets = 0, []
        for bound, count in zip(self._bounds, counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == math.inf else str(bound), seen))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=total)


@dataclass
class Metrics:
    """Every series, made once; `text` is a scrape."""

    registry: CollectorRegistry = field(default_factory=lambda: CollectorRegistry())
    last_step: float = 0.0  # When the last step ended, on the wall clock; 0: none has.

    def __post_init__(self) -> None:
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        labels = ["wire", "method", "code"]
        self.requests = self._counter("requests", "Calls that ended, by gRPC code.", labels)
        self.errors = self._counter("request_errors", "Calls that ended badly.", ["reason"])
        self.rejections = self._counter(
            "admission_rejections", "Calls of which nothing was accepted, for load.", ["reason"]
        )
        self._appear(self.errors, REASONS)
        self._appear(self.rejections, REFUSALS)
        self.finished = self._counter(
            "generation_finished", "Completions that ended well, by reason.", ["reason"]
        )
        self.adapter_requests = self._counter(
            "adapter_requests",
            "Requests accepted for an adapter, all of its versions.",
            ["adapter"],
        )
        self.golden = self._counter(
            "adapter_golden", "Adapters whose golden examples were replayed.", ["result"]
        )
        self._appear(self.golden, ("passed", "failed"))
        self._shown: set[str] = set()
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts' texts.")
        self.virtual_tokens = self._counter("virtual_tokens", "Tokens that adapters put in front.")
        self.cached_tokens = self._counter("cached_tokens", "Of prompts, found in the cache.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens that were made.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a call's arrival to a token.",
            FIRST_TOKEN_S,
            ["wire"],
        )
        self.next_token = self._spread(
            "inter_token_latency_seconds", "From a token to the next of its answer.", NEXT_TOKEN_S
        )
        self.duration = self._histogram(
            "request_duration_seconds", "From a call's arrival to its end.", REQUEST_S, labels
        )
        self.prompt_length = self._spread(
            "prompt_length_tokens", "Of each answer's prompt, virtual ones too.", LENGTH_TOKENS
        )
        self.generated_length = self._spread(
            "generated_length_tokens", "Of each answer that ended well.", LENGTH_TOKENS
        )
        self.message_tokens = self._spread(
            "stream_message_tokens", "Tokens that one message of a stream had.", MESSAGE_TOKENS
        )
        self.queue = self._spread(
            "queue_duration_seconds", "Of each answer: it waited for its turn.", PHASE_S
        )
        self.prefill = self._spread(
            "prefill_duration_seconds", "From then to its first token, but for waits.", PHASE_S
        )
        self.decode = self._spread(
            "decode_duration_seconds", "From its first token to its end, if that is good.", PHASE_S
        )
        self.step = self._spread("step_duration_seconds", "Of the engine's steps.", STEP_S)
        self.in_flight = self._gauge("requests_in_flight", "Calls that have not ended.")

    def stepped(self, seconds: float) -> None:
        """A step of the engine ended."""
        self.step.observe(seconds)
        self.last_step = time.time()

    def ended(self, reason: Reason, *, accepted: bool) -> None:
        """A call ended badly; `accepted`: after something of it was."""
        self.errors.labels(reason.name).inc()
        if not accepted and reason.name in REFUSALS:
            self.rejections.labels(reason.name).inc()

    def replayed(self, *, passed: bool) -> None:
        """An adapter's golden examples were."""
        self.golden.labels("passed" if passed else "failed").inc()

    def accepted(self, answers: Iterable[Answer]) -> None:
        """A request was accepted. What comes first is shown; names are not bounded, series are.

        A scrape may be anyone's, so a tenant's own adapters are not named.
        """
        names = {OTHER if one.private else one.adapter.partition("@")[0] for one in answers}
        for name in names - {""}:
            if name != OTHER and len(self._shown) < ADAPTERS_SHOWN_MAX:
                self._shown.add(name)
            self.adapter_requests.labels(name if name in self._shown else OTHER).inc()

    def answered(self, answer: Answer, finish: str, made: int) -> None:
        """An answer ended well, with so many tokens."""
        self.finished.labels(finish).inc()
        self.prompt_tokens.inc(answer.prompt_tokens)
        self.virtual_tokens.inc(answer.virtual_tokens)
        self.prompt_length.observe(len(answer.prompt))
        self.generated_length.observe(made)

    def spent(self, answers: Iterable[Spent]) -> None:
        """Where the time of answers went that have ended."""
        for one in answers:
            self.queue.observe(one.phases.queue_s)
            self.prefill.observe(one.phases.prefill_s)
            if one.finish not in (None, "scored"):
                self.decode.observe(one.decode_s)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge whose value is read at each scrape."""
        self._gauge(name, text).set_function(read)

    def watch_count(self, name: str, text: str, read: Callable[[], int]) -> None:
        """A counter whose value is read at each scrape."""
        self.registry.register(_Count(f"preamble_{name}", text, read))

    def watch_state(
        self, name: str, text: str, states: Sequence[str], read: Callable[[], str]
    ) -> None:
        """One of a few states, as a series for each."""
        self.registry.register(_State(f"preamble_{name}", text, states, read))

    def build(self, **facts: str) -> None:
        """What this server is, as labels of a series that is always 1."""
        facts |= {"python": platform.python_version(), "torch": installed("torch")}
        gauge = self._gauge("build_info", "What this server is.", sorted(facts))
        gauge.labels(**facts).set(1)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"preamble_{name}", text, labels or (), registry=self.registry)

    def _appear(self, counter: Counter, labels: Iterable[str]) -> None:
        """At 0 from the start: a rate does not see the count that a series begins with."""
        for label in labels:
            counter.labels(label)

    def _spread(self, name: str, text: str, bounds: Sequence[float]) -> Spread:
        spread = Spread(f"preamble_{name}", text, bounds)
        self.registry.register(spread)
        return spread

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(f"preamble_{name}", text, labels or (), registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: list[str] | None = None
    ) -> Histogram:
        return Histogram(
            f"preamble_{name}", text, labels or (), buckets=buckets, registry=self.registry
        )
