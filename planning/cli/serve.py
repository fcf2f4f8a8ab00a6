"""`preamble plan serve`: how to serve a model to these clients, within their limits.

The wish becomes a workload, limits and a cluster; the plan is `planning.inference.plan`'s. What
was planned for this very machine is kept where `preamble serve --profile` looks for it.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from planning.cli.flags import (
    add_hardware_flags,
    add_model_flags,
    add_plan_flags,
    add_shared_flags,
    add_workload_flags,
    parser_of,
)
from planning.cli.result import Told, told_plan
from planning.cli.specification import DTYPE_NAMES, Specification
from planning.inference.estimate import Lengths, Workload
from planning.inference.objective import Wish
from planning.inference.plan import plan_serving
from planning.inference.saved_plans import keep
from planning.inference.service_levels import OBJECTIVES, Limits, Objective
from planning.measurement.rounds import UNNAMED, measure
from planning.plan import Plan

EXAMPLES = """
  preamble plan serve llama3-8b --gpu h100 --gpus 4 --input-tokens 600 --input-tokens-p95 1500 \\
      --output-tokens 200 --request-rate 8 --ttft-ms-p95 1500 --itl-ms-p95 60
  preamble plan serve gpt3-20b --gpu a100-80g --gpus 8 --input-tokens 60 --output-tokens 20 \\
      --concurrency 64 --objective latency --output plans/20b
  preamble plan calibrate checkpoints/my-model && preamble plan serve checkpoints/my-model \\
      --calibration calibration.yaml --objective throughput
  preamble plan serve --spec plan.yaml --json
"""
# Clients that nobody describes: a page of text in, a paragraph out.
INPUT_TOKENS, OUTPUT_TOKENS = 512.0, 128.0
# As other tools, and people, call the same.
OBJECTIVE_NAMES = {"throughput_per_gpu": "throughput", "tokens_per_s": "throughput"}


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "serve",
        "The split, batch, memory and replicas that serve a model best within limits: for "
        "throughput, for latency, or on the fewest GPUs.",
        EXAMPLES,
    )
    add_model_flags(parser)
    add_hardware_flags(parser)
    add_workload_flags(parser)
    limits = parser.add_argument_group("limits").add_argument
    for figure, what in (
        ("ttft", "to the first token"),
        ("itl", "between tokens"),
        ("request", "of a whole request"),
    ):
        limits(f"--{figure}-ms-p50", metavar="X", type=float, help=f"ms {what}: the median")
        limits(f"--{figure}-ms-p95", metavar="X", type=float, help="that 19 of 20 stay within")
    limits("--min-tokens-per-s", metavar="X", type=float, help="of all replicas together")
    limits("--max-gpus", metavar="N", type=int)
    limits("--memory-fraction", metavar="X", type=float, help="that may be used (default: 0.9)")
    limits("--margin-latency", metavar="X", type=float, help="off each limit (default: 0.1)")
    limits("--margin-memory", metavar="X", type=float, help="off the memory (default: 0.05)")
    parser.add_argument("--objective", metavar="NAME", help=f"{', '.join(OBJECTIVES)}: what is "
        "best among all that keep the limits (default: throughput, for each GPU)")  # fmt: skip
    add_plan_flags(parser)
    add_shared_flags(parser)
    return parser


def run(args: argparse.Namespace, say: Callable[[str], None]) -> Told:
    asked = Specification.read(args.spec, vars(args))
    model, path = asked.model.config(), asked.model.checkpoint
    wish = Wish(
        model,
        dtype_of(asked, model),
        workload_of(asked),
        limits_of(asked),
        asked.hardware.cluster(),
        asked.hardware.machine,
        objective_of(asked),
        fill=not loaded(asked),
    )
    plan = plan_serving(wish, path or "MODEL")
    if args.measure is not None:
        plan = _measured(args, plan, wish, path, say)
    if path is not None:
        kept = keep(plan, wish)
        if kept is not None:
            say(f"kept for `preamble serve --profile {wish.objective}`: {kept}")
    return told_plan(plan, args)


def _measured(
    args: argparse.Namespace, plan: Plan, wish: Wish, path: str | None, say: Callable[[str], None]
) -> Plan:
    if path is None:
        raise ConfigError(
            "--measure starts servers, and needs a checkpoint's path for them; a preset has no "
            "weights"
        )
    from planning.measurement.serving_trial import ServingTrial, check_machine

    check_machine(wish)
    trial = ServingTrial(wish, Path(path))
    return measure(plan, trial, Path(args.output or UNNAMED), args.measure, say)


def objective_of(asked: Specification) -> Objective:
    word = asked.objective or "throughput"
    word = OBJECTIVE_NAMES.get(word, word)
    for objective in OBJECTIVES:
        if word == objective:
            return objective
    raise ConfigError(f"objective is {word!r}; known are: {', '.join(OBJECTIVES)}")


def dtype_of(asked: Specification, model: GPTConfig) -> str:
    """What our engine computes in: the flag's, else the first of the wanted ones that it has."""
    named = [DTYPE_NAMES.get(one, one) for one in asked.constraints.quality]
    computed = [one for one in named if one in ENGINE_DTYPES]
    if asked.dtype is None and named and not computed:
        raise ConfigError(
            f"quality allows {', '.join(named)}, none of which is computed here; add one of "
            f"{', '.join(ENGINE_DTYPES)}"
        )
    found = asked.dtype or (computed[0] if computed else model.dtype)
    if found not in ENGINE_DTYPES:
        raise ConfigError(
            f"a server does not compute in {found}; known are: {', '.join(ENGINE_DTYPES)}"
        )
    return found


ENGINE_DTYPES = ("bfloat16", "float16", "float32")


def loaded(asked: Specification) -> bool:
    """Whether it is said how much is asked at once; else each server is full."""
    return asked.workload.request_rate is not None or asked.workload.concurrency is not None


def workload_of(asked: Specification) -> Workload:
    wish = asked.workload
    return Workload(
        _lengths(wish.input_tokens, wish.input_tokens_p95, INPUT_TOKENS),
        _lengths(wish.output_tokens, wish.output_tokens_p95, OUTPUT_TOKENS),
        wish.request_rate,
        wish.concurrency if loaded(asked) else 1,
        wish.adapters,
        wish.virtual_tokens,
    )


def _lengths(mean: float | None, p95: float | None, usual: float) -> Lengths:
    mean = usual if mean is None else mean
    return Lengths(mean, mean if p95 is None else p95)


def limits_of(asked: Specification) -> Limits:
    wish = asdict(asked.constraints)
    names = {
        **{name: name for name in wish if name.endswith(("_p50", "_p95"))},
        "min_tokens_per_s": "tokens_per_s_min",
        "max_gpus": "gpus_max",
        "memory_fraction": "memory_fraction",
    }
    values = {there: wish[here] for here, there in names.items()}
    values |= {"latency_margin": asked.margins.latency, "memory_margin": asked.margins.memory}
    return Limits(**{name: value for name, value in values.items() if value is not None})
