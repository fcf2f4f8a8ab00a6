"""Run logs: CSV tables of steps and validations, TensorBoard events, and report.html.

During a run, the tables and events are append-only. If a row cannot be written, for example because
the disk is full, it is kept in memory and written before the next row, and the run continues. A
resumed run first removes the rows of the steps that it will repeat. This module does not interpret
the metrics.
"""

import csv
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

from gpt.files.atomic_files import write_atomic
from ptuning.reporting import tensorboard_events
from ptuning.run_facts import GroupMetrics, StepMetrics, Validation

METRICS_FILE = "metrics.csv"
VALIDATIONS_FILE = "validations.csv"
REPORT_FILE = "report.html"
EVENTS_FOLDER = "tensorboard"  # The argument of `tensorboard --logdir`.

METRIC_COLUMNS = (
    "step",
    "loss",
    "rate",
    "gradient_norm",
    "tokens",
    "text_tokens",
    "seconds",
    "skipped",
)
# One row per step and task that is trained independently of others; the file is written only if a
# run has several such tasks.
TASK_METRICS_FILE = "task_metrics.csv"
TASK_METRIC_COLUMNS = ("step", "task", "loss", "rate", "gradient_norm", "skipped")
# One row per validation, task and measure: the columns do not depend on which measures exist.
VALIDATION_COLUMNS = ("step", "task", "measure", "value")
ALL_TASKS = ""  # Value of the column `task` for a measure over all tasks.

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoggedRun:
    """The content of a run's logs."""

    progress: list[StepMetrics]
    validations: list[Validation]


class RunLogs:
    """Writes the logs of a run to an existing folder.

    `start_step` is the last step of the state from which the run resumes; 0: a new run. `warn` is
    called with the first write error.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start_step: int = 0,
        tensorboard: bool = False,
        warn: Callable[[str], None] = logger.warning,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._warn: Callable[[str], None] | None = warn
        self._clock = clock
        self._metrics = self._open_table(folder / METRICS_FILE, METRIC_COLUMNS, start_step)
        self._start_step = start_step
        self._task_metrics: _AppendFile | None = None  # Opened with the first row.
        self._validations = self._open_table(
            folder / VALIDATIONS_FILE, VALIDATION_COLUMNS, start_step
        )
        self._events: _AppendFile | None = None
        if tensorboard:
            self._events = _AppendFile(lambda: _create_events_file(folder / EVENTS_FOLDER, clock()))
            self._append(self._events, tensorboard_events.version_event(clock()))
            if start_step:
                self._append(
                    self._events, tensorboard_events.session_start_event(clock(), start_step + 1)
                )

    def log_step(self, metrics: StepMetrics) -> None:
        row = [_format_cell(getattr(metrics, name)) for name in METRIC_COLUMNS]
        self._append(self._metrics, _csv_line(row))
        tokens_per_s = metrics.text_tokens / metrics.seconds if metrics.seconds > 0 else 0.0
        scalars = {
            "train/loss": metrics.loss,
            "train/learning_rate": metrics.rate,
            "train/gradient_norm": metrics.gradient_norm,
            "train/text_tokens_per_second": tokens_per_s,
        }
        if metrics.by_task:
            self._log_task_metrics(metrics)
            scalars |= {f"train/{task}/loss": own.loss for task, own in metrics.by_task.items()}
        self._append_scalars(metrics.step, scalars)

    def _log_task_metrics(self, metrics: StepMetrics) -> None:
        if self._task_metrics is None:
            path = self._folder / TASK_METRICS_FILE
            self._task_metrics = self._open_table(path, TASK_METRIC_COLUMNS, self._start_step)
        rows = [
            (
                str(metrics.step),
                task,
                *(_format_cell(getattr(own, name)) for name in TASK_METRIC_COLUMNS[2:]),
            )
            for task, own in metrics.by_task.items()
        ]
        self._append(self._task_metrics, b"".join(map(_csv_line, rows)))

    def log_validation(self, validation: Validation) -> None:
        measures_by_task = {ALL_TASKS: dict(validation.measures), **validation.by_task}
        if validation.loss is not None:
            measures_by_task[ALL_TASKS] = {"loss": validation.loss, **validation.measures}
        rows = [
            (str(validation.step), task, measure, repr(float(value)))
            for task, values in measures_by_task.items()
            for measure, value in values.items()
        ]
        self._append(self._validations, b"".join(map(_csv_line, rows)))
        scalars = {
            "/".join(filter(None, ("validation", task, measure))): value
            for task, values in measures_by_task.items()
            for measure, value in values.items()
        }
        self._append_scalars(validation.step, scalars)

    def write_report(self, page: str) -> None:
        """Replace the report atomically, because a browser may read it at any time."""
        try:
            _write_atomic(self._folder / REPORT_FILE, page.encode(errors="replace"))
        except OSError as error:
            self._warn_once(error)

    def close(self) -> None:
        for file in (self._metrics, self._task_metrics, self._validations, self._events):
            if file is not None:
                self._append(file, b"")
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append_scalars(self, step: int, scalars: dict[str, float]) -> None:
        if self._events is not None and scalars:
            self._append(
                self._events, tensorboard_events.scalars_event(self._clock(), step, scalars)
            )

    def _open_table(self, path: Path, columns: Sequence[str], start_step: int) -> "_AppendFile":
        file = _AppendFile(lambda: _truncate_table(path, columns, start_step))
        self._append(file, b"")
        return file

    def _append(self, file: "_AppendFile", content: bytes) -> None:
        try:
            file.append(content)
        except OSError as error:
            self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        """Report only the first error, because a full disk affects all files and steps."""
        if self._warn is not None:
            problem = f"cannot write {error.filename or 'a log'}: {error.strerror or error}"
            self._warn(f"{problem}; the run continues and tries again at every step")
        self._warn = None


class _AppendFile:
    """An append-only file; content that could not be written is kept for the next append.

    `create` creates the file at the first append, and returns its path and size.
    """

    def __init__(self, create: "Callable[[], tuple[Path, int]]") -> None:
        self._create = create
        self._path = Path()
        self._descriptor: int | None = None
        self._offset = 0
        self._pending = b""

    def append(self, content: bytes) -> None:
        self._pending += content
        if self._descriptor is None:
            self._path, self._offset = self._create()
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            while self._pending:
                # Write at an offset, so that a retry overwrites what a failed write has left.
                written = os.pwrite(self._descriptor, self._pending, self._offset)
                self._offset += written
                self._pending = self._pending[written:]
        except OSError as error:
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_logs(folder: Path, steps: int, *, last_step: int | None = None) -> LoggedRun:
    """Return the logged steps and validations up to `last_step`; None: all of them.

    `steps` is the planned number of steps of the run.
    """
    progress, validations = list[StepMetrics](), dict[int, dict[str, dict[str, float]]]()
    task_metrics: dict[int, dict[str, GroupMetrics]] = {}
    for step, task, *cells in _read_rows(
        folder / TASK_METRICS_FILE, TASK_METRIC_COLUMNS, last_step
    ):
        with suppress(ValueError):
            loss, rate, norm, skipped = map(float, cells)
            own_metrics = GroupMetrics(loss, rate, norm, bool(skipped))
            task_metrics.setdefault(int(step), {})[task] = own_metrics
    for row in _read_rows(folder / METRICS_FILE, METRIC_COLUMNS, last_step):
        with suppress(ValueError):  # Skip a row with an invalid number.
            progress.append(
                StepMetrics(
                    step=int(row[0]),
                    steps=steps,
                    loss=float(row[1]),
                    rate=float(row[2]),
                    gradient_norm=float(row[3]),
                    tokens=int(row[4]),
                    text_tokens=int(row[5]),
                    seconds=float(row[6]),
                    skipped=bool(int(row[7])),
                    by_task=task_metrics.get(int(row[0]), {}),
                )
            )
    for step, task, measure, value in _read_rows(
        folder / VALIDATIONS_FILE, VALIDATION_COLUMNS, last_step
    ):
        with suppress(ValueError):
            by_task = validations.setdefault(int(step), {})
            by_task.setdefault(task, {})[measure] = float(value)
    return LoggedRun(
        progress, [_validation(*step_measures) for step_measures in validations.items()]
    )


def _validation(step: int, by_task: dict[str, dict[str, float]]) -> Validation:
    """Return a validation from its measures, keyed by task; ALL_TASKS has the overall measures."""
    measures = by_task.pop(ALL_TASKS, {})
    return Validation(step, measures.pop("loss", None), measures, by_task)


def _read_rows(path: Path, columns: Sequence[str], last_step: int | None) -> Iterator[list[str]]:
    """Yield the rows of a table up to `last_step` (None: all), without an incomplete last line."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return
    complete_text = text[: text.rfind(b"\n") + 1].decode(errors="replace")
    lines = csv.reader(io.StringIO(complete_text.replace("\0", ""), newline=""))
    if next(lines, None) != list(columns):
        return  # Another program or version wrote this file, so the columns are unknown.
    for row in lines:
        if len(row) != len(columns) or not row[0].isdecimal():
            continue
        if last_step is None or int(row[0]) <= last_step:
            yield row


def _truncate_table(path: Path, columns: Sequence[str], last_step: int) -> tuple[Path, int]:
    """Rewrite a table with its rows up to `last_step` (0: none); return its path and size."""
    rows = list(_read_rows(path, columns, last_step)) if last_step else []
    content = b"".join(map(_csv_line, [columns, *rows]))
    _write_atomic(path, content)
    return path, len(content)


def _write_atomic(path: Path, content: bytes) -> None:
    try:
        write_atomic(path, content, partial_path=path.with_name(f"{path.name}.part"))
    except OSError as error:
        error.filename = str(path)
        raise


def _create_events_file(folder: Path, time_s: float) -> tuple[Path, int]:
    """Create a new events file; return its path and its size, 0."""
    folder.mkdir(exist_ok=True)
    for number in count():
        path = folder / f"events.out.tfevents.{time_s:.0f}.{number}"
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path, 0
    raise AssertionError("there is always a next number")


def _format_cell(value: float | bool) -> str:
    return repr(int(value) if isinstance(value, bool) else value)


def _csv_line(cells: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode(errors="replace")
