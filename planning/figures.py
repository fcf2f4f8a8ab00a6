"""How a plan's figures are said: names to labels, values with their units, the same everywhere.

A figure's name ends with its unit, and perhaps with which of many values it is: `itl_ms_p95`. All
that prints or draws takes its words from here, so that a table and a plot agree. Knows no search.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planning.memory_ledger import Ledger
from planning.plan import Plan, Row

ACCEPTABLE = ("best", "fits", "tight")
HEADLINE_MAX = 6  # Figures that a line about one candidate has.
LEDGER = ("weights", "gradients", "optimizer", "activations", "kv", "workspace")

_ORDERS = ("mean", "max", "p50", "p90", "p95", "p99")
_SHARES = ("share", "fraction", "mfu", "hfu", "utilization")
_WORDS = {
    **{word: word.upper() for word in ("ttft", "itl", "mfu", "hfu", "kv", "tp", "pp", "dp", "vpp")},
    "gpu": "GPU",
    "gpus": "GPUs",
    "tflops": "TFLOP/s",
}


@dataclass(frozen=True)
class Unit:
    """What a figure's name says of it. `ending` stands behind the label: /s, /GPU."""

    stem: str
    kind: str  # "ms", "s", "bytes", "share", or "" for a plain number.
    ending: str
    order: str


@dataclass(frozen=True)
class Rejection:
    """Candidates that were put aside for one reason, but for its numbers."""

    count: int
    reason: str  # The first one's.
    example: str


def unit(figure: str) -> Unit:
    words = figure.split("_")
    order = words.pop() if len(words) > 1 and words[-1] in _ORDERS else ""
    ending = ""
    while len(words) > 2 and words[-2] == "per":
        ending = f"/{_WORDS.get(words[-1], words[-1])}{ending}"
        words = words[:-2]
    kind = ""
    if words[-1] in _SHARES:
        kind = "share"
        words = words[:-1] if words[-1] in ("share", "fraction") and len(words) > 1 else words
    elif words[-1] in ("ms", "s", "bytes") and not ending:
        kind = words[-1]
        words = words[:-1] if len(words) > 1 else words
    return Unit(" ".join(_WORDS.get(word, word) for word in words), kind, ending, order)


def label(figure: str) -> str:
    """`itl_ms_p95` is ITL p95, `tokens_per_s_per_gpu` tokens/s/GPU."""
    known = unit(figure)
    return f"{known.stem}{known.ending}" + (f" {known.order}" if known.order else "")


def say(figure: str, value: float) -> str:
    """The value, with its unit where the label does not have it."""
    if not math.isfinite(value):
        return "–"
    match unit(figure).kind:
        case "share":
            return f"{number(100 * value)} %"
        case "bytes":
            return size(value)
        case "ms":
            return _time(value / 1000)
        case "s":
            return _time(value)
    return number(value)


def number(value: float) -> str:
    """Three digits that count, all of a larger number's, and no more zeros than it takes."""
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 99.95 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1e-4 else _short(value)


def _short(value: float) -> str:
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, digits)}f}".rstrip("0").rstrip(".")


def compact(value: float) -> str:
    """As short as an axis needs it."""
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= power:
            return f"{value / (1e3 if letter == 'k' else power):.4g}{letter}"
    return f"{value:.4g}"


def tick(figure: str, value: float) -> str:
    """A value on an axis."""
    return say(figure, value) if unit(figure).kind else compact(value)


def size(value: float) -> str:
    """Bytes, in the units of spec sheets."""
    for power, letter in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= power:
            return f"{number(value / power)} {letter}"
    return f"{number(value)} B"


def _time(seconds: float) -> str:
    if seconds >= 2 * 86_400:
        return f"{number(seconds / 86_400)} days"
    if seconds >= 2 * 3600:
        return f"{number(seconds / 3600)} h"
    if seconds >= 600:
        return f"{number(seconds / 60)} min"
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(1000 * seconds)} ms"


def visible(text: str) -> str:
    """What has no shape, or would be a command to a terminal, is shown as an escape."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def finite(value: object) -> object:
    """JSON has no word for what never ends: it is null, however deep it lies."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cell(value: object) -> str:
    """A setting's value."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) else str(value)


def name_of(setting: str) -> str:
    return " ".join(_WORDS.get(word, word) for word in setting.split("_"))


def known(row: Row, figure: str) -> float | None:
    """Measured where it was; None where there is no such figure, or no finite one."""
    value = row.measured.get(figure, row.figures.get(figure))
    return value if value is not None and math.isfinite(value) else None


def told(row: Row, figure: str, beside: str = " measured ({} predicted)") -> str:
    """A figure as a sentence has it: what was measured, beside what was predicted."""
    value = known(row, figure)
    if value is None:
        return "–"
    predicted = row.figures.get(figure)
    text = say(figure, value)
    if figure in row.measured and predicted is not None:
        text += beside.format(say(figure, predicted))
    return text


def shown(row: Row, figure: str) -> str:
    """A value, and the predicted one where it was measured."""
    return "" if known(row, figure) is None else told(row, figure, " measured, {} predicted")


def order(plan: Plan, rows: Sequence[Row] = ()) -> list[str]:
    """The figures of these rows, or of all: the axes' first, then as they were given."""
    asked = rows or plan.rows
    found = dict.fromkeys((plan.y.figure, plan.x.figure))
    for row in asked:
        found |= dict.fromkeys((*row.figures, *row.measured))
    return [name for name in found if any(known(row, name) is not None for row in asked)]


def headline(plan: Plan, row: Row) -> list[str]:
    """What matters of a candidate: `tokens/s 2,140`, `ITL p95 38 ms`."""
    figures = order(plan, [row])[:HEADLINE_MAX]
    return [f"{label(figure)} {told(row, figure)}" for figure in figures]


def settings_of(row: Row) -> list[str]:
    return [f"{name_of(name)} {cell(value)}" for name, value in row.settings.items()]


def ledger_of(memory: Ledger) -> str:
    """67.2 of 85.9 GB: weights 20.3 GB, ..."""
    parts = {name: int(getattr(memory, name)) for name in LEDGER}
    items = ", ".join(f"{name_of(name)} {size(held)}" for name, held in parts.items() if held)
    return f"{size(memory.total)} of {size(memory.capacity)}" + (f": {items}" if items else "")


def rejections(rows: Sequence[Row], standing: str = "rejected") -> list[Rejection]:
    """Reasons that differ in their numbers alone are one; the most frequent first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.standing == standing:
            found.setdefault(re.sub(r"\d[\d.,]*", "#", row.reason), []).append(row)
    made = [Rejection(len(group), group[0].reason, group[0].name) for group in found.values()]
    return sorted(made, key=lambda one: -one.count)


def counts(plan: Plan) -> Mapping[str, int]:
    """How many candidates stand how."""
    found = dict.fromkeys(("fits", "tight", "rejected", "failed"), 0)
    for row in plan.rows:
        found["fits" if row.standing == "best" else row.standing] += 1
    return found
