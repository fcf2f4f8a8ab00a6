"""Which candidates nothing beats, and where each stands in a picture of all of them.

A candidate is on its group's front if no other of the group is as good on both axes and better on
one. Text, page and PNG take the same view, so they show the same points on the same scales. A
candidate far off from every front is left out and counted, as it would squeeze all that matters.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from planning.figures import ACCEPTABLE, known
from planning.plan import Axis, Plan, Row

POINTS_MAX = 1500  # More could not be told apart.
DECADES = 30.0  # An axis over so many times its least value is logarithmic.
LIMIT_REACH = 4.0  # A limit that is further away than this is not drawn.
ROOM = 0.06  # Of an axis, beyond its last point.


def front(rows: Sequence[Row], x: Axis, y: Axis) -> list[Row]:
    """From the best in x to the best in y; of equal ones the first."""
    placed = [row for row in rows if _placed(row, x, y)]

    def good(row: Row, axis: Axis) -> float:
        value = known(row, axis.figure)
        assert value is not None
        return value if axis.better == "high" else -value

    kept: list[Row] = []
    for row in sorted(placed, key=lambda row: (-good(row, x), -good(row, y))):
        if not kept or good(row, y) > good(kept[-1], y):
            kept.append(row)
    return kept


def fronts(plan: Plan) -> Mapping[str, list[Row]]:
    """One for each group, in the order of the numbers in their names."""
    groups: dict[str, list[Row]] = {}
    for row in plan.rows:
        if row.standing in ACCEPTABLE:
            groups.setdefault(row.group, []).append(row)
    found = {name: front(groups[name], plan.x, plan.y) for name in sorted(groups, key=_counted)}
    return {name: rows for name, rows in found.items() if rows}


def _counted(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


@dataclass(frozen=True)
class Scale:
    low: float
    high: float
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def has(self, value: float | None) -> bool:
        if value is None or (self.logarithmic and value <= 0):
            return False
        return -1e-9 <= self.share(value) <= 1 + 1e-9

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers within it."""
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for sizes in ((1, 2, 5), (1, 3), (1,)):
                found = [s * 10.0**power for power in range(first, last + 1) for s in sizes]
                inside = [value for value in found if self.has(value)]
                if len(inside) <= most + 2:
                    return inside
            return inside[:: math.ceil(len(inside) / most)]
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * size for size in (1, 2, 5, 10) if power * size >= rough * 0.999)
        numbers = range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
        return [number * step for number in numbers]


@dataclass(frozen=True)
class View:
    x: Scale
    y: Scale
    rows: tuple[Row, ...]  # Those that are drawn; the last are drawn last.
    fronts: Mapping[str, Sequence[Row]]
    left_out: int  # Acceptable ones that lie outside, or are too many.


def view(plan: Plan) -> View | None:
    """None where no candidate has both figures."""
    placed = [row for row in plan.rows if _placed(row, plan.x, plan.y)]
    if not placed:
        return None
    lines = fronts(plan)
    ahead = [row for line in lines.values() for row in line]
    ahead += [row for row in placed if row.standing == "best"]
    usable = [row for row in placed if row.standing in ACCEPTABLE] or placed
    x, y = _scale(ahead, usable, plan.x), _scale(ahead, usable, plan.y)
    within = [
        row
        for row in placed
        if x.has(known(row, plan.x.figure)) and y.has(known(row, plan.y.figure))
    ]
    chosen = {id(row) for row in ahead}
    others = [row for row in within if id(row) not in chosen]
    size = max(1, math.ceil(len(others) / POINTS_MAX))
    drawn = [*reversed(others[::size]), *(row for row in within if id(row) in chosen)]
    drawn.sort(key=_weight)  # Stable.
    kept = sum(row.standing in ACCEPTABLE for row in drawn)
    out = sum(row.standing in ACCEPTABLE for row in placed) - kept
    return View(x, y, tuple(drawn), lines, out)


def _placed(row: Row, x: Axis, y: Axis) -> bool:
    return known(row, x.figure) is not None and known(row, y.figure) is not None


def _weight(row: Row) -> int:
    return ("rejected", "failed", "tight", "fits", "best").index(row.standing)


def _scale(ahead: Sequence[Row], usable: Sequence[Row], axis: Axis) -> Scale:
    """Over the fronts, and in the bad direction over half of the others."""
    values = [value for row in usable if (value := known(row, axis.figure)) is not None]
    must = [value for row in ahead if (value := known(row, axis.figure)) is not None]
    inner = [*must, median(values)] if must else values
    low, high = min(inner), max(inner)
    limit = axis.limit
    if limit is not None and limit > 0 and low / LIMIT_REACH <= limit <= high * LIMIT_REACH:
        low, high = min(low, limit), max(high, limit)
    if low > 0 and high / low > DECADES:
        room = (high / low) ** ROOM
        return Scale(low / room, high * room, True)
    if 0 < low < high / 2:
        low = 0.0  # A beginning at zero shows how much more is more.
    if not high > low:
        room = abs(high) / 10 or 1.0
        return Scale(low - room, high + room)
    room = ROOM * (high - low)
    return Scale(low - room if low else low, high + room)
