"""HTML page of a plan (pareto.html): verdict, reasons, interactive scatter plot and tables.

The page shows, in this order: the verdict, its reasons, a scatter plot whose points show details of
their candidates, memory bars, and tables. This module selects and formats the content as plain
values; templates/pareto.html arranges it, with the layout and the style sheet of the tuning report.
Without JavaScript, only the details of points, sorting and filtering are missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from markupsafe import Markup

from planning.figures import (
    ACCEPTABLE,
    HEADLINE_MAX,
    LEDGER_PARTS,
    Rejection,
    count_by_feasibility,
    format_bytes,
    format_figure,
    format_setting,
    format_settings,
    format_table_figure,
    label,
    ordered_figures,
    rejections,
    row_figure,
    setting_label,
)
from planning.memory_ledger import FITS_SHARE, MemoryLedger
from planning.output.pareto import ScatterView, make_scatter_view
from planning.output.svg_scatter import legend_entries, render_svg
from planning.plan import Plan, Row
from ptuning.reporting.html_template import PageTemplate
from ptuning.reporting.svg_chart import LegendEntry

PAGE = PageTemplate(
    "planning.output", "pareto.html", ("report.css", "pareto.css"), script="pareto.js"
)
TABLE_MAX = 200  # Candidates in the table; candidates.csv contains all.
FIGURES_MAX = 8  # Figure columns of the table.
BARS_MAX = 8  # Memory bars.
OVERSIZED_BARS_MAX = 2  # Memory bars of candidates that do not fit.
# Memory bars count as equal if their parts are equal after rounding to multiples of this fraction
# of the capacity.
MEMORY_BAR_STEP = 0.03
# The scale of the memory bars ends at most at this multiple of the largest capacity.
MEMORY_BAR_SCALE_MAX = 1.25
MEMORY_BAR_UNITS = 1000  # Width of the scale in units of the SVG.
REASONS_MAX = 20  # Rows of the table of rejected candidates, and of failed candidates.


@dataclass(frozen=True)
class Tile:
    """A figure of the recommended candidate."""

    name: str
    value: str
    hint: str | None


@dataclass(frozen=True)
class PlanVerdict:
    pill: str  # A few words for the header of the page.
    is_feasible: bool
    sentences: Sequence[str]  # The recommended candidate, or why nothing fits.
    settings: Sequence[str]  # Lines below the sentences.
    tiles: Sequence[Tile]


@dataclass(frozen=True)
class CandidatePanel:
    """The details of the recommended candidate.

    pareto.js replaces them with the details of the candidate that the user selects.
    """

    name: str
    about: str  # Feasibility, group and confidence.
    reason: str
    settings: Sequence[tuple[str, str]]
    figures: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ScatterSection:
    title: str
    svg: Markup
    legend: Sequence[LegendEntry]
    hint: str
    panel: CandidatePanel | None


@dataclass(frozen=True)
class MemoryBar:
    name: str
    svg: Markup
    text: str
    is_best: bool


@dataclass(frozen=True)
class MemorySection:
    bars: Sequence[MemoryBar]
    legend: Sequence[LegendEntry]
    fits_percent: str


@dataclass(frozen=True)
class FigureCell:
    text: str
    sort_value: str | None = None  # None: the candidate does not have the figure.
    is_measured: bool = False


@dataclass(frozen=True)
class CandidateLine:
    name: str
    group: str
    cells: Sequence[FigureCell]
    standing: str
    source: str
    is_best: bool
    point_index: int | None  # The candidate's index in the plot; None: the plot omits it.


@dataclass(frozen=True)
class CandidateTable:
    columns: Sequence[str]
    lines: Sequence[CandidateLine]
    has_groups: bool
    hint: str | None


@dataclass(frozen=True)
class RejectionTable:
    title: str
    rejections: Sequence[Rejection]


@dataclass(frozen=True)
class PlanView:
    """All texts and figures of the page, in the order of the page."""

    plan: Plan
    heading: str
    subtitle: str
    verdict: PlanVerdict
    reasons: Mapping[str, Sequence[str]]
    scatter: ScatterSection | None
    memory: MemorySection | None
    candidates: CandidateTable | None
    rejections: Sequence[RejectionTable]


def render_html(plan: Plan, written: datetime | None = None) -> str:
    """Render the complete page, pareto.html."""
    return PAGE.render(_plan_view(plan), written)


def _plan_view(plan: Plan) -> PlanView:
    scatter_view = make_scatter_view(plan)
    return PlanView(
        plan,
        heading=f"{plan.title[:1].upper()}{plan.title[1:]} plan",
        subtitle=plan.request[0] if plan.request else plan.objective,
        verdict=_verdict(plan),
        reasons=_reasons(plan),
        scatter=_scatter_section(plan, scatter_view) if scatter_view is not None else None,
        memory=_memory_section(plan),
        candidates=_candidate_table(plan, scatter_view),
        rejections=_rejection_tables(plan),
    )


def _verdict(plan: Plan) -> PlanVerdict:
    best = plan.best
    if best is None:
        reason = plan.binding[0] if plan.binding else "Every candidate was rejected."
        return PlanVerdict("Nothing fits", False, ("No configuration fits.", reason), (), ())
    settings = [" · ".join(format_settings(best))] if best.settings else []
    pill = "recommended"
    if best.confidence is not None:
        settings.append(f"All figures: {best.confidence}.")
        pill = str(replace(best.confidence, note=""))  # The note is too long for the header.
    figures = ordered_figures(plan, [best])[:HEADLINE_MAX]
    tiles = [_figure_tile(best, figure) for figure in figures]
    return PlanVerdict(pill, True, (best.name,), settings, tiles)


def _figure_tile(row: Row, figure: str) -> Tile:
    value = row_figure(row, figure)
    assert value is not None  # `ordered_figures` returns only figures that the row has.
    hint = None
    predicted = row.figures.get(figure)
    if figure in row.measured:
        hint = "measured"
        if predicted is not None:
            error_percent = 100 * (predicted / value - 1) if value else 0.0
            hint += f"; predicted {format_figure(figure, predicted)}, {error_percent:+.0f} %"
    return Tile(label(figure), format_figure(figure, value), hint)


def _reasons(plan: Plan) -> Mapping[str, Sequence[str]]:
    sections = {
        "Binding limits": plan.binding,
        "Why not the alternatives": plan.why_not,
        "What would fit" if plan.best is None else "Notes": plan.advice,
    }
    return {name: texts for name, texts in sections.items() if texts}


def _scatter_section(plan: Plan, scatter_view: ScatterView) -> ScatterSection:
    hint = "Point at a candidate, or use the arrow keys, to see its details; click to keep them."
    if scatter_view.hidden_count:
        hint += f" {scatter_view.hidden_count:,} other feasible candidates are not drawn."
    return ScatterSection(
        f"{plan.y.label} over {plan.x.label}",
        render_svg(plan, scatter_view),
        legend_entries(plan, scatter_view),
        hint,
        _candidate_panel(plan, plan.best) if plan.best is not None else None,
    )


def _candidate_panel(plan: Plan, row: Row) -> CandidatePanel:
    feasibility = "recommended" if row.feasibility == "best" else row.feasibility
    confidence_text = str(row.confidence) if row.confidence is not None else ""
    figures = ordered_figures(plan, [row])
    return CandidatePanel(
        row.name,
        " · ".join(filter(None, (feasibility, row.group, confidence_text))),
        row.reason,
        [(setting_label(name), format_setting(value)) for name, value in row.settings.items()],
        [(label(figure), format_table_figure(row, figure)) for figure in figures],
    )


def _memory_section(plan: Plan) -> MemorySection | None:
    """Build memory bars of feasible candidates, and of candidates that do not fit in memory.

    At most OVERSIZED_BARS_MAX bars are of candidates that do not fit. Candidates whose bars would
    look equal share one bar.
    """
    ledgers = _distinct_memories([row for row in plan.rows if row.feasibility in ACCEPTABLE])
    oversized_ledgers = _distinct_memories(
        [row for row in plan.rows if row.memory and row.memory.verdict == "over"]
    )[:OVERSIZED_BARS_MAX]
    ledgers = ledgers[: BARS_MAX - len(oversized_ledgers)] + oversized_ledgers
    if not ledgers:
        return None
    capacity = max(memory.capacity for _, memory in ledgers)
    scale_bytes = min(
        max(capacity, *(memory.total for _, memory in ledgers)), MEMORY_BAR_SCALE_MAX * capacity
    )
    bars = [
        MemoryBar(
            row.name,
            _memory_bar(memory, scale_bytes),
            f"{format_bytes(memory.total)} of {format_bytes(memory.capacity)}",
            row.feasibility == "best",
        )
        for row, memory in ledgers
    ]
    swatch = Markup('<rect class="m{}" x="4" width="12" height="10" rx="2"/>')
    legend = [
        LegendEntry(swatch.format(index), setting_label(name))
        for index, name in enumerate(LEDGER_PARTS)
        if any(getattr(memory, name) for _, memory in ledgers)
    ]
    return MemorySection(bars, legend, f"{100 * FITS_SHARE:.0f} %")


def _distinct_memories(rows: Sequence[Row]) -> list[tuple[Row, MemoryLedger]]:
    """Return rows with their ledgers; of rows with equal memory bars, only the first."""
    row_by_shares: dict[tuple[int, ...], tuple[Row, MemoryLedger]] = {}
    for row in rows:
        if row.memory is not None:
            parts = (getattr(row.memory, name) / row.memory.capacity for name in LEDGER_PARTS)
            row_by_shares.setdefault(
                tuple(round(share / MEMORY_BAR_STEP) for share in parts), (row, row.memory)
            )
    return list(row_by_shares.values())


def _memory_bar(memory: MemoryLedger, scale_bytes: float) -> Markup:
    scale = MEMORY_BAR_UNITS / scale_bytes
    marks = [
        Markup('<rect class="well" width="{:.1f}" height="14"/>').format(memory.capacity * scale)
    ]
    start = 0.0
    for index, name in enumerate(LEDGER_PARTS):
        part_bytes = getattr(memory, name)
        width = part_bytes * scale
        if width > 0:
            marks.append(
                Markup(
                    '<rect class="m{}" x="{:.1f}" width="{:.1f}" height="14">'
                    "<title>{} {}</title></rect>"
                ).format(
                    index, start, max(1.0, width - 2), setting_label(name), format_bytes(part_bytes)
                )
            )
        start += width
    for share, css_class in ((FITS_SHARE, "fits"), (1.0, "full")):
        x = memory.capacity * share * scale
        marks.append(
            Markup('<line class="{}" x1="{:.1f}" x2="{:.1f}" y1="-3" y2="17"/>').format(
                css_class, x, x
            )
        )
    return Markup(
        '<svg viewBox="0 -3 1001 20" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(
        f"{format_bytes(memory.total)} of {format_bytes(memory.capacity)}", Markup("").join(marks)
    )


def _candidate_table(plan: Plan, scatter_view: ScatterView | None) -> CandidateTable | None:
    rows = [row for row in plan.rows if row.feasibility in ACCEPTABLE][:TABLE_MAX]
    if not rows:
        return None
    figures = ordered_figures(plan, rows)[:FIGURES_MAX]
    has_groups = len({row.group for row in rows}) > 1
    plotted = scatter_view.rows if scatter_view is not None else ()
    point_index = {id(row): index for index, row in enumerate(plotted)}
    group_column = ["Group"] if has_groups else []
    columns = ["Candidate", *group_column, *map(label, figures), "Standing", "Source"]
    lines = [
        CandidateLine(
            row.name,
            row.group,
            [_figure_cell(row, figure) for figure in figures],
            "fits" if row.feasibility == "best" else row.feasibility,
            row.confidence.source if row.confidence is not None else "",
            row.feasibility == "best",
            point_index.get(id(row)),
        )
        for row in rows
    ]
    count_of = count_by_feasibility(plan)
    total = count_of["fits"] + count_of["tight"]
    hint = f"The first {len(rows):,} of {total:,}; candidates.csv contains all."
    return CandidateTable(columns, lines, has_groups, hint if total > len(rows) else None)


def _figure_cell(row: Row, figure: str) -> FigureCell:
    value = row_figure(row, figure)
    if value is None:
        return FigureCell("–")
    return FigureCell(format_figure(figure, value), f"{value:.9g}", figure in row.measured)


def _rejection_tables(plan: Plan) -> list[RejectionTable]:
    tables = []
    for name, feasibility in (("Rejected", "rejected"), ("Failed", "failed")):
        groups = rejections(plan.rows, feasibility)
        if groups:
            count = sum(rejection.count for rejection in groups)
            tables.append(RejectionTable(f"{name}: {count:,}", groups[:REASONS_MAX]))
    return tables
