"""Speed regression verdict: compares the medians of two checkouts, and judges their noise.

Each round measures the other checkout, this checkout, and the other checkout again. The other
checkout therefore has two medians: before and after this checkout. If these differ by more than
NOISE_MAX, other programs disturbed the measurement, and the row has the verdict "unsettled".
"""

import statistics
from dataclasses import dataclass, field
from typing import Literal

TOLERANCE = 0.03  # The largest slowdown of a median that is accepted.
NOISE_MAX = 0.05  # The largest accepted difference between the two medians of the other checkout.
UNSETTLED = "unsettled: measure again at a quieter time"

Verdict = Literal["equal", "faster", "SLOWER", "unsettled", "not run"]


@dataclass(frozen=True)
class SpeedRow:
    """A measured quantity. For a cost (time or memory), a lower figure is better."""

    name: str
    title: str
    unit: str

    @property
    def is_cost(self) -> bool:
        return self.unit in ("s", "ms", "us", "MiB")


@dataclass
class Samples:
    """The figures of one row in all rounds."""

    before: list[float] = field(default_factory=list)  # Other checkout, measured before `this`.
    this: list[float] = field(default_factory=list)  # This checkout.
    after: list[float] = field(default_factory=list)  # Other checkout, measured after `this`.
    failure: str = ""  # Why the row was not measured; empty: it was measured.
    this_failed: bool = False  # Whether the failure is a failure of this checkout.


@dataclass(frozen=True)
class JudgedRow:
    """A row with its medians and verdict."""

    row: SpeedRow
    samples: Samples
    verdict: Verdict
    before: float = 0.0
    this: float = 0.0
    after: float = 0.0
    slowdown: float = 0.0  # As a fraction, such as 0.02; positive if this checkout is worse.
    # (Larger median) / (smaller median) - 1, of the two medians of the other checkout.
    noise: float = 0.0

    @property
    def failed(self) -> bool:
        return self.verdict == "SLOWER" or self.samples.this_failed

    def __str__(self) -> str:
        if self.verdict == "not run":
            return f"{self.row.title:44}not run: {self.samples.failure}"
        remark = UNSETTLED if self.verdict == "unsettled" else self.verdict
        figures = "".join(f"{median:12,.4g}" for median in (self.before, self.this, self.after))
        return (
            f"{self.row.title:44}{figures} {self.row.unit:9}{100 * self.slowdown:+7.1f} %"
            f"{100 * self.noise:7.1f} %  {remark}"
        )


TABLE_HEADER = (
    f"{'':44}{'other':>12}{'this':>12}{'other again':>12} {'':9}{'worse by':>9}{'noise':>9}"
)


def judge(row: SpeedRow, samples: Samples) -> JudgedRow:
    """Compare the median of this checkout with the median of all figures of the other checkout."""
    if samples.failure or not (samples.before and samples.this and samples.after):
        return JudgedRow(row, samples, "not run")
    before, this, after = map(statistics.median, (samples.before, samples.this, samples.after))
    base = statistics.median([*samples.before, *samples.after])
    slowdown = this / base - 1 if row.is_cost else base / this - 1
    noise = max(before, after) / min(before, after) - 1
    verdict: Verdict = "equal"
    if noise > NOISE_MAX:
        verdict = "unsettled"
    elif slowdown > TOLERANCE:
        verdict = "SLOWER"
    elif slowdown < -TOLERANCE:
        verdict = "faster"
    return JudgedRow(row, samples, verdict, before, this, after, slowdown, noise)
