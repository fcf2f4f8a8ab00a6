"""SVG chart: axis scales with round ticks, a plot area with its axes, line charts and a histogram.

A chart is an SVG element that is drawn without a script; the style sheet of the page defines its
classes. The size of a line chart is bounded, because each line segment is thinned to POINTS_MAX
points. The planner draws its scatter plot in a `PlotArea` too. This module is independent of runs
and plans.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

from markupsafe import Markup

from ptuning.reporting.html_template import clean_text

LINE_CHART_WIDTH = 480
LINE_CHART_HEIGHT = 214
POINTS_MAX = 300  # Points per line segment; the chart's width cannot show more.
COORDINATE_MAX = 1e30  # A larger or non-finite value is a gap in its line.
COLOR_COUNT = 6  # Number of line colors in the style sheet.
HISTOGRAM_BINS = 32
HISTOGRAM_HEIGHT = 40
TICK_LABEL_DISTANCE = 6  # Distance between a tick label and the y axis, in SVG units.


class Point(NamedTuple):
    x: float
    y: float


# -------------------------------------------------------------------------------------------- axes


@dataclass(frozen=True)
class AxisScale:
    low: float
    high: float
    logarithmic: bool = False

    def position(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 (low end) to 1 (high end)."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def contains(self, value: float | None) -> bool:
        if value is None or (self.logarithmic and value <= 0):
            return False
        return -1e-9 <= self.position(value) <= 1 + 1e-9

    def ticks(self, count_max: int = 6) -> list[float]:
        """Return round numbers within the range of the axis, at most about `count_max`."""
        if not self.logarithmic:
            return linear_ticks(self.low, self.high, count_max)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for sizes in ((1, 2, 5), (1, 3), (1,)):
            tick_values = [size * 10.0**power for power in range(first, last + 1) for size in sizes]
            ticks_inside = [value for value in tick_values if self.contains(value)]
            if len(ticks_inside) <= count_max + 2:
                return ticks_inside
        return ticks_inside[:: math.ceil(len(ticks_inside) / count_max)]


def linear_ticks(low: float, high: float, count_max: int = 5) -> list[float]:
    """Return tick values within a range; their distance is 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    step_min = (high - low) / count_max
    power = 10.0 ** math.floor(math.log10(step_min))
    step = next(power * size for size in (1, 2, 5, 10) if power * size >= step_min * 0.999)
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [number * step for number in numbers]


@dataclass(frozen=True)
class PlotArea:
    """The rectangle of a plot within an SVG element, between margins for the labels."""

    width: int
    height: int
    left: int
    right: int  # Distance of the plot's right edge from the left edge of the element.
    top: int
    foot: int  # Distance of the x axis from the top of the element.
    x: AxisScale
    y: AxisScale

    def x_at(self, value: float) -> float:
        return round(self.left + self.x.position(value) * (self.right - self.left), 1)

    def y_at(self, value: float) -> float:
        return round(self.foot - self.y.position(value) * (self.foot - self.top), 1)

    def y_axis(self, tick_labels: Iterable[tuple[float, str]]) -> Iterator[Markup]:
        for value, text in tick_labels:
            y = self.y_at(value)
            yield self.horizontal_line("grid", y)
            yield svg_text("up", self.left - TICK_LABEL_DISTANCE, y + 4, text)

    def x_axis(self, tick_labels: Iterable[tuple[float, str]]) -> Iterator[Markup]:
        for value, text in tick_labels:
            x = self.x_at(value)
            yield svg_line("grid", (x, self.foot), (x, self.foot + 4))
            yield svg_text("along", x, self.foot + 18, text)

    def horizontal_line(self, css_class: str, y: float) -> Markup:
        return svg_line(css_class, (self.left, y), (self.right, y))

    def vertical_line(self, css_class: str, x: float) -> Markup:
        return svg_line(css_class, (x, self.top), (x, self.foot))

    def svg(self, body: Iterable[Markup], css_class: str, aria_label: str, **data: str) -> Markup:
        """Return the SVG element; `data` maps attribute names to JSON for the page's script."""
        data_attributes = Markup("").join(
            Markup(' data-{}="{}"').format(name, text) for name, text in data.items()
        )
        return Markup(
            '<svg class="{}" viewBox="0 0 {} {}" role="img" tabindex="0" aria-label="{}"{}>{}</svg>'
        ).format(
            css_class,
            self.width,
            self.height,
            clean_text(aria_label),
            data_attributes,
            Markup("").join(body),
        )


def svg_line(css_class: str, start: tuple[float, float], end: tuple[float, float]) -> Markup:
    return Markup('<line class="{}" x1="{:g}" y1="{:g}" x2="{:g}" y2="{:g}"/>').format(
        css_class, *start, *end
    )


def svg_text(css_class: str, x: float, y: float, text: str) -> Markup:
    return Markup('<text class="{}" x="{:g}" y="{:g}">{}</text>').format(
        css_class, round(x, 1), round(y, 1), clean_text(text)
    )


def svg_circle(css_class: str, x: float, y: float, radius: float) -> Markup:
    return Markup('<circle class="{}" cx="{:g}" cy="{:g}" r="{:g}"/>').format(
        css_class, x, y, radius
    )


def svg_polyline(css_class: str, points: Iterable[tuple[float, float]]) -> Markup:
    return Markup('<polyline class="{}" points="{}"/>').format(
        css_class, " ".join(f"{x:g},{y:g}" for x, y in points)
    )


@dataclass(frozen=True)
class LegendEntry:
    swatch: Markup  # SVG elements in a box of 20 by 10.
    text: str


def legend_line(css_class: str) -> Markup:
    return svg_line(css_class, (0, 5), (20, 5))


def legend_dot(css_class: str, radius: float) -> Markup:
    return svg_circle(css_class, 10, 5, radius)


# ------------------------------------------------------------------------------------- line charts


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[Point]
    color: int = 0  # Number of the color in the style sheet.
    faint: bool = False  # Draw the line faintly; used for values before smoothing.
    dots: bool = False  # Draw a dot at each point; used for values measured at few steps.

    @property
    def css_class(self) -> str:
        return f"c{self.color}{' faint' if self.faint else ''}"


@dataclass(frozen=True)
class Level:
    """A baseline value, drawn as a horizontal line."""

    name: str
    value: float
    color: int  # Number of the color in the style sheet.

    @property
    def css_class(self) -> str:
        return f"level c{self.color}"


@dataclass(frozen=True)
class Chart:
    """A line chart over steps."""

    title: str
    lines: Sequence[Line]
    steps: int  # End of the x axis.
    format_value: Callable[[float], str]
    levels: Sequence[Level] = ()
    y_max: float | None = None  # The y axis ends at this value, or higher if values are higher.
    from_zero: bool = True  # Whether the y axis includes 0.
    marked_step: int | None = None  # The best step; None: no mark.
    description: str = ""  # Text for screen readers.

    def legend(self) -> list[LegendEntry]:
        entries = [LegendEntry(legend_line(line.css_class), line.name) for line in self.lines]
        entries += [LegendEntry(legend_line(level.css_class), level.name) for level in self.levels]
        if self.marked_step is not None:
            entries.append(LegendEntry(legend_line("kept"), f"best step: {self.marked_step}"))
        return entries


def smooth_points(points: Sequence[Point], window: int) -> list[Point]:
    """Return a moving average over up to `window` points on each side of a point.

    The average is centered, because a trailing average would show a change too late. Near the
    start, both sides are shorter; near the end, only the right side is shorter.
    """
    sums = [0.0, *accumulate(point.y for point in points)]
    means = []
    for index, point in enumerate(points):
        half_width = min(index, window)
        window_end = min(len(points), index + half_width + 1)
        start = index - half_width
        means.append(Point(point.x, (sums[window_end] - sums[start]) / (window_end - start)))
    return means


def thin_points(points: Sequence[Point]) -> list[Point]:
    """Reduce points to at most POINTS_MAX.

    The points are divided into groups of neighbors; the lowest and the highest point of each group
    are kept, in the order of the line.
    """
    if len(points) <= POINTS_MAX:
        return list(points)
    group_size = math.ceil(2 * len(points) / POINTS_MAX)
    extremes = []
    for start in range(0, len(points), group_size):
        group = points[start : start + group_size]
        lowest = min(group, key=lambda point: point.y)
        highest = max(group, key=lambda point: point.y)
        extremes += sorted({lowest, highest})
    return extremes


def draw_chart(chart: Chart) -> Markup:
    """Draw a chart as an SVG element. Non-finite points are gaps."""
    lines = [(line, list(_segments(line.points))) for line in chart.lines]
    ys = [point.y for _, segments in lines for segment in segments for point in segment]
    levels = [level for level in chart.levels if abs(level.value) < COORDINATE_MAX]
    ys += [level.value for level in levels]
    area = _line_chart_area(chart, ys)
    body = [*_axes(chart, area)]
    body += [area.horizontal_line(level.css_class, area.y_at(level.value)) for level in levels]
    if chart.marked_step is not None:
        body.append(area.vertical_line("kept", area.x_at(chart.marked_step)))
    for line, segments in lines:
        body += _strokes(line, segments, area)
    body.append(
        Markup('<line class="at" y1="{}" y2="{}" visibility="hidden"/>').format(area.top, area.foot)
    )
    aria_label = f"{chart.title}: {chart.description}" if chart.description else chart.title
    return area.svg(body, "chart", aria_label, lines=_pointer_json(chart, area))


def _line_chart_area(chart: Chart, ys: Sequence[float]) -> PlotArea:
    low, high = _y_range(ys, chart.y_max, chart.from_zero)
    return PlotArea(
        LINE_CHART_WIDTH,
        LINE_CHART_HEIGHT,
        left=50,
        right=LINE_CHART_WIDTH - 14,
        top=10,
        foot=LINE_CHART_HEIGHT - 28,
        x=AxisScale(0, max(1, chart.steps)),
        y=AxisScale(low, high),
    )


def _segments(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield the thinned segments between the gaps of a line."""
    for is_finite, segment in groupby(points, lambda point: abs(point.y) < COORDINATE_MAX):
        if is_finite:
            yield thin_points(list(segment))


def _y_range(ys: Sequence[float], y_max: float | None, from_zero: bool) -> tuple[float, float]:
    low, high = min(ys, default=0.0), max(ys, default=1.0)
    if from_zero:
        low = min(0.0, low)
    if y_max is not None:
        return low, max(y_max, high)
    if not high > low:
        return low - (0 if from_zero else 1), low + 1 if low == 0 else low + abs(low)
    padding = 0.06 * (high - low)
    return low if from_zero else low - padding, high + padding


def _axes(chart: Chart, area: PlotArea) -> Iterator[Markup]:
    yield from area.y_axis((value, chart.format_value(value)) for value in area.y.ticks(5))
    integer_steps = [step for step in area.x.ticks(5) if step == int(step)]
    yield from area.x_axis((step, _step_label(step)) for step in integer_steps)


def _step_label(step: float) -> str:
    return f"{step / 1000:g}k" if step >= 10_000 else f"{step:.0f}"


def _strokes(line: Line, segments: list[list[Point]], area: PlotArea) -> Iterator[Markup]:
    for segment in segments:
        coordinates = [(area.x_at(point.x), area.y_at(point.y)) for point in segment]
        if len(segment) > 1:
            yield svg_polyline(line.css_class, coordinates)
        if len(segment) == 1 or line.dots:
            for x, y in coordinates:
                yield svg_circle(line.css_class, x, y, 2.5)


def _pointer_json(chart: Chart, area: PlotArea) -> str:
    """Return JSON for report.js: the name and the points (x, step, value as text) of each line.

    Faint lines are omitted.
    """
    line_values = []
    for line in chart.lines:
        if not line.faint:
            points = [point for segment in _segments(line.points) for point in segment]
            line_values.append(
                [
                    clean_text(line.name),
                    [
                        [area.x_at(point.x), point.x, chart.format_value(point.y)]
                        for point in points
                    ],
                ]
            )
    return json.dumps(line_values, separators=(",", ":"))


# --------------------------------------------------------------------------------------- histogram


def draw_histogram(values: Sequence[int], aria_label: str) -> Markup:
    """Draw a histogram without axes, from the minimum to the maximum of the values."""
    low, high = min(values), max(values)
    bin_width = (high - low + 1) / HISTOGRAM_BINS
    counts = [0] * HISTOGRAM_BINS
    for value in values:
        counts[int((value - low) / bin_width)] += 1
    heights = [HISTOGRAM_HEIGHT * count / max(counts) for count in counts]
    bars = Markup("").join(
        Markup('<rect x="{}" y="{:.1f}" width="9" height="{:.1f}"/>').format(
            10 * index, HISTOGRAM_HEIGHT - height, height
        )
        for index, height in enumerate(heights)
        if height
    )
    return Markup(
        '<svg class="spread" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" '
        'aria-label="{}">{}</svg>'
    ).format(10 * HISTOGRAM_BINS, HISTOGRAM_HEIGHT, clean_text(aria_label), bars)
