"""The `preamble plan serve` command: find the best serving configuration within latency limits.

The command converts the specification to a workload, limits and a cluster, from which
`planning.inference.plan` creates the plan. A plan for this machine is also saved for
`preamble serve --profile`.
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
    make_command_parser,
)
from planning.cli.result import CommandResult, render_plan
from planning.cli.specification import DTYPE_ALIASES, Specification
from planning.inference.adapter_memory import ServedAdapters
from planning.inference.estimate import LengthDistribution, Workload
from planning.inference.plan import plan_serving
from planning.inference.requirements import Requirements
from planning.inference.saved_plans import save_plan
from planning.inference.service_levels import OBJECTIVES, Objective, ServiceLimits
from planning.measurement.rounds import DEFAULT_FOLDER, measure_plan
from planning.plan import Plan

EXAMPLES = """
  preamble plan serve llama3-8b --gpu h100 --gpus 4 --input-tokens 600 --input-tokens-p95 1500 \\
      --output-tokens 200 --request-rate 8 --ttft-ms-p95 1500 --itl-ms-p95 60
  preamble plan serve gpt3-20b --gpu a100-80g --gpus 8 --input-tokens 60 --output-tokens 20 \\
      --concurrency 64 --objective latency --output plans/20b
  preamble plan calibrate checkpoints/my-model && preamble plan serve checkpoints/my-model \\
      --calibration calibration.yaml --objective throughput
  preamble plan serve llama3-8b --gpu h100 --gpus 1 --concurrency 32 --adapters 100 --lora-rank 16
  preamble plan serve --spec plan.yaml --json
"""
# The default workload: a page of text as prompt, a paragraph as completion.
DEFAULT_INPUT_TOKENS, DEFAULT_OUTPUT_TOKENS = 512.0, 128.0
# Further names of objectives that a specification may use.
OBJECTIVE_ALIASES = {"throughput_per_gpu": "throughput", "tokens_per_s": "throughput"}
ENGINE_DTYPES = ("bfloat16", "float16", "float32")


def make_parser() -> argparse.ArgumentParser:
    parser = make_command_parser(
        "serve",
        "Find the TP and PP sizes, the batch size, the KV cache size and the number of replicas "
        "that serve a model best within limits. The objective is throughput, latency, or the "
        "fewest GPUs.",
        EXAMPLES,
    )
    add_model_flags(parser)
    add_hardware_flags(parser)
    add_workload_flags(parser)
    limits = parser.add_argument_group("limits").add_argument
    for figure, meaning in (
        ("ttft", "time to first token"),
        ("itl", "inter-token latency"),
        ("request", "duration of a request"),
    ):
        for percentile, percentile_text in (("p50", "median"), ("p95", "95th percentile")):
            limits(
                f"--{figure}-ms-{percentile}",
                metavar="X",
                type=float,
                help=f"maximum {percentile_text} of the {meaning}, in ms",
            )
    limits(
        "--min-tokens-per-s",
        metavar="X",
        type=float,
        help="minimum number of generated tokens per second, summed over all replicas",
    )
    limits("--max-gpus", metavar="N", type=int, help="maximum number of GPUs (default: all)")
    limits(
        "--memory-fraction",
        metavar="X",
        type=float,
        help="maximum fraction of each GPU's memory to use (default: 0.9)",
    )
    limits(
        "--margin-latency",
        metavar="X",
        type=float,
        help="safety margin, as a fraction of each latency limit (default: 0.1)",
    )
    limits(
        "--margin-memory",
        metavar="X",
        type=float,
        help="safety margin, as a fraction of --memory-fraction (default: 0.05)",
    )
    parser.add_argument(
        "--objective",
        metavar="NAME",
        help=f"objective within the limits: {', '.join(OBJECTIVES)} (default: throughput, which "
        "is tokens/s per GPU)",
    )
    add_plan_flags(parser)
    add_shared_flags(parser)
    return parser


def run(args: argparse.Namespace, log: Callable[[str], None]) -> CommandResult:
    specification = Specification.read(args.spec, vars(args))
    model, path = specification.model.config(), specification.model.checkpoint_path
    requirements = Requirements(
        model=model,
        dtype=serving_dtype(specification, model),
        workload=make_workload(specification),
        limits=make_limits(specification),
        cluster=specification.hardware.cluster(),
        calibration=specification.hardware.machine_calibration,
        objective=parse_objective(specification),
        saturate=not has_load(specification),
    )
    plan = plan_serving(requirements, path or "MODEL")
    if args.measure is not None:
        plan = _measure_candidates(args, plan, requirements, path, log)
    if path is not None:
        saved_path = save_plan(plan, requirements)
        if saved_path is not None:
            log(f"saved for `preamble serve --profile {requirements.objective}`: {saved_path}")
    return render_plan(plan, args)


def _measure_candidates(
    args: argparse.Namespace,
    plan: Plan,
    requirements: Requirements,
    path: str | None,
    log: Callable[[str], None],
) -> Plan:
    if path is None:
        raise ConfigError(
            "--measure starts servers and needs weights, which presets and sizes do not have; give "
            "the path of a checkpoint as MODEL"
        )
    from planning.measurement.serving_trial import ServingTrial, check_machine

    check_machine(requirements)
    trial = ServingTrial(requirements, Path(path))
    return measure_plan(plan, trial, Path(args.output or DEFAULT_FOLDER), args.measure, log)


def parse_objective(specification: Specification) -> Objective:
    name = specification.objective or "throughput"
    name = OBJECTIVE_ALIASES.get(name, name)
    for objective in OBJECTIVES:
        if name == objective:
            return objective
    raise ConfigError(f"objective is {name!r}; choose one of: {', '.join(OBJECTIVES)}")


def serving_dtype(specification: Specification, model: GPTConfig) -> str:
    """Return the dtype of the engine, from the first of these sources that is available:

    - `dtype` of the specification.
    - `quality`, a list of allowed dtypes: the first dtype in it that the engine supports.
    - The dtype of the model.
    """
    allowed = [
        DTYPE_ALIASES.get(dtype_name, dtype_name)
        for dtype_name in specification.constraints.quality
    ]
    supported = [dtype_name for dtype_name in allowed if dtype_name in ENGINE_DTYPES]
    if specification.dtype is None and allowed and not supported:
        raise ConfigError(
            f"quality allows {', '.join(allowed)}, but the server supports none of these dtypes; "
            f"add one of: {', '.join(ENGINE_DTYPES)}"
        )
    dtype = specification.dtype or (supported[0] if supported else model.dtype)
    if dtype not in ENGINE_DTYPES:
        raise ConfigError(
            f"the server does not support dtype {dtype}; choose one of: {', '.join(ENGINE_DTYPES)}"
        )
    return dtype


def has_load(specification: Specification) -> bool:
    """Return whether the specification sets a load.

    Without a load, each candidate is planned for saturation (`Requirements.saturate`).
    """
    return (
        specification.workload.request_rate is not None
        or specification.workload.concurrency is not None
    )


def make_workload(specification: Specification) -> Workload:
    section = specification.workload
    return Workload(
        input_tokens=_length_distribution(
            section.input_tokens, section.input_tokens_p95, DEFAULT_INPUT_TOKENS
        ),
        output_tokens=_length_distribution(
            section.output_tokens, section.output_tokens_p95, DEFAULT_OUTPUT_TOKENS
        ),
        request_rate=section.request_rate,
        # Without a load, 1 is a placeholder: `Requirements.workload_for` sets the concurrency that
        # saturates a candidate.
        concurrency=section.concurrency if has_load(specification) else 1,
        adapters=section.adapters,
        virtual_tokens=section.virtual_tokens,
        served_adapters=_served_adapters(specification),
    )


def _served_adapters(specification: Specification) -> ServedAdapters | None:
    """Return the linear adapters of the requests; None: there are none."""
    section, linears = specification.workload, specification.adapter.spec()
    if linears is not None:
        return ServedAdapters(linears, max(1, section.adapters), section.distinct_adapters)
    if section.distinct_adapters is not None:
        raise ConfigError(
            f"distinct_adapters is {section.distinct_adapters}, but it applies only to adapters "
            "that change linears; set a method or a rank of the adapters, or remove it"
        )
    return None


def _length_distribution(
    mean: float | None, p95: float | None, default: float
) -> LengthDistribution:
    mean = default if mean is None else mean
    return LengthDistribution(mean, mean if p95 is None else p95)


def make_limits(specification: Specification) -> ServiceLimits:
    constraints = asdict(specification.constraints)
    limits = {name: limit for name, limit in constraints.items() if name.endswith(("_p50", "_p95"))}
    limits |= {
        "tokens_per_s_min": constraints["min_tokens_per_s"],
        "gpus_max": constraints["max_gpus"],
        "memory_fraction": constraints["memory_fraction"],
        "latency_margin": specification.margins.latency,
        "memory_margin": specification.margins.memory,
    }
    # A limit that is not set has the default of ServiceLimits.
    return ServiceLimits(**{name: limit for name, limit in limits.items() if limit is not None})
