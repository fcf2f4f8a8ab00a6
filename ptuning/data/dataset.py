"""Examples to learn from: records, rendered by the template that will also serve.

The answer comes last, and unless told otherwise only it is learned. A record that is wrong is an
error with its line; one that is too long is left out, or cut where the settings say, and counted.
The tables of all tasks are one, row after row. Knows no model but for its sizes.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpt.adapters.card import begins_with_rows
from gpt.adapters.prompt_template import PART, Template
from gpt.config import GPTConfig
from gpt.errors import ConfigError, RequestError
from gpt.settings import nearest, shown
from gpt.tokenizers.tokenizer import Tokenizer
from ptuning.config import TuneConfig
from ptuning.data.records import Reading, Record, read_records
from ptuning.task import Task

TASKNAME = "taskname"  # The record's key that says whose it is, as in NeMo's data.
NAMES_SHOWN = 200  # Characters of them, in a message.


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its answer; ids at or above the vocabulary are rows of the table."""

    ids: Sequence[int]
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
    # Of each example: what a request for it would send, and the text that should come back.
    records: list[dict[str, str]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def first(self, count: int) -> "Examples":
        """So many of the examples at most, as if the file had no others."""
        return Examples(
            self.examples[:count],
            self.truncated,
            self.dropped,
            self.records[:count],
            self.answers[:count],
        )


@dataclass(frozen=True)
class TaskData:
    """One task of a run, with all that is learned for it and that measures it."""

    task: Task
    template: Template
    first_row: int  # Of its rows in the run's table.
    vocab_size: int  # Ids from here on are rows of that table.
    examples: Examples
    validation: Examples | None
    tokens_max: int  # Of an example, virtual tokens counted.


def read_tasks(
    config: TuneConfig, tokenizer: Tokenizer, sizes: GPTConfig, progress: Reading | None = None
) -> list[TaskData]:
    """All of a run's tasks, rendered; a file that several share is read once."""
    context = sizes.max_position_embeddings
    tokens_max = min(config.tokens_max or context, context)
    makers, first_row = [], 0
    for number, task in enumerate(config.wanted):
        template = task_template(task, tokenizer, virtual=config.method != "full", kind=config.kind)
        check_template(template, config.kind, task.name)
        silent = template.rows if config.kind == "prefix" else 0
        numbers = Numbers(number, sizes.vocab_size, first_row, tokens_max, silent)
        makers.append(
            Maker(
                task.name,
                template,
                tokenizer,
                numbers,
                answer_only=task.answer_only_loss is not False,
            )
        )
        first_row += template.rows
    several = len(config.wanted) > 1
    found: list[dict[int, Examples]] = []
    for role in ("data", "validation"):
        found.append({})
        paths = [getattr(task, role) for task in config.wanted]
        for path in dict.fromkeys(filter(None, paths)):
            shares = [maker for maker, own in zip(makers, paths, strict=True) if own == path]
            read = _read(Path(path), shares, progress, strict=several)
            found[-1] |= {maker.numbers.task: one for maker, one in zip(shares, read, strict=True)}
    learned, measured = found
    return [
        TaskData(
            task,
            maker.template,
            maker.numbers.first_row,
            sizes.vocab_size,
            learned[number],
            measured.get(number),
            tokens_max,
        )
        for number, (task, maker) in enumerate(zip(config.wanted, makers, strict=True))
    ]


def task_template(
    task: Task, tokenizer: Tokenizer, *, virtual: bool = True, kind: str = "rows"
) -> Template:
    """How a task's records become tokens; without virtual ones its markers are left out."""
    first = "text" if kind == "prefix" else "first"  # Nothing can stand before a prefix.
    text = task.template
    if not virtual:
        text = PART.sub(lambda part: "" if part[1] else part[0], text)
    return Template(
        text,
        (task.splits or (task.virtual_tokens,)) if virtual else (),
        truncate_field=task.truncate_field,
        answer_field=task.answer_field,
        bos=first if tokenizer.adds_bos else "none",
        eos=tokenizer.eos_id is not None,
    )


def check_template(template: Template, kind: str, name: str) -> None:
    """Refuse what cannot be served with keys and values."""
    if kind == "prefix" and not begins_with_rows(template):
        raise ConfigError(
            f"the template of {name!r} has something before its virtual tokens, or has them in "
            "another order; keys and values can only stand first: begin the template with its "
            "markers from 0 on, or set another method"
        )


def read_examples(
    path: Path,
    template: Template,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    tokens_max: int,
    kind: str = "rows",
) -> Examples:
    """All records of a file, rendered."""
    silent = template.rows if kind == "prefix" else 0
    maker = Maker("", template, tokenizer, Numbers(0, vocab_size, 0, tokens_max, silent))
    return _read(path, [maker], None, strict=False)[0]


@dataclass(frozen=True)
class Numbers:
    """What a task's examples are made with, beside its template."""

    task: int  # Which of the run's.
    vocab_size: int
    first_row: int
    tokens_max: int
    silent: int = 0  # Of the first ids, those that predict nothing: a prefix has no output.


class Maker:
    """Makes examples of one task's records, and keeps them."""

    def __init__(
        self,
        name: str,
        template: Template,
        tokenizer: Tokenizer,
        numbers: Numbers,
        *,
        answer_only: bool = True,
    ) -> None:
        self.name, self.template, self.numbers = name, template, numbers
        self._tokenizer, self._answer_only = tokenizer, answer_only
        self._start()

    def _start(self) -> None:
        self._examples: list[Example] = []
        self._records: list[dict[str, str]] = []
        self._answers: list[str] = []
        self._dropped: list[str] = []
        self._truncated = 0

    def add(self, path: Path, record: Record) -> None:
        inputs = _texts(record, self.template.fields, f"{path} {record.place}")
        numbers = self.numbers
        try:
            rendered = self.template.render(
                self._tokenizer,
                inputs,
                vocab_size=numbers.vocab_size,
                tokens_max=numbers.tokens_max,
                answer=True,
            )
        except RequestError as error:
            self._dropped.append(f"{record.place}: {error}")
            return
        start = rendered.answer_start
        if self.template.answer_field is not None and 0 < start <= numbers.silent:
            self._dropped.append(
                f"{record.place}: no text stands before the answer, and a prefix says nothing by "
                "itself"
            )
            return
        learned = self._learned(rendered.ids, start)
        if not learned:
            self._dropped.append(
                f"{record.place}: nothing to learn, as the answer is empty and no token ends it"
            )
            return
        # Four bytes for each: a list would take over thirty.
        ids = array("i", rendered.ids)
        if numbers.first_row:
            ids = array("i", [i + numbers.first_row * (i >= numbers.vocab_size) for i in ids])
        self._truncated += rendered.truncated > 0
        self._examples.append(Example(ids, start, numbers.task, learned))
        self._answers.append(inputs.pop(self.template.answer_field or "", ""))
        self._records.append(inputs)

    def _learned(self, ids: Sequence[int], start: int) -> Sequence[int]:
        """Places of what is learned; nothing predicts the first id."""
        first, vocab_size = self.numbers.silent + 1, self.numbers.vocab_size
        if self._answer_only:
            return range(max(first, start), len(ids))
        places = [place for place in range(first, len(ids)) if ids[place] < vocab_size]
        if places and len(places) == places[-1] - places[0] + 1:
            return range(places[0], places[-1] + 1)
        return array("i", places)

    def take(self, path: Path) -> Examples:
        """What was made of a file; the next one begins anew."""
        whose = f" of the task {self.name!r}" if self.name else ""
        if not self._examples:
            why = "it has no record" + whose
            if self._dropped:
                why = f"the first was left out: {self._dropped[0]}"
            raise ConfigError(f"{path} has no usable example{whose}; {why}")
        made = Examples(
            self._examples, self._truncated, self._dropped, self._records, self._answers
        )
        self._start()
        return made


def _read(
    path: Path, makers: Sequence[Maker], progress: Reading | None, *, strict: bool
) -> list[Examples]:
    """A file's records for the tasks that share it. `strict`: a task's name must be one of theirs.

    Without it the file is one task's alone, which need not be named as in its records; but these
    must then agree.
    """
    wanted = {TASKNAME, *(name for maker in makers for name in maker.template.fields)}
    shared = len(makers) > 1
    # A template may have a field of that name, which then says nothing of a task.
    named = TASKNAME not in makers[0].template.fields
    by_name = {maker.name: maker for maker in makers}
    first: str | None = None
    for record in read_records(path, wanted, progress):
        maker = makers[0]
        if shared or (named and TASKNAME in record.values):
            where = f"{path} {record.place}"
            name = _texts(record, (TASKNAME,), where)[TASKNAME]
            first = name if first is None else first
            if strict and name not in by_name:
                raise ConfigError(
                    f"{where}: no task with this file is named {shown(name)}; "
                    f"{nearest(name[:NAMES_SHOWN], by_name)}"
                )
            if not strict and name != first:
                raise ConfigError(
                    f"{where}: the taskname is {shown(name)}, and {shown(first)} above it; list "
                    "several tasks under `tasks`, each by its name"
                )
            maker = by_name[name] if strict else maker
        maker.add(path, record)
    return [maker.take(path) for maker in makers]


def _texts(record: Record, names: Sequence[str], where: str) -> dict[str, str]:
    """The fields that are needed, all of them texts."""
    found = {}
    for name in names:
        if name not in record.values:
            has = ", ".join(sorted(record.values))[:NAMES_SHOWN] or "nothing"
            what = "which the template has"
            if name == TASKNAME:
                what = "and several tasks share this file"
            raise ConfigError(f"{where}: no field {name!r}, {what}; this record has: {has}")
        value = record.values[name]
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {name!r} is {shown(value)}; it must be a text")
        found[name] = value
    return found
