"""`python -m bench graph`: past runs as a picture, a small panel for each row.

Each point is a row's figure in one run, oldest first, one colour for each machine; the line is what
is promised, and a ring marks a figure that counts as met because the machine can do no more. Knows
only the files that `bench/harness/record.py` writes. matplotlib draws it, and is imported only
here.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.record import FOLDER, runs
from bench.harness.targets import PROMISES
from gpt.errors import ConfigError

COLOURS = ("#0f6b5c", "#b4560b", "#2f62b5", "#8a3f93", "#7a6a00")
GREY, RED = "#8d897f", "#b3261e"
ACROSS, INCHES, DOTS = 4, (4.2, 2.4), 110
TICKS = 6  # Runs that are named below a panel, at most.


@dataclass
class Panel:
    """One row over the runs."""

    what: str
    unit: str
    target: float | None = None
    # By machine: the place of the run, the figure, and whether the bound made it count as met.
    points: dict[str, list[tuple[int, float, bool]]] = field(default_factory=dict)


def panels(past: Sequence[Mapping[str, Any]]) -> dict[str, Panel]:
    """Of every row and limit that any run has a figure of; the latest words and target count."""
    found: dict[str, Panel] = {}
    for place, run in enumerate(past):
        where = f"{run['machine']['processor']}, {run['machine']['cores']} cores"
        for limit in run["limits"]:
            panel = found.setdefault(f"limit/{limit['name']}", Panel("", ""))
            panel.what, panel.unit = limit["name"], f"G{limit['unit']}"
            panel.points.setdefault(where, []).append((place, limit["value"] / 1e9, False))
        for row in run["rows"]:
            if row.get("value") is None:
                continue
            panel = found.setdefault(row["name"], Panel("", ""))
            panel.what, panel.unit, panel.target = row["what"], row["unit"], row["target"]
            bounded = row["verdict"] == "met by the bound"
            panel.points.setdefault(where, []).append((place, row["value"], bounded))
    # Limits first, then as the table has them; what is promised no more comes last.
    order = [*(name for name in found if name.startswith("limit/")), *PROMISES]
    return {name: found[name] for name in (*order, *found) if name in found}


def draw(folder: Path = FOLDER) -> Path:
    """The picture's path."""
    past = runs(folder)
    if not past:
        raise ConfigError(f"no run stands in {folder}; python -m bench makes one")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a graph needs matplotlib; pip install 'preamble[plots]'")
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    drawn = panels(past)
    down = -(-len(drawn) // ACROSS)
    figure = Figure(figsize=(ACROSS * INCHES[0], down * INCHES[1]), layout="constrained")
    axes: Any = figure.subplots(down, ACROSS, squeeze=False)
    machines = sorted({where for panel in drawn.values() for where in panel.points})
    colours = {where: COLOURS[n % len(COLOURS)] for n, where in enumerate(machines)}
    for place, (name, panel) in zip(axes.flat, drawn.items(), strict=False):
        _draw(place, name, panel, colours)
        place.set_xlim(-0.5, len(past) - 0.5)
        some = range(0, len(past), -(-len(past) // TICKS))
        names = [f"{past[at]['begun'][5:10]} {past[at]['commit']}" for at in some]
        place.set_xticks(some, names)
        place.tick_params(axis="x", labelrotation=30, labelsize=6)
    for place in axes.flat[len(drawn) :]:
        place.set_visible(False)
    marks = [axes.flat[0].plot([], [], "o-", color=colours[one], label=one)[0] for one in machines]
    figure.legend(handles=marks, loc="outside lower center", frameon=False, fontsize=8)
    path = folder / "history.png"
    figure.savefig(path, dpi=DOTS)
    return path


def _draw(place: Any, name: str, panel: Panel, colours: Mapping[str, str]) -> None:
    place.set_title(f"{name}\n{panel.what}", loc="left", fontsize=7)
    place.set_ylabel(panel.unit, fontsize=7)
    place.tick_params(axis="y", labelsize=7)
    place.spines[["top", "right"]].set_visible(False)
    for where, points in panel.points.items():
        runs_, values = [at for at, _, _ in points], [value for _, value, _ in points]
        place.plot(runs_, values, "o-", color=colours[where], markersize=3, linewidth=1)
        rings = [(at, value) for at, value, bounded in points if bounded]
        if rings:
            place.plot(*zip(*rings, strict=True), "o", color=GREY, markersize=8, fillstyle="none")
    if panel.target is not None:
        place.axhline(panel.target, color=RED, linestyle="--", linewidth=0.8)
    low, high = place.get_ylim()
    place.set_ylim(min(low, 0.0), high * 1.05)
