"""Plan data structures: the request, the ranked candidates with figures, and the settings file.

`planning.training.plan` and `planning.inference.plan` create plans. The output modules print, draw
and write a plan without access to the search. A candidate's `Confidence` states the source of its
figures and their error bar.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from planning.memory_ledger import MemoryLedger

# The source of figures. spec-sheet: specification sheets, and constants fitted to published tables.
# calibrated: microbenchmarks on this machine. measured: a run of the configuration.
Source = Literal["spec-sheet", "calibrated", "measured"]
# best: the recommended candidate. fits: fits in memory and satisfies the limits. tight: like fits,
# but leaves little memory free. rejected: needs too much memory, violates a limit, or is invalid.
# failed: crashed or timed out when it was measured.
Feasibility = Literal["best", "fits", "tight", "rejected", "failed"]
SettingValue = str | int | float

# The file name of a plan's settings file, by `Plan.title`.
SETTINGS_FILES: Mapping[str, str] = {
    "training": "train_config.yaml",
    "serving": "serve_config.yaml",
}


@dataclass(frozen=True)
class Confidence:
    """The source of figures and their error bar: an `error` of 0.09 means ±9 %."""

    source: Source
    error: float
    note: str = ""  # A reason for the error bar, such as "nothing was measured".

    def __str__(self) -> str:
        return f"{self.source}, ±{100 * self.error:.0f} %" + (f"; {self.note}" if self.note else "")


@dataclass(frozen=True)
class Row:
    """A candidate of a plan. A rejected candidate may have no figures."""

    name: str  # Short name for display, such as TP4 PP1 x2.
    feasibility: Feasibility
    settings: Mapping[str, SettingValue]
    # Predicted figures by name; `planning.figures` describes the names.
    figures: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)  # Measured figures by name.
    # Why the candidate was rejected or failed. A tight candidate may have a remark here.
    reason: str = ""
    confidence: Confidence | None = None
    group: str = ""  # The curve in a plot that the row belongs to, such as "8 GPUs".
    # The ledger of the device that needs the most memory; None: unknown.
    memory: MemoryLedger | None = None


@dataclass(frozen=True)
class Axis:
    figure: str  # A key of `Row.figures`.
    label: str
    better: Literal["low", "high"]
    # The requested limit minus its margin, drawn as a line; None: no limit.
    limit: float | None = None


@dataclass(frozen=True)
class Plan:
    title: str  # "training" or "serving".
    request: Sequence[str]  # The request as lines of text.
    objective: str
    rows: Sequence[Row]  # Best first.
    x: Axis
    y: Axis
    binding: Sequence[str] = ()  # Sentences on the limits that prevent a better candidate.
    why_not: Sequence[str] = ()  # Sentences on why other candidates are worse than the best.
    # If no candidate fits, changes with which a candidate would fit; otherwise, remarks on the best
    # candidate.
    advice: Sequence[str] = ()
    command: str = ""  # Shell command that starts the best candidate.
    settings_yaml: str = ""  # The settings file for `preamble tune` or `preamble serve --config`.

    @property
    def best(self) -> Row | None:
        return next((row for row in self.rows if row.feasibility == "best"), None)
