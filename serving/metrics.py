"""What a server says about itself to Prometheus.

One registry, owned by the front end. Counts are made where things happen; what is a state (how many
wait, how many adapters) is read at the scrape. Labels come from short fixed lists only.
"""

import sys
from collections.abc import Callable, Iterator
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
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

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
REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)


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


@dataclass
class Metrics:
    """Every series, made once; `text` is a scrape."""

    registry: CollectorRegistry = field(default_factory=lambda: CollectorRegistry())

    def __post_init__(self) -> None:
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        labels = ["wire", "method", "code"]
        self.requests = self._counter("requests", "Calls that ended, by gRPC code.", labels)
        self.finished = self._counter(
            "generation_finished", "Completions that ended well, by reason.", ["reason"]
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts' texts.")
        self.virtual_tokens = self._counter("virtual_tokens", "Tokens that adapters put in front.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens that were made.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a call's arrival to a token.",
            FIRST_TOKEN_S,
            ["wire"],
        )
        self.next_token = self._histogram(
            "inter_token_latency_seconds", "From a token to the next of its request.", NEXT_TOKEN_S
        )
        self.duration = self._histogram(
            "request_duration_seconds", "From a call's arrival to its end.", REQUEST_S, labels
        )
        self.step = self._histogram("step_duration_seconds", "Of the engine's steps.", STEP_S)
        self.in_flight = self._gauge("requests_in_flight", "Calls that have not ended.")

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge whose value is read at each scrape."""
        self._gauge(name, text).set_function(read)

    def watch_count(self, name: str, text: str, read: Callable[[], int]) -> None:
        """A counter whose value is read at each scrape."""
        self.registry.register(_Count(f"preamble_{name}", text, read))

    def build(self, **facts: str) -> None:
        """What this server is, as labels of a series that is always 1."""
        facts["python"] = ".".join(map(str, sys.version_info[:3]))
        gauge = self._gauge("build_info", "What this server is.", sorted(facts))
        gauge.labels(**facts).set(1)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"preamble_{name}", text, labels or (), registry=self.registry)

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(f"preamble_{name}", text, labels or (), registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: list[str] | None = None
    ) -> Histogram:
        return Histogram(
            f"preamble_{name}", text, labels or (), buckets=buckets, registry=self.registry
        )
