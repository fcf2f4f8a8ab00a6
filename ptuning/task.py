"""Task: the settings of one adapter (name, records, prompt template, virtual tokens).

A run trains one task or several. The settings of a single task are top-level keys of the YAML file.
Several tasks are entries of the list `tasks`; if the method has a prompt encoder, all tasks share
the network of the encoder. If the methods change linears, the tasks are trained independently, and
a task may have method settings of its own. NeMo's `task_templates` are accepted in place of
`tasks`. This module uses neither the tokenizer nor the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpt.errors import ConfigError
from gpt.settings import parse_settings, short_repr

DEFAULT_TEMPLATE = "<|VIRTUAL_PROMPT_0|>{prompt}{completion}"
COUNT_MAX = 2**31 - 1  # Largest value of settings that count tokens, records or steps.


@dataclass(frozen=True)
class Range:
    """The allowed values of a numeric setting."""

    minimum: float
    maximum: float
    excludes_minimum: bool = False
    excludes_maximum: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise ConfigError if the value of the setting `name` is outside the range, or NaN."""
        is_low = not value > self.minimum if self.excludes_minimum else not value >= self.minimum
        is_high = not value < self.maximum if self.excludes_maximum else not value <= self.maximum
        if is_low or is_high:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            lower_bound = "more than" if self.excludes_minimum else "at least"
            upper_bound = "less than" if self.excludes_maximum else "at most"
            raise ConfigError(
                f"{name} is {shown}; it must be {lower_bound} {self.minimum:,} and {upper_bound} "
                f"{self.maximum:,}"
            )


# The settings of a run that a task may replace, if the methods of all tasks change linears.
TASK_METHOD_SETTINGS = (
    "method",
    "rank",
    "alpha",
    "rslora",
    "dropout",
    "targets",
    "layers",
    "lora_plus_ratio",
    "learning_rate",
)
VIRTUAL_TOKENS_RANGE = Range(1, COUNT_MAX)
NEW_TOKENS_RANGE = Range(1, COUNT_MAX)


@dataclass(frozen=True)
class Task:
    """Settings of one adapter.

    If `data`, `validation`, `answer_only_loss` or one of TASK_METHOD_SETTINGS is None, the run's
    top-level setting applies.
    """

    name: str  # Name of the adapter, and the value of `taskname` in the task's records.
    data: str | None = None  # File of training records: jsonl, CSV, TSV or Parquet.
    validation: str | None = None  # File of held-out records, which are never trained on.
    task: str = ""  # Purpose of the adapter in a few words.
    template: str = DEFAULT_TEMPLATE  # Prompt template; its fields are keys of the records.
    # Field with the answer; must be at the end of the template. None: the field that ends it.
    answer_field: str | None = None
    # Whether the loss covers only the tokens of the answer; False: it covers all text tokens.
    answer_only_loss: bool | None = None
    # Field to truncate in examples that are too long; None: such examples are dropped.
    truncate_field: str | None = None
    stop: tuple[str, ...] = ()  # Stop strings of an answer, in addition to the end-of-text token.
    max_new_tokens: int | None = None  # Default length limit of an answer in tokens.

    virtual_tokens: int = 20
    # Number of virtual tokens at each marker <|VIRTUAL_PROMPT_i|> of the template, in order; empty:
    # all virtual tokens are at one marker.
    splits: tuple[int, ...] = ()
    # Method `alora`: the text from whose last occurrence in the prompt on the adapter acts. The
    # marker <|INVOCATION|> of the template stands for its tokens.
    invocation: str = ""
    invocation_ids: tuple[int, ...] = ()  # The token ids of the invocation, in place of its text.
    # Instruction text that replaces the virtual tokens in a baseline evaluation; empty: no such
    # baseline.
    oracle: str = ""
    # Text whose token embeddings are the initial rows of the virtual tokens; empty: the run's
    # setting `initial` selects the initial rows.
    initial_text: str = ""

    # TASK_METHOD_SETTINGS, which MethodConfig and TrainingConfig describe.
    method: str | None = None
    rank: int | None = None
    alpha: float | None = None
    rslora: bool | None = None
    dropout: float | None = None
    targets: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    lora_plus_ratio: float | None = None
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        VIRTUAL_TOKENS_RANGE.check("virtual_tokens", self.virtual_tokens)
        if self.max_new_tokens is not None:
            NEW_TOKENS_RANGE.check("max_new_tokens", self.max_new_tokens)
        if self.answer_field is None:
            object.__setattr__(self, "answer_field", final_field(self.template))
        if self.splits and sum(self.splits) != self.virtual_tokens:
            raise ConfigError(
                f"splits are {list(self.splits)}, with the sum {sum(self.splits)}; "
                f"they must sum to virtual_tokens, {self.virtual_tokens}"
            )

    @property
    def method_settings(self) -> dict[str, Any]:
        """The settings of TASK_METHOD_SETTINGS that this task has of its own."""
        values = {name: getattr(self, name) for name in TASK_METHOD_SETTINGS}
        return {name: value for name, value in values.items() if value is not None}

    def check_answer_field(self) -> None:
        """Raise ConfigError if neither the settings nor the template name the answer's field."""
        if self.answer_field is None:
            raise ConfigError(
                f"answer_field is missing, and the template {short_repr(self.template)} does not "
                "end with a field; end the template with the field of the answer"
            )

    def check_invocation(self, method: str) -> None:
        """Raise ConfigError if the invocation is missing, or has no effect with the method."""
        name = "invocation_ids" if self.invocation_ids else "invocation"
        if method == "alora" and not getattr(self, name):
            raise ConfigError(
                "invocation is missing; set it to the text from which the adapter acts on, such as "
                "the control token that begins the assistant's turn"
            )
        if self.invocation and self.invocation_ids:
            raise ConfigError("invocation and invocation_ids are both set; remove one of them")
        if method != "alora" and getattr(self, name):
            raise ConfigError(
                f"{name} is set, but has an effect only if method is alora; remove it"
            )


def final_field(template: str) -> str | None:
    """Return the field with which a template ends, as NeMo does; None if it ends with other text.

    A server needs the field of the answer to know where the prompt ends.
    """
    start = template.rfind("{")
    name = template[start + 1 : -1]
    return name if start >= 0 and name and template.endswith("}") else None


@dataclass(frozen=True)
class NemoTask:
    """One entry of NeMo's `task_templates`, with NeMo's keys and defaults."""

    taskname: str
    prompt_template: str
    total_virtual_tokens: int
    virtual_token_splits: tuple[int, ...] | None = None
    truncate_field: str | None = None
    answer_only_loss: bool = False
    answer_field: str | None = None

    def to_task(self, source: str) -> Task:
        # NeMo needs no answer field if the loss covers the whole text.
        answer_field = self.answer_field or final_field(self.prompt_template)
        if answer_field is None:
            raise ConfigError(
                f"{source}: answer_field is missing, and prompt_template does not end with a "
                "field; set answer_field to the answer's field, and end prompt_template with it"
            )
        try:
            return Task(
                self.taskname,
                template=self.prompt_template,
                answer_field=answer_field,
                answer_only_loss=self.answer_only_loss,
                truncate_field=self.truncate_field,
                virtual_tokens=self.total_virtual_tokens,
                splits=self.virtual_token_splits or (),
            )
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None


def parse_nemo_tasks(templates: object, source: str) -> list[Task]:
    """Convert the list of NeMo's `task_templates` to tasks."""
    source = f"{source}: task_templates"
    if not isinstance(templates, list) or not templates:
        raise ConfigError(f"{source} is {short_repr(templates)}; it must be a list of templates")
    tasks = []
    for number, template in enumerate(templates, 1):
        if not isinstance(template, Mapping) or not all(isinstance(key, str) for key in template):
            raise ConfigError(
                f"{source}, number {number} is {short_repr(template)}; it must be a mapping of "
                "`key: value`"
            )
        location = f"{source}, number {number}"
        tasks.append(parse_settings(NemoTask, template, location).to_task(location))
    return tasks
