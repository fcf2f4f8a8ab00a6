"""The encoder of the text format writes the same bytes as prometheus_client's."""

import math
import tracemalloc
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.service.metrics_text import encode_text

VALUES = (0, 1, -2.5, 1e-9, 123456789.0, 1.5e300, math.inf, -math.inf, math.nan)
TEXTS = ("", "plain", 'quote " backslash \\ newline \n', "\\n", "Füchse 狐", "a,b={c}")


class Families(Collector):
    """Families with unusual values, labels and types."""

    def collect(self) -> Iterator[Metric]:
        values = GaugeMetricFamily("values", "Values \\ of\nall kinds.", labels=["b", "a"])
        for number, value in enumerate(VALUES):
            values.add_metric([str(number), TEXTS[number % len(TEXTS)]], value)
        yield values
        stamped = GaugeMetricFamily("stamped", "With a timestamp.", labels=[])
        stamped.add_metric([], 3.0, timestamp=1.7e9 + 0.25)
        yield stamped
        bucket = ("+Inf", 4, Exemplar({"trace_id": "a"}, 1.0))
        yield HistogramMetricFamily(
            "bulk", "A histogram.", buckets=[("1.0", 2), bucket], sum_value=3
        )
        for kind in ("unknown", "stateset", "gaugehistogram"):
            other = Metric(f"other_{kind}", "Another type.", kind)
            for suffix in ("", "_gsum", "_gcount", "_created"):
                other.add_sample(f"other_{kind}{suffix}", {"le": "1"}, 2.0)
            yield other
        yield Metric("empty", "Without samples.", "counter")


def test_the_text_equals_that_of_prometheus_client() -> None:
    registry = CollectorRegistry()
    counter = Counter("calls", "Calls.", ["method"], registry=registry)
    for text in TEXTS:
        counter.labels(text).inc()
    Gauge("load", "Load.", registry=registry).set(2)
    Histogram("seconds", "Seconds.", ["a"], registry=registry).labels("x").observe(0.2)
    Info("build", "Build.", registry=registry).info({"version": "1"})
    registry.register(Families())
    for _ in range(2):  # The second time, the texts of labels are cached.
        assert encode_text(registry.collect()) == generate_latest(registry)
        counter.labels("plain").inc(3)


def test_the_labels_of_info_series_are_not_cached() -> None:
    """The series of the adapters on the device has new labels whenever an adapter is loaded."""

    def encode(count: int) -> None:
        for number in range(count):
            family = GaugeMetricFamily("adapters_info", "Adapters.", labels=["adapters"])
            family.add_metric([f"{number}" + "a" * 10_000], 1.0)
            encode_text([family])

    encode(1)
    tracemalloc.start()
    encode(300)
    cached_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cached_bytes < 100_000
