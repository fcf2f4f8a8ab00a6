"""A plan on a terminal: the verdict first, then why, then what else there was, as plain text.

It fits a hundred columns, but for the command, which is to be copied. Every figure comes from
planning/figures.py, every point from pareto.py; nothing is computed here.
"""

import textwrap
from collections.abc import Iterator, Sequence

from planning.figures import (
    ACCEPTABLE,
    counts,
    headline,
    known,
    label,
    ledger_of,
    order,
    rejections,
    say,
    settings_of,
    tick,
    visible,
)
from planning.output.pareto import View, view
from planning.plan import Plan, Row

WIDTH = 100
LABEL = 15
TOP = 5  # Candidates in the table.
COLUMNS_MAX = 6  # Figures in it.
NAME_MAX = 36
REASONS = 4
ACROSS, UP = 68, 14  # Characters of the plot.
LETTERS = "abcdefgh"  # A group's front, where there are several.


def tell(plan: Plan) -> str:
    best = plan.best
    lines = _block("asked", plan.asked)
    lines += _block("objective", [plan.objective])
    if best is None:
        lines += _block("recommended", ["nothing: no candidate fits"])
        lines += _block("what would fit", plan.advice)
    else:
        lines += _block("recommended", [_recommended(plan, best)])
        lines += _block("settings", ["  ".join(settings_of(best))])
        if best.memory is not None:
            lines += _block("memory", [ledger_of(best.memory)])
    lines += _block("binding", plan.binding)
    lines += _block("why not", plan.why_not)
    if best is not None:
        lines += _block("worth knowing", plan.advice)
    lines += _block("candidates", list(_tally(plan)))
    lines += ["", *table(plan)] if any(row.standing in ACCEPTABLE for row in plan.rows) else []
    seen = view(plan)
    if seen is not None and seen.fronts and len(seen.rows) > 1:
        lines += ["", *picture(plan, seen)]
    if plan.command:
        lines += ["", "start with", f"  {visible(plan.command)}"]
    return "\n".join(lines) + "\n"


def _recommended(plan: Plan, best: Row) -> str:
    trust = f"   [{best.trust}]" if best.trust is not None else ""
    tight = "   (tight: over nine tenths of the memory)" if _is_tight(best) else ""
    return "   ".join([best.name, *headline(plan, best)]) + trust + tight


def _is_tight(row: Row) -> bool:
    return row.memory is not None and row.memory.verdict == "tight"


def _tally(plan: Plan) -> Iterator[str]:
    many = counts(plan)
    said = [f"{many[name]:,} {word}" for name, word in _STANDINGS.items() if many[name]]
    yield f"{len(plan.rows):,} looked at: {', '.join(said)}" if said else "none"
    for standing in ("rejected", "failed"):
        found = rejections(plan.rows, standing)
        for one in found[:REASONS]:
            of = f"{one.count:,} such as {one.example}" if one.count > 1 else one.example
            yield f"{standing}: {of}: {one.reason or 'no reason was given'}"
        if len(found) > REASONS:
            rest = sum(one.count for one in found[REASONS:])
            yield f"{standing}: {rest:,} for other reasons, which candidates.csv has"


_STANDINGS = {"fits": "fit", "tight": "are tight", "rejected": "rejected", "failed": "failed"}


def _block(name: str, texts: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for text in filter(None, texts):
        head = name if not lines else ""
        lines += textwrap.wrap(
            visible(text),
            WIDTH,
            initial_indent=f"{head:{LABEL}}",
            subsequent_indent=" " * (LABEL + 2),
            drop_whitespace=True,
            break_on_hyphens=False,
        )
    return lines


def table(plan: Plan, top: int = TOP) -> list[str]:
    """The first candidates that can be had; the last column compares with the recommended one."""
    rows = [row for row in plan.rows if row.standing in ACCEPTABLE][:top]
    figures = order(plan, rows)[:COLUMNS_MAX]
    made = _columns(plan, rows, figures)
    while len(figures) > 2 and max(map(len, made)) > WIDTH:
        figures.pop()
        made = _columns(plan, rows, figures)
    if any(figure in row.measured for row in rows for figure in figures):
        made.append("m: measured")
    return made


def _columns(plan: Plan, rows: Sequence[Row], figures: Sequence[str]) -> list[str]:
    head = ["", *map(label, figures), "beside it"]
    cells = [
        [
            f"{'*' if row.standing == 'best' else ' '} {_cut(visible(row.name))}",
            *(_said(row, figure) for figure in figures),
            _beside(plan, row),
        ]
        for row in rows
    ]
    widths = [max(len(line[place]) for line in (head, *cells)) for place in range(len(head))]
    made = []
    for line in (head, *cells):
        first = f"{line[0]:{widths[0]}}"
        others = (f"{text:>{width}}" for text, width in zip(line[1:], widths[1:], strict=True))
        made.append("  ".join([first, *others]).rstrip())
    return made


def _cut(name: str) -> str:
    return name if len(name) <= NAME_MAX else name[: NAME_MAX - 1] + "…"


def _said(row: Row, figure: str) -> str:
    value = known(row, figure)
    text = "–" if value is None else say(figure, value)
    return f"{text} m" if figure in row.measured and value is not None else text


def _beside(plan: Plan, row: Row) -> str:
    """How far from the recommended one, on the axis that goes up."""
    best = plan.best
    mark = "tight" if row.standing == "tight" else ""
    if best is None or row is best:
        return mark
    here, there = known(row, plan.y.figure), known(best, plan.y.figure)
    if here is None or not there:
        return mark
    off = round(100 * (here / there - 1))
    said = f"{off:+d} %" if off else "equal"
    return f"{said}, {mark}" if mark else said


def picture(plan: Plan, seen: View) -> list[str]:
    """All candidates as characters: fronts, what they beat, and the recommended one."""
    cells = [[" "] * ACROSS for _ in range(UP)]
    _limits(plan, seen, cells)
    groups = list(seen.fronts)
    letters = {
        id(row): LETTERS[place % len(LETTERS)] if len(groups) > 1 else "o"
        for place, group in enumerate(groups)
        for row in seen.fronts[group]
    }
    # The least important first, so that what comes later stands over it.
    for row in sorted(seen.rows, key=lambda row: (row.standing == "best", id(row) in letters)):
        x, y = known(row, plan.x.figure), known(row, plan.y.figure)
        assert x is not None and y is not None  # A view has no others.
        across = min(ACROSS - 1, int(seen.x.share(x) * ACROSS))
        up = min(UP - 1, int(seen.y.share(y) * UP))
        mark = "*" if row.standing == "best" else letters.get(id(row), ".")
        if row.standing in ("rejected", "failed"):
            mark = "x" if cells[up][across] in " :" else cells[up][across]
        cells[up][across] = mark
    framed = _framed(plan, seen, cells)
    legend = ["* recommended"] if plan.best is not None else []
    if len(groups) > 1:
        legend += [f"{LETTERS[n % len(LETTERS)]} {name}" for n, name in enumerate(groups)]
    else:
        legend.append("o not beaten")
    if any(row.standing in ACCEPTABLE and id(row) not in letters for row in seen.rows):
        legend.append(". beaten")
    if any(row.standing in ("rejected", "failed") for row in seen.rows):
        legend.append("x rejected")
    if any(axis.limit is not None for axis in (plan.x, plan.y)):
        legend.append(": limit")
    # What belongs together stays on one line.
    told = textwrap.wrap(
        "   ".join(visible(one).replace(" ", "\0") for one in legend),
        WIDTH - 11,
        break_on_hyphens=False,
    )
    told = [f"{'':11}{one.replace(chr(0), ' ')}" for one in told]
    return [*framed, *told]


def _limits(plan: Plan, seen: View, cells: list[list[str]]) -> None:
    if plan.x.limit is not None and seen.x.has(plan.x.limit):
        across = min(ACROSS - 1, int(seen.x.share(plan.x.limit) * ACROSS))
        for line in cells:
            line[across] = ":"
    if plan.y.limit is not None and seen.y.has(plan.y.limit):
        cells[min(UP - 1, int(seen.y.share(plan.y.limit) * UP))][:] = [":"] * ACROSS


def _framed(plan: Plan, seen: View, cells: Sequence[Sequence[str]]) -> Iterator[str]:
    ways = {"low": "less is better", "high": "more is better"}
    yield f"{'':10}{visible(plan.y.label)} ({ways[plan.y.better]})"
    ups = {
        min(UP - 1, int(seen.y.share(value) * UP)): tick(plan.y.figure, value)
        for value in seen.y.ticks(4)
    }
    for up in reversed(range(UP)):
        yield f"{ups.get(up, ''):>9} |{''.join(cells[up])}".rstrip()
    yield f"{'':10}+{'-' * ACROSS}"
    below = [" "] * (ACROSS + 24)
    end = 0
    for value in seen.x.ticks(5):
        text = tick(plan.x.figure, value)
        start = max(0, int(seen.x.share(value) * ACROSS) - len(text) // 2)
        if start >= end:
            below[start : start + len(text)] = text
            end = start + len(text) + 2
    yield f"{'':11}{''.join(below)}".rstrip()
    yield f"{'':11}{visible(plan.x.label)} ({ways[plan.x.better]})"
