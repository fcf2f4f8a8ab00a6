"""What is asked of a plan: a YAML file in sections, each of them a dataclass, and flags over it.

A flag has the name of its field, so both fill the same sections and neither knows of the other.
Here a model's name or path becomes its config, a GPU's name a cluster; nothing is searched.
"""

import os.path
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, get_args

from gpt.config import DTYPE_BYTES, GPTConfig
from gpt.costs.training import Trainable
from gpt.errors import ConfigError
from gpt.settings import nearest, read_yaml, settings, shown
from planning.hardware import DEVICES, Cluster, Device, divisors, find_device
from planning.inference.calibration_file import StepCosts, read_calibration
from planning.model_presets import LLAMA, find_preset
from planning.training.estimate import TrainingJob

VOCABULARY = 51200  # GPT-2's, padded as the field's tables have it.
SEQUENCE = 2048
COUNT_MAX = 10**9  # Of anything that is counted: more is a slip of the hand.
COUNTS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
# As people write dtypes, and as we do.
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
DTYPES = (*DTYPE_BYTES, "fp8", "int8", "int4")


@dataclass(frozen=True)
class ModelWish:
    """A checkpoint, a preset, or sizes alone; sizes may also change a preset's."""

    path: str | None = None  # A checkpoint's, or a preset's name.
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    seq: int | None = None  # Tokens of a sequence; also the context, where only sizes are told.
    gated: bool | None = None  # LLaMA's kind of network instead of GPT-3's.

    def __post_init__(self) -> None:
        _check_positive(self)

    @property
    def checkpoint(self) -> str | None:
        """The path, if it is one and no preset's name."""
        if self.path is None:
            return None
        looks = "/" in self.path or self.path.startswith((".", "~"))
        return self.path if looks or os.path.exists(self.path) else None

    def config(self) -> GPTConfig:
        given = {
            name: value
            for name, value in self._sizes().items()
            if value is not None and name != "max_position_embeddings"
        }
        if self.checkpoint is not None:
            if given or self.gated:
                raise ConfigError(
                    f"{self.checkpoint} says itself what the model is; leave out "
                    f"{', '.join(self._flags(given) or ['--gated'])}"
                )
            return _read_config(self.checkpoint)
        if self.path is None:
            return self._of_sizes()
        known = find_preset(self.path)
        if self.gated and not known.gated:
            raise ConfigError(f"{self.path} is a GPT-3 size; for LLaMA's kind leave --gated out")
        if self.seq is not None and self.seq > known.max_position_embeddings:
            given["max_position_embeddings"] = self.seq
        return replace(known, **self._derived(given, known), **given) if given else known

    def _sizes(self) -> dict[str, Any]:
        return {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_query_groups": self.kv_heads,
            "ffn_hidden_size": self.ffn,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.seq,
        }

    def _flags(self, given: Mapping[str, Any]) -> list[str]:
        flags = ("layers", "hidden", "heads", "kv-heads", "ffn", "vocab", "seq")
        return [
            f"--{flag}" for flag, name in zip(flags, self._sizes(), strict=True) if name in given
        ]

    @staticmethod
    def _derived(given: Mapping[str, Any], known: GPTConfig) -> dict[str, Any]:
        """What a preset has derived from sizes that are not its own any more: derived again."""
        again: dict[str, Any] = {}
        heads = given.get("num_attention_heads", known.num_attention_heads)
        hidden = given.get("hidden_size", known.hidden_size)
        check_heads(hidden, heads, given.get("num_query_groups"))
        if "hidden_size" in given and known.ffn_hidden_size == 4 * known.hidden_size:
            again["ffn_hidden_size"] = 0
        if "num_attention_heads" in given and known.num_query_groups == known.num_attention_heads:
            again["num_query_groups"] = 0
        if {"hidden_size", "num_attention_heads"} & set(given):
            again["kv_channels"] = 0
        if "num_layers" in given:
            again["moe_layers"] = ()
        if {"hidden_size", "ffn_hidden_size"} & set(given):
            again["moe_ffn_hidden_size"] = 0
        return {name: value for name, value in again.items() if name not in given}

    def _of_sizes(self) -> GPTConfig:
        if self.layers is None or self.hidden is None or self.heads is None:
            raise ConfigError(
                "no model is named; give a checkpoint's path, a preset such as gpt3-175b, or "
                "--layers, --hidden and --heads"
            )
        check_heads(self.hidden, self.heads, self.kv_heads)
        sizes = {name: value for name, value in self._sizes().items() if value is not None}
        defaults = {"vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE}
        family = LLAMA if self.gated else {}
        return GPTConfig.from_dict({**defaults, "dtype": "bfloat16", **sizes, **family})

    def sequence(self, config: GPTConfig) -> int:
        """Tokens of a sequence in this model."""
        most = config.max_position_embeddings
        if self.seq is None:
            return most
        if self.seq > most and self.checkpoint is not None and config.learned_positions:
            raise ConfigError(
                f"--seq is {self.seq}, and the model has {most} learned positions; {most} is the "
                "most that it can take"
            )
        return self.seq

    @property
    def name(self) -> str:
        if self.path is not None:
            return self.path
        return f"{self.layers}x{self.hidden}"


@dataclass(frozen=True)
class HardwareWish:
    gpu: str | None = None
    gpus: int | None = None
    gpus_per_node: int = 8
    nodes: int | None = None
    calibration: str | None = None  # The file that `preamble plan calibrate` wrote here.

    def __post_init__(self) -> None:
        _check_positive(self)

    def cluster(self, gpus: int | None = None) -> Cluster:
        """So many GPUs as are asked for; `gpus`, where nobody says. None named: this machine."""
        machine = self.machine
        if self.gpu is None and machine is not None:
            return self._counted(machine.cluster().device, machine.cluster().gpus)
        if self.gpu is None:
            raise ConfigError(
                f"no GPU is named; give --gpu, one of {', '.join(DEVICES)}, or for this machine "
                "--calibration, with what `preamble plan calibrate` has written"
            )
        return self._counted(find_device(self.gpu), gpus)

    @property
    def machine(self) -> StepCosts | None:
        """What was measured here."""
        return None if self.calibration is None else read_calibration(Path(self.calibration))

    def _counted(self, device: Device, gpus: int | None) -> Cluster:
        whole = None if self.nodes is None else self.nodes * self.gpus_per_node
        if self.gpus is not None and whole is not None and whole != self.gpus:
            raise ConfigError(
                f"{self.nodes} nodes of {self.gpus_per_node} GPUs are {whole}, not {self.gpus}; "
                "leave out --gpus or --nodes"
            )
        count = self.gpus or whole or gpus
        if count is None:
            raise ConfigError("how many GPUs there are is not said; give --gpus N or --nodes N")
        return Cluster(device, count, self.gpus_per_node)


@dataclass(frozen=True)
class WorkloadWish:
    """What clients ask of a server. An average without a 95th percentile is everyone's length."""

    input_tokens: float | None = None
    input_tokens_p95: float | None = None
    output_tokens: float | None = None
    output_tokens_p95: float | None = None
    request_rate: float | None = None  # A second.
    concurrency: int | None = None
    adapters: int = 0
    virtual_tokens: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, but=("adapters", "virtual_tokens"))
        for what in ("input_tokens", "output_tokens"):
            mean, p95 = getattr(self, what), getattr(self, f"{what}_p95")
            if mean is not None and p95 is not None and p95 < mean:
                raise ConfigError(
                    f"{what}_p95 is {p95:g}, less than the mean of {mean:g}; it must be {mean:g} "
                    "at least"
                )
        if self.request_rate is not None and self.concurrency is not None:
            raise ConfigError(
                "request_rate and concurrency are both set; give the rate of independent clients, "
                "or how many wait for their answers before they ask again"
            )


@dataclass(frozen=True)
class ConstraintsWish:
    ttft_ms_p50: float | None = None
    ttft_ms_p95: float | None = None
    itl_ms_p50: float | None = None
    itl_ms_p95: float | None = None
    request_ms_p50: float | None = None
    request_ms_p95: float | None = None
    min_tokens_per_s: float | None = None
    max_gpus: int | None = None
    memory_fraction: float | None = None
    quality: tuple[str, ...] = ()  # Dtypes that the weights may have.

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.memory_fraction is not None and self.memory_fraction > 1:
            raise ConfigError(f"memory_fraction is {self.memory_fraction:g}; it is at most 1")


@dataclass(frozen=True)
class MarginsWish:
    """Shares of a limit that a plan stays away from it."""

    latency: float | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and not 0 <= value < 1:
                raise ConfigError(
                    f"margins: {one.name} is {value:g}; it is a share, from 0 to less than 1"
                )


@dataclass(frozen=True)
class TrainingWish:
    global_batch: int | None = None  # Sequences.
    tokens: float | None = None  # Of the whole training.
    trainable: str | None = None
    train_virtual_tokens: int | None = None  # Of an adapter that is learned.
    # None: as was usual on that GPU.
    flash: bool | None = None
    distributed_optimizer: bool | None = None

    def __post_init__(self) -> None:
        _check_positive(self)
        kinds = get_args(Trainable)
        if self.trainable not in (None, *kinds):
            raise ConfigError(
                f"trainable is {shown(self.trainable)}; {nearest(str(self.trainable), kinds)}"
            )


@dataclass(frozen=True)
class Specification:
    model: ModelWish = field(default_factory=ModelWish)
    hardware: HardwareWish = field(default_factory=HardwareWish)
    workload: WorkloadWish = field(default_factory=WorkloadWish)
    constraints: ConstraintsWish = field(default_factory=ConstraintsWish)
    margins: MarginsWish = field(default_factory=MarginsWish)
    training: TrainingWish = field(default_factory=TrainingWish)
    objective: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        plain = DTYPE_NAMES.get(self.dtype or "", self.dtype)
        if plain is not None and plain not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; {nearest(plain, [*DTYPES, *DTYPE_NAMES])}")
        object.__setattr__(self, "dtype", plain)

    def training_job(self, model: GPTConfig, usual_batch: int) -> TrainingJob:
        """`usual_batch` is the global one where nobody says."""
        wish = self.training
        return TrainingJob(
            model,
            self.model.sequence(model),
            wish.global_batch or usual_batch,
            "adapter" if wish.trainable == "adapter" else "all",
            wish.train_virtual_tokens or 0,
            self.dtype or "bfloat16",
            wish.flash,
            wish.distributed_optimizer,
        )

    @classmethod
    def read(cls, path: str | None, flags: Mapping[str, Any]) -> Self:
        """From a file, if there is one, and flags, whose names are fields of any section."""
        record = read_yaml(Path(path)) if path else {}
        where = path or "the flags"
        for key in record:
            if key not in {one.name for one in fields(cls)}:
                known = [one.name for one in fields(cls)]
                raise ConfigError(f"{where}: unknown key {shown(key)}; {nearest(key, known)}")
        given = {name: value for name, value in flags.items() if value is not None}
        twice = given.pop("model_flag", None)
        if twice is not None and given.setdefault("model", twice) != twice:
            raise ConfigError(f"two models are named, {given['model']} and {twice}; leave one out")
        sections: dict[str, Any] = {}
        for name, kind in SECTIONS.items():
            values = _section(record.get(name), name, where)
            flagged = {
                one.name: given[FLAGS.get((name, one.name), one.name)]
                for one in fields(kind)
                if FLAGS.get((name, one.name), one.name) in given
            }
            sections[name] = settings(kind, {**values, **flagged}, f"{where}: {name}")
        for name in ("objective", "dtype"):
            value = given.get(name, record.get(name))
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{where}: {name} is {shown(value)}; it must be a text")
            sections[name] = value
        return cls(**sections)


SECTIONS: Mapping[str, Any] = {
    "model": ModelWish,
    "hardware": HardwareWish,
    "workload": WorkloadWish,
    "constraints": ConstraintsWish,
    "margins": MarginsWish,
    "training": TrainingWish,
}
# Flags whose name is not the field's alone.
FLAGS = {
    ("model", "path"): "model",
    ("margins", "latency"): "margin_latency",
    ("margins", "memory"): "margin_memory",
    ("training", "train_virtual_tokens"): "virtual_tokens",
}


def _section(value: object, name: str, where: str) -> dict[str, Any]:
    """A section as flat values: a length may be one number, or a mean and a 95th percentile."""
    if value is None:
        return {}
    if name == "model" and isinstance(value, str):
        return {"path": value}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where}: {name} is {shown(value)}; it must be `key: value`s")
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if name == "workload" and isinstance(inner, dict):
            unknown = [one for one in inner if one not in ("mean", "p95")]
            if unknown or "mean" not in inner:
                raise ConfigError(
                    f"{where}: {name}: {key} is {shown(inner)}; it must be a number, or have mean "
                    "and p95"
                )
            flat[key] = inner["mean"]
            if "p95" in inner:
                flat[f"{key}_p95"] = inner["p95"]
        elif (name, key) == ("training", "virtual_tokens"):
            flat["train_virtual_tokens"] = inner
        elif (name, key) == ("training", "tokens") and isinstance(inner, str):
            flat[key] = count_of(inner)
        else:
            flat[key] = inner
    return flat


def count_of(word: str) -> float:
    """300B, 1.5T, 3e11 or 300_000_000_000."""
    plain = word.strip().lower()
    factor = COUNTS.get(plain[-1:], 1.0)
    try:
        value = float(plain[:-1] if factor > 1 else plain) * factor
    except ValueError:
        raise ConfigError(f"{word!r} is no number of tokens; write it as 300B or 3e11") from None
    if not 0 < value < float("inf"):
        raise ConfigError(f"{word!r} tokens is not a number above 0; write it as 300B or 3e11")
    return value


def check_heads(hidden: int, heads: int, groups: int | None) -> None:
    if hidden % heads:
        raise ConfigError(
            f"{heads} heads do not divide a hidden size of {hidden}; the nearest that do are "
            f"{near_divisors(hidden, heads)}"
        )
    if groups is not None and heads % groups:
        raise ConfigError(
            f"{groups} KV heads do not divide {heads} heads; the nearest that do are "
            f"{near_divisors(heads, groups)}"
        )


def near_divisors(whole: int, wanted: int) -> str:
    """The divisors of `whole` on both sides of what was wanted."""
    below = max((n for n in divisors(whole) if n <= wanted), default=1)
    above = min((n for n in divisors(whole) if n >= wanted), default=whole)
    return str(below) if below == above else f"{below} and {above}"


def _read_config(path: str) -> GPTConfig:
    from gpt.formats.registry import open_checkpoint

    return open_checkpoint(path).config


def _check_positive(section: Any, but: tuple[str, ...] = ()) -> None:
    for one in fields(section):
        value = getattr(section, one.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        fits = value >= 0 if one.name in but else value > 0
        if not fits or value == float("inf"):
            least = "0 or more" if one.name in but else "more than 0"
            name = one.name.removeprefix("train_")
            raise ConfigError(f"{name} is {value:g}; it must be {least}, and finite")
        if value > COUNT_MAX and isinstance(value, int):
            raise ConfigError(f"{one.name} is {value:,}; it can be {COUNT_MAX:,} at most")
