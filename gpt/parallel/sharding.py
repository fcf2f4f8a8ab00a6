"""How each parameter is named, shaped, and divided among tensor ranks and pipeline stages.

This table is the only place that knows. The model builds its parameters by it, loaders read slices
by it, converters cut and join by it, the memory ledger counts by it: a wrong row is wrong
everywhere, at once, and so cannot hide. A rank's part of a tensor is a few ranges of its rows or
columns. Shapes are torch's: a weight is (out, in). No torch here; these are plain numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from gpt.config import GPTConfig
from gpt.errors import ConfigError

Ranges = tuple[tuple[int, int], ...]


class Split(Enum):
    WHOLE = "every rank holds all of it"
    ROWS = "each rank holds an equal run of rows"
    COLUMNS = "each rank holds an equal run of columns"
    GATED = "two stacked matrices; each rank holds equal rows of both, its gates and its ups"
    QKV = "rows in groups [queries, key, value]; each rank holds groups, or part of one"
    VOCAB = "rows are tokens; equal runs after padding with rows of zeros"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One logical tensor of the model: whole and unpadded."""

    name: str
    shape: tuple[int, ...]
    split: Split


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds of a logical tensor: ranges along one dimension, in order.

    `size` is the rank's extent along `dim`. It exceeds the ranges' sum only for a padded
    vocabulary, where the rest is zeros.
    """

    dim: int
    ranges: Ranges
    size: int

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        return (*full[: self.dim], self.size, *full[self.dim + 1 :])


# The layer of a canonical name, as `decoder.layers.7.mlp.linear_fc2.weight`.
LAYERS = "decoder.layers."


def layer_of(name: str) -> int | None:
    """The global layer number in a canonical name; None outside the layers."""
    return int(name[len(LAYERS) :].split(".", 1)[0]) if name.startswith(LAYERS) else None


def on_stage(config: GPTConfig, name: str, layers: range) -> bool:
    """Whether the stage that has `layers` holds this parameter; a tied head needs a second copy."""
    layer = layer_of(name)
    if layer is not None:
        return layer in layers
    first, last = layers.start == 0, layers.stop == config.num_layers
    if name == "embedding.word_embeddings.weight":
        return first or (last and not config.untie_embeddings_and_output_weights)
    return first if name.startswith("embedding.") else last


def kept_dtype(name: str, dtype: str) -> str:
    """The dtype in which a model of `dtype` keeps this parameter.

    A router's choice among experts must not turn on the rounding of a narrow bias.
    """
    narrow = dtype in ("bfloat16", "float16")
    return "float32" if narrow and name.endswith(".expert_bias") else dtype


def parameters(config: GPTConfig) -> dict[str, Parameter]:
    """Every logical tensor of the model, by canonical name, in the order of the forward pass."""
    h = config.hidden_size
    table = [Parameter("embedding.word_embeddings.weight", (config.vocab_size, h), Split.VOCAB)]
    if config.learned_positions:
        positions = (config.max_position_embeddings, h)
        table.append(Parameter("embedding.position_embeddings.weight", positions, Split.WHOLE))
    for layer in range(config.num_layers):
        table.extend(_layer(config, layer))
    table.extend(_norm(config, "decoder.final_layernorm.", h))
    if config.untie_embeddings_and_output_weights:
        table.append(Parameter("output_layer.weight", (config.vocab_size, h), Split.VOCAB))
    return {parameter.name: parameter for parameter in table}


def _layer(config: GPTConfig, layer: int) -> Iterator[Parameter]:
    h, d = config.hidden_size, config.kv_channels
    heads, groups = config.num_attention_heads, config.num_query_groups
    attention = f"{LAYERS}{layer}.self_attention."
    yield from _norm(config, f"{attention}linear_qkv.layer_norm_", h)
    rows = (heads + 2 * groups) * d
    yield from _linear(f"{attention}linear_qkv.", rows, h, config.qkv_bias, Split.QKV)
    if config.qk_layernorm:
        yield from _norm(config, f"{attention}q_layernorm.", d)
        yield from _norm(config, f"{attention}k_layernorm.", d)
    yield from _linear(f"{attention}linear_proj.", h, heads * d, config.proj_bias, Split.COLUMNS)

    mlp = f"{LAYERS}{layer}.mlp."
    if not config.moe_layers[layer]:
        yield from _norm(config, f"{mlp}linear_fc1.layer_norm_", h)
        yield from _mlp(config, mlp, config.ffn_hidden_size, config.mlp_bias)
        return
    yield from _norm(config, f"{LAYERS}{layer}.pre_mlp_layernorm.", h)
    yield Parameter(f"{mlp}router.weight", (config.num_experts, h), Split.WHOLE)
    if config.moe_router_expert_bias:
        yield Parameter(f"{mlp}router.expert_bias", (config.num_experts,), Split.WHOLE)
    for expert in range(config.num_experts):
        prefix = f"{mlp}experts.local_experts.{expert}."
        yield from _mlp(config, prefix, config.moe_ffn_hidden_size, config.mlp_bias)
    if config.moe_shared_expert_intermediate_size:
        shared = f"{mlp}shared_experts."
        yield from _mlp(config, shared, config.moe_shared_expert_intermediate_size, False)
        if config.moe_shared_expert_gate:
            yield Parameter(f"{shared}gate_weight", (1, h), Split.WHOLE)


def _mlp(config: GPTConfig, prefix: str, width: int, bias: bool) -> Iterator[Parameter]:
    h, rows = config.hidden_size, width * (2 if config.gated else 1)
    fc1 = Split.GATED if config.gated else Split.ROWS
    yield from _linear(f"{prefix}linear_fc1.", rows, h, bias, fc1)
    yield from _linear(f"{prefix}linear_fc2.", h, width, bias, Split.COLUMNS)


def _linear(prefix: str, rows: int, columns: int, bias: bool, split: Split) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}weight", (rows, columns), split)
    if bias:
        # The bias of a row-parallel linear is added once, after the sum over ranks.
        yield Parameter(f"{prefix}bias", (rows,), Split.WHOLE if split is Split.COLUMNS else split)


def _norm(config: GPTConfig, prefix: str, width: int) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}weight", (width,), Split.WHOLE)
    if config.normalization == "LayerNorm":
        yield Parameter(f"{prefix}bias", (width,), Split.WHOLE)


def part(parameter: Parameter, config: GPTConfig, rank: int, tp: int) -> Part:
    """What tensor rank `rank` of `tp` holds of a parameter. Call `check_split` before."""
    shape = parameter.shape
    match parameter.split:
        case Split.WHOLE:
            return Part(0, ((0, shape[0]),), shape[0])
        case Split.ROWS:
            return _even(shape, 0, rank, tp)
        case Split.COLUMNS:
            return _even(shape, 1, rank, tp)
        case Split.GATED:
            # A plain run of rows would give rank 0 only gates, with nothing to gate.
            half = shape[0] // 2
            size = half // tp
            gate = (rank * size, (rank + 1) * size)
            return Part(0, (gate, (half + gate[0], half + gate[1])), 2 * size)
        case Split.QKV:
            return _qkv(shape[0], config, rank, tp)
        case Split.VOCAB:
            size = -(-shape[0] // tp)
            start, stop = min(shape[0], rank * size), min(shape[0], (rank + 1) * size)
            return Part(0, ((start, stop),), size)


def _even(shape: tuple[int, ...], dim: int, rank: int, tp: int) -> Part:
    size = shape[dim] // tp
    return Part(dim, ((rank * size, (rank + 1) * size),), size)


def _qkv(rows: int, config: GPTConfig, rank: int, tp: int) -> Part:
    groups, d = config.num_query_groups, config.kv_channels
    per_group = rows // groups
    if groups % tp == 0:
        start = rank * (groups // tp) * per_group
        return Part(0, ((start, start + groups // tp * per_group),), groups // tp * per_group)
    # Fewer groups than ranks: this rank takes some queries of one group, and a copy of its key
    # and value.
    share = tp // groups
    group, position = divmod(rank, share)
    queries = (config.num_attention_heads // tp) * d
    first = group * per_group
    start = first + position * queries
    stop = first + per_group
    return Part(0, ((start, start + queries), (stop - 2 * d, stop)), queries + 2 * d)


def local_groups(config: GPTConfig, tp: int) -> int:
    """KV heads that each tensor rank keeps."""
    return max(1, config.num_query_groups // tp)


def first_group(config: GPTConfig, rank: int, tp: int) -> int:
    """The first of the KV heads that a tensor rank keeps; several ranks keep one, if they must."""
    return rank * config.num_query_groups // tp


def check_split(config: GPTConfig, tp: int, pp: int, stages: list[int] | None = None) -> None:
    """Refuse a split that the model cannot have, naming one that it can."""
    if tp < 1 or pp < 1:
        raise ConfigError(f"tensor parallel {tp} x pipeline parallel {pp}: both must be at least 1")
    if not _divides(config, tp):
        works = ", ".join(str(t) for t in range(1, 65) if _divides(config, t))
        raise ConfigError(
            f"tensor parallel {tp} does not divide the model: {config.num_attention_heads} heads "
            f"in {config.num_query_groups} query groups, ffn_hidden_size {config.ffn_hidden_size}; "
            f"--tp can be {works}"
        )
    if pp > config.num_layers:
        raise ConfigError(
            f"pipeline parallel {pp} leaves stages without a layer: the model has "
            f"{config.num_layers} layers; --pp can be at most {config.num_layers}"
        )
    if stages is not None and (len(stages) != pp or sum(stages) != config.num_layers):
        raise ConfigError(
            f"stages of {stages} layers: there must be {pp} numbers that add up to "
            f"{config.num_layers}"
        )


def _divides(config: GPTConfig, tp: int) -> bool:
    groups = config.num_query_groups
    widths = [config.num_attention_heads]
    if not all(config.moe_layers):
        widths.append(config.ffn_hidden_size)
    if any(config.moe_layers):
        widths.append(config.moe_ffn_hidden_size)
        widths.append(config.moe_shared_expert_intermediate_size)
    return all(w % tp == 0 for w in widths) and (groups % tp == 0 or tp % groups == 0)


def stage_layers(
    num_layers: int, pp: int, stages: list[int] | None = None, vpp: int = 1
) -> list[list[range]]:
    """The global layers of each stage's chunks: `[stage][chunk]`.

    Layers run through all stages' first chunks, then through all their second ones. `stages`
    gives each stage's number of layers; without it they are as even as can be, and the stages
    that also embed or have the head get the smaller share.
    """
    if stages is None:
        chunks = _spread(num_layers, pp * vpp)
    else:
        per_chunk = [_spread(layers, vpp) for layers in stages]
        chunks = [per_chunk[stage][chunk] for chunk in range(vpp) for stage in range(pp)]
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    ranges = [range(start, start + size) for start, size in zip(starts, chunks, strict=True)]
    return [[ranges[chunk * pp + stage] for chunk in range(vpp)] for stage in range(pp)]


def _spread(total: int, parts: int) -> list[int]:
    """`total` in `parts` near-equal shares, the larger ones in the middle."""
    small, extra = divmod(total, parts)
    first = (parts - extra) // 2
    return [small + (first <= i < first + extra) for i in range(parts)]
