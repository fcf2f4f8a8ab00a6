"""PNG scatter plot of a plan (pareto.png), drawn with matplotlib if that is installed.

The PNG shows the same candidates on the same scales as the HTML page. matplotlib is optional:
without it, `why_unavailable` returns the reason, and the plan is written without the PNG.
"""

import importlib.util
import io
import os
import warnings
from dataclasses import replace
from typing import Any

from planning.figures import escape_unprintable, format_figure, format_tick, row_figure
from planning.output.pareto import ScatterView, make_scatter_view
from planning.plan import Plan, Row

COLORS = ("#0f6b5c", "#b4560b", "#2f62b5", "#8a3f93", "#7a6a00")
GRAY = "#8d897f"
RED = "#b3261e"
INK = "#1e1d1b"
FIGURE_INCHES, DPI = (9.0, 5.4), 150
TITLE_MAX = 100  # Characters.


def why_unavailable() -> str:
    """Return the reason why the PNG cannot be drawn; empty if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is not None:
        return ""
    return (
        "pareto.png was not written: matplotlib is not installed; install it with "
        "pip install 'preamble[plots]'"
    )


def render_png(plan: Plan) -> bytes:
    """Draw the plot and return the bytes of the PNG file."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    figure = Figure(figsize=FIGURE_INCHES, layout="constrained")
    axes: Any = figure.subplots()
    title = (plan.request[0] if plan.request else plan.title)[:TITLE_MAX]
    axes.set_title(_escape_mathtext(title), loc="left", fontsize=11, pad=22)
    axes.set_xlabel(_escape_mathtext(f"{plan.x.label} ({plan.x.better} is better)"))
    axes.set_ylabel(_escape_mathtext(f"{plan.y.label} ({plan.y.better} is better)"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e0d9", linewidth=0.8)
    axes.set_axisbelow(True)
    scatter_view = make_scatter_view(plan)
    if scatter_view is None:
        axes.text(
            0.5, 0.5, "no candidate has a value on both axes", ha="center", transform=axes.transAxes
        )
    else:
        _draw_points(axes, plan, scatter_view)
        for mpl_axis, scale, axis in (
            (axes.xaxis, scatter_view.x, plan.x),
            (axes.yaxis, scatter_view.y, plan.y),
        ):
            tick_values = scale.ticks(7)
            mpl_axis.set_major_locator(FixedLocator(tick_values))
            mpl_axis.set_minor_locator(NullLocator())
            mpl_axis.set_major_formatter(
                FixedFormatter([format_tick(axis.figure, tick) for tick in tick_values])
            )
        axes.legend(frameon=False, fontsize=9)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # matplotlib's font has no glyphs for many languages, and draws boxes instead.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(buffer, dpi=DPI, format="png")
    return buffer.getvalue()


def _draw_points(axes: Any, plan: Plan, scatter_view: ScatterView) -> None:
    axes.set_xscale("log" if scatter_view.x.logarithmic else "linear")
    axes.set_yscale("log" if scatter_view.y.logarithmic else "linear")
    axes.set_xlim(scatter_view.x.low, scatter_view.x.high)
    axes.set_ylim(scatter_view.y.low, scatter_view.y.high)
    colors = {group: COLORS[n % len(COLORS)] for n, group in enumerate(scatter_view.fronts)}
    front_ids = {id(row) for rows in scatter_view.fronts.values() for row in rows}
    infeasible_rows = [
        row for row in scatter_view.rows if row.feasibility in ("rejected", "failed")
    ]
    if infeasible_rows:
        axes.scatter(
            *_coordinates(plan, infeasible_rows), s=16, c=GRAY, marker="x", lw=0.8, label="rejected"
        )
    for group in {row.group: None for row in scatter_view.rows}:
        dominated = [
            row
            for row in scatter_view.rows
            if row.group == group and id(row) not in front_ids and row not in infeasible_rows
        ]
        axes.scatter(
            *_coordinates(plan, dominated), s=12, c=colors.get(group, GRAY), alpha=0.35, lw=0
        )
    for number, (group, rows) in enumerate(scatter_view.fronts.items()):
        axes.plot(
            *_coordinates(plan, rows),
            "-" if number < len(COLORS) else "--",
            marker="o",
            markersize=4.5,
            linewidth=1.4,
            label=_escape_mathtext(group) or "Pareto frontier",
            color=colors[group],
        )
    for axis, line in ((plan.x, axes.axvline), (plan.y, axes.axhline)):
        if axis.limit is not None:
            limit_label = f"limit {format_figure(axis.figure, axis.limit)}"
            line(axis.limit, color=RED, linestyle="--", linewidth=1, label=limit_label)
    best = next((row for row in scatter_view.rows if row.feasibility == "best"), None)
    if best is not None:
        _mark_best(axes, plan, best)


def _mark_best(axes: Any, plan: Plan, best: Row) -> None:
    (x,), (y,) = _coordinates(plan, [best])
    error = best.confidence.error * y if best.confidence is not None else None
    best_label = "recommended"
    if best.confidence is not None:
        best_label += f", {replace(best.confidence, note='')}"
    axes.errorbar(x, y, yerr=error, color=INK, capsize=3, linewidth=1)
    ring = {"s": 130, "facecolors": "none", "edgecolors": INK, "linewidths": 1.6}
    axes.scatter([x], [y], zorder=5, label=_escape_mathtext(best_label), **ring)
    high = axes.get_ylim()[1]
    x_fraction = axes.transData.transform((x, y))[0] / axes.figure.bbox.width
    axes.annotate(
        _escape_mathtext(best.name),
        (x, min(high, max(y, y + (error or 0.0)))),
        (0, 8),
        textcoords="offset points",
        ha="right" if x_fraction > 0.7 else "left" if x_fraction < 0.3 else "center",
        weight="bold",
        fontsize=10,
        annotation_clip=False,
    )


def _coordinates(plan: Plan, rows: Any) -> tuple[list[float], list[float]]:
    return (
        [row_figure(row, plan.x.figure) or 0.0 for row in rows],
        [row_figure(row, plan.y.figure) or 0.0 for row in rows],
    )


def _escape_mathtext(text: str) -> str:
    """Escape unprintable characters, and `$`, which starts a formula in matplotlib."""
    return escape_unprintable(text).replace("$", r"\$")
