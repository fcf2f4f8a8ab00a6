"""Facts of a run as plain values: metrics per step, validations, sample answers, tasks.

The trainer produces `StepMetrics` and the validator produces `Validation`; the observer of rank 0
collects them in `RunFacts`. The progress display, the logs, the report and `--json` read only these
facts and need no model. This module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

# Evaluated variants: the rows of the report's comparison table.
NO_PROMPT = "no prompt"  # The template without its virtual tokens.
ORACLE = "oracle"  # The task's instruction text in place of the virtual tokens.
ADAPTER = "adapter"  # The trained adapter; with method `full`, the trained model.
# All variants, in the order of the table.
VARIANTS = (NO_PROMPT, ORACLE, ADAPTER)

State = Literal["running", "finished", "stopped early", "interrupted"]


@dataclass(frozen=True)
class GroupMetrics:
    """Metrics of one training step for a task that is trained independently of the others."""

    loss: float  # As in StepMetrics, for the tokens and parameters of the task.
    rate: float
    gradient_norm: float
    skipped: bool = False


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one training step."""

    step: int  # Number of the step, from 1.
    steps: int  # Planned number of steps of the run.
    loss: float  # Mean loss over the tokens that the model is trained to predict.
    tokens: int  # Number of text and virtual tokens in the batch.
    text_tokens: int  # Number of text tokens in the batch.
    seconds: float  # Duration of this step.
    # Learning rate of this step, the largest one of the tasks; 0 if the step was skipped.
    rate: float
    gradient_norm: float  # Norm of all gradients before clipping.
    # Whether gradients overflowed, so that the parameters of a task were not updated.
    skipped: bool = False
    # The metrics of each task that was trained, keyed by name; empty: the run has one task, or its
    # tasks are trained together.
    by_task: Mapping[str, GroupMetrics] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """A held-out record with its expected answer and the generated answers."""

    inputs: Mapping[str, str]  # The template fields, without the answer.
    expected: str  # The answer in the record.
    before: str  # Answer generated without the adapter.
    after: str  # Answer generated with the adapter.
    cut: bool = False  # Whether the answer `after` ended because it reached the length limit.


@dataclass(frozen=True)
class Validation:
    """Metrics on held-out records after a step (step 0: before training)."""

    step: int
    loss: float | None = None
    # Answer metrics from 0 to 1, as means over the tasks; empty: no answers were generated.
    measures: Mapping[str, float] = field(default_factory=dict)
    # The loss and the answer metrics of each task, keyed by task name; empty: the run has one task.
    by_task: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskFacts:
    """One task: its adapter file, records and metrics."""

    name: str  # Name of the adapter.
    task: str = ""  # Purpose of the adapter in a few words.
    path: str = ""  # Path of the adapter file; empty: not written yet.
    card: Mapping[str, Any] = field(default_factory=dict)  # The adapter's card; empty: no adapter.
    fields: Sequence[str] = ()  # Template fields that a request must give.
    data: str = ""  # File of the training records.
    validation: str = ""  # File of the held-out records; empty: none.
    examples: int = 0  # Number of training examples.
    validation_examples: int = 0  # Number of held-out examples that are evaluated.
    validation_records: int = 0  # Number of held-out examples in the file.
    overlapping_examples: int = 0  # Number of held-out examples that are also training examples.
    truncated: int = 0  # Number of truncated training examples.
    dropped: Sequence[str] = ()  # The reason for each dropped record.
    lengths: Sequence[int] = ()  # Length of each training example in tokens.
    answers_cut: int = 0  # Number of evaluated answers that reached the length limit.
    answer_tokens_max: int = 0  # Length limit of the evaluated answers in tokens.
    # Answer metrics of each evaluated variant, keyed by the names in VARIANTS.
    metrics_by_variant: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    # Step of the written values, if the task is trained independently; None: the last step.
    best_step: int | None = None


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
    # Step after which the adapters were best; None: the last step, or not the same for all tasks.
    best_step: int | None = None
    notes: Sequence[str] = ()  # Warnings of the run, such as a state that could not be saved.

    @property
    def trains_separately(self) -> bool:
        """Whether the tasks are several and trained independently of each other."""
        return any(step.by_task for step in self.progress)

    def of_task(self, task: TaskFacts) -> "RunFacts":
        """Return the facts of a task that is trained independently, as if it were the only one.

        If the tasks are trained together, return all facts.
        """
        if not self.trains_separately:
            return self
        return replace(
            self,
            tasks=(task,),
            progress=tuple(
                replace(step, **vars(step.by_task[task.name]), by_task={})
                for step in self.progress
                if task.name in step.by_task
            ),
            validations=tuple(
                Validation(
                    validation.step,
                    validation.by_task[task.name].get("loss"),
                    {
                        name: value
                        for name, value in validation.by_task[task.name].items()
                        if name != "loss"
                    },
                )
                for validation in self.validations
                if task.name in validation.by_task
            ),
            best_step=task.best_step,
        )


def describe_selection(count: int, total: int, measure: str) -> str:
    """Return which of `total` validation records the setting `measure` selects, for a reader."""
    if count == total:
        return f"all {total:,}"
    subset = "the first" if measure == "first" else "a sample of"
    return f"{subset} {count:,} of {total:,}"
