"""Task: one adapter to learn: its name, its records, its template, its virtual tokens.

A run has one task, whose settings stand at the top of its file, or several under `tasks`, which
share an encoder. Knows no tokenizer and no model.
"""

from dataclasses import dataclass

from gpt.errors import ConfigError

PLAIN = "<|VIRTUAL_PROMPT_0|>{prompt}{completion}"


@dataclass(frozen=True)
class Task:
    """What one adapter is learned from. Where a field is None, the run's own stands for it."""

    name: str  # The adapter's; in records with a `taskname`, the one that is this task's.
    data: str | None = None  # Records to learn from: jsonl, CSV or Parquet.
    validation: str | None = None  # Records that only measure.
    task: str = ""  # What it is for, in a few words.
    template: str = PLAIN  # Its fields are the records' keys.
    answer_field: str = "completion"  # What is learned; it must end the template.
    truncate_field: str | None = None  # Is cut in what is too long; None: that is left out.
    stop: tuple[str, ...] = ()  # Texts that end an answer, beside the model's own end.
    max_new_tokens: int | None = None  # Of an answer, if a request does not say.

    virtual_tokens: int = 20
    splits: tuple[int, ...] = ()  # Of them, for each of the template's places; empty: it has one.
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
