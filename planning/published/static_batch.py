"""A static batch, as FasterTransformer served it: all requests start together and end together.

One pass over all prompts, then one pass per further token, as if every request had the mean length
of context. What a pass takes is `planning.published.faster_transformer`'s business; this adds
passes up, and counts the bytes that the fullest GPU holds meanwhile.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from gpt.config import GPTConfig
from gpt.costs.inference import kv_bytes_per_token
from gpt.errors import ConfigError
from gpt.parallel.sharding import check_split, on_stage, parameters, part, stage_layers
from planning.figures import size
from planning.hardware import Cluster, divisors
from planning.memory_ledger import TIGHT_SHARE, Ledger
from planning.plan import Trust
from planning.published.faster_transformer import (
    FITTED,
    WEIGHT_BYTES,
    Batch,
    Constants,
    Machine,
    held_weights,
    pass_seconds,
)

# What a GPU holds besides weights and KV: a context with its libraries' buffers, and temporary
# results for each prompt token in flight, in hidden states; of those a part is divided by the
# tensor ranks. The sum of both on one GPU and the first are fitted to published memory.
CONTEXT_BYTES = 2_730_000_000
PROMPT_WIDTHS = 9.5
PROMPT_WIDTHS_SHARDED = 16.0

# Error bars: nine in ten published latencies of a model that was kept from the fit are within the
# first. Elsewhere nothing was held against the estimate; those are what we would bet on.
ERROR = 0.12
ERROR_OUTSIDE = 0.20
ERROR_NARROW = 0.25
ERROR_DEVICE = 0.30
FITTED_DEVICES = ("a100-40g", "a100-80g")
FITTED_BATCH_MAX = 256
FITTED_PROMPT_MAX = 512
FITTED_TP_MAX = 32


@dataclass(frozen=True)
class StaticJob:
    model: GPTConfig
    input_tokens: int
    output_tokens: int
    batch: int
    dtype: str = "float16"  # Of the weights: int8 and int4 too, which compute in 16 bits.
    tp: int = 1
    pp: int = 1


@dataclass(frozen=True)
class StaticEstimate:
    prefill_ms: float  # To the first token.
    decode_ms_per_token: float  # Of the mean context.
    request_ms: float
    tokens_per_s: float  # Output, of all requests.
    requests_per_s: float
    memory: Ledger
    trust: Trust
    parts_ms: Mapping[str, float]  # What request_ms is made of.


def estimate_static(
    job: StaticJob, cluster: Cluster, constants: Constants = FITTED
) -> StaticEstimate:
    _check(job, cluster)
    machine = Machine(job.model, job.dtype, job.tp, job.pp, cluster, constants)
    first = pass_seconds(machine, Batch(job.batch, job.input_tokens, job.input_tokens, True))
    context = job.input_tokens + job.output_tokens / 2
    later = pass_seconds(machine, Batch(job.batch, 1, context, False))
    parts = {name: 1e3 * s for name, s in first.items()}
    for name, seconds in later.items():
        parts[name] = parts.get(name, 0.0) + 1e3 * seconds * (job.output_tokens - 1)
    request_ms = sum(parts.values())
    return StaticEstimate(
        prefill_ms=1e3 * sum(first.values()),
        decode_ms_per_token=1e3 * sum(later.values()),
        request_ms=request_ms,
        tokens_per_s=1e3 * job.batch * job.output_tokens / request_ms,
        requests_per_s=1e3 * job.batch / request_ms,
        memory=static_memory(job, cluster),
        trust=_trust(job, cluster),
        parts_ms=parts,
    )


def static_memory(job: StaticJob, cluster: Cluster) -> Ledger:
    """Of the stage that holds most."""
    width = 4 if job.dtype == "float32" else 2
    widths = PROMPT_WIDTHS + PROMPT_WIDTHS_SHARDED / job.tp
    prompts = job.batch * job.input_tokens * job.model.hidden_size * width
    workspace = CONTEXT_BYTES + int(widths * prompts)
    computed = "float32" if width == 4 else "float16"
    tokens = job.batch * (job.input_tokens + job.output_tokens)
    matrices = held_weights(job.model, job.tp) * (width - WEIGHT_BYTES[job.dtype])
    stages = [
        Ledger(
            capacity=cluster.device.memory_bytes,
            weights=int(elements * width - layers * matrices),
            kv=kv_bytes_per_token(job.model, layers, job.tp, computed) * tokens,
            workspace=workspace,
        )
        for layers, elements in _held(job.model, job.tp, job.pp)
    ]
    return max(stages, key=lambda ledger: ledger.total)


def what_would_fit(job: StaticJob, cluster: Cluster) -> list[str]:
    """Sentences: what is too much, and the nearest jobs that are not. None where it fits."""
    ledger = static_memory(job, cluster)
    if ledger.verdict != "over":
        return []
    alone = ledger.weights + CONTEXT_BYTES > TIGHT_SHARE * ledger.capacity
    weights, capacity = size(ledger.weights), size(ledger.capacity)
    lines = [f"the weights alone are too much: {weights} of {capacity}"]
    if not alone:
        lines = [f"weights and KV are too much: {weights} and {size(ledger.kv)} of {capacity}"]
    batch = _batch_max(job, cluster)
    if batch:
        lines.append(f"a batch of {batch:,} fits TP{job.tp} PP{job.pp}")
    for tp, pp in _splits(job.model, cluster):
        if _fits(replace(job, tp=tp, pp=pp), cluster):
            lines.append(f"TP{tp} PP{pp}, {tp * pp} GPUs, holds it")
            break
    return lines


def _fits(job: StaticJob, cluster: Cluster) -> bool:
    return static_memory(job, cluster).verdict == "fits"


def _batch_max(job: StaticJob, cluster: Cluster) -> int:
    low, high = 0, job.batch
    while high - low > 1:
        middle = (low + high) // 2
        fits = _fits(replace(job, batch=middle), cluster)
        low, high = (middle, high) if fits else (low, middle)
    return low


def _splits(model: GPTConfig, cluster: Cluster) -> list[tuple[int, int]]:
    """The way people go: more of a node's GPUs, and then more stages of all of them."""
    ranks = [tp for tp in divisors(cluster.gpus_per_node) if _divides(model, tp)]
    return [(tp, 1) for tp in ranks] + [(ranks[-1], pp) for pp in range(2, model.num_layers + 1)]


def _divides(model: GPTConfig, tp: int) -> bool:
    try:
        check_split(model, tp, 1)
    except ConfigError:
        return False
    return True


@lru_cache(maxsize=256)
def _held(model: GPTConfig, tp: int, pp: int) -> tuple[tuple[int, int], ...]:
    """Layers and parameters of each stage's first tensor rank, which none holds more than."""
    table = list(parameters(model).values())
    stages = []
    for (layers,) in stage_layers(model.num_layers, pp):
        held = [p for p in table if on_stage(model, p.name, layers)]
        stages.append((len(layers), sum(prod(part(p, model, 0, tp).shape(p.shape)) for p in held)))
    return tuple(stages)


def _check(job: StaticJob, cluster: Cluster) -> None:
    for name in ("input_tokens", "output_tokens", "batch"):
        if getattr(job, name) < 1:
            raise ConfigError(f"{name} is {getattr(job, name)}; it must be at least 1")
    check_split(job.model, job.tp, job.pp)
    if job.tp * job.pp > cluster.gpus:
        raise ConfigError(
            f"tensor parallel {job.tp} x pipeline parallel {job.pp} need {job.tp * job.pp} GPUs, "
            f"and there are {cluster.gpus}; --gpus {job.tp * job.pp}, or smaller --tp and --pp"
        )


def _trust(job: StaticJob, cluster: Cluster) -> Trust:
    device = cluster.device.name
    if device not in FITTED_DEVICES:
        note = f"constants fitted on A100s, single kernels measured on {device}"
        return Trust("spec-sheet", ERROR_DEVICE, note)
    if job.dtype not in ("float16", "bfloat16"):
        return Trust("spec-sheet", ERROR_NARROW, f"no published row has weights in {job.dtype}")
    limits = {
        "batch": (job.batch, FITTED_BATCH_MAX),
        "prompt": (job.input_tokens, FITTED_PROMPT_MAX),
        "tensor parallel": (job.tp, FITTED_TP_MAX),
    }
    for name, (value, most) in limits.items():
        if value > most:
            note = f"{name} {value} is beyond the published rows, which end at {most}"
            return Trust("spec-sheet", ERROR_OUTSIDE, note)
    return Trust("spec-sheet", ERROR)
