"""What one step of training takes: its time, part by part, and the bytes of the fullest GPU.

A step is the slowest stage's micro-batches, the pipeline's bubble, and what comes once: summing
gradients and moving weights. What cannot run is refused with the nearest thing that can. Which
split is best is not decided here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import gpt.parallel.sharding
from gpt.config import GPTConfig
from gpt.costs.inference import parameter_count
from gpt.costs.training import (
    Kept,
    Recompute,
    Trainable,
    forward_flops,
    recompute_flops,
    sent_elements,
    stage_parameters,
    state_bytes,
    step_flops,
)
from gpt.errors import ConfigError
from gpt.settings import nearest
from planning.hardware import Cluster, divisors
from planning.memory_ledger import FITS_SHARE, Ledger
from planning.plan import Trust
from planning.training.efficiency import Software, software
from planning.training.memory import Held, memory
from planning.training.step_time import (
    Pass,
    Work,
    backward,
    data_parallel_s,
    forward,
    head_s,
    hop_s,
    optimizer_s,
    waiting_share,
)

# Of the encoder that makes an adapter's rows, two products of this inner width.
ENCODER_WIDTH = 2048
# In which published runs were; products of other widths go at other speeds.
DTYPES = ("bfloat16", "float16", "fp8")
# Closed forms, and what allocators and libraries add to them.
MEMORY_ERROR = 0.08
# Published runs lie within these; outside, an error bar is so much wider.
SEQUENCE_SEEN_MAX = 4096
GPUS_SEEN_MAX = 6144
HIDDEN_SEEN_MIN = 2048
OUTSIDE_FACTOR = 1.5


@dataclass(frozen=True)
class TrainingJob:
    model: GPTConfig
    sequence: int  # Tokens of an example, virtual ones among them.
    global_batch: int
    trainable: Trainable = "all"
    virtual_tokens: int = 0
    dtype: str = "bfloat16"  # Or fp8: of layers' products only, where the GPU has it.
    # None: as the software of the GPU's day has it. An optimizer is distributed, too, where its
    # state leaves no room on a GPU.
    flash: bool | None = None
    distributed_optimizer: bool | None = None

    @property
    def adapter_parameters(self) -> int:
        if self.trainable == "all" or not self.virtual_tokens:
            return 0
        h = self.model.hidden_size
        return self.virtual_tokens * h + 2 * h * ENCODER_WIDTH


@dataclass(frozen=True)
class TrainingSplit:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    recompute_layers: int = 0  # Of a stage, for "block".
    sequence_parallel: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    def micro_batches(self, job: TrainingJob) -> int:
        """Of one pipeline in one step."""
        return job.global_batch // (self.dp * self.micro_batch)


@dataclass(frozen=True)
class TrainingEstimate:
    parameters: int
    flops_per_iteration: float  # Executed, on all GPUs; attention counted as if not causal.
    model_flops: float  # The same without what is computed again.
    iteration_s: float
    seconds: Mapping[str, float]  # Its parts; they add up to it.
    tflops_per_gpu: float
    mfu: float
    hfu: float
    bubble_fraction: float  # Idle time over that of ideal work.
    tokens_per_s: float
    sent_bytes: Mapping[str, float]  # By a GPU of the first stage in a step, by what for.
    memory: Ledger
    trust_time: Trust
    trust_memory: Trust


def estimate_training(
    job: TrainingJob, split: TrainingSplit, cluster: Cluster, kind: Software | None = None
) -> TrainingEstimate:
    """`kind` is what trains, where it is not what the GPU's time had."""
    check_split(job, split, cluster)
    kind = kind or software(cluster.device)
    work = _work(job, split, cluster, kind)
    ledger, distributed = _memory(job, split, cluster, work)
    seconds = _seconds(job, split, work, distributed)
    iteration_s = sum(seconds.values())
    flops = forward_flops(job.model, job.global_batch, job.sequence)
    model_flops = step_flops(flops, job.trainable)
    share = _recomputed(job, split)
    executed = model_flops + recompute_flops(flops, split.recompute, job.trainable, share)
    device = cluster.device
    peak = device.flops_fp8 if job.dtype == "fp8" else device.flops
    per_gpu = executed / iteration_s / split.gpus
    return TrainingEstimate(
        parameters=parameter_count(job.model),
        flops_per_iteration=executed,
        model_flops=model_flops,
        iteration_s=iteration_s,
        seconds=seconds,
        tflops_per_gpu=per_gpu / 1e12,
        mfu=model_flops / iteration_s / split.gpus / peak,
        hfu=per_gpu / peak,
        bubble_fraction=(split.pp - 1) / (split.vpp * split.micro_batches(job)),
        tokens_per_s=job.global_batch * job.sequence / iteration_s,
        sent_bytes=_sent(job, split, work),
        memory=ledger,
        trust_time=_trust(job, split, kind),
        trust_memory=Trust("spec-sheet", MEMORY_ERROR),
    )


def _recomputed(job: TrainingJob, split: TrainingSplit) -> float:
    """The share of a stage's layers that are computed again."""
    if split.recompute == "full":
        return 1.0
    if split.recompute == "block":
        return split.recompute_layers / -(-job.model.num_layers // split.pp)
    return 0.0


def layer_seconds(
    job: TrainingJob, split: TrainingSplit, cluster: Cluster, kind: Software
) -> tuple[float, float]:
    """One layer of one micro-batch: forward; backward, with what is computed again."""
    work = _work(job, split, cluster, kind)
    there = forward(work)
    return there.total, backward(work).total + _again_s(job, split, there)


def _again_s(job: TrainingJob, split: TrainingSplit, there: Pass) -> float:
    if split.recompute == "selective":
        return there.attention
    return _recomputed(job, split) * there.total


def _work(job: TrainingJob, split: TrainingSplit, cluster: Cluster, kind: Software) -> Work:
    return Work(
        config=job.model,
        batch=split.micro_batch,
        sequence=job.sequence,
        tp=split.tp,
        sequence_parallel=split.sequence_parallel and split.tp > 1,
        trainable=job.trainable,
        fp8=job.dtype == "fp8",
        flash=kind.efficiency.flash if job.flash is None else job.flash,
        cluster=cluster,
        efficiency=kind.efficiency,
    )


def _seconds(
    job: TrainingJob, split: TrainingSplit, work: Work, distributed: bool
) -> Mapping[str, float]:
    there, back = forward(work), backward(work)
    again = _again_s(job, split, there)
    micro_batches = split.micro_batches(job)
    layers = -(-job.model.num_layers // split.pp)
    passes = micro_batches * layers
    stage_s = layers * (there.total + back.total + again)
    held = stage_parameters(job.model, split.tp, split.pp, 0)
    learning = held if job.trainable == "all" else job.adapter_parameters
    seconds = {
        "products": passes * (there.products + back.products),
        "attention": passes * (there.attention + back.attention),
        "elementwise": passes * (there.elementwise + back.elementwise),
        "tensor_parallel": passes * (there.tensor_parallel + back.tensor_parallel),
        "recompute": passes * again,
        "head": micro_batches * head_s(work),
        "bubble": (split.pp - 1) / split.vpp * stage_s,
        "pipeline": micro_batches * split.vpp * hop_s(work) if split.pp > 1 else 0.0,
        "data_parallel": data_parallel_s(work, split.dp, held),
        "optimizer": optimizer_s(work, learning / (split.dp if distributed else 1)),
    }
    seconds["waiting"] = waiting_share(work) * sum(seconds.values())
    return seconds


def _sent(job: TrainingJob, split: TrainingSplit, work: Work) -> Mapping[str, float]:
    kept = Kept(split.tp, work.sequence_parallel, work.flash, job.trainable)
    sent = sent_elements(
        job.model,
        work.tokens,
        kept,
        dp=split.dp,
        pp=split.pp,
        vpp=split.vpp,
        recompute=split.recompute,
    )
    micro_batches = split.micro_batches(job)
    layers = -(-job.model.num_layers // split.pp)
    gradient_bytes = work.efficiency.gradient_bytes
    return {
        "tensor_parallel": 2 * micro_batches * layers * sent.tensor_layer,
        "pipeline": 2 * micro_batches * sent.pipeline_boundary,
        "data_parallel": gradient_bytes * (sent.data + sent.embedding),
    }


def _memory(
    job: TrainingJob, split: TrainingSplit, cluster: Cluster, work: Work
) -> tuple[Ledger, bool]:
    """The ledger, and whether the optimizer is distributed in it."""
    distributed = job.distributed_optimizer
    if distributed is None:
        distributed = work.efficiency.flash or not _states_fit(job, split, cluster)
    held = Held(
        config=job.model,
        sequence=job.sequence,
        batch=split.micro_batch,
        micro_batches=split.micro_batches(job),
        pp=split.pp,
        vpp=split.vpp,
        recompute=split.recompute,
        recompute_layers=split.recompute_layers,
        kept=Kept(split.tp, split.sequence_parallel, work.flash, job.trainable),
        adapter=job.adapter_parameters,
        shards=split.dp if distributed else 1,
        dtype=job.dtype,
    )
    return memory(held, cluster.device), distributed


def _states_fit(job: TrainingJob, split: TrainingSplit, cluster: Cluster) -> bool:
    """Whether weights, gradients and a whole optimizer's state do. What a step keeps besides has no
    say, lest more of it be answered by less memory."""
    held = stage_parameters(job.model, split.tp, split.pp, 0)
    states = state_bytes(held, job.trainable, job.adapter_parameters, 1, job.dtype)
    whole = states.weights + states.gradients + states.optimizer
    return whole <= FITS_SHARE * cluster.device.memory_bytes


def _trust(job: TrainingJob, split: TrainingSplit, kind: Software) -> Trust:
    error = kind.error_fp8 if job.dtype == "fp8" else kind.error
    notes = [f"as {kind.name}", kind.note]
    outside = [
        (split.vpp > 1 and kind.efficiency.flash, "a known number of chunks on this GPU"),
        (job.sequence > SEQUENCE_SEEN_MAX, f"sequences over {SEQUENCE_SEEN_MAX} tokens"),
        (split.gpus > GPUS_SEEN_MAX, f"more than {GPUS_SEEN_MAX} GPUs"),
        (job.model.hidden_size < HIDDEN_SEEN_MIN, f"a hidden size under {HIDDEN_SEEN_MIN}"),
        (any(job.model.moe_layers), "experts"),
        (job.trainable == "adapter" and not kind.error_fp8, "frozen weights on this GPU"),
    ]
    for is_so, what in outside:
        if is_so:
            error *= OUTSIDE_FACTOR
            notes.append(f"no published run has {what}")
    return Trust("spec-sheet", error, "; ".join(note for note in notes if note))


def check_split(job: TrainingJob, split: TrainingSplit, cluster: Cluster) -> None:
    """Refuse what cannot run, naming the nearest thing that can."""
    _check_job(job, cluster)
    _check_numbers(split)
    gpt.parallel.sharding.check_split(job.model, split.tp, split.pp)
    if split.gpus != cluster.gpus:
        near = split.tp * split.pp * max(1, cluster.gpus // (split.tp * split.pp))
        raise ConfigError(
            f"tensor {split.tp} x pipeline {split.pp} x data parallel {split.dp} are {split.gpus} "
            f"GPUs, and there are {cluster.gpus}; {near} GPUs can be split so"
        )
    share = split.dp * split.micro_batch
    if job.global_batch % share:
        raise ConfigError(
            f"a global batch of {job.global_batch} does not divide into {split.dp} data ranks' "
            f"micro-batches of {split.micro_batch}; {_multiple(job.global_batch, share)} does"
        )
    if split.sequence_parallel and job.sequence % split.tp:
        raise ConfigError(
            f"sequence parallelism needs a sequence that tensor parallel {split.tp} divides, and "
            f"{job.sequence} is not; {_multiple(job.sequence, split.tp)} is"
        )
    _check_chunks(job, split)
    _check_block(job, split)


def _multiple(value: int, of: int) -> int:
    """The nearest one, of at least one."""
    return of * max(1, round(value / of))


def _check_job(job: TrainingJob, cluster: Cluster) -> None:
    for name in ("sequence", "global_batch"):
        if getattr(job, name) < 1:
            raise ConfigError(f"{name} is {getattr(job, name)}; it must be at least 1")
    model = job.model
    if model.learned_positions and job.sequence > model.max_position_embeddings:
        raise ConfigError(
            f"sequences of {job.sequence} tokens: the model has "
            f"{model.max_position_embeddings} positions; sequence can be at most that"
        )
    if not 0 <= job.virtual_tokens < job.sequence:
        raise ConfigError(
            f"{job.virtual_tokens} virtual tokens in sequences of {job.sequence}; there can be "
            f"from 0 to {job.sequence - 1}"
        )
    if job.dtype not in DTYPES:
        raise ConfigError(f"no speed of training in {job.dtype!r} is known; {nearest('', DTYPES)}")
    if job.dtype == "fp8" and not cluster.device.flops_fp8:
        raise ConfigError(f"{cluster.device.name} has no fp8; train in bfloat16, or on an h100")


def _check_numbers(split: TrainingSplit) -> None:
    for name in ("tp", "pp", "dp", "vpp", "micro_batch"):
        if getattr(split, name) < 1:
            raise ConfigError(f"{name} is {getattr(split, name)}; it must be at least 1")


def _check_chunks(job: TrainingJob, split: TrainingSplit) -> None:
    if split.vpp == 1:
        return
    if split.pp == 1:
        raise ConfigError(
            f"vpp {split.vpp} needs a pipeline, and pp is 1; take vpp 1, or pp of at least 2"
        )
    layers, micro_batches = job.model.num_layers, split.micro_batches(job)
    if layers % (split.pp * split.vpp):
        works = divisors(layers // gcd(layers, split.pp)) if layers % split.pp else []
        works = works or divisors(layers // split.pp)
        raise ConfigError(
            f"{layers} layers do not divide into {split.pp} stages of {split.vpp} chunks; "
            f"vpp can be {', '.join(map(str, works))}"
        )
    if micro_batches % split.pp:
        raise ConfigError(
            f"interleaved stages need micro-batches that pp {split.pp} divides, and there are "
            f"{micro_batches}; take vpp 1, or a global batch of "
            f"{_multiple(job.global_batch, split.pp * split.dp * split.micro_batch)}"
        )


def _check_block(job: TrainingJob, split: TrainingSplit) -> None:
    layers = -(-job.model.num_layers // split.pp)
    if split.recompute == "block" and not 1 <= split.recompute_layers <= layers:
        raise ConfigError(
            f"block recomputation of {split.recompute_layers} layers: a stage has {layers}; it "
            f"must be from 1 to {layers}"
        )
