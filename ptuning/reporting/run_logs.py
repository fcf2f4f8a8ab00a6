"""Logs: what a run writes beside its states: two tables, TensorBoard's events, and its report.

A file is at every moment the beginning of what was told, so what a full disk does not take now is
tried again with the next row, and a run never ends for its logs. A run that goes on cuts off first
what the steps to come will tell again. Knows what a row holds, not what a run is.
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

from ptuning.reporting import tensorboard_events
from ptuning.run_facts import Progress, Validation

METRICS = "metrics.csv"
VALIDATIONS = "validations.csv"
REPORT = "report.html"
EVENTS = "tensorboard"  # A folder: `tensorboard --logdir` takes it, or the run's own.

METRIC_COLUMNS = (
    *("step", "loss", "rate", "gradient_norm", "tokens", "text_tokens", "seconds", "skipped"),
)
# One measure a row: which ones there are depends on the task, and a table takes them all.
VALIDATION_COLUMNS = ("step", "task", "measure", "value")
ALL_TASKS = ""  # The task of a measure over all of them.

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Earlier:
    """What stands in a run's logs."""

    progress: list[Progress]
    validations: list[Validation]


class Logs:
    """The logs of a run in `folder`, which exists. `after`: the step that it goes on from."""

    def __init__(
        self,
        folder: Path,
        *,
        after: int = 0,
        tensorboard: bool = False,
        warn: Callable[[str], None] = logger.warning,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._warn: Callable[[str], None] | None = warn
        self._clock = clock
        self._metrics = self._table(folder / METRICS, METRIC_COLUMNS, after)
        self._validations = self._table(folder / VALIDATIONS, VALIDATION_COLUMNS, after)
        self._events: _File | None = None
        if tensorboard:
            self._events = _File(lambda: _new_events(folder / EVENTS, clock()))
            self._add(self._events, tensorboard_events.opening(clock()))
            if after:
                self._add(self._events, tensorboard_events.resumed(clock(), after + 1))

    def step(self, made: Progress) -> None:
        row = [_cell(getattr(made, name)) for name in METRIC_COLUMNS]
        self._add(self._metrics, _line(row))
        speed = made.text_tokens / made.seconds if made.seconds > 0 else 0.0
        told = {
            "train/loss": made.loss,
            "train/learning_rate": made.rate,
            "train/gradient_norm": made.gradient_norm,
            "train/text_tokens_per_second": speed,
        }
        self._scalars(made.step, told)

    def validated(self, made: Validation) -> None:
        measured = {ALL_TASKS: dict(made.measures), **made.by_task}
        if made.loss is not None:
            measured[ALL_TASKS] = {"loss": made.loss, **made.measures}
        rows = [
            (str(made.step), task, measure, repr(float(value)))
            for task, values in measured.items()
            for measure, value in values.items()
        ]
        self._add(self._validations, b"".join(map(_line, rows)))
        told = {
            "/".join(filter(None, ("validation", task, measure))): value
            for task, values in measured.items()
            for measure, value in values.items()
        }
        self._scalars(made.step, told)

    def report(self, page: str) -> None:
        """In place of the last one, whole: a browser may be reading it."""
        try:
            _replace(self._folder / REPORT, page.encode(errors="replace"))
        except OSError as error:
            self._told(error)

    def close(self) -> None:
        for file in (self._metrics, self._validations, self._events):
            if file is not None:
                self._add(file, b"")
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scalars(self, step: int, told: dict[str, float]) -> None:
        if self._events is not None and told:
            self._add(self._events, tensorboard_events.scalars(self._clock(), step, told))

    def _table(self, path: Path, columns: Sequence[str], after: int) -> "_File":
        file = _File(lambda: _cut(path, columns, after))
        self._add(file, b"")
        return file

    def _add(self, file: "_File", more: bytes) -> None:
        try:
            file.add(more)
        except OSError as error:
            self._told(error)

    def _told(self, error: OSError) -> None:
        """One warning for all files and all steps: a full disk is one thing to hear of."""
        if self._warn is not None:
            said = f"cannot write {error.filename or 'a log'}: {error.strerror or error}"
            self._warn(f"{said}; the run goes on, and tries again at every step")
        self._warn = None


class _File:
    """One that grows. What could not be written waits, in its order; nothing is written twice."""

    def __init__(self, start: "Callable[[], tuple[Path, int]]") -> None:
        self._start = start  # Makes the file, and says where it ends.
        self._path = Path()
        self._file: int | None = None
        self._end = 0
        self._waiting = b""

    def add(self, more: bytes) -> None:
        self._waiting += more
        if self._file is None:
            self._path, self._end = self._start()
            self._file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            while self._waiting:
                # At a place, not at the end: half a row is written over by the whole one.
                size = os.pwrite(self._file, self._waiting, self._end)
                self._end += size
                self._waiting = self._waiting[size:]
        except OSError as error:
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_logs(folder: Path, steps: int, *, after: int | None = None) -> Earlier:
    """What a run told up to step `after`, for the report of the one that goes on from there."""
    progress, validations = list[Progress](), dict[int, dict[str, dict[str, float]]]()
    for row in _rows(folder / METRICS, METRIC_COLUMNS, after):
        with suppress(ValueError):  # A file that somebody has changed tells what it still can.
            progress.append(
                Progress(
                    step=int(row[0]),
                    steps=steps,
                    loss=float(row[1]),
                    rate=float(row[2]),
                    gradient_norm=float(row[3]),
                    tokens=int(row[4]),
                    text_tokens=int(row[5]),
                    seconds=float(row[6]),
                    skipped=bool(int(row[7])),
                )
            )
    for step, task, measure, value in _rows(folder / VALIDATIONS, VALIDATION_COLUMNS, after):
        with suppress(ValueError):
            by_task = validations.setdefault(int(step), {})
            by_task.setdefault(task, {})[measure] = float(value)
    return Earlier(progress, [_validation(*one) for one in validations.items()])


def _validation(step: int, by_task: dict[str, dict[str, float]]) -> Validation:
    measures = by_task.pop(ALL_TASKS, {})
    return Validation(step, measures.pop("loss", None), measures, by_task)


def _rows(path: Path, columns: Sequence[str], after: int | None) -> Iterator[list[str]]:
    """Whole rows, in order, up to a step. The last one may be half of one."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return
    whole = text[: text.rfind(b"\n") + 1].decode(errors="replace")
    lines = csv.reader(io.StringIO(whole.replace("\0", ""), newline=""))
    if next(lines, None) != list(columns):
        return  # Another program's, or an older one's; its numbers would be misread.
    for row in lines:
        if len(row) != len(columns) or not row[0].isdecimal():
            continue
        if after is None or int(row[0]) <= after:
            yield row


def _cut(path: Path, columns: Sequence[str], after: int) -> tuple[Path, int]:
    """The table with the rows up to a step, put in place whole; a new run keeps none."""
    kept = list(_rows(path, columns, after)) if after else []
    text = b"".join(map(_line, [columns, *kept]))
    _replace(path, text)
    return path, len(text)


def _replace(path: Path, text: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        error.filename = str(path)
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _new_events(folder: Path, time_s: float) -> tuple[Path, int]:
    folder.mkdir(exist_ok=True)
    for number in count():
        path = folder / f"events.out.tfevents.{time_s:.0f}.{number}"
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path, 0
    raise AssertionError("there is always a next number")


def _cell(value: float | bool) -> str:
    return repr(int(value) if isinstance(value, bool) else value)


def _line(cells: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode(errors="replace")
