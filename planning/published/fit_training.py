"""Fit of the training efficiency constants to published runs, with leave-one-out errors.

`python -m planning.published.fit_training` fits the constants of `planning.training.efficiency` to
published runs, by least squares of logarithms. The runs are few and noisy, so priors from hardware
measurements prevent overfitting. The command prints the constants, the error of each run in the
fit, and its error if all runs of the same model and table are left out of the fit.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import Any

import numpy as np

from planning.published.training_runs import (
    PublishedLayer,
    PublishedRun,
    PublishedTable,
    layer_times,
    run_tables,
)
from planning.training.efficiency import A100, H100, Software
from planning.training.estimate import estimate_training, layer_seconds
from planning.training.step_time import Efficiency

ITERATIONS = 8
# Step of a variable for a numerical derivative. Also the fraction of a Gauss-Newton step at which
# the halving of the step stops.
FINITE_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Prior:
    """The prior of a constant: its center, and the standard deviation of its logarithm."""

    center: float
    spread: float
    # A function that sets the constant in an Efficiency. None: the field with the constant's name
    # is set.
    apply: Callable[[Efficiency, float], Efficiency] | None = None


def _with_exposed_share(base: Efficiency, exposed: float) -> Efficiency:
    return replace(base, hidden_forward=1 - exposed, hidden_backward=1 - exposed)


# Speeds of matmuls and memory in training differ from microbenchmarks by about a tenth. Overlap,
# network speed and optimizer traffic differ more between clusters, so their priors have wider
# spreads.
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
        "exposed": Prior(0.3, 0.3, _with_exposed_share),
    },
}
BASES: Mapping[str, Efficiency] = {"a100-80g": A100, "h100": H100}


@dataclass(frozen=True)
class FittedEfficiency:
    efficiency: Efficiency
    constants: Mapping[str, float]


@dataclass(frozen=True)
class FitRows:
    runs: Sequence[PublishedRun]
    layers: Sequence[PublishedLayer]


def rows_of_device(device: str) -> FitRows:
    rows = [run for table in _tables_of_device(device) for run in table.runs]
    return FitRows(rows, [layer for layer in layer_times() if layer.cluster.device.name == device])


def _tables_of_device(device: str) -> list[PublishedTable]:
    return [table for table in run_tables() if table.device == device and table.kind != "zero3"]


def predicted_s(run: PublishedRun, efficiency: Efficiency) -> float:
    software_stack = Software("", efficiency, error=0.0, error_fp8=0.0)
    return estimate_training(run.job, run.split, run.cluster, software_stack).iteration_s


def fit_efficiency(device: str, rows: FitRows) -> FittedEfficiency:
    """Fit the constants by Gauss-Newton steps; a step is halved while it increases the residuals.

    The variables of the fit are log(constant / center of the constant's prior).
    """
    priors = PRIORS[device]
    names = list(priors)

    def constants(logs: Sequence[float]) -> dict[str, float]:
        return {
            name: priors[name].center * exp(log_ratio)
            for name, log_ratio in zip(names, logs, strict=True)
        }

    def efficiency(logs: Sequence[float]) -> Efficiency:
        fitted = BASES[device]
        for name, constant in constants(logs).items():
            apply = priors[name].apply
            changes: dict[str, Any] = {name: constant}
            fitted = apply(fitted, constant) if apply else replace(fitted, **changes)
        return fitted

    def residuals(logs: Sequence[float]) -> list[float]:
        prior_residuals = [
            log_ratio / priors[name].spread for name, log_ratio in zip(names, logs, strict=True)
        ]
        return prior_residuals + _row_residuals(rows, efficiency(logs))

    fitted_logs = [0.0] * len(names)
    for _ in range(ITERATIONS):
        fitted_logs = _gauss_newton_step(fitted_logs, residuals)
    return FittedEfficiency(efficiency(fitted_logs), constants(fitted_logs))


def _row_residuals(rows: FitRows, efficiency: Efficiency) -> list[float]:
    residuals = [log(predicted_s(run, efficiency) / run.seconds) / run.noise for run in rows.runs]
    software_stack = Software("", efficiency, error=0.0, error_fp8=0.0)
    for layer in rows.layers:
        forward_s, backward_s = layer_seconds(layer.job, layer.split, layer.cluster, software_stack)
        residuals.append(log(forward_s * 1000 / layer.forward_ms) / layer.noise)
        residuals.append(log(backward_s * 1000 / layer.backward_ms) / layer.noise)
    return residuals


def _gauss_newton_step(
    logs: list[float], residuals: Callable[[Sequence[float]], list[float]]
) -> list[float]:
    current = np.array(residuals(logs))
    derivatives = []
    for index in range(len(logs)):
        shifted_logs = list(logs)
        shifted_logs[index] += FINITE_DIFFERENCE
        derivatives.append((np.array(residuals(shifted_logs)) - current) / FINITE_DIFFERENCE)
    jacobian = np.stack(derivatives, 1)
    direction = np.linalg.solve(jacobian.T @ jacobian, -jacobian.T @ current)
    step_scale = 1.0
    while step_scale > FINITE_DIFFERENCE:
        candidate = [float(log_ratio) for log_ratio in np.array(logs) + step_scale * direction]
        candidate_residuals = np.array(residuals(candidate))
        if candidate_residuals @ candidate_residuals <= current @ current:
            return candidate
        step_scale /= 2
    return logs


def holdout_errors(device: str) -> Mapping[str, float]:
    """Return the signed error of each run with constants that were fitted without the run.

    Runs of the same model and table are left out together, because they predict each other.
    """
    groups: dict[tuple[str, str], list[PublishedRun]] = {}
    for table in _tables_of_device(device):
        if table.kind == "runs":
            for run in table.runs:
                groups.setdefault((table.name, run.name.split()[0]), []).append(run)
    all_rows = rows_of_device(device)
    errors = {}
    for (table_name, _), group in groups.items():
        other_runs = [run for run in all_rows.runs if run not in group]
        fitted = fit_efficiency(device, FitRows(other_runs, all_rows.layers)).efficiency
        for index, run in enumerate(group):
            key = f"{table_name}: {run.name}" + (f" ({index + 1})" if len(group) > 1 else "")
            errors[key] = predicted_s(run, fitted) / run.seconds - 1
    return errors


def fit_report(device: str) -> str:
    fitted = fit_efficiency(device, rows_of_device(device))
    lines = [device, "  constants"]
    lines += [f"    {name} = {value:.4g}" for name, value in fitted.constants.items()]
    fitted_errors = {
        f"{table.name}: {run.name}": predicted_s(run, fitted.efficiency) / run.seconds - 1
        for table in _tables_of_device(device)
        if table.kind == "runs"
        for run in table.runs
    }
    for name, errors in (("fitted", fitted_errors), ("left out", holdout_errors(device))):
        absolute_errors = sorted(abs(error) for error in errors.values())
        lines.append(f"  {name}: {_summary(absolute_errors)}")
        lines += [f"    {100 * error:+5.1f} %  {key}" for key, error in errors.items()]
    return "\n".join(lines)


def _summary(absolute_errors: Sequence[float]) -> str:
    count = len(absolute_errors)
    mean = sum(absolute_errors) / count
    rms = sqrt(sum(error**2 for error in absolute_errors) / count)
    p90 = absolute_errors[min(count - 1, round(0.9 * (count - 1)))]
    return (
        f"{count} rows, mean {100 * mean:.1f} %, rms {100 * rms:.1f} %, "
        f"nine of ten within {100 * p90:.1f} %, worst {100 * absolute_errors[-1]:.1f} %"
    )


def main() -> None:
    for device in PRIORS:
        sys.stdout.write(fit_report(device) + "\n")


if __name__ == "__main__":
    main()
