"""Pareto frontier of a plan's candidates per group, and the scales of its scatter plot.

A feasible candidate is on the frontier of its group if no other feasible candidate of the group is
at least as good on both axes and better on one. Terminal, page and PNG show the same points on the
same scales. The frontiers determine the scales, so that outliers do not compress the plot; feasible
candidates outside of the scales are counted, but not drawn.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from planning.figures import ACCEPTABLE, row_figure
from planning.plan import Axis, Plan, Row
from ptuning.reporting.svg_chart import AxisScale

# Maximum number of drawn candidates outside of the frontiers: more points would overlap.
POINTS_MAX = 1500
LOG_RATIO_MIN = 30.0  # An axis with a larger ratio of maximum to minimum is logarithmic.
# A limit beyond an end of an axis extends the axis if the limit and the end differ by at most this
# factor.
LIMIT_DISTANCE_MAX = 4.0
AXIS_PADDING = 0.06  # Padding at each end of an axis, as a fraction of its range.


def pareto_front(rows: Sequence[Row], x: Axis, y: Axis) -> list[Row]:
    """Return the Pareto frontier, ordered from the best in x to the best in y.

    Of rows with equal figures, only the first is returned.
    """
    comparable_rows = [row for row in rows if _has_both_figures(row, x, y)]

    def goodness(row: Row, axis: Axis) -> float:
        value = row_figure(row, axis.figure)
        assert value is not None
        return value if axis.better == "high" else -value

    front_rows: list[Row] = []
    for row in sorted(comparable_rows, key=lambda row: (-goodness(row, x), -goodness(row, y))):
        if not front_rows or goodness(row, y) > goodness(front_rows[-1], y):
            front_rows.append(row)
    return front_rows


def pareto_fronts(plan: Plan) -> Mapping[str, list[Row]]:
    """Return the Pareto frontier of each group, in natural order of the group names."""
    groups: dict[str, list[Row]] = {}
    for row in plan.rows:
        if row.feasibility in ACCEPTABLE:
            groups.setdefault(row.group, []).append(row)
    rows_by_group = {
        name: pareto_front(groups[name], plan.x, plan.y)
        for name in sorted(groups, key=_natural_sort_key)
    }
    return {name: rows for name, rows in rows_by_group.items() if rows}


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts "2 GPUs" before "16 GPUs"."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


@dataclass(frozen=True)
class ScatterView:
    """The scales and the candidates that a scatter plot draws."""

    x: AxisScale
    y: AxisScale
    rows: tuple[Row, ...]  # The drawn rows, in drawing order.
    fronts: Mapping[str, Sequence[Row]]
    hidden_count: int  # Feasible rows that are outside of the scales or exceed POINTS_MAX.


def make_scatter_view(plan: Plan) -> ScatterView | None:
    """Return the view of a plan's scatter plot, or None if no candidate has both axes' figures."""
    plotted = [row for row in plan.rows if _has_both_figures(row, plan.x, plan.y)]
    if not plotted:
        return None
    fronts = pareto_fronts(plan)
    emphasized = [row for front_rows in fronts.values() for row in front_rows]
    emphasized += [row for row in plotted if row.feasibility == "best"]
    feasible_rows = [row for row in plotted if row.feasibility in ACCEPTABLE] or plotted
    x = _axis_scale(emphasized, feasible_rows, plan.x)
    y = _axis_scale(emphasized, feasible_rows, plan.y)
    rows_inside = [
        row
        for row in plotted
        if x.contains(row_figure(row, plan.x.figure)) and y.contains(row_figure(row, plan.y.figure))
    ]
    emphasized_ids = {id(row) for row in emphasized}
    other_rows = [row for row in rows_inside if id(row) not in emphasized_ids]
    stride = max(1, math.ceil(len(other_rows) / POINTS_MAX))
    drawn_rows = [
        *reversed(other_rows[::stride]),
        *(row for row in rows_inside if id(row) in emphasized_ids),
    ]
    # The sort is stable: among rows of equal feasibility, the emphasized rows stay last.
    drawn_rows.sort(key=_draw_order)
    drawn_feasible = sum(row.feasibility in ACCEPTABLE for row in drawn_rows)
    hidden_count = sum(row.feasibility in ACCEPTABLE for row in plotted) - drawn_feasible
    return ScatterView(x, y, tuple(drawn_rows), fronts, hidden_count)


def _has_both_figures(row: Row, x: Axis, y: Axis) -> bool:
    return row_figure(row, x.figure) is not None and row_figure(row, y.figure) is not None


def _draw_order(row: Row) -> int:
    return ("rejected", "failed", "tight", "fits", "best").index(row.feasibility)


def _axis_scale(emphasized: Sequence[Row], feasible_rows: Sequence[Row], axis: Axis) -> AxisScale:
    """Return a scale that contains the emphasized rows (frontiers and recommended candidate).

    The scale also contains the median of the feasible rows, and the limit if it is near. Without
    emphasized rows, the scale contains all feasible rows.
    """
    feasible_figures = _finite_figures(feasible_rows, axis)
    covered_figures = _finite_figures(emphasized, axis)
    if covered_figures:
        covered_figures.append(median(feasible_figures))
    else:
        covered_figures = feasible_figures
    low, high = min(covered_figures), max(covered_figures)
    limit = axis.limit
    if (
        limit is not None
        and limit > 0
        and low / LIMIT_DISTANCE_MAX <= limit <= high * LIMIT_DISTANCE_MAX
    ):
        low, high = min(low, limit), max(high, limit)
    if low > 0 and high / low > LOG_RATIO_MIN:
        padding = (high / low) ** AXIS_PADDING
        return AxisScale(low / padding, high * padding, logarithmic=True)
    if 0 < low < high / 2:
        low = 0.0  # An axis from zero shows ratios correctly.
    if not high > low:
        padding = abs(high) / 10 or 1.0
        return AxisScale(low - padding, high + padding)
    padding = AXIS_PADDING * (high - low)
    return AxisScale(low - padding if low else low, high + padding)


def _finite_figures(rows: Sequence[Row], axis: Axis) -> list[float]:
    figures = [row_figure(row, axis.figure) for row in rows]
    return [figure for figure in figures if figure is not None]
