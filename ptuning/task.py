"""Task: one adapter to learn: its name, its records, its template, its virtual tokens.

A run has one task, whose settings stand at the top of its file, or several under `tasks`, which
share an encoder; NeMo's `task_templates` are another way to write these. Knows no tokenizer and no
model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gpt.errors import ConfigError
from gpt.settings import settings, shown

PLAIN = "<|VIRTUAL_PROMPT_0|>{prompt}{completion}"


@dataclass(frozen=True)
class Task:
    """What one adapter is learned from. Where a field is None, the run's own stands for it."""

    name: str  # The adapter's; in records with a `taskname`, the one that is this task's.
    data: str | None = None  # Records to learn from: jsonl, CSV, TSV or Parquet.
    validation: str | None = None  # Records that only measure.
    task: str = ""  # What it is for, in a few words.
    template: str = PLAIN  # Its fields are the records' keys.
    answer_field: str = "completion"  # What is learned; it must end the template.
    answer_only_loss: bool | None = None  # Else all tokens of the text are learned.
    truncate_field: str | None = None  # Is cut in what is too long; None: that is left out.
    stop: tuple[str, ...] = ()  # Texts that end an answer, beside the model's own end.
    max_new_tokens: int | None = None  # Of an answer, if a request does not say.

    virtual_tokens: int = 20
    splits: tuple[int, ...] = ()  # Of them, for each of the template's places; empty: it has one.
    oracle: str = ""  # An instruction, whose own score is measured beside the adapter's.
    initial_text: str = ""  # The table starts as its rows; empty: as `initial` says.

    def __post_init__(self) -> None:
        for name in ("virtual_tokens", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be more than 0")
        if self.splits and sum(self.splits) != self.virtual_tokens:
            raise ConfigError(
                f"splits are {list(self.splits)}, {sum(self.splits)} in all; "
                f"they must sum to virtual_tokens, {self.virtual_tokens}"
            )


@dataclass(frozen=True)
class NemoTask:
    """One of NeMo's `task_templates`, with its names and its defaults."""

    taskname: str
    prompt_template: str
    total_virtual_tokens: int
    virtual_token_splits: tuple[int, ...] | None = None
    truncate_field: str | None = None
    answer_only_loss: bool = False
    answer_field: str | None = None

    def task(self, where: str) -> Task:
        answer = self.answer_field
        if answer is None:
            # NeMo needs none where all is learned. A server must know where its prompt ends.
            begin = self.prompt_template.rfind("{")
            answer = self.prompt_template[begin + 1 : -1]
            if begin < 0 or not self.prompt_template.endswith("}") or not answer:
                raise ConfigError(
                    f"{where}: answer_field is missing, and prompt_template does not end with a "
                    "field; name the field that is the answer, and move it to the end"
                )
        try:
            return Task(
                self.taskname,
                template=self.prompt_template,
                answer_field=answer,
                answer_only_loss=self.answer_only_loss,
                truncate_field=self.truncate_field,
                virtual_tokens=self.total_virtual_tokens,
                splits=self.virtual_token_splits or (),
            )
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None


def tasks_of_nemo(templates: object, where: str) -> list[Task]:
    """What NeMo's `task_templates` mean; the records of all of them have a `taskname`."""
    where = f"{where}: task_templates"
    if not isinstance(templates, list) or not templates:
        raise ConfigError(f"{where} is {shown(templates)}; it must be a list of templates")
    tasks = []
    for number, one in enumerate(templates, 1):
        if not isinstance(one, Mapping) or not all(isinstance(key, str) for key in one):
            raise ConfigError(f"{where}, number {number} is {shown(one)}; it must be `key: value`s")
        place = f"{where}, number {number}"
        tasks.append(settings(NemoTask, one, place).task(place))
    return tasks
