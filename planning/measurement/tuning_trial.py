"""Tuning trial: runs `preamble tune` for a few steps with a candidate's split, and times them.

Each trial has its own folder. A trial uses the user's settings, except for the split, the number of
steps, the folders, the interval of saved states, and DROPPED_KEYS. The first steps, which allocate
memory, are not counted.
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

from planning.measurement.child_command import ChildError, remove_run_folder, run_child
from planning.measurement.rounds import TrialError
from planning.plan import Plan, Row
from ptuning.reporting.run_logs import read_logs
from serving.profiles import describe_machine

WARMUP_STEPS = 2  # Number of first steps that are not counted.
STEP_S_MIN = 30.0  # Lower bound of the time-out of a step.
SLOWDOWN_MAX = 20.0  # The time-out of a step, as a multiple of its predicted duration.
# Settings of validation, golden examples, logs and so on. They do not affect the duration of a
# step, but would take time in a trial, or are invalid for a run of a few steps.
DROPPED_KEYS = {
    "validation",
    "validate_every",
    "validation_examples",
    "patience",
    "measure",
    "monitor",
    "golden_examples",
    "oracle",
    "tensorboard",
    "encoder_from",
    "warmup_steps",
}


@dataclass(frozen=True)
class TuningTrial:
    """Trials of a training plan."""

    base_settings: Mapping[str, Any]  # The user's settings for `preamble tune`.
    settings_of_row: Callable[[Row], Mapping[str, Any]]  # Returns the settings with a row's split.
    # Adds the settings file and the command of the best row to a plan.
    make_final_plan: Callable[[Plan, Row | None], Plan]
    efforts: Sequence[int] = (5, 20, 50)  # Numbers of steps in each round, without the warm-up.
    start_timeout_s: float = 1800.0

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        machines = [describe_machine("cpu"), describe_machine("cuda")]
        return {
            "of": "tuning",
            "machine": machines,
            "settings": json.dumps(trial_settings(self.base_settings), default=str),
        }

    def score(self, figures: Mapping[str, float]) -> float:
        return figures["tokens_per_s"]

    def violated_limit(self, figures: Mapping[str, float]) -> str:
        return ""

    def finalize_plan(self, plan: Plan, best: Row | None) -> Plan:
        return self.make_final_plan(plan, best)

    def run(self, row: Row, effort: int, folder: Path) -> Mapping[str, float]:
        steps = WARMUP_STEPS + effort
        record = trial_settings(self.settings_of_row(row))
        name = hashlib.sha256(json.dumps(record, default=str).encode()).hexdigest()[:12]
        run_folder = folder / "runs" / name
        run_folder.mkdir(parents=True, exist_ok=True)
        tune_run = run_folder / "run"
        settings_file = run_folder / "tune.yaml"
        record |= {
            "steps": steps,
            "run": str(tune_run),
            "output": str(run_folder / "adapters"),
            "save_every": steps,
        }
        settings_file.write_text(yaml.safe_dump(record, sort_keys=False))
        step_timeout_s = max(STEP_S_MIN, SLOWDOWN_MAX * row.figures.get("iteration_s", 0.0))
        tune_args: list[str | Path] = ["preamble", "tune", settings_file, "--restart"]
        try:
            with run_child(tune_args, run_folder / "tune.log") as tune_command:
                tune_command.read_output(self.start_timeout_s + steps * step_timeout_s)
        except ChildError as error:
            raise TrialError(f"{error} (see {run_folder})") from None
        # `preamble tune` creates a numbered folder for each start of a run.
        last_start = max(
            tune_run.glob("[1-9]*"),
            key=lambda start_folder: int(start_folder.name),
            default=tune_run,
        )
        steady_steps = [
            step_record
            for step_record in read_logs(last_start, steps).progress
            if step_record.step > WARMUP_STEPS
        ]
        if not steady_steps:
            raise TrialError(f"the run logged no step after its warm-up (see {run_folder})")
        remove_run_folder(run_folder)
        iteration_s = median(step_record.seconds for step_record in steady_steps)
        tokens = sum(step_record.tokens for step_record in steady_steps)
        seconds = sum(step_record.seconds for step_record in steady_steps)
        return {"tokens_per_s": tokens / max(1e-9, seconds), "iteration_s": iteration_s}


def trial_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without DROPPED_KEYS, which are also removed from each task."""
    remaining = {name: value for name, value in settings.items() if name not in DROPPED_KEYS}
    for task_list in ("tasks", "task_templates"):
        if isinstance(remaining.get(task_list), list):
            remaining[task_list] = [
                {name: value for name, value in task.items() if name not in DROPPED_KEYS}
                for task in remaining[task_list]
            ]
    return remaining
