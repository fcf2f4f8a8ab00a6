"""Examples to learn from: jsonl records, rendered by the template that will also serve.

A record is an object of texts with the template's fields; the answer comes last, and only it is
learned. A record that is wrong is an error with its line; one that is too long is left out, or cut
where the settings say, and counted. Knows no model but for its sizes.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt.errors import ConfigError, RequestError
from gpt.prompts import Template
from gpt.settings import shown
from gpt.tokenizer import Tokenizer

LINE_BYTES_MAX = 16 << 20


@dataclass(frozen=True)
class Example:
    """A prompt and its answer; ids at or above the vocabulary are rows of the table."""

    ids: list[int]
    answer_start: int
    task: int = 0  # Which of the run's.
    learned: Sequence[int] = ()  # Places of the ids that have a loss; empty: the answer's.

    def __post_init__(self) -> None:
        if not self.learned:
            answer = range(max(1, self.answer_start), len(self.ids))
            object.__setattr__(self, "learned", answer)


@dataclass(frozen=True)
class Examples:
    examples: list[Example]
    truncated: int  # How many were cut.
    dropped: list[str]  # Why each of the others was left out.


def read_examples(
    path: Path, template: Template, tokenizer: Tokenizer, *, vocab_size: int, tokens_max: int
) -> Examples:
    """All records of a file, rendered."""
    examples, truncated, dropped = [], 0, []
    for line, record in _records(path):
        missing = [field for field in template.fields if field not in record]
        if missing:
            raise ConfigError(
                f"{path} line {line}: no field {missing[0]!r}, which the template has; "
                f"this record has: {', '.join(sorted(record)) or 'nothing'}"
            )
        inputs = {field: record[field] for field in template.fields}
        try:
            rendered = template.render(
                tokenizer, inputs, vocab_size=vocab_size, tokens_max=tokens_max, answer=True
            )
        except RequestError as error:
            dropped.append(f"line {line}: {error}")
            continue
        truncated += rendered.truncated > 0
        examples.append(Example(list(rendered.ids), rendered.answer_start))
    if not examples:
        raise ConfigError(
            f"{path} has no usable example; "
            + (f"the first was left out: {dropped[0]}" if dropped else "it is empty")
        )
    return Examples(examples, truncated, dropped)


def _records(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX), b""), 1):
                if raw.strip():
                    yield line, _record(raw, f"{path} line {line}")
    except OSError as error:
        raise ConfigError(f"data: {path} cannot be read ({error.strerror})") from None


def _record(raw: bytes, where: str) -> dict[str, str]:
    try:
        record = json.loads(raw)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); each line must be one object") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply; each line must be one object") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a {type(record).__name__}; each line must be one object")
    for key, value in record.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {shown(key)} is {shown(value)}; it must be a text")
    return record
