"""The `preamble plan estimate` command: memory, step time and FLOPs of one configuration.

The command estimates a training step, a static batch of inference (`--infer`), or a Preamble server
under a load (`--continuous`). It does not search for a configuration and does not run a model. The
JSON keys are stable.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

from gpt.config import GPTConfig
from gpt.costs.inference import parameter_count
from gpt.costs.linear_adapter import check_spec, describe_spec
from gpt.errors import ConfigError
from planning.cli.flags import (
    add_context_tokens,
    add_hardware_flags,
    add_model_flags,
    add_shared_flags,
    add_training_flags,
    add_workload_flags,
    make_command_parser,
)
from planning.cli.result import CommandResult
from planning.cli.specification import Specification
from planning.figures import format_bytes, format_figure, format_ledger, format_number
from planning.hardware import Cluster
from planning.inference.adapter_memory import server_memory_mb
from planning.inference.estimate import Percentiles, ServingEstimate, ServingSplit, estimate_serving
from planning.inference.model_split import ModelSplit
from planning.inference.plan import adapter_memory_text
from planning.memory_ledger import MemoryLedger
from planning.plan import Confidence
from planning.published.static_batch import (
    StaticEstimate,
    StaticJob,
    estimate_static,
    fit_advice_lines,
)
from planning.training.estimate import (
    TrainingEstimate,
    TrainingJob,
    TrainingSplit,
    check_split,
    estimate_training,
)
from planning.training.search import split_name

EXAMPLES = """
  preamble plan estimate gpt3-22b --gpu a100-80g --gpus 8 --tp 8 --micro-batch 4 --global-batch 4 \\
      --recompute selective --sequence-parallel
  preamble plan estimate --layers 24 --hidden 4096 --heads 32 --seq 2048 --vocab 51200 \\
      --gpu a100-80g --gpus 64 --tp 1 --micro-batch 4 --global-batch 2048 --json
  preamble plan estimate gpt3-20b --gpu a100-80g --tp 4 --infer --input-tokens 60 \\
      --output-tokens 20 --batch 64
  preamble plan estimate llama3-8b --gpu h100 --infer --continuous --input-tokens 600 \\
      --output-tokens 200 --request-rate 4
"""


def make_parser() -> argparse.ArgumentParser:
    parser = make_command_parser(
        "estimate", "Estimate the memory, speed and FLOPs of one configuration.", EXAMPLES
    )
    add_model_flags(parser)
    add_hardware_flags(parser)
    split = parser.add_argument_group("parallelism").add_argument
    split("--tp", metavar="N", type=int, default=1, help="tensor-parallel size (default: 1)")
    split("--pp", metavar="N", type=int, default=1, help="pipeline-parallel size (default: 1)")
    split(
        "--ep",
        metavar="N",
        type=int,
        default=1,
        help="expert-parallel size of a server (default: 1)",
    )
    split(
        "--dp",
        metavar="N",
        type=int,
        help="data-parallel size, for training (default: --gpus / (tp x pp))",
    )
    train = parser.add_argument_group("training").add_argument
    train(
        "--vpp",
        metavar="N",
        type=int,
        default=1,
        help="model chunks per pipeline stage; more than 1 is the interleaved schedule "
        "(default: 1)",
    )
    train(
        "--micro-batch",
        metavar="N",
        type=int,
        default=1,
        help="sequences per micro-batch (default: 1)",
    )
    train(
        "--recompute",
        choices=("none", "selective", "block", "full"),
        default="none",
        help="activation checkpointing (default: none)",
    )
    train(
        "--recompute-layers",
        metavar="N",
        type=int,
        default=0,
        help="number of layers that each stage recomputes, required by --recompute block",
    )
    train("--sequence-parallel", action="store_true", help="use sequence parallelism")
    add_training_flags(train)
    add_context_tokens(train)
    infer = parser.add_argument_group("inference").add_argument
    infer(
        "--infer",
        action="store_true",
        help="estimate a static batch, as FasterTransformer runs it, instead of a training step",
    )
    infer(
        "--batch",
        metavar="N",
        type=int,
        default=1,
        help="number of requests in the batch (default: 1)",
    )
    infer(
        "--continuous",
        action="store_true",
        help="estimate a Preamble server with continuous batching, instead of a static batch",
    )
    infer(
        "--running-requests-max",
        metavar="N",
        type=int,
        default=64,
        help="maximum number of requests that run at once (default: 64)",
    )
    infer(
        "--step-tokens-max",
        metavar="N",
        type=int,
        default=512,
        help="maximum number of tokens per step (default: 512)",
    )
    infer(
        "--kv-tokens",
        metavar="N",
        type=int,
        help="size of each replica's KV cache in tokens (default: the size that a server chooses)",
    )
    infer(
        "--kv-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="KV-cache dtype (affects the memory estimate only; default: auto)",
    )
    add_workload_flags(parser)
    add_shared_flags(parser)
    return parser


def run(args: argparse.Namespace, log: Callable[[str], None]) -> CommandResult:
    specification = Specification.read(args.spec, vars(args))
    model = specification.model.config()
    _check_positive_flags(args, "tp", "pp", "ep")
    if args.ep > 1 and not args.continuous:
        raise ConfigError("--ep applies only to a server; add --continuous")
    if args.infer or args.continuous:
        return _estimate_inference(args, specification, model)
    return _estimate_training(args, specification, model)


def _check_positive_flags(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is {getattr(args, name)}; it must be at least 1")


# ------------------------------------------------------------------------------------ training


def _estimate_training(
    args: argparse.Namespace, specification: Specification, model: GPTConfig
) -> CommandResult:
    _check_positive_flags(args, "vpp", "micro_batch")
    if args.recompute_layers and args.recompute != "block":
        raise ConfigError(
            f"--recompute-layers is {args.recompute_layers}, and --recompute is {args.recompute}; "
            "remove --recompute-layers, or set --recompute block"
        )
    dp = args.dp if args.dp is not None else 1
    cluster = specification.hardware.cluster(args.tp * args.pp * max(1, dp))
    split = TrainingSplit(
        tp=args.tp,
        pp=args.pp,
        dp=_dp_size(args, cluster),
        vpp=args.vpp,
        micro_batch=args.micro_batch,
        recompute=args.recompute,
        recompute_layers=args.recompute_layers,
        sequence_parallel=args.sequence_parallel,
    )
    job = specification.training_job(model, split.dp * split.micro_batch)
    check_split(job, split, cluster)
    estimate = estimate_training(job, split, cluster)
    return CommandResult(_training_text(job, split, cluster, estimate), training_values(estimate))


def _dp_size(args: argparse.Namespace, cluster: Cluster) -> int:
    """Return the data-parallel size: --dp, by default the number of GPUs / (tp x pp)."""
    ranks_per_replica = args.tp * args.pp
    if args.dp is not None:
        if args.dp < 1:
            raise ConfigError(f"--dp is {args.dp}; it must be at least 1")
        if ranks_per_replica * args.dp != cluster.gpus:
            raise ConfigError(
                f"tp {args.tp} x pp {args.pp} x dp {args.dp} is {ranks_per_replica * args.dp} "
                f"GPUs, but --gpus is {cluster.gpus}; remove --dp or --gpus"
            )
        return int(args.dp)
    if cluster.gpus % ranks_per_replica:
        below = cluster.gpus // ranks_per_replica * ranks_per_replica
        nearest = f"{below} or {below + ranks_per_replica}" if below else f"{ranks_per_replica}"
        raise ConfigError(
            f"{cluster.gpus} GPUs are not a multiple of tp {args.tp} x pp {args.pp} = "
            f"{ranks_per_replica}; the nearest --gpus is {nearest}"
        )
    return cluster.gpus // int(ranks_per_replica)


def training_values(estimate: TrainingEstimate) -> Mapping[str, object]:
    return {
        "parameters": estimate.parameters,
        "flops_per_iteration": estimate.flops_per_iteration,
        "model_flops_per_iteration": estimate.model_flops,
        "iteration_s": estimate.iteration_s,
        "seconds": dict(estimate.seconds),
        "tflops_per_gpu": estimate.tflops_per_gpu,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "bubble_fraction": estimate.bubble_fraction,
        "tokens_per_s": estimate.tokens_per_s,
        **memory_values(estimate.memory),
        "trust": asdict(estimate.time_confidence),
        "memory_trust": asdict(estimate.memory_confidence),
    }


def memory_values(memory: MemoryLedger) -> Mapping[str, object]:
    return {
        "memory_bytes": {
            "weights": memory.weights,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations_first_stage": memory.activations,
            "kv": memory.kv,
            "adapters": memory.adapters,
            "workspace": memory.workspace,
            "total": memory.total,
            "capacity": memory.capacity,
        },
        # A configuration with the verdict "tight" usually runs, so it counts as fitting.
        "fits": memory.verdict != "over",
        "verdict": memory.verdict,
    }


def _training_text(
    job: TrainingJob, split: TrainingSplit, cluster: Cluster, estimate: TrainingEstimate
) -> str:
    trained_part = "an adapter" if job.trainable == "adapter" else "all parameters"
    if job.linears is not None:
        trained_part = describe_spec(job.linears)
    parts = sorted(estimate.seconds.items(), key=lambda step_part: -step_part[1])
    lines = [
        (
            "model",
            f"{format_parameters(estimate.parameters)} parameters, sequences of {job.sequence:,}",
        ),
        ("training", f"{trained_part}, batches of {job.global_batch:,}, {job.dtype}"),
        ("on", f"{cluster.gpus:,} {cluster.device.name}: {split_name(split)}"),
        (
            "step",
            f"{format_figure('iteration_s', estimate.iteration_s)}   [{estimate.time_confidence}]",
        ),
        (
            "",
            ", ".join(
                _format_share(name, seconds, estimate.iteration_s)
                for name, seconds in parts
                if seconds > 0
            ),
        ),
        (
            "speed",
            f"{format_number(estimate.tokens_per_s)} tokens/s, "
            f"{format_number(estimate.tflops_per_gpu)} TFLOP/s "
            f"per GPU, MFU {100 * estimate.mfu:.1f} %, HFU {100 * estimate.hfu:.1f} %",
        ),
        (
            "FLOPs",
            f"{estimate.flops_per_iteration:.4g} per step, {estimate.model_flops:.4g} "
            "without recomputation",
        ),
        ("bubble", f"{100 * estimate.bubble_fraction:.1f} % of the ideal step"),
        *memory_lines(estimate.memory, estimate.memory_confidence),
    ]
    return format_lines(lines)


def _format_share(name: str, seconds: float, total_seconds: float) -> str:
    return f"{name.replace('_', ' ')} {100 * seconds / total_seconds:.0f} %"


# ----------------------------------------------------------------------------------- inference


def _estimate_inference(
    args: argparse.Namespace, specification: Specification, model: GPTConfig
) -> CommandResult:
    _check_positive_flags(args, "batch")
    workload = specification.workload
    if workload.input_tokens is None or workload.output_tokens is None:
        raise ConfigError(
            "an inference estimate needs the lengths of prompts and completions; give "
            "--input-tokens and --output-tokens"
        )
    if args.continuous:
        return _estimate_server(args, specification, model)
    cluster = specification.hardware.cluster(args.tp * args.pp)
    job = StaticJob(
        model=model,
        input_tokens=_require_integer("--input-tokens", workload.input_tokens),
        output_tokens=_require_integer("--output-tokens", workload.output_tokens),
        batch=args.batch,
        dtype=specification.dtype or "float16",
        tp=args.tp,
        pp=args.pp,
    )
    estimate = estimate_static(job, cluster)
    return CommandResult(_static_text(job, cluster, estimate), static_values(job, estimate))


def _require_integer(flag: str, value: float) -> int:
    if value != int(value):
        raise ConfigError(
            f"{flag} is {value:g}; it must be a whole number, because all requests of a static "
            "batch have this length"
        )
    return int(value)


def static_values(job: StaticJob, estimate: StaticEstimate) -> Mapping[str, object]:
    return {
        "parameters": parameter_count(job.model),
        "prefill_ms": estimate.prefill_ms,
        "decode_ms_per_token": estimate.decode_ms_per_token,
        "request_ms": estimate.request_ms,
        "tokens_per_s": estimate.tokens_per_s,
        "requests_per_s": estimate.requests_per_s,
        "parts_ms": dict(estimate.parts_ms),
        **memory_values(estimate.memory),
        "trust": asdict(estimate.confidence),
    }


def _static_text(job: StaticJob, cluster: Cluster, estimate: StaticEstimate) -> str:
    replicas = cluster.gpus // (job.tp * job.pp)
    replicas_note = f", one of {replicas} replicas" if replicas > 1 else ""
    parts = sorted(estimate.parts_ms.items(), key=lambda latency_part: -latency_part[1])
    lines = [
        ("model", f"{format_parameters(parameter_count(job.model))} parameters in {job.dtype}"),
        (
            "batch",
            f"{job.batch:,} request{'s' * (job.batch > 1)} of {job.input_tokens:,} tokens, "
            f"{job.output_tokens:,} new tokens each",
        ),
        ("on", f"{cluster.device.name}: TP{job.tp} PP{job.pp}{replicas_note}"),
        (
            "request",
            f"{format_figure('request_ms', estimate.request_ms)}   [{estimate.confidence}]",
        ),
        (
            "",
            ", ".join(_format_share(name, ms, estimate.request_ms) for name, ms in parts if ms > 0),
        ),
        (
            "prefill",
            f"{format_figure('prefill_ms', estimate.prefill_ms)}, then "
            f"{format_figure('decode_ms', estimate.decode_ms_per_token)} per token",
        ),
        (
            "speed",
            f"{format_number(estimate.tokens_per_s)} tokens/s, "
            f"{format_number(estimate.requests_per_s)} requests/s",
        ),
        *memory_lines(estimate.memory, None),
        *(("", sentence) for sentence in fit_advice_lines(job, cluster)),
    ]
    return format_lines(lines)


# ---------------------------------------------------------------------------- continuous batching


def _estimate_server(
    args: argparse.Namespace, specification: Specification, model: GPTConfig
) -> CommandResult:
    """Estimate a Preamble server under one load."""
    from planning.cli.serve import has_load, make_workload, serving_dtype

    calibration = specification.hardware.machine_calibration
    model_split = ModelSplit(args.tp, args.pp, args.ep)
    ranks = model_split.ranks
    cluster = specification.hardware.cluster(ranks)
    if cluster.gpus < ranks:
        raise ConfigError(
            f"{model_split.name} needs {ranks} GPUs, and there are {cluster.gpus}; set --gpus "
            f"{ranks}, or smaller parallel sizes"
        )
    split = ServingSplit(
        tp=args.tp,
        pp=args.pp,
        replicas=cluster.gpus // ranks,
        running_requests_max=args.running_requests_max,
        step_tokens_max=args.step_tokens_max,
        kv_tokens=args.kv_tokens,
        kv_dtype=args.kv_dtype,
        ep=args.ep,
    )
    if not has_load(specification):
        raise ConfigError("no load is given; set --request-rate or --concurrency")
    dtype, workload = serving_dtype(specification, model), make_workload(specification)
    adapters = workload.served_adapters
    adapter_line, adapter_values = "", {}
    if adapters is not None:
        check_spec(model, adapters.spec)
        sizes = model, dtype, model_split
        resident = adapters.resident(split.running_requests_max)
        split = replace(split, adapter_memory_mb=adapters.memory_mb(*sizes, resident))
        adapter_line = adapter_memory_text(model, dtype, split, adapters)
        memory_mb = server_memory_mb(split.adapter_memory_mb)
        adapter_values = {
            "adapter_bytes": adapters.rank_bytes(*sizes),
            "adapter_memory_mb": memory_mb,
            "resident_adapters": adapters.capacity(*sizes, memory_mb),
        }
    estimate = estimate_serving(model, dtype, workload, split, cluster, calibration)
    return CommandResult(
        _serving_text(model, dtype, split, cluster, estimate, adapter_line),
        {**_serving_values(model, estimate), **adapter_values},
    )


def _serving_values(model: GPTConfig, estimate: ServingEstimate) -> Mapping[str, object]:
    return {
        "parameters": parameter_count(model),
        "ttft_ms": asdict(estimate.ttft_ms),
        "itl_ms": asdict(estimate.itl_ms),
        "request_ms": asdict(estimate.request_ms),
        "tokens_per_s": estimate.tokens_per_s,
        "requests_per_s": estimate.requests_per_s,
        "concurrency": estimate.concurrency,
        "utilization": estimate.utilization,
        "kv_tokens": estimate.kv_tokens,
        "kv_requests": estimate.kv_requests,
        **memory_values(estimate.memory),
        "trust": asdict(estimate.confidence),
    }


def _serving_text(
    model: GPTConfig,
    dtype: str,
    split: ServingSplit,
    cluster: Cluster,
    estimate: ServingEstimate,
    adapter_line: str,
) -> str:
    replicas_note = f" x{split.replicas} replicas" if split.replicas > 1 else ""
    head = [
        ("model", f"{format_parameters(parameter_count(model))} parameters in {dtype}"),
        (
            "on",
            f"{cluster.device.name}: {split.model_split.name}{replicas_note}, "
            f"{split.running_requests_max} requests at once",
        ),
    ]
    kv_line = (
        "KV cache",
        f"{estimate.kv_tokens:,} tokens; it holds {estimate.kv_requests:,} requests of average "
        "length",
    )
    memory = [("adapters", adapter_line), *memory_lines(estimate.memory, None)]
    if not math.isfinite(estimate.request_ms.p95):
        overload_text = "none: the weights and one request do not fit in memory"
        if math.isfinite(estimate.utilization):
            overload_text = (
                f"overloaded: at most {format_number(estimate.requests_per_s)} requests/s are "
                f"answered, but requests arrive at {format_number(estimate.utilization)} times "
                "that rate"
            )
        return format_lines([*head, ("speed", overload_text), kv_line, *memory])
    return format_lines(
        [
            *head,
            (
                "first token",
                f"{_format_percentiles('ttft_ms', estimate.ttft_ms)}   [{estimate.confidence}]",
            ),
            ("next token", _format_percentiles("itl_ms", estimate.itl_ms)),
            ("request", _format_percentiles("request_ms", estimate.request_ms)),
            (
                "speed",
                f"{format_number(estimate.tokens_per_s)} tokens/s, "
                f"{format_number(estimate.requests_per_s)} requests/s, "
                f"{format_number(estimate.concurrency)} at once",
            ),
            ("utilization", f"{100 * estimate.utilization:.0f} %"),
            kv_line,
            *memory,
        ]
    )


def _format_percentiles(figure: str, percentiles: Percentiles) -> str:
    median = format_figure(figure, percentiles.p50)
    return f"median {median}, p95 {format_figure(figure, percentiles.p95)}"


# ----------------------------------------------------------------------------------- formatting


def memory_lines(memory: MemoryLedger, confidence: Confidence | None) -> list[tuple[str, str]]:
    verdict = {
        "fits": "it fits",
        "tight": f"tight: only {format_bytes(memory.capacity - memory.total)} is left for "
        "fragmentation and libraries",
        "over": "it does not fit",
    }[memory.verdict]
    confidence_text = f"   [{confidence}]" if confidence is not None else ""
    return [("memory", f"{format_ledger(memory)}{confidence_text}"), ("verdict", verdict)]


def format_parameters(count: int) -> str:
    return f"{count / 1e9:.4g} B" if count >= 1e9 else f"{count / 1e6:.4g} M"


def format_lines(lines: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name:12}{text}" for name, text in lines if text)
