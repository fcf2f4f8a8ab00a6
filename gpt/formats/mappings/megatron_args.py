"""Megatron args mapping: converts the `args` of a GPT of any Megatron version to config fields.

The args record the properties that shapes do not determine: heads, activation, positions, norm.
Names and defaults changed between versions, and some versions ignored some args. An arg whose
effect Preamble does not compute is refused, and the error names it. For a file without args, the
sizes are inferred from the tensor shapes, and an error asks the user for the other fields.
`hybrid_args` converts the args of a HybridModel to those of a GPT first.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt.config import GPTConfig, yarn_attention_factor
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.mappings.megatron_names import EMBEDDING, POSITION_EMBEDDING
from gpt.formats.mappings.unsupported_architectures import refuse_args
from gpt.parallel.vocabulary_padding import refuse_larger_vocabulary
from gpt.settings import short_repr

# Ends of error messages that ask the user for config fields.
CONFIG_HINT = "(config= in Python, --config-json FILE on the command line)"
FIELDS_HINT = f"as fields of config {CONFIG_HINT}"
UNTIED_HINT = f"give untie_embeddings_and_output_weights in config {CONFIG_HINT}"

# Args of a HybridModel, which `hybrid_args` converts: the pattern of its layers, and former names.
HYBRID_ARGS: tuple[str, ...] = (
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "hybrid_attention_ratio",
    "hybrid_mlp_ratio",
    "mtp_hybrid_override_pattern",
    "mtp_num_layers",
)

# Args that describe the network or its parallel sizes. `open_rank_files` in `rank_files` refuses a
# checkpoint whose ranks have different values of these args.
ARCHITECTURE_ARGS: tuple[str, ...] = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "max_position_embeddings",
    "seq_length",
    "position_embedding_type",
    "use_rotary_position_embeddings",
    "add_position_embedding",
    "rotary_percent",
    "rotary_base",
    "rotary_interleaved",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor",
    "window_size",
    "window_attn_skip_freq",
    "no_rope_freq",
    "softmax_type",
    "softmax_scale",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "quick_geglu",
    "normalization",
    "layernorm_epsilon",
    "norm_epsilon",
    "apply_layernorm_1p",
    "layernorm_zero_centered_gamma",
    "swiglu",
    "squared_relu",
    "openai_gelu",
    "onnx_safe",
    "bias_gelu_fusion",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "qk_layernorm",
    "num_experts",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_ffn_hidden_size",
    "moe_router_enable_expert_bias",
    "padded_vocab_size",
    "vocab_size",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_shared_expert_intermediate_size",
    "tensor_model_parallel_size",
    "model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    *HYBRID_ARGS,
)

# Args of unsupported features, and the values that switch the feature off. The feature is also off
# if the arg is absent or None. `unsupported_architectures` has the args of other architectures.
UNSUPPORTED_ARGS: Mapping[str, tuple[object, ...]] = {
    "softmax_type": ("vanilla", "learnable"),
    "attention_output_gate": (False,),
    "use_mup": (False,),
    "moe_latent_size": (),
    "glu_activation": (),
    "apply_residual_connection_post_layernorm": (False,),
    "post_ln": (False,),
    "normformer": (False,),
    "headscale": (False,),
    "use_alibi": (False,),
    "moe_router_force_load_balancing": (False,),
    "moe_apply_probs_on_input": (False,),
    "retro_add_retriever": (False,),
    "spec": ([],),
    "query_pre_attn_scalar": (),
    "apply_embedding_scaling": (False,),
}

# Activations by the last part of a function's qualified name; torch's `gelu` is the erf variant.
ACTIVATION_FUNCTIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "openai_gelu": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "fast_gelu": "gelu_tanh",
    "squared_relu": "relu2",
}

FIELD_HINTS: Mapping[str, str] = {
    "num_attention_heads": "the number of query heads",
    "num_query_groups": "equal to num_attention_heads without grouped-query attention",
    "activation": "gelu (the erf variant), gelu_tanh, silu or relu2",
    "position_embedding_type": "rope or none",
    "max_position_embeddings": "the training context length",
    "layernorm_epsilon": "often 1e-5 or 1e-6",
    "layernorm_zero_centered_gamma": "true for layernorm1p",
    "rotary_base": "often 10000",
    "rotary_percent": "1.0 if all channels are rotated",
    "moe_router_topk": "the number of experts per token",
    "moe_router_pre_softmax": "false if the softmax is over the selected experts only",
}


class MegatronArgs:
    """Typed access to the args of one file; an arg of value None counts as absent.

    Error messages call an arg `args.x`. If the args were converted from another config format,
    `display_names` maps their names to the names in that format, which messages use instead.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        location: str,
        display_names: Mapping[str, str] | None = None,
    ) -> None:
        self.values = values
        self.location = location
        self.display_names = display_names

    def display_name(self, name: str) -> str:
        return f"args.{name}" if self.display_names is None else self.display_names.get(name, name)

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int = 0) -> int:
        value = self.get(name, default)
        if type(value) is not int or value < 0:
            raise self.invalid_arg_error(name, "a whole number")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.invalid_arg_error(name, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self.invalid_arg_error(name, "a number") from None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.invalid_arg_error(name, "true or false")
        return value

    def literal(self, name: str) -> Any:
        """Return the value of an arg; parse a value that was saved as command-line text."""
        value = self.get(name)
        if isinstance(value, str):
            try:
                return ast.literal_eval(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise self.invalid_arg_error(name, "a Python literal") from None
        return value

    def invalid_arg_error(self, name: str, expected: str) -> CheckpointError:
        actual = short_repr(self.values.get(name))
        return CheckpointError(
            f"{self.location}: {self.display_name(name)} is {actual}; it must be {expected}: copy "
            "the file from the training run again"
        )

    def unsupported_arg_error(self, name: str) -> CheckpointError:
        actual = short_repr(self.values.get(name))
        return CheckpointError(
            f"{self.location}: {self.display_name(name)} is {actual}, which Preamble does not "
            "support; give a model without this setting"
        )


@dataclass(frozen=True)
class WeightShapes:
    """The shapes of the tensors on each tensor parallel rank."""

    rank_shapes: Mapping[str, Sequence[tuple[int, ...]]]
    num_layers: int
    legacy: bool  # Saved by Megatron-LM's model classes from before Megatron-Core.
    # The pattern of the layers in the files if they are a HybridModel's, else empty. The names and
    # `num_layers` are always those of a GPT.
    hybrid_layers: str = ""

    def rows(self, name: str) -> int:
        """Return the rows of a row-sharded tensor, summed over all ranks; 0 if absent."""
        return sum(shape[0] for shape in self.rank_shapes.get(name, ()) if shape)

    def columns(self, name: str) -> int:
        """Return the columns of a column-sharded tensor, summed over all ranks; 0 if absent."""
        return sum(shape[-1] for shape in self.rank_shapes.get(name, ()) if shape)

    def has_tensor(self, suffix: str) -> bool:
        return any(name.endswith(suffix) for name in self.rank_shapes)

    @property
    def position_rows(self) -> int:
        """The rows of the position embedding, which is replicated on all ranks; 0 if absent."""
        return (
            self.rank_shapes[POSITION_EMBEDDING][0][0]
            if POSITION_EMBEDDING in self.rank_shapes
            else 0
        )

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        router_name = "decoder.layers.{}.mlp.router.weight"
        return tuple(
            router_name.format(layer) in self.rank_shapes for layer in range(self.num_layers)
        )


@dataclass
class PartialConfig:
    """The fields of a GPTConfig that the files determine, and the fields that the user must give.

    `notes` has a note for each assumption, by field name. The user does not see the note of a field
    that the user gives.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    undetermined_fields: list[str] = field(default_factory=list)  # The user must give these.
    notes: dict[str, str] = field(default_factory=dict)


def config_from_gpt_args(args: MegatronArgs, weights: WeightShapes) -> PartialConfig:
    """Convert the args of a GPT of any Megatron version to config fields."""
    refuse_args(args.values, args.location, args.display_name)
    for name, accepted_values in UNSUPPORTED_ARGS.items():
        value = args.get(name)
        is_plain = isinstance(value, bool | int | float | str | list | tuple)
        if value is not None and not (is_plain and value in accepted_values):
            raise args.unsupported_arg_error(name)
    partial_config = PartialConfig()
    fields = partial_config.fields
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        fields[name] = args.integer(name)
    fields["ffn_hidden_size"] = args.integer("ffn_hidden_size")
    fields["kv_channels"] = args.integer("kv_channels")
    fields["num_query_groups"] = _query_groups(args, weights)
    has_bias = args.flag("add_bias_linear", not args.flag("disable_bias_linear"))
    fields["qkv_bias"] = has_bias or args.flag("add_qkv_bias")
    fields["proj_bias"] = fields["mlp_bias"] = has_bias
    fields["untie_embeddings_and_output_weights"] = args.flag("untie_embeddings_and_output_weights")
    fields["hidden_dropout"] = args.number("hidden_dropout", 0.0)
    fields["attention_dropout"] = args.number("attention_dropout", 0.0)
    fields["qk_layernorm"] = args.flag("qk_layernorm")
    _set_norm(args, partial_config)
    _set_positions(args, weights, partial_config)
    _set_window(args, weights, partial_config)
    fields["attention_sinks"] = args.get("softmax_type") == "learnable"
    fields["softmax_scale"] = args.number("softmax_scale", 0.0)
    _set_activation(args, weights, has_bias, partial_config)
    if any(weights.moe_layers):
        _set_moe(args, weights, partial_config)
    _set_vocab_size(args, weights, partial_config)
    return partial_config


def layer_flags(
    args: MegatronArgs, name: str, layers: int, periodic_flag: Callable[[int, int], bool]
) -> tuple[bool, ...]:
    """Return the flag of each layer from an arg such as `window_attn_skip_freq`.

    The arg is a list of all layers' flags, or a period, from which `periodic_flag` derives a
    layer's flag. Megatron counts layers from 1. The period 0 sets no flag.
    """
    value = args.literal(name)
    flags: list[int] = []
    if type(value) is int and value >= 0:
        flags = [int(value and periodic_flag(number, value)) for number in range(1, layers + 1)]
    elif isinstance(value, list | tuple) and len(value) == layers:
        flags = [int(flag) if isinstance(flag, int) else -1 for flag in value]
    if not flags or not set(flags) <= {0, 1}:
        raise args.invalid_arg_error(
            name, f"a whole number, or a list of 0 and 1 for the {layers} layers"
        )
    return tuple(map(bool, flags))


def yarn_scaling(args: MegatronArgs) -> dict[str, Any]:
    """Return the RoPE scaling of a model with YaRN positions."""
    factor = args.number("yarn_rotary_scaling_factor", 1.0)

    magnitudes = [
        None if args.get(name) is None else args.number(name, 0.0)
        for name in ("yarn_mscale", "yarn_mscale_all_dim")
    ]
    return {
        "kind": "yarn",
        "factor": factor,
        "original_max_position_embeddings": args.integer("yarn_original_max_position_embeddings"),
        "beta_fast": args.number("yarn_beta_fast", 32.0),
        "beta_slow": args.number("yarn_beta_slow", 1.0),
        "truncate": args.flag("yarn_correction_range_round_to_int", True),
        "attention_factor": yarn_attention_factor(factor, *magnitudes),
    }


def _query_groups(args: MegatronArgs, weights: WeightShapes) -> int:
    """Return the number of query groups.

    The arg `num_query_groups` is used only with grouped-query attention: its default is 1, even for
    a model in which each head is a group.
    """
    heads = args.integer("num_attention_heads")
    if args.get("group_query_attention") is None and args.get("num_query_groups") is not None:
        # Megatron saves both args or neither. Here only num_query_groups is present, so a converter
        # wrote the args, and they do not tell whether the model has grouped-query attention. The
        # number of rows of the QKV weight tells it.
        channels = args.integer("kv_channels") or args.integer("hidden_size") // max(1, heads)
        rows = weights.rows("decoder.layers.0.self_attention.linear_qkv.weight")
        return heads if rows == 3 * heads * channels else args.integer("num_query_groups")
    return args.integer("num_query_groups") if args.flag("group_query_attention") else heads


def _set_norm(args: MegatronArgs, partial_config: PartialConfig) -> None:
    names = [name for name in ("layernorm_epsilon", "norm_epsilon") if args.get(name) is not None]
    epsilons = {args.number(name, 0.0) for name in names}
    if len(epsilons) == 1:
        partial_config.fields["layernorm_epsilon"] = epsilons.pop()
    elif epsilons:  # The two args have different values.
        partial_config.undetermined_fields.append("layernorm_epsilon")
    partial_config.fields["normalization"] = args.get("normalization", "LayerNorm")
    partial_config.fields["layernorm_zero_centered_gamma"] = args.flag(
        "apply_layernorm_1p"
    ) or args.flag("layernorm_zero_centered_gamma")


def _set_positions(
    args: MegatronArgs, weights: WeightShapes, partial_config: PartialConfig
) -> None:
    fields = partial_config.fields
    position_type = args.get("position_embedding_type", "learned_absolute")
    if position_type not in ("learned_absolute", "rope", "yarn", "none"):
        raise args.unsupported_arg_error("position_embedding_type")
    has_rotary = position_type in ("rope", "yarn") or args.flag("use_rotary_position_embeddings")
    has_learned = position_type == "learned_absolute" and not has_rotary
    if weights.legacy:  # The legacy classes can use learned and rotary positions together.
        has_learned = weights.position_rows > 0
    names = {
        (True, True): "learned_absolute+rope",
        (True, False): "learned_absolute",
        (False, True): "rope",
        (False, False): "none",
    }
    fields["position_embedding_type"] = names[has_learned, has_rotary]
    positions_max = args.integer("max_position_embeddings") or args.integer("seq_length")
    fields["max_position_embeddings"] = weights.position_rows or positions_max
    if not has_rotary:
        return
    fields["rotary_percent"] = args.number("rotary_percent", 1.0)
    if args.get("no_rope_freq") is not None:
        without_rope = layer_flags(
            args, "no_rope_freq", fields["num_layers"], lambda number, period: number % period == 0
        )
        fields["rope_layers"] = tuple(not flag for flag in without_rope)
    if position_type == "yarn":
        fields["rotary_base"] = args.number("rotary_base", 10000.0)
        fields["rotary_interleaved"] = args.flag("rotary_interleaved")
        fields["rope_scaling"] = yarn_scaling(args)
        return
    scaling_factor = args.number("rotary_seq_len_interpolation_factor", 1.0)
    is_llama3 = args.flag("use_rope_scaling") and not weights.legacy
    if not weights.legacy:  # The legacy classes always use base 10000 without interleaving.
        fields["rotary_base"] = args.number("rotary_base", 10000.0)
        fields["rotary_interleaved"] = args.flag("rotary_interleaved")
    if is_llama3 and scaling_factor != 1:
        raise args.unsupported_arg_error("rotary_seq_len_interpolation_factor")
    if is_llama3:
        scaling_factor = args.number("rope_scaling_factor", 8.0)
    default_factor = 8.0 if is_llama3 else 1.0
    if is_llama3 or scaling_factor != 1:
        fields["rope_scaling"] = {
            "kind": "llama3" if is_llama3 else "linear",
            "factor": scaling_factor,
        }
    if scaling_factor != default_factor and not weights.legacy:
        partial_config.notes["rope_scaling"] = (
            f"positions are scaled by {scaling_factor:g}, the factor in the args; Megatron-LM "
            "before Megatron-Core 0.19 ignored this factor and used "
            f"{default_factor:g}: give rope_scaling if the model was trained with such a version"
        )


def _set_window(args: MegatronArgs, weights: WeightShapes, partial_config: PartialConfig) -> None:
    window = args.literal("window_size")
    if window is None:
        return
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise args.invalid_arg_error("window_size", "a pair of numbers")
    tokens_before, tokens_after = window
    if (
        type(tokens_before) is not int
        or tokens_after not in (0, -1)
        or (weights.legacy and tokens_before >= 0)
    ):
        raise args.unsupported_arg_error("window_size")
    frequency_name = "window_attn_skip_freq"
    if args.literal(frequency_name) == 0:  # Megatron-Core cannot run such a model.
        raise args.unsupported_arg_error(frequency_name)
    fields = partial_config.fields
    if tokens_before < 0:
        return
    # Megatron's size excludes the current token; GPTConfig.window_size includes it.
    fields["window_size"] = tokens_before + 1
    if args.get(frequency_name) is not None:
        # Every n-th layer has full attention.
        fields["window_layers"] = layer_flags(
            args, frequency_name, fields["num_layers"], lambda number, period: number % period != 0
        )


def _set_activation(
    args: MegatronArgs, weights: WeightShapes, has_bias: bool, partial_config: PartialConfig
) -> None:
    fields = partial_config.fields
    fields["activation_func_clamp_value"] = args.number("activation_func_clamp_value", 0.0)
    fields["glu_linear_offset"] = args.number("glu_linear_offset", 0.0)
    if args.get("activation_func") is not None:
        _set_named_activation(args, has_bias, fields)
        return
    if args.flag("quick_geglu"):
        fields["gated"], fields["activation"] = True, "quick_gelu"
        return
    fields["gated"] = args.flag("swiglu")
    is_full_te_layer = weights.legacy and args.get("transformer_impl") == "transformer_engine"
    if is_full_te_layer:
        # Transformer Engine's TransformerLayer can ignore `swiglu`, so check the shapes.
        fc1, fc2 = (f"decoder.layers.0.mlp.linear_fc{number}.weight" for number in (1, 2))
        fields["gated"] = weights.rows(fc1) == 2 * weights.columns(fc2)
        # The final norm uses apply_layernorm_1p, but the norms in TransformerLayer ignore it.
        if args.flag("apply_layernorm_1p"):
            raise args.unsupported_arg_error("apply_layernorm_1p")
    # Transformer Engine's GELU is always the tanh approximation.
    if fields["gated"] or is_full_te_layer or args.flag("use_te_activation_func"):
        fields["activation"] = "silu" if fields["gated"] else "gelu_tanh"
        return
    if args.flag("squared_relu"):
        fields["activation"] = "relu2"
        return
    has_fusion_arg = args.get("bias_gelu_fusion") is not None
    if weights.legacy and not has_fusion_arg and args.get("openai_gelu") is not None:
        # Versions of 2020 have no fused kernel for bias + GELU; openai_gelu selects the variant.
        fields["activation"] = "gelu_tanh" if args.flag("openai_gelu") else "gelu"
        return
    # The fused kernel for bias + GELU computes the tanh approximation; torch's GELU uses erf.
    fuses_bias = args.flag("bias_gelu_fusion", True) and has_bias
    if not has_fusion_arg:
        partial_config.notes["activation"] = (
            "the args do not record the variant of GELU; the tanh approximation is assumed"
        )
    if weights.legacy and args.flag("onnx_safe") and fuses_bias:
        # The precedence of onnx_safe and bias_gelu_fusion depends on the Megatron version.
        partial_config.undetermined_fields.append("activation")
        return
    is_tanh = fuses_bias or (weights.legacy and args.flag("openai_gelu"))
    fields["activation"] = "gelu_tanh" if is_tanh else "gelu"


def _set_named_activation(args: MegatronArgs, has_bias: bool, fields: dict[str, Any]) -> None:
    """Set the activation and `gated` from the fields of a TransformerConfig."""
    name = args.get("activation_func")
    if not isinstance(name, str) or name not in ACTIVATION_FUNCTIONS:
        raise args.unsupported_arg_error("activation_func")
    gated = fields["gated"] = args.flag("gated_linear_unit")
    # The fused kernel for bias + GELU computes the tanh approximation. A gated MLP uses the fused
    # kernel even without a bias.
    uses_fused_kernel = args.flag("bias_activation_fusion") and (has_bias or gated)
    fields["activation"] = (
        "gelu_tanh" if name == "gelu" and uses_fused_kernel else ACTIVATION_FUNCTIONS[name]
    )


def _set_moe(args: MegatronArgs, weights: WeightShapes, partial_config: PartialConfig) -> None:
    fields = partial_config.fields
    fields["num_experts"] = args.integer("num_experts")
    fields["moe_layers"] = weights.moe_layers
    fields["moe_router_topk"] = args.integer("moe_router_topk", 2)
    fields["moe_ffn_hidden_size"] = args.integer("moe_ffn_hidden_size")
    fields["moe_router_pre_softmax"] = args.flag("moe_router_pre_softmax")
    fields["moe_router_score_function"] = args.get("moe_router_score_function", "softmax")
    fields["moe_router_topk_scaling_factor"] = (
        args.number("moe_router_topk_scaling_factor", 0.0) or 1.0
    )
    has_expert_bias = args.flag("moe_router_enable_expert_bias")
    fields["moe_router_expert_bias"] = has_expert_bias
    if has_expert_bias and fields["moe_router_score_function"] != "sigmoid":
        raise args.unsupported_arg_error("moe_router_enable_expert_bias")
    fields["moe_shared_expert_intermediate_size"] = args.integer(
        "moe_shared_expert_intermediate_size"
    )
    # Versions that have a bias of the router use it if the linears have biases.
    fields["moe_router_bias"] = weights.has_tensor("mlp.router.bias")
    fields["moe_shared_expert_gate"] = weights.has_tensor("shared_experts.gate_weight")
    groups = args.integer("moe_router_group_topk")
    # Selecting all groups does not restrict the routing.
    if groups and groups != args.integer("moe_router_num_groups"):
        raise args.unsupported_arg_error("moe_router_group_topk")
    balancing = args.get("moe_router_load_balancing_type", "none")
    if "sinkhorn" in (balancing if isinstance(balancing, list | tuple) else [balancing]):
        raise args.unsupported_arg_error("moe_router_load_balancing_type")
    if args.get("moe_expert_capacity_factor") is not None:
        partial_config.notes["capacity"] = (
            "the model was trained with an expert capacity, which can drop tokens; Preamble's "
            "experts drop no tokens"
        )


def _set_vocab_size(
    args: MegatronArgs, weights: WeightShapes, partial_config: PartialConfig
) -> None:
    """Set vocab_size to the true size in the args, else to the rows of the padded embedding."""
    rows = weights.rows(EMBEDDING)
    padded = args.integer("padded_vocab_size")
    if padded and padded != rows:
        raise CheckpointError(
            f"{args.location}: args.padded_vocab_size is {padded}, but the embedding has {rows} "
            "rows; the rank files are of different checkpoints: take all ranks from the same "
            "checkpoint"
        )
    size = args.integer("vocab_size")
    if size and "Null" in str(args.get("tokenizer_type")):
        size += 1  # The null tokenizer's vocab_size does not count its end-of-document token.
    if 0 < size <= rows:
        partial_config.fields["vocab_size"] = size
        return
    partial_config.fields["vocab_size"] = rows
    partial_config.notes["vocab_size"] = _padding_unknown_note(rows)


def _padding_unknown_note(rows: int) -> str:
    return (
        f"the true vocabulary size is not recorded, so vocab_size is {rows}, the number of "
        "embedding rows, which can include padding; give vocab_size if the tokenizer has fewer "
        "tokens"
    )


def config_from_shapes(weights: WeightShapes) -> PartialConfig:
    """Infer config fields from the shapes, for files without args, such as those of 2019."""
    partial_config = PartialConfig()
    rows, hidden = weights.rows(EMBEDDING), weights.rank_shapes[EMBEDDING][0][1]
    fc1 = weights.rows("decoder.layers.0.mlp.linear_fc1.weight")
    fc2 = weights.columns("decoder.layers.0.mlp.linear_fc2.weight")
    partial_config.fields = {
        "num_layers": weights.num_layers,
        "hidden_size": hidden,
        "ffn_hidden_size": fc2,
        "vocab_size": rows,
        "normalization": "LayerNorm" if weights.has_tensor("final_layernorm.bias") else "RMSNorm",
        "gated": fc1 == 2 * fc2,
        "qkv_bias": weights.has_tensor("linear_qkv.bias"),
        "proj_bias": weights.has_tensor("linear_proj.bias"),
        "mlp_bias": weights.has_tensor("linear_fc2.bias"),
        "qk_layernorm": weights.has_tensor("q_layernorm.weight"),
    }
    partial_config.undetermined_fields.append("num_attention_heads")
    if fc1 == 2 * fc2:
        partial_config.undetermined_fields.append("activation")
    else:
        partial_config.fields["activation"] = "gelu_tanh"
        partial_config.notes["activation"] = (
            "the files have no args; the tanh approximation of GELU is assumed"
        )
    partial_config.notes["layernorm_epsilon"] = (
        "the files have no args; a layernorm_epsilon of 1e-5 is assumed"
    )
    if weights.position_rows:
        partial_config.fields["max_position_embeddings"] = weights.position_rows
        partial_config.fields["position_embedding_type"] = "learned_absolute"
    else:
        partial_config.undetermined_fields += ["position_embedding_type", "max_position_embeddings"]
    partial_config.notes["vocab_size"] = _padding_unknown_note(rows)
    return partial_config


def complete_fields(
    partial_config: PartialConfig, overrides: Mapping[str, Any], location: str
) -> dict[str, Any]:
    """Return the fields with the overrides; refuse undetermined fields without an override."""
    missing = [name for name in partial_config.undetermined_fields if name not in overrides]
    if missing:
        pronoun = "it" if len(missing) == 1 else "them"
        raise CheckpointError(
            f"{location} does not record {list_fields_with_hints(missing)}; look {pronoun} up in "
            f"the training config, and give {pronoun} {FIELDS_HINT}"
        )
    return {**partial_config.fields, **overrides}


def list_fields_with_hints(names: Sequence[str]) -> str:
    """Return the field names in one text, with a hint about the value after most names."""
    return ", ".join(
        f"{name} ({FIELD_HINTS[name]})" if name in FIELD_HINTS else name for name in names
    )


def resolve_config(
    path: Path,
    weights: WeightShapes,
    dtype: str,
    overrides: GPTConfig | Mapping[str, Any],
    infer_config: Callable[[WeightShapes], PartialConfig],
) -> tuple[GPTConfig, dict[str, str]]:
    """Return the config, and notes for the user about assumptions, by field.

    `infer_config` infers the config from the checkpoint's files; it is not called if `overrides` is
    a GPTConfig.
    """
    try:
        if isinstance(overrides, GPTConfig):
            config, notes = overrides, {}
        else:
            partial_config = infer_config(weights)
            partial_config.fields["dtype"] = dtype
            config = GPTConfig.from_dict(complete_fields(partial_config, overrides, str(path)))
            notes = {
                name: note for name, note in partial_config.notes.items() if name not in overrides
            }
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    refuse_larger_vocabulary(path, config.vocab_size, weights.rows(EMBEDDING))
    if config.num_layers != weights.num_layers:
        raise CheckpointError(
            f"{path}: the config has {config.num_layers} layers, but the weights have "
            f"{weights.num_layers}; files are missing or belong to another checkpoint: take all "
            "files from the same checkpoint"
        )
    return config, notes
