"""pareto.png: the same picture as the page's, for a slide or a ticket.

matplotlib draws it, and is imported only then; where it is missing, `missing` is the one sentence
that says so, and all else of a plan is there. Knows no files.
"""

import importlib.util
import io
import os
import warnings
from dataclasses import replace
from typing import Any

from planning.figures import known, say, tick, visible
from planning.output.pareto import View, view
from planning.plan import Plan, Row

COLOURS = ("#0f6b5c", "#b4560b", "#2f62b5", "#8a3f93", "#7a6a00")
GREY, RED, INK = "#8d897f", "#b3261e", "#1e1d1b"
INCHES, DOTS = (9.0, 5.4), 150
TITLE_MAX = 100


def missing() -> str:
    """Why there can be no picture; empty: there can."""
    if importlib.util.find_spec("matplotlib") is not None:
        return ""
    return "pareto.png needs matplotlib, which is not installed; pip install 'preamble[plots]'"


def drawn(plan: Plan) -> bytes:
    """The PNG."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    figure = Figure(figsize=INCHES, layout="constrained")
    axes: Any = figure.subplots()
    title = (plan.asked[0] if plan.asked else plan.title)[:TITLE_MAX]
    axes.set_title(_plain(title), loc="left", fontsize=11, pad=22)
    axes.set_xlabel(_plain(f"{plan.x.label} ({plan.x.better} is better)"))
    axes.set_ylabel(_plain(f"{plan.y.label} ({plan.y.better} is better)"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e0d9", linewidth=0.8)
    axes.set_axisbelow(True)
    seen = view(plan)
    if seen is None:
        axes.text(0.5, 0.5, "no candidate has both figures", ha="center", transform=axes.transAxes)
    else:
        _points(axes, plan, seen)
        for one, scale, axis in ((axes.xaxis, seen.x, plan.x), (axes.yaxis, seen.y, plan.y)):
            places = scale.ticks(7)
            one.set_major_locator(FixedLocator(places))
            one.set_minor_locator(NullLocator())
            one.set_major_formatter(FixedFormatter([tick(axis.figure, at) for at in places]))
        axes.legend(frameon=False, fontsize=9)
    made = io.BytesIO()
    with warnings.catch_warnings():
        # Its own font lacks letters of many languages, and draws boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(made, dpi=DOTS, format="png")
    return made.getvalue()


def _points(axes: Any, plan: Plan, seen: View) -> None:
    axes.set_xscale("log" if seen.x.logarithmic else "linear")
    axes.set_yscale("log" if seen.y.logarithmic else "linear")
    axes.set_xlim(seen.x.low, seen.x.high)
    axes.set_ylim(seen.y.low, seen.y.high)
    colours = {group: COLOURS[n % len(COLOURS)] for n, group in enumerate(seen.fronts)}
    ahead = {id(row) for rows in seen.fronts.values() for row in rows}
    put_aside = [row for row in seen.rows if row.standing in ("rejected", "failed")]
    if put_aside:
        axes.scatter(*_at(plan, put_aside), s=16, c=GREY, marker="x", lw=0.8, label="rejected")
    for group in {row.group: None for row in seen.rows}:
        beaten = [
            row
            for row in seen.rows
            if row.group == group and id(row) not in ahead and row not in put_aside
        ]
        axes.scatter(*_at(plan, beaten), s=12, c=colours.get(group, GREY), alpha=0.35, lw=0)
    for number, (group, rows) in enumerate(seen.fronts.items()):
        style = "-" if number < len(COLOURS) else "--"
        words = {"label": _plain(group) or "not beaten", "color": colours[group]}
        axes.plot(*_at(plan, rows), style, marker="o", markersize=4.5, linewidth=1.4, **words)
    for axis, line in ((plan.x, axes.axvline), (plan.y, axes.axhline)):
        if axis.limit is not None:
            said = f"limit {say(axis.figure, axis.limit)}"
            line(axis.limit, color=RED, linestyle="--", linewidth=1, label=said)
    best = next((row for row in seen.rows if row.standing == "best"), None)
    if best is not None:
        _recommend(axes, plan, best)


def _recommend(axes: Any, plan: Plan, best: Row) -> None:
    (x,), (y,) = _at(plan, [best])
    error = best.trust.error * y if best.trust is not None else None
    said = "recommended"
    if best.trust is not None:
        said += f", {replace(best.trust, note='')}"
    axes.errorbar(x, y, yerr=error, color=INK, capsize=3, linewidth=1)
    ring = {"s": 130, "facecolors": "none", "edgecolors": INK, "linewidths": 1.6}
    axes.scatter([x], [y], zorder=5, label=_plain(said), **ring)
    high = axes.get_ylim()[1]
    across = axes.transData.transform((x, y))[0] / axes.figure.bbox.width
    axes.annotate(
        _plain(best.name),
        (x, min(high, max(y, y + (error or 0.0)))),
        (0, 8),
        textcoords="offset points",
        ha="right" if across > 0.7 else "left" if across < 0.3 else "center",
        weight="bold",
        fontsize=10,
        annotation_clip=False,
    )


def _at(plan: Plan, rows: Any) -> tuple[list[float], list[float]]:
    return (
        [known(row, plan.x.figure) or 0.0 for row in rows],
        [known(row, plan.y.figure) or 0.0 for row in rows],
    )


def _plain(text: str) -> str:
    """What matplotlib would take for mathematics, or has no shape for, is shown as it is."""
    return visible(text).replace("$", r"\$")
