"""Static batch estimate: latency and memory of one FasterTransformer batch.

All requests of a static batch start and end together. One prefill pass computes all prompts and the
first output tokens; each later output token takes one decode pass, estimated with the mean context
length. `planning.published.faster_transformer` estimates the time of a pass. This module adds the
times of all passes, and computes the memory of the GPU that needs the most.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from gpt.config import GPTConfig
from gpt.costs.inference import kv_bytes_per_token
from gpt.errors import ConfigError
from gpt.parallel.pipeline_stages import stage_layers
from gpt.parallel.weight_sharding import check_split, is_on_stage, parameter_specs, shard_spec
from planning.figures import format_bytes
from planning.hardware import Cluster, divisors
from planning.memory_ledger import TIGHT_SHARE, MemoryLedger
from planning.plan import Confidence
from planning.published.faster_transformer import (
    FITTED,
    WEIGHT_BYTES,
    BatchPass,
    FittedConstants,
    ShardedModel,
    layer_weights_per_rank,
    pass_seconds,
)

# GPU memory besides weights and KV cache: the CUDA context with library buffers, and a workspace of
#   (WORKSPACE_WIDTHS + WORKSPACE_WIDTHS_SHARDED / tp) hidden states per prompt token.
# CONTEXT_BYTES and the sum WORKSPACE_WIDTHS + WORKSPACE_WIDTHS_SHARDED are fitted to published
# memory.
CONTEXT_BYTES = 2_730_000_000
WORKSPACE_WIDTHS = 9.5
WORKSPACE_WIDTHS_SHARDED = 16.0

# Relative error bars. For models that were left out of the fit, nine in ten published latencies are
# within ERROR_FITTED of the prediction. The other error bars are estimates, because there are no
# published rows to compare with.
ERROR_FITTED = 0.12
ERROR_EXTRAPOLATED = 0.20  # A size exceeds its FITTED_*_MAX below.
ERROR_OTHER_DTYPE = 0.25  # The weights are neither float16 nor bfloat16.
ERROR_DEVICE = 0.30  # The GPU is not one of FITTED_DEVICES.
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
    # Dtype of the weights. Matmuls with int8 and int4 weights compute in 16 bits.
    dtype: str = "float16"
    tp: int = 1
    pp: int = 1


@dataclass(frozen=True)
class StaticEstimate:
    prefill_ms: float  # Time to first token.
    # Time of each output token after the first, with the mean context length.
    decode_ms_per_token: float
    request_ms: float
    tokens_per_s: float  # Generated tokens of all requests.
    requests_per_s: float
    memory: MemoryLedger
    confidence: Confidence
    parts_ms: Mapping[str, float]  # Milliseconds by part of the model; their sum is request_ms.


def estimate_static(
    job: StaticJob, cluster: Cluster, constants: FittedConstants = FITTED
) -> StaticEstimate:
    _check_job(job, cluster)
    sharded_model = ShardedModel(job.model, job.dtype, job.tp, job.pp, cluster, constants)
    prefill_parts = pass_seconds(
        sharded_model, BatchPass(job.batch, job.input_tokens, job.input_tokens, is_prefill=True)
    )
    context = job.input_tokens + job.output_tokens / 2
    decode_parts = pass_seconds(sharded_model, BatchPass(job.batch, 1, context, is_prefill=False))
    parts = {name: 1e3 * seconds for name, seconds in prefill_parts.items()}
    for name, seconds in decode_parts.items():
        parts[name] = parts.get(name, 0.0) + 1e3 * seconds * (job.output_tokens - 1)
    request_ms = sum(parts.values())
    return StaticEstimate(
        prefill_ms=1e3 * sum(prefill_parts.values()),
        decode_ms_per_token=1e3 * sum(decode_parts.values()),
        request_ms=request_ms,
        tokens_per_s=1e3 * job.batch * job.output_tokens / request_ms,
        requests_per_s=1e3 * job.batch / request_ms,
        memory=static_memory(job, cluster),
        confidence=_confidence(job, cluster),
        parts_ms=parts,
    )


def static_memory(job: StaticJob, cluster: Cluster) -> MemoryLedger:
    """Return the memory ledger of the stage that needs the most memory."""
    dtype_bytes = 4 if job.dtype == "float32" else 2
    widths = WORKSPACE_WIDTHS + WORKSPACE_WIDTHS_SHARDED / job.tp
    hidden_bytes = job.batch * job.input_tokens * job.model.hidden_size * dtype_bytes
    workspace = CONTEXT_BYTES + int(widths * hidden_bytes)
    kv_dtype = "float32" if dtype_bytes == 4 else "float16"
    tokens = job.batch * (job.input_tokens + job.output_tokens)
    # Only the matrices of the layers are quantized, for example to int8.
    layer_bytes_saved = layer_weights_per_rank(job.model, job.tp) * (
        dtype_bytes - WEIGHT_BYTES[job.dtype]
    )
    stages = [
        MemoryLedger(
            capacity=cluster.device.memory_bytes,
            weights=int(elements * dtype_bytes - layers * layer_bytes_saved),
            kv=kv_bytes_per_token(job.model, layers, job.tp, kv_dtype) * tokens,
            workspace=workspace,
        )
        for layers, elements in _stage_parameters(job.model, job.tp, job.pp)
    ]
    return max(stages, key=lambda ledger: ledger.total)


def fit_advice_lines(job: StaticJob, cluster: Cluster) -> list[str]:
    """Return why a job does not fit, and the nearest jobs that fit; an empty list if it fits."""
    ledger = static_memory(job, cluster)
    if ledger.verdict != "over":
        return []
    weights, capacity = format_bytes(ledger.weights), format_bytes(ledger.capacity)
    limit = f"{100 * TIGHT_SHARE:.0f} % of {capacity}"
    if ledger.weights + CONTEXT_BYTES > TIGHT_SHARE * ledger.capacity:
        context = format_bytes(CONTEXT_BYTES)
        lines = [f"weights ({weights}) and CUDA context ({context}) alone need more than {limit}"]
    else:
        kv_cache, workspace = format_bytes(ledger.kv), format_bytes(ledger.workspace)
        lines = [
            f"weights ({weights}), KV cache ({kv_cache}) and workspace ({workspace}) need more "
            f"than {limit}"
        ]
    batch = _batch_max(job, cluster)
    if batch:
        lines.append(f"a batch of {batch:,} fits TP{job.tp} PP{job.pp}")
    for tp, pp in _splits(job.model, cluster):
        if _fits(replace(job, tp=tp, pp=pp), cluster):
            lines.append(f"TP{tp} PP{pp}, {tp * pp} GPUs, fits this batch")
            break
    return lines


def _fits(job: StaticJob, cluster: Cluster) -> bool:
    return static_memory(job, cluster).verdict == "fits"


def _batch_max(job: StaticJob, cluster: Cluster) -> int:
    """Return the largest fitting batch size below the job's batch size; 0 if none fits."""
    low, high = 0, job.batch
    while high - low > 1:
        middle = (low + high) // 2
        fits = _fits(replace(job, batch=middle), cluster)
        low, high = (middle, high) if fits else (low, middle)
    return low


def _splits(model: GPTConfig, cluster: Cluster) -> list[tuple[int, int]]:
    """Return the splits to suggest: first increasing TP without PP, then increasing PP.

    TP is at most the number of GPUs in a node. All splits with PP have the largest valid TP.
    """
    tp_sizes = [tp for tp in divisors(cluster.gpus_per_node) if _is_valid_tp(model, tp)]
    largest_tp = tp_sizes[-1]
    return [(tp, 1) for tp in tp_sizes] + [
        (largest_tp, pp) for pp in range(2, model.num_layers + 1)
    ]


def _is_valid_tp(model: GPTConfig, tp: int) -> bool:
    try:
        check_split(model, tp, 1)
    except ConfigError:
        return False
    return True


@lru_cache(maxsize=256)
def _stage_parameters(model: GPTConfig, tp: int, pp: int) -> tuple[tuple[int, int], ...]:
    """Return the numbers of layers and of parameters of each stage's first TP rank.

    The first TP rank of a stage has the most parameters.
    """
    table = list(parameter_specs(model).values())
    stages = []
    for (layers,) in stage_layers(model.num_layers, pp):
        stage_table = [spec for spec in table if is_on_stage(model, spec.name, layers)]
        parameters = sum(
            prod(shard_spec(spec, model, 0, tp).local_shape(spec.shape)) for spec in stage_table
        )
        stages.append((len(layers), parameters))
    return tuple(stages)


def _check_job(job: StaticJob, cluster: Cluster) -> None:
    for name in ("input_tokens", "output_tokens", "batch"):
        if getattr(job, name) < 1:
            raise ConfigError(f"{name} is {getattr(job, name)}; it must be at least 1")
    check_split(job.model, job.tp, job.pp)
    if job.tp * job.pp > cluster.gpus:
        raise ConfigError(
            f"tp {job.tp} x pp {job.pp} needs {job.tp * job.pp} GPUs, and there are "
            f"{cluster.gpus}; set --gpus {job.tp * job.pp}, or a smaller --tp or --pp"
        )


def _confidence(job: StaticJob, cluster: Cluster) -> Confidence:
    device = cluster.device.name
    if device not in FITTED_DEVICES:
        note = f"constants fitted on A100s, single kernels measured on {device}"
        return Confidence("spec-sheet", ERROR_DEVICE, note)
    if job.dtype not in ("float16", "bfloat16"):
        return Confidence(
            "spec-sheet", ERROR_OTHER_DTYPE, f"no published latency has weights in {job.dtype}"
        )
    limits = {
        "batch": (job.batch, FITTED_BATCH_MAX),
        "prompt": (job.input_tokens, FITTED_PROMPT_MAX),
        "tensor parallel": (job.tp, FITTED_TP_MAX),
    }
    for name, (value, fitted_max) in limits.items():
        if value > fitted_max:
            note = f"{name} {value} is above the largest published value, {fitted_max}"
            return Confidence("spec-sheet", ERROR_EXTRAPOLATED, note)
    return Confidence("spec-sheet", ERROR_FITTED)
