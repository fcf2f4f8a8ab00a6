"""`python -m planning.published.fit_training`: planning.training.efficiency, fitted.

Least squares of logarithms over published runs, held near what is known of the hardware by priors,
so that few and noisy rows cannot pull a constant where it explains their noise. Prints each
constant, the error on the rows it was fitted to, and on each row when it is left out.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import Any

import numpy as np

from planning.published.training_runs import Layer, Run, Runs, layers, runs
from planning.training.efficiency import A100, H100, Software
from planning.training.estimate import estimate_training, layer_seconds
from planning.training.step_time import Efficiency

ROUNDS = 8
NUDGE = 1e-4


@dataclass(frozen=True)
class Prior:
    """A constant is about `middle`; `spread` is of its logarithm."""

    middle: float
    spread: float
    # What it sets, if not the field of its name; and how.
    apply: Callable[[Efficiency, float], Efficiency] | None = None


def _hidden(base: Efficiency, exposed: float) -> Efficiency:
    return replace(base, hidden_forward=1 - exposed, hidden_backward=1 - exposed)


# Spreads: microbenchmarks of products and memory are within a tenth of what training sustains;
# overlap, networks and optimizers differ more from site to site.
PRIORS: Mapping[str, Mapping[str, Prior]] = {
    "a100-80g": {
        "products": Prior(0.75, 0.1),
        "memory": Prior(0.8, 0.1),
        "tail": Prior(0.5, 0.5),
        "hidden_backward": Prior(0.5, 0.3),
        "network": Prior(0.8, 0.3),
        "optimizer_bytes": Prior(60, 0.3),
    },
    "h100": {
        "products": Prior(0.68, 0.1),
        "products_fp8": Prior(0.5, 0.15),
        "gap_s": Prior(100e-6, 0.7),
        "exposed": Prior(0.3, 0.3, _hidden),
    },
}
BASES: Mapping[str, Efficiency] = {"a100-80g": A100, "h100": H100}


@dataclass(frozen=True)
class Fit:
    efficiency: Efficiency
    constants: Mapping[str, float]


@dataclass(frozen=True)
class Evidence:
    runs: Sequence[Run]
    layers: Sequence[Layer]


def evidence(device: str) -> Evidence:
    rows = [run for table in _tables(device) for run in table.runs]
    return Evidence(rows, [one for one in layers() if one.cluster.device.name == device])


def _tables(device: str) -> list[Runs]:
    return [table for table in runs() if table.device == device and table.kind != "zero3"]


def predicted_s(run: Run, efficiency: Efficiency) -> float:
    kind = Software("", efficiency, 0.0, 0.0)
    return estimate_training(run.job, run.split, run.cluster, kind).iteration_s


def fit(device: str, rows: Evidence) -> Fit:
    """Gauss and Newton's steps, halved where they would overshoot."""
    priors = PRIORS[device]
    names = list(priors)

    def constants(x: Sequence[float]) -> dict[str, float]:
        return {n: priors[n].middle * exp(v) for n, v in zip(names, x, strict=True)}

    def efficiency(x: Sequence[float]) -> Efficiency:
        out = BASES[device]
        for name, value in constants(x).items():
            apply = priors[name].apply
            changes: dict[str, Any] = {name: value}
            out = apply(out, value) if apply else replace(out, **changes)
        return out

    def residuals(x: Sequence[float]) -> list[float]:
        kept = [v / priors[n].spread for n, v in zip(names, x, strict=True)]
        return kept + _misfits(rows, efficiency(x))

    x = [0.0] * len(names)
    for _ in range(ROUNDS):
        x = _step(x, residuals)
    return Fit(efficiency(x), constants(x))


def _misfits(rows: Evidence, efficiency: Efficiency) -> list[float]:
    out = [log(predicted_s(run, efficiency) / run.seconds) / run.noise for run in rows.runs]
    kind = Software("", efficiency, 0.0, 0.0)
    for one in rows.layers:
        there, back = layer_seconds(one.job, one.split, one.cluster, kind)
        out.append(log(there * 1000 / one.forward_ms) / one.noise)
        out.append(log(back * 1000 / one.backward_ms) / one.noise)
    return out


def _step(x: list[float], residuals: Callable[[Sequence[float]], list[float]]) -> list[float]:
    here = np.array(residuals(x))
    nudged = [[v + NUDGE * (j == i) for j, v in enumerate(x)] for i in range(len(x))]
    slopes = np.stack([(np.array(residuals(one)) - here) / NUDGE for one in nudged], 1)
    move = np.linalg.solve(slopes.T @ slopes, -slopes.T @ here)
    size = 1.0
    while size > NUDGE:
        there = [float(v) for v in np.array(x) + size * move]
        found = np.array(residuals(there))
        if found @ found <= here @ here:
            return there
        size /= 2
    return x


def left_out(device: str) -> Mapping[str, float]:
    """Signed errors of rows by constants that never saw them.

    Rows of one model in one table that differ in nodes alone are left out together: one of them
    tells the others.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for table in _tables(device):
        if table.kind == "runs":
            for run in table.runs:
                groups.setdefault((table.name, run.name.split()[0]), []).append(run)
    whole = evidence(device)
    errors = {}
    for (table_name, _), group in groups.items():
        kept = [run for run in whole.runs if run not in group]
        found = fit(device, Evidence(kept, whole.layers)).efficiency
        for i, run in enumerate(group):
            key = f"{table_name}: {run.name}" + (f" ({i + 1})" if len(group) > 1 else "")
            errors[key] = predicted_s(run, found) / run.seconds - 1
    return errors


def report(device: str) -> str:
    found = fit(device, evidence(device))
    lines = [device, "  constants"]
    lines += [f"    {name} = {value:.4g}" for name, value in found.constants.items()]
    inside = {
        f"{table.name}: {run.name}": predicted_s(run, found.efficiency) / run.seconds - 1
        for table in _tables(device)
        if table.kind == "runs"
        for run in table.runs
    }
    for name, errors in (("fitted", inside), ("left out", left_out(device))):
        sizes = sorted(abs(error) for error in errors.values())
        lines.append(f"  {name}: {_summary(sizes)}")
        lines += [f"    {100 * error:+5.1f} %  {key}" for key, error in errors.items()]
    return "\n".join(lines)


def _summary(sizes: Sequence[float]) -> str:
    mean = sum(sizes) / len(sizes)
    spread = sqrt(sum(size**2 for size in sizes) / len(sizes))
    ninth = sizes[min(len(sizes) - 1, round(0.9 * (len(sizes) - 1)))]
    return (
        f"{len(sizes)} rows, mean {100 * mean:.1f} %, rms {100 * spread:.1f} %, "
        f"nine of ten within {100 * ninth:.1f} %, worst {100 * sizes[-1]:.1f} %"
    )


def main() -> None:
    for device in PRIORS:
        sys.stdout.write(report(device) + "\n")


if __name__ == "__main__":
    main()
