"""Run observer: passes a run's events to the terminal, the logs and the HTML report.

Rank 0 has a `RunObserver`; the other ranks have a `NullObserver`. Both implement `RunCallback` of
ptuning/run/training_loop.py. A log file that cannot be written is reported once and does not end
the run.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from gpt.config import GPTConfig
from ptuning.data.dataset import TaskData
from ptuning.reporting.html_report import render_report
from ptuning.reporting.progress_bar import (
    ActivityDisplay,
    ProgressDisplay,
    open_display,
    write_line,
)
from ptuning.reporting.run_logs import RunLogs, read_logs
from ptuning.run.artifacts import RunOutcome
from ptuning.run.preparation import PreparedRun
from ptuning.run.validation import TaskValidation, Validator
from ptuning.run_facts import RunFacts, State, StepMetrics, TaskFacts, Validation


class NullObserver:
    """Observer of all ranks except rank 0; it ignores all events."""

    def on_start(self, folder: Path, step: int, resumed: bool) -> None: ...

    def on_step(self, metrics: StepMetrics) -> None: ...

    def on_validation(
        self, validation: Validation, validator: Validator, best_step: int | None
    ) -> None: ...

    def on_status(self, message: str) -> None: ...

    def on_activity(self, activity: str, completed: int, total: int) -> None: ...

    def on_warning(self, message: str) -> None: ...

    def on_end(self, outcome: RunOutcome, validator: Validator) -> None: ...


class RunObserver:
    """Observer of rank 0, with progress display, logs and report. The caller must call close().

    After `on_end`, the attribute `facts` has all facts of the run.
    """

    def __init__(self, prepared: PreparedRun, stream: TextIO) -> None:
        self._prepared = prepared
        self._stream = stream
        self._exit_stack = ExitStack()
        self._activities = ActivityDisplay(stream)
        self._display: ProgressDisplay | None = None
        self._logs: RunLogs | None = None
        self._tasks = [_task_facts(task) for task in prepared.tasks]
        self._progress: list[StepMetrics] = []
        self._validations: list[Validation] = []
        self._notes: list[str] = []

    def on_start(self, folder: Path, step: int, resumed: bool) -> None:
        config = self._prepared.config
        steps = config.training_config.steps
        if resumed:
            self._print_line(f"resuming from step {step} of {steps}, in {folder}")
            logged = read_logs(folder, steps, last_step=step)
            self._progress = logged.progress
            self._validations = logged.validations
        for task in self._prepared.tasks:
            self._print_dropped(task)
        logs = RunLogs(
            folder,
            start_step=step,
            tensorboard=config.output_config.tensorboard,
            warn=self.on_warning,
        )
        self._logs = self._exit_stack.enter_context(logs)
        self._display = self._exit_stack.enter_context(
            open_display(
                steps, self._stream, measure=config.validation_config.monitor, start_step=step
            )
        )
        self._activities = self._display.activities

    def on_step(self, metrics: StepMetrics) -> None:
        assert self._logs is not None and self._display is not None
        self._progress.append(metrics)
        self._logs.log_step(metrics)
        self._display.on_step(metrics)

    def on_validation(
        self, validation: Validation, validator: Validator, best_step: int | None
    ) -> None:
        assert self._logs is not None and self._display is not None
        earlier = [other for other in self._validations if other.step != validation.step]
        repeated = [other for other in self._validations if other.step == validation.step]
        self._validations = [*earlier, _merge([*repeated, validation])]
        self._logs.log_validation(validation)
        self._display.on_validation(validation)
        self._write_report(self._run_facts("running", validator, best_step, None))

    def on_status(self, message: str) -> None:
        """Print what the run does now."""
        self._print_line(message)

    def on_activity(self, activity: str, completed: int, total: int) -> None:
        """Show the progress of an activity other than training steps."""
        self._activities.show(activity, completed, total)

    def on_warning(self, message: str) -> None:
        self._notes.append(message)
        self._print_line(f"warning: {message}")

    def on_end(self, outcome: RunOutcome, validator: Validator) -> None:
        state: Any = outcome.state
        self.facts = self._run_facts(state, validator, outcome.best_step, outcome)
        self._write_report(self.facts)

    def close(self) -> None:
        self._activities.close()
        self._exit_stack.close()
        self._display = None

    def _run_facts(
        self,
        state: State,
        validator: Validator,
        best_step: int | None,
        outcome: RunOutcome | None,
    ) -> RunFacts:
        prepared = self._prepared
        return RunFacts(
            name=prepared.cards[0].name,
            tasks=[
                _with_results(facts, validator.tasks.get(data.task.name), task_index, outcome)
                for task_index, (facts, data) in enumerate(
                    zip(self._tasks, prepared.tasks, strict=True)
                )
            ],
            state=state,
            model=_model_facts(prepared.checkpoint.config),
            config=prepared.config.to_record(),
            progress=tuple(self._progress),
            validations=tuple(self._validations),
            best_step=best_step,
            notes=tuple(self._notes),
        )

    def _write_report(self, facts: RunFacts) -> None:
        assert self._logs is not None
        self._logs.write_report(render_report(facts))

    def _print_dropped(self, task: TaskData) -> None:
        for line in dropped_lines(task.examples.dropped):
            self._print_line(line)

    def _print_line(self, line: str) -> None:
        if self._display is not None:
            self._display.print_line(line)
        else:
            write_line(self._stream, line)


REASONS_SHOWN = 3  # Number of printed reasons for dropped records per task.


def _merge(validations: Sequence[Validation]) -> Validation:
    """Return the results of validations of one step; those of later ones replace earlier ones."""
    merged = validations[0]
    for validation in validations[1:]:
        by_task = {name: dict(results) for name, results in merged.by_task.items()}
        for name, results in validation.by_task.items():
            by_task[name] = {**by_task.get(name, {}), **results}
        merged = Validation(
            validation.step,
            merged.loss if validation.loss is None else validation.loss,
            {**merged.measures, **validation.measures},
            by_task,
        )
    return merged


def dropped_lines(dropped: Sequence[str]) -> list[str]:
    """Return lines with the first REASONS_SHOWN drop reasons, and the number of further reasons."""
    lines = [f"dropped: {reason}" for reason in dropped[:REASONS_SHOWN]]
    remaining = len(dropped) - REASONS_SHOWN
    return [*lines, f"dropped: {remaining} more"] if remaining > 0 else lines


def _task_facts(data: TaskData) -> TaskFacts:
    """Return the facts of a task that do not change during a run."""
    examples = data.examples
    validation_examples = data.validation.examples if data.validation is not None else []
    training_hashes = (
        {hash(tuple(example.ids)) for example in examples.examples}
        if validation_examples
        else set()
    )
    return TaskFacts(
        fields=[field for field in data.template.fields if field != data.template.answer_field],
        name=data.task.name or "model",
        task=data.task.task,
        data=data.task.data or "",
        validation=data.task.validation or "",
        examples=len(examples.examples),
        overlapping_examples=sum(
            hash(tuple(example.ids)) in training_hashes for example in validation_examples
        ),
        truncated=examples.truncated,
        dropped=examples.dropped,
        lengths=[len(example.ids) for example in examples.examples],
    )


def _with_results(
    facts: TaskFacts,
    task_validation: TaskValidation | None,
    task_index: int,
    outcome: RunOutcome | None,
) -> TaskFacts:
    """Add the files of the outcome, and the metrics and answers of the validation, to a task."""
    if outcome and outcome.paths:
        facts = replace(facts, path=str(outcome.paths[task_index]))
    if outcome:
        facts = replace(facts, best_step=outcome.task_best_steps.get(facts.name))
    if outcome and outcome.cards:
        facts = replace(facts, card=outcome.cards[task_index].to_dict())
    if task_validation is None:
        return facts
    return replace(
        facts,
        validation_examples=len(task_validation.examples.examples),
        validation_records=task_validation.records,
        answers_cut=task_validation.answers_cut,
        answer_tokens_max=task_validation.answer_tokens_max,
        metrics_by_variant=task_validation.metrics_by_variant,
        samples=task_validation.samples(),
    )


def _model_facts(model_config: GPTConfig) -> dict[str, object]:
    return {
        "layers": model_config.num_layers,
        "hidden size": model_config.hidden_size,
        "heads": model_config.num_attention_heads,
        "context": model_config.max_position_embeddings,
        "vocabulary": model_config.vocab_size,
    }
