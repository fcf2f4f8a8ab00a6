"""Which curves a report shows, and what a legend says of them.

The loss, what held-out answers were worth, the learning rate, and the speed; of a run with several
tasks, one measure with a line for each. Knows numbers and names; how they are drawn is
svg_charts.py's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ptuning.reporting.markup import Child, Html, joined, tag
from ptuning.reporting.svg_charts import COLOURS, Chart, Level, Line, Point, draw, smoothed
from ptuning.reporting.verdict import LAST_STEPS, ROWS, headline, is_share, label, shown
from ptuning.run_facts import ADAPTER, NO_PROMPT, ORACLE, RunFacts

REACH_SHARE = 0.02  # Of a curve, on either side of a point, that its mean is over.
NAMES_MAX = 40  # Characters of a line's name.


@dataclass(frozen=True)
class Curve:
    """A chart, and the value that stands beside its title."""

    chart: Chart
    last: str


def figures(run: RunFacts) -> Html:
    made = [_loss(run), _measures(run), _rate(run), _speed(run)]
    return tag("div", *(_figure(one) for one in made if one is not None), class_="curves")


def _figure(curve: Curve) -> Html:
    chart = curve.chart
    legend = list(_legend(chart))
    return tag(
        "figure",
        tag("figcaption", tag("h2", chart.title), tag("output", curve.last)),
        Html(draw(chart)),
        tag("ul", *legend, class_="legend") if len(legend) > 1 else None,
        class_="card",
    )


def _legend(chart: Chart) -> Iterator[Html]:
    for line in chart.lines:
        faint = " faint" if line.faint else ""
        yield tag("li", _swatch(f"c{line.colour}{faint}"), line.name)
    for level in chart.levels:
        yield tag("li", _swatch(f"c{level.colour} level"), level.name)
    if chart.mark is not None:
        yield tag("li", _swatch("kept"), f"kept, step {chart.mark}")


def _swatch(kind: str) -> Html:
    line = Html(f'<line x1="0" y1="4" x2="20" y2="4" class="{kind}"/>')
    return tag("svg", line, viewBox="0 0 20 8", aria_hidden="true")


def _steps(run: RunFacts) -> int:
    """The axis's end: the run may go on, or may have ended before."""
    last = run.progress[-1] if run.progress else None
    if last is None:
        return 1
    return last.steps if run.state == "running" else last.step


def _loss(run: RunFacts) -> Curve | None:
    raw = [Point(one.step, one.loss) for one in run.progress]
    finite = [one for one in raw if abs(one.y) < float("inf")]
    if not finite:
        return None
    mean = smoothed(finite, _reach(finite))
    lines = [Line("each step", raw, faint=True), Line("smoothed", mean)]
    held = [Point(one.step, one.loss) for one in run.validations if one.loss is not None]
    if held:
        lines.append(Line("held out", held, colour=1, dots=True))
    last = fmean(one.y for one in finite[-LAST_STEPS:])
    about = f"{finite[0].y:.4f} at step {finite[0].x:g}, {last:.4f} at step {finite[-1].x:g}"
    chart = Chart(
        "Loss",
        lines,
        _steps(run),
        lambda value: f"{value:.3g}",
        mark=run.best_step,
        about=about,
    )
    return Curve(chart, f"{last:.4f}")


def _reach(points: Sequence[Point]) -> int:
    return max(2, round(REACH_SHARE * len(points)))


def _measures(run: RunFacts) -> Curve | None:
    last = next((one for one in reversed(run.validations) if one.measures or one.by_task), None)
    if last is None:
        return None
    several = 1 < len(run.tasks) <= COLOURS and any(one.by_task for one in run.validations)
    wanted = str(run.config.get("measure", ""))
    measure = headline(last.measures or next(iter(last.by_task.values())), wanted)
    if measure is None or not is_share(measure):
        return None
    if several:
        lines = [
            Line(task.name[:NAMES_MAX], _of_task(run, task.name, measure), number, dots=True)
            for number, task in enumerate(run.tasks)
        ]
        levels: tuple[Level, ...] = ()
    else:
        names = [measure, *(one for one in last.measures if one != measure and is_share(one))]
        lines = [
            Line(label(name), _of_all(run, name), (0, 2, 3, 4)[number], dots=True)
            for number, name in enumerate(names[:4])
        ]
        levels = tuple(_levels(run.tasks[0].baselines, measure)) if len(run.tasks) == 1 else ()
    points = [point for line in lines[:1] for point in line.points]
    about = f"{shown(measure, points[-1].y)} at step {points[-1].x:g}" if points else ""
    title = f"{label(measure)} on held-out records" if several else "Held-out answers"
    chart = Chart(
        title,
        lines,
        _steps(run),
        lambda value: f"{100 * value:.3g} %",
        levels=levels,
        top=1.0,
        mark=run.best_step,
        about=about,
    )
    return Curve(chart, "" if several or not points else shown(measure, points[-1].y))


def _of_all(run: RunFacts, measure: str) -> list[Point]:
    return [
        Point(one.step, one.measures[measure]) for one in run.validations if measure in one.measures
    ]


def _of_task(run: RunFacts, task: str, measure: str) -> list[Point]:
    found = [(one.step, one.by_task.get(task, {}).get(measure)) for one in run.validations]
    return [Point(step, value) for step, value in found if value is not None]


def _levels(baselines: Mapping[str, Mapping[str, float]], measure: str) -> Iterator[Level]:
    """What the adapter is compared with; its own end is the line's."""
    for colour, name in ((5, NO_PROMPT), (1, ORACLE)):
        if name != ADAPTER and measure in baselines.get(name, {}):
            yield Level(ROWS[name], baselines[name][measure], colour)


def _rate(run: RunFacts) -> Curve | None:
    points = [Point(one.step, one.rate) for one in run.progress]
    if not points:
        return None
    most = max(points, key=lambda one: one.y)
    chart = Chart(
        "Learning rate",
        [Line("learning rate", points, 2)],
        _steps(run),
        lambda value: f"{value:.3g}",
        about=f"{most.y:.3g} at its highest, {points[-1].y:.3g} at step {points[-1].x:g}",
    )
    return Curve(chart, f"at most {most.y:.3g}")


def _speed(run: RunFacts) -> Curve | None:
    points = [
        Point(one.step, one.text_tokens / one.seconds) for one in run.progress if one.seconds > 0
    ]
    if not points:
        return None
    middle = median(point.y for point in points)
    chart = Chart(
        "Text tokens per second",
        [
            Line("each step", points, 3, faint=True),
            Line("smoothed", smoothed(points, _reach(points)), 3),
        ],
        _steps(run),
        lambda value: f"{value / 1000:.3g}k" if value >= 10_000 else f"{value:.4g}",
        about=f"{middle:,.0f} in the middle",
    )
    return Curve(chart, f"{middle:,.0f} in the middle")


def spread(lengths: Sequence[int], bins: int = 32) -> Child:
    """How many examples are how long, as bars."""
    if len(lengths) < 2 or min(lengths) == max(lengths):
        return None
    low, high = min(lengths), max(lengths)
    width = (high - low + 1) / bins
    counts = [0] * bins
    for length in lengths:
        counts[int((length - low) / width)] += 1
    most = max(counts)
    bars = joined(
        *(
            Html(
                f'<rect x="{10 * place}" y="{40 - 40 * count / most:.1f}" width="9" '
                f'height="{40 * count / most:.1f}"/>'
            )
            for place, count in enumerate(counts)
            if count
        )
    )
    drawn = tag(
        "svg",
        bars,
        class_="spread",
        viewBox=f"0 0 {10 * bins} 40",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"lengths of the examples, from {low} to {high} tokens",
    )
    ends = tag("div", tag("span", f"{low} tokens"), tag("span", f"{high} tokens"), class_="ends")
    return joined(drawn, ends)
