"""Progress display of a run: a progress bar on a terminal, otherwise about ten lines.

Both displays show the smoothed loss, the loss of the last step, text tokens per second, the
remaining time and the best validation so far. If a line cannot be printed, the run continues. The
displays read step metrics and validations only.
"""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Task, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from ptuning.reporting.verdict import best_measured, format_measure, is_share, label
from ptuning.run_facts import StepMetrics, Validation

LOG_LINES = 10  # Number of step lines per run if stderr is not a terminal.
RECENT_STEPS = 50  # Number of recent steps from which speed and remaining time are computed.
SMOOTHING = 0.9  # Decay of the exponential moving average of the loss.


class ProgressDisplay:
    """Base class of the displays; use `open_display`."""

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
        self._print_line(f"validation at step {validation.step}: {', '.join(parts).lower()}")

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

    def _print_line(self, text: str) -> None:
        raise NotImplementedError


class _LineDisplay(ProgressDisplay):
    """Display that prints a line every (steps / LOG_LINES) steps."""

    def __init__(self, steps: int, measure: str, start_step: int, stream: TextIO) -> None:
        super().__init__(steps, measure, start_step)
        self._stream = stream
        self._next_shown_step = start_step
        self._print_line(
            f"tuning, {steps} steps" + (f", from step {start_step + 1}" if start_step else "")
        )

    def _show_step(self, metrics: StepMetrics) -> None:
        if metrics.step < min(self._next_shown_step, self.steps):
            return
        self._next_shown_step = metrics.step + max(1, (self.steps - self._start_step) // LOG_LINES)
        time_left = self.time_left if metrics.step < self.steps else ""
        parts = (f"step {metrics.step}/{self.steps}", self.loss, self.speed, time_left, self.best)
        self._print_line("  ".join(filter(None, parts)))

    def _print_line(self, text: str) -> None:
        with suppress(OSError):  # stderr may be redirected to a full disk.
            self._stream.write(f"{text}\n")
            self._stream.flush()


class _BarDisplay(ProgressDisplay):
    """Display with a progress bar on a terminal."""

    def __init__(self, steps: int, measure: str, start_step: int, console: Console) -> None:
        super().__init__(steps, measure, start_step)
        self._console = console
        self.bar = Bar(
            TextColumn("tuning"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _StatusColumn(self),
            console=console,
        )
        self._bar_id = self.bar.add_task("", total=steps, completed=start_step)

    def _show_step(self, metrics: StepMetrics) -> None:
        self.bar.update(self._bar_id, completed=metrics.step)

    def _print_line(self, text: str) -> None:
        with suppress(OSError):  # The terminal may have been closed.
            self._console.print(Text(text))


class _StatusColumn(TextColumn):
    """Column beside the progress bar: loss, speed, remaining time and best validation.

    The column renders a Text object, so rich does not interpret names as markup.
    """

    def __init__(self, display: ProgressDisplay) -> None:
        super().__init__("")
        self._display = display

    def render(self, task: Task) -> Text:
        display = self._display
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
