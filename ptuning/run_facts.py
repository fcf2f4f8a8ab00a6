"""What a run tells of itself: its steps, its validations, its answers, and all of it together.

Plain values that the loop makes and that the bar, the logs, and the report take, so that none of
these knows a model, and a report can be made again from numbers alone. Knows no torch and no files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# The rows of the table that a report compares, in its order. Each has measures of its own.
NO_PROMPT = "no prompt"  # The template without its virtual tokens.
ORACLE = "oracle"  # A written instruction in their place.
ADAPTER = "adapter"
FULL = "full fine-tuning"
BASELINES = (NO_PROMPT, ORACLE, ADAPTER, FULL)

State = Literal["running", "finished", "stopped early", "interrupted"]


@dataclass(frozen=True)
class Progress:
    """One step that was made."""

    step: int  # From 1.
    steps: int  # That the run will make, if nothing ends it early.
    loss: float  # Of the answers' tokens, the mean.
    tokens: int  # Text and virtual tokens that went through the model.
    text_tokens: int  # Of them, those that are text.
    seconds: float  # That this step took.
    rate: float  # The learning rate that it used.
    gradient_norm: float  # Before clipping.
    skipped: bool = False  # Its gradients overflowed, so nothing was learned.


@dataclass(frozen=True)
class Sample:
    """A held-out record, its right answer, and what the model wrote."""

    inputs: Mapping[str, str]
    expected: str
    before: str  # Without the adapter.
    after: str
    cut: bool = False  # What it wrote after was ended by max_new_tokens.


@dataclass(frozen=True)
class Validation:
    """What was measured on held-out records after a step; 0: before the first."""

    step: int
    loss: float | None = None
    measures: Mapping[str, float] = field(default_factory=dict)  # Shares, from 0 to 1.
    by_task: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskFacts:
    """One adapter: what it was learned from, and what it is worth."""

    name: str
    task: str = ""  # What it is for, in a few words.
    path: str = ""  # Of the adapter's file; empty: it is not written yet.
    card: Mapping[str, Any] = field(default_factory=dict)
    fields: Sequence[str] = ()  # Of its template, those that a request gives.
    data: str = ""  # Where its records are from.
    validation: str = ""  # Where the held-out ones are from; empty: there are none.
    examples: int = 0  # That it learns from.
    validation_examples: int = 0  # That are measured.
    shared: int = 0  # Of the held-out records, those that are also learned from.
    truncated: int = 0
    dropped: Sequence[str] = ()  # A reason for each record that was left out.
    lengths: Sequence[int] = ()  # In tokens, of the examples.
    answers_cut: int = 0  # Of the measured answers, those that max_new_tokens ended.
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # See BASELINES.
    samples: Sequence[Sample] = ()


@dataclass(frozen=True)
class RunFacts:
    """A run so far, or all of it."""

    name: str
    tasks: Sequence[TaskFacts]
    state: State = "running"
    model: Mapping[str, Any] = field(default_factory=dict)  # What a person would ask of it.
    config: Mapping[str, Any] = field(default_factory=dict)  # The settings, by their names.
    progress: Sequence[Progress] = ()
    validations: Sequence[Validation] = ()
    best_step: int | None = None  # Whose state the adapter is; None: the last one.
    notes: Sequence[str] = ()
