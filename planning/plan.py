"""A plan as it is told and written: what was asked, what is best and why, and all that was tried.

Whoever searches fills it; whoever prints, draws or writes it needs to know no more than this. Every
figure says where it comes from and how far it may be off.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from planning.memory_ledger import Ledger

# From spec sheets and constants fitted to published tables; from microbenchmarks on the machine at
# hand; from running the very thing.
Source = Literal["spec-sheet", "calibrated", "measured"]
Standing = Literal["best", "fits", "tight", "rejected", "failed"]
Cell = str | int | float

# What the settings file is called beside a plan of that title; commands name it.
SETTINGS_FILES: Mapping[str, str] = {
    "training": "train_config.yaml",
    "serving": "serve_config.yaml",
}


@dataclass(frozen=True)
class Trust:
    """Where figures come from, and their error bar: 0.09 is +-9 %."""

    source: Source
    error: float
    note: str = ""  # Such as: outside of what was calibrated.

    def __str__(self) -> str:
        return f"{self.source}, ±{100 * self.error:.0f} %" + (f"; {self.note}" if self.note else "")


@dataclass(frozen=True)
class Row:
    """A candidate. Columns are alike in all rows of a plan; a rejected one may lack figures."""

    name: str  # As people say it: TP4 PP1 x2.
    standing: Standing
    settings: Mapping[str, Cell]
    figures: Mapping[str, float] = field(default_factory=dict)  # The unit is the name's end.
    measured: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""  # Why it is rejected, or has failed; or what is worth knowing.
    trust: Trust | None = None
    group: str = ""  # Its curve in a plot, such as "8 GPUs".
    memory: Ledger | None = None  # Of the fullest device, where it is known.


@dataclass(frozen=True)
class Axis:
    figure: str  # A key of `Row.figures`.
    label: str
    better: Literal["low", "high"]
    limit: float | None = None  # What was asked for, with its margin: a line in a plot.


@dataclass(frozen=True)
class Plan:
    title: str  # "training", "serving".
    asked: Sequence[str]  # The request, in lines of words.
    objective: str
    rows: Sequence[Row]  # The best ones first.
    x: Axis
    y: Axis
    binding: Sequence[str] = ()
    why_not: Sequence[str] = ()
    advice: Sequence[str] = ()  # Where nothing fits: what would. Else: what else is worth knowing.
    command: str = ""  # That starts the best.
    settings_yaml: str = ""  # The file that `tune` or `serve --config` starts from.

    @property
    def best(self) -> Row | None:
        return next((row for row in self.rows if row.standing == "best"), None)
