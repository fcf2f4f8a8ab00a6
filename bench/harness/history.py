"""Benchmark history: `python -m bench graph` plots past runs, one panel per target and limit.

A limit is a measured peak rate of the machine, such as its memory bandwidth. Each point is the
figure of one run. Runs are ordered by time, and each machine has a color. The dashed line is the
target. A ring marks a figure that misses the target, but counts as met because it is close to the
roofline bound of the machine. The input is the JSON files that `bench/harness/record.py` writes.
matplotlib is optional, so it is imported in the function that plots.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.record import RECORD_FOLDER, read_runs
from bench.harness.targets import TARGETS
from gpt.errors import ConfigError

COLORS = ("#0f6b5c", "#b4560b", "#2f62b5", "#8a3f93", "#7a6a00")
GRAY, RED = "#8d897f", "#b3261e"
COLUMNS = 4
PANEL_INCHES = (4.2, 2.4)
DPI = 110
TICKS_MAX = 6  # Maximum number of runs labeled on the x axis of a panel.


@dataclass
class Panel:
    """The figures of one target or machine limit in all runs."""

    title: str
    unit: str
    threshold: float | None = None  # The threshold of the target; None for a limit.
    # Maps a machine to (index of the run, figure, whether the verdict is "met by the bound").
    points: dict[str, list[tuple[int, float, bool]]] = field(default_factory=dict)


def build_panels(past_runs: Sequence[Mapping[str, Any]]) -> dict[str, Panel]:
    """Build one panel per target and machine limit that has a figure in any run.

    A panel has the title, unit and target of the latest run that has the figure.
    """
    panels_by_name: dict[str, Panel] = {}
    for run_index, run in enumerate(past_runs):
        machine = f"{run['machine']['processor']}, {run['machine']['cores']} cores"
        for limit in run["limits"]:
            panel = panels_by_name.setdefault(f"limit/{limit['name']}", Panel("", ""))
            panel.title = limit["name"]
            panel.unit = f"G{limit['unit']}"
            panel.points.setdefault(machine, []).append((run_index, limit["value"] / 1e9, False))
        for row in run["rows"]:
            if row.get("value") is None:
                continue
            panel = panels_by_name.setdefault(row["name"], Panel("", ""))
            panel.title = row["what"]
            panel.unit = row["unit"]
            panel.threshold = row["target"]
            met_by_bound = row["verdict"] == "met by the bound"
            panel.points.setdefault(machine, []).append((run_index, row["value"], met_by_bound))
    # Limits first, then rows in the order of `TARGETS`; rows without a current target come last.
    order = [*(name for name in panels_by_name if name.startswith("limit/")), *TARGETS]
    return {
        name: panels_by_name[name] for name in (*order, *panels_by_name) if name in panels_by_name
    }


def plot_history(folder: Path = RECORD_FOLDER) -> Path:
    """Plot all runs of `folder` into `history.png` and return the path of that file."""
    past_runs = read_runs(folder)
    if not past_runs:
        raise ConfigError(f"{folder} contains no benchmark run; run `python -m bench` first")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "plotting needs matplotlib, which is not installed; run: pip install 'preamble[plots]'"
        )
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    panels_by_name = build_panels(past_runs)
    row_count = -(-len(panels_by_name) // COLUMNS)
    figure = Figure(
        figsize=(COLUMNS * PANEL_INCHES[0], row_count * PANEL_INCHES[1]), layout="constrained"
    )
    axes: Any = figure.subplots(row_count, COLUMNS, squeeze=False)
    machines = sorted({machine for panel in panels_by_name.values() for machine in panel.points})
    colors = {machine: COLORS[index % len(COLORS)] for index, machine in enumerate(machines)}
    for axis, (name, panel) in zip(axes.flat, panels_by_name.items(), strict=False):
        _plot_panel(axis, name, panel, colors)
        axis.set_xlim(-0.5, len(past_runs) - 0.5)
        tick_indices = range(0, len(past_runs), -(-len(past_runs) // TICKS_MAX))
        labels = [
            f"{past_runs[run_index]['begun'][5:10]} {past_runs[run_index]['commit']}"
            for run_index in tick_indices
        ]
        axis.set_xticks(tick_indices, labels)
        axis.tick_params(axis="x", labelrotation=30, labelsize=6)
    for axis in axes.flat[len(panels_by_name) :]:
        axis.set_visible(False)
    legend_handles = [
        axes.flat[0].plot([], [], "o-", color=colors[machine], label=machine)[0]
        for machine in machines
    ]
    figure.legend(handles=legend_handles, loc="outside lower center", frameon=False, fontsize=8)
    path = folder / "history.png"
    figure.savefig(path, dpi=DPI)
    return path


def _plot_panel(axis: Any, name: str, panel: Panel, colors: Mapping[str, str]) -> None:
    axis.set_title(f"{name}\n{panel.title}", loc="left", fontsize=7)
    axis.set_ylabel(panel.unit, fontsize=7)
    axis.tick_params(axis="y", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    for machine, points in panel.points.items():
        run_indices = [run_index for run_index, _, _ in points]
        figures = [figure for _, figure, _ in points]
        axis.plot(run_indices, figures, "o-", color=colors[machine], markersize=3, linewidth=1)
        ring_points = [(run_index, figure) for run_index, figure, is_ring in points if is_ring]
        if ring_points:
            axis.plot(
                *zip(*ring_points, strict=True), "o", color=GRAY, markersize=8, fillstyle="none"
            )
    if panel.threshold is not None:
        axis.axhline(panel.threshold, color=RED, linestyle="--", linewidth=0.8)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0.0), high * 1.05)
