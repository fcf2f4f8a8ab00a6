"""report.md: a plan as a page of Markdown, for a ticket or a pull request.

It says what the terminal says, in tables, and which file has the rest. Texts of a plan are put so
that none of them is markup. Knows no files but their names.
"""

from collections.abc import Iterator, Sequence

from planning.figures import (
    ACCEPTABLE,
    Rejection,
    counts,
    headline,
    label,
    ledger_of,
    order,
    rejections,
    settings_of,
    shown,
    visible,
)
from planning.plan import Plan, Row

TOP = 10
FIGURES_MAX = 6
REASONS_MAX = 12
TRUSTS = {
    "spec-sheet": "from spec sheets, by constants that were fitted to published measurements",
    "calibrated": "from short measurements on the machine that was planned for",
    "measured": "from running the very thing",
}


def report(plan: Plan) -> str:
    lines = [f"# Plan for {_plain(plan.title)}", "", *_points(plan.asked)]
    lines += [f"- objective: {_plain(plan.objective)}", "", "## Verdict", "", *_verdict(plan)]
    advice = "What would fit" if plan.best is None else "Worth knowing"
    for name, texts in (
        ("What binds", plan.binding),
        ("Why not others", plan.why_not),
        (advice, plan.advice),
    ):
        if texts:
            lines += ["", f"## {name}", "", *_points(texts)]
    usable = [row for row in plan.rows if row.standing in ACCEPTABLE]
    if usable:
        lines += ["", "## Candidates", "", *_table(plan, usable[:TOP])]
    many = counts(plan)
    told = ", ".join(f"{count:,} {name}" for name, count in many.items() if count)
    lines += ["", f"{len(plan.rows):,} were looked at: {told}." if told else "None was looked at."]
    for standing in ("rejected", "failed"):
        found = rejections(plan.rows, standing)
        if found:
            lines += ["", f"## {standing.capitalize()}", "", *_reasons(found)]
    if plan.command:
        lines += ["", "## Start", "", *_fenced(plan.command)]
    if plan.settings_yaml:
        lines += ["", *_fenced(plan.settings_yaml, "yaml")]
    lines += ["", "## Files", "", *_files()]
    return "\n".join(lines) + "\n"


def _verdict(plan: Plan) -> Iterator[str]:
    best = plan.best
    if best is None:
        yield "**Nothing fits.**"
        return
    yield f"**{_plain(best.name)}**: {_plain(', '.join(headline(plan, best)))}"
    yield ""
    if best.settings:
        yield f"- settings: {_plain(', '.join(settings_of(best)))}"
    if best.memory is not None:
        yield f"- memory of the fullest device: {_plain(ledger_of(best.memory))}"
    if best.trust is not None:
        yield f"- {_plain(str(best.trust))}: {TRUSTS[best.trust.source]}"


def _table(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    figures = order(plan, rows)[:FIGURES_MAX]
    head = ["", *map(label, figures), "memory", "trust"]
    yield _line(head)
    yield _line(["---", *("---:" for _ in figures), "---", "---"])
    for row in rows:
        bold = "**" if row.standing == "best" else ""
        values = [_plain(shown(row, figure)) or "–" for figure in figures]
        trust = _plain(str(row.trust)) if row.trust is not None else ""
        standing = "tight" if row.standing == "tight" else "fits"
        yield _line([f"{bold}{_plain(row.name)}{bold}", *values, standing, trust])


def _reasons(found: Sequence[Rejection]) -> Iterator[str]:
    yield _line(["how many", "such as", "why"])
    yield _line(["---:", "---", "---"])
    for one in found[:REASONS_MAX]:
        why = _plain(one.reason or "no reason was given")
        yield _line([f"{one.count:,}", _plain(one.example), why])


def _files() -> Iterator[str]:
    yield "- `candidates.csv`: every candidate, with its figures, its memory, and its reason"
    yield "- `pareto.csv`, `pareto.html`, `pareto.png`: those that no other beats"
    yield "- `failed.csv`: what was run, and failed"
    yield "- `plan.json`: all of this, for programs"


def _points(texts: Sequence[str]) -> list[str]:
    return [f"- {_plain(text)}" for text in texts if text]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """On one line, with nothing that Markdown would take for its own."""
    return "".join(f"\\{c}" if c in "\\`*_|<>[]#" else c for c in visible(text))


def _fenced(text: str, kind: str = "") -> list[str]:
    lines = [visible(one) for one in text.split("\n")]
    longest = max((len(one) - len(one.lstrip("`")) for one in map(str.strip, lines)), default=0)
    fence = "`" * max(3, longest + 1)
    while lines and not lines[-1]:
        lines.pop()
    return [f"{fence}{kind}", *lines, fence]
