"""What a person sees of a run while it goes on: a bar on a terminal, about ten lines elsewhere.

Both tell the loss (smoothed, and the last step's), text tokens per second, the time that is left,
and the best that was measured so far. Talk never ends a run. Knows no signals and no files.
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

from ptuning.reporting.verdict import best, is_share, label, shown
from ptuning.run_facts import Progress, Validation

LINES = 10  # Of a run whose stderr is no terminal, validations aside.
RECENT = 50  # Steps that speed and the time left are taken from.
SMOOTHING = 0.9  # Of the mean loss, what stays at each step.


class Telling:
    """Told each step and validation; says what a person would ask. Made by `telling`."""

    def __init__(self, steps: int, measure: str, after: int) -> None:
        self.steps, self.made = steps, after
        self._measure = measure
        self._after = after
        self._recent: deque[Progress] = deque(maxlen=RECENT)
        self._mean = self._weight = 0.0
        self._skipped = 0
        self._validations: list[Validation] = []

    def step(self, made: Progress) -> None:
        self.made = made.step
        self._recent.append(made)
        self._skipped += made.skipped
        if math.isfinite(made.loss):
            # Divided by the weights so far, so that it does not begin at zero.
            self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * made.loss
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        self._show(made)

    def validated(self, made: Validation) -> None:
        self._validations.append(made)
        told = {"loss": made.loss} if made.loss is not None else {}
        words = [f"{label(name)} {shown(name, value)}" for name, value in told.items()]
        words += [f"{label(name)} {shown(name, value)}" for name, value in made.measures.items()]
        self._say(f"validation at step {made.step}: {', '.join(words).lower()}")

    @property
    def loss(self) -> str:
        """Smoothed, and the last step's."""
        if not self._recent:
            return ""
        last = self._recent[-1].loss
        mean = self._mean / self._weight if self._weight else last
        skipped = f", {self._skipped} skipped" if self._skipped else ""
        return f"loss {mean:.4f} (last {last:.4f}{skipped})"

    @property
    def speed(self) -> str:
        seconds = sum(one.seconds for one in self._recent)
        tokens = sum(one.text_tokens for one in self._recent)
        return f"{tokens / seconds:,.0f} text tokens/s" if seconds > 0 else ""

    @property
    def left(self) -> str:
        if not self._recent:
            return ""
        each_s = sum(one.seconds for one in self._recent) / len(self._recent)
        return f"{duration(each_s * (self.steps - self.made))} left"

    @property
    def best(self) -> str:
        """By the run's measure, or, where that was not measured, by the loss."""
        for measure in (self._measure, "loss"):
            found = best(self._validations, measure)
            if found is not None:
                name = label(measure).lower() if is_share(measure) else "held-out loss"
                return f"best {name} {shown(measure, found[0])} at step {found[1]}"
        return ""

    def _show(self, made: Progress) -> None:
        raise NotImplementedError

    def _say(self, text: str) -> None:
        raise NotImplementedError


class _Lines(Telling):
    def __init__(self, steps: int, measure: str, after: int, stream: TextIO) -> None:
        super().__init__(steps, measure, after)
        self._stream = stream
        self._next = after
        self._say(f"tuning, {steps} steps" + (f", from step {after + 1}" if after else ""))

    def _show(self, made: Progress) -> None:
        if made.step < min(self._next, self.steps):
            return
        self._next = made.step + max(1, (self.steps - self._after) // LINES)
        left = self.left if made.step < self.steps else ""
        parts = (f"step {made.step}/{self.steps}", self.loss, self.speed, left, self.best)
        self._say("  ".join(filter(None, parts)))

    def _say(self, text: str) -> None:
        with suppress(OSError):  # A full disk under a redirected stderr must not end a run.
            self._stream.write(f"{text}\n")
            self._stream.flush()


class _Bar(Telling):
    def __init__(self, steps: int, measure: str, after: int, console: Console) -> None:
        super().__init__(steps, measure, after)
        self._console = console
        self.bar = Bar(
            TextColumn("tuning"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _Words(self),
            console=console,
        )
        self._row = self.bar.add_task("", total=steps, completed=after)

    def _show(self, made: Progress) -> None:
        self.bar.update(self._row, completed=made.step)

    def _say(self, text: str) -> None:
        with suppress(OSError):  # The terminal may have gone.
            self._console.print(Text(text))


class _Words(TextColumn):
    """Beside the bar. Text, so that no name in it is read as markup."""

    def __init__(self, told: Telling) -> None:
        super().__init__("")
        self._told = told

    def render(self, task: Task) -> Text:
        told = self._told
        return Text("  ".join(filter(None, (told.loss, told.speed, told.left, told.best))))


@contextmanager
def telling(
    steps: int, stream: TextIO, *, measure: str = "loss", after: int = 0
) -> Iterator[Telling]:
    """`after`: the step that the run goes on from."""
    console = Console(file=stream)
    if not console.is_terminal:
        yield _Lines(steps, measure, after, stream)
        return
    shown = _Bar(steps, measure, after, console)
    shown.bar.start()
    try:
        yield shown
    finally:
        with suppress(OSError):
            shown.bar.stop()


def duration(seconds: float) -> str:
    """To be read at a glance: two units at most."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
