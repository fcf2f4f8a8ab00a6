"""Facts of a run as plain values: metrics per step, validations, sample answers, tasks.

The training loop produces the facts; the progress display, the logs and the report read them. None
of these readers needs a model, so a report can be regenerated from the facts alone. This module
does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# The rows of the report's comparison table, in this order. Each row has its own metrics.
NO_PROMPT = "no prompt"  # The template without its virtual tokens.
ORACLE = "oracle"  # The task's instruction text in place of the virtual tokens.
ADAPTER = "adapter"
FULL = "full fine-tuning"
BASELINES = (NO_PROMPT, ORACLE, ADAPTER, FULL)

State = Literal["running", "finished", "stopped early", "interrupted"]


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one training step."""

    step: int  # Number of the step, from 1.
    steps: int  # Total number of steps of the run, unless the run stops early.
    loss: float  # Mean loss over the tokens that have a loss.
    tokens: int  # Number of text and virtual tokens in the batch.
    text_tokens: int  # Number of text tokens in the batch.
    seconds: float  # Duration of this step.
    rate: float  # Learning rate of this step.
    gradient_norm: float  # Norm of all gradients before clipping.
    skipped: bool = False  # Whether the gradients overflowed, so that the optimizer made no step.


@dataclass(frozen=True)
class Sample:
    """A held-out record with its expected answer and the generated answers."""

    inputs: Mapping[str, str]
    expected: str
    before: str  # Answer generated without the adapter.
    after: str  # Answer generated with the adapter.
    cut: bool = False  # Whether the answer `after` ended because it reached max_new_tokens.


@dataclass(frozen=True)
class Validation:
    """Metrics on held-out records after a step (step 0: before training)."""

    step: int
    loss: float | None = None
    measures: Mapping[str, float] = field(default_factory=dict)  # Metrics from 0 to 1.
    # The loss and the metrics of each task, keyed by its name.
    by_task: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskFacts:
    """One adapter: its records, its file and its metrics."""

    name: str
    task: str = ""  # Purpose of the adapter in a few words.
    path: str = ""  # Path of the adapter file; empty: not written yet.
    card: Mapping[str, Any] = field(default_factory=dict)
    fields: Sequence[str] = ()  # Template fields that a request must give.
    data: str = ""  # File of the training records.
    validation: str = ""  # File of the held-out records; empty: none.
    examples: int = 0  # Number of training examples.
    validation_examples: int = 0  # Number of held-out examples that are evaluated.
    overlapping_examples: int = 0  # Number of held-out examples that are also training examples.
    truncated: int = 0  # Number of truncated training examples.
    dropped: Sequence[str] = ()  # The reason for each dropped record.
    lengths: Sequence[int] = ()  # Length of each training example in tokens.
    answers_cut: int = 0  # Number of evaluated answers that reached max_new_tokens.
    # Metrics keyed by the row of the comparison table (BASELINES).
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    samples: Sequence[Sample] = ()


@dataclass(frozen=True)
class RunFacts:
    """All facts of a run, which may still be in progress."""

    name: str
    tasks: Sequence[TaskFacts]
    state: State = "running"
    model: Mapping[str, Any] = field(default_factory=dict)  # Model sizes for the report.
    config: Mapping[str, Any] = field(default_factory=dict)  # The settings, keyed by name.
    progress: Sequence[StepMetrics] = ()
    validations: Sequence[Validation] = ()
    best_step: int | None = None  # Step after which the adapter was best; None: the last step.
    notes: Sequence[str] = ()
