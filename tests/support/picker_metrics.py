"""How llm-d's endpoint picker reads metrics: a port of its rules, as an oracle for tests.

The picker parses the text format with Prometheus' Go library and reads gauges and counters by
specifications such as `name{label=value}` (llm-d/llm-d-router v0.10.0,
pkg/epp/framework/plugins/datalayer/extractor/metrics).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
INTEGER = re.compile(r"[+-]?[0-9]+")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("", "_sum", "_count")}
ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
# The specifications of the picker's own engine `vllm`, which it uses without configuration.
VLLM_ENGINE = {
    "queuedRequestsSpec": "vllm:num_requests_waiting",
    "runningRequestsSpec": "vllm:num_requests_running",
    "kvUsageSpec": "vllm:kv_cache_usage_perc",
    "loraSpec": "vllm:lora_requests_info",
    "cacheInfoSpec": "vllm:cache_config_info",
}


class PickerError(Exception):
    """The picker logs an error, and does not use this scrape or this value."""


@dataclass(frozen=True)
class PickerSample:
    labels: Mapping[str, str]
    value: float
    timestamp_ms: int


@dataclass
class PickerFamily:
    type: str  # `untyped` without a TYPE line.
    samples: list[PickerSample] = field(default_factory=list)


@dataclass
class EndpointMetrics:
    """What the picker knows of a server."""

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    active_adapters: set[str] = field(default_factory=set)
    waiting_adapters: set[str] = field(default_factory=set)
    adapters_max: int = 0
    block_tokens: int = 0
    blocks: int = 0


def parse_families(text: str) -> dict[str, PickerFamily]:
    """Parse the text format as Prometheus' Go library does, with its old rules for names."""
    if text and not text.endswith("\n"):
        raise PickerError("unexpected end of input")
    families: dict[str, PickerFamily] = {}
    helped: set[str] = set()
    for line in text.splitlines():
        line = line.strip(" \t")
        if not line:
            continue
        if line.startswith("#"):
            _parse_comment(line, families, helped)
        else:
            _parse_sample(line, families)
    # The library removes families without samples.
    return {name: family for name, family in families.items() if family.samples}


def _parse_comment(line: str, families: dict[str, PickerFamily], helped: set[str]) -> None:
    words = line.removeprefix("#").split(None, 2)
    if not words or words[0] not in ("HELP", "TYPE"):
        return
    if len(words) < 2 or not METRIC_NAME.fullmatch(words[1]):
        raise PickerError(f"invalid metric name in comment: {line}")
    name = words[1]
    if words[0] == "HELP":
        if name in helped:
            raise PickerError(f"second HELP line for metric name {name!r}")
        helped.add(name)
        return
    kind = words[2].strip().lower() if len(words) > 2 else ""
    if kind not in ("counter", "gauge", "histogram", "summary", "untyped"):
        raise PickerError(f"unknown metric type {kind!r}")
    if name in families:
        raise PickerError(f"second TYPE line for metric name {name!r}, or TYPE after samples")
    families[name] = PickerFamily(kind)


def _parse_sample(line: str, families: dict[str, PickerFamily]) -> None:
    match = METRIC_NAME.match(line)
    if match is None:
        raise PickerError(f"invalid metric name: {line}")
    name, rest = match[0], line[match.end() :].lstrip(" \t")
    labels: dict[str, str] = {}
    if rest.startswith("{"):
        labels, rest = _parse_labels(rest[1:])
    words = rest.split()
    if len(words) not in (1, 2):
        raise PickerError(f"expected a value and a timestamp: {line}")
    try:
        value = float(words[0])
    except ValueError:
        raise PickerError(f"expected float as value, got {words[0]!r}") from None
    if len(words) == 2 and not INTEGER.fullmatch(words[1]):
        raise PickerError(f"expected integer as timestamp, got {words[1]!r}")
    family = _family_of(name, families)
    family.samples.append(PickerSample(labels, value, int(words[1]) if len(words) == 2 else 0))


def _family_of(name: str, families: dict[str, PickerFamily]) -> PickerFamily:
    if name in families:
        return families[name]
    for kind, suffixes in SUFFIXES.items():
        for suffix in filter(None, suffixes):
            family = families.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
            if family is not None and family.type == kind:
                return family
    return families.setdefault(name, PickerFamily("untyped"))


def _parse_labels(text: str) -> tuple[dict[str, str], str]:
    """Parse labels from after `{` to `}`; return the text after it."""
    labels: dict[str, str] = {}
    while True:
        text = text.lstrip(" \t")
        if text.startswith("}"):
            return labels, text[1:]
        match = LABEL_NAME.match(text)
        if match is None:
            raise PickerError(f"invalid label name: {text[:40]}")
        name = match[0]
        if name in labels or name == "__name__":
            raise PickerError(f"duplicate or reserved label {name!r}")
        value = re.match(r'\s*=\s*"((?:[^"\\]|\\[\\"n])*)"\s*(,?)', text[match.end() :])
        if value is None:
            raise PickerError(f"invalid value of label {name!r}")
        labels[name] = re.sub(r'\\[\\"n]', lambda escape: ESCAPES[escape[0]], value[1])
        text = text[match.end() + value.end() :]
        if not value[2] and not text.startswith("}"):
            raise PickerError(f"unexpected end of label value of {name!r}")


@dataclass(frozen=True)
class Specification:
    """A metric's name, and the labels that a series must have."""

    name: str
    labels: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> "Specification":
        quoted = re.sub(r'(\w+)\s*=\s*([^",}\s]+)', r'\1="\2"', text)
        match = re.fullmatch(r"\s*(\S+?)\s*(?:\{([^}]*)\})?\s*", quoted)
        if match is None or not METRIC_NAME.fullmatch(match[1]):
            raise PickerError(f"not a valid metric specification: {text!r}")
        labels = {}
        if (match[2] or "").strip():
            for pair in match[2].split(","):
                parts = re.fullmatch(r'\s*(\S+?)\s*=\s*"([^"]*)"\s*', pair)
                if parts is None or not LABEL_NAME.fullmatch(parts[1]):
                    raise PickerError(f"invalid label pair {pair!r} in specification: {text!r}")
                labels[parts[1]] = parts[2]
        return cls(match[1], labels)

    def matches(self, sample: PickerSample) -> bool:
        return all(sample.labels.get(name) == value for name, value in self.labels.items())


def read_endpoint(text: str, engine: Mapping[str, Any]) -> EndpointMetrics:
    """Return what the picker reads from a scrape; `engine` is an entry of `engineConfigs`.

    The picker logs the errors of single values and uses the other values; this port raises them.
    """
    families = parse_families(text)
    metrics = EndpointMetrics()

    def latest_value(key: str) -> float:
        return _value(*_latest(families, Specification.parse(engine[key])))

    if engine.get("queuedRequestsSpec"):
        metrics.waiting = int(latest_value("queuedRequestsSpec"))
    if engine.get("runningRequestsSpec"):
        metrics.running = int(latest_value("runningRequestsSpec"))
    if engine.get("kvUsageSpec"):
        metrics.kv_usage = latest_value("kvUsageSpec")
    if engine.get("loraSpec"):
        _read_adapters(families, Specification.parse(engine["loraSpec"]), metrics)
    if engine.get("cacheInfoSpec"):
        _, sample = _latest(families, Specification.parse(engine["cacheInfoSpec"]))
        block_label = engine.get("cacheBlockSizeLabelName") or "block_size"
        blocks_label = engine.get("cacheNumBlocksLabelName") or "num_gpu_blocks"
        metrics.block_tokens = _label_integer(sample, block_label)
        metrics.blocks = _label_integer(sample, blocks_label)
    if engine.get("cacheBlockSizeSpec"):
        metrics.block_tokens = int(latest_value("cacheBlockSizeSpec"))
    if engine.get("cacheNumBlocksSpec"):
        metrics.blocks = int(latest_value("cacheNumBlocksSpec"))
    return metrics


def _latest(
    families: Mapping[str, PickerFamily], specification: Specification
) -> tuple[PickerFamily, PickerSample]:
    """Return the series with the latest timestamp; of series without timestamps, the first."""
    family = families.get(specification.name)
    if family is None:
        raise PickerError(f"metric family {specification.name!r} not found")
    latest = None
    for sample in filter(specification.matches, family.samples):
        if latest is None or sample.timestamp_ms > latest.timestamp_ms:
            latest = sample
    if latest is None:
        raise PickerError(f"no matching metric found for {specification}")
    return family, latest


def _value(family: PickerFamily, sample: PickerSample) -> float:
    """Return the value of a gauge or a counter; other types read as 0."""
    return sample.value if family.type in ("gauge", "counter") else 0.0


def _read_adapters(
    families: Mapping[str, PickerFamily], specification: Specification, metrics: EndpointMetrics
) -> None:
    """Read the series with the largest value, a time; no series is no error."""
    family = families.get(specification.name)
    if family is None:
        return
    latest, latest_time = None, -1.0
    for sample in filter(specification.matches, family.samples):
        if _value(family, sample) > latest_time:
            latest, latest_time = sample, _value(family, sample)
    if latest is None:
        return
    metrics.active_adapters = _names(latest.labels.get("running_lora_adapters", ""))
    metrics.waiting_adapters = _names(latest.labels.get("waiting_lora_adapters", ""))
    metrics.adapters_max = _label_integer(latest, "max_lora")


def _names(text: str) -> set[str]:
    return {name.strip() for name in text.split(",") if name.strip()}


def _label_integer(sample: PickerSample, label: str) -> int:
    """Return a label's value as Go's `Atoi` does; an absent or empty one is 0."""
    text = sample.labels.get(label, "")
    if not text:
        return 0
    if not INTEGER.fullmatch(text):
        raise PickerError(f"{label} is {text!r}")
    return int(text)


def affinity_score(metrics: EndpointMetrics, model: str) -> float:
    """Return the score of the picker's lora-affinity-scorer for a request of this model."""
    if model in metrics.active_adapters:
        return 1.0
    if len(metrics.active_adapters) + len(metrics.waiting_adapters) < metrics.adapters_max:
        return 0.8
    return 0.6 if model in metrics.waiting_adapters else 0.0
