"""Figures of a plan: formats figures, labels and memory ledgers as text, and groups rejections.

A figure is a named number of a candidate. The name states the unit and the statistic: `itl_ms_p95`
is a 95th percentile in milliseconds, `tokens_per_s` is a rate, `mfu` is a fraction, and `gpus` is a
count. All output modules format figures with this module, so tables and plots agree.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planning.memory_ledger import MemoryLedger
from planning.plan import Plan, Row

# The values of `Row.feasibility` with which a candidate can run.
ACCEPTABLE = ("best", "fits", "tight")
HEADLINE_MAX = 6  # Maximum number of figures in the one-line summary of a candidate.
LEDGER_PARTS = ("weights", "gradients", "optimizer", "activations", "kv", "adapters", "workspace")

_STATISTICS = ("mean", "max", "p50", "p90", "p95", "p99")
_SHARE_WORDS = ("share", "fraction", "mfu", "hfu", "utilization")
_DISPLAY_WORDS = {
    **{
        word: word.upper()
        for word in ("ttft", "itl", "mfu", "hfu", "kv", "tp", "pp", "ep", "dp", "vpp")
    },
    "gpu": "GPU",
    "mb": "MB",
    "gpus": "GPUs",
    "tflops": "TFLOP/s",
}


@dataclass(frozen=True)
class FigureName:
    """The parts of a figure's name."""

    stem: str
    # "ms", "s", "bytes" or "share" (the figure is a fraction). "": the figure is a count or rate.
    unit: str
    per_suffix: str  # The denominators of a rate as label text, such as "/s/GPU"; "": no rate.
    statistic: str  # "p95" or "mean", for example; "": no statistic.


@dataclass(frozen=True)
class Rejection:
    """A group of rejected or failed candidates whose reasons differ only in numbers."""

    count: int
    reason: str  # The reason of the first candidate.
    example: str  # The name of the first candidate.


def parse_figure_name(figure: str) -> FigureName:
    name_parts = figure.split("_")
    statistic = name_parts.pop() if len(name_parts) > 1 and name_parts[-1] in _STATISTICS else ""
    per_suffix = ""
    while len(name_parts) > 2 and name_parts[-2] == "per":
        per_suffix = f"/{_DISPLAY_WORDS.get(name_parts[-1], name_parts[-1])}{per_suffix}"
        name_parts = name_parts[:-2]
    unit_name = ""
    if name_parts[-1] in _SHARE_WORDS:
        unit_name = "share"
        if name_parts[-1] in ("share", "fraction") and len(name_parts) > 1:
            name_parts = name_parts[:-1]
    elif name_parts[-1] in ("ms", "s", "bytes") and not per_suffix:
        unit_name = name_parts[-1]
        if len(name_parts) > 1:
            name_parts = name_parts[:-1]
    return FigureName(
        stem=" ".join(_DISPLAY_WORDS.get(name_part, name_part) for name_part in name_parts),
        unit=unit_name,
        per_suffix=per_suffix,
        statistic=statistic,
    )


def label(figure: str) -> str:
    """Return a figure's label, such as "ITL p95" for the figure `itl_ms_p95`."""
    figure_name = parse_figure_name(figure)
    text = f"{figure_name.stem}{figure_name.per_suffix}"
    return f"{text} {figure_name.statistic}" if figure_name.statistic else text


def format_figure(figure: str, value: float) -> str:
    """Format the value of a figure. The unit of a rate is omitted, since the label contains it."""
    if not math.isfinite(value):
        return "–"
    match parse_figure_name(figure).unit:
        case "share":
            return f"{format_number(100 * value)} %"
        case "bytes":
            return format_bytes(value)
        case "ms":
            return _format_duration(value / 1000)
        case "s":
            return _format_duration(value)
    return format_number(value)


def format_number(value: float) -> str:
    """Format a number with three significant digits, without trailing zeros.

    Digits before the decimal point are never rounded away: 12345 becomes 12,345.
    """
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 99.95 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1e-4 else _format_three_digits(value)


def _format_three_digits(value: float) -> str:
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, digits)}f}".rstrip("0").rstrip(".")


def format_compact(value: float) -> str:
    """Format a number that has no unit in few characters, such as 9000, 20k and 1.5M."""
    for value_min, divisor, letter in (
        (1e12, 1e12, "T"),
        (1e9, 1e9, "G"),
        (1e6, 1e6, "M"),
        (1e4, 1e3, "k"),
    ):
        if abs(value) >= value_min:
            return f"{value / divisor:.4g}{letter}"
    return f"{value:.4g}"


def format_tick(figure: str, value: float) -> str:
    """Format a tick label on an axis."""
    return format_figure(figure, value) if parse_figure_name(figure).unit else format_compact(value)


def format_bytes(value: float) -> str:
    """Format bytes in decimal units (1 GB = 1e9 bytes), as specification sheets do."""
    for power, letter in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= power:
            return f"{format_number(value / power)} {letter}"
    return f"{format_number(value)} B"


def _format_duration(seconds: float) -> str:
    if seconds >= 2 * 86_400:
        return f"{format_number(seconds / 86_400)} days"
    if seconds >= 2 * 3600:
        return f"{format_number(seconds / 3600)} h"
    if seconds >= 600:
        return f"{format_number(seconds / 60)} min"
    return f"{format_number(seconds)} s" if seconds >= 1 else f"{format_number(1000 * seconds)} ms"


def escape_unprintable(text: str) -> str:
    """Replace unprintable characters, which could control a terminal, with escape sequences."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def format_setting(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return format_number(value) if isinstance(value, float) else str(value)


def setting_label(setting: str) -> str:
    return " ".join(_DISPLAY_WORDS.get(name_part, name_part) for name_part in setting.split("_"))


def row_figure(row: Row, figure: str) -> float | None:
    """Return the measured value of a figure, or the predicted value if it was not measured.

    Return None if the value is missing or not finite.
    """
    value = row.measured.get(figure, row.figures.get(figure))
    return value if value is not None and math.isfinite(value) else None


def format_row_figure(
    row: Row, figure: str, predicted_template: str = " measured ({} predicted)"
) -> str:
    """Format a figure for a sentence.

    After a measured value, add the predicted value, formatted with `predicted_template`.
    """
    value = row_figure(row, figure)
    if value is None:
        return "–"
    predicted = row.figures.get(figure)
    text = format_figure(figure, value)
    if figure in row.measured and predicted is not None:
        text += predicted_template.format(format_figure(figure, predicted))
    return text


def format_table_figure(row: Row, figure: str) -> str:
    """Format a figure for a table cell, which is empty if the row does not have the figure."""
    if row_figure(row, figure) is None:
        return ""
    return format_row_figure(row, figure, " measured, {} predicted")


def ordered_figures(plan: Plan, rows: Sequence[Row] = ()) -> list[str]:
    """Return the names of the figures that have a value in `rows`.

    If `rows` is empty, all rows of the plan are used. The figures of the axes come first, then the
    other figures in the order of the rows.
    """
    selected_rows = rows or plan.rows
    figures = dict.fromkeys((plan.y.figure, plan.x.figure))
    for row in selected_rows:
        figures |= dict.fromkeys((*row.figures, *row.measured))
    return [
        name for name in figures if any(row_figure(row, name) is not None for row in selected_rows)
    ]


def headline(plan: Plan, row: Row) -> list[str]:
    """Return the main figures of a candidate as texts, such as "tokens/s 2,140"."""
    figures = ordered_figures(plan, [row])[:HEADLINE_MAX]
    return [f"{label(figure)} {format_row_figure(row, figure)}" for figure in figures]


def format_settings(row: Row) -> list[str]:
    return [
        f"{setting_label(name)} {format_setting(value)}" for name, value in row.settings.items()
    ]


def format_ledger(memory: MemoryLedger) -> str:
    """Return a ledger as text, such as "67.2 GB of 85.9 GB: weights 20.3 GB, ..."."""
    parts = {name: int(getattr(memory, name)) for name in LEDGER_PARTS}
    part_texts = ", ".join(
        f"{setting_label(name)} {format_bytes(part_bytes)}"
        for name, part_bytes in parts.items()
        if part_bytes
    )
    return f"{format_bytes(memory.total)} of {format_bytes(memory.capacity)}" + (
        f": {part_texts}" if part_texts else ""
    )


def rejections(rows: Sequence[Row], feasibility: str = "rejected") -> list[Rejection]:
    """Group the rows with this feasibility by reason; the largest groups come first.

    Rows whose reasons differ only in numbers are in one group.
    """
    rows_by_reason: dict[str, list[Row]] = {}
    for row in rows:
        if row.feasibility == feasibility:
            rows_by_reason.setdefault(re.sub(r"\d[\d.,]*", "#", row.reason), []).append(row)
    groups = [
        Rejection(len(group), group[0].reason, group[0].name) for group in rows_by_reason.values()
    ]
    return sorted(groups, key=lambda rejection: -rejection.count)


def count_by_feasibility(plan: Plan) -> Mapping[str, int]:
    """Count the candidates by feasibility; the best candidate counts as "fits"."""
    count_of = dict.fromkeys(("fits", "tight", "rejected", "failed"), 0)
    for row in plan.rows:
        count_of["fits" if row.feasibility == "best" else row.feasibility] += 1
    return count_of
