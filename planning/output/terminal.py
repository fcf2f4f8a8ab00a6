"""Terminal report of a plan: verdict, reasons, a candidate table and an ASCII scatter plot.

Texts are wrapped at 100 columns. The command is not wrapped, so that it can be copied.
`planning.figures` formats all figures, and `planning.output.pareto` selects the points and scales.
"""

import textwrap
from collections.abc import Iterator, Sequence

from planning.figures import (
    ACCEPTABLE,
    count_by_feasibility,
    escape_unprintable,
    format_figure,
    format_ledger,
    format_settings,
    format_tick,
    headline,
    label,
    ordered_figures,
    rejections,
    row_figure,
)
from planning.output.pareto import ScatterView, make_scatter_view
from planning.plan import Plan, Row

WIDTH = 100
LABEL_WIDTH = 15
TABLE_ROWS_MAX = 5  # Candidates in the table.
FIGURES_MAX = 6  # Figure columns of the table.
NAME_MAX = 36  # Characters of a candidate's name in the table.
REASONS_MAX = 4  # Reasons that are listed for rejected candidates, and for failed candidates.
PLOT_COLUMNS, PLOT_LINES = 68, 14  # Characters of the plot.
# Marks of the Pareto frontiers of several groups. A single frontier has the mark o.
GROUP_LETTERS = "abcdefgh"


def render_text(plan: Plan) -> str:
    best = plan.best
    lines = _labeled_block("request", plan.request)
    lines += _labeled_block("objective", [plan.objective])
    if best is None:
        lines += _labeled_block("recommended", ["nothing: no candidate fits"])
        lines += _labeled_block("what would fit", plan.advice)
    else:
        lines += _labeled_block("recommended", [_best_line(plan, best)])
        lines += _labeled_block("settings", ["  ".join(format_settings(best))])
        if best.memory is not None:
            lines += _labeled_block("memory", [format_ledger(best.memory)])
    lines += _labeled_block("binding", plan.binding)
    lines += _labeled_block("why not", plan.why_not)
    if best is not None:
        lines += _labeled_block("notes", plan.advice)
    lines += _labeled_block("candidates", list(_count_lines(plan)))
    if any(row.feasibility in ACCEPTABLE for row in plan.rows):
        lines += ["", *candidate_table(plan)]
    scatter_view = make_scatter_view(plan)
    if scatter_view is not None and scatter_view.fronts and len(scatter_view.rows) > 1:
        lines += ["", *ascii_scatter(plan, scatter_view)]
    if plan.command:
        lines += ["", "start with", f"  {escape_unprintable(plan.command)}"]
    return "\n".join(lines) + "\n"


def _best_line(plan: Plan, best: Row) -> str:
    confidence_text = f"   [{best.confidence}]" if best.confidence is not None else ""
    tight = "   (tight: needs over 90 % of the memory)" if _is_tight(best) else ""
    return "   ".join([best.name, *headline(plan, best)]) + confidence_text + tight


def _is_tight(row: Row) -> bool:
    return row.memory is not None and row.memory.verdict == "tight"


def _count_lines(plan: Plan) -> Iterator[str]:
    count_of = count_by_feasibility(plan)
    count_texts = [
        f"{count_of[name]:,} {word}" for name, word in _COUNT_WORDS.items() if count_of[name]
    ]
    yield f"{len(plan.rows):,} tried: {', '.join(count_texts)}" if count_texts else "none"
    for feasibility in ("rejected", "failed"):
        rejection_groups = rejections(plan.rows, feasibility)
        for rejection in rejection_groups[:REASONS_MAX]:
            example_text = (
                f"{rejection.count:,}, for example {rejection.example}"
                if rejection.count > 1
                else rejection.example
            )
            yield f"{feasibility}: {example_text}: {rejection.reason or 'no reason given'}"
        if len(rejection_groups) > REASONS_MAX:
            other_count = sum(rejection.count for rejection in rejection_groups[REASONS_MAX:])
            yield f"{feasibility}: {other_count:,} for other reasons, listed in candidates.csv"


_COUNT_WORDS = {"fits": "fit", "tight": "are tight", "rejected": "rejected", "failed": "failed"}


def _labeled_block(name: str, texts: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for text in filter(None, texts):
        head = name if not lines else ""
        lines += textwrap.wrap(
            escape_unprintable(text),
            WIDTH,
            initial_indent=f"{head:{LABEL_WIDTH}}",
            subsequent_indent=" " * (LABEL_WIDTH + 2),
            drop_whitespace=True,
            break_on_hyphens=False,
        )
    return lines


def candidate_table(plan: Plan, top: int = TABLE_ROWS_MAX) -> list[str]:
    """Format a table of the first `top` feasible candidates.

    The last column compares each candidate with the recommended candidate.
    """
    rows = [row for row in plan.rows if row.feasibility in ACCEPTABLE][:top]
    figures = ordered_figures(plan, rows)[:FIGURES_MAX]
    table_lines = _format_columns(plan, rows, figures)
    # Drop the last figures until the table fits the width.
    while len(figures) > 2 and max(map(len, table_lines)) > WIDTH:
        figures.pop()
        table_lines = _format_columns(plan, rows, figures)
    if any(figure in row.measured for row in rows for figure in figures):
        table_lines.append("m: measured")
    return table_lines


def _format_columns(plan: Plan, rows: Sequence[Row], figures: Sequence[str]) -> list[str]:
    head = ["", *map(label, figures), "vs. best"]
    cells = [
        [
            f"{'*' if row.feasibility == 'best' else ' '} "
            f"{_truncate_name(escape_unprintable(row.name))}",
            *(_figure_text(row, figure) for figure in figures),
            _compare_with_best(plan, row),
        ]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in (head, *cells)) for column in range(len(head))]
    table_lines = []
    for line in (head, *cells):
        first = f"{line[0]:{widths[0]}}"
        other_cells = (f"{text:>{width}}" for text, width in zip(line[1:], widths[1:], strict=True))
        table_lines.append("  ".join([first, *other_cells]).rstrip())
    return table_lines


def _truncate_name(name: str) -> str:
    return name if len(name) <= NAME_MAX else name[: NAME_MAX - 1] + "…"


def _figure_text(row: Row, figure: str) -> str:
    value = row_figure(row, figure)
    text = "–" if value is None else format_figure(figure, value)
    return f"{text} m" if figure in row.measured and value is not None else text


def _compare_with_best(plan: Plan, row: Row) -> str:
    """Compare a candidate with the recommended candidate by the figure of the y axis.

    The text is, for example, "-5 %" or "equal". If the candidate's memory is tight, the text also
    contains "tight".
    """
    best = plan.best
    mark = "tight" if row.feasibility == "tight" else ""
    if best is None or row is best:
        return mark
    amount, best_amount = row_figure(row, plan.y.figure), row_figure(best, plan.y.figure)
    if amount is None or not best_amount:
        return mark
    difference_percent = round(100 * (amount / best_amount - 1))
    difference_text = f"{difference_percent:+d} %" if difference_percent else "equal"
    return f"{difference_text}, {mark}" if mark else difference_text


def ascii_scatter(plan: Plan, scatter_view: ScatterView) -> list[str]:
    """Return the lines of the scatter plot: limits, candidates, axes and legend."""
    cells = [[" "] * PLOT_COLUMNS for _ in range(PLOT_LINES)]
    _draw_limits(plan, scatter_view, cells)
    groups = list(scatter_view.fronts)
    front_marks = {
        id(row): GROUP_LETTERS[index % len(GROUP_LETTERS)] if len(groups) > 1 else "o"
        for index, group in enumerate(groups)
        for row in scatter_view.fronts[group]
    }
    # The most important marks are drawn last, because a mark overwrites an earlier mark.
    for row in sorted(
        scatter_view.rows, key=lambda row: (row.feasibility == "best", id(row) in front_marks)
    ):
        x, y = row_figure(row, plan.x.figure), row_figure(row, plan.y.figure)
        assert x is not None and y is not None  # All rows of a view have both axes' figures.
        column = min(PLOT_COLUMNS - 1, int(scatter_view.x.position(x) * PLOT_COLUMNS))
        line_index = min(PLOT_LINES - 1, int(scatter_view.y.position(y) * PLOT_LINES))
        mark = "*" if row.feasibility == "best" else front_marks.get(id(row), ".")
        is_infeasible = row.feasibility in ("rejected", "failed")
        if is_infeasible and cells[line_index][column] not in " :":
            continue  # An x does not overwrite the mark of another candidate.
        cells[line_index][column] = "x" if is_infeasible else mark
    frame_lines = _frame_plot(plan, scatter_view, cells)
    legend = ["* recommended"] if plan.best is not None else []
    if len(groups) > 1:
        legend += [
            f"{GROUP_LETTERS[n % len(GROUP_LETTERS)]} {name}" for n, name in enumerate(groups)
        ]
    else:
        legend.append("o Pareto frontier")
    if any(
        row.feasibility in ACCEPTABLE and id(row) not in front_marks for row in scatter_view.rows
    ):
        legend.append(". dominated")
    if any(row.feasibility in ("rejected", "failed") for row in scatter_view.rows):
        legend.append("x rejected")
    if any(axis.limit is not None for axis in (plan.x, plan.y)):
        legend.append(": limit")
    # Spaces within a legend entry become NUL characters, at which textwrap does not break lines.
    wrapped_lines = textwrap.wrap(
        "   ".join(escape_unprintable(legend_entry).replace(" ", "\0") for legend_entry in legend),
        WIDTH - 11,
        break_on_hyphens=False,
    )
    legend_lines = [f"{'':11}{line.replace(chr(0), ' ')}" for line in wrapped_lines]
    return [*frame_lines, *legend_lines]


def _draw_limits(plan: Plan, scatter_view: ScatterView, cells: list[list[str]]) -> None:
    if plan.x.limit is not None and scatter_view.x.contains(plan.x.limit):
        column = min(PLOT_COLUMNS - 1, int(scatter_view.x.position(plan.x.limit) * PLOT_COLUMNS))
        for line in cells:
            line[column] = ":"
    if plan.y.limit is not None and scatter_view.y.contains(plan.y.limit):
        line_index = min(PLOT_LINES - 1, int(scatter_view.y.position(plan.y.limit) * PLOT_LINES))
        cells[line_index][:] = [":"] * PLOT_COLUMNS


def _frame_plot(
    plan: Plan, scatter_view: ScatterView, cells: Sequence[Sequence[str]]
) -> Iterator[str]:
    direction_texts = {"low": "less is better", "high": "more is better"}
    yield f"{'':10}{escape_unprintable(plan.y.label)} ({direction_texts[plan.y.better]})"
    y_tick_texts = {
        min(PLOT_LINES - 1, int(scatter_view.y.position(value) * PLOT_LINES)): format_tick(
            plan.y.figure, value
        )
        for value in scatter_view.y.ticks(4)
    }
    for line_index in reversed(range(PLOT_LINES)):
        yield f"{y_tick_texts.get(line_index, ''):>9} |{''.join(cells[line_index])}".rstrip()
    yield f"{'':10}+{'-' * PLOT_COLUMNS}"
    x_tick_line = [" "] * (PLOT_COLUMNS + 24)
    end = 0  # First column at which the next tick label may start.
    for value in scatter_view.x.ticks(5):
        text = format_tick(plan.x.figure, value)
        start = max(0, int(scatter_view.x.position(value) * PLOT_COLUMNS) - len(text) // 2)
        if start >= end:
            x_tick_line[start : start + len(text)] = text
            end = start + len(text) + 2
    yield f"{'':11}{''.join(x_tick_line)}".rstrip()
    yield f"{'':11}{escape_unprintable(plan.x.label)} ({direction_texts[plan.x.better]})"
