"""TuneConfig: what to learn, from which examples, and how, with a unit and a default for each.

Built once from a YAML file. What the model is comes from its checkpoint, never from here. The
settings of a run's one task stand beside those of the run; several tasks stand under `tasks`.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from gpt.errors import ConfigError
from gpt.settings import nearest, read_yaml, settings, shown
from ptuning.task import PLAIN, Task, tasks_of_nemo

# What stands for P while it is learned, and the learning rate that suits it: a bare table needs
# far larger steps than a network that makes one.
METHODS = {
    "prompt-tuning": 1e-2,  # The table itself.
    "mlp": 3e-4,  # NeMo's linears over a table.
    "lstm": 3e-4,  # NeMo's and PEFT's LSTM and head.
    "tpmlp": 3e-4,  # NeMo's two linears, split over the tensor ranks.
    "peft-mlp": 3e-4,  # PEFT's three linears.
    "prefix": 3e-2,  # No table of rows: keys and values of every layer.
    "full": 1e-4,  # No virtual tokens: the model itself, all of it.
}
ENCODERS = tuple(one for one in METHODS if one not in ("prompt-tuning", "prefix", "full"))
# Whose parameters the tensor ranks share out.
SPLIT = ("tpmlp", "prefix", "full")
# Rows of random tokens, of the records' or of all; or random ones of the same size. Of a large
# vocabulary many rows may never have been trained, and learning goes badly from such.
INITIAL = ("records", "vocabulary", "random")
# Lester's, of steps that are not relative to the table's size; for a network as with AdamW.
ADAFACTOR = {"prompt-tuning": 0.3}
OPTIMIZERS = ("adamw", "adafactor")
SCHEDULES = ("cosine", "constant", "inverse-sqrt")
RECOMPUTE = ("none", "selective", "block", "full")
MEASURES = ("loss", "exact_match", "accuracy", "f1")

# Of a task's settings, those that may stand at the top for all tasks that do not say.
OF_ALL_TASKS = {"data", "validation", "answer_only_loss"}
POSITIVE = (
    *("tokens_max", "encoder_hidden", "encoder_layers", "steps", "batch_examples"),
    *("micro_batch_examples", "micro_batch_tokens", "learning_rate", "gradient_norm_max"),
    *("validate_every", "validation_examples", "save_every", "patience"),
    *("tp", "pp", "dp", "virtual_stages", "recompute_layers"),
)
NOT_NEGATIVE = ("warmup_steps", "weight_decay", "seed", "golden_examples", "minimum_rate")
CHOICES = {
    "method": tuple(METHODS),
    "initial": INITIAL,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "recompute": RECOMPUTE,
    "measure": MEASURES,
}


@dataclass(frozen=True)
class TuneConfig:
    """What `preamble tune` needs to know. A relative path starts at the working directory."""

    model: str  # The checkpoint's path.
    data: str = ""  # Records to learn from: jsonl, CSV, TSV or Parquet.
    name: str = ""  # The adapter's.
    output: str = "adapters"  # The directory for it, made if need be; a server's may be one.
    run: str | None = None  # The directory for logs, report and states; None: beside the output.

    validation: str = ""  # Records that only measure; empty: none.
    task: str = ""  # What it is for, in a few words.
    template: str = PLAIN  # Its fields are the records' keys.
    answer_field: str = "completion"  # What is learned; it must end the template.
    truncate_field: str | None = None  # Is cut in what is too long; None: that is left out.
    stop: tuple[str, ...] = ()  # Texts that end an answer, beside the model's own end.
    max_new_tokens: int | None = None  # Of an answer, if a request does not say.
    virtual_tokens: int = 20
    splits: tuple[int, ...] = ()  # Of them, for each of the template's places; empty: it has one.
    initial_text: str = ""  # The table starts as its rows; empty: as `initial` says.
    oracle: str = ""  # An instruction, whose own score is measured beside the adapter's.
    tasks: tuple[Task, ...] = ()  # Several at once instead of the one that is told above.
    tokens_max: int | None = None  # Of an example; None, or more than it: the model's context.
    answer_only_loss: bool = True  # Else all tokens of the text are learned.

    method: str = "prompt-tuning"  # What makes the table: see METHODS.
    initial: str = "records"  # How its rows start where no text says.
    encoder_hidden: int | None = None  # Width of an encoder; None: the model's, of `lstm` half.
    encoder_layers: int = 2  # Linears of `mlp`, layers of `lstm`.
    encoder_dropout: float = 0.0  # Between the layers of `lstm`.
    encoder_from: str | None = None  # An earlier run, whose encoder this one starts from.

    steps: int = 200
    batch_examples: int = 16  # Of one step; all of them, if they are fewer.
    micro_batch_examples: int | None = None  # Of a step's, that one pass computes; None: all.
    micro_batch_tokens: int | None = None  # As many examples in a pass as have these tokens.
    optimizer: str = "adamw"
    learning_rate: float | None = None  # None: what suits the method and the optimizer.
    schedule: str = "cosine"  # Down to `minimum_rate`, after the warm-up.
    minimum_rate: float = 0.0  # The share of the learning rate that a cosine ends with.
    warmup_steps: int = 20
    weight_decay: float = 0.0  # It would pull towards zero, not towards words.
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-8
    gradient_norm_max: float = 1.0
    hidden_dropout: float = 0.0  # Only of `full`: a frozen model has none.
    attention_dropout: float = 0.0
    seed: int = 0

    validate_every: int | None = None  # Steps; None: at the end alone. Of `full` the last is kept.
    validation_examples: int = 200  # Of them are measured.
    measure: str = "loss"  # What the best table is chosen by, and early stopping.
    patience: int | None = None  # Validations without a better measure, until the run ends.
    save_every: int = 100  # Steps between states to go on from.
    golden_examples: int = 0  # Of the validation's, with answers, that travel in the card.
    tensorboard: bool = False

    tp: int = 1  # Tensor-parallel ranks.
    pp: int = 1  # Stages of the pipeline.
    dp: int = 1  # Copies of all that, each with its share of every batch.
    virtual_stages: int = 1  # Pieces of a stage; more than 1: the interleaved schedule.
    sequence_parallel: bool = False  # Of tensor ranks, if there are several.
    recompute: str = "none"  # What is computed again in the backward pass instead of kept.
    recompute_layers: int = 1  # Layers of a stage that `block` recomputes.

    tokenizer: str | None = None  # A file or a directory; None: what lies beside the weights.
    true_vocab_size: int | None = None  # Where the checkpoint does not tell it from the padding.
    config_json: str | None = None  # Fields of the model that the checkpoint lacks or has wrong.
    device: str = "cpu"
    dtype: str | None = None  # What to compute in; None: as stored. The table is always fp32.

    def __post_init__(self) -> None:
        for name in ("model", "output"):
            _check_path(name, getattr(self, name))
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}; it must be more than 0, and finite")
        for name in NOT_NEGATIVE:
            value = getattr(self, name)
            if not 0 <= value < 2**63:
                way = "must not be negative" if value < 0 else "must be less than 2^63"
                raise ConfigError(f"{name} is {value}; it {way}")
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{name} is {shown(value)}; {nearest(value, known)}")
        for name in ("hidden_dropout", "attention_dropout", "encoder_dropout", "beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 0 and less than 1")
        if self.minimum_rate > 1:
            raise ConfigError(
                f"minimum_rate is {self.minimum_rate}; it is a share of the learning rate, so at "
                "most 1"
            )
        self._check_idle()
        if self.optimizer == "adafactor" and self.tp > 1 and self.method in SPLIT:
            raise ConfigError(
                f"adafactor learns from whole rows and columns, and {self.method} shares them out "
                f"over {self.tp} tensor ranks; set tp: 1, or optimizer: adamw"
            )
        self._check_tasks()

    def _check_idle(self) -> None:
        """Refuse what would do nothing: who sets it believes that it does something."""
        uses = {
            "encoder_hidden": (self.method in ENCODERS, f"method is one of: {', '.join(ENCODERS)}"),
            "encoder_layers": (self.method in ("mlp", "lstm"), "method is mlp or lstm"),
            "minimum_rate": (self.schedule == "cosine", "schedule is cosine"),
            "beta1": (self.optimizer == "adamw", "optimizer is adamw"),
            "beta2": (self.optimizer == "adamw", "optimizer is adamw"),
            "epsilon": (self.optimizer == "adamw", "optimizer is adamw"),
            "recompute_layers": (self.recompute == "block", "recompute is block"),
            "patience": (self.validate_every is not None, "validate_every is set"),
            "golden_examples": (self.method != "full", "an adapter is learned, not method: full"),
        }
        defaults = {one.name: one.default for one in fields(self)}
        for name, (used, when) in uses.items():
            value = getattr(self, name)
            if not used and value != defaults[name]:
                raise ConfigError(
                    f"{name} is {value}, and does nothing here: it is for where {when}; take it out"
                )

    def _check_tasks(self) -> None:
        names = [task.name for task in self.wanted]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"two tasks are named {twice!r}; each needs a name of its own")
        for task in self.wanted:
            if not task.name and self.method != "full":
                raise ConfigError("'name' is missing; it has no default")
            _check_path("data", task.data or "")

    @property
    def wanted(self) -> tuple[Task, ...]:
        """The run's tasks; each knows its records."""
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
        own = {one.name: getattr(self, one.name) for one in fields(Task)}
        return (Task(**{**own, "validation": self.validation or None}),)

    @property
    def kind(self) -> str:
        """What an adapter's table is, as its card says it."""
        return "prefix" if self.method == "prefix" else "rows"

    @property
    def rate(self) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        suits = METHODS | ADAFACTOR if self.optimizer == "adafactor" else METHODS
        return suits[self.method]

    @classmethod
    def read(cls, path: str) -> Self:
        return cls.of(read_yaml(Path(path)), path)

    @classmethod
    def of(cls, record: dict[str, Any], where: str) -> Self:
        record = dict(record)
        if "task_templates" in record:
            if "tasks" in record:
                raise ConfigError(f"{where}: task_templates stands beside tasks; keep one of them")
            record["tasks"] = tasks_of_nemo(record.pop("task_templates"), where)
        tasks = record.get("tasks")
        if isinstance(tasks, list):
            if not all(isinstance(task, dict | Task) for task in tasks):
                raise ConfigError(f"{where}: tasks is {shown(tasks)}; each must be `key: value`s")
            record["tasks"] = [
                task if isinstance(task, Task) else settings(Task, task, f"{where}: task {number}")
                for number, task in enumerate(tasks, 1)
            ]
            beside = sorted({one.name for one in fields(Task)} & set(record) - OF_ALL_TASKS)
            if tasks and beside:
                raise ConfigError(f"{where}: {beside[0]} stands beside tasks; put it into each")
        return settings(cls, record, where)


def _check_path(name: str, path: str) -> None:
    if not path or "\0" in path or path != path.encode(errors="replace").decode():
        raise ConfigError(f"{name} is {shown(path)}; it must be a path")
