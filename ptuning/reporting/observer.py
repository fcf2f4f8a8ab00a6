"""Who is told of a run: people at the terminal, its logs, and its report.

Rank 0's is an `Audience`; the other ranks have nobody. What cannot be written is told once, and
never ends a run. Knows no model.
"""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from gpt.config import GPTConfig
from ptuning.data.dataset import TaskData
from ptuning.reporting.html_report import page
from ptuning.reporting.progress_bar import Telling, telling
from ptuning.reporting.run_logs import Logs, read_logs
from ptuning.run.artifacts import Outcome
from ptuning.run.preparation import Prepared
from ptuning.run.validation import Measured, Measuring
from ptuning.run_facts import Progress, RunFacts, State, TaskFacts, Validation


class Nobody:
    """The audience of every rank but the first."""

    def began(self, folder: Path, step: int, resumed: bool) -> None: ...

    def step(self, made: Progress) -> None: ...

    def validated(self, made: Validation, measuring: Measuring, best_step: int | None) -> None: ...

    def doing(self, words: str) -> None: ...

    def warn(self, words: str) -> None: ...

    def ended(self, outcome: Outcome, measuring: Measuring) -> None: ...


class Audience:
    """A terminal and the files of a run. To be closed."""

    def __init__(self, prepared: Prepared, stream: TextIO) -> None:
        self._prepared, self._stream = prepared, stream
        self._opened = ExitStack()
        self._telling: Telling | None = None
        self._logs: Logs | None = None
        self._tasks = [_task_facts(task) for task in prepared.tasks]
        self._progress: list[Progress] = []
        self._validations: list[Validation] = []
        self._notes: list[str] = []

    def began(self, folder: Path, step: int, resumed: bool) -> None:
        config = self._prepared.config
        if resumed:
            self._say(f"going on from step {step} of {config.steps}, in {folder}")
            earlier = read_logs(folder, config.steps, after=step)
            self._progress, self._validations = earlier.progress, earlier.validations
        for task in self._prepared.tasks:
            self._say_dropped(task)
        logs = Logs(folder, after=step, tensorboard=config.tensorboard, warn=self.warn)
        self._logs = self._opened.enter_context(logs)
        self._telling = self._opened.enter_context(
            telling(config.steps, self._stream, measure=config.measure, after=step)
        )

    def step(self, made: Progress) -> None:
        assert self._logs is not None and self._telling is not None
        self._progress.append(made)
        self._logs.step(made)
        self._telling.step(made)

    def validated(self, made: Validation, measuring: Measuring, best_step: int | None) -> None:
        assert self._logs is not None and self._telling is not None
        self._validations = [one for one in self._validations if one.step != made.step] + [made]
        self._logs.validated(made)
        self._telling.validated(made)
        self._report(self._facts("running", measuring, best_step, None))

    def doing(self, words: str) -> None:
        """What takes a while, and is no step."""
        self._say(words)

    def warn(self, words: str) -> None:
        self._notes.append(words)
        self._say(f"warning: {words}")

    def ended(self, outcome: Outcome, measuring: Measuring) -> None:
        state: Any = outcome.state
        self.facts = self._facts(state, measuring, outcome.best_step, outcome)
        self._report(self.facts)

    def close(self) -> None:
        self._opened.close()

    def _facts(
        self,
        state: State,
        measuring: Measuring,
        best_step: int | None,
        outcome: Outcome | None,
    ) -> RunFacts:
        prepared = self._prepared
        return RunFacts(
            name=prepared.cards[0].name,
            tasks=[
                _with_results(facts, measuring.tasks.get(data.task.name), number, outcome)
                for number, (facts, data) in enumerate(
                    zip(self._tasks, prepared.tasks, strict=True)
                )
            ],
            state=state,
            model=_model_facts(prepared.checkpoint.config),
            config=asdict(prepared.config),
            progress=tuple(self._progress),
            validations=tuple(self._validations),
            best_step=best_step,
            notes=tuple(self._notes),
        )

    def _report(self, facts: RunFacts) -> None:
        assert self._logs is not None
        self._logs.report(page(facts))

    def _say_dropped(self, task: TaskData) -> None:
        for line in dropped_lines(task.examples.dropped):
            self._say(line)

    def _say(self, line: str) -> None:
        with suppress(OSError):  # Nobody may be listening any more.
            self._stream.write(f"{line}\n")
            self._stream.flush()


SHOWN = 3  # Reasons that are printed.


def dropped_lines(dropped: Sequence[str]) -> list[str]:
    """The first reasons why records were left out, and how many more there are."""
    lines = [f"left out: {reason}" for reason in dropped[:SHOWN]]
    more = len(dropped) - SHOWN
    return [*lines, f"left out: {more} more"] if more > 0 else lines


def _task_facts(data: TaskData) -> TaskFacts:
    """What does not change in a run, counted once, as there may be many examples."""
    examples = data.examples
    held_out = data.validation.examples if data.validation is not None else []
    known = {hash(tuple(example.ids)) for example in examples.examples} if held_out else set()
    return TaskFacts(
        fields=[one for one in data.template.fields if one != data.template.answer_field],
        name=data.task.name or "model",
        task=data.task.task,
        data=data.task.data or "",
        validation=data.task.validation or "",
        examples=len(examples.examples),
        shared=sum(hash(tuple(example.ids)) in known for example in held_out),
        truncated=examples.truncated,
        dropped=examples.dropped,
        lengths=[len(example.ids) for example in examples.examples],
    )


def _with_results(
    facts: TaskFacts, measured: Measured | None, number: int, outcome: Outcome | None
) -> TaskFacts:
    if outcome and outcome.paths:
        facts = replace(facts, path=str(outcome.paths[number]))
    if outcome and outcome.cards:
        facts = replace(facts, card=outcome.cards[number].to_dict())
    if measured is None:
        return facts
    return replace(
        facts,
        validation_examples=len(measured.examples.examples),
        answers_cut=measured.cut,
        baselines=measured.baselines,
        samples=measured.samples(),
    )


def _model_facts(sizes: GPTConfig) -> dict[str, object]:
    return {
        "layers": sizes.num_layers,
        "hidden size": sizes.hidden_size,
        "heads": sizes.num_attention_heads,
        "context": sizes.max_position_embeddings,
        "vocabulary": sizes.vocab_size,
    }
