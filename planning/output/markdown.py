"""Markdown report of a plan (report.md): verdict, reasons, candidates and rejections as tables.

The report is meant for a ticket or a pull request. It has the content of the terminal report except
the plot, and lists the other files of the plan. Texts of the plan are escaped or in code blocks, so
they cannot act as markup.
"""

from collections.abc import Iterator, Sequence

from planning.figures import (
    ACCEPTABLE,
    Rejection,
    count_by_feasibility,
    escape_unprintable,
    format_ledger,
    format_settings,
    format_table_figure,
    headline,
    label,
    ordered_figures,
    rejections,
)
from planning.plan import Plan, Row

TABLE_ROWS_MAX = 10  # Candidates in the table.
FIGURES_MAX = 6  # Figure columns of the table.
REASONS_MAX = 12  # Rows of the table of rejected candidates, and of failed candidates.
SOURCE_TEXTS = {
    "spec-sheet": "from specification sheets and constants fitted to published measurements",
    "calibrated": "from microbenchmarks on the target machine",
    "measured": "from a run of this configuration",
}


def render_markdown(plan: Plan) -> str:
    lines = [f"# Plan for {_escape_markdown(plan.title)}", "", *_bullet_list(plan.request)]
    lines += [
        f"- objective: {_escape_markdown(plan.objective)}",
        "",
        "## Verdict",
        "",
        *_verdict_lines(plan),
    ]
    advice_heading = "What would fit" if plan.best is None else "Notes"
    for heading, texts in (
        ("Binding limits", plan.binding),
        ("Why not the alternatives", plan.why_not),
        (advice_heading, plan.advice),
    ):
        if texts:
            lines += ["", f"## {heading}", "", *_bullet_list(texts)]
    feasible_rows = [row for row in plan.rows if row.feasibility in ACCEPTABLE]
    if feasible_rows:
        lines += ["", "## Candidates", "", *_candidate_table(plan, feasible_rows[:TABLE_ROWS_MAX])]
    count_of = count_by_feasibility(plan)
    count_texts = ", ".join(f"{count:,} {name}" for name, count in count_of.items() if count)
    lines += [
        "",
        f"{len(plan.rows):,} candidates were tried: {count_texts}."
        if count_texts
        else "No candidate was tried.",
    ]
    for feasibility in ("rejected", "failed"):
        rejection_groups = rejections(plan.rows, feasibility)
        if rejection_groups:
            lines += ["", f"## {feasibility.capitalize()}", "", *_rejection_table(rejection_groups)]
    if plan.command:
        lines += ["", "## Start", "", *_code_block(plan.command)]
    if plan.settings_yaml:
        lines += ["", *_code_block(plan.settings_yaml, "yaml")]
    lines += ["", "## Files", "", *_files()]
    return "\n".join(lines) + "\n"


def _verdict_lines(plan: Plan) -> Iterator[str]:
    best = plan.best
    if best is None:
        yield "**Nothing fits.**"
        return
    yield f"**{_escape_markdown(best.name)}**: {_escape_markdown(', '.join(headline(plan, best)))}"
    yield ""
    if best.settings:
        yield f"- settings: {_escape_markdown(', '.join(format_settings(best)))}"
    if best.memory is not None:
        yield f"- memory of the fullest device: {_escape_markdown(format_ledger(best.memory))}"
    if best.confidence is not None:
        yield f"- {_escape_markdown(str(best.confidence))}: {SOURCE_TEXTS[best.confidence.source]}"


def _candidate_table(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    figures = ordered_figures(plan, rows)[:FIGURES_MAX]
    head = ["", *map(label, figures), "memory", "confidence"]
    yield _table_line(head)
    yield _table_line(["---", *("---:" for _ in figures), "---", "---"])
    for row in rows:
        bold = "**" if row.feasibility == "best" else ""
        values = [_escape_markdown(format_table_figure(row, figure)) or "–" for figure in figures]
        confidence_text = (
            _escape_markdown(str(row.confidence)) if row.confidence is not None else ""
        )
        feasibility = "tight" if row.feasibility == "tight" else "fits"
        yield _table_line(
            [f"{bold}{_escape_markdown(row.name)}{bold}", *values, feasibility, confidence_text]
        )


def _rejection_table(rejection_groups: Sequence[Rejection]) -> Iterator[str]:
    yield _table_line(["count", "example", "reason"])
    yield _table_line(["---:", "---", "---"])
    for rejection in rejection_groups[:REASONS_MAX]:
        reason_text = _escape_markdown(rejection.reason or "no reason given")
        yield _table_line(
            [f"{rejection.count:,}", _escape_markdown(rejection.example), reason_text]
        )


def _files() -> Iterator[str]:
    yield "- `candidates.csv`: all candidates with figures, memory and reasons"
    yield "- `pareto.csv`: the candidates on the Pareto frontier"
    yield "- `pareto.html`, `pareto.png`: plots of the candidates and of the Pareto frontier"
    yield "- `failed.csv`: candidates that were run and failed"
    yield "- `plan.json`: the whole plan, for reading by programs"


def _bullet_list(texts: Sequence[str]) -> list[str]:
    return [f"- {_escape_markdown(text)}" for text in texts if text]


def _table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape_markdown(text: str) -> str:
    """Escape a text for one line of Markdown."""
    return "".join(f"\\{c}" if c in "\\`*_|<>[]#" else c for c in escape_unprintable(text))


def _code_block(text: str, language: str = "") -> list[str]:
    lines = [escape_unprintable(raw_line) for raw_line in text.split("\n")]
    # The fence is longer than the backticks at the start of any line, so no line ends the block.
    stripped_lines = [line.strip() for line in lines]
    backticks_max = max(len(line) - len(line.lstrip("`")) for line in stripped_lines)
    fence = "`" * max(3, backticks_max + 1)
    while lines and not lines[-1]:
        lines.pop()
    return [f"{fence}{language}", *lines, fence]
