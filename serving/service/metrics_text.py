"""Text encoder of metrics: the same bytes as prometheus_client's encoder, in less time.

Routers scrape every second or more often. The labels of a series are the same in each scrape, so
their text is cached; prometheus_client sorts and escapes them each time. Names of metrics and
labels must be valid, because they are not escaped.
"""

from collections.abc import Iterable
from functools import lru_cache

from prometheus_client import Metric
from prometheus_client.utils import floatToGoString

LABEL_TEXTS_MAX = 8192  # Label texts in the cache: more than a scrape has series.
VALUE_TEXTS_MAX = 4096
# Suffixes of OpenMetrics, which are gauges of their own in this format.
_GAUGE_SUFFIXES = ("_created", "_gsum", "_gcount")
_TYPES = {"info": "gauge", "stateset": "gauge", "gaugehistogram": "histogram", "unknown": "untyped"}
_NAME_SUFFIXES = {"counter": "_total", "info": "_info"}
_LABEL_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def encode_text(families: Iterable[Metric]) -> bytes:
    """Return a scrape of these families."""
    lines: list[str] = []
    for family in families:
        documentation = family.documentation.translate(_HELP_ESCAPES)
        name = family.name + _NAME_SUFFIXES.get(family.type, "")
        lines += _header(name, documentation, _TYPES.get(family.type, family.type))
        gauge_lines: dict[str, list[str]] = {}
        gauge_names = {family.name + suffix: suffix for suffix in _GAUGE_SUFFIXES}
        # The labels of an info series, such as lists of adapters, are long and change.
        label_text = _label_text if family.name.endswith("_info") else _cached_label_text
        for sample in family.samples:
            labels = label_text(tuple(sample.labels.items())) if sample.labels else ""
            timestamp = ""
            if sample.timestamp is not None:
                timestamp = f" {int(float(sample.timestamp) * 1000)}"
            line = f"{sample.name}{labels} {_value_text(sample.value)}{timestamp}\n"
            suffix = gauge_names.get(sample.name)
            (lines if suffix is None else gauge_lines.setdefault(suffix, [])).append(line)
        for suffix, suffix_lines in sorted(gauge_lines.items()):
            lines += _header(family.name + suffix, documentation, "gauge") + suffix_lines
    return "".join(lines).encode()


def _header(name: str, documentation: str, kind: str) -> list[str]:
    return [f"# HELP {name} {documentation}\n", f"# TYPE {name} {kind}\n"]


def _label_text(labels: tuple[tuple[str, str], ...]) -> str:
    pairs = (f'{name}="{value.translate(_LABEL_ESCAPES)}"' for name, value in sorted(labels))
    return f"{{{','.join(pairs)}}}"


_cached_label_text = lru_cache(LABEL_TEXTS_MAX)(_label_text)


@lru_cache(VALUE_TEXTS_MAX)
def _value_text(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text
