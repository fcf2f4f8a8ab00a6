"""Task: the settings of one adapter (name, records, prompt template, virtual tokens).

A run trains one task or several. The settings of a single task are top-level keys of the YAML file.
Several tasks are entries of the list `tasks`; if the method has a prompt encoder, all tasks share
the network of the encoder. NeMo's `task_templates` are accepted in place of `tasks`. This module
uses neither the tokenizer nor the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gpt.errors import ConfigError
from gpt.settings import parse_settings, short_repr

DEFAULT_TEMPLATE = "<|VIRTUAL_PROMPT_0|>{prompt}{completion}"


@dataclass(frozen=True)
class Task:
    """Settings of one adapter.

    If `data`, `validation` or `answer_only_loss` is None, the run's top-level setting applies.
    """

    name: str  # Name of the adapter, and the value of `taskname` in the task's records.
    data: str | None = None  # File of training records: jsonl, CSV, TSV or Parquet.
    validation: str | None = None  # File of held-out records, which are never trained on.
    task: str = ""  # Purpose of the adapter in a few words.
    template: str = DEFAULT_TEMPLATE  # Prompt template; its fields are keys of the records.
    answer_field: str = "completion"  # Field with the answer; must be at the end of the template.
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
    # Instruction text that replaces the virtual tokens in a baseline evaluation; empty: no such
    # baseline.
    oracle: str = ""
    # Text whose token embeddings are the initial rows of the virtual tokens; empty: the run's
    # setting `initial` selects the initial rows.
    initial_text: str = ""

    def __post_init__(self) -> None:
        for name in ("virtual_tokens", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be more than 0")
        if self.splits and sum(self.splits) != self.virtual_tokens:
            raise ConfigError(
                f"splits are {list(self.splits)}, with the sum {sum(self.splits)}; "
                f"they must sum to virtual_tokens, {self.virtual_tokens}"
            )


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
        answer_field = self.answer_field
        if answer_field is None:
            # NeMo needs no answer field if the loss covers the whole text. A server needs an answer
            # field to know where the prompt ends, so use the field at the end of the template.
            field_start = self.prompt_template.rfind("{")
            answer_field = self.prompt_template[field_start + 1 : -1]
            if field_start < 0 or not self.prompt_template.endswith("}") or not answer_field:
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
