"""SVG scatter plot of a plan: Pareto frontiers, other candidates, limits and the recommendation.

The SVG contains a JSON record of each drawn candidate. The script of the page (pareto.js) shows the
record of the candidate under the pointer. The style sheet of the page defines the CSS classes.
"""

import json
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from planning.figures import (
    format_figure,
    format_setting,
    format_table_figure,
    format_tick,
    label,
    ordered_figures,
    row_figure,
    setting_label,
)
from planning.output.pareto import ScatterView
from planning.plan import Axis, Plan, Row
from ptuning.reporting.html_template import clean_text
from ptuning.reporting.svg_chart import (
    LegendEntry,
    PlotArea,
    legend_dot,
    legend_line,
    svg_circle,
    svg_polyline,
    svg_text,
)

WIDTH, HEIGHT = 720, 430
# Margins around the plot area, in SVG units. The margins contain the axis labels.
LEFT = 62
RIGHT = 18
TOP = 52
BOTTOM = 48
# The first groups have the colors c0 to c4 of the style sheet. Further groups repeat these colors,
# with dashed lines. Gray (c5) marks candidates of groups without a frontier.
COLOR_COUNT = 5
LABEL_MAX = 44  # Characters of the recommended candidate's name in the plot.
# The mark of a rejected or failed candidate.
CROSS = Markup('<path class="no" d="M{:g} {:g}l6 6m0-6l-6 6"/>')


def render_svg(plan: Plan, scatter_view: ScatterView) -> Markup:
    """Draw the plot and return the svg element."""
    area = PlotArea(
        WIDTH,
        HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
        top=TOP,
        foot=HEIGHT - BOTTOM,
        x=scatter_view.x,
        y=scatter_view.y,
    )
    colors = group_colors(scatter_view)
    body = [*_axes(plan, area), *_limits(plan, area)]
    for group, rows in scatter_view.fronts.items():
        if len(rows) > 1:
            points = [_svg_position(plan, area, row) for row in rows]
            body.append(svg_polyline(colors[group], points))
    front_ids = {id(row) for rows in scatter_view.fronts.values() for row in rows}
    # Later points cover earlier points: frontiers and the recommended candidate are drawn last.
    for row in sorted(
        scatter_view.rows, key=lambda row: (id(row) in front_ids, row.feasibility == "best")
    ):
        color = colors.get(row.group, "c5")
        body.append(_point_mark(plan, area, row, color, id(row) in front_ids))
    best = next((row for row in scatter_view.rows if row.feasibility == "best"), None)
    if best is not None:
        body += _best_mark(plan, area, best)
    # pareto.js moves this circle to the selected candidate.
    body.append(Markup('<circle class="at" r="9" visibility="hidden"/>'))
    aria_label = f"{plan.y.label} over {plan.x.label}: {len(scatter_view.rows):,} candidates"
    if best is not None:
        aria_label += f"; recommended: {best.name}"
    records = _embedded_records(plan, area, scatter_view.rows)
    return area.svg(body, "chart scatter", aria_label, candidates=records)


def legend_entries(plan: Plan, scatter_view: ScatterView) -> list[LegendEntry]:
    entries = [
        LegendEntry(
            legend_line(color) + legend_dot(color.split()[0], 3.5), group or "Pareto frontier"
        )
        for group, color in group_colors(scatter_view).items()
    ]
    feasibilities = {row.feasibility for row in scatter_view.rows}
    if "best" in feasibilities:
        entries.append(LegendEntry(legend_dot("ring", 4.5), "recommended, with its error bar"))
    front_count = sum(map(len, scatter_view.fronts.values()))
    if len(scatter_view.rows) > front_count:
        entries.append(LegendEntry(legend_dot("c5 faint", 3), "dominated"))
    if "tight" in feasibilities:
        entries.append(LegendEntry(legend_dot("c5 tight", 3.5), "tight in memory"))
    if feasibilities & {"rejected", "failed"}:
        entries.append(LegendEntry(CROSS.format(7, 2), "rejected"))
    if any(axis.limit is not None for axis in (plan.x, plan.y)):
        entries.append(LegendEntry(legend_line("limit"), "limit minus its margin"))
    return entries


def group_colors(scatter_view: ScatterView) -> dict[str, str]:
    return {
        group: f"c{index % COLOR_COUNT}{' dashed' if index >= COLOR_COUNT else ''}"
        for index, group in enumerate(scatter_view.fronts)
    }


def _svg_position(plan: Plan, area: PlotArea, row: Row) -> tuple[float, float]:
    x, y = row_figure(row, plan.x.figure), row_figure(row, plan.y.figure)
    assert x is not None and y is not None  # All rows of a view have both axes' figures.
    return area.x_at(x), area.y_at(y)


def _axes(plan: Plan, area: PlotArea) -> Iterator[Markup]:
    yield from area.y_axis((tick, format_tick(plan.y.figure, tick)) for tick in area.y.ticks(5))
    yield from area.x_axis((tick, format_tick(plan.x.figure, tick)) for tick in area.x.ticks(7))
    y_label = f"{_direction_text(plan.y, '↓', '↑')} {plan.y.label}"
    yield svg_text("axis", area.left, 16, y_label)
    x_label = f"{_direction_text(plan.x, '←', '→')} {plan.x.label}"
    yield svg_text("axis end", area.right, HEIGHT - 8, x_label)


def _direction_text(axis: Axis, low_arrow: str, high_arrow: str) -> str:
    return f"better {low_arrow if axis.better == 'low' else high_arrow}"


def _limits(plan: Plan, area: PlotArea) -> Iterator[Markup]:
    """Draw lines at the limits of the axes, and shade the area beyond each limit."""
    limit = plan.x.limit
    if limit is not None and area.x.contains(limit):
        x = area.x_at(limit)
        start, end = (x, area.right) if plan.x.better == "low" else (area.left, x)
        yield _shade(start, end, area.top, area.foot)
        yield area.vertical_line("limit", x)
        limit_label = f"limit {format_figure(plan.x.figure, limit)}"
        if x > WIDTH / 2:
            yield svg_text("limit end", x - 5, area.top + 12, limit_label)
        else:
            yield svg_text("limit", x + 5, area.top + 12, limit_label)
    limit = plan.y.limit
    if limit is not None and area.y.contains(limit):
        y = area.y_at(limit)
        top, foot = (y, area.foot) if plan.y.better == "high" else (area.top, y)
        yield _shade(area.left, area.right, top, foot)
        yield area.horizontal_line("limit", y)
        limit_label = f"limit {format_figure(plan.y.figure, limit)}"
        yield svg_text("limit end", area.right, y - 5, limit_label)


def _shade(start: float, end: float, top: float, foot: float) -> Markup:
    return Markup('<rect class="beyond" x="{:g}" y="{:g}" width="{:.1f}" height="{:.1f}"/>').format(
        start, top, max(0, end - start), max(0, foot - top)
    )


def _point_mark(plan: Plan, area: PlotArea, row: Row, color: str, is_on_front: bool) -> Markup:
    x, y = _svg_position(plan, area, row)
    if row.feasibility in ("rejected", "failed"):
        return CROSS.format(x - 3, y - 3)
    css_classes = [color.split()[0]]
    if row.feasibility == "tight":
        css_classes.append("tight")
    if not is_on_front and row.feasibility != "best":
        css_classes.append("faint")
    radius = 4 if is_on_front or row.feasibility == "best" else 3
    return svg_circle(" ".join(css_classes), x, y, radius)


def _best_mark(plan: Plan, area: PlotArea, best: Row) -> Iterator[Markup]:
    x, y = _svg_position(plan, area, best)
    top = y - 8
    if best.confidence is not None and best.confidence.error > 0:
        value = row_figure(best, plan.y.figure) or 0.0
        low, high = value * (1 - best.confidence.error), value * (1 + best.confidence.error)
        # The error bar is cut at the edges of the plot.
        low_y = area.y_at(min(max(low, area.y.low), area.y.high))
        high_y = area.y_at(min(max(high, area.y.low), area.y.high))
        yield Markup('<path class="whisker" d="M{:g} {:g}V{:g}m-4 0h8M{:g} {:g}h8"/>').format(
            x, low_y, high_y, x - 4, low_y
        )
        top = min(top, high_y)
    yield svg_circle("ring", x, y, 8)
    # The name is above the ring and the error bar.
    name = best.name if len(best.name) <= LABEL_MAX else best.name[: LABEL_MAX - 1] + "…"
    label_half_width = 4.2 * min(len(best.name), LABEL_MAX)
    css_class = "named middle"
    if x > area.right - label_half_width:
        css_class = "named end"
    elif x < area.left + label_half_width:
        css_class = "named"
    yield svg_text(css_class, x, top - 7, name)


def _embedded_records(plan: Plan, area: PlotArea, rows: Sequence[Row]) -> str:
    """Return the JSON for pareto.js: position, name, settings and figures of each candidate."""
    figures = ordered_figures(plan)
    settings = list(dict.fromkeys(name for row in rows for name in row.settings))
    columns = [clean_text(name) for name in (*map(setting_label, settings), *map(label, figures))]
    records = [_candidate_record(plan, area, row, settings, figures) for row in rows]
    return json.dumps(
        {"columns": columns, "settings": len(settings), "rows": records}, separators=(",", ":")
    )


def _candidate_record(
    plan: Plan, area: PlotArea, row: Row, settings: Sequence[str], figures: Sequence[str]
) -> list[object]:
    texts = [
        clean_text(format_setting(row.settings[name])) if name in row.settings else ""
        for name in settings
    ]
    texts += [format_table_figure(row, figure) for figure in figures]
    feasibility = "recommended" if row.feasibility == "best" else row.feasibility
    confidence_text = str(row.confidence) if row.confidence is not None else ""
    details = [feasibility, row.group, confidence_text]
    return [
        *_svg_position(plan, area, row),
        clean_text(row.name),
        " · ".join(filter(None, map(clean_text, details))),
        clean_text(row.reason),
        texts,
    ]
