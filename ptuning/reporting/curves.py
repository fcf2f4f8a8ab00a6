"""Curves of the HTML report: loss, held-out measures, learning rate and speed.

For a run with several tasks, the chart of held-out measures shows one measure with a line per task,
if there are enough colors. This module selects the curves and labels; svg_chart.py draws them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ptuning.reporting.svg_chart import (
    COLOR_COUNT,
    Chart,
    Level,
    Line,
    Point,
    smooth_points,
)
from ptuning.reporting.verdict import (
    BASELINE_LABELS,
    LAST_LOSS_STEPS,
    format_measure,
    headline_measure,
    is_share,
    label,
)
from ptuning.run_facts import NO_PROMPT, ORACLE, RunFacts

SMOOTHING_SHARE = 0.02  # (Points on each side in the moving average) / (points of the curve).
NAME_CHARACTERS_MAX = 40  # Length limit of a line's name.
# Color numbers of the style sheet. MEASURE_COLORS are for measures over all tasks; NO_PROMPT_COLOR
# and ORACLE_COLOR are for the baselines in the same chart.
MEASURE_COLORS = (0, 2, 3, 4)
NO_PROMPT_COLOR = 5
ORACLE_COLOR = 1


@dataclass(frozen=True)
class Curve:
    """A chart and the label beside its title, which shows the last value."""

    chart: Chart
    last_label: str


def select_curves(run: RunFacts) -> list[Curve]:
    """Return the curves for which the run has values."""
    curves = [
        _loss_curve(run),
        _task_losses_curve(run),
        _measures_curve(run),
        _learning_rate_curve(run),
        _speed_curve(run),
    ]
    return [curve for curve in curves if curve is not None]


def _last_step(run: RunFacts) -> int:
    """Return the end of the step axis.

    During the run, this is the planned number of steps; after the run, the last finished step.
    """
    last_metrics = run.progress[-1] if run.progress else None
    if last_metrics is None:
        return 1
    return last_metrics.steps if run.state == "running" else last_metrics.step


def _loss_curve(run: RunFacts) -> Curve | None:
    raw = [Point(step.step, step.loss) for step in run.progress]
    finite = [point for point in raw if abs(point.y) < float("inf")]
    if not finite:
        return None
    mean = smooth_points(finite, _smoothing_window(finite))
    lines = [Line("each step", raw, faint=True), Line("smoothed", mean)]
    validation_points = [
        Point(validation.step, validation.loss)
        for validation in run.validations
        if validation.loss is not None
    ]
    if validation_points:
        lines.append(Line("held out", validation_points, color=1, dots=True))
    last_loss = fmean(point.y for point in finite[-LAST_LOSS_STEPS:])
    description = (
        f"{finite[0].y:.4f} at step {finite[0].x:g}, {last_loss:.4f} at step {finite[-1].x:g}"
    )
    chart = Chart(
        "Loss",
        lines,
        _last_step(run),
        lambda value: f"{value:.3g}",
        marked_step=run.best_step,
        description=description,
    )
    return Curve(chart, f"{last_loss:.4f}")


def _task_losses_curve(run: RunFacts) -> Curve | None:
    """Return the smoothed losses of tasks that are trained independently, if there are a few."""
    if not run.trains_separately or len(run.tasks) > COLOR_COUNT:
        return None
    lines = []
    for number, task in enumerate(run.tasks):
        raw = [Point(step.step, step.loss) for step in run.of_task(task).progress]
        points = [point for point in raw if abs(point.y) < float("inf")]
        if points:
            mean = smooth_points(points, _smoothing_window(points))
            lines.append(Line(task.name[:NAME_CHARACTERS_MAX], mean, number))
    if not lines:
        return None
    description = ", ".join(f"{line.name} {line.points[-1].y:.4f}" for line in lines)
    chart = Chart(
        "Loss of each task",
        lines,
        _last_step(run),
        lambda value: f"{value:.3g}",
        description=description,
    )
    return Curve(chart, "")


def _smoothing_window(points: Sequence[Point]) -> int:
    return max(2, round(SMOOTHING_SHARE * len(points)))


def _measures_curve(run: RunFacts) -> Curve | None:
    last_validation = next(
        (
            validation
            for validation in reversed(run.validations)
            if validation.measures or validation.by_task
        ),
        None,
    )
    if last_validation is None:
        return None
    has_line_per_task = 1 < len(run.tasks) <= COLOR_COUNT and any(
        validation.by_task for validation in run.validations
    )
    preferred = str(run.config.get("measure", ""))
    measure = headline_measure(
        last_validation.measures or next(iter(last_validation.by_task.values())), preferred
    )
    if measure is None or not is_share(measure):
        return None
    if has_line_per_task:
        lines = [
            Line(
                task.name[:NAME_CHARACTERS_MAX],
                _task_points(run, task.name, measure),
                number,
                dots=True,
            )
            for number, task in enumerate(run.tasks)
        ]
        levels: tuple[Level, ...] = ()
    else:
        names = [
            measure,
            *(
                other_measure
                for other_measure in last_validation.measures
                if other_measure != measure and is_share(other_measure)
            ),
        ]
        lines = [
            Line(label(name), _overall_points(run, name), color, dots=True)
            for name, color in zip(names, MEASURE_COLORS, strict=False)
        ]
        levels = (
            tuple(_baseline_levels(run.tasks[0].metrics_by_variant, measure))
            if len(run.tasks) == 1
            else ()
        )
    points = [point for line in lines[:1] for point in line.points]
    description = (
        f"{format_measure(measure, points[-1].y)} at step {points[-1].x:g}" if points else ""
    )
    title = f"{label(measure)} on held-out records" if has_line_per_task else "Held-out answers"
    chart = Chart(
        title,
        lines,
        _last_step(run),
        lambda value: f"{100 * value:.3g} %",
        levels=levels,
        y_max=1.0,
        marked_step=run.best_step,
        description=description,
    )
    return Curve(
        chart, "" if has_line_per_task or not points else format_measure(measure, points[-1].y)
    )


def _overall_points(run: RunFacts, measure: str) -> list[Point]:
    return [
        Point(validation.step, validation.measures[measure])
        for validation in run.validations
        if measure in validation.measures
    ]


def _task_points(run: RunFacts, task: str, measure: str) -> list[Point]:
    step_values = [
        (validation.step, validation.by_task.get(task, {}).get(measure))
        for validation in run.validations
    ]
    return [Point(step, value) for step, value in step_values if value is not None]


def _baseline_levels(baselines: Mapping[str, Mapping[str, float]], measure: str) -> Iterator[Level]:
    """Yield a horizontal line for each baseline that has the measure."""
    for name, color in ((NO_PROMPT, NO_PROMPT_COLOR), (ORACLE, ORACLE_COLOR)):
        if measure in baselines.get(name, {}):
            yield Level(BASELINE_LABELS[name], baselines[name][measure], color)


def _learning_rate_curve(run: RunFacts) -> Curve | None:
    points = [Point(step.step, step.rate) for step in run.progress]
    if not points:
        return None
    highest = max(points, key=lambda point: point.y)
    chart = Chart(
        "Learning rate",
        [Line("learning rate", points, 2)],
        _last_step(run),
        lambda value: f"{value:.3g}",
        description=f"{highest.y:.3g} at its highest, {points[-1].y:.3g} at step {points[-1].x:g}",
    )
    return Curve(chart, f"at most {highest.y:.3g}")


def _speed_curve(run: RunFacts) -> Curve | None:
    points = [
        Point(step.step, step.text_tokens / step.seconds)
        for step in run.progress
        if step.seconds > 0
    ]
    if not points:
        return None
    median_speed = median(point.y for point in points)
    chart = Chart(
        "Text tokens per second",
        [
            Line("each step", points, 3, faint=True),
            Line("smoothed", smooth_points(points, _smoothing_window(points)), 3),
        ],
        _last_step(run),
        lambda value: f"{value / 1000:.3g}k" if value >= 10_000 else f"{value:.4g}",
        description=f"median {median_speed:,.0f}",
    )
    return Curve(chart, f"median {median_speed:,.0f}")
