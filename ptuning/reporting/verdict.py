"""Verdict: sentences and warnings that rules derive from the metrics of a run.

All rules are in this module, so the report, the terminal and `--json` agree. A metric is called a
measure here; a measure from 0 to 1 is called a share. A verdict compares two values of a measure:
the value of the adapter and the value without a prompt. For a share, the verdict is good or bad
only if the two values differ by more than the confidence margin for the number of examples. This
module writes no HTML.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

from gpt.json_output import nonfinite_to_none
from ptuning.run_facts import (
    ADAPTER,
    NO_PROMPT,
    ORACLE,
    RunFacts,
    StepMetrics,
    TaskFacts,
    Validation,
)

# Label of each measure in texts.
LABELS = {
    "exact_match": "Exact match",
    "accuracy": "Accuracy",
    "f1": "F1",
    "rouge_l": "Rouge-L",
    "loss": "Loss",
}
# Explanation of each measure in the report.
MEANINGS = {
    "exact_match": "the texts are equal, except for spaces at both ends",
    "accuracy": "the texts are equal, except for case and spaces",
    "f1": "share of common words",
    "rouge_l": "share of common words in the same order",
    "loss": "mean over the tokens of the expected answers",
}
BASELINE_LABELS = {
    NO_PROMPT: "No prompt",
    ORACLE: "Written instruction",
}
# The last loss is the mean over this number of steps, because the loss of one batch is noisy.
LAST_LOSS_STEPS = 20
# Let A be the mean loss in the second-last tenth of the steps, and B in the last tenth. A warning
# recommends more steps if (A - B) / A exceeds this limit, and A - B exceeds two standard errors.
LOSS_FALL_SHARE_MIN = 0.03
# A warning is given if the held-out loss is rising and (loss / minimum loss) - 1 exceeds this.
LOSS_RISE_SHARE_MIN = 0.05
# A warning is given if the share of skipped steps, dropped records or truncated answers is larger
# than its limit.
SKIPPED_SHARE_MAX = 0.05
DROPPED_SHARE_MAX = 0.10
CUT_SHARE_MAX = 0.05
VALIDATION_EXAMPLES_MIN = 50  # With fewer held-out examples, shares are too uncertain.
Z95 = 1.96  # Number of standard errors on each side of a 95 % confidence interval.


@dataclass(frozen=True)
class Verdict:
    """One sentence about a task's result, and whether the result is good."""

    sentence: str
    is_good: bool | None  # None: the metrics do not decide.


def label(measure: str) -> str:
    return LABELS.get(measure, measure.replace("_", " ").capitalize())


def is_share(measure: str) -> bool:
    """Return whether a measure is a share from 0 to 1, for which higher is better.

    All measures except losses are shares.
    """
    return not measure.endswith("loss")


def format_measure(measure: str, value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{100 * value:.1f} %" if is_share(measure) else f"{value:.4f}"


def headline_measure(measures: Mapping[str, float], preferred: str) -> str | None:
    """Return the measure that the verdict names; None if no measure has a finite value.

    Among the measures with finite values, it is the first of: `preferred` if this is a share, any
    other share, the loss.
    """
    finite_names = [name for name, value in measures.items() if math.isfinite(value)]
    for name in (preferred, *LABELS, *finite_names):
        if name in finite_names and is_share(name):
            return name
    return "loss" if "loss" in finite_names else None


def confidence_margin(share: float, count: int) -> float:
    """Return half the width of the 95 % Wilson score interval of a share.

    The share was measured on `count` examples. The Wilson score interval is also valid for shares
    of 0 and 1. Without examples, return 0.
    """
    if count < 1 or not 0 <= share <= 1:
        return 0.0
    root = math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    return Z95 * root / (1 + Z95**2 / count)


def best_measured(validations: Sequence[Validation], measure: str) -> tuple[float, int] | None:
    """Return the best value of a measure and its step; None if no validation has a finite value.

    If values are equal, the lower loss decides, and then the earlier step.
    """
    scored_validations = [
        (_measure_of(validation, measure), validation) for validation in validations
    ]
    finite_validations = [
        (value, validation)
        for value, validation in scored_validations
        if value is not None and math.isfinite(value)
    ]
    if not finite_validations:
        return None
    sign = -1 if is_share(measure) else 1

    def sort_key(scored_validation: tuple[float, Validation]) -> tuple[float, float, int]:
        value, candidate = scored_validation
        return sign * value, math.inf if candidate.loss is None else candidate.loss, candidate.step

    value, validation = min(finite_validations, key=sort_key)
    return value, validation.step


def _measure_of(validation: Validation, measure: str) -> float | None:
    return validation.loss if measure == "loss" else validation.measures.get(measure)


def artifact_name(run: RunFacts) -> str:
    """Return the name of the run's artifact in texts: "adapter" or "tuned model"."""
    return "tuned model" if run.config.get("method") == "full" else "adapter"


def row_label(name: str, run: RunFacts) -> str:
    return artifact_name(run).capitalize() if name == ADAPTER else BASELINE_LABELS[name]


def task_measures(task: TaskFacts, run: RunFacts) -> Mapping[str, float]:
    """Return the adapter's measures for a task, from `task.metrics_by_variant`.

    If they are not there yet, return the task's measures from the last validation that has any.
    """
    adapter_measures = task.metrics_by_variant.get(ADAPTER)
    if adapter_measures is not None:
        return adapter_measures
    for validation in reversed(run.validations):
        measures = validation.by_task.get(task.name) or (
            validation.measures if len(run.tasks) == 1 else {}
        )
        if measures:
            return measures
    return {}


def task_verdict(task: TaskFacts, run: RunFacts) -> Verdict:
    """Return the verdict on a task's measures; if the task has none, on the loss of the run."""
    measures = task_measures(task, run)
    measure = headline_measure(measures, str(run.config.get("monitor", "")))
    if measure is None:
        return _loss_verdict(run.of_task(task))
    value = measures[measure]
    text = f"{label(measure)} is {format_measure(measure, value)}"
    if run.state == "running":
        text = f"So far: {text}"
    if task.validation_examples:
        text += f" on {_format_count(task.validation_examples, 'held-out example')}"
    text += f" with the {artifact_name(run)}"
    baseline_values = {
        name: row[measure]
        for name, row in task.metrics_by_variant.items()
        if name != ADAPTER and measure in row
    }
    phrases = {
        NO_PROMPT: "without a prompt",
        ORACLE: "with a written instruction",
    }
    comparisons = [
        f"{format_measure(measure, baseline_values[name])} {phrases[name]}"
        for name in phrases
        if name in baseline_values
    ]
    if comparisons:
        *earlier_comparisons, last_comparison = comparisons
        text += ", "
        if earlier_comparisons:
            text += f"{', '.join(earlier_comparisons)} and "
        text += last_comparison
    if NO_PROMPT not in baseline_values:
        return Verdict(text + ".", None)
    gain = (value - baseline_values[NO_PROMPT]) * (1 if is_share(measure) else -1)
    uncertainty = confidence_margin(value, task.validation_examples) if is_share(measure) else 0.0
    return Verdict(text + ".", None if abs(gain) <= uncertainty else gain > 0)


def _loss_verdict(run: RunFacts) -> Verdict:
    losses = [step.loss for step in run.progress if math.isfinite(step.loss)]
    if not losses:
        return Verdict("No step has finished yet.", None)
    last_loss = fmean(losses[-LAST_LOSS_STEPS:])
    if last_loss == losses[0]:
        change = f"stayed at {last_loss:.4f}"
    else:
        direction = "fell" if last_loss < losses[0] else "rose"
        change = f"{direction} from {losses[0]:.4f} to {last_loss:.4f}"
    text = f"The loss {change} in {_format_count(len(losses), 'step')}"
    validation_losses = [
        validation.loss for validation in run.validations if validation.loss is not None
    ]
    if validation_losses and math.isfinite(validation_losses[-1]):
        text += f", and is {validation_losses[-1]:.4f} on held-out records"
    if run.state == "running" and any(task.validation for task in run.tasks):
        return Verdict(f"{text}; no answers have been evaluated yet.", None)
    return Verdict(f"{text}; no answers were evaluated, so their quality is unknown.", None)


def run_warnings(run: RunFacts) -> list[str]:
    """Return warnings: first about the whole run, then about each task."""
    messages = [] if run.trains_separately else [*_training_warnings(run)]
    has_several_tasks = len(run.tasks) > 1
    for task in run.tasks:
        task_messages = [*_task_warnings(task, run)]
        if run.trains_separately:
            task_messages = [*_training_warnings(run.of_task(task)), *task_messages]
        messages += [
            f"{task.name}: {message}" if has_several_tasks else message for message in task_messages
        ]
    return [
        message[0].upper() + message[1:] if not has_several_tasks else message
        for message in messages
    ]


def _training_warnings(run: RunFacts) -> Iterator[str]:
    yield from _step_warnings(run.progress, run.state)
    yield from _validation_warnings(run)


def _step_warnings(progress: Sequence[StepMetrics], state: str) -> Iterator[str]:
    losses = [step.loss for step in progress if math.isfinite(step.loss)]
    tenth = len(losses) // 10
    if tenth >= 2 and state != "running":
        previous_losses, last_losses = losses[-2 * tenth : -tenth], losses[-tenth:]
        fall = fmean(previous_losses) - fmean(last_losses)
        noise = math.hypot(pstdev(previous_losses), pstdev(last_losses)) / math.sqrt(tenth)
        if fall > max(LOSS_FALL_SHARE_MIN * fmean(previous_losses), 2 * noise):
            yield (
                f"the loss was still falling at the end (mean {fmean(previous_losses):.4f} in the "
                f"second-last tenth of the steps, {fmean(last_losses):.4f} in the last tenth); "
                "more steps may give a lower loss"
            )
    skipped = sum(step.skipped for step in progress)
    if skipped > SKIPPED_SHARE_MAX * len(progress):
        yield (
            f"{skipped} of {len(progress)} steps were skipped because their gradients overflowed; "
            "use bfloat16 or float32 to avoid overflow"
        )


def _validation_warnings(run: RunFacts) -> Iterator[str]:
    losses = [
        (validation.loss, validation.step)
        for validation in run.validations
        if validation.loss is not None
    ]
    if len(losses) > 2:
        (lowest_loss, lowest_step), (last_loss, _) = min(losses), losses[-1]
        rising = all(point[0] <= next_point[0] for point, next_point in pairwise(losses[-3:]))
        if rising and last_loss > lowest_loss * (1 + LOSS_RISE_SHARE_MIN):
            best_step = run.best_step
            best_step_note = (
                f"; the adapter of step {best_step} was kept" if best_step is not None else ""
            )
            yield (
                f"the held-out loss has been rising since step {lowest_step} ({lowest_loss:.4f} to "
                f"{last_loss:.4f}): the run overfits the examples{best_step_note}"
            )


def _task_warnings(task: TaskFacts, run: RunFacts) -> Iterator[str]:
    validation_examples = task.validation_examples
    if run.state != "running" and not validation_examples:
        yield "no record was held out, so the quality on unseen records is unknown"
    if 0 < validation_examples < VALIDATION_EXAMPLES_MIN:
        yield (
            f"only {_format_count(validation_examples, 'example was', 'examples were')} held out; "
            "the measures are uncertain"
        )
    if task.overlapping_examples:
        yield (
            f"{task.overlapping_examples} of the held-out records are also training records, "
            "so the measures are better than on new records"
        )
    if validation_examples and task.answers_cut > CUT_SHARE_MAX * validation_examples:
        yield (
            f"{task.answers_cut} of {validation_examples} answers did not end within the limit of "
            f"{task.answer_tokens_max} tokens; more steps, a stop string or a larger "
            "max_new_tokens may give better measures"
        )
    if len(task.dropped) > DROPPED_SHARE_MAX * (len(task.dropped) + task.examples):
        yield (
            f"{len(task.dropped)} of {len(task.dropped) + task.examples} records were dropped; "
            "the report lists the reasons under Data"
        )
    if run.state != "running":
        yield from _baseline_warnings(task, run)


def _baseline_warnings(task: TaskFacts, run: RunFacts) -> Iterator[str]:
    measures = task.metrics_by_variant.get(ADAPTER, {})
    measure = headline_measure(measures, str(run.config.get("monitor", "")))
    if measure is None:
        return
    sign = 1 if is_share(measure) else -1
    value = measures[measure]
    no_prompt_measure = task.metrics_by_variant.get(NO_PROMPT, {}).get(measure)
    if no_prompt_measure is not None and sign * (value - no_prompt_measure) <= 0:
        yield f"the {artifact_name(run)} is not better than no prompt; do not serve it"
    oracle_measure = task.metrics_by_variant.get(ORACLE, {}).get(measure)
    uncertainty = confidence_margin(value, task.validation_examples) if is_share(measure) else 0.0
    if oracle_measure is not None and sign * (oracle_measure - value) > uncertainty:
        yield (
            f"the written instruction is better than the {artifact_name(run)}; try more steps, "
            "records or virtual tokens"
        )


def run_summary(run: RunFacts) -> dict[str, Any]:
    """Return the output of `--json`; values that JSON cannot represent (NaN, infinity) are null."""
    losses = [step.loss for step in run.progress]
    return {
        "name": run.name,
        "state": run.state,
        "steps": len(losses),
        "first_loss": nonfinite_to_none(losses[0]) if losses else None,
        "last_loss": nonfinite_to_none(fmean(losses[-LAST_LOSS_STEPS:])) if losses else None,
        "best_step": run.best_step,
        "seconds": sum(step.seconds for step in run.progress),
        "text_tokens": sum(step.text_tokens for step in run.progress),
        "tasks": [
            {
                "name": task.name,
                "path": task.path,
                "examples": task.examples,
                "dropped": len(task.dropped),
                "validation_examples": task.validation_examples,
                "validation_records": task.validation_records,
                "measures": nonfinite_to_none(task.metrics_by_variant),
                "verdict": task_verdict(task, run).sentence,
            }
            for task in run.tasks
        ],
        "warnings": run_warnings(run),
        "notes": list(run.notes),
    }


def _format_count(number: int, singular: str, plural: str = "") -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
