"""Plan specification: YAML sections merged with flags, converted to a model config and a cluster.

Each section is a dataclass. A flag has the name of the field that it sets, except for the flags in
`FLAG_OF_FIELD`. The sections convert the name or path of a model to its config, and the name of a
GPU to a cluster.
"""

import os.path
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, get_args

from gpt.config import DTYPE_BYTES, GPTConfig
from gpt.costs.linear_adapter import METHODS, LinearAdapterSpec, describe_spec
from gpt.costs.training import Trainable
from gpt.errors import ConfigError
from gpt.settings import parse_settings, read_yaml, short_repr, suggest_nearest
from planning.hardware import DEVICES, Cluster, Device, divisors, find_device
from planning.inference.calibration_file import Calibration, read_calibration
from planning.model_presets import LLAMA_FIELDS, find_preset
from planning.training.estimate import TrainingJob

DEFAULT_VOCAB_SIZE = 51200  # GPT-2's vocabulary, padded as in the tables of the Megatron papers.
DEFAULT_SEQUENCE = 2048
DEFAULT_RANK = LinearAdapterSpec().rank
COUNT_MAX = 10**9  # Upper bound of whole numbers; a larger number is probably a typing error.
COUNT_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
# Common short names of dtypes.
DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
DTYPES = (*DTYPE_BYTES, "fp8", "int8", "int4")


@dataclass(frozen=True)
class ModelSection:
    """The model: a checkpoint, a preset, or sizes. Sizes override the sizes of a preset."""

    path: str | None = None  # The path of a checkpoint, or the name of a preset.
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    # Sequence length. If the model has no checkpoint, `seq` also affects the context length:
    # - A model that is given by its sizes has the context length `seq`.
    # - A preset with a context length below `seq` gets the context length `seq`.
    seq: int | None = None
    gated: bool | None = None  # Whether the model has the LLaMA architecture instead of GPT-3's.

    def __post_init__(self) -> None:
        _check_positive(self)

    @property
    def checkpoint_path(self) -> str | None:
        """`path` if it is the path of a checkpoint; None: the model is a preset, or only sizes."""
        if self.path is None:
            return None
        looks_like_path = "/" in self.path or self.path.startswith((".", "~"))
        return self.path if looks_like_path or os.path.exists(self.path) else None

    def config(self) -> GPTConfig:
        overrides = {
            name: value
            for name, value in self._sizes().items()
            if value is not None and name != "max_position_embeddings"
        }
        if self.checkpoint_path is not None:
            if overrides or self.gated:
                raise ConfigError(
                    f"the sizes of the model come from its checkpoint {self.checkpoint_path}; "
                    f"remove {', '.join(self._flag_names(overrides) or ['--gated'])}"
                )
            return _read_config(self.checkpoint_path)
        if self.path is None:
            return self._config_from_sizes()
        preset_config = find_preset(self.path)
        if self.gated and not preset_config.gated:
            raise ConfigError(
                f"--gated contradicts {self.path}, which is a GPT-3 size; remove --gated, or "
                "choose a LLaMA preset"
            )
        if self.seq is not None and self.seq > preset_config.max_position_embeddings:
            overrides["max_position_embeddings"] = self.seq
        if not overrides:
            return preset_config
        reset_fields = self._reset_derived_fields(overrides, preset_config)
        return replace(preset_config, **reset_fields, **overrides)

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

    def _flag_names(self, overrides: Mapping[str, Any]) -> list[str]:
        flags = ("layers", "hidden", "heads", "kv-heads", "ffn", "vocab", "seq")
        return [
            f"--{flag}"
            for flag, name in zip(flags, self._sizes(), strict=True)
            if name in overrides
        ]

    @staticmethod
    def _reset_derived_fields(
        overrides: Mapping[str, Any], preset_config: GPTConfig
    ) -> dict[str, Any]:
        """Return the preset's fields that must be derived again from the overridden sizes.

        Each of them gets the value 0 or (), for which GPTConfig derives the field.
        """
        reset_fields: dict[str, Any] = {}
        heads = overrides.get("num_attention_heads", preset_config.num_attention_heads)
        hidden = overrides.get("hidden_size", preset_config.hidden_size)
        check_heads(hidden, heads, overrides.get("num_query_groups"))
        if (
            "hidden_size" in overrides
            and preset_config.ffn_hidden_size == 4 * preset_config.hidden_size
        ):
            reset_fields["ffn_hidden_size"] = 0
        if (
            "num_attention_heads" in overrides
            and preset_config.num_query_groups == preset_config.num_attention_heads
        ):
            reset_fields["num_query_groups"] = 0
        if {"hidden_size", "num_attention_heads"} & set(overrides):
            reset_fields["kv_channels"] = 0
        if "num_layers" in overrides:
            reset_fields["moe_layers"] = ()
        if {"hidden_size", "ffn_hidden_size"} & set(overrides):
            reset_fields["moe_ffn_hidden_size"] = 0
        return {name: value for name, value in reset_fields.items() if name not in overrides}

    def _config_from_sizes(self) -> GPTConfig:
        if self.layers is None or self.hidden is None or self.heads is None:
            raise ConfigError(
                "no model is given; give the path of a checkpoint, a preset such as gpt3-175b, or "
                "--layers, --hidden and --heads"
            )
        check_heads(self.hidden, self.heads, self.kv_heads)
        sizes = {name: value for name, value in self._sizes().items() if value is not None}
        defaults = {"vocab_size": DEFAULT_VOCAB_SIZE, "max_position_embeddings": DEFAULT_SEQUENCE}
        family = LLAMA_FIELDS if self.gated else {}
        return GPTConfig.from_dict({**defaults, "dtype": "bfloat16", **sizes, **family})

    def sequence_length(self, config: GPTConfig) -> int:
        """Return the sequence length: --seq, by default the model's context length."""
        positions_max = config.max_position_embeddings
        if self.seq is None:
            return positions_max
        if (
            self.seq > positions_max
            and self.checkpoint_path is not None
            and config.has_learned_positions
        ):
            raise ConfigError(
                f"--seq is {self.seq}, but the model has only {positions_max} learned positions; "
                f"set --seq to at most {positions_max}"
            )
        return self.seq

    @property
    def name(self) -> str:
        if self.path is not None:
            return self.path
        return f"{self.layers}x{self.hidden}"


@dataclass(frozen=True)
class HardwareSection:
    gpu: str | None = None
    gpus: int | None = None
    gpus_per_node: int = 8
    nodes: int | None = None
    calibration: str | None = None  # A file that `preamble plan calibrate` wrote on this machine.

    def __post_init__(self) -> None:
        _check_positive(self)

    def cluster(self, gpus: int | None = None) -> Cluster:
        """Return the cluster. `gpus` is the default number of GPUs.

        Without a GPU name, the cluster consists of devices of the calibrated machine, and the
        default number of devices is 1 instead of `gpus`.
        """
        calibration = self.machine_calibration
        if self.gpu is None and calibration is not None:
            machine = calibration.as_cluster()
            return self._make_cluster(machine.device, machine.gpus)
        if self.gpu is None:
            raise ConfigError(
                f"no GPU is given; set --gpu to one of: {', '.join(DEVICES)}; or, to plan for this "
                "machine, set --calibration to the file that `preamble plan calibrate` wrote"
            )
        return self._make_cluster(find_device(self.gpu), gpus)

    @property
    def machine_calibration(self) -> Calibration | None:
        """The calibration of this machine, or None."""
        return None if self.calibration is None else read_calibration(Path(self.calibration))

    def _make_cluster(self, device: Device, gpus: int | None) -> Cluster:
        node_gpus = None if self.nodes is None else self.nodes * self.gpus_per_node
        if self.gpus is not None and node_gpus is not None and node_gpus != self.gpus:
            raise ConfigError(
                f"{self.nodes} nodes of {self.gpus_per_node} GPUs are {node_gpus} GPUs, but --gpus "
                f"is {self.gpus}; remove --gpus or --nodes"
            )
        gpu_count = self.gpus or node_gpus or gpus
        if gpu_count is None:
            raise ConfigError("the number of GPUs is not given; set --gpus N or --nodes N")
        return Cluster(device, gpu_count, self.gpus_per_node)


@dataclass(frozen=True)
class WorkloadSection:
    """The load of a server.

    If the 95th percentile of a length is None, all requests have the mean length.
    """

    input_tokens: float | None = None
    input_tokens_p95: float | None = None
    output_tokens: float | None = None
    output_tokens_p95: float | None = None
    request_rate: float | None = None  # Requests per second.
    concurrency: int | None = None  # Constant number of requests at once.
    adapters: int = 0
    virtual_tokens: int = 0  # Number of virtual tokens of each adapter.
    distinct_adapters: int | None = None  # Maximum number of adapters in use at the same time.

    def __post_init__(self) -> None:
        _check_positive(self, zero_allowed=("adapters", "virtual_tokens"))
        for name in ("input_tokens", "output_tokens"):
            mean, p95 = getattr(self, name), getattr(self, f"{name}_p95")
            if mean is not None and p95 is not None and p95 < mean:
                raise ConfigError(
                    f"{name}_p95 is {p95:g}, less than the mean of {mean:g}; it must be at least "
                    f"{mean:g}"
                )
        if self.request_rate is not None and self.concurrency is not None:
            raise ConfigError(
                "request_rate and concurrency are both set; set only request_rate (requests at "
                "random times) or only concurrency (each client waits for its response)"
            )


@dataclass(frozen=True)
class ConstraintsSection:
    ttft_ms_p50: float | None = None
    ttft_ms_p95: float | None = None
    itl_ms_p50: float | None = None
    itl_ms_p95: float | None = None
    request_ms_p50: float | None = None
    request_ms_p95: float | None = None
    min_tokens_per_s: float | None = None
    max_gpus: int | None = None
    memory_fraction: float | None = None
    quality: tuple[str, ...] = ()  # Allowed dtypes of the weights, in order of preference.

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.memory_fraction is not None and self.memory_fraction > 1:
            raise ConfigError(f"memory_fraction is {self.memory_fraction:g}; it must be at most 1")


@dataclass(frozen=True)
class MarginsSection:
    """Safety margins, as fractions of a limit."""

    latency: float | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        for margin in fields(self):
            value = getattr(self, margin.name)
            if value is not None and not 0 <= value < 1:
                raise ConfigError(
                    f"margins: {margin.name} is {value:g}; it must be at least 0 and less than 1"
                )


@dataclass(frozen=True)
class TrainingSection:
    global_batch: int | None = None  # Number of sequences per step.
    tokens: float | None = None  # Number of tokens of the whole training run.
    trainable: str | None = None
    train_virtual_tokens: int | None = None  # Number of virtual tokens of the trained adapter.
    # Number of tokens of an example before the invocation of a trained activated LoRA.
    context_tokens: int | None = None
    flash: bool | None = None  # None: the default of the GPU.
    distributed_optimizer: bool | None = None  # None: the default of the GPU.

    def __post_init__(self) -> None:
        _check_positive(self)
        kinds = get_args(Trainable)
        if self.trainable not in (None, *kinds):
            raise ConfigError(
                f"trainable is {short_repr(self.trainable)}; "
                f"{suggest_nearest(str(self.trainable), kinds)}"
            )


@dataclass(frozen=True)
class AdapterSection:
    """An adapter that changes linears: the one to train, or each of those to serve.

    The keys are settings of `preamble tune`. If none is set, adapters consist of virtual tokens.
    """

    method: str | None = None  # lora, alora, dora or ia3.
    rank: int | None = None
    targets: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(layer < 0 for layer in self.layers):
            raise ConfigError(f"layers is {short_repr(self.layers)}; layers are numbered from 0")
        self.spec()

    def spec(self) -> LinearAdapterSpec | None:
        """Return the adapter weights; None: adapters consist of virtual tokens."""
        if not self._is_set:
            return None
        method = self.method or "lora"
        for method_choice in METHODS:
            if method == method_choice:
                if method == "ia3" and self.rank is not None:
                    raise ConfigError(f"rank is {self.rank}, but method ia3 has no rank; remove it")
                rank = DEFAULT_RANK if self.rank is None else self.rank
                return LinearAdapterSpec(method_choice, rank, self.targets, self.layers)
        raise ConfigError(f"method is {short_repr(method)}; {suggest_nearest(method, METHODS)}")

    @property
    def _is_set(self) -> bool:
        return bool(self.method or self.rank is not None or self.targets or self.layers)


@dataclass(frozen=True)
class Specification:
    model: ModelSection = field(default_factory=ModelSection)
    hardware: HardwareSection = field(default_factory=HardwareSection)
    workload: WorkloadSection = field(default_factory=WorkloadSection)
    constraints: ConstraintsSection = field(default_factory=ConstraintsSection)
    margins: MarginsSection = field(default_factory=MarginsSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    adapter: AdapterSection = field(default_factory=AdapterSection)
    objective: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        dtype_name = DTYPE_ALIASES.get(self.dtype or "", self.dtype)
        if dtype_name is not None and dtype_name not in DTYPES:
            raise ConfigError(
                f"dtype is {self.dtype!r}; {suggest_nearest(dtype_name, [*DTYPES, *DTYPE_ALIASES])}"
            )
        object.__setattr__(self, "dtype", dtype_name)

    def training_job(self, model: GPTConfig, default_batch: int) -> TrainingJob:
        """Return the training job; `default_batch` is used if no global batch is specified."""
        section, linears = self.training, self.adapter.spec()
        if linears is not None and section.trainable == "all":
            raise ConfigError(
                f"all parameters and an adapter ({describe_spec(linears)}) are to be trained; set "
                "trainable to adapter, or remove the adapter"
            )
        if linears is not None and section.train_virtual_tokens:
            raise ConfigError(
                f"an adapter with {section.train_virtual_tokens} virtual tokens and one that "
                f"changes linears ({describe_spec(linears)}) are to be trained; remove one of them"
            )
        return TrainingJob(
            model=model,
            sequence=self.model.sequence_length(model),
            global_batch=section.global_batch or default_batch,
            trainable=self.trainable,
            virtual_tokens=section.train_virtual_tokens or 0,
            dtype=self.dtype or "bfloat16",
            flash=section.flash,
            distributed_optimizer=section.distributed_optimizer,
            linears=linears,
            context_tokens=section.context_tokens or 0,
        )

    @property
    def trainable(self) -> Trainable:
        """What is trained; all parameters by default, or the adapter if there is one."""
        is_adapter = self.training.trainable == "adapter" or self.adapter.spec() is not None
        return "adapter" if is_adapter else "all"

    @classmethod
    def read(cls, path: str | None, flags: Mapping[str, Any]) -> Self:
        """Read the YAML file `path`, if it is not None, and replace its values by the flags.

        `flags` maps the names of flags to values. Flags without a field in a section are ignored,
        and None means that the flag is not set.
        """
        record = read_yaml(Path(path)) if path else {}
        source = path or "the flags"
        for key in record:
            if key not in {section_field.name for section_field in fields(cls)}:
                valid_keys = [section_field.name for section_field in fields(cls)]
                raise ConfigError(
                    f"{source}: unknown key {short_repr(key)}; {suggest_nearest(key, valid_keys)}"
                )
        set_flags = {name: value for name, value in flags.items() if value is not None}
        model_flag = set_flags.pop("model_flag", None)
        if model_flag is not None and set_flags.setdefault("model", model_flag) != model_flag:
            raise ConfigError(
                f"two models are given, {set_flags['model']} and {model_flag}; remove one"
            )
        sections: dict[str, Any] = {}
        for name, kind in SECTIONS.items():
            values = _flatten_section(record.get(name), name, source)
            for section_field in fields(kind):
                flag = FLAG_OF_FIELD.get((name, section_field.name), section_field.name)
                if flag in set_flags:
                    values[section_field.name] = set_flags[flag]
            sections[name] = parse_settings(kind, values, f"{source}: {name}")
        for name in ("objective", "dtype"):
            value = set_flags.get(name, record.get(name))
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{source}: {name} is {short_repr(value)}; it must be a string")
            sections[name] = value
        return cls(**sections)


SECTIONS: Mapping[str, Any] = {
    "model": ModelSection,
    "hardware": HardwareSection,
    "workload": WorkloadSection,
    "constraints": ConstraintsSection,
    "margins": MarginsSection,
    "training": TrainingSection,
    "adapter": AdapterSection,
}
# (section, field) -> flag, for the flags whose name differs from the name of the field.
FLAG_OF_FIELD = {
    ("model", "path"): "model",
    ("margins", "latency"): "margin_latency",
    ("margins", "memory"): "margin_memory",
    ("training", "train_virtual_tokens"): "virtual_tokens",
    ("adapter", "rank"): "lora_rank",
    ("adapter", "targets"): "lora_targets",
    ("adapter", "layers"): "lora_layers",
}


def _flatten_section(section: object, name: str, source: str) -> dict[str, Any]:
    """Convert a section of the YAML file to the fields of its dataclass.

    A length {mean: 600, p95: 1500} becomes two fields, such as `input_tokens` and
    `input_tokens_p95`.
    """
    if section is None:
        return {}
    if name == "model" and isinstance(section, str):
        return {"path": section}
    if not isinstance(section, dict) or not all(isinstance(key, str) for key in section):
        raise ConfigError(
            f"{source}: {name} is {short_repr(section)}; it must be a mapping of keys to values"
        )
    field_values: dict[str, Any] = {}
    for key, entry in section.items():
        if name == "workload" and isinstance(entry, dict):
            unknown_keys = set(entry) - {"mean", "p95"}
            if unknown_keys or "mean" not in entry:
                raise ConfigError(
                    f"{source}: {name}: {key} is {short_repr(entry)}; it must be a number, or a "
                    "mapping with mean and optionally p95"
                )
            field_values[key] = entry["mean"]
            if "p95" in entry:
                field_values[f"{key}_p95"] = entry["p95"]
        elif (name, key) == ("training", "virtual_tokens"):
            field_values["train_virtual_tokens"] = entry
        elif (name, key) == ("training", "tokens") and isinstance(entry, str):
            field_values[key] = parse_count(entry)
        else:
            field_values[key] = entry
    return field_values


def parse_count(text: str) -> float:
    """Parse a number of tokens, such as 300B, 1.5T, 3e11 or 300_000_000_000."""
    digits = text.strip().lower()
    factor = COUNT_SUFFIXES.get(digits[-1:], 1.0)
    try:
        value = float(digits[:-1] if factor > 1 else digits) * factor
    except ValueError:
        raise ConfigError(f"{text!r} is not a number of tokens; write it as 300B or 3e11") from None
    if not 0 < value < float("inf"):
        raise ConfigError(f"{text!r} is not a number of tokens above 0; write it as 300B or 3e11")
    return value


def check_heads(hidden: int, heads: int, groups: int | None) -> None:
    if hidden % heads:
        raise ConfigError(
            f"hidden size {hidden} is not divisible by {heads} heads; the nearest numbers of heads "
            f"are {nearest_divisors(hidden, heads)}"
        )
    if groups is not None and heads % groups:
        raise ConfigError(
            f"{heads} heads are not divisible by {groups} KV heads; the nearest numbers of KV "
            f"heads are {nearest_divisors(heads, groups)}"
        )


def nearest_divisors(number: int, divisor: int) -> str:
    """Return the divisors of `number` just below and just above `divisor`, as text."""
    below = max((n for n in divisors(number) if n <= divisor), default=1)
    above = min((n for n in divisors(number) if n >= divisor), default=number)
    return str(below) if below == above else f"{below} and {above}"


def _read_config(path: str) -> GPTConfig:
    from gpt.formats.registry import open_checkpoint

    return open_checkpoint(path).config


def _check_positive(section: Any, zero_allowed: tuple[str, ...] = ()) -> None:
    """Raise ConfigError if a number in the section is not positive, or is too large."""
    for section_field in fields(section):
        value = getattr(section, section_field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        name = section_field.name.removeprefix("train_")  # The key in the file.
        is_valid = value >= 0 if name in zero_allowed else value > 0
        if not is_valid or value == float("inf"):
            bound = "0 or more" if name in zero_allowed else "more than 0"
            raise ConfigError(f"{name} is {value:g}; it must be {bound}, and finite")
        if value > COUNT_MAX and isinstance(value, int):
            raise ConfigError(f"{name} is {value:,}; it must be at most {COUNT_MAX:,}")
