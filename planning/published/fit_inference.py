"""Fit of the FasterTransformer constants to published latencies; leave-one-model-out errors.

`python -m planning.published.fit_inference` prints the constants and two errors for each model: the
error of its published latencies if they are part of the fit, and if they are left out. The second
error is what to expect for a model without published latencies. All latencies have equal weights.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields

import numpy as np
import numpy.typing as npt

from planning.published.faster_transformer import FITTED, FittedConstants
from planning.published.inference_runs import PublishedCase, latency_cases

# The start and the prior of the fit: estimates from the speeds of single kernels. The prior keeps
# constants realistic that the published latencies alone cannot determine.
INITIAL_CONSTANTS = FittedConstants(
    weight_read=0.88,
    kv_read=0.78,
    score_s=8.3e-12,
    element_s=1.67e-10,
    layer_s=85e-6,
    width_s=5e-9,
    prompt_layer_s=330e-6,
    latency=1.1,
    node_s=30e-6,
    message_s=1.2e-8,
    draw_s=7.8e-11,
    step_s=500e-6,
    wait=0.03,
)
CONSTANT_NAMES = tuple(field.name for field in fields(FittedConstants))
# The cost of a constant is PRIOR_WEIGHT / 2 * log(constant / prior) ** 2. The cost of a latency is
# log(predicted / published) ** 2 / 2 up to a log error of HUBER_DELTA. Larger log errors count
# linearly, to limit the effect of tables from older software.
PRIOR_WEIGHT = 0.2
HUBER_DELTA = 0.08
ITERATIONS_MAX = 40
FINITE_DIFFERENCE = 1e-3  # Step of a constant's logarithm for a derivative.

Array = npt.NDArray[np.float64]


def constants_from_logs(logs: Array) -> FittedConstants:
    return FittedConstants(
        **{name: float(number) for name, number in zip(CONSTANT_NAMES, np.exp(logs), strict=True)}
    )


def logs_from_constants(constants: FittedConstants) -> Array:
    values: Array = np.array([asdict(constants)[name] for name in CONSTANT_NAMES])
    return np.log(values)


def log_errors(cases: Sequence[PublishedCase], logs: Array) -> Array:
    """Return the logarithms of predicted / published."""
    constants = constants_from_logs(logs)
    relative_errors: Array = np.array([case.error(constants) for case in cases])
    return np.log1p(relative_errors)


def huber_cost(residuals: Array, logs: Array) -> float:
    """Return the cost of the fit: the Huber loss of all latencies, and the cost of the prior."""
    absolute = np.abs(residuals)
    latency_costs = np.where(
        absolute < HUBER_DELTA, absolute**2 / 2, HUBER_DELTA * (absolute - HUBER_DELTA / 2)
    )
    return float(
        latency_costs.sum()
        + PRIOR_WEIGHT / 2 * ((logs - logs_from_constants(INITIAL_CONSTANTS)) ** 2).sum()
    )


def fit_constants(cases: Sequence[PublishedCase]) -> FittedConstants:
    """Fit the constants by Levenberg-Marquardt.

    The variables are the logarithms of the constants, and the residuals are log(predicted /
    published).
    """
    logs = logs_from_constants(INITIAL_CONSTANTS)
    prior_logs = logs_from_constants(INITIAL_CONSTANTS)
    damping = 1e-2
    residuals = log_errors(cases, logs)
    for _ in range(ITERATIONS_MAX):
        cost = huber_cost(residuals, logs)
        jacobian = np.stack(
            [
                (log_errors(cases, logs + shift) - residuals) / FINITE_DIFFERENCE
                for shift in FINITE_DIFFERENCE * np.eye(len(CONSTANT_NAMES))
            ],
            1,
        )
        # With these weights, the weighted squares have the same gradient as the Huber loss.
        weight = np.minimum(1, HUBER_DELTA / np.maximum(np.abs(residuals), 1e-12))
        hessian = jacobian.T @ (weight[:, None] * jacobian) + PRIOR_WEIGHT * np.eye(
            len(CONSTANT_NAMES)
        )
        gradient = jacobian.T @ (weight * residuals) + PRIOR_WEIGHT * (logs - prior_logs)
        is_better = False
        while not is_better and damping < 1e6:
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -gradient)
            new_residuals = log_errors(cases, logs + step)
            is_better = huber_cost(new_residuals, logs + step) < cost
            damping *= 0.2 if is_better else 4
        if not is_better:
            break
        logs, residuals = logs + step, new_residuals
        if cost - huber_cost(residuals, logs) < 1e-7 * cost:
            break
    return constants_from_logs(logs)


def _is_of_model(name: str) -> Callable[[PublishedCase], bool]:
    return lambda case: case.model == name


# Groups of published latencies. Each group is left out of one fit.
MODELS = tuple(dict.fromkeys(case.model for case in latency_cases()))
HOLDOUT_GROUPS: Mapping[str, Callable[[PublishedCase], bool]] = {
    **{name: _is_of_model(name) for name in MODELS},
    "pipelines": lambda case: case.job.pp > 1,
    "across nodes": lambda case: case.job.tp > 8,
    "one GPU": lambda case: case.job.tp == 1,
}


def holdout_errors(group: Callable[[PublishedCase], bool]) -> list[float]:
    """Return the errors of a group with constants fitted to all latencies outside of it."""
    constants = fit_constants([case for case in latency_cases() if not group(case)])
    return [case.error(constants) for case in latency_cases() if group(case)]


def error_summary(relative_errors: Sequence[float]) -> str:
    absolute = sorted(abs(error) for error in relative_errors)
    mean, p90 = sum(absolute) / len(absolute), absolute[int(0.9 * (len(absolute) - 1))]
    bias = sum(relative_errors) / len(relative_errors)
    return f"mean {mean:6.1%}  p90 {p90:6.1%}  worst {absolute[-1]:6.1%}  bias {bias:+6.1%}"


def main() -> int:
    constants = fit_constants(latency_cases())
    lines = ["constants"]
    lines += [f"    {name}={value:.3g}," for name, value in asdict(constants).items()]
    lines += [
        "",
        f"{'fitted':14} {error_summary([case.error(constants) for case in latency_cases()])}",
    ]
    lines += [
        f"{'current':14} {error_summary([case.error(FITTED) for case in latency_cases()])}",
        "",
    ]
    model_holdout_errors = []
    for name, group in HOLDOUT_GROUPS.items():
        fitted_errors = [case.error(constants) for case in latency_cases() if group(case)]
        holdout = holdout_errors(group)
        if name in MODELS:
            model_holdout_errors += holdout
        lines += [
            f"{name:14} {error_summary(fitted_errors)}  ({len(fitted_errors)} rows)",
            f"{'  left out':14} {error_summary(holdout)}",
        ]
    lines += ["", f"{'all left out':14} {error_summary(model_holdout_errors)}"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
