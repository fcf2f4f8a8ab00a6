"""What learning costs: operations, bytes kept for the backward pass, and bytes sent.

Closed forms of the literature (arXiv 2104.04473 and 2205.05198), written for every width that a
GPTConfig can have, and once more for a model whose own weights are frozen. Counts only: what a
machine makes of them is for others to say. Plain arithmetic: no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from gpt.config import GPTConfig
from gpt.parallel.sharding import layer_of, parameters, part

Trainable = Literal["all", "adapter"]
Recompute = Literal["none", "selective", "block", "full"]

# Of mixed precision: the weight, its gradient, and the optimizer's fp32 copy of the weight with two
# moments. With fp16 the optimizer makes its own fp32 gradient of the fp16 one; fp32 needs no copy.
STATE_BYTES: Mapping[str, tuple[int, int, int]] = {
    "bfloat16": (2, 4, 12),
    "float16": (2, 2, 16),
    "float32": (4, 4, 8),
    "float64": (8, 8, 16),
    "fp8": (2, 4, 12),  # Weights are cast for each product.
}


@dataclass(frozen=True)
class Widths:
    """What a layer's sizes come from; of experts, those that a token meets."""

    hidden: int
    queries: int
    keys: int  # And as many values.
    heads: int
    fc1: float  # Columns that the activation reads: both halves of a gated one.
    fc2: float


@lru_cache(maxsize=64)
def widths(config: GPTConfig) -> Widths:
    """Of the mean layer, where some have experts and some have not."""
    experts = sum(config.moe_layers)
    sparse = config.moe_router_topk * config.moe_ffn_hidden_size
    sparse += config.moe_shared_expert_intermediate_size
    dense = (config.num_layers - experts) * config.ffn_hidden_size
    middle = (dense + experts * sparse) / config.num_layers
    return Widths(
        hidden=config.hidden_size,
        queries=config.num_attention_heads * config.kv_channels,
        keys=config.num_query_groups * config.kv_channels,
        heads=config.num_attention_heads,
        fc1=middle * (2 if config.gated else 1),
        fc2=middle,
    )


@dataclass(frozen=True)
class Flops:
    """One forward pass. A multiplication and its addition are two."""

    linears: float  # Of all layers.
    attention: float  # Scores, and scores by values, of all layers.
    head: float

    @property
    def forward(self) -> float:
        return self.linears + self.attention + self.head


def forward_flops(config: GPTConfig, batch: int, sequence: int, *, causal: bool = False) -> Flops:
    """The field counts attention as if it were not causal; `causal` counts half of it."""
    w, tokens = widths(config), batch * sequence
    linears = 2 * tokens * w.hidden * (2 * w.queries + 2 * w.keys + w.fc1 + w.fc2)
    scores = 4 * tokens * sequence * w.queries / (2 if causal else 1)
    head = 2 * tokens * w.hidden * config.vocab_size
    return Flops(config.num_layers * linears, config.num_layers * scores, head)


def step_flops(flops: Flops, trainable: Trainable) -> float:
    """Forward and backward. A frozen linear needs the gradient of its input, not of its weight."""
    linears = 3 if trainable == "all" else 2
    return linears * (flops.linears + flops.head) + 3 * flops.attention


def recompute_flops(
    flops: Flops, recompute: Recompute, trainable: Trainable = "all", share: float = 1.0
) -> float:
    """What is computed again; `share` is the part of the layers that `block` means.

    For selective recomputation the field's count adds attention three times, forward and backward
    (arXiv 2205.05198, appendix A); its published HFU only comes out so. Frozen, it is added once.
    """
    match recompute:
        case "none":
            return 0.0
        case "selective":
            return (3 if trainable == "all" else 1) * flops.attention
        case "block":
            return share * (flops.linears + flops.attention)
        case "full":
            return flops.linears + flops.attention


@dataclass(frozen=True)
class Kept:
    """How a layer's results are kept for the backward pass."""

    tp: int = 1
    sequence_parallel: bool = False
    flash: bool = False  # Attention that keeps no scores.
    trainable: Trainable = "all"
    dropout: bool = True  # Of hidden states: masks are kept, as the field's forms have them.


def layer_activation_bytes(
    config: GPTConfig, batch: int, sequence: int, recompute: Recompute, kept: Kept
) -> float:
    """Of one layer and one micro-batch on one rank; 16-bit values, masks of a byte.

    With plain widths: sbh (10 + 24/t + 5as/ht), sbh/t (34 + 5as/h) with sequence parallelism, the
    last term gone with selective recomputation, 2sbh with full. A frozen linear keeps no input.
    """
    w, tokens = widths(config), batch * sequence
    t = kept.tp
    whole = t if kept.sequence_parallel else 1
    if recompute == "full":
        return 2 * tokens * w.hidden / whole
    frozen = kept.trainable == "adapter"
    # Inputs of two norms, and the masks of two dropouts; then the inputs of qkv and of fc1.
    replicated = (6 if kept.dropout else 4) * w.hidden + (0 if frozen else 4 * w.hidden)
    # Queries, keys and values; what the activation reads; then the inputs of proj and of fc2. A
    # fused attention needs its own result again.
    divided = 2 * (w.queries + 2 * w.keys) + 2 * w.fc1
    divided += 0 if frozen else 2 * w.queries + 2 * w.fc2
    divided += 2 * w.queries if frozen and kept.flash else 0
    scores = 0.0
    if recompute != "selective" and not kept.flash:
        # Softmax, its dropout's mask, and what that leaves.
        scores = 5.0 * w.heads * sequence
    return tokens * (replicated / whole + (divided + scores) / t)


def layers_in_flight(
    num_layers: int, pp: int, micro_batches: int, vpp: int = 1, stage: int = 0
) -> float:
    """How many layers' results a stage keeps at its fullest, when one forward follows one back."""
    if vpp == 1:
        return -(-num_layers // pp) * min(pp - stage, micro_batches)
    chunks = pp * vpp + pp - 1 - 2 * stage
    return num_layers / (pp * vpp) * min(chunks, vpp * micro_batches)


def edge_activation_bytes(
    config: GPTConfig, batch: int, sequence: int, pp: int, kept: Kept
) -> tuple[float, float]:
    """What the embedding keeps on the first stage, and the head on the last; not per layer."""
    tokens, h, t = batch * sequence, config.hidden_size, kept.tp
    whole = t if kept.sequence_parallel else 1
    first = tokens * h * pp / whole
    last = 2 * 2 * tokens * h / whole + 4 * tokens * config.vocab_size / t
    return first, last


@dataclass(frozen=True)
class HeldParameters:
    """Parameters of one tensor rank."""

    layer: float  # Of the mean layer.
    first: int  # Embeddings.
    last: int  # The last norm and the head.


@lru_cache(maxsize=256)
def held_parameters(config: GPTConfig, tp: int) -> HeldParameters:
    """What rank 0 holds, which has all that any has."""
    layers = first = last = 0
    for p in parameters(config).values():
        size = prod(part(p, config, 0, tp).shape(p.shape))
        if layer_of(p.name) is not None:
            layers += size
        elif p.name.startswith("embedding."):
            first += size
        else:
            last += size
    if not config.untie_embeddings_and_output_weights:
        last += -(-config.vocab_size // tp) * config.hidden_size
    return HeldParameters(layers / config.num_layers, first, last)


def stage_parameters(config: GPTConfig, tp: int, pp: int, stage: int) -> float:
    """What a rank of a stage holds; a tied table once, where it is both the first and the last."""
    held = held_parameters(config, tp)
    count = -(-config.num_layers // pp) * held.layer
    if stage == 0:
        count += held.first
    if stage == pp - 1:
        count += held.last
        if pp == 1 and not config.untie_embeddings_and_output_weights:
            count -= -(-config.vocab_size // tp) * config.hidden_size
    return count


@dataclass(frozen=True)
class StateBytes:
    weights: float
    gradients: float
    optimizer: float


def state_bytes(
    held: float, trainable: Trainable, adapter: int, shards: int = 1, dtype: str = "bfloat16"
) -> StateBytes:
    """Of `held` parameters on a rank, and an adapter's; `shards` ranks share the optimizer's."""
    weight, gradient, optimizer = STATE_BYTES[dtype]
    learning = adapter if trainable == "adapter" else held
    weights = weight * (held + (adapter if trainable == "adapter" else 0))
    return StateBytes(weights, gradient * learning, optimizer * learning / shards)


def all_reduced(elements: float, ranks: int) -> float:
    """What each of a ring sends to have the sum of all; its two halves are half of it."""
    return 2 * (ranks - 1) / ranks * elements


@dataclass(frozen=True)
class Sent:
    """Elements that one GPU sends, by what for."""

    tensor_layer: float  # A layer and micro-batch, there and back.
    pipeline_boundary: float  # A micro-batch, one way.
    data: float  # A step.
    embedding: float  # A step, of the first and the last stage.


def sent_elements(
    config: GPTConfig,
    tokens: int,
    kept: Kept,
    *,
    dp: int,
    pp: int,
    vpp: int = 1,
    recompute: Recompute = "none",
) -> Sent:
    """Two sums over tensor ranks in each pass of a layer; and what it takes to go together."""
    t, h = kept.tp, config.hidden_size
    trained = kept.trainable == "all"
    sums = 4 + (2 if recompute == "full" else 0)
    # What two norms left is gathered again for weights' gradients: half a sum each.
    sums += 1 if kept.sequence_parallel and trained else 0
    tensor = sums * all_reduced(tokens * h, t)
    tied = pp > 1 and trained and not config.untie_embeddings_and_output_weights
    return Sent(
        tensor_layer=tensor,
        pipeline_boundary=vpp * tokens * h / t if pp > 1 else 0.0,
        data=all_reduced(stage_parameters(config, t, pp, 0), dp) if trained else 0.0,
        embedding=-(-config.vocab_size // t) * h if tied else 0.0,
    )
