"""TuneConfig: settings of a tuning run, with units and defaults, read from a YAML file.

The file is one flat mapping. In Python, the settings are grouped by subject into frozen
dataclasses, the parts, so that a module receives only the parts that it reads. The architecture of
the model comes from its checkpoint; `true_vocab_size` and `config_json` supply what the checkpoint
does not record. The settings of a single task are top-level keys; several tasks are entries of the
list `tasks`, and each is in a task group: the tasks that are trained together. This module opens no
file other than the YAML file and does not import torch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from gpt.errors import ConfigError
from gpt.linear_parts import split_key
from gpt.object_store.object_store import is_object_url
from gpt.settings import (
    ComposedSettings,
    parse_settings,
    read_yaml,
    setting_fields,
    short_repr,
    suggest_nearest,
)
from ptuning.task import (
    COUNT_MAX,
    DEFAULT_TEMPLATE,
    TASK_METHOD_SETTINGS,
    Range,
    Task,
    final_field,
    parse_nemo_tasks,
)

# Maps each tuning method to its default learning rate; see also ADAFACTOR_LEARNING_RATES. The
# virtual-token table has one embedding row per virtual token. A method that trains the table
# directly needs a far larger learning rate than a method that trains a prompt encoder, the network
# that produces the table.
METHOD_LEARNING_RATES = {
    "prompt-tuning": 1e-2,  # Trains the virtual-token table directly.
    "mlp": 3e-4,  # Prompt encoder: NeMo's MLP.
    "lstm": 3e-4,  # Prompt encoder: the LSTM of NeMo and PEFT, followed by two linear layers.
    "tpmlp": 3e-4,  # Prompt encoder: NeMo's two linear layers, sharded over the tensor ranks.
    "peft-mlp": 3e-4,  # Prompt encoder: PEFT's three linear layers.
    "prefix": 3e-2,  # Prefix tuning: trains keys and values of every layer.
    "lora": 1e-3,  # Low-rank products beside the weights of linears.
    "alora": 1e-3,  # Activated LoRA: acts from an invocation in the prompt on.
    "dora": 1e-3,  # LoRA, and a magnitude of each row of the changed weights.
    "ia3": 5e-3,  # Factors of the outputs or inputs of linears.
    "bottleneck": 1e-3,  # Houlsby adapters: networks behind attention and behind the MLP.
    "full": 1e-4,  # Trains all weights of the model, without virtual tokens.
}
# Methods that change linears of the model instead of adding virtual tokens.
LOW_RANK_METHODS = ("lora", "alora", "dora")
LINEAR_METHODS = (*LOW_RANK_METHODS, "ia3", "bottleneck")
# The methods for which each setting of linear adapters has an effect.
LINEAR_SETTING_METHODS = {
    "rank": (*LOW_RANK_METHODS, "bottleneck"),
    **dict.fromkeys(("alpha", "rslora", "dropout", "lora_plus_ratio"), LOW_RANK_METHODS),
    **dict.fromkeys(("targets", "layers"), LINEAR_METHODS),
}
# Methods without virtual tokens.
PLAIN_PROMPT_METHODS = (*LINEAR_METHODS, "full")
# Methods with a prompt encoder.
ENCODER_METHODS = tuple(
    method
    for method in METHOD_LEARNING_RATES
    if method not in ("prompt-tuning", "prefix", *PLAIN_PROMPT_METHODS)
)
# Methods whose trainable parameters are sharded over the tensor-parallel ranks.
TENSOR_PARALLEL_METHODS = ("tpmlp", "prefix", *PLAIN_PROMPT_METHODS)
# The linears of a layer, and the parts of the fused ones, that the setting `targets` can name.
# `linear_fc1` and `linear_fc2` are those of a dense MLP or of a shared expert.
LINEAR_TARGETS = (
    "linear_qkv",
    "linear_qkv.query",
    "linear_qkv.key",
    "linear_qkv.value",
    "linear_proj",
    "linear_fc1",
    "linear_fc1.gate",
    "linear_fc1.up",
    "linear_fc2",
    "experts.linear_fc1",
    "experts.linear_fc1.gate",
    "experts.linear_fc1.up",
    "experts.linear_fc2",
)
# The linears of a layer that can have a bottleneck.
BOTTLENECK_TARGETS = ("linear_proj", "linear_fc2")
# Initial rows of the virtual-token table:
# - records: embeddings of random tokens of the training records;
# - vocabulary: embeddings of random tokens of the vocabulary. Tokens that were rare in pre-training
#   may have untrained embeddings, which are bad initial rows;
# - random: random numbers with the standard deviation of the token embeddings.
INITIALIZATIONS = ("records", "vocabulary", "random")
# Default learning rates that replace those of METHOD_LEARNING_RATES if the optimizer is Adafactor.
# 0.3 is the learning rate of Lester et al. As in their paper, updates are not scaled by the RMS of
# the table (see ADAFACTOR_RMS_MIN in ptuning/training/optimizer.py).
ADAFACTOR_LEARNING_RATES = {"prompt-tuning": 0.3}
OPTIMIZERS = ("adamw", "adafactor")
SCHEDULES = ("cosine", "constant", "inverse-sqrt")
RECOMPUTE_MODES = ("none", "selective", "block", "full")
MEASURE_MODES = ("none", "sample", "first", "all")
MONITORS = ("loss", "exact_match", "accuracy", "f1")
# By default a run validates this number of times, if it has validation records.
AUTOMATIC_VALIDATIONS = 8
# By default a run stops early after this share of its steps without an improvement.
AUTOMATIC_PATIENCE_SHARE = 3 / 8

# Task settings that are also allowed as top-level keys beside `tasks`, as defaults for all tasks.
SHARED_TASK_SETTINGS = {"data", "validation", "answer_only_loss", *TASK_METHOD_SETTINGS}
# The allowed values of the numeric settings.
SETTING_RANGES = {
    "tokens_max": Range(1, COUNT_MAX),
    "encoder_hidden": Range(1, 1_000_000),
    "encoder_layers": Range(1, 64),
    "encoder_dropout": Range(0, 1, excludes_maximum=True),
    "rank": Range(1, 512),
    "alpha": Range(0, 1_000_000, excludes_minimum=True),
    "dropout": Range(0, 1, excludes_maximum=True),
    "lora_plus_ratio": Range(0, 1_000_000, excludes_minimum=True),
    "steps": Range(1, 100_000_000),
    "batch_examples": Range(1, 1_000_000),
    "micro_batch_examples": Range(1, COUNT_MAX),
    "micro_batch_tokens": Range(1, COUNT_MAX),
    # A step changes each value by up to the learning rate, and token embeddings are below 10.
    "learning_rate": Range(0, 10, excludes_minimum=True),
    "minimum_rate": Range(0, 1),
    "warmup_steps": Range(0, 100_000_000),
    "weight_decay": Range(0, 10),
    "beta1": Range(0, 1, excludes_maximum=True),
    "beta2": Range(0, 1, excludes_maximum=True),
    "epsilon": Range(0, 1, excludes_minimum=True),
    "gradient_norm_max": Range(0, 1e38, excludes_minimum=True),
    "hidden_dropout": Range(0, 1, excludes_maximum=True),
    "attention_dropout": Range(0, 1, excludes_maximum=True),
    "seed": Range(0, 2**63 - 1),
    "validate_every": Range(0, COUNT_MAX),
    "validation_examples": Range(1, COUNT_MAX),
    "patience": Range(0, COUNT_MAX),
    "save_every": Range(1, COUNT_MAX),
    "golden_examples": Range(0, COUNT_MAX),
    "tp": Range(1, 65_536),
    "pp": Range(1, 65_536),
    "dp": Range(1, 65_536),
    "virtual_stages": Range(1, 65_536),
    "recompute_layers": Range(1, COUNT_MAX),
}
CHOICES = {
    "method": tuple(METHOD_LEARNING_RATES),
    "initial": INITIALIZATIONS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "recompute": RECOMPUTE_MODES,
    "measure": MEASURE_MODES,
    "monitor": MONITORS,
}


@dataclass(frozen=True)
class ModelConfig:
    """The checkpoint, its tokenizer, and the device and dtype of the computation."""

    model: str  # Path of the checkpoint.
    # Tokenizer file or directory; None: the tokenizer beside the weights.
    tokenizer: str | None = None
    # Size of the vocabulary without padding; needed if the vocabulary is padded and the checkpoint
    # does not record this size.
    true_vocab_size: int | None = None
    # Path of a JSON file with model settings that are missing or wrong in the checkpoint.
    config_json: str | None = None
    device: str = "cpu"
    # Compute dtype; None: the dtype of the stored weights. The virtual-token table is written in
    # fp32 in any case.
    dtype: str | None = None

    def __post_init__(self) -> None:
        _check_path("model", self.model)


@dataclass(frozen=True)
class DataConfig:
    """The records and tasks: prompt templates, virtual tokens and lengths."""

    data: str = ""  # File of training records: jsonl, CSV, TSV or Parquet.
    name: str = ""  # Name of the adapter; required, except for method `full`.
    validation: str = ""  # File of held-out records, which are never trained on; empty: none.
    task: str = ""  # Purpose of the adapter in a few words.
    template: str = DEFAULT_TEMPLATE  # Prompt template; its fields are keys of the records.
    # Field with the answer; must be at the end of the template. None: the field that ends it.
    answer_field: str | None = None
    # Field to truncate in examples that are too long; None: such examples are dropped.
    truncate_field: str | None = None
    stop: tuple[str, ...] = ()  # Stop strings of an answer, in addition to the end-of-text token.
    max_new_tokens: int | None = None  # Default length limit of an answer in tokens.
    virtual_tokens: int = 20
    # Number of virtual tokens at each marker <|VIRTUAL_PROMPT_i|> of the template, in order; empty:
    # all virtual tokens are at one marker.
    splits: tuple[int, ...] = ()
    # Text whose token embeddings are the initial rows of the virtual tokens; empty: `initial`
    # selects the initial rows.
    initial_text: str = ""
    # Text from whose last occurrence in the prompt on an activated LoRA acts; see Task.
    invocation: str = ""
    invocation_ids: tuple[int, ...] = ()  # The token ids of the invocation, in place of its text.
    # Instruction text that replaces the virtual tokens in a baseline evaluation; empty: no such
    # baseline.
    oracle: str = ""
    tasks: tuple[Task, ...] = ()  # Several tasks, in place of the top-level task settings.
    # Token limit of an example; None: the model's context length, which is also the maximum.
    tokens_max: int | None = None
    # Whether the loss covers only the tokens of the answer; False: it covers all text tokens.
    answer_only_loss: bool = True

    def __post_init__(self) -> None:
        _check_settings(self)
        if self.answer_field is None:
            object.__setattr__(self, "answer_field", final_field(self.template))
        names = [task.name for task in self.resolved_tasks]
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise ConfigError(f"two tasks are named {duplicate!r}; give each task a unique name")

    @property
    def resolved_tasks(self) -> tuple[Task, ...]:
        """The tasks of the run.

        If a task does not set one of SHARED_TASK_SETTINGS, the top-level value applies.
        """
        if self.tasks:
            return tuple(
                replace(
                    task,
                    data=task.data or self.data or None,
                    validation=task.validation or self.validation or None,
                    answer_only_loss=(
                        self.answer_only_loss
                        if task.answer_only_loss is None
                        else task.answer_only_loss
                    ),
                )
                for task in self.tasks
            )
        task_settings = {
            setting.name: getattr(self, setting.name)
            for setting in fields(Task)
            if setting.name not in TASK_METHOD_SETTINGS
        }
        return (Task(**{**task_settings, "validation": self.validation or None}),)


@dataclass(frozen=True)
class MethodConfig:
    """The tuning method, with the initial values and the prompt encoder."""

    method: str = "prompt-tuning"  # A key of METHOD_LEARNING_RATES.
    initial: str = "records"  # Initial rows of tasks without `initial_text`: see INITIALIZATIONS.
    # Hidden size of the prompt encoder; None: the model's hidden size, or half of it for `lstm`.
    encoder_hidden: int | None = None
    encoder_layers: int = 2  # Number of linear layers of `mlp`, or of LSTM layers of `lstm`.
    encoder_dropout: float = 0.0  # Dropout rate between the layers of `lstm`.
    # Directory of an earlier run whose prompt encoder is the initial prompt encoder of this run.
    encoder_from: str | None = None
    # Rank of the low-rank product of each linear, or of each part; or the size of a bottleneck.
    rank: int = 16
    # The low-rank product is multiplied by alpha / rank; None: alpha is the rank.
    alpha: float | None = None
    rslora: bool = False  # Whether the factor is alpha / sqrt(rank).
    dropout: float = 0.0  # Dropout rate of the inputs of the low-rank products.
    # The linears that are changed, some of LINEAR_TARGETS; empty: all linears except those of
    # experts. For bottlenecks some of BOTTLENECK_TARGETS; empty: both.
    targets: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()  # The layers that are changed, numbered from 0; empty: all layers.
    # LoRA+: the learning rate of the matrices B is this multiple of the learning rate of A.
    lora_plus_ratio: float = 1.0

    def __post_init__(self) -> None:
        _check_settings(self)
        self._check_targets()

    def _check_targets(self) -> None:
        for target in self.targets:
            if target not in LINEAR_TARGETS:
                raise ConfigError(
                    f"targets has {short_repr(target)}; {suggest_nearest(target, LINEAR_TARGETS)}"
                )
            if self.method == "bottleneck" and target not in BOTTLENECK_TARGETS:
                raise ConfigError(
                    f"targets has {target}, but a bottleneck is behind "
                    f"{' or '.join(BOTTLENECK_TARGETS)}; set these, or remove targets"
                )
            linear, part = split_key(target)
            if part and linear in self.targets:
                raise ConfigError(f"targets has {linear} and its part {target}; remove one of them")
            if self.dropout and target.startswith("experts."):
                raise ConfigError(
                    f"dropout is {self.dropout}, which is not supported for the linears of experts "
                    f"({target}), as in PEFT; remove dropout"
                )
        for name, values in (("targets", self.targets), ("layers", self.layers)):
            if len(set(values)) < len(values):
                raise ConfigError(f"{name} is {short_repr(values)}; give each entry once")
        if any(layer < 0 for layer in self.layers):
            raise ConfigError(f"layers is {short_repr(self.layers)}; layers are numbered from 0")
        if self.method == "dora" and self.dropout:
            raise ConfigError(
                f"dropout is {self.dropout:g}, but method dora computes its magnitudes without "
                "dropout; set dropout: 0, or method: lora"
            )

    @property
    def adapter_kind(self) -> str:
        """The `kind` in the adapter's card.

        "rows" for a virtual-token table, "prefix" for keys and values, "linears" for weights of
        linears.
        """
        if self.method in LINEAR_METHODS:
            return "linears"
        return "prefix" if self.method == "prefix" else "rows"

    @property
    def changes_linears(self) -> bool:
        return self.method in LINEAR_METHODS

    @property
    def has_virtual_tokens(self) -> bool:
        return self.method not in PLAIN_PROMPT_METHODS

    @property
    def low_rank_scale(self) -> float:
        """The factor of the low-rank products."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class TrainingConfig:
    """Steps, batches, optimizer, learning rate schedule, dropout and seed."""

    steps: int = 200
    # Number of examples per step on all ranks together. If there are fewer training examples, each
    # step uses all of them.
    batch_examples: int = 16
    # Maximum number of examples in a micro-batch; None: no limit.
    micro_batch_examples: int | None = None
    # Maximum number of tokens in a micro-batch; None: no limit. An example with more tokens is the
    # only example of its micro-batch.
    micro_batch_tokens: int | None = None
    optimizer: str = "adamw"  # One of OPTIMIZERS.
    learning_rate: float | None = None  # None: the default of the method and the optimizer.
    # Learning rate schedule after the warm-up: one of SCHEDULES. `cosine` decays to `minimum_rate`.
    schedule: str = "cosine"
    minimum_rate: float = 0.0  # (Final learning rate of `cosine`) / (peak learning rate).
    warmup_steps: int = 20  # Number of steps until the peak learning rate.
    # 0 by default, because decay would pull the virtual-token rows toward zero, not toward token
    # embeddings.
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-8
    gradient_norm_max: float = 1.0  # Gradients with a larger norm are scaled down to this norm.
    # Dropout rates of the model, only for `full`: a frozen model runs without dropout.
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_settings(self)


@dataclass(frozen=True)
class ValidationConfig:
    """Validations: when, on which records, and what selects the best step and stops the run."""

    # Number of steps between validations; 0: validations only before the first step and at the end.
    # None: AUTOMATIC_VALIDATIONS validations in the run. The run writes the adapter of the best
    # validation, but method `full` always writes the last weights.
    validate_every: int | None = None
    # Which validation records are evaluated: one of MEASURE_MODES. `sample` evaluates a fixed
    # random sample, `all` evaluates all of them, and `none` computes the loss of the sample but
    # generates no answers. `first` evaluates as version 0.1 did, so that scores are comparable: the
    # first records, with answers of up to max_new_tokens.
    measure: str = "sample"
    validation_examples: int = 100  # Maximum number of evaluated records of a task.
    # Metric that selects the best validation and decides early stopping: one of MONITORS.
    monitor: str = "loss"
    # Number of validations without improvement after which the run stops early; 0: never. None: the
    # validations of AUTOMATIC_PATIENCE_SHARE of the steps; method `full` does not stop early then.
    patience: int | None = None

    def __post_init__(self) -> None:
        _check_settings(self)
        if self.measure == "none" and self.monitor != "loss":
            raise ConfigError(
                f"monitor is {self.monitor}, but measure is none, so no answers are generated; set "
                "monitor: loss, or measure: sample"
            )

    def interval(self, steps: int) -> int:
        """Return the number of steps between validations of a run; 0: no validation in the run."""
        if self.validate_every is not None:
            return self.validate_every
        return math.ceil(steps / AUTOMATIC_VALIDATIONS)

    def patience_validations(self, steps: int, method: str) -> int:
        """Return after how many validations without improvement a run stops early; 0: never."""
        if self.patience is not None:
            return self.patience
        interval = self.interval(steps)
        if not interval or method == "full":
            return 0
        return math.ceil(AUTOMATIC_PATIENCE_SHARE * steps / interval)


@dataclass(frozen=True)
class OutputConfig:
    """The files that a run writes: adapter, states and logs."""

    # Directory for the adapter (method `full`: for the checkpoint), created if it does not exist.
    # May be the adapter directory of a running server.
    output: str = "adapters"
    # Directory in which each run gets a numbered directory for its logs, report and states; None:
    # `runs/NAME` beside the output directory.
    run: str | None = None
    # Number of steps between saved states, from which an interrupted run resumes.
    save_every: int = 100
    # Number of golden examples in the adapter's card. A golden example is a validation record with
    # the answer that the adapter generates for it.
    golden_examples: int = 0
    tensorboard: bool = False  # Whether the run also writes TensorBoard event files.

    def __post_init__(self) -> None:
        _check_path("output", self.output)
        if is_object_url(self.output):
            raise ConfigError(
                "output is an object store; give a directory, and upload the adapters with "
                "`preamble adapters upload`, or copy them into the store"
            )
        _check_settings(self)


@dataclass(frozen=True)
class ParallelConfig:
    """The parallel split of a run, its pipeline schedule and activation checkpointing."""

    tp: int = 1  # Number of tensor-parallel ranks.
    pp: int = 1  # Number of pipeline stages.
    dp: int = 1  # Number of data-parallel replicas; each computes a share of every batch.
    # Number of model chunks per stage; values above 1 select the interleaved schedule.
    virtual_stages: int = 1
    sequence_parallel: bool = False  # Has an effect only if tp is more than 1.
    recompute: str = "none"  # Activation checkpointing: one of RECOMPUTE_MODES.
    recompute_layers: int = 1  # Number of layers per model chunk that `block` recomputes.

    def __post_init__(self) -> None:
        _check_settings(self)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, init=False)
class TuneConfig(ComposedSettings):
    """Settings of one tuning run. Relative paths are resolved against the working directory.

    The names of the parts' fields are the keys of the settings file.
    """

    model_config: ModelConfig
    data_config: DataConfig
    method_config: MethodConfig
    training_config: TrainingConfig
    validation_config: ValidationConfig
    output_config: OutputConfig
    parallel_config: ParallelConfig

    def __init__(self, model: str, **settings: Any) -> None:
        """Check all settings. `settings` has the keys of the settings file except `model`."""
        super().__init__(model=model, **_with_run_method(rename_monitor(settings)))
        self._check_task_methods()
        self._check_unused_settings()
        self._check_optimizer()
        self._check_tasks()

    def _check_unused_settings(self) -> None:
        """Raise ConfigError if a setting that has no effect differs from its default."""
        method = self.method_config.method
        uses_adamw = self.training_config.optimizer == "adamw"
        conditions = {
            "encoder_hidden": (
                method in ENCODER_METHODS,
                f"method is one of: {', '.join(ENCODER_METHODS)}",
            ),
            "encoder_layers": (method in ("mlp", "lstm"), "method is mlp or lstm"),
            **{
                name: (self._is_inherited(name, methods), f"method is {_join_or(methods)}")
                for name, methods in LINEAR_SETTING_METHODS.items()
            },
            "minimum_rate": (self.training_config.schedule == "cosine", "schedule is cosine"),
            "beta1": (uses_adamw, "optimizer is adamw"),
            "beta2": (uses_adamw, "optimizer is adamw"),
            "epsilon": (uses_adamw, "optimizer is adamw"),
            "recompute_layers": (self.parallel_config.recompute == "block", "recompute is block"),
            "patience": (
                self.validation_config.validate_every != 0,
                "validate_every is not 0",
            ),
            "validation_examples": (
                self.validation_config.measure != "all",
                "measure is not all",
            ),
            "golden_examples": (method != "full", "method is not full"),
            **dict.fromkeys(
                ("initial", "encoder_dropout", "encoder_from"),
                (self.method_config.has_virtual_tokens, "the method learns virtual tokens"),
            ),
        }
        values = self.to_dict()
        defaults = setting_fields(type(self))
        for name, (applies, condition) in conditions.items():
            if not applies and values[name] != defaults[name].default:
                raise ConfigError(
                    f"{name} is {values[name]}, but has an effect only if {condition}; remove it"
                )

    def _is_inherited(self, name: str, methods: Sequence[str]) -> bool:
        """Return whether a task has no value of its own for a setting that affects its method."""
        tasks = zip(self.data_config.resolved_tasks, self.task_method_configs, strict=True)
        return any(getattr(task, name) is None and own.method in methods for task, own in tasks)

    def _check_task_methods(self) -> None:
        """Raise ConfigError if a task has method settings that it cannot have."""
        tasks = self.data_config.resolved_tasks
        methods = [own.method for own in self.task_method_configs]
        plain_method = next((name for name in methods if name not in LINEAR_METHODS), None)
        for task, method in zip(tasks, methods, strict=True):
            for name in task.method_settings:
                if plain_method is not None:
                    raise ConfigError(
                        f"task {task.name!r} sets {name}, but a task of the run has the method "
                        f"{plain_method}; only tasks whose methods change linears "
                        f"({', '.join(LINEAR_METHODS)}) can have method settings of their own: "
                        "tune the tasks with other methods in another run"
                    )
                used_by = LINEAR_SETTING_METHODS.get(name, LINEAR_METHODS)
                if method not in used_by:
                    raise ConfigError(
                        f"task {task.name!r} sets {name}, which has an effect only if its method "
                        f"is {_join_or(used_by)}; remove it"
                    )
            if task.learning_rate is not None:
                SETTING_RANGES["learning_rate"].check("learning_rate", task.learning_rate)
        for name in TASK_METHOD_SETTINGS:
            value, default = self.to_dict()[name], setting_fields(type(self))[name].default
            has_effect = value in (default, methods[0]) if name == "method" else value == default
            if not has_effect and all(name in task.method_settings for task in tasks):
                raise ConfigError(f"{name} is {value}, but each task sets its own; remove it")

    def _check_optimizer(self) -> None:
        method = self.method_config.method
        tp = self.parallel_config.tp
        is_adafactor = self.training_config.optimizer == "adafactor"
        if is_adafactor and tp > 1 and method in TENSOR_PARALLEL_METHODS:
            raise ConfigError(
                f"adafactor needs whole rows and columns of each matrix, but method {method} "
                f"shards them over {tp} tensor ranks; set tp: 1, or optimizer: adamw"
            )
        weight_decay = self.training_config.weight_decay
        rate = max(
            rate * max(1.0, own.lora_plus_ratio)
            for rate, own in zip(self.task_learning_rates, self.task_method_configs, strict=True)
        )
        if rate * weight_decay >= 1:
            raise ConfigError(
                f"learning_rate x weight_decay is {rate * weight_decay:g}; it must be less than 1, "
                "because each step multiplies the values by 1 minus this product"
            )

    def _check_tasks(self) -> None:
        tasks = self.data_config.resolved_tasks
        for task, method_config in zip(tasks, self.task_method_configs, strict=True):
            task.check_answer_field()
            if not task.name and method_config.method != "full":
                raise ConfigError("name is missing; set it to the name of the adapter")
            _check_path("data", task.data or "")
            task.check_invocation(method_config.method)
            if task.initial_text and not method_config.has_virtual_tokens:
                raise ConfigError(
                    f"initial_text is set, but method {method_config.method} learns no virtual "
                    "tokens; remove it"
                )

    def with_fields(self, **settings: Any) -> Self:
        """Return a copy with changed settings; the constructors check all values again."""
        # The rename must come first, because the copy sets both `monitor` and `measure`.
        return super().with_fields(**rename_monitor(settings))

    @property
    def task_method_configs(self) -> tuple[MethodConfig, ...]:
        """The method settings of each task: its own, and those of the run for its method."""
        run = self.method_config
        return tuple(
            run if not task.method_settings else _task_method_config(run, task)
            for task in self.data_config.resolved_tasks
        )

    @property
    def task_learning_rates(self) -> tuple[float, ...]:
        """The peak learning rate of each task."""
        method_rates = (
            METHOD_LEARNING_RATES | ADAFACTOR_LEARNING_RATES
            if self.training_config.optimizer == "adafactor"
            else METHOD_LEARNING_RATES
        )
        return tuple(
            task.learning_rate or self.training_config.learning_rate or method_rates[own.method]
            for task, own in zip(
                self.data_config.resolved_tasks, self.task_method_configs, strict=True
            )
        )

    @property
    def task_groups(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the tasks that are trained together, one tuple for each group.

        The tasks of a group share batches, the loss, the gradient norm, the learning rate and early
        stopping. Tasks whose methods change linears share no parameters, so each is a group.
        """
        tasks = range(len(self.data_config.resolved_tasks))
        if self.method_config.changes_linears:
            return tuple((task,) for task in tasks)
        return (tuple(tasks),)

    @property
    def group_learning_rates(self) -> tuple[float, ...]:
        """The peak learning rate of each task group."""
        return tuple(self.task_learning_rates[group[0]] for group in self.task_groups)

    def to_record(self) -> dict[str, Any]:
        """Return all settings by key; each task is a dict."""
        return {**self.to_dict(), "tasks": tuple(map(asdict, self.data_config.tasks))}

    @classmethod
    def from_yaml(cls, path: str) -> Self:
        return cls.from_dict(read_yaml(Path(path)), path)

    @classmethod
    def from_dict(cls, settings: dict[str, Any], source: str) -> Self:
        """Parse a mapping of settings; `source` names its file in error messages."""
        settings = dict(settings)
        if "task_templates" in settings:
            if "tasks" in settings:
                raise ConfigError(
                    f"{source}: both task_templates and tasks are set; remove one of them"
                )
            settings["tasks"] = parse_nemo_tasks(settings.pop("task_templates"), source)
        tasks = settings.get("tasks")
        if isinstance(tasks, list):
            if not all(isinstance(task, dict | Task) for task in tasks):
                raise ConfigError(
                    f"{source}: tasks is {short_repr(tasks)}; each task must be a mapping of "
                    "`key: value`"
                )
            settings["tasks"] = [
                task if isinstance(task, Task) else _parse_task(task, f"{source}: task {number}")
                for number, task in enumerate(tasks, 1)
            ]
            task_settings = {setting.name for setting in fields(Task)} - SHARED_TASK_SETTINGS
            misplaced_settings = sorted(task_settings & set(settings))
            if tasks and misplaced_settings:
                raise ConfigError(
                    f"{source}: {misplaced_settings[0]} is set beside tasks; move it into each task"
                )
        return parse_settings(cls, settings, source)


def _parse_task(values: dict[str, Any], source: str) -> Task:
    """Parse the mapping of a task; `source` names it in error messages."""
    task_settings = {setting.name for setting in fields(Task)}
    for key in values:
        if key in setting_fields(TuneConfig) and key not in task_settings:
            raise ConfigError(
                f"{source}: {key} is the same for all tasks of a run; move it to the top level of "
                "the file, or tune this task in another run"
            )
    return parse_settings(Task, values, source)


def _task_method_config(run: MethodConfig, task: Task) -> MethodConfig:
    """Return the method settings of a task.

    Settings of the run that do not affect the method of the task have their defaults.
    """
    own = {name: value for name, value in task.method_settings.items() if hasattr(run, name)}
    method = own.get("method", run.method)
    defaults = setting_fields(MethodConfig)
    unused = {
        name: defaults[name].default
        for name, methods in LINEAR_SETTING_METHODS.items()
        if method not in methods
    }
    try:
        return replace(run, **{**unused, **own})
    except ConfigError as error:
        raise ConfigError(f"task {task.name!r}: {error}") from None


def _join_or(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _with_run_method(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the method of the first task, if all tasks set their own."""
    default = setting_fields(MethodConfig)["method"].default
    methods = [task.method for task in settings.get("tasks") or () if isinstance(task, Task)]
    if methods and all(methods) and settings.get("method", default) == default:
        return {**settings, "method": methods[0]}
    return settings


def rename_monitor(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with a metric in `measure` as `monitor`.

    Until version 0.1, `measure` was the name of `monitor`.
    """
    renamed = dict(settings)
    if "monitor" not in renamed and renamed.get("measure") in MONITORS:
        renamed["monitor"] = renamed.pop("measure")
    return renamed


def _check_settings(part: Any) -> None:
    """Raise if a setting of a part is out of range or not one of its choices."""
    for name, value in _select_settings(part, SETTING_RANGES):
        if value is not None:
            SETTING_RANGES[name].check(name, value)
    for name, value in _select_settings(part, CHOICES):
        if value not in CHOICES[name]:
            raise ConfigError(
                f"{name} is {short_repr(value)}; {suggest_nearest(value, CHOICES[name])}"
            )


def _select_settings(part: Any, names: Iterable[str]) -> list[tuple[str, Any]]:
    """Return (name, value) of each setting in `names` that the part has."""
    part_settings = setting_fields(type(part))
    return [(name, getattr(part, name)) for name in names if name in part_settings]


def _check_path(name: str, path: str) -> None:
    if not path or "\0" in path or path != path.encode(errors="replace").decode():
        raise ConfigError(f"{name} is {short_repr(path)}; it must be a path")
