"""A plan's candidates as SVG: fronts as lines, what they beat faint, the recommended one ringed.

The picture is text that needs nothing else; a script only reads values off it, from the records
that it carries. Its look is the page's style sheet's, by class names. Knows no plan's meaning.
"""

import json
from collections.abc import Iterator, Sequence
from html import escape

from planning.figures import cell, known, label, name_of, order, say, shown, tick
from planning.output.pareto import View
from planning.plan import Axis, Plan, Row
from ptuning.reporting.markup import Html, cleaned

WIDTH, HEIGHT = 720, 430
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 52, 48  # Margins, which hold the axes' words.
COLOURS = 5  # Of groups; the style sheet's sixth is grey. More groups get dashes.
LABEL_MAX = 44


def draw(plan: Plan, seen: View) -> Html:
    """The svg element."""
    colours = group_colours(seen)
    body = [*_axes(plan, seen), *_limits(plan, seen)]
    for group, rows in seen.fronts.items():
        places = " ".join(f"{x:g},{y:g}" for x, y in (_at(plan, seen, row) for row in rows))
        if len(rows) > 1:
            body.append(f'<polyline class="{colours[group]}" points="{places}"/>')
    ahead = {id(row) for rows in seen.fronts.values() for row in rows}
    # Stable: what is beaten lies under what is not.
    for row in sorted(seen.rows, key=lambda row: (id(row) in ahead, row.standing == "best")):
        body.append(_mark(plan, seen, row, colours.get(row.group, "c5"), id(row) in ahead))
    best = next((row for row in seen.rows if row.standing == "best"), None)
    if best is not None:
        body += _ringed(plan, seen, best)
    body.append('<circle class="at" r="9" visibility="hidden"/>')
    named = f"{plan.y.label} over {plan.x.label}: {len(seen.rows):,} candidates"
    if best is not None:
        named += f"; recommended is {best.name}"
    return Html(
        f'<svg class="chart scatter" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(cleaned(named))}" data-candidates="{escape(_carried(plan, seen))}">'
        f"{''.join(body)}</svg>"
    )


def group_colours(seen: View) -> dict[str, str]:
    return {
        group: f"c{place % COLOURS}{' dashed' if place >= COLOURS else ''}"
        for place, group in enumerate(seen.fronts)
    }


def _at(plan: Plan, seen: View, row: Row) -> tuple[float, float]:
    x, y = known(row, plan.x.figure), known(row, plan.y.figure)
    assert x is not None and y is not None  # A view has no others.
    return _across(seen, x), _up(seen, y)


def _across(seen: View, value: float) -> float:
    return round(LEFT + seen.x.share(value) * (WIDTH - LEFT - RIGHT), 1)


def _up(seen: View, value: float) -> float:
    return round(HEIGHT - BOTTOM - seen.y.share(value) * (HEIGHT - TOP - BOTTOM), 1)


def _axes(plan: Plan, seen: View) -> Iterator[str]:
    for value in seen.y.ticks(5):
        y = _up(seen, value)
        yield f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>'
        said = escape(tick(plan.y.figure, value))
        yield f'<text class="up" x="{LEFT - 8}" y="{y + 4:.1f}">{said}</text>'
    for value in seen.x.ticks(7):
        x, foot = _across(seen, value), HEIGHT - BOTTOM
        yield f'<line class="grid" x1="{x}" y1="{foot}" x2="{x}" y2="{foot + 4}"/>'
        said = escape(tick(plan.x.figure, value))
        yield f'<text class="along" x="{x}" y="{foot + 18}">{said}</text>'
    up = f"{_arrow(plan.y, '↓', '↑')} {plan.y.label}"
    yield f'<text class="axis" x="{LEFT}" y="16">{escape(cleaned(up))}</text>'
    along = f"{_arrow(plan.x, '←', '→')} {plan.x.label}"
    x, y = WIDTH - RIGHT, HEIGHT - 8
    yield f'<text class="axis end" x="{x}" y="{y}">{escape(cleaned(along))}</text>'


def _arrow(axis: Axis, low: str, high: str) -> str:
    return f"better {low if axis.better == 'low' else high}"


def _limits(plan: Plan, seen: View) -> Iterator[str]:
    """Lines at what was asked for, with what lies beyond them shaded."""
    foot, end = HEIGHT - BOTTOM, WIDTH - RIGHT
    limit = plan.x.limit
    if limit is not None and seen.x.has(limit):
        x = _across(seen, limit)
        start, width = (x, end - x) if plan.x.better == "low" else (LEFT, x - LEFT)
        yield (
            f'<rect class="beyond" x="{start:g}" y="{TOP}" width="{max(0, width):.1f}" '
            f'height="{foot - TOP}"/><line class="limit" x1="{x}" y1="{TOP}" x2="{x}" y2="{foot}"/>'
        )
        said = escape(f"limit {say(plan.x.figure, limit)}")
        side = "end" if x > WIDTH / 2 else ""
        nudge = -5 if side else 5
        yield f'<text class="limit {side}" x="{x + nudge:g}" y="{TOP + 12}">{said}</text>'
    limit = plan.y.limit
    if limit is not None and seen.y.has(limit):
        y = _up(seen, limit)
        start, height = (y, foot - y) if plan.y.better == "high" else (TOP, y - TOP)
        yield (
            f'<rect class="beyond" x="{LEFT}" y="{start:g}" width="{end - LEFT}" '
            f'height="{max(0, height):.1f}"/>'
            f'<line class="limit" x1="{LEFT}" y1="{y}" x2="{end}" y2="{y}"/>'
        )
        said = escape(f"limit {say(plan.y.figure, limit)}")
        yield f'<text class="limit end" x="{end}" y="{y - 5:g}">{said}</text>'


def _mark(plan: Plan, seen: View, row: Row, colour: str, ahead: bool) -> str:
    x, y = _at(plan, seen, row)
    colour = colour.split()[0]
    if row.standing in ("rejected", "failed"):
        return f'<path class="no" d="M{x - 3:g} {y - 3:g}l6 6m0-6l-6 6"/>'
    kinds = [colour]
    if row.standing == "tight":
        kinds.append("tight")
    if not ahead and row.standing != "best":
        kinds.append("faint")
    radius = 4 if ahead or row.standing == "best" else 3
    return f'<circle class="{" ".join(kinds)}" cx="{x:g}" cy="{y:g}" r="{radius}"/>'


def _ringed(plan: Plan, seen: View, best: Row) -> Iterator[str]:
    x, y = _at(plan, seen, best)
    top = y - 8
    if best.trust is not None and best.trust.error > 0:
        value = known(best, plan.y.figure) or 0.0
        low, high = value * (1 - best.trust.error), value * (1 + best.trust.error)
        foot, end = (_up(seen, min(max(one, seen.y.low), seen.y.high)) for one in (low, high))
        yield f'<path class="whisker" d="M{x:g} {foot:g}V{end:g}m-4 0h8M{x - 4:g} {foot:g}h8"/>'
        top = min(top, end)
    yield f'<circle class="ring" cx="{x:g}" cy="{y:g}" r="8"/>'
    # Above it, where there is least: the best lies at an edge of what there is.
    room = 4.2 * min(len(best.name), LABEL_MAX)
    side = "end" if x > WIDTH - RIGHT - room else "" if x < LEFT + room else "middle"
    name = best.name if len(best.name) <= LABEL_MAX else best.name[: LABEL_MAX - 1] + "…"
    yield (f'<text class="named {side}" x="{x:g}" y="{top - 7:g}">{escape(cleaned(name))}</text>')


def _carried(plan: Plan, seen: View) -> str:
    """What a pointer reads: of each candidate where it is, and all that is known of it."""
    figures = order(plan)
    settings = list(dict.fromkeys(name for row in seen.rows for name in row.settings))
    columns = [cleaned(name) for name in (*map(name_of, settings), *map(label, figures))]
    rows = [_record(plan, seen, row, settings, figures) for row in seen.rows]
    return json.dumps(
        {"columns": columns, "settings": len(settings), "rows": rows}, separators=(",", ":")
    )


def _record(
    plan: Plan, seen: View, row: Row, settings: Sequence[str], figures: Sequence[str]
) -> list[object]:
    values = [
        cleaned(cell(row.settings[name])) if name in row.settings else "" for name in settings
    ]
    values += [shown(row, figure) for figure in figures]
    standing = "recommended" if row.standing == "best" else row.standing
    trust = str(row.trust) if row.trust is not None else ""
    about = [standing, row.group, trust]
    said = " · ".join(filter(None, map(cleaned, about)))
    return [*_at(plan, seen, row), cleaned(row.name), said, cleaned(row.reason), values]
