"""`python -m planning.published.fit_inference`: fits FasterTransformer's constants.

Prints them, the error of each model's rows, and the same with that model kept out of the fit: the
only errors that say anything of a model that nobody published. Every row counts alike.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields

import numpy as np
import numpy.typing as npt

from planning.published.faster_transformer import FITTED, Constants
from planning.published.inference_runs import Case, times

# Where the fit begins, and what it is drawn back to: estimates from single kernels' speeds, so
# that two constants which the rows cannot tell apart stay near what each of them means.
GUESS = Constants(
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
NAMES = tuple(field.name for field in fields(Constants))
# A constant that is e times its guess costs as much as this many rows that are e times off.
PULL = 0.2
# Errors beyond count by their size, not its square: some tables are of older programs.
OUTLIER = 0.08
ROUNDS_MAX = 40
STEP = 1e-3

Array = npt.NDArray[np.float64]


def constants_of(logs: Array) -> Constants:
    return Constants(**{name: float(x) for name, x in zip(NAMES, np.exp(logs), strict=True)})


def logs_of(constants: Constants) -> Array:
    values: Array = np.array([asdict(constants)[name] for name in NAMES])
    return np.log(values)


def errors(cases: Sequence[Case], logs: Array) -> Array:
    """Logarithms of predicted over published."""
    constants = constants_of(logs)
    off: Array = np.array([case.error(constants) for case in cases])
    return np.log1p(off)


def cost(wrong: Array, logs: Array) -> float:
    size = np.abs(wrong)
    each = np.where(size < OUTLIER, size**2 / 2, OUTLIER * (size - OUTLIER / 2))
    return float(each.sum() + PULL / 2 * ((logs - logs_of(GUESS)) ** 2).sum())


def fit(cases: Sequence[Case]) -> Constants:
    """Levenberg and Marquardt's way, on logarithms of constants and of errors."""
    logs, guess, damping = logs_of(GUESS), logs_of(GUESS), 1e-2
    wrong = errors(cases, logs)
    for _ in range(ROUNDS_MAX):
        now = cost(wrong, logs)
        slopes = np.stack([(errors(cases, logs + s) - wrong) / STEP for s in STEP * _units()], 1)
        weight = np.minimum(1, OUTLIER / np.maximum(np.abs(wrong), 1e-12))
        curve = slopes.T @ (weight[:, None] * slopes) + PULL * np.eye(len(NAMES))
        slope = slopes.T @ (weight * wrong) + PULL * (logs - guess)
        better = False
        while not better and damping < 1e6:
            step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), -slope)
            tried = errors(cases, logs + step)
            better = cost(tried, logs + step) < now
            damping *= 0.2 if better else 4
        if not better:
            break
        logs, wrong = logs + step, tried
        if now - cost(wrong, logs) < 1e-7 * now:
            break
    return constants_of(logs)


def _units() -> Array:
    return np.eye(len(NAMES))


def _of_model(name: str) -> Callable[[Case], bool]:
    return lambda case: case.model == name


# Groups of rows that are kept from the fit, one at a time.
MODELS = tuple(dict.fromkeys(case.model for case in times()))
GROUPS: Mapping[str, Callable[[Case], bool]] = {
    **{name: _of_model(name) for name in MODELS},
    "pipelines": lambda case: case.job.pp > 1,
    "across nodes": lambda case: case.job.tp > 8,
    "one GPU": lambda case: case.job.tp == 1,
}


def left_out(group: Callable[[Case], bool]) -> list[float]:
    """Errors of a group's rows, from constants that were fitted without them."""
    constants = fit([case for case in times() if not group(case)])
    return [case.error(constants) for case in times() if group(case)]


def words(found: Sequence[float]) -> str:
    size = sorted(abs(x) for x in found)
    mean, tenth = sum(size) / len(size), size[int(0.9 * (len(size) - 1))]
    bias = sum(found) / len(found)
    return f"mean {mean:6.1%}  p90 {tenth:6.1%}  worst {size[-1]:6.1%}  bias {bias:+6.1%}"


def main() -> int:
    constants = fit(times())
    out = ["constants"]
    out += [f"    {name}={value:.3g}," for name, value in asdict(constants).items()]
    out += ["", f"{'fitted':14} {words([case.error(constants) for case in times()])}"]
    out += [f"{'as it stands':14} {words([case.error(FITTED) for case in times()])}", ""]
    everything = []
    for name, group in GROUPS.items():
        own = [case.error(constants) for case in times() if group(case)]
        kept = left_out(group)
        everything += kept if name in MODELS else []
        out += [f"{name:14} {words(own)}  ({len(own)} rows)", f"{'  kept out':14} {words(kept)}"]
    out += ["", f"{'models out':14} {words(everything)}"]
    sys.stdout.write("\n".join(out) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
