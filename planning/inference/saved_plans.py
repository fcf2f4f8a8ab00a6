"""A plan that was made for this machine, kept where `preamble serve --profile` looks for it.

Only what was calibrated or measured here is kept, and only for an objective that is a profile. It
is a settings file without a model in it: whoever serves one of that shape starts from it.
"""

from contextlib import suppress
from pathlib import Path

import yaml

from planning.atomic_write import put
from planning.inference.objective import Wish
from planning.inference.plan import head
from planning.plan import Plan
from serving.profiles import PLANNED, PROFILES, machine, plan_file


def made_here(plan: Plan, wish: Wish) -> bool:
    """Whether the plan says what this machine does."""
    best = plan.best
    if best is None:
        return False
    calibrated = wish.costs is not None and wish.costs.device in machine(wish.costs.kind)
    return calibrated or bool(best.measured)


def keep(plan: Plan, wish: Wish) -> Path | None:
    """Where it is now; None: it is no such plan, or there is no room for it."""
    best = plan.best
    if best is None or wish.objective not in PROFILES or not made_here(plan, wish):
        return None
    values = {name: value for name, value in best.settings.items() if name in PLANNED}
    path = plan_file(wish.model, wish.dtype, wish.device, wish.objective)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        return put(path, (head(best) + yaml.safe_dump(values, sort_keys=False)).encode())
    return None
