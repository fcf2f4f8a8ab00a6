"""Curves as SVG: lines over steps, with axes that a person would have drawn.

A chart is text that needs nothing else: no script draws it, and it is as long for a million steps
as for a thousand. Its look is the report's style sheet's, by class names. Knows no training.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby
from typing import NamedTuple

from ptuning.reporting.markup import cleaned

WIDTH, HEIGHT = 480, 214
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 10, 28  # Margins, which hold the axes' numbers.
POINTS_MAX = 300  # Of a line; more could not be seen.
DRAWN_MAX = 1e30  # What is beyond, or not finite, is a gap.
COLOURS = 6  # That the style sheet has.


class Point(NamedTuple):
    x: float
    y: float


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[Point]
    colour: int = 0
    faint: bool = False  # Behind the others: what was measured, before smoothing.
    dots: bool = False  # Measured at these points alone.


@dataclass(frozen=True)
class Level:
    """A value to compare with, at all steps."""

    name: str
    value: float
    colour: int


@dataclass(frozen=True)
class Chart:
    """What is drawn. `say` writes a value; `top` is the axis's end, where its nature gives one."""

    title: str
    lines: Sequence[Line]
    steps: int
    say: Callable[[float], str]
    levels: Sequence[Level] = ()
    top: float | None = None
    from_zero: bool = True
    mark: int | None = None  # The step whose state was kept.
    about: str = ""  # For who cannot see it.


def smoothed(points: Sequence[Point], reach: int) -> list[Point]:
    """Means over as many neighbours on either side, so that a fall is not drawn later than it was.

    The first points have fewer, on both sides; the last ones have fewer ahead of them alone.
    """
    sums = [0.0, *accumulate(point.y for point in points)]
    made = []
    for place, point in enumerate(points):
        before = min(place, reach)
        end = min(len(points), place + before + 1)
        start = place - before
        made.append(Point(point.x, (sums[end] - sums[start]) / (end - start)))
    return made


def thinned(points: Sequence[Point]) -> list[Point]:
    """As many as can be seen: of each stretch its least and its greatest, in their order."""
    if len(points) <= POINTS_MAX:
        return list(points)
    size = math.ceil(2 * len(points) / POINTS_MAX)
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        least, most = min(stretch, key=lambda one: one.y), max(stretch, key=lambda one: one.y)
        kept += sorted({least, most})
    return kept


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers within a range: ones, twos or fives of a power of ten apart."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * size for size in (1, 2, 5, 10) if power * size >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [
        number * step for number in range(first, first + 2 * most) if number * step <= high + 1e-9
    ]


def draw(chart: Chart) -> str:
    """The svg element. Points that are not finite are gaps."""
    lines = [(line, list(_stretches(line.points))) for line in chart.lines]
    ys = [point.y for _, parts in lines for part in parts for point in part]
    levels = [level for level in chart.levels if abs(level.value) < DRAWN_MAX]
    ys += [level.value for level in levels]
    low, high = _range(ys, chart.top, chart.from_zero)
    place = _Place(max(1, chart.steps), low, high)
    body = [*_axes(chart, place, low, high)]
    for level in levels:
        y = place.y(level.value)
        body.append(
            f'<line class="level c{level.colour}" x1="{LEFT}" y1="{y}" '
            f'x2="{WIDTH - RIGHT}" y2="{y}"/>'
        )
    if chart.mark is not None:
        x = place.x(chart.mark)
        body.append(f'<line class="kept" x1="{x}" y1="{TOP}" x2="{x}" y2="{HEIGHT - BOTTOM}"/>')
    for line, parts in lines:
        body += _strokes(line, parts, place)
    body.append(f'<line class="at" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/>')
    named = escape(cleaned(f"{chart.title}: {chart.about}" if chart.about else chart.title))
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{named}" data-lines="{escape(_told(chart, place))}">{"".join(body)}</svg>'
    )


class _Place:
    """Where a value is drawn, to a tenth of a unit."""

    def __init__(self, steps: int, low: float, high: float) -> None:
        self._across = (WIDTH - LEFT - RIGHT) / steps
        self._low, self._up = low, (HEIGHT - TOP - BOTTOM) / (high - low)

    def x(self, step: float) -> float:
        return round(LEFT + step * self._across, 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - self._low) * self._up, 1)


def _stretches(points: Sequence[Point]) -> Iterator[list[Point]]:
    for known, stretch in groupby(points, lambda one: abs(one.y) < DRAWN_MAX):
        if known:
            yield thinned(list(stretch))


def _range(ys: Sequence[float], top: float | None, from_zero: bool) -> tuple[float, float]:
    low, high = min(ys, default=0.0), max(ys, default=1.0)
    if from_zero:
        low = min(0.0, low)
    if top is not None:
        return low, max(top, high)
    if not high > low:
        return low - (0 if from_zero else 1), low + 1 if low == 0 else low + abs(low)
    room = 0.06 * (high - low)
    return low if from_zero else low - room, high + room


def _axes(chart: Chart, place: _Place, low: float, high: float) -> Iterator[str]:
    for value in ticks(low, high):
        y = place.y(value)
        yield f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>'
        yield f'<text class="up" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(chart.say(value))}</text>'
    for step in ticks(0, max(1, chart.steps)):
        if step == int(step):
            x, y = place.x(step), HEIGHT - BOTTOM + 17
            yield f'<text class="along" x="{x}" y="{y}">{_steps(step)}</text>'


def _steps(step: float) -> str:
    return f"{step / 1000:g}k" if step >= 10_000 else f"{step:.0f}"


def _strokes(line: Line, parts: list[list[Point]], place: _Place) -> Iterator[str]:
    kind = f"c{line.colour}{' faint' if line.faint else ''}"
    for part in parts:
        places = " ".join(f"{place.x(point.x):g},{place.y(point.y):g}" for point in part)
        if len(part) > 1:
            yield f'<polyline class="{kind}" points="{places}"/>'
        if len(part) == 1 or line.dots:
            for point in part:
                yield (
                    f'<circle class="{kind}" cx="{place.x(point.x):g}" '
                    f'cy="{place.y(point.y):g}" r="2.5"/>'
                )


def _told(chart: Chart, place: _Place) -> str:
    """What a pointer reads: of each line its name, and (across, step, value as text)."""
    told = []
    for line in chart.lines:
        if not line.faint:
            points = [point for part in _stretches(line.points) for point in part]
            told.append(
                [cleaned(line.name), [[place.x(one.x), one.x, chart.say(one.y)] for one in points]]
            )
    return json.dumps(told, separators=(",", ":"))
