"""Sharding table: name, shape and tensor-parallel split of each parameter.

The sharding table is the only definition of the parameter layout: the model, the loaders, the
converters and the memory estimates all use it. A rank's shard of a tensor consists of ranges of
rows or columns. A weight has the shape (out, in), as in torch. The module computes with plain
integers and does not import torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.linear_parts import LOCAL_EXPERTS
from gpt.parallel.vocabulary_padding import local_vocab_range, padded_vocab_size

Ranges = tuple[tuple[int, int], ...]


class ShardRule(Enum):
    """How a parameter is divided over the tensor ranks."""

    REPLICATED = "every rank holds the whole tensor"
    ROWS = "each rank holds an equal range of rows"
    COLUMNS = "each rank holds an equal range of columns"
    GATED = "two stacked matrices, gate and up; each rank holds an equal range of rows of both"
    QKV = "rows by query group, [queries, key, value]; each rank holds whole groups or part of one"
    KV_HEADS = "rows by KV head; each rank holds the rows of its KV heads"
    VOCAB = "one row per token; equal ranges after padding with zero rows"


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One logical tensor of the model: unsharded and unpadded."""

    name: str  # Canonical name: as in Megatron-Core, with global layer and expert numbers.
    shape: tuple[int, ...]
    shard_rule: ShardRule


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One rank's shard of a logical tensor: ranges along one dimension, in order.

    `size` is the extent of the shard along `dim`: the total length of the ranges, plus the zero
    rows of vocabulary padding.
    """

    dim: int
    ranges: Ranges
    size: int

    def local_shape(self, global_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*global_shape[: self.dim], self.size, *global_shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class RankInStage:
    """A rank's position in its pipeline stage: which part of each parameter it holds.

    A stage has max(tp, ep) ranks. The experts are divided into `ep` parts of whole experts. With
    `ep` < `tp`, tp / ep ranks share a part, and each expert is split over them. With `ep` > `tp`,
    there are ep / tp groups of `tp` ranks, and each group holds all parameters but the experts.
    """

    rank: int = 0
    tp: int = 1
    ep: int = 1

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def expert_tp(self) -> int:
        """The number of ranks over which each expert is split (Megatron's ETP)."""
        return max(1, self.tp // self.ep)

    @property
    def expert_tp_rank(self) -> int:
        return self.rank % self.expert_tp

    def local_experts(self, config: GPTConfig) -> range:
        """Return the global numbers of the experts that this rank holds, or holds a part of."""
        count = config.num_experts // self.ep
        first = self.rank // self.expert_tp * count
        return range(first, first + count)

    def shard(self, parameter: ParameterSpec, config: GPTConfig) -> ShardSpec | None:
        """Return this rank's shard of a parameter; None if another rank holds the expert."""
        split = self.split_of(parameter.name, config)
        return None if split is None else shard_spec(parameter, config, *split)

    def split_of(self, name: str, config: GPTConfig) -> tuple[int, int] | None:
        """Return this rank's index among the ranks that share a parameter or module, and their
        number; None if other ranks hold the expert.
        """
        expert = expert_number(name)
        if expert is None:
            return self.tp_rank, self.tp
        if expert not in self.local_experts(config):
            return None
        return self.expert_tp_rank, self.expert_tp


# Prefix of the parameter names of layers, as in `decoder.layers.7.mlp.linear_fc2.weight`.
LAYERS_PREFIX = "decoder.layers."

# The parameters of the activation xIELU, each one number. The last two are constants.
XIELU_PARAMETERS = ("alpha_p", "alpha_n", "beta", "eps")


def layer_number(name: str) -> int | None:
    """Return the global layer number in a canonical name; None for a name outside the layers."""
    return (
        int(name[len(LAYERS_PREFIX) :].split(".", 1)[0]) if name.startswith(LAYERS_PREFIX) else None
    )


def expert_number(name: str) -> int | None:
    """Return the global expert number in a canonical name; None for other parameters."""
    _, separator, rest = name.partition(LOCAL_EXPERTS)
    return int(rest.split(".", 1)[0]) if separator else None


def is_on_stage(config: GPTConfig, name: str, layers: range) -> bool:
    """Return whether the pipeline stage with `layers` holds the parameter `name`.

    Two stages hold a tied embedding: the first stage, and the last stage as its LM head.
    """
    layer = layer_number(name)
    if layer is not None:
        return layer in layers
    is_first, is_last = layers.start == 0, layers.stop == config.num_layers
    if name == "embedding.word_embeddings.weight":
        return is_first or (is_last and not config.untie_embeddings_and_output_weights)
    return is_first if name.startswith("embedding.") else is_last


def parameter_dtype(name: str, dtype: str) -> str:
    """Return the dtype of the parameter `name` in a model of `dtype`.

    The expert bias of a router is at least float32, because rounding could change the choice of
    experts.
    """
    is_16_bit = dtype in ("bfloat16", "float16")
    return "float32" if is_16_bit and name.endswith(".expert_bias") else dtype


def parameter_specs(config: GPTConfig) -> dict[str, ParameterSpec]:
    """Return the specification of every parameter by canonical name, in forward-pass order."""
    h = config.hidden_size
    table = [
        ParameterSpec("embedding.word_embeddings.weight", (config.vocab_size, h), ShardRule.VOCAB)
    ]
    if config.embedding_layernorm:
        table.extend(_norm_specs(config, "embedding.word_embeddings_layernorm.", h))
    if config.has_learned_positions:
        positions = (config.max_position_embeddings, h)
        table.append(
            ParameterSpec("embedding.position_embeddings.weight", positions, ShardRule.REPLICATED)
        )
    for layer in range(config.num_layers):
        table.extend(_layer_specs(config, layer))
    table.extend(_norm_specs(config, "decoder.final_layernorm.", h))
    if config.untie_embeddings_and_output_weights:
        table.append(ParameterSpec("output_layer.weight", (config.vocab_size, h), ShardRule.VOCAB))
    return {parameter.name: parameter for parameter in table}


def _layer_specs(config: GPTConfig, layer: int) -> Iterator[ParameterSpec]:
    h, d = config.hidden_size, config.kv_channels
    heads, groups = config.num_attention_heads, config.num_query_groups
    attention_prefix = f"{LAYERS_PREFIX}{layer}.self_attention."
    has_pre_norms, has_post_norms = config.norm_placement != "post", config.norm_placement != "pre"
    if has_pre_norms:
        yield from _norm_specs(config, f"{attention_prefix}linear_qkv.layer_norm_", h)
    rows = (heads + 2 * groups) * d
    yield from _linear_specs(
        f"{attention_prefix}linear_qkv.", rows, h, config.qkv_bias, ShardRule.QKV
    )
    if config.qk_layernorm and config.qk_layernorm_scope == "head":
        yield from _norm_specs(config, f"{attention_prefix}q_layernorm.", d)
        yield from _norm_specs(config, f"{attention_prefix}k_layernorm.", d)
    elif config.qk_layernorm:
        for name, width, rule in (
            ("q_layernorm", heads * d, ShardRule.ROWS),
            ("k_layernorm", groups * d, ShardRule.KV_HEADS),
        ):
            yield ParameterSpec(f"{attention_prefix}{name}.weight", (width,), rule)
    if config.layers[layer].attention_sinks:
        yield ParameterSpec(
            f"{attention_prefix}core_attention.softmax_offset", (heads,), ShardRule.ROWS
        )
    yield from _linear_specs(
        f"{attention_prefix}linear_proj.", h, heads * d, config.proj_bias, ShardRule.COLUMNS
    )
    if has_post_norms:
        yield from _norm_specs(config, f"{attention_prefix}linear_proj.post_layernorm.", h)

    mlp_prefix = f"{LAYERS_PREFIX}{layer}.mlp."
    if not config.moe_layers[layer]:
        if has_pre_norms:
            yield from _norm_specs(config, f"{mlp_prefix}linear_fc1.layer_norm_", h)
        yield from _mlp_specs(config, mlp_prefix, config.ffn_hidden_size, config.mlp_bias)
        if config.activation == "xielu":
            for name in XIELU_PARAMETERS:
                yield ParameterSpec(
                    f"{mlp_prefix}activation_func.{name}", (1,), ShardRule.REPLICATED
                )
        if has_post_norms:
            yield from _norm_specs(config, f"{mlp_prefix}linear_fc2.post_layernorm.", h)
        return
    yield from _norm_specs(config, f"{LAYERS_PREFIX}{layer}.pre_mlp_layernorm.", h)
    yield ParameterSpec(f"{mlp_prefix}router.weight", (config.num_experts, h), ShardRule.REPLICATED)
    if config.moe_router_bias:
        yield ParameterSpec(f"{mlp_prefix}router.bias", (config.num_experts,), ShardRule.REPLICATED)
    if config.moe_router_expert_bias:
        yield ParameterSpec(
            f"{mlp_prefix}router.expert_bias", (config.num_experts,), ShardRule.REPLICATED
        )
    for expert in range(config.num_experts):
        expert_prefix = f"{mlp_prefix}experts.local_experts.{expert}."
        yield from _mlp_specs(config, expert_prefix, config.moe_ffn_hidden_size, config.mlp_bias)
    if config.moe_shared_expert_intermediate_size:
        shared_prefix = f"{mlp_prefix}shared_experts."
        yield from _mlp_specs(
            config, shared_prefix, config.moe_shared_expert_intermediate_size, False
        )
        if config.moe_shared_expert_gate:
            yield ParameterSpec(f"{shared_prefix}gate_weight", (1, h), ShardRule.REPLICATED)


def _mlp_specs(config: GPTConfig, prefix: str, width: int, bias: bool) -> Iterator[ParameterSpec]:
    h, rows = config.hidden_size, width * (2 if config.gated else 1)
    fc1_rule = ShardRule.GATED if config.gated else ShardRule.ROWS
    yield from _linear_specs(f"{prefix}linear_fc1.", rows, h, bias, fc1_rule)
    yield from _linear_specs(f"{prefix}linear_fc2.", h, width, bias, ShardRule.COLUMNS)


def _linear_specs(
    prefix: str, rows: int, columns: int, bias: bool, rule: ShardRule
) -> Iterator[ParameterSpec]:
    yield ParameterSpec(f"{prefix}weight", (rows, columns), rule)
    if bias:
        # A row-parallel linear, whose weight is split by COLUMNS (its inputs), adds the bias once,
        # after the sum over ranks. Therefore every rank has the whole bias.
        yield ParameterSpec(
            f"{prefix}bias", (rows,), ShardRule.REPLICATED if rule is ShardRule.COLUMNS else rule
        )


def _norm_specs(config: GPTConfig, prefix: str, width: int) -> Iterator[ParameterSpec]:
    yield ParameterSpec(f"{prefix}weight", (width,), ShardRule.REPLICATED)
    if config.normalization == "LayerNorm":
        yield ParameterSpec(f"{prefix}bias", (width,), ShardRule.REPLICATED)


def shard_spec(parameter: ParameterSpec, config: GPTConfig, rank: int, tp: int) -> ShardSpec:
    """Return the shard of a parameter on tensor rank `rank` of `tp`; assumes a valid split.

    `check_split` checks that the split is valid.
    """
    shape = parameter.shape
    match parameter.shard_rule:
        case ShardRule.REPLICATED:
            return ShardSpec(0, ((0, shape[0]),), shape[0])
        case ShardRule.ROWS:
            return _even_shard(shape, 0, rank, tp)
        case ShardRule.COLUMNS:
            return _even_shard(shape, 1, rank, tp)
        case ShardRule.GATED:
            # Each rank needs matching rows of gate and up. With one contiguous range, rank 0 would
            # have only gate rows.
            half = shape[0] // 2
            size = half // tp
            gate = (rank * size, (rank + 1) * size)
            return ShardSpec(0, (gate, (half + gate[0], half + gate[1])), 2 * size)
        case ShardRule.KV_HEADS:
            size = local_kv_heads(config, tp) * config.kv_channels
            start = first_kv_head(config, rank, tp) * config.kv_channels
            return ShardSpec(0, ((start, start + size),), size)
        case ShardRule.QKV:
            return _qkv_shard(shape[0], config, rank, tp)
        case ShardRule.VOCAB:
            size = padded_vocab_size(shape[0], tp) // tp
            return ShardSpec(0, (local_vocab_range(shape[0], size, rank),), size)


def _even_shard(shape: tuple[int, ...], dim: int, rank: int, tp: int) -> ShardSpec:
    size = shape[dim] // tp
    return ShardSpec(dim, ((rank * size, (rank + 1) * size),), size)


def _qkv_shard(rows: int, config: GPTConfig, rank: int, tp: int) -> ShardSpec:
    groups, d = config.num_query_groups, config.kv_channels
    rows_per_group = rows // groups
    if groups % tp == 0:
        start = rank * (groups // tp) * rows_per_group
        return ShardSpec(
            0, ((start, start + groups // tp * rows_per_group),), groups // tp * rows_per_group
        )
    # There are fewer query groups than ranks: this rank has some query heads of one group, and a
    # copy of the group's key and value head.
    ranks_per_group = tp // groups
    group, rank_in_group = divmod(rank, ranks_per_group)
    query_rows = (config.num_attention_heads // tp) * d
    group_start = group * rows_per_group
    start = group_start + rank_in_group * query_rows
    stop = group_start + rows_per_group
    return ShardSpec(0, ((start, start + query_rows), (stop - 2 * d, stop)), query_rows + 2 * d)


def local_kv_heads(config: GPTConfig, tp: int) -> int:
    """Return the number of KV heads on each tensor rank."""
    return max(1, config.num_query_groups // tp)


def first_kv_head(config: GPTConfig, rank: int, tp: int) -> int:
    """Return the global index of a tensor rank's first KV head.

    If there are fewer KV heads than ranks, several ranks have a copy of the same head.
    """
    return rank * config.num_query_groups // tp


def check_split(
    config: GPTConfig, tp: int, pp: int, stages: list[int] | None = None, *, ep: int = 1
) -> None:
    """Raise ConfigError if the model does not support this split; the error names valid sizes."""
    if tp < 1 or pp < 1:
        raise ConfigError(f"tensor parallel {tp} x pipeline parallel {pp}: both must be at least 1")
    check_expert_parallel(config, tp, ep)
    if not _is_divisible(config, tp, ep):
        valid_sizes = ", ".join(str(t) for t in range(1, 65) if _is_divisible(config, t, ep))
        widths = ", ".join(f"{name} {width}" for name, width in _mlp_widths(config).items())
        raise ConfigError(
            f"tensor parallel {tp} does not divide the model: {config.num_attention_heads} heads "
            f"in {config.num_query_groups} query groups, {widths}; --tp can be {valid_sizes}"
        )
    if pp > config.num_layers:
        raise ConfigError(
            f"pipeline parallel {pp} is more than the number of layers: the model has "
            f"{config.num_layers} layers; --pp can be at most {config.num_layers}"
        )
    if stages is not None and (len(stages) != pp or sum(stages) != config.num_layers):
        raise ConfigError(
            f"the stages have {stages} layers; give {pp} numbers that add up to {config.num_layers}"
        )


def check_expert_parallel(config: GPTConfig, tp: int, ep: int) -> None:
    """Raise ConfigError if the experts cannot be divided into `ep` parts of whole experts."""
    if ep == 1:
        return
    if not any(config.moe_layers):
        raise ConfigError(f"expert parallel {ep}, but the model has no experts; remove --ep")
    if ep < 1 or config.num_experts % ep or not are_multiples(tp, ep):
        valid_sizes = ", ".join(
            str(size)
            for size in range(1, config.num_experts + 1)
            if config.num_experts % size == 0 and are_multiples(tp, size)
        )
        raise ConfigError(
            f"expert parallel {ep} must divide the {config.num_experts} experts, and be a multiple "
            f"or a divisor of tensor parallel {tp}; --ep can be {valid_sizes}"
        )


def are_multiples(a: int, b: int) -> bool:
    """Return whether one of the numbers is a multiple of the other."""
    return a % b == 0 or b % a == 0


def _is_divisible(config: GPTConfig, tp: int, ep: int) -> bool:
    if not are_multiples(tp, ep):
        return False
    widths = _mlp_widths(config)
    experts_width = widths.pop("moe_ffn_hidden_size", 0)
    return (
        all(width % tp == 0 for width in (config.num_attention_heads, *widths.values()))
        and experts_width % RankInStage(0, tp, ep).expert_tp == 0
        and are_multiples(config.num_query_groups, tp)
    )


def _mlp_widths(config: GPTConfig) -> dict[str, int]:
    """Return the widths of the model's MLPs and experts by the name of their config field."""
    widths: dict[str, int] = {}
    if not all(config.moe_layers):
        widths["ffn_hidden_size"] = config.ffn_hidden_size
    if any(config.moe_layers):
        widths["moe_ffn_hidden_size"] = config.moe_ffn_hidden_size
        if config.moe_shared_expert_intermediate_size:
            widths["moe_shared_expert_intermediate_size"] = (
                config.moe_shared_expert_intermediate_size
            )
    return widths
