"""What a run's numbers say, in sentences: one verdict, and warnings that a reader should have.

Every sentence follows from the facts by a rule that stands here: the report, the terminal and
`--json` say the same. A share comes with what its count of examples leaves open. Knows no HTML.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

from ptuning.run_facts import (
    ADAPTER,
    FULL,
    NO_PROMPT,
    ORACLE,
    Progress,
    RunFacts,
    TaskFacts,
    Validation,
)

LABELS = {
    "exact_match": "Exact match",
    "accuracy": "Accuracy",
    "f1": "F1",
    "rouge_l": "Rouge-L",
    "loss": "Loss",
}
MEANINGS = {
    "exact_match": "the same text, but for spaces at both ends",
    "accuracy": "the same text, without regard to case and spaces",
    "f1": "how many words both have",
    "rouge_l": "how many words both have in the same order",
    "loss": "of the right answers' tokens, the mean",
}
ROWS = {
    NO_PROMPT: "No prompt",
    ORACLE: "Written instruction",
    FULL: "Full fine-tuning",
}
LAST_STEPS = 20  # A run's loss is the mean over these; one batch alone says little.
FALL_SEEN = 0.03  # Of the loss, between the last tenth of the steps and the one before it.
RISE_SEEN = 0.05  # Of the held-out loss, above its least.
SKIPPED_SEEN = 0.05
DROPPED_SEEN = 0.10
CUT_SEEN = 0.05
FEW = 50  # Held-out examples, under which a share is little more than a guess.
Z95 = 1.96  # Standard errors, to each side, that hold 95 of 100 such samples.


@dataclass(frozen=True)
class Verdict:
    sentence: str
    good: bool | None  # None: the numbers do not tell.


def label(measure: str) -> str:
    return LABELS.get(measure, measure.replace("_", " ").capitalize())


def is_share(measure: str) -> bool:
    """All measures are, from 0 to 1 and the more the better, but losses."""
    return not measure.endswith("loss")


def shown(measure: str, value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{100 * value:.1f} %" if is_share(measure) else f"{value:.4f}"


def headline(measures: Mapping[str, float], wanted: str) -> str | None:
    """The one measure that a sentence is about: a share if there is one, the run's own first."""
    known = [name for name, value in measures.items() if math.isfinite(value)]
    for name in (wanted, *LABELS, *known):
        if name in known and is_share(name):
            return name
    return "loss" if "loss" in known else None


def margin(share: float, count: int) -> float:
    """To each side of a share of `count` examples (Wilson's, which holds at 0 and 1, too)."""
    if count < 1 or not 0 <= share <= 1:
        return 0.0
    root = math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    return Z95 * root / (1 + Z95**2 / count)


def best(validations: Sequence[Validation], measure: str) -> tuple[float, int] | None:
    """The best value so far, and its step; of equals that of the smaller loss."""
    found = [(_value(one, measure), one) for one in validations]
    known = [(value, one) for value, one in found if value is not None and math.isfinite(value)]
    if not known:
        return None
    sign = -1 if is_share(measure) else 1

    def order(found: tuple[float, Validation]) -> tuple[float, float, int]:
        value, one = found
        return sign * value, math.inf if one.loss is None else one.loss, one.step

    value, one = min(known, key=order)
    return value, one.step


def _value(one: Validation, measure: str) -> float | None:
    return one.loss if measure == "loss" else one.measures.get(measure)


def learned(run: RunFacts) -> str:
    """What a run makes, in a word."""
    return "tuned model" if run.config.get("method") == "full" else "adapter"


def row(name: str, run: RunFacts) -> str:
    return learned(run).capitalize() if name == ADAPTER else ROWS[name]


def measured(task: TaskFacts, run: RunFacts) -> Mapping[str, float]:
    """What the adapter is worth; while the run goes on, by its last validation."""
    made = task.baselines.get(ADAPTER)
    if made is not None:
        return made
    for one in reversed(run.validations):
        found = one.by_task.get(task.name) or (one.measures if len(run.tasks) == 1 else {})
        if found:
            return found
    return {}


def verdict(task: TaskFacts, run: RunFacts) -> Verdict:
    """Of one task, by its table; of a run without held-out records, by its loss."""
    made = measured(task, run)
    measure = headline(made, str(run.config.get("measure", "")))
    if measure is None:
        return _by_loss(run)
    value = made[measure]
    text = f"{label(measure)} is {shown(measure, value)}"
    if run.state == "running":
        text = f"So far: {text}"
    if task.validation_examples:
        text += f" on {_count(task.validation_examples, 'held-out example')}"
    text += f" with the {learned(run)}"
    others = {
        name: row[measure]
        for name, row in task.baselines.items()
        if name != ADAPTER and measure in row
    }
    words = {
        NO_PROMPT: "without a prompt",
        ORACLE: "with a written instruction",
        FULL: "by full fine-tuning",
    }
    said = [f"{shown(measure, others[name])} {words[name]}" for name in words if name in others]
    if said:
        text += ", " + " and ".join((", ".join(said[:-1]), said[-1]) if said[1:] else said)
    if NO_PROMPT not in others:
        return Verdict(text + ".", None)
    gain = (value - others[NO_PROMPT]) * (1 if is_share(measure) else -1)
    open_by = margin(value, task.validation_examples) if is_share(measure) else 0.0
    return Verdict(text + ".", None if abs(gain) <= open_by else gain > 0)


def _by_loss(run: RunFacts) -> Verdict:
    losses = [one.loss for one in run.progress if math.isfinite(one.loss)]
    if not losses:
        return Verdict("No step was made yet.", None)
    last = fmean(losses[-LAST_STEPS:])
    way = "fell" if last < losses[0] else "rose" if last > losses[0] else "stayed"
    text = f"The loss {way} from {losses[0]:.4f} to {last:.4f} in {_count(len(losses), 'step')}"
    held = [one.loss for one in run.validations if one.loss is not None]
    if held and math.isfinite(held[-1]):
        text += f", and is {held[-1]:.4f} on held-out records"
    if run.state == "running" and any(task.validation for task in run.tasks):
        return Verdict(f"{text}; no answers were measured yet.", None)
    return Verdict(f"{text}; no answers were measured, so their quality is not known.", None)


def warnings(run: RunFacts) -> list[str]:
    """What a reader would want to have been told, the run's own first."""
    found = [*_of_steps(run.progress, run.state), *_of_validations(run)]
    several = len(run.tasks) > 1
    for task in run.tasks:
        found += [f"{task.name}: {said}" if several else said for said in _of_task(task, run)]
    return [one[0].upper() + one[1:] if not several else one for one in found]


def _of_steps(progress: Sequence[Progress], state: str) -> Iterator[str]:
    losses = [one.loss for one in progress if math.isfinite(one.loss)]
    tenth = len(losses) // 10
    if tenth >= 2 and state != "running":
        before, last = losses[-2 * tenth : -tenth], losses[-tenth:]
        fall = fmean(before) - fmean(last)
        noise = math.hypot(pstdev(before), pstdev(last)) / math.sqrt(tenth)
        if fall > max(FALL_SEEN * fmean(before), 2 * noise):
            yield (
                f"the loss was still falling at the end ({fmean(before):.4f} to "
                f"{fmean(last):.4f} over the last tenth of the steps); more steps may do better"
            )
    skipped = sum(one.skipped for one in progress)
    if skipped > SKIPPED_SEEN * len(progress):
        yield (
            f"{skipped} of {len(progress)} steps were skipped, as their gradients overflowed; "
            "bfloat16 or float32 would not"
        )


def _of_validations(run: RunFacts) -> Iterator[str]:
    losses = [(one.loss, one.step) for one in run.validations if one.loss is not None]
    if len(losses) > 2:
        (least, at), (last, _) = min(losses), losses[-1]
        rising = all(one[0] <= two[0] for one, two in pairwise(losses[-3:]))
        if rising and last > least * (1 + RISE_SEEN):
            kept = run.best_step
            way = f"; the state of step {kept} was kept" if kept is not None else ""
            yield (
                f"the held-out loss rises since step {at} ({least:.4f} to {last:.4f}): the "
                f"examples are being learned by heart{way}"
            )


def _of_task(task: TaskFacts, run: RunFacts) -> Iterator[str]:
    held = task.validation_examples
    if run.state != "running" and not held:
        yield "no record was held out, so nothing tells how it does on records it has not seen"
    if 0 < held < FEW:
        yield f"only {_count(held, 'example was', 'examples were')} held out; its share is a guess"
    if task.shared:
        yield (
            f"{task.shared} of the held-out records are also learned from, so the measures are "
            "better than they would be on new ones"
        )
    if held and task.answers_cut > CUT_SEEN * held:
        yield (
            f"{task.answers_cut} of {held} answers were cut at max_new_tokens; a larger one, or a "
            "stop, may score better"
        )
    if len(task.dropped) > DROPPED_SEEN * (len(task.dropped) + task.examples):
        yield (
            f"{len(task.dropped)} of {len(task.dropped) + task.examples} records were left out; "
            "see why under Data"
        )
    if run.state != "running":
        yield from _of_baselines(task, run)


def _of_baselines(task: TaskFacts, run: RunFacts) -> Iterator[str]:
    made = task.baselines.get(ADAPTER, {})
    measure = headline(made, str(run.config.get("measure", "")))
    if measure is None:
        return
    sign = 1 if is_share(measure) else -1
    value = made[measure]
    plain = task.baselines.get(NO_PROMPT, {}).get(measure)
    if plain is not None and sign * (value - plain) <= 0:
        yield f"the {learned(run)} does no better than no prompt at all; do not serve it"
    written = task.baselines.get(ORACLE, {}).get(measure)
    open_by = margin(value, task.validation_examples) if is_share(measure) else 0.0
    if written is not None and sign * (written - value) > open_by:
        yield (
            f"the written instruction still does better than the {learned(run)}; more steps, "
            "records, or virtual tokens may close the gap"
        )


def summary(run: RunFacts) -> dict[str, Any]:
    """What `--json` prints at the end: JSON has no word for what is not finite, so it is null."""
    losses = [one.loss for one in run.progress]
    return {
        "name": run.name,
        "state": run.state,
        "steps": len(losses),
        "first_loss": _finite(losses[0]) if losses else None,
        "last_loss": _finite(fmean(losses[-LAST_STEPS:])) if losses else None,
        "best_step": run.best_step,
        "seconds": sum(one.seconds for one in run.progress),
        "text_tokens": sum(one.text_tokens for one in run.progress),
        "tasks": [
            {
                "name": task.name,
                "path": task.path,
                "examples": task.examples,
                "dropped": len(task.dropped),
                "validation_examples": task.validation_examples,
                "measures": {
                    name: {measure: _finite(value) for measure, value in row.items()}
                    for name, row in task.baselines.items()
                },
                "verdict": verdict(task, run).sentence,
            }
            for task in run.tasks
        ],
        "warnings": warnings(run),
        "notes": list(run.notes),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
