"""A candidate for tuning, run for real: `preamble tune` for a few steps, in a folder of its own.

The settings are the user's but for the split, the number of steps and all that measures or keeps
something. The first steps, in which memory is new, do not count.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from planning.measurement.child_command import ChildError, child, forget
from planning.measurement.rounds import TrialError
from planning.plan import Plan, Row
from ptuning.reporting.run_logs import read_logs
from serving.profiles import machine

WARM_STEPS = 2
STEP_S_MIN = 30.0  # What a step may take at least, before the run counts as stuck.
SLOWER_MAX = 20.0  # Times its prediction.
# What would measure, keep or publish something.
DROPPED = {
    *("validation", "validate_every", "validation_examples", "patience", "measure"),
    *("golden_examples", "oracle", "tensorboard", "encoder_from", "warmup_steps"),
}


@dataclass(frozen=True)
class TuningTrial:
    """`base`: the user's own settings. `settings`: those of a row, as `tune` reads them.

    `settled`: the plan with the file and the command of its best row.
    """

    base: Mapping[str, Any]
    settings: Callable[[Row], Mapping[str, Any]]
    settled: Callable[[Plan, Row | None], Plan]
    efforts: Sequence[int] = (5, 20, 50)  # Steps.
    start_s: float = 1800.0

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        machines = [machine("cpu"), machine("cuda")]
        return {
            "of": "tuning",
            "machine": machines,
            "settings": json.dumps(plain(self.base), default=str),
        }

    def score(self, figures: Mapping[str, float]) -> float:
        return figures["tokens_per_s"]

    def broken(self, figures: Mapping[str, float]) -> str:
        return ""

    def settle(self, plan: Plan, best: Row | None) -> Plan:
        return self.settled(plan, best)

    def run(self, row: Row, effort: int, folder: Path) -> Mapping[str, float]:
        steps = WARM_STEPS + effort
        record = plain(self.settings(row))
        name = hashlib.sha256(json.dumps(record, default=str).encode()).hexdigest()[:12]
        place = folder / "runs" / name
        place.mkdir(parents=True, exist_ok=True)
        run = place / "run"
        file = place / "tune.yaml"
        own = {"steps": steps, "run": str(run), "output": str(place / "adapters")}
        file.write_text(yaml.safe_dump({**record, **own, "save_every": steps}, sort_keys=False))
        step_s = max(STEP_S_MIN, SLOWER_MAX * row.figures.get("iteration_s", 0.0))
        words: list[str | Path] = ["preamble", "tune", file, "--restart"]
        try:
            with child(words, place / "tune.log") as tuning:
                tuning.output(self.start_s + steps * step_s)
        except ChildError as error:
            raise TrialError(f"{error} (see {place})") from None
        # Each start of a run has a numbered folder.
        last = max(run.glob("[1-9]*"), key=lambda one: int(one.name), default=run)
        made = [one for one in read_logs(last, steps).progress if one.step > WARM_STEPS]
        if not made:
            raise TrialError(f"it made no step in time that could be seen (see {place})")
        forget(place)
        iteration_s = median(one.seconds for one in made)
        speed = sum(one.tokens for one in made) / max(1e-9, sum(one.seconds for one in made))
        return {"tokens_per_s": speed, "iteration_s": iteration_s}


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without what a few steps do not need."""
    kept = {name: value for name, value in settings.items() if name not in DROPPED}
    for tasks in ("tasks", "task_templates"):
        if isinstance(kept.get(tasks), list):
            kept[tasks] = [
                {name: value for name, value in task.items() if name not in DROPPED}
                for task in kept[tasks]
            ]
    return kept
