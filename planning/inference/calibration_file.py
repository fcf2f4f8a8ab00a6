"""Calibration file: measured step costs of several models on one machine, as YAML.

The models are reference models of several sizes and, if requested, a model of the user. From their
step costs, `planning.inference.step_pricing` interpolates the step costs of other models. The file
records the date, the device and the software versions of the measurement. The module does not
import torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.files.atomic_files import write_atomic
from gpt.settings import parse_settings, read_yaml, short_repr
from planning.hardware import Cluster, Device
from planning.inference.step_cost import PiecewiseLinear, StepCostModel

# Version of the file format; increase it with every incompatible change.
FORMAT_VERSION = 1
HEADER = (
    "# Step costs measured on this machine; written by `preamble plan calibrate`, "
    "read with --calibration.\n"
)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine the duration of its steps."""

    layers: int
    hidden: int
    # Number of weights that one token uses, summed over all layers. In a MoE layer, only the
    # experts that compute the token are counted.
    layer_weights: int
    vocab: int
    kv_width: int  # Width of the keys of one layer; the values have the same width.
    query_width: int  # Width of the queries of one layer.

    @classmethod
    def from_config(cls, config: GPTConfig) -> "ModelShape":
        h, d = config.hidden_size, config.kv_channels
        queries, keys = config.num_attention_heads * d, config.num_query_groups * d
        attention = h * (2 * queries + 2 * keys)
        matrices = 3 if config.gated else 2
        moe_layers = sum(config.moe_layers)
        moe_ffn_width = config.moe_router_topk * config.moe_ffn_hidden_size
        moe_ffn_width += config.moe_shared_expert_intermediate_size
        dense_layers = config.num_layers - moe_layers
        ffn_width_sum = dense_layers * config.ffn_hidden_size + moe_layers * moe_ffn_width
        return cls(
            layers=config.num_layers,
            hidden=h,
            layer_weights=config.num_layers * attention + matrices * h * ffn_width_sum,
            vocab=config.vocab_size,
            kv_width=keys,
            query_width=queries,
        )


@dataclass(frozen=True)
class MeasuredModel:
    """Step costs of one model in one dtype and one TP/PP split."""

    shape: ModelShape
    dtype: str
    steps: StepCostModel
    tp: int = 1
    pp: int = 1
    name: str = ""  # Name for display.


@dataclass(frozen=True)
class Calibration:
    """The measured step costs of the engine on one machine."""

    date: str
    device: str  # Name of the CPU or GPU model.
    kind: str  # "cpu" or "cuda".
    memory_bytes: int  # Memory of the device; for a CPU, memory of the machine.
    # FLOP/s of the layers in a model's largest timed step; the maximum over the measured models.
    flops: float
    # Highest speed at which a model read its weights in a step of one token, in bytes per second.
    bandwidth_bytes: float
    threads: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    request_s: float = 0.0  # Seconds that a request spends in the server outside of the engine.
    request_token_s: float = 0.0  # Additional seconds outside of the engine per prompt token.
    error: float = 0.15  # Relative error of predictions for a model that was measured.
    models: tuple[MeasuredModel, ...] = ()

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError(
                "the calibration contains no models; write it again: preamble plan calibrate"
            )
        for name in ("memory_bytes", "flops", "bandwidth_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be more than 0")

    def as_cluster(self) -> Cluster:
        """Return this machine as a cluster of one device."""
        device = Device(
            name="this-cpu" if self.kind == "cpu" else "this-gpu",
            flops=self.flops,
            memory_bytes=self.memory_bytes,
            memory_bytes_per_s=self.bandwidth_bytes,
            # Links are not measured. Ranks on one CPU communicate through its memory.
            link_bytes_per_s=self.bandwidth_bytes,
            network_bytes_per_s=self.bandwidth_bytes,
        )
        return Cluster(device, gpus=1, gpus_per_node=1)


def read_calibration(path: Path) -> Calibration:
    record = read_yaml(path)
    source = str(path)
    format_version = record.pop("format", None)
    if format_version != FORMAT_VERSION:
        raise ConfigError(
            f"{source} has format {short_repr(format_version)}, and this version reads format "
            f"{FORMAT_VERSION}; write it again: preamble plan calibrate"
        )
    models = record.pop("models", ())
    if not isinstance(models, list) or not all(
        isinstance(model_record, dict) for model_record in models
    ):
        raise ConfigError(
            f"{source}: models must be a list of mappings; write it again: preamble plan calibrate"
        )
    measured = tuple(_parse_model(model_record, source) for model_record in models)
    versions = record.pop("versions", {})
    if not isinstance(versions, dict):
        raise ConfigError(
            f"{source}: versions must be a mapping of names to versions; write it again: preamble "
            "plan calibrate"
        )
    # The keys that are still in `record` are fields of Calibration.
    settings: dict[str, Any] = {**record, "models": measured, "versions": versions}
    if isinstance(settings.get("memory_bytes"), float):
        settings["memory_bytes"] = int(settings["memory_bytes"])
    return parse_settings(Calibration, settings, source)


def _parse_model(record: Mapping[str, Any], source: str) -> MeasuredModel:
    parts = dict(record)
    steps = _require_mapping(parts.pop("steps", None), "steps", source)
    shape = parse_settings(
        ModelShape, _require_mapping(parts.pop("shape", None), "shape", source), source
    )
    for name in ("rows", "draws"):
        steps[name] = _parse_curve(steps.get(name), name, source)
    return parse_settings(
        MeasuredModel,
        {**parts, "shape": shape, "steps": parse_settings(StepCostModel, steps, source)},
        source,
    )


def _require_mapping(value: object, name: str, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{source}: a model has no mapping {name!r}; write the file again: preamble plan "
            "calibrate"
        )
    return {str(key): member for key, member in value.items()}


def _parse_curve(value: object, name: str, source: str) -> PiecewiseLinear:
    try:
        pairs = value if isinstance(value, list) else []
        points = tuple((float(x), float(y)) for x, y in pairs)
    except (TypeError, ValueError):
        points = ()
    if not points or list(points) != sorted(points) or min(y for _, y in points) < 0:
        raise ConfigError(
            f"{source}: {name} must be a list of [tokens, seconds], sorted by tokens, with no "
            "negative seconds; write it again: preamble plan calibrate"
        )
    return PiecewiseLinear(points)


def write_calibration(calibration: Calibration, path: Path) -> None:
    record = {"format": FORMAT_VERSION, **asdict(calibration)}
    record["versions"] = dict(calibration.versions)
    record["models"] = [_model_record(model) for model in calibration.models]
    text = HEADER + yaml.safe_dump(record, sort_keys=False, default_flow_style=None, width=100)
    try:
        write_atomic(path, text.encode(), durable=False)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; set another path with --output"
        ) from None


def _model_record(model: MeasuredModel) -> dict[str, object]:
    record = asdict(model)
    for name in ("rows", "draws"):
        points = getattr(model.steps, name).points
        record["steps"][name] = [
            [_round_to_six_digits(x), _round_to_six_digits(y)] for x, y in points
        ]
    for name in ("context_s", "pair_s", "sequence_s", "step_s"):
        record["steps"][name] = _round_to_six_digits(getattr(model.steps, name))
    return record


def _round_to_six_digits(value: float) -> float:
    """Round to six significant digits, more than the precision of a timing."""
    return float(f"{value:.6g}")
