"""Saved plans: stores planned settings of this machine, which `preamble serve --profile` reads.

A plan is saved if it was calibrated or measured on this machine, and if its objective is the name
of a profile. The file contains no model path: `preamble serve` applies the settings to any model of
the same shape.
"""

from contextlib import suppress
from pathlib import Path

import yaml

from gpt.files.atomic_files import write_atomic
from planning.inference.plan import settings_header
from planning.inference.requirements import Requirements
from planning.plan import Plan
from serving.profiles import PLANNED_SETTINGS, PROFILES, describe_machine, plan_file


def is_for_this_machine(plan: Plan, requirements: Requirements) -> bool:
    """Return whether the plan is based on measurements of this machine."""
    best = plan.best
    if best is None:
        return False
    calibrated = (
        requirements.calibration is not None
        and requirements.calibration.device in describe_machine(requirements.calibration.kind)
    )
    return calibrated or bool(best.measured)


def save_plan(plan: Plan, requirements: Requirements) -> Path | None:
    """Save the settings of the best candidate, and return the path of the file.

    Save no file and return None in these cases: no candidate fits; the objective is not a profile;
    the plan is not for this machine; the file cannot be written.
    """
    best = plan.best
    if (
        best is None
        or requirements.objective not in PROFILES
        or not is_for_this_machine(plan, requirements)
    ):
        return None
    settings = {name: value for name, value in best.settings.items() if name in PLANNED_SETTINGS}
    path = plan_file(
        requirements.model, requirements.dtype, requirements.device, requirements.objective
    )
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_atomic(
            path,
            (settings_header(best) + yaml.safe_dump(settings, sort_keys=False)).encode(),
            durable=False,
        )
    return None
