"""A machine's calibration: what our engine's steps took there, and the file that keeps it.

Models were measured one by one: the user's own, and plain ones of a few sizes, between which any
other finds itself. The file says when it was made, on what, and by which software. No torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.settings import read_yaml, settings, shown
from planning.atomic_write import put
from planning.hardware import Cluster, Device
from planning.inference.step_cost import Curve, Steps

# A change that makes old files mean something else has another number.
FORMAT = 1
HEAD = "# What steps took here; made by `preamble plan calibrate`, read with --calibration.\n"


@dataclass(frozen=True)
class Shape:
    """What of a model decides how long its steps are."""

    layers: int
    hidden: int
    layer_weights: int  # Of all layers, those that a token passes.
    vocab: int
    kv_width: int  # Of one layer's keys.
    query_width: int

    @classmethod
    def of(cls, config: GPTConfig) -> "Shape":
        h, d = config.hidden_size, config.kv_channels
        queries, keys = config.num_attention_heads * d, config.num_query_groups * d
        attention = h * (2 * queries + 2 * keys)
        matrices = 3 if config.gated else 2
        experts = sum(config.moe_layers)
        active = config.moe_router_topk * config.moe_ffn_hidden_size
        active += config.moe_shared_expert_intermediate_size
        plain = config.num_layers - experts
        widths = plain * config.ffn_hidden_size + experts * active
        return cls(
            layers=config.num_layers,
            hidden=h,
            layer_weights=config.num_layers * attention + matrices * h * widths,
            vocab=config.vocab_size,
            kv_width=keys,
            query_width=queries,
        )


@dataclass(frozen=True)
class Measured:
    """Steps of one model, in one dtype and split."""

    shape: Shape
    dtype: str
    steps: Steps
    tp: int = 1
    pp: int = 1
    name: str = ""  # For people.


@dataclass(frozen=True)
class StepCosts:
    """What the steps of our engine cost on a machine."""

    date: str
    device: str  # In words.
    kind: str  # cpu or cuda.
    memory_bytes: int  # Of the device; the machine's, where that is the CPU.
    flops: float  # Of the largest product that was timed.
    bandwidth_bytes: float  # At which weights were read.
    threads: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    request_s: float = 0.0  # A call's way to its first step, and of its first token back.
    request_token_s: float = 0.0  # And what each token of its prompt adds to that.
    error: float = 0.15  # Of a model that was measured itself.
    models: tuple[Measured, ...] = ()

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("a calibration has no models; make it anew: preamble plan calibrate")
        for name in ("memory_bytes", "flops", "bandwidth_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be more than 0")

    def cluster(self) -> Cluster:
        """This machine, as if it were a GPU: what a plan for it is made on."""
        name = "this-cpu" if self.kind == "cpu" else "this-gpu"
        speeds = self.flops, self.memory_bytes, self.bandwidth_bytes
        # Ranks on one CPU talk through its memory.
        return Cluster(Device(name, *speeds, self.bandwidth_bytes, self.bandwidth_bytes), 1, 1)


def read_calibration(path: Path) -> StepCosts:
    record = read_yaml(path)
    where = str(path)
    made = record.pop("format", None)
    if made != FORMAT:
        raise ConfigError(
            f"{where} has the format {shown(made)}, this reads {FORMAT}; make it anew: "
            "preamble plan calibrate"
        )
    models = record.pop("models", ())
    if not isinstance(models, list) or not all(isinstance(one, dict) for one in models):
        raise ConfigError(f"{where}: models must be a list; make it anew: preamble plan calibrate")
    measured = tuple(_measured(one, where) for one in models)
    versions = record.pop("versions", {})
    if not isinstance(versions, dict):
        raise ConfigError(f"{where}: versions must be a mapping of names to versions")
    # The schema is the dataclass, but for what was taken out above.
    flat: dict[str, Any] = {**record, "models": measured, "versions": versions}
    if isinstance(flat.get("memory_bytes"), float):
        flat["memory_bytes"] = int(flat["memory_bytes"])
    return settings(StepCosts, flat, where)


def _measured(record: Mapping[str, Any], where: str) -> Measured:
    parts = dict(record)
    steps = _mapping(parts.pop("steps", None), "steps", where)
    shape = settings(Shape, _mapping(parts.pop("shape", None), "shape", where), where)
    for name in ("rows", "draws"):
        steps[name] = _curve(steps.get(name), name, where)
    return settings(
        Measured, {**parts, "shape": shape, "steps": settings(Steps, steps, where)}, where
    )


def _mapping(value: object, name: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a model lacks {name}; make it anew: preamble plan calibrate")
    return {str(key): one for key, one in value.items()}


def _curve(value: object, name: str, where: str) -> Curve:
    try:
        listed = value if isinstance(value, list) else []
        points = tuple((float(x), float(y)) for x, y in listed)
    except (TypeError, ValueError):
        points = ()
    if not points or list(points) != sorted(points) or min(y for _, y in points) < 0:
        raise ConfigError(f"{where}: {name} must be a list of [tokens, seconds], growing in tokens")
    return Curve(points)


def write_calibration(costs: StepCosts, path: Path) -> None:
    """Whole or not at all."""
    record = {"format": FORMAT, **asdict(costs)}
    record["versions"] = dict(costs.versions)
    record["models"] = [_record(one) for one in costs.models]
    text = HEAD + yaml.safe_dump(record, sort_keys=False, default_flow_style=None, width=100)
    try:
        put(path, text.encode())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; name another with --output"
        ) from None


def _record(one: Measured) -> dict[str, object]:
    record = asdict(one)
    for name in ("rows", "draws"):
        points = getattr(one.steps, name).points
        record["steps"][name] = [[_short(x), _short(y)] for x, y in points]
    for name in ("context_s", "pair_s", "sequence_s", "step_s"):
        record["steps"][name] = _short(getattr(one.steps, name))
    return record


def _short(value: float) -> float:
    """As many digits as a timing can have."""
    return float(f"{value:.6g}")
