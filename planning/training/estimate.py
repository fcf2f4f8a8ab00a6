"""Training estimate: step time by parts, pipeline bubble, MFU, communication and memory.

A step consists of the micro-batches of the slowest stage, the pipeline bubble, the gradient
reduction and the optimizer. If a split cannot run, the error names the nearest valid values.
`planning.training.search` chooses the best split.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd

import gpt.parallel.weight_sharding
from gpt.config import GPTConfig
from gpt.costs.attention_span import attention_span
from gpt.costs.inference import parameter_count
from gpt.costs.linear_adapter import (
    LinearAdapterCost,
    LinearAdapterSpec,
    check_spec,
    linear_adapter_cost,
    lowest_layer,
    stage_costs,
)
from gpt.costs.training import (
    Flops,
    RecomputeMode,
    Trainable,
    TrainingSetup,
    adapter_step_flops,
    all_reduce_elements,
    communication_volume,
    forward_flops,
    recompute_flops,
    stage_parameters,
    state_bytes,
    step_flops,
    trained_flops,
)
from gpt.errors import ConfigError
from gpt.settings import suggest_nearest
from planning.hardware import Cluster, divisors
from planning.memory_ledger import FITS_SHARE, MemoryLedger
from planning.plan import Confidence
from planning.training.efficiency import Software, software_of_device
from planning.training.memory import RankWorkload, training_memory
from planning.training.step_time import (
    LayerPass,
    LayerWork,
    backward,
    data_parallel_s,
    forward,
    lm_head_s,
    low_rank_time,
    optimizer_s,
    stage_send_s,
    straggler_share,
)

# An adapter's prompt encoder has two linear layers. This is the width of the tensor between them.
ENCODER_WIDTH = 2048
# The dtypes of published runs; matmul speeds in other dtypes are unknown.
DTYPES = ("bfloat16", "float16", "fp8")
# Relative error of the memory formulas, due to allocators and libraries.
MEMORY_ERROR = 0.08
# The range of published runs. For each bound that a configuration violates, the error bar of its
# step time is multiplied by EXTRAPOLATION_FACTOR.
PUBLISHED_SEQUENCE_MAX = 4096
PUBLISHED_GPUS_MAX = 6144
PUBLISHED_HIDDEN_MIN = 2048
EXTRAPOLATION_FACTOR = 1.5


@dataclass(frozen=True)
class TrainingJob:
    model: GPTConfig
    sequence: int  # Number of tokens of an example, including virtual tokens.
    global_batch: int  # Number of examples per step.
    trainable: Trainable = "all"
    virtual_tokens: int = 0
    dtype: str = "bfloat16"  # "fp8" applies only to the matmuls of the layers.
    flash: bool | None = None  # Whether attention is fused; None: the value of `Efficiency.flash`.
    # Whether the optimizer state is sharded over the replicas. If None, this depends on the GPU's
    # software:
    # - Software of 2024 (`Efficiency.flash` is True): the state is sharded.
    # - Older software: the state is sharded if weights, gradients and the unsharded state do not
    #   fit on a GPU.
    distributed_optimizer: bool | None = None
    # The adapter weights that are trained, if `trainable` is "adapter"; None: virtual tokens.
    linears: LinearAdapterSpec | None = None
    adapter_count: int = 1  # Number of tasks whose weights are trained at once.
    # Number of tokens of an example before the invocation of an activated LoRA. They have no
    # backward pass.
    context_tokens: int = 0

    @property
    def adapter_parameters(self) -> int:
        if self.trainable == "all":
            return 0
        if self.linears is not None:
            return self.adapter_count * linear_adapter_cost(self.model, self.linears).trained
        if not self.virtual_tokens:
            return 0
        h = self.model.hidden_size
        return self.virtual_tokens * h + 2 * h * ENCODER_WIDTH

    @property
    def context_flops(self) -> Flops:
        """FLOPs of a forward pass over the tokens without a backward pass."""
        if not self.context_tokens:
            return Flops(0.0, 0.0, 0.0)
        return forward_flops(self.model, self.global_batch, self.context_tokens)

    @property
    def backward_share(self) -> float:
        """The fraction of the layers that have a backward pass."""
        if self.linears is None:
            return 1.0
        return 1 - lowest_layer(self.model, self.linears) / self.model.num_layers


@dataclass(frozen=True)
class TrainingSplit:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    micro_batch: int = 1
    recompute: RecomputeMode = "none"
    recompute_layers: int = 0  # Number of recomputed layers per stage, for recompute "block".
    sequence_parallel: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    def micro_batches(self, job: TrainingJob) -> int:
        """Return the number of micro-batches of one pipeline in one step."""
        return job.global_batch // (self.dp * self.micro_batch)


@dataclass(frozen=True)
class TrainingEstimate:
    parameters: int
    # FLOPs that all GPUs execute in a step. Attention is counted as if there was no causal mask.
    flops_per_iteration: float
    model_flops: float  # `flops_per_iteration` without recomputation.
    iteration_s: float
    seconds: Mapping[str, float]  # Seconds of each part of a step; their sum is `iteration_s`.
    tflops_per_gpu: float
    mfu: float
    hfu: float
    bubble_fraction: float  # Idle time of the pipeline divided by its ideal compute time.
    tokens_per_s: float
    # Bytes that a GPU of stage 0 sends in a step, by kind of parallelism.
    sent_bytes: Mapping[str, float]
    memory: MemoryLedger
    time_confidence: Confidence
    memory_confidence: Confidence


def estimate_training(
    job: TrainingJob, split: TrainingSplit, cluster: Cluster, software_stack: Software | None = None
) -> TrainingEstimate:
    """Estimate one training step.

    `software_stack` defaults to the software of the published runs on this GPU.
    """
    check_split(job, split, cluster)
    software_stack = software_stack or software_of_device(cluster.device)
    work = _layer_work(job, split, cluster, software_stack)
    ledger, is_optimizer_sharded = _memory(job, split, cluster, work)
    seconds = _step_parts_s(job, split, work, is_optimizer_sharded=is_optimizer_sharded)
    iteration_s = sum(seconds.values())
    flops = forward_flops(job.model, job.global_batch, job.sequence)
    model_flops, recomputed_flops = _step_flops(job, split, flops)
    executed_flops = model_flops + recomputed_flops
    device = cluster.device
    peak_flops_per_s = device.flops_fp8 if job.dtype == "fp8" else device.flops
    flops_per_s_per_gpu = executed_flops / iteration_s / split.gpus
    return TrainingEstimate(
        parameters=parameter_count(job.model),
        flops_per_iteration=executed_flops,
        model_flops=model_flops,
        iteration_s=iteration_s,
        seconds=seconds,
        tflops_per_gpu=flops_per_s_per_gpu / 1e12,
        mfu=model_flops / iteration_s / split.gpus / peak_flops_per_s,
        hfu=flops_per_s_per_gpu / peak_flops_per_s,
        bubble_fraction=(split.pp - 1) / (split.vpp * split.micro_batches(job)),
        tokens_per_s=job.global_batch * job.sequence / iteration_s,
        sent_bytes=_sent_bytes(job, split, work),
        memory=ledger,
        time_confidence=_time_confidence(job, split, software_stack),
        memory_confidence=Confidence("spec-sheet", MEMORY_ERROR),
    )


def _step_flops(job: TrainingJob, split: TrainingSplit, flops: Flops) -> tuple[float, float]:
    """Return the FLOPs of a step, and those of its recomputation."""
    recomputed_share = _recomputed_share(job, split)
    if job.linears is None:
        return step_flops(flops, job.trainable), recompute_flops(
            flops, split.recompute, job.trainable, recomputed_share
        )
    cost = linear_adapter_cost(job.model, job.linears)
    tokens = job.global_batch * (job.sequence - job.context_tokens)
    low_rank_flops = float(tokens * cost.flops_per_token)
    trained = trained_flops(flops, job.context_flops, job.backward_share)
    return (
        adapter_step_flops(flops, job.context_flops, job.backward_share)
        + 3 * low_rank_flops
        + cost.step_flops,
        recompute_flops(trained, split.recompute, job.trainable, recomputed_share)
        + recomputed_share * low_rank_flops,
    )


def _recomputed_share(job: TrainingJob, split: TrainingSplit) -> float:
    """Return the fraction of a stage's layers that are fully recomputed."""
    if split.recompute == "full":
        return 1.0
    if split.recompute == "block":
        return split.recompute_layers / -(-job.model.num_layers // split.pp)
    return 0.0


def layer_seconds(
    job: TrainingJob, split: TrainingSplit, cluster: Cluster, software_stack: Software
) -> tuple[float, float]:
    """Return the seconds of the forward and the backward pass of one layer for one micro-batch.

    The backward pass includes recomputation.
    """
    work = _layer_work(job, split, cluster, software_stack)
    forward_pass = forward(work)
    return forward_pass.total, backward(work).total + _recompute_s(job, split, forward_pass)


def _recompute_s(job: TrainingJob, split: TrainingSplit, forward_pass: LayerPass) -> float:
    if split.recompute == "selective":
        return forward_pass.attention
    return _recomputed_share(job, split) * forward_pass.total


def _layer_work(
    job: TrainingJob, split: TrainingSplit, cluster: Cluster, software_stack: Software
) -> LayerWork:
    return LayerWork(
        config=job.model,
        batch=split.micro_batch,
        sequence=job.sequence - job.context_tokens,
        tp=split.tp,
        sequence_parallel=split.sequence_parallel and split.tp > 1,
        trainable=job.trainable,
        fp8=job.dtype == "fp8",
        flash=software_stack.efficiency.flash if job.flash is None else job.flash,
        cluster=cluster,
        efficiency=software_stack.efficiency,
        context=job.context_tokens,
    )


def _stage_adapter_cost(job: TrainingJob, split: TrainingSplit) -> LinearAdapterCost:
    """Return the costs on a rank of the stage with the largest adapter weights."""
    if job.linears is None:
        return LinearAdapterCost()
    costs = stage_costs(job.model, job.linears, split.tp, split.pp, split.vpp)
    return max(costs, key=lambda cost: cost.trained)


def _rank_adapter_parameters(job: TrainingJob, split: TrainingSplit) -> int:
    """Return the largest number of adapter parameters of a rank."""
    if job.linears is None:
        return job.adapter_parameters
    return job.adapter_count * _stage_adapter_cost(job, split).trained


def _backward_layers(job: TrainingJob, split: TrainingSplit) -> int:
    """Return the number of layers with a backward pass on the last stage, which has the most."""
    layers = -(-job.model.num_layers // split.pp)
    if job.linears is None:
        return layers
    return min(layers, job.model.num_layers - lowest_layer(job.model, job.linears))


def _step_parts_s(
    job: TrainingJob, split: TrainingSplit, work: LayerWork, *, is_optimizer_sharded: bool
) -> Mapping[str, float]:
    """Return the seconds of each part of a step; the part "products" is the layers' matmuls."""
    forward_pass, backward_pass = forward(work), backward(work)
    context_work = replace(work, sequence=job.context_tokens, context=0)
    context_pass = forward(context_work) if job.context_tokens else LayerPass(0.0, 0.0, 0.0, 0.0)
    recompute_s = _recompute_s(job, split, forward_pass)
    micro_batches = split.micro_batches(job)
    layers, backward_layers = -(-job.model.num_layers // split.pp), _backward_layers(job, split)
    low_rank = low_rank_time(work, _stage_adapter_cost(job, split))
    low_rank_s = (1 + _recomputed_share(job, split)) * low_rank.forward + low_rank.backward
    stage_s = (
        layers * (context_pass.total + forward_pass.total)
        + backward_layers * (backward_pass.total + recompute_s)
        + low_rank_s
    )

    def layers_s(part: str) -> float:
        forward_s = getattr(context_pass, part) + getattr(forward_pass, part)
        backward_s = getattr(backward_pass, part)
        return micro_batches * float(layers * forward_s + backward_layers * backward_s)

    rank_parameters = stage_parameters(job.model, split.tp, split.pp, 0)
    trained_parameters = rank_parameters if job.trainable == "all" else job.adapter_parameters
    # The gradients of a table of virtual tokens, and those of its encoder, are small.
    reduced_parameters = rank_parameters if job.trainable == "all" else 0.0
    if job.linears is not None:
        trained_parameters = reduced_parameters = _rank_adapter_parameters(job, split)
    optimizer_shards = split.dp if is_optimizer_sharded else 1
    sends_s = 0.0
    if split.pp > 1:
        # The context is sent forward only.
        sends_s = stage_send_s(work)
        sends_s += stage_send_s(context_work) / 2 if job.context_tokens else 0.0
    seconds = {
        "products": layers_s("matmuls"),
        "attention": layers_s("attention"),
        "elementwise": layers_s("elementwise"),
        "tensor_parallel": layers_s("tensor_parallel"),
        "low_rank": micro_batches * low_rank_s + low_rank.step,
        "recompute": micro_batches * backward_layers * recompute_s,
        "head": micro_batches * lm_head_s(work),
        "bubble": (split.pp - 1) / split.vpp * stage_s,
        "pipeline": micro_batches * split.vpp * sends_s,
        "data_parallel": data_parallel_s(work, split.dp, reduced_parameters),
        "optimizer": optimizer_s(work, trained_parameters / optimizer_shards),
    }
    seconds["waiting"] = straggler_share(work) * sum(seconds.values())
    return seconds


def _sent_bytes(job: TrainingJob, split: TrainingSplit, work: LayerWork) -> Mapping[str, float]:
    setup = TrainingSetup(split.tp, work.sequence_parallel, work.flash, job.trainable)
    sent_elements = communication_volume(
        job.model,
        # The context is sent forward only.
        work.tokens + split.micro_batch * job.context_tokens // 2,
        setup,
        dp=split.dp,
        pp=split.pp,
        vpp=split.vpp,
        recompute=split.recompute,
    )
    micro_batches = split.micro_batches(job)
    layers = -(-job.model.num_layers // split.pp)
    gradient_elements = sent_elements.data_parallel + sent_elements.embedding
    if job.linears is not None and split.dp > 1:
        gradient_elements = all_reduce_elements(_rank_adapter_parameters(job, split), split.dp)
    # Hidden states have two bytes per element.
    return {
        "tensor_parallel": 2 * micro_batches * layers * sent_elements.tensor_parallel_per_layer,
        "pipeline": 2 * micro_batches * sent_elements.pipeline_per_boundary,
        "data_parallel": work.efficiency.gradient_bytes * gradient_elements,
    }


def _memory(
    job: TrainingJob, split: TrainingSplit, cluster: Cluster, work: LayerWork
) -> tuple[MemoryLedger, bool]:
    """Return the memory ledger, and whether the optimizer state is sharded."""
    is_optimizer_sharded = job.distributed_optimizer
    if is_optimizer_sharded is None:
        is_optimizer_sharded = work.efficiency.flash or not _states_fit(job, split, cluster)
    rank_workload = RankWorkload(
        config=job.model,
        sequence=job.sequence - job.context_tokens,
        batch=split.micro_batch,
        micro_batches=split.micro_batches(job),
        pp=split.pp,
        vpp=split.vpp,
        recompute=split.recompute,
        recompute_layers=split.recompute_layers,
        activation_layout=TrainingSetup(
            split.tp, split.sequence_parallel, work.flash, job.trainable
        ),
        adapter_parameters=job.adapter_parameters,
        optimizer_shards=split.dp if is_optimizer_sharded else 1,
        dtype=job.dtype,
        linears=job.linears,
        linear_adapters=job.adapter_count,
        context=job.context_tokens,
    )
    return training_memory(rank_workload, cluster.device), is_optimizer_sharded


def _states_fit(job: TrainingJob, split: TrainingSplit, cluster: Cluster) -> bool:
    """Return whether weights, gradients and the full optimizer state fit on a GPU.

    Activations are not counted. Otherwise a job with larger activations could get the distributed
    optimizer and then need less memory than a job with smaller activations.
    """
    rank_parameters = stage_parameters(job.model, split.tp, split.pp, 0)
    adapter_parameters = _rank_adapter_parameters(job, split)
    states = state_bytes(
        rank_parameters,
        job.trainable,
        adapter_parameters,
        1,
        job.dtype,
        "" if job.linears is None else "float32",
    )
    state_bytes_total = states.weights + states.gradients + states.optimizer
    return state_bytes_total <= FITS_SHARE * cluster.device.memory_bytes


def _time_confidence(
    job: TrainingJob, split: TrainingSplit, software_stack: Software
) -> Confidence:
    error = software_stack.error_fp8 if job.dtype == "fp8" else software_stack.error
    notes = [f"for {software_stack.name}", software_stack.note]
    # Pairs of a condition and the end of a note that begins with "no published run". If the
    # condition is True, the note is added.
    extrapolations = [
        # The published runs with the H100's software (`flash` is True) do not state their vpp.
        (split.vpp > 1 and software_stack.efficiency.flash, "on this GPU states its vpp"),
        (
            job.sequence > PUBLISHED_SEQUENCE_MAX,
            f"has sequences over {PUBLISHED_SEQUENCE_MAX} tokens",
        ),
        (split.gpus > PUBLISHED_GPUS_MAX, f"has more than {PUBLISHED_GPUS_MAX} GPUs"),
        (
            job.model.hidden_size < PUBLISHED_HIDDEN_MIN,
            f"has a hidden size under {PUBLISHED_HIDDEN_MIN}",
        ),
        (any(job.model.moe_layers), "has MoE layers"),
        (attention_span(job.model).has_windows, "has layers with windows"),
        # All published runs that train an adapter are on the H100. All GPUs except the A100s have
        # the H100's software; the A100s are the GPUs with an `error_fp8` of 0.
        (
            job.trainable == "adapter" and not software_stack.error_fp8,
            "on this GPU has frozen weights",
        ),
        (
            job.linears is not None and job.linears.method != "lora",
            "trains with this method",
        ),
    ]
    for applies, description in extrapolations:
        if applies:
            error *= EXTRAPOLATION_FACTOR
            notes.append(f"no published run {description}")
    return Confidence("spec-sheet", error, "; ".join(note for note in notes if note))


def check_split(job: TrainingJob, split: TrainingSplit, cluster: Cluster) -> None:
    """Raise ConfigError if the split cannot run. The error names the nearest valid values."""
    _check_job(job, cluster)
    _check_numbers(split)
    gpt.parallel.weight_sharding.check_split(job.model, split.tp, split.pp)
    if split.gpus != cluster.gpus:
        nearest_gpus = split.tp * split.pp * max(1, cluster.gpus // (split.tp * split.pp))
        raise ConfigError(
            f"tp {split.tp} x pp {split.pp} x dp {split.dp} is {split.gpus} GPUs, but there are "
            f"{cluster.gpus} GPUs; with this tp and pp, use {nearest_gpus} GPUs and dp "
            f"{nearest_gpus // (split.tp * split.pp)}"
        )
    batch_unit = split.dp * split.micro_batch
    if job.global_batch % batch_unit:
        raise ConfigError(
            f"global batch {job.global_batch} is not a multiple of dp {split.dp} x micro-batch "
            f"{split.micro_batch}; the nearest multiple is "
            f"{_nearest_multiple(job.global_batch, batch_unit)}"
        )
    if split.sequence_parallel and job.sequence % split.tp:
        raise ConfigError(
            f"sequence parallelism needs a sequence length that is a multiple of tp {split.tp}, "
            f"but the sequence length is {job.sequence}; the nearest multiple is "
            f"{_nearest_multiple(job.sequence, split.tp)}"
        )
    _check_chunks(job, split)
    _check_block(job, split)


def _nearest_multiple(value: int, unit: int) -> int:
    """Return the positive multiple of `unit` that is nearest to `value`."""
    return unit * max(1, round(value / unit))


def _check_job(job: TrainingJob, cluster: Cluster) -> None:
    for name in ("sequence", "global_batch"):
        if getattr(job, name) < 1:
            raise ConfigError(f"{name} is {getattr(job, name)}; it must be at least 1")
    model = job.model
    if model.has_learned_positions and job.sequence > model.max_position_embeddings:
        raise ConfigError(
            f"sequence is {job.sequence} tokens, but the model has "
            f"{model.max_position_embeddings} learned positions; set sequence to at most "
            f"{model.max_position_embeddings}"
        )
    if job.linears is not None:
        check_spec(model, job.linears)
    if not 0 <= job.context_tokens < job.sequence:
        raise ConfigError(
            f"the context has {job.context_tokens} tokens in sequences of {job.sequence} tokens; "
            f"set a number from 0 to {job.sequence - 1}"
        )
    if job.context_tokens and (job.linears is None or job.linears.method != "alora"):
        raise ConfigError(
            "only method alora has tokens without a backward pass; remove the context tokens"
        )
    if not 0 <= job.virtual_tokens < job.sequence:
        raise ConfigError(
            f"there are {job.virtual_tokens} virtual tokens in sequences of {job.sequence} tokens; "
            f"set a number of virtual tokens from 0 to {job.sequence - 1}"
        )
    if job.dtype not in DTYPES:
        raise ConfigError(
            f"the speed of training in {job.dtype!r} is unknown; {suggest_nearest('', DTYPES)}"
        )
    if job.dtype == "fp8" and not cluster.device.flops_fp8:
        raise ConfigError(
            f"{cluster.device.name} does not support fp8; set dtype bfloat16, or use an h100"
        )


def _check_numbers(split: TrainingSplit) -> None:
    for name in ("tp", "pp", "dp", "vpp", "micro_batch"):
        if getattr(split, name) < 1:
            raise ConfigError(f"{name} is {getattr(split, name)}; it must be at least 1")


def _check_chunks(job: TrainingJob, split: TrainingSplit) -> None:
    if split.vpp == 1:
        return
    if split.pp == 1:
        raise ConfigError(
            f"vpp {split.vpp} needs a pipeline, and pp is 1; set vpp to 1, or pp to at least 2"
        )
    layers, micro_batches = job.model.num_layers, split.micro_batches(job)
    if layers % (split.pp * split.vpp):
        vpp_choices = divisors(layers // gcd(layers, split.pp))
        raise ConfigError(
            f"{layers} layers are not a multiple of pp {split.pp} x vpp {split.vpp}; "
            f"vpp can be {', '.join(map(str, vpp_choices))}"
        )
    if micro_batches % split.pp:
        raise ConfigError(
            f"the interleaved schedule needs a number of micro-batches that is a multiple of pp "
            f"{split.pp}, but there are {micro_batches}; set vpp to 1, or the global batch to "
            f"{_nearest_multiple(job.global_batch, split.pp * split.dp * split.micro_batch)}"
        )


def _check_block(job: TrainingJob, split: TrainingSplit) -> None:
    layers = -(-job.model.num_layers // split.pp)
    if split.recompute == "block" and not 1 <= split.recompute_layers <= layers:
        raise ConfigError(
            f"recompute_layers is {split.recompute_layers}; recompute block needs a number from 1 "
            f"to {layers}, the number of layers of a stage"
        )
