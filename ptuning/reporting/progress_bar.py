"""Progress display of a run: a progress bar on a terminal, otherwise about ten lines.

Both displays show the smoothed loss, the loss of the last step, text tokens per second, the
remaining time and the best validation so far. `ActivityDisplay` shows the progress and the
remaining time of other activities, such as loading and measuring. If a line cannot be printed, the
run continues. The displays read step metrics, validations and counts only.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Task, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from ptuning.reporting.verdict import best_measured, format_measure, is_share, label
from ptuning.run_facts import StepMetrics, Validation

LOG_LINES = 10  # Number of step lines per run if stderr is not a terminal.
RECENT_STEPS = 50  # Number of recent steps from which speed and remaining time are computed.
SMOOTHING = 0.9  # Decay of the exponential moving average of the loss.
# Seconds between two lines of an activity if stderr is not a terminal.
ACTIVITY_LINE_S = 10.0


def write_line(stream: IO[str], text: str) -> None:
    """Write a line to the terminal or to its redirection, at once; ignore a failure."""
    with suppress(OSError):  # stderr may have been closed, or be redirected to a full disk.
        stream.write(f"{text}\n")
        stream.flush()


class ActivityDisplay:
    """Shows one activity at a time: a bar on a terminal, else a line every ACTIVITY_LINE_S."""

    def __init__(
        self, stream: IO[str], bar: Bar | None = None, *, line_s: float = ACTIVITY_LINE_S
    ) -> None:
        """Activities are shown below `bar`, the bar of the run; if None, each has its own bar."""
        self._stream = stream
        self._line_s = line_s
        self._console = Console(file=stream) if bar is None else bar.console
        self._run_bar = bar
        self._own_bar: Bar | None = None
        self._task: TaskID | None = None
        self._activity = ""
        self._started_s = self._line_printed_s = 0.0

    def show(self, activity: str, completed: int, total: int) -> None:
        """Show the counts of an activity; equal counts end it."""
        if activity != self._activity:
            self._start(activity, total)
        now_s = time.monotonic()
        bar = self._run_bar or self._own_bar
        if bar is not None and self._task is not None:
            with suppress(OSError):
                bar.update(self._task, completed=completed, total=total)
        elif now_s - self._line_printed_s >= self._line_s and completed < total:
            self._line_printed_s = now_s
            time_left = format_time_left(now_s - self._started_s, completed, total)
            write_line(self._stream, f"{activity}: {completed:,} of {total:,}{time_left}")
        if completed >= total:
            self.close()

    def close(self) -> None:
        """Remove the bar of the current activity, if any."""
        with suppress(OSError):
            if self._run_bar is not None and self._task is not None:
                self._run_bar.remove_task(self._task)
            if self._own_bar is not None:
                self._own_bar.stop()
        self._activity, self._own_bar, self._task = "", None, None

    def _start(self, activity: str, total: int) -> None:
        self.close()
        self._activity = activity
        self._started_s = self._line_printed_s = time.monotonic()
        if not self._console.is_terminal:
            return
        with suppress(OSError):
            bar = self._run_bar
            if bar is None:
                bar = self._own_bar = Bar(
                    _ActivityColumn(),
                    BarColumn(bar_width=24),
                    MofNCompleteColumn(),
                    _TimeLeftColumn(),
                    console=self._console,
                    transient=True,
                )
                bar.start()
            self._task = bar.add_task(activity, total=total)


class _ActivityColumn(TextColumn):
    """Column with the name of a bar. It renders a Text object, so a name is not markup."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        return Text(task.description)


class _TimeLeftColumn(TextColumn):
    """Column with the remaining time of a bar, from its mean speed so far."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        elapsed_s, total = task.elapsed or 0.0, int(task.total or 0)
        return Text(format_time_left(elapsed_s, int(task.completed), total).removeprefix(", "))


def format_time_left(elapsed_s: float, completed: int, total: int) -> str:
    """Return ", REMAINING TIME left"; empty if nothing is complete yet."""
    if not 0 < completed <= total:
        return ""
    return f", {format_duration(elapsed_s / completed * (total - completed))} left"


class ProgressDisplay:
    """Base class of the displays; use `open_display`."""

    activities: ActivityDisplay

    def __init__(self, steps: int, measure: str, start_step: int) -> None:
        self.steps = steps
        self.current_step = start_step
        self._measure = measure
        self._start_step = start_step
        self._recent: deque[StepMetrics] = deque(maxlen=RECENT_STEPS)
        self._mean = self._weight = 0.0
        self._skipped = 0
        self._validations: list[Validation] = []

    def on_step(self, metrics: StepMetrics) -> None:
        self.current_step = metrics.step
        self._recent.append(metrics)
        self._skipped += metrics.skipped
        if math.isfinite(metrics.loss):
            # The moving average starts at 0. To correct this bias, the property `loss` divides the
            # average by `_weight`.
            self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * metrics.loss
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        self._show_step(metrics)

    def on_validation(self, validation: Validation) -> None:
        self._validations.append(validation)
        measures = dict(validation.measures)
        if validation.loss is not None:
            measures = {"loss": validation.loss, **measures}
        parts = [f"{label(name)} {format_measure(name, value)}" for name, value in measures.items()]
        if parts:  # A validation may have only results of single tasks.
            self.print_line(f"validation at step {validation.step}: {', '.join(parts).lower()}")

    @property
    def loss(self) -> str:
        """Text with the smoothed loss, the last loss and the number of skipped steps."""
        if not self._recent:
            return ""
        last = self._recent[-1].loss
        mean = self._mean / self._weight if self._weight else last
        skipped = f", {self._skipped} skipped" if self._skipped else ""
        return f"loss {mean:.4f} (last {last:.4f}{skipped})"

    @property
    def speed(self) -> str:
        seconds = sum(step.seconds for step in self._recent)
        tokens = sum(step.text_tokens for step in self._recent)
        return f"{tokens / seconds:,.0f} text tokens/s" if seconds > 0 else ""

    @property
    def time_left(self) -> str:
        if not self._recent:
            return ""
        mean_step_s = sum(step.seconds for step in self._recent) / len(self._recent)
        return f"{format_duration(mean_step_s * (self.steps - self.current_step))} left"

    @property
    def best(self) -> str:
        """Text with the best validation by the run's measure.

        If no validation has this measure, the validation loss decides.
        """
        for measure in (self._measure, "loss"):
            best_measurement = best_measured(self._validations, measure)
            if best_measurement is not None:
                name = label(measure).lower() if is_share(measure) else "held-out loss"
                return (
                    f"best {name} {format_measure(measure, best_measurement[0])} at step "
                    f"{best_measurement[1]}"
                )
        return ""

    def _show_step(self, metrics: StepMetrics) -> None:
        raise NotImplementedError

    def print_line(self, text: str) -> None:
        raise NotImplementedError


class _LineDisplay(ProgressDisplay):
    """Display that prints a line every (steps / LOG_LINES) steps."""

    def __init__(self, steps: int, measure: str, start_step: int, stream: TextIO) -> None:
        super().__init__(steps, measure, start_step)
        self.activities = ActivityDisplay(stream)
        self._stream = stream
        self._next_shown_step = start_step
        self.print_line(
            f"tuning, {steps} steps" + (f", from step {start_step + 1}" if start_step else "")
        )

    def _show_step(self, metrics: StepMetrics) -> None:
        if metrics.step < min(self._next_shown_step, self.steps):
            return
        self._next_shown_step = metrics.step + max(1, (self.steps - self._start_step) // LOG_LINES)
        time_left = self.time_left if metrics.step < self.steps else ""
        parts = (f"step {metrics.step}/{self.steps}", self.loss, self.speed, time_left, self.best)
        self.print_line("  ".join(filter(None, parts)))

    def print_line(self, text: str) -> None:
        write_line(self._stream, text)


class _BarDisplay(ProgressDisplay):
    """Display with a progress bar on a terminal."""

    def __init__(self, steps: int, measure: str, start_step: int, console: Console) -> None:
        super().__init__(steps, measure, start_step)
        self._console = console
        self.bar = Bar(
            _ActivityColumn(),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _StatusColumn(self),
            console=console,
        )
        self.run_task = self.bar.add_task("tuning", total=steps, completed=start_step)
        self.activities = ActivityDisplay(console.file, self.bar)

    def _show_step(self, metrics: StepMetrics) -> None:
        self.bar.update(self.run_task, completed=metrics.step)

    def print_line(self, text: str) -> None:
        with suppress(OSError):  # The terminal may have been closed.
            self._console.print(Text(text))


class _StatusColumn(_TimeLeftColumn):
    """Column beside the bar of the run: loss, speed, remaining time and best validation.

    Beside the bar of an activity it has the remaining time of the activity. The column renders a
    Text object, so rich does not interpret names as markup.
    """

    def __init__(self, display: _BarDisplay) -> None:
        super().__init__()
        self._display = display

    def render(self, task: Task) -> Text:
        display = self._display
        if task.id != display.run_task:
            return super().render(task)
        return Text(
            "  ".join(filter(None, (display.loss, display.speed, display.time_left, display.best)))
        )


@contextmanager
def open_display(
    steps: int, stream: TextIO, *, measure: str = "loss", start_step: int = 0
) -> Iterator[ProgressDisplay]:
    """Yield the display for a stream; `start_step` is the last step that is already finished."""
    console = Console(file=stream)
    if not console.is_terminal:
        yield _LineDisplay(steps, measure, start_step, stream)
        return
    display = _BarDisplay(steps, measure, start_step, console)
    display.bar.start()
    try:
        yield display
    finally:
        with suppress(OSError):
            display.bar.stop()


def format_duration(seconds: float) -> str:
    """Format a duration with at most two units."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
