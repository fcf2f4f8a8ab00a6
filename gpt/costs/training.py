"""Training cost model: FLOPs, parameters, optimizer state and communication volume.

The formulas are the closed forms of arXiv 2104.04473 and 2205.05198, generalized to all widths of a
GPTConfig and to training with frozen weights. The bytes of activations are in `activation_memory`.
The module counts operations, elements and bytes; `planning/training` computes times from them. The
module does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from gpt.config import GPTConfig
from gpt.costs.attention_span import attention_span
from gpt.parallel.weight_sharding import layer_number, parameter_specs, shard_spec

Trainable = Literal["all", "adapter"]
RecomputeMode = Literal["none", "selective", "block", "full"]

# Bytes per parameter of mixed-precision Adam: weight, gradient, optimizer state. The optimizer
# state is an fp32 copy of the weight and two moments. With fp16 weights the state also has an fp32
# gradient. fp32 and fp64 weights need no copy.
STATE_BYTES: Mapping[str, tuple[int, int, int]] = {
    "bfloat16": (2, 4, 12),
    "float16": (2, 2, 16),
    "float32": (4, 4, 8),
    "float64": (8, 8, 16),
    "fp8": (2, 4, 12),  # The weights are stored in bf16, and cast to fp8 for each matmul.
}


@dataclass(frozen=True)
class LayerWidths:
    """Widths of a layer's matrices; MoE widths are sums over the experts that compute a token."""

    hidden: int
    queries: int
    keys: int  # Values have the same width.
    heads: int
    fc1: float  # Output columns of fc1, including the gate.
    fc2: float  # Input columns of fc2.
    expert_inputs: float  # Columns of the copies of a token for its experts.


@lru_cache(maxsize=64)
def layer_widths(config: GPTConfig) -> LayerWidths:
    """Return the widths of the model's layers, or their mean if only some layers have experts."""
    moe_layer_count = sum(config.moe_layers)
    moe_ffn_width = config.moe_router_topk * config.moe_ffn_hidden_size
    moe_ffn_width += config.moe_shared_expert_intermediate_size
    dense_ffn_total = (config.num_layers - moe_layer_count) * config.ffn_hidden_size
    mean_ffn_width = (dense_ffn_total + moe_layer_count * moe_ffn_width) / config.num_layers
    return LayerWidths(
        hidden=config.hidden_size,
        queries=config.num_attention_heads * config.kv_channels,
        keys=config.num_query_groups * config.kv_channels,
        heads=config.num_attention_heads,
        fc1=mean_ffn_width * (2 if config.gated else 1),
        fc2=mean_ffn_width,
        expert_inputs=moe_layer_count
        / config.num_layers
        * config.moe_router_topk
        * config.hidden_size,
    )


@dataclass(frozen=True)
class Flops:
    """FLOPs of one forward pass; a multiply-add counts as two operations."""

    linears: float  # Linear modules of all layers.
    attention: float  # Q·K^T and softmax·V of all layers.
    head: float  # LM head.

    @property
    def forward(self) -> float:
        return self.linears + self.attention + self.head


def forward_flops(config: GPTConfig, batch: int, sequence: int, *, causal: bool = False) -> Flops:
    """Return the FLOPs of a forward pass over `batch` sequences of `sequence` tokens.

    By the usual convention, attention counts all pairs of a query and a key, in a layer with a
    window those within the window. With `causal` it does not count the pairs with later keys, which
    are half of the pairs without a window.
    """
    w, tokens = layer_widths(config), batch * sequence
    linears = 2 * tokens * w.hidden * (2 * w.queries + 2 * w.keys + w.fc1 + w.fc2)
    area = attention_span(config).score_area(sequence, causal=causal)
    scores = 4 * batch * area * w.queries
    head = 2 * tokens * w.hidden * config.vocab_size
    return Flops(config.num_layers * linears, config.num_layers * scores, head)


def step_flops(flops: Flops, trainable: Trainable) -> float:
    """Return the FLOPs of a forward and a backward pass, without gradients of frozen weights."""
    linear_passes = 3 if trainable == "all" else 2
    return linear_passes * (flops.linears + flops.head) + 3 * flops.attention


def adapter_step_flops(flops: Flops, context: Flops, backward_share: float) -> float:
    """Return the FLOPs of a step that trains an adapter of linears, without those of the adapter.

    `flops`: a forward pass over all tokens; `context`: over the tokens before the invocations of an
    activated LoRA, which have no backward pass. Only `backward_share` of the layers, those from the
    lowest changed layer on, have a backward pass.
    """
    trained = trained_flops(flops, context, backward_share)
    head = flops.head - context.head
    forward = flops.linears + flops.attention + head
    return forward + trained.linears + 2 * trained.attention + head


def trained_flops(flops: Flops, context: Flops, backward_share: float) -> Flops:
    """Return the FLOPs of the part of a forward pass that has a backward pass."""
    return Flops(
        backward_share * (flops.linears - context.linears),
        backward_share * (flops.attention - context.attention),
        flops.head - context.head,
    )


def recompute_flops(
    flops: Flops, recompute: RecomputeMode, trainable: Trainable = "all", block_share: float = 1.0
) -> float:
    """Return the FLOPs of activation recomputation.

    `block_share` is the fraction of the layers that mode "block" recomputes. If all weights are
    trained, selective recomputation counts the FLOPs of attention three times (once for forward,
    twice for backward), as in appendix A of arXiv 2205.05198; only this count reproduces the HFU
    published there. With frozen weights, selective recomputation counts these FLOPs once.
    """
    match recompute:
        case "none":
            return 0.0
        case "selective":
            return (3 if trainable == "all" else 1) * flops.attention
        case "block":
            return block_share * (flops.linears + flops.attention)
        case "full":
            return flops.linears + flops.attention


@dataclass(frozen=True)
class TrainingSetup:
    """The settings that determine which activations are saved for the backward pass."""

    tp: int = 1
    sequence_parallel: bool = False
    flash: bool = False  # Whether attention is flash attention; it saves no attention scores.
    trainable: Trainable = "all"
    dropout: bool = True  # Whether masks of hidden-state dropout are saved.


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters of one tensor rank."""

    per_layer: float  # Mean over the layers.
    first_stage: int  # The embeddings.
    last_stage: int  # The final norm and the head.


@lru_cache(maxsize=256)
def rank_parameters(config: GPTConfig, tp: int) -> RankParameters:
    """Return the numbers of parameters of tensor rank 0, which has the most."""
    layers = first_stage = last_stage = 0
    for p in parameter_specs(config).values():
        size = prod(shard_spec(p, config, 0, tp).local_shape(p.shape))
        if layer_number(p.name) is not None:
            layers += size
        elif p.name.startswith("embedding."):
            first_stage += size
        else:
            last_stage += size
    if not config.untie_embeddings_and_output_weights:
        last_stage += -(-config.vocab_size // tp) * config.hidden_size
    return RankParameters(layers / config.num_layers, first_stage, last_stage)


def stage_parameters(config: GPTConfig, tp: int, pp: int, stage: int) -> float:
    """Return the number of parameters of tensor rank 0 of a stage with ceil(layers / pp) layers.

    A tied embedding counts on the first and on the last stage; with pp = 1 it counts once.
    """
    per_rank = rank_parameters(config, tp)
    count = -(-config.num_layers // pp) * per_rank.per_layer
    if stage == 0:
        count += per_rank.first_stage
    if stage == pp - 1:
        count += per_rank.last_stage
        if pp == 1 and not config.untie_embeddings_and_output_weights:
            count -= -(-config.vocab_size // tp) * config.hidden_size
    return count


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the training state of one rank."""

    weights: float
    gradients: float
    optimizer: float


def state_bytes(
    parameter_count: float,
    trainable: Trainable,
    adapter_parameter_count: int,
    shards: int = 1,
    dtype: str = "bfloat16",
    adapter_dtype: str = "",
) -> StateBytes:
    """Return the bytes of weights, gradients and optimizer state of one rank, adapter included.

    `parameter_count` is the rank's number of model parameters, without the adapter. The optimizer
    state is divided over `shards` ranks. `adapter_dtype`: the dtype of the adapter; "": `dtype`.
    """
    weights: float = STATE_BYTES[dtype][0] * parameter_count
    if trainable == "adapter":
        trainable_count: float = adapter_parameter_count
        weight, gradient, optimizer = STATE_BYTES[adapter_dtype or dtype]
        weights += weight * adapter_parameter_count
    else:
        trainable_count = parameter_count
        _, gradient, optimizer = STATE_BYTES[dtype]
    return StateBytes(weights, gradient * trainable_count, optimizer * trainable_count / shards)


def all_reduce_elements(elements: float, ranks: int) -> float:
    """Return the number of elements that each of `ranks` ranks sends in a ring all-reduce.

    `elements` is the number of elements of the tensor, which has the same size on every rank.
    In a reduce-scatter or an all-gather, each rank sends half of this number.
    """
    return 2 * (ranks - 1) / ranks * elements


@dataclass(frozen=True)
class CommunicationVolume:
    """Numbers of elements that one GPU sends, by kind of parallelism."""

    tensor_parallel_per_layer: float  # Per layer and micro-batch, forward and backward.
    pipeline_per_boundary: float  # Per micro-batch, in one direction.
    data_parallel: float  # Per step.
    embedding: float  # Per step, between the first and the last stage.


def communication_volume(
    config: GPTConfig,
    tokens: int,
    setup: TrainingSetup,
    *,
    dp: int,
    pp: int,
    vpp: int = 1,
    recompute: RecomputeMode = "none",
) -> CommunicationVolume:
    """Return the numbers of elements that one GPU sends.

    `tokens` is the number of tokens in a micro-batch. A layer has two tensor-parallel all-reduces
    in the forward pass and two in the backward pass. Full recomputation repeats the all-reduces of
    the forward pass.
    """
    t, h = setup.tp, config.hidden_size
    trains_weights = setup.trainable == "all"
    all_reduces = 4 + (2 if recompute == "full" else 0)
    # With sequence parallelism, the backward pass gathers the outputs of two norms again, for the
    # weight gradients. Two all-gathers send the same number of elements as one all-reduce.
    all_reduces += 1 if setup.sequence_parallel and trains_weights else 0
    tensor_elements = all_reduces * all_reduce_elements(tokens * h, t)
    is_tied_across_stages = (
        pp > 1 and trains_weights and not config.untie_embeddings_and_output_weights
    )
    return CommunicationVolume(
        tensor_parallel_per_layer=tensor_elements,
        pipeline_per_boundary=vpp * tokens * h / t if pp > 1 else 0.0,
        data_parallel=all_reduce_elements(stage_parameters(config, t, pp, 0), dp)
        if trains_weights
        else 0.0,
        embedding=-(-config.vocab_size // t) * h if is_tied_across_stages else 0.0,
    )
