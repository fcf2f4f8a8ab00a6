"""Dataset: records rendered by a task's prompt template into token ids and loss positions.

Training and serving render with the same template. The answer comes last. `loss_mask` determines
which tokens have a loss. An invalid record raises an error that names the record's line or row. A
record that is too long is dropped and counted, or its `truncate_field` is truncated. The virtual-
token rows of all tasks form the run's table, task after task. This module uses the model's sizes,
but no weights.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpt.adapters.card import begins_with_virtual_tokens
from gpt.adapters.prompt_template import (
    INVOCATION_MARK,
    PART_PATTERN,
    PromptTemplate,
    RenderedPrompt,
    encode_control_tokens,
)
from gpt.config import GPTConfig
from gpt.errors import ConfigError, RequestError
from gpt.linear_adapter import last_occurrence
from gpt.sampling_params import uniform_draw
from gpt.settings import short_repr, suggest_nearest
from gpt.tokenizers.tokenizer import Tokenizer
from ptuning.config import DataConfig, MethodConfig
from ptuning.data.loss_mask import loss_positions
from ptuning.data.records import ProgressCallback, Record, read_records
from ptuning.task import Task

TASKNAME = "taskname"  # Key of a record that names its task, as in NeMo's data.
NAMES_CHARACTERS_MAX = 200  # Length limit of task names and field names in an error message.
# An evaluated answer may be longer than the longest expected answer by this share of its tokens,
# and by at least this number of tokens.
ANSWER_MARGIN_SHARE = 1 / 4
ANSWER_MARGIN_MIN = 4
SAMPLE_SEED = 0  # Seed of the samples of validation records; the same in all runs.


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of a prompt and its answer, as one training example."""

    ids: Sequence[int]  # The id vocab_size + i is a virtual token: row i of the run's table.
    answer_start: int  # Position of the answer's first token.
    task_index: int = 0  # Index among the tasks of the run.
    # Positions in `ids` of the tokens that have a loss. The default () is replaced by the positions
    # of the answer.
    loss_positions: Sequence[int] = ()
    # Position of the first token on which an activated LoRA acts.
    invocation_start: int = 0
    # Number of the example among those of its task in a step; dropout masks depend on it.
    number: int = 0

    def __post_init__(self) -> None:
        if not self.loss_positions:
            answer_positions = range(max(1, self.answer_start), len(self.ids))
            object.__setattr__(self, "loss_positions", answer_positions)


@dataclass(frozen=True)
class ExampleSet:
    """The rendered examples of one file for one task."""

    examples: list[Example]
    truncated: int  # Number of truncated examples.
    dropped: list[str]  # The reason for each dropped record.
    # For each example, the template fields that a request would send: all except the answer.
    records: list[dict[str, str]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)  # For each example, the expected answer.

    def head(self, count: int) -> "ExampleSet":
        """Return the first `count` examples; `truncated` and `dropped` are unchanged."""
        return self._select(range(min(count, len(self.examples))))

    def sample(self, count: int) -> "ExampleSet":
        """Return `count` examples that are drawn at random, in their order in the file.

        The draws depend only on the number of examples, so all runs on a file evaluate the same
        sample. `truncated` and `dropped` are unchanged.
        """
        total = len(self.examples)
        if count >= total:
            return self
        shuffled = sorted(range(total), key=lambda index: uniform_draw(SAMPLE_SEED, index))
        return self._select(sorted(shuffled[:count]))

    def _select(self, indices: Sequence[int]) -> "ExampleSet":
        return ExampleSet(
            [self.examples[index] for index in indices],
            self.truncated,
            self.dropped,
            [self.records[index] for index in indices],
            [self.answers[index] for index in indices],
        )


def new_tokens_limit(examples: Iterable[Example], max_new_tokens: int | None) -> int:
    """Return the length limit of the evaluated answers, from the expected answers of `examples`.

    The limit is the longest expected answer with its end token, and a margin: a longer answer is
    wrong, so the rest of it is not generated. `max_new_tokens`, a task's or card's limit, may
    reduce it.
    """
    longest = max((len(example.ids) - example.answer_start for example in examples), default=0)
    limit = longest + max(ANSWER_MARGIN_MIN, math.ceil(longest * ANSWER_MARGIN_SHARE))
    return limit if max_new_tokens is None else min(limit, max_new_tokens)


@dataclass(frozen=True)
class TaskData:
    """One task of a run with its training and validation examples."""

    task: Task
    template: PromptTemplate
    first_row: int  # First row of this task in the run's table.
    vocab_size: int  # Token ids at or above vocab_size select rows of the table.
    examples: ExampleSet
    validation: ExampleSet | None
    tokens_max: int  # Length limit of an example, including virtual tokens.
    invocation: tuple[int, ...] = ()  # Token ids from which an activated LoRA acts; empty: none.


def read_tasks(
    data_config: DataConfig,
    method_config: MethodConfig,
    tokenizer: Tokenizer,
    gpt_config: GPTConfig,
    progress: ProgressCallback | None = None,
) -> list[TaskData]:
    """Read and render the training and validation records of all tasks.

    A file of training records that several tasks share is read once, and likewise a file of
    validation records.
    """
    tasks, adapter_kind = data_config.resolved_tasks, method_config.adapter_kind
    context = gpt_config.max_position_embeddings
    tokens_max = min(data_config.tokens_max or context, context)
    builders: list[ExampleBuilder] = []
    first_row = 0
    invocations = [task_invocation(task, tokenizer) for task in tasks]
    for task_index, task in enumerate(tasks):
        template = task_template(
            task,
            tokenizer,
            with_virtual_tokens=method_config.has_virtual_tokens,
            kind=adapter_kind,
        )
        check_template(template, adapter_kind, task.name)
        prefix_tokens = template.virtual_tokens if adapter_kind == "prefix" else 0
        layout = ExampleLayout(
            task_index, gpt_config.vocab_size, first_row, tokens_max, prefix_tokens
        )
        builders.append(
            ExampleBuilder(
                task.name,
                template,
                tokenizer,
                layout,
                answer_only=task.answer_only_loss is not False,
                invocation=invocations[task_index],
            )
        )
        first_row += template.virtual_tokens
    has_several_tasks = len(tasks) > 1
    # Both dicts are keyed by task index.
    training_sets: dict[int, ExampleSet] = {}
    validation_sets: dict[int, ExampleSet] = {}
    for setting, example_sets in (("data", training_sets), ("validation", validation_sets)):
        paths = [getattr(task, setting) for task in tasks]
        for path in dict.fromkeys(filter(None, paths)):
            path_builders = [
                builder
                for builder, task_path in zip(builders, paths, strict=True)
                if task_path == path
            ]
            file_sets = _read_file(
                Path(path), path_builders, progress, has_several_tasks=has_several_tasks
            )
            for builder, example_set in zip(path_builders, file_sets, strict=True):
                example_sets[builder.layout.task_index] = example_set
    return [
        TaskData(
            task,
            builder.template,
            builder.layout.first_row,
            gpt_config.vocab_size,
            training_sets[builder.layout.task_index],
            validation_sets.get(builder.layout.task_index),
            tokens_max,
            builder.invocation,
        )
        for task, builder in zip(tasks, builders, strict=True)
    ]


def task_template(
    task: Task, tokenizer: Tokenizer, *, with_virtual_tokens: bool = True, kind: str = "rows"
) -> PromptTemplate:
    """Return a task's prompt template, with or without its virtual-token markers.

    `kind` is the kind of the adapter: "rows" or "prefix".
    """
    # The keys and values of a prefix come first, so the begin-of-text token follows them.
    bos_position = "text" if kind == "prefix" else "first"
    text = task.template
    if not with_virtual_tokens:
        # PART_PATTERN matches markers and fields; group 1 is the number of a marker of virtual
        # tokens, None for others. Remove these markers; fields and text remain.
        text = PART_PATTERN.sub(lambda match: "" if match[1] else match[0], text)
    invocation = task_invocation(task, tokenizer)
    if not invocation:
        text = text.replace(INVOCATION_MARK, "")
    return PromptTemplate(
        text,
        (task.splits or (task.virtual_tokens,)) if with_virtual_tokens else (),
        truncate_field=task.truncate_field,
        answer_field=task.answer_field,
        bos=bos_position if tokenizer.adds_bos else "none",
        eos=tokenizer.eos_id is not None,
        invocation=invocation if INVOCATION_MARK in text else (),
    )


def task_invocation(task: Task, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids of a task's invocation; empty without one."""
    if not task.invocation:
        return task.invocation_ids
    try:
        ids = tuple(encode_control_tokens(tokenizer, task.invocation))
    except RequestError as error:
        raise ConfigError(f"invocation: {error}") from None
    if not ids:
        raise ConfigError(f"invocation is {short_repr(task.invocation)}, which has no tokens")
    return ids


def check_template(template: PromptTemplate, kind: str, name: str) -> None:
    """Raise ConfigError if a prefix adapter's template does not begin with its virtual tokens."""
    if kind == "prefix" and not begins_with_virtual_tokens(template):
        raise ConfigError(
            f"the template of {name!r} has text before its virtual tokens, or has its markers out "
            "of order; the keys and values of a prefix must come first: begin the template "
            "with its markers in the order of their numbers, from 0, or set another method"
        )


def read_examples(
    path: Path,
    template: PromptTemplate,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    tokens_max: int,
    kind: str = "rows",
) -> ExampleSet:
    """Read and render all records of one file, with the template of one adapter."""
    prefix_tokens = template.virtual_tokens if kind == "prefix" else 0
    builder = ExampleBuilder(
        "", template, tokenizer, ExampleLayout(0, vocab_size, 0, tokens_max, prefix_tokens)
    )
    return _read_file(path, [builder], None, has_several_tasks=False)[0]


@dataclass(frozen=True)
class ExampleLayout:
    """Token numbering and length limit of a task's examples."""

    task_index: int  # Index among the tasks of the run.
    vocab_size: int
    first_row: int  # First row of the task in the run's table.
    tokens_max: int  # Length limit of an example, including virtual tokens.
    # Number of leading ids that are virtual tokens of a prefix adapter; 0: the adapter is of the
    # kind "rows". A prefix predicts no token, because it consists of keys and values only.
    prefix_tokens: int = 0


class ExampleBuilder:
    """Renders and collects the examples of one task."""

    def __init__(
        self,
        name: str,
        template: PromptTemplate,
        tokenizer: Tokenizer,
        layout: ExampleLayout,
        *,
        answer_only: bool = True,
        invocation: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self.invocation = invocation
        self.template = template
        self.layout = layout
        self._tokenizer = tokenizer
        self._answer_only = answer_only
        self._reset()

    def _reset(self) -> None:
        self._examples: list[Example] = []
        self._records: list[dict[str, str]] = []
        self._answers: list[str] = []
        self._dropped: list[str] = []
        self._truncated = 0

    def add_record(self, path: Path, record: Record) -> None:
        """Render a record and add its example, or add the reason why the record is dropped."""
        inputs = _text_fields(
            record, self.template.fields, f"{path} {record.location}", "the template needs it"
        )
        layout = self.layout
        try:
            rendered = self.template.render(
                self._tokenizer,
                inputs,
                vocab_size=layout.vocab_size,
                tokens_max=layout.tokens_max,
                with_answer=True,
            )
        except RequestError as error:
            self._dropped.append(f"{record.location}: {error}")
            return
        answer_start = rendered.answer_start
        if self.template.answer_field is not None and 0 < answer_start <= layout.prefix_tokens:
            self._dropped.append(
                f"{record.location}: there is no text before the answer, and a prefix alone "
                "predicts no token"
            )
            return
        invocation_start = self._invocation_start(path, record, rendered)
        positions = loss_positions(
            rendered.ids,
            answer_start if self._answer_only else 0,
            prefix_tokens=layout.prefix_tokens,
            vocab_size=layout.vocab_size,
        )
        if self.invocation:
            # The base model predicts the tokens up to the first one of the invocation.
            positions = [position for position in positions if position > invocation_start]
        if not positions:
            self._dropped.append(
                f"{record.location}: nothing to learn: the answer is empty and no end token "
                "follows it"
            )
            return
        # An array takes 4 bytes per id; a list takes more than 30.
        ids = array("i", rendered.ids)
        if layout.first_row:
            # The template numbers the virtual tokens of its task from row 0. In the run's table,
            # the rows of the task begin at first_row.
            ids = array(
                "i",
                [
                    token + layout.first_row if token >= layout.vocab_size else token
                    for token in ids
                ],
            )
        self._truncated += rendered.truncated_tokens > 0
        self._examples.append(
            Example(ids, answer_start, layout.task_index, positions, invocation_start)
        )
        self._answers.append(inputs.pop(self.template.answer_field or "", ""))
        self._records.append(inputs)

    def _invocation_start(self, path: Path, record: Record, rendered: RenderedPrompt) -> int:
        """Return the position from which an activated LoRA acts; 0 without an invocation."""
        if not self.invocation:
            return 0
        prompt = rendered.ids[: rendered.answer_start] or rendered.ids
        start = last_occurrence(prompt, self.invocation)
        if start is None:
            raise ConfigError(
                f"{path} {record.location}: the prompt does not contain the invocation, the "
                f"{len(self.invocation)} token ids {list(self.invocation)[:16]}; put the marker "
                f"{INVOCATION_MARK} into the template, where the adapter is to act from"
            )
        return start

    def pop_examples(self, path: Path) -> ExampleSet:
        """Return the examples of the file `path`, and clear the builder for the next file."""
        task_suffix = f" of the task {self.name!r}" if self.name else ""
        if not self._examples:
            reason = "it has no record" + task_suffix
            if self._dropped:
                reason = f"the first record was dropped: {self._dropped[0]}"
            raise ConfigError(f"{path} has no usable example{task_suffix}; {reason}")
        example_set = ExampleSet(
            self._examples, self._truncated, self._dropped, self._records, self._answers
        )
        self._reset()
        return example_set


def _read_file(
    path: Path,
    builders: Sequence[ExampleBuilder],
    progress: ProgressCallback | None,
    *,
    has_several_tasks: bool,
) -> list[ExampleSet]:
    """Read a file's records for the tasks that share the file; return the examples of each task.

    `has_several_tasks` says whether the run has several tasks. The rules for the key `taskname` of
    the records are:

    - If several tasks share the file, each record must have the key.
    - In a run with several tasks, the value must be the name of a task that reads the file.
    - In a run with one task, all values must be equal; they may differ from the task's name.
    """
    field_names = {TASKNAME, *(name for builder in builders for name in builder.template.fields)}
    is_shared = len(builders) > 1
    # If only one task reads the file and its template has a field named `taskname`, the key is an
    # ordinary field and the rules above do not apply.
    taskname_is_field = TASKNAME in builders[0].template.fields
    by_name = {builder.name: builder for builder in builders}
    first_name: str | None = None
    for record in read_records(path, field_names, progress):
        record_builder = builders[0]
        if is_shared or (not taskname_is_field and TASKNAME in record.values):
            location = f"{path} {record.location}"
            reason = "several tasks share this file, so each record must name its task"
            name = _text_fields(record, (TASKNAME,), location, reason)[TASKNAME]
            first_name = name if first_name is None else first_name
            if has_several_tasks and name not in by_name:
                raise ConfigError(
                    f"{location}: no task that reads this file is named {short_repr(name)}; "
                    f"{suggest_nearest(name[:NAMES_CHARACTERS_MAX], by_name)}"
                )
            if not has_several_tasks and name != first_name:
                raise ConfigError(
                    f"{location}: the taskname is {short_repr(name)}, but it is "
                    f"{short_repr(first_name)} in earlier records; list several tasks by name "
                    "under `tasks`, or use the same taskname in all records"
                )
            if has_several_tasks:
                record_builder = by_name[name]
        record_builder.add_record(path, record)
    return [builder.pop_examples(path) for builder in builders]


def _text_fields(
    record: Record, names: Sequence[str], location: str, reason: str
) -> dict[str, str]:
    """Return the required fields of a record; each value must be a text.

    `reason` says in error messages why the fields are required.
    """
    texts = {}
    for name in names:
        if name not in record.values:
            field_names = ", ".join(sorted(record.values))[:NAMES_CHARACTERS_MAX] or "none"
            raise ConfigError(
                f"{location}: the record has no field {name!r}, but {reason}; the fields of the "
                f"record are: {field_names}"
            )
        value = record.values[name]
        if not isinstance(value, str):
            raise ConfigError(f"{location}: {name!r} is {short_repr(value)}; it must be a text")
        texts[name] = value
    return texts
