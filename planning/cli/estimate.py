"""`preamble plan estimate`: one configuration's memory, its time by parts, its FLOPs.

Nothing is searched, and nothing is started. Three kinds of work: a step of training, a static batch
(`--infer`), a server of ours under a load (`--infer --continuous`). The JSON's keys are stable.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict

from gpt.config import GPTConfig
from gpt.costs.inference import parameter_count
from gpt.errors import ConfigError
from planning.cli.flags import (
    add_hardware_flags,
    add_model_flags,
    add_shared_flags,
    add_training_flags,
    add_workload_flags,
    parser_of,
)
from planning.cli.result import Told
from planning.cli.specification import Specification
from planning.figures import ledger_of, number, size
from planning.figures import say as said
from planning.hardware import Cluster
from planning.inference.estimate import Percentiles, ServingEstimate, ServingSplit, estimate_serving
from planning.memory_ledger import Ledger
from planning.plan import Trust
from planning.published.static_batch import (
    StaticEstimate,
    StaticJob,
    estimate_static,
    what_would_fit,
)
from planning.training.estimate import (
    TrainingEstimate,
    TrainingJob,
    TrainingSplit,
    check_split,
    estimate_training,
)
from planning.training.search import name_of

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
    parser = parser_of("estimate", "What one configuration costs, and how fast it is.", EXAMPLES)
    add_model_flags(parser)
    add_hardware_flags(parser)
    split = parser.add_argument_group("the split").add_argument
    split("--tp", metavar="N", type=int, default=1, help="tensor ranks (default: 1)")
    split("--pp", metavar="N", type=int, default=1, help="pipeline stages (default: 1)")
    split("--dp", metavar="N", type=int, help="copies (default: what --gpus leaves)")
    train = parser.add_argument_group("training").add_argument
    train("--vpp", metavar="N", type=int, default=1, help="pieces of a stage (default: 1)")
    train("--micro-batch", metavar="N", type=int, default=1, help="sequences (default: 1)")
    train("--recompute", choices=("none", "selective", "block", "full"), default="none")
    train("--recompute-layers", metavar="N", type=int, default=0, help="of a stage, with block")
    train("--sequence-parallel", action="store_true")
    add_training_flags(train)
    infer = parser.add_argument_group("inference").add_argument
    infer("--infer", action="store_true", help="a static batch, as FasterTransformer ran it")
    infer("--batch", metavar="N", type=int, default=1, help="requests (default: 1)")
    infer("--continuous", action="store_true", help="with --infer: a server of ours instead")
    infer("--running-requests-max", metavar="N", type=int, default=64)
    infer("--step-tokens-max", metavar="N", type=int, default=512)
    infer("--kv-tokens", metavar="N", type=int, help="(default: what memory allows)")
    infer("--kv-dtype", choices=("auto", "fp8"), default="auto", help="of which memory is told")
    add_workload_flags(parser)
    add_shared_flags(parser)
    return parser


def run(args: argparse.Namespace, say: Callable[[str], None]) -> Told:
    specification = Specification.read(args.spec, vars(args))
    model = specification.model.config()
    if args.infer or args.continuous:
        return _infer(args, specification, model)
    return _train(args, specification, model)


# ------------------------------------------------------------------------------------ training


def _check_flags(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is {getattr(args, name)}; it must be at least 1")


def _train(args: argparse.Namespace, asked: Specification, model: GPTConfig) -> Told:
    _check_flags(args, "tp", "pp", "vpp", "micro_batch")
    if args.recompute_layers and args.recompute != "block":
        raise ConfigError("--recompute-layers is for --recompute block; leave it out, or take that")
    copies = args.dp if args.dp is not None else 1
    cluster = asked.hardware.cluster(args.tp * args.pp * max(1, copies))
    split = TrainingSplit(
        args.tp,
        args.pp,
        _copies(args, cluster),
        args.vpp,
        args.micro_batch,
        args.recompute,
        args.recompute_layers,
        args.sequence_parallel,
    )
    job = asked.training_job(model, split.dp * split.micro_batch)
    check_split(job, split, cluster)
    found = estimate_training(job, split, cluster)
    return Told(_training_text(job, split, cluster, found), training_values(found))


def _copies(args: argparse.Namespace, cluster: Cluster) -> int:
    """What the GPUs leave, where nobody says."""
    copy = args.tp * args.pp
    if args.dp is not None:
        if args.dp < 1:
            raise ConfigError(f"--dp is {args.dp}; it must be at least 1")
        if copy * args.dp != cluster.gpus:
            raise ConfigError(
                f"tp {args.tp} x pp {args.pp} x dp {args.dp} is {copy * args.dp} GPUs, and --gpus "
                f"says {cluster.gpus}; leave out --dp or --gpus"
            )
        return int(args.dp)
    if cluster.gpus % copy:
        below = cluster.gpus // copy * copy
        near = f"{below} or {below + copy}" if below else f"{copy}"
        raise ConfigError(
            f"{cluster.gpus} GPUs are no whole number of copies of tp {args.tp} x pp {args.pp} = "
            f"{copy}; the nearest --gpus is {near}"
        )
    return cluster.gpus // int(copy)


def training_values(found: TrainingEstimate) -> Mapping[str, object]:
    return {
        "parameters": found.parameters,
        "flops_per_iteration": found.flops_per_iteration,
        "model_flops_per_iteration": found.model_flops,
        "iteration_s": found.iteration_s,
        "seconds": dict(found.seconds),
        "tflops_per_gpu": found.tflops_per_gpu,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "bubble_fraction": found.bubble_fraction,
        "tokens_per_s": found.tokens_per_s,
        **memory_values(found.memory),
        "trust": asdict(found.trust_time),
        "memory_trust": asdict(found.trust_memory),
    }


def memory_values(memory: Ledger) -> Mapping[str, object]:
    return {
        "memory_bytes": {
            "weights": memory.weights,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations_first_stage": memory.activations,
            "kv": memory.kv,
            "workspace": memory.workspace,
            "total": memory.total,
            "capacity": memory.capacity,
        },
        # What is tight runs as a rule: it is too much where nothing is left to go wrong.
        "fits": memory.verdict != "over",
        "verdict": memory.verdict,
    }


def _training_text(
    job: TrainingJob, split: TrainingSplit, cluster: Cluster, found: TrainingEstimate
) -> str:
    what = "an adapter" if job.trainable == "adapter" else "all parameters"
    parts = sorted(found.seconds.items(), key=lambda part: -part[1])
    lines = [
        ("model", f"{billions(found.parameters)} parameters, sequences of {job.sequence:,}"),
        ("training", f"{what}, batches of {job.global_batch:,}, {job.dtype}"),
        ("on", f"{cluster.gpus:,} {cluster.device.name}: {name_of(split)}"),
        ("step", f"{said('iteration_s', found.iteration_s)}   [{found.trust_time}]"),
        ("of it", ", ".join(_part(name, s, found.iteration_s) for name, s in parts if s > 0)),
        ("speed", f"{number(found.tokens_per_s)} tokens/s, {number(found.tflops_per_gpu)} TFLOP/s "
            f"each GPU, MFU {100 * found.mfu:.1f} %, HFU {100 * found.hfu:.1f} %"),
        ("FLOPs", f"{found.flops_per_iteration:.4g} a step, {found.model_flops:.4g} of them the "
            "model's own"),
        ("bubble", f"{100 * found.bubble_fraction:.1f} % of the ideal step"),
        *memory_lines(found.memory, found.trust_memory),
    ]  # fmt: skip
    return lines_of(lines)


def _part(name: str, seconds: float, whole: float) -> str:
    return f"{name.replace('_', ' ')} {100 * seconds / whole:.0f} %"


# ----------------------------------------------------------------------------------- inference


def _infer(args: argparse.Namespace, asked: Specification, model: GPTConfig) -> Told:
    _check_flags(args, "tp", "pp", "batch")
    load = asked.workload
    if load.input_tokens is None or load.output_tokens is None:
        raise ConfigError(
            "inference is of prompts and answers; give --input-tokens and --output-tokens"
        )
    if args.continuous:
        return _serve(args, asked, model)
    cluster = asked.hardware.cluster(args.tp * args.pp)
    job = StaticJob(
        model,
        _whole("--input-tokens", load.input_tokens),
        _whole("--output-tokens", load.output_tokens),
        args.batch,
        asked.dtype or "float16",
        args.tp,
        args.pp,
    )
    found = estimate_static(job, cluster)
    return Told(_static_text(job, cluster, found), static_values(job, found))


def _whole(flag: str, value: float) -> int:
    if value != int(value):
        raise ConfigError(f"{flag} is {value:g}; in a static batch all are alike: a whole number")
    return int(value)


def static_values(job: StaticJob, found: StaticEstimate) -> Mapping[str, object]:
    return {
        "parameters": parameter_count(job.model),
        "prefill_ms": found.prefill_ms,
        "decode_ms_per_token": found.decode_ms_per_token,
        "request_ms": found.request_ms,
        "tokens_per_s": found.tokens_per_s,
        "requests_per_s": found.requests_per_s,
        "parts_ms": dict(found.parts_ms),
        **memory_values(found.memory),
        "trust": asdict(found.trust),
    }


def _static_text(job: StaticJob, cluster: Cluster, found: StaticEstimate) -> str:
    copies = cluster.gpus // (job.tp * job.pp)
    many = f", one of {copies} copies" if copies > 1 else ""
    parts = sorted(found.parts_ms.items(), key=lambda part: -part[1])
    lines = [
        ("model", f"{billions(parameter_count(job.model))} parameters in {job.dtype}"),
        ("batch", f"{job.batch:,} request{'s' * (job.batch > 1)} of {job.input_tokens:,} tokens, "
            f"{job.output_tokens:,} new ones each"),
        ("on", f"{cluster.device.name}: TP{job.tp} PP{job.pp}{many}"),
        ("request", f"{said('request_ms', found.request_ms)}   [{found.trust}]"),
        ("of it", ", ".join(_part(name, ms, found.request_ms) for name, ms in parts if ms > 0)),
        ("prefill", f"{said('prefill_ms', found.prefill_ms)}, then "
            f"{said('decode_ms', found.decode_ms_per_token)} a token"),
        ("speed", f"{number(found.tokens_per_s)} tokens/s, "
            f"{number(found.requests_per_s)} requests/s"),
        *memory_lines(found.memory, None),
        *(("", sentence) for sentence in what_would_fit(job, cluster)),
    ]  # fmt: skip
    return lines_of(lines)


# ------------------------------------------------------------------------------- a server of ours


def _serve(args: argparse.Namespace, asked: Specification, model: GPTConfig) -> Told:
    """One server of ours, under one load."""
    from planning.cli.serve import dtype_of, loaded, workload_of

    costs = asked.hardware.machine
    ranks = args.tp * args.pp
    cluster = asked.hardware.cluster(ranks)
    if cluster.gpus < ranks:
        raise ConfigError(
            f"--tp {args.tp} x --pp {args.pp} take {ranks} GPUs, and there are {cluster.gpus}; "
            f"--gpus {ranks}, or smaller --tp and --pp"
        )
    split = ServingSplit(
        args.tp,
        args.pp,
        cluster.gpus // ranks,
        args.running_requests_max,
        args.step_tokens_max,
        args.kv_tokens,
        kv_dtype=args.kv_dtype,
    )
    if not loaded(asked):
        raise ConfigError("what load there is is not said; give --request-rate or --concurrency")
    dtype = dtype_of(asked, model)
    found = estimate_serving(model, dtype, workload_of(asked), split, cluster, costs)
    return Told(_serving_text(model, dtype, split, cluster, found), _serving_values(model, found))


def _serving_values(model: GPTConfig, found: ServingEstimate) -> Mapping[str, object]:
    return {
        "parameters": parameter_count(model),
        "ttft_ms": asdict(found.ttft_ms),
        "itl_ms": asdict(found.itl_ms),
        "request_ms": asdict(found.request_ms),
        "tokens_per_s": found.tokens_per_s,
        "requests_per_s": found.requests_per_s,
        "concurrency": found.concurrency,
        "utilization": found.utilization,
        "kv_tokens": found.kv_tokens,
        **memory_values(found.memory),
        "trust": asdict(found.trust),
    }


def _serving_text(
    model: GPTConfig, dtype: str, split: ServingSplit, cluster: Cluster, found: ServingEstimate
) -> str:
    many = f" x{split.replicas} replicas" if split.replicas > 1 else ""
    head = [
        ("model", f"{billions(parameter_count(model))} parameters in {dtype}"),
        ("on", f"{cluster.device.name}: TP{split.tp} PP{split.pp}{many}, "
            f"{split.running_requests_max} requests at once"),
    ]  # fmt: skip
    room = ("room", f"{found.kv_tokens:,} tokens of keys and values")
    memory = memory_lines(found.memory, None)
    if not math.isfinite(found.request_ms.p95):
        words = "none: there is no room for a request"
        if math.isfinite(found.utilization):
            words = (
                f"too little: {number(found.requests_per_s)} requests/s at most, and "
                f"{number(found.utilization)} times as many come"
            )
        return lines_of([*head, ("speed", words), room, *memory])
    return lines_of(
        [
            *head,
            ("first token", f"{_spread('ttft_ms', found.ttft_ms)}   [{found.trust}]"),
            ("next token", _spread("itl_ms", found.itl_ms)),
            ("request", _spread("request_ms", found.request_ms)),
            ("speed", f"{number(found.tokens_per_s)} tokens/s, {number(found.requests_per_s)} "
                f"requests/s, {number(found.concurrency)} at once"),
            ("busy", f"{100 * found.utilization:.0f} % of the time"),
            room,
            *memory,
        ]
    )  # fmt: skip


def _spread(figure: str, times: Percentiles) -> str:
    return f"{said(figure, times.p50)} median, {said(figure, times.p95)} for 19 of 20"


# ---------------------------------------------------------------------------------------- words


def memory_lines(memory: Ledger, trust: Trust | None) -> list[tuple[str, str]]:
    verdict = {
        "fits": "it fits",
        "tight": f"tight: {size(memory.capacity - memory.total)} is left for what nobody counts",
        "over": "it does not fit",
    }[memory.verdict]
    bar = f"   [{trust}]" if trust is not None else ""
    return [("memory", f"{ledger_of(memory)}{bar}"), ("verdict", verdict)]


def billions(count: int) -> str:
    return f"{count / 1e9:.4g} B" if count >= 1e9 else f"{count / 1e6:.4g} M"


def lines_of(lines: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name:12}{text}" for name, text in lines if text)
