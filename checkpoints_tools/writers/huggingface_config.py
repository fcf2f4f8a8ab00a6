"""Hugging Face config writer: chooses a family (model_type) that expresses a model exactly.

For each candidate family, the module builds the content of config.json and parses this content with
Preamble's reader. The family expresses the model if the parsed GPTConfig describes the same network
as the model's GPTConfig. If no family expresses the model, the error names the traits (model
properties) that the nearest family lacks; nothing is approximated. The module uses no tensors and
opens no files.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.checkpoint.logical_tensor import summarize_names
from gpt.config import Activation, GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.registry import FAMILIES

ConfigRecord = dict[str, Any]

ACTIVATIONS: Mapping[Activation, str] = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "relu": "relu",
    "relu2": "relu2",
}
# Old families such as GPT-2 have another name for the tanh GELU.
LEGACY_ACTIVATIONS: Mapping[Activation, str] = {**ACTIVATIONS, "gelu_tanh": "gelu_new"}


def _activation_name(activation: Activation, names: Mapping[Activation, str] = ACTIVATIONS) -> str:
    """Return the name of an activation in config.json.

    For an activation that only one family has, it is another one, which the other families differ
    by.
    """
    return names.get(activation, "silu")


@dataclass(frozen=True)
class FamilyChoice:
    """The chosen family, and the content of config.json."""

    family: str
    record: ConfigRecord
    # One note per dropout field that the family's config.json lacks. Dropout is not used in
    # inference.
    notes: tuple[str, ...]


def choose_family(
    config: GPTConfig, path: Path, requested_family: str | None = None
) -> FamilyChoice:
    """Choose `requested_family`, or if it is None, a family that expresses the model exactly.

    If several families express the model, families whose published models have the model's
    activation are preferred. If several families remain, the first of them in FAMILY_WRITERS is
    chosen. `path` is the checkpoint's path, for messages.

    Raises ConfigError if `requested_family` is unknown. Raises CheckpointError if the requested
    family cannot express the model, or if none is requested and no family can.
    """
    if requested_family is not None and requested_family not in FAMILY_WRITERS:
        supported_families = ", ".join(FAMILY_WRITERS)
        raise ConfigError(
            f"family {requested_family!r} cannot be written; choose one of {supported_families}"
        )
    fits = {
        name: _fit_family(config, name)
        for name in ([requested_family] if requested_family else FAMILY_WRITERS)
    }
    nearest = min(
        fits, key=lambda name: (not fits[name].is_complete, len(fits[name].missing_traits))
    )
    if fits[nearest].missing_traits:
        mismatch = f"cannot express {summarize_names(fits[nearest].missing_traits)}"
        if requested_family:
            raise CheckpointError(
                f"{path} cannot be written as the requested family: {nearest} {mismatch}; choose "
                "another family or format"
            )
        raise CheckpointError(
            f"{path} cannot be written for Hugging Face: no family expresses it exactly; the "
            f"nearest, {nearest}, {mismatch}; choose another format"
        )
    # Prefer a family whose published models have the same activation as this model, because some
    # tools ignore the activation field.
    name = min(
        (name for name in fits if not fits[name].missing_traits),
        key=lambda name: FAMILY_WRITERS[name].activation != config.activation,
    )
    return FamilyChoice(name, _config_record(config, name), _unstored_notes(config, name))


def _config_record(config: GPTConfig, family: str) -> ConfigRecord:
    writer = FAMILY_WRITERS[family]
    return {
        "architectures": [writer.architecture],
        "model_type": family,
        **writer.config_fields(config),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "torch_dtype": config.dtype,
        "dtype": config.dtype,
    }


def _read_back(config: GPTConfig, family: str) -> GPTConfig:
    record = {**FAMILIES[family].defaults, **_config_record(config, family)}
    return FAMILIES[family].to_gpt_config(ConfigJson(record, Path(family)))


@dataclass(frozen=True)
class _FamilyFit:
    missing_traits: list[str]  # Traits of the model that the family cannot express.
    is_complete: bool  # False: after a basic mismatch, the other traits were not compared.


def _fit_family(config: GPTConfig, family: str) -> _FamilyFit:
    writer, heads = FAMILY_WRITERS[family], config.num_attention_heads
    if writer.has_experts != any(config.moe_layers):
        return _FamilyFit([_describe_experts(config)], is_complete=False)
    missing_traits = []
    readable_config = config
    if writer.heads_divide_hidden and config.hidden_size % heads:
        missing_traits.append(
            f"a hidden_size of {config.hidden_size}, which {heads} heads do not divide"
        )
        # The reader would refuse the record. The other traits do not depend on hidden_size.
        readable_config = config.with_fields(hidden_size=heads * config.kv_channels)
    try:
        read_back = _read_back(readable_config, family)
    except (CheckpointError, ConfigError):
        # The reader refused the record. The cause can only be the head width: some families have no
        # field for it, and compute it from hidden_size. All other sizes are copied unchanged.
        return _FamilyFit([*missing_traits, HEAD_WIDTH.describe(config)], is_complete=False)
    for trait in TRAITS:
        model_value, family_value = trait.value(config), trait.value(read_back)
        if model_value != family_value and model_value is not None and family_value is not None:
            missing_traits.append(trait.describe(config))
    return _FamilyFit(missing_traits, is_complete=True)


def _unstored_notes(config: GPTConfig, family: str) -> tuple[str, ...]:
    read_back = _read_back(config, family)
    return tuple(
        f"config.json of a {family} model has no field for {name} {getattr(config, name)}; only "
        "further training would use this field"
        for name in ("hidden_dropout", "attention_dropout")
        if getattr(config, name) != getattr(read_back, name)
    )


@dataclass(frozen=True)
class Trait:
    """A property of a model that a family may be unable to express.

    If `value` returns None for a config, that model does not use the property, and the property is
    not compared.
    """

    value: Callable[[GPTConfig], object]
    # Returns the end of the message "llama cannot express ..." for a model.
    describe: Callable[[GPTConfig], str]


def _flag_trait(name: str, present: str, absent: str) -> Trait:
    return Trait(lambda c: getattr(c, name), lambda c: present if getattr(c, name) else absent)


def _value_trait(name: str, label: str) -> Trait:
    return Trait(lambda c: getattr(c, name), lambda c: f"{label} ({name} {getattr(c, name)})")


def _rotary_trait(name: str, describe: Callable[[GPTConfig], str]) -> Trait:
    return Trait(lambda c: getattr(c, name) if c.uses_rope else None, describe)


def _moe_trait(name: str, label: str) -> Trait:
    return Trait(
        lambda c: getattr(c, name) if any(c.moe_layers) else None,
        lambda c: f"{label} ({name} {getattr(c, name)})",
    )


def _comparable_rope_scaling(config: GPTConfig) -> object:
    scaling = config.rope_scaling
    if not config.uses_rope:
        return None
    return (scaling.kind, scaling.factor) if scaling and scaling.kind == "linear" else (scaling,)


def _describe_window(config: GPTConfig) -> str:
    if config.window_size is None:
        return "layers without a window"
    layers = "some layers" if config.window_layers else "all layers"
    return f"a window of {config.window_size} in {layers} (window_size, window_layers)"


def _describe_rope_scaling(config: GPTConfig) -> str:
    scaling = config.rope_scaling
    return "no RoPE scaling" if scaling is None else f"this RoPE scaling ({scaling})"


def _describe_experts(config: GPTConfig) -> str:
    if not any(config.moe_layers):
        return "an MLP without experts"
    return "experts" if all(config.moe_layers) else "experts in some of the layers only"


POSITION_DESCRIPTIONS: Mapping[str, str] = {
    "learned_absolute": "learned positions",
    "rope": "rotary positions",
    "learned_absolute+rope": "learned and rotary positions together",
    "alibi": "ALiBi positions",
    "none": "a model without position embeddings",
}

HEAD_WIDTH = Trait(
    lambda c: c.kv_channels,
    lambda c: f"heads of {c.kv_channels} channels at a hidden_size of {c.hidden_size}",
)

TRAITS = (
    Trait(
        lambda c: c.position_embedding_type,
        lambda c: POSITION_DESCRIPTIONS[c.position_embedding_type],
    ),
    _rotary_trait(
        "rotary_interleaved", lambda c: "interleaved rotary channels (rotary_interleaved)"
    ),
    _rotary_trait("rotary_percent", lambda c: f"rotary_percent {c.rotary_percent}"),
    _rotary_trait("rotary_base", lambda c: f"rotary_base {c.rotary_base}"),
    Trait(_comparable_rope_scaling, _describe_rope_scaling),
    Trait(lambda c: c.normalization, lambda c: c.normalization),
    Trait(lambda c: c.layernorm_epsilon, lambda c: f"layernorm_epsilon {c.layernorm_epsilon}"),
    _flag_trait(
        "layernorm_zero_centered_gamma",
        "norms whose stored weight is gamma - 1 (layernorm_zero_centered_gamma)",
        "norms whose stored weight is gamma itself",
    ),
    Trait(lambda c: c.activation, lambda c: f"the activation {c.activation}"),
    Trait(
        lambda c: c.gated,
        lambda c: f"{'a gated MLP' if c.gated else 'an MLP without a gate'} ({c.activation})",
    ),
    Trait(
        lambda c: c.num_query_groups,
        lambda c: f"{c.num_query_groups} query groups of {c.num_attention_heads} heads",
    ),
    HEAD_WIDTH,
    _flag_trait("qk_layernorm", "norms of queries and keys", "queries and keys without norms"),
    _flag_trait("qkv_bias", "biases of q, k and v", "q, k and v without biases"),
    _flag_trait("proj_bias", "a bias of attention's output", "attention's output without a bias"),
    _flag_trait("mlp_bias", "biases in the MLP", "an MLP without biases"),
    _flag_trait("parallel_residual", "parallel_residual", "a residual that is not parallel"),
    Trait(lambda c: (c.window_size or 0, c.window_layers), _describe_window),
    _rotary_trait("rope_layers", lambda c: "these layers with rotary positions (rope_layers)"),
    _rotary_trait("window_rope", lambda c: "these rotary positions of the layers with a window"),
    _value_trait("norm_placement", "norms at these places of a layer"),
    _value_trait("embedding_layernorm", "the norm of the embeddings"),
    _value_trait("embedding_multiplier", "this factor of the embeddings"),
    _value_trait("embedding_multiplier_scope", "this factor of the virtual tokens"),
    _value_trait("residual_multiplier", "this factor of the outputs of attention and MLP"),
    _value_trait("logits_scaling", "this divisor of the logits"),
    _value_trait("softmax_scale", "this scale of the attention scores"),
    Trait(
        lambda c: (c.query_scaling_beta, c.query_scaling_length),
        lambda c: (
            f"queries scaled by position (query_scaling_beta {c.query_scaling_beta})"
            if c.query_scaling_beta
            else "queries that are not scaled by position"
        ),
    ),
    _value_trait("attention_sinks", "attention sinks"),
    _value_trait("activation_func_clamp_value", "this limit of the activation"),
    _value_trait("glu_linear_offset", "this offset in the gated activation"),
    Trait(
        lambda c: c.qk_layernorm_scope if c.qk_layernorm else None,
        lambda c: f"norms of queries and keys of this scope ({c.qk_layernorm_scope})",
    ),
    _moe_trait("moe_router_bias", "a bias of the router"),
    Trait(lambda c: c.moe_layers if any(c.moe_layers) else (), _describe_experts),
    _moe_trait("num_experts", "this number of experts"),
    _moe_trait("moe_router_topk", "this number of experts per token"),
    _moe_trait("moe_router_score_function", "this score function of the router"),
    _moe_trait("moe_router_pre_softmax", "this order of softmax and top-k in the router"),
    _moe_trait("moe_router_expert_bias", "an expert bias in the router"),
    _moe_trait("moe_router_topk_scaling_factor", "scaled expert weights"),
    _moe_trait("moe_shared_expert_intermediate_size", "shared experts"),
    _moe_trait("moe_shared_expert_gate", "a gate of shared experts"),
    _moe_trait("moe_ffn_hidden_size", "experts of this width"),
    Trait(
        lambda c: None if all(c.moe_layers) else c.ffn_hidden_size,
        lambda c: f"ffn_hidden_size {c.ffn_hidden_size}",
    ),
)


def _gpt2(config: GPTConfig) -> ConfigRecord:
    return {
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_hidden_size,
        "n_positions": config.max_position_embeddings,
        "n_ctx": config.max_position_embeddings,  # Older name, which some tools still need.
        "activation_function": _activation_name(config.activation, LEGACY_ACTIVATIONS),
        "layer_norm_epsilon": config.layernorm_epsilon,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
    }


def _size_fields(config: GPTConfig) -> ConfigRecord:
    """Return the fields that all families except GPT-2 have."""
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": _activation_name(config.activation),
        "attention_dropout": config.attention_dropout,
    }


def _llama_like(config: GPTConfig, epsilon_key: str = "rms_norm_eps") -> ConfigRecord:
    """Return the fields of Llama and of the families derived from it."""
    return {
        **_size_fields(config),
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        epsilon_key: config.layernorm_epsilon,
        **_rotary_fields(config, "rope_theta"),
    }


def _rotary_fields(
    config: GPTConfig,
    theta_key: str,
    percent_key: str | None = None,
    scaling_kinds: Collection[str] = ("linear", "llama3", "yarn"),
) -> ConfigRecord:
    """Return the RoPE fields of transformers 4 (separate keys) and of transformers 5 (one object).

    `theta_key` and `percent_key` are keys of transformers 4; without `percent_key`, the family has
    no partial RoPE. Scaling of a kind that is not in `scaling_kinds`, those that the family's code
    supports, is left out.
    """
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind not in scaling_kinds:
        scaling = None
    legacy_fields = {theta_key: config.rotary_base}
    rope: ConfigRecord = {"rope_type": "default"}
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
                rope[name] = getattr(scaling, name)
        if scaling.kind == "longrope":
            rope = {
                "rope_type": scaling.kind,
                "short_factor": list(scaling.frequency_factors),
                # Without factors for long contexts, all contexts have the same factors.
                "long_factor": list(scaling.long_frequency_factors or scaling.frequency_factors),
                "attention_factor": scaling.attention_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
        if scaling.kind == "yarn":
            for name in (
                "original_max_position_embeddings",
                "beta_fast",
                "beta_slow",
                "truncate",
                "attention_factor",
            ):
                rope[name] = getattr(scaling, name)
    # Early readers of linear scaling support only the older key "type".
    legacy_rope = (
        {"type": "linear", "factor": rope["factor"]} if rope["rope_type"] == "linear" else rope
    )
    rope = {**rope, "rope_theta": config.rotary_base}
    if percent_key is not None:
        legacy_fields[percent_key] = rope["partial_rotary_factor"] = config.rotary_percent
    return {**legacy_fields, "rope_scaling": scaling and legacy_rope, "rope_parameters": rope}


def _llama(config: GPTConfig) -> ConfigRecord:
    return {
        **_llama_like(config),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


def _mistral(config: GPTConfig) -> ConfigRecord:
    return {**_llama_like(config), "sliding_window": config.window_size}


def _qwen2(config: GPTConfig) -> ConfigRecord:
    window = config.window_size
    return {
        **_llama_like(config),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        # In transformers, only the layers from this number on use the window.
        "max_window_layers": config.num_layers if window is None else 0,
    }


def _qwen3(config: GPTConfig) -> ConfigRecord:
    return {**_qwen2(config), "attention_bias": config.qkv_bias}


def _mixtral(config: GPTConfig) -> ConfigRecord:
    return {
        **_mistral(config),
        "intermediate_size": config.moe_ffn_hidden_size,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
    }


def _qwen_expert_fields(config: GPTConfig) -> ConfigRecord:
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "norm_topk_prob": not config.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            layer for layer, has_experts in enumerate(config.moe_layers) if not has_experts
        ],
    }


def _qwen2_moe(config: GPTConfig) -> ConfigRecord:
    return {
        **_llama_like(config),
        # Versions of transformers differ in the layers that a window applies to.
        "use_sliding_window": False,
        "qkv_bias": config.qkv_bias,
        "shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        **_qwen_expert_fields(config),
    }


def _qwen3_moe(config: GPTConfig) -> ConfigRecord:
    return {
        **_llama_like(config),
        "use_sliding_window": config.window_size is not None,
        "sliding_window": config.window_size,
        "attention_bias": config.qkv_bias,
        **_qwen_expert_fields(config),
    }


def _glm4_moe(config: GPTConfig) -> ConfigRecord:
    shared_width = config.moe_shared_expert_intermediate_size
    return {
        **_llama_like(config),
        **_rotary_fields(config, "rope_theta", "partial_rotary_factor"),
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_layernorm,
        # transformers has dense layers only before all layers with experts.
        "first_k_dense_replace": (*config.moe_layers, True).index(True),
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        # This family always has shared experts, each of width moe_intermediate_size.
        "n_shared_experts": max(1, shared_width // config.moe_ffn_hidden_size),
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": config.moe_router_topk > 1,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor,
        "num_nextn_predict_layers": 0,
    }


def _gpt_neox(config: GPTConfig) -> ConfigRecord:
    return {
        **_size_fields(config),
        "hidden_act": _activation_name(config.activation, LEGACY_ACTIVATIONS),
        "layer_norm_eps": config.layernorm_epsilon,
        **_rotary_fields(config, "rotary_emb_base", "rotary_pct"),
        "attention_bias": config.qkv_bias,
        "use_parallel_residual": config.parallel_residual,
        "hidden_dropout": config.hidden_dropout,
    }


def _starcoder2(config: GPTConfig) -> ConfigRecord:
    return {
        **_llama_like(config, "norm_epsilon"),
        "use_bias": config.qkv_bias,
        "sliding_window": config.window_size,
        "residual_dropout": config.hidden_dropout,
        "embedding_dropout": config.hidden_dropout,
    }


def _nemotron(config: GPTConfig) -> ConfigRecord:
    return {
        **_llama_like(config, "norm_eps"),
        **_rotary_fields(config, "rope_theta", "partial_rotary_factor"),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


# The default padding id of some families is larger than the vocabulary of small models.
NO_PADDING: Mapping[str, None] = {"pad_token_id": None}


def _window_fields(config: GPTConfig) -> ConfigRecord:
    """Return the fields of the layers' attention windows."""
    return {
        "layer_types": [
            "full_attention" if layer.window_size is None else "sliding_attention"
            for layer in config.layers
        ],
        # transformers needs a number, even if no layer has sliding attention.
        "sliding_window": config.window_size or config.max_position_embeddings,
    }


def _rotary_fields_by_type(config: GPTConfig, sliding_theta_key: str | None) -> ConfigRecord:
    """Return separate RoPE fields for full and for sliding attention."""
    window_rope = config.window_rope or config.rope
    window_config = config.with_fields(
        rotary_base=window_rope.base, rope_scaling=window_rope.scaling
    )
    full, sliding = (_rotary_fields(each, "rope_theta") for each in (config, window_config))
    rope_parameters = {
        "full_attention": full["rope_parameters"],
        "sliding_attention": sliding["rope_parameters"],
    }
    legacy_fields = {} if sliding_theta_key is None else {sliding_theta_key: window_rope.base}
    return {**full, "rope_parameters": rope_parameters, **legacy_fields}


def _gemma3_text(config: GPTConfig) -> ConfigRecord:
    fields = _llama_like(config)
    scale = (config.softmax_scale or config.kv_channels**-0.5) ** -2
    return {
        **fields,
        "hidden_activation": fields.pop("hidden_act"),
        **_rotary_fields_by_type(config, "rope_local_base_freq"),
        "attention_bias": config.qkv_bias,
        # transformers needs an integer.
        "query_pre_attn_scalar": max(1, round(scale)),
        **_window_fields(config),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _olmo2(config: GPTConfig) -> ConfigRecord:
    return {**_llama_like(config), "attention_bias": config.qkv_bias}


def _olmo3(config: GPTConfig) -> ConfigRecord:
    return {
        **_olmo2(config),
        **_rotary_fields_by_type(config, None),
        **_window_fields(config),
    }


def _smollm3(config: GPTConfig) -> ConfigRecord:
    return {
        **_llama(config),
        **_window_fields(config),
        "use_sliding_window": config.window_size is not None,
        "no_rope_layers": [int(layer.rope is not None) for layer in config.layers],
        **NO_PADDING,
    }


def _gpt_oss(config: GPTConfig) -> ConfigRecord:
    return {
        **_llama_like(config),
        "hidden_act": "silu",  # With the factor of the quick GELU, which is the default.
        "intermediate_size": config.moe_ffn_hidden_size,
        "attention_bias": config.qkv_bias,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "swiglu_limit": config.activation_func_clamp_value,
        **_window_fields(config),
    }


def _minimax_m2(config: GPTConfig) -> ConfigRecord:
    return {
        **_mixtral(config),
        **_rotary_fields(config, "rope_theta", "partial_rotary_factor"),
        # The weight of a single expert is 1 in this family, and its score in GPTConfig.
        "num_local_experts": max(2, config.num_experts),
        "num_experts_per_tok": max(2, config.moe_router_topk),
    }


def _opt(config: GPTConfig) -> ConfigRecord:
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "word_embed_proj_dim": config.hidden_size,
        "ffn_dim": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "activation_function": _activation_name(config.activation, LEGACY_ACTIVATIONS),
        "do_layer_norm_before": True,
        "enable_bias": config.qkv_bias,
        "dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "pad_token_id": None,
    }


def _bloom(config: GPTConfig) -> ConfigRecord:
    return {
        "n_layer": config.num_layers,
        "hidden_size": config.hidden_size,
        "n_head": config.num_attention_heads,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "seq_length": config.max_position_embeddings,
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
    }


def _phi3(config: GPTConfig) -> ConfigRecord:
    return {
        **_llama_like(config),
        **_rotary_fields(config, "rope_theta", "partial_rotary_factor", ("longrope",)),
        "original_max_position_embeddings": (
            config.rope_scaling.original_max_position_embeddings
            if config.rope_scaling is not None and config.rope_scaling.long_frequency_factors
            else config.max_position_embeddings
        ),
        "sliding_window": config.window_size,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        **NO_PADDING,
    }


def _granite_factors(config: GPTConfig) -> ConfigRecord:
    return {
        "embedding_multiplier": config.embedding_multiplier,
        "attention_multiplier": config.softmax_scale or config.kv_channels**-0.5,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": config.logits_scaling,
    }


def _granite(config: GPTConfig) -> ConfigRecord:
    return {**_llama(config), **_granite_factors(config)}


def _granitemoe(config: GPTConfig) -> ConfigRecord:
    return {
        **_llama_like(config),
        **_granite_factors(config),
        "attention_bias": config.qkv_bias,
        "intermediate_size": config.moe_ffn_hidden_size,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
    }


def _apertus(config: GPTConfig) -> ConfigRecord:
    fields = _llama_like(config)
    is_xielu = config.activation == "xielu"
    return {
        **fields,
        "hidden_act": "xielu" if is_xielu else fields["hidden_act"],
        # Without this key, transformers 4 would use the scaling of the published models.
        "rope_scaling": fields["rope_scaling"] or {"rope_type": "default"},
        "attention_bias": config.qkv_bias,
    }


def _ministral3(config: GPTConfig) -> ConfigRecord:
    fields = _mistral(config)
    rope = {
        "original_max_position_embeddings": config.query_scaling_length
        or config.max_position_embeddings,
        **fields["rope_parameters"],
        "llama_4_scaling_beta": config.query_scaling_beta,
    }
    legacy_rope = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {**fields, "rope_parameters": rope, "rope_scaling": legacy_rope}


@dataclass(frozen=True)
class FamilyWriter:
    config_fields: Callable[[GPTConfig], ConfigRecord]
    architecture: str
    # Activation of the family's published models. `choose_family` prefers a family with the
    # activation of the model.
    activation: Activation
    # The family's code requires that hidden_size is a multiple of the number of heads, even if
    # head_dim is set.
    heads_divide_hidden: bool = False
    has_experts: bool = False  # True: at least one layer has experts. False: none has experts.


# In order of preference: the families that most other programs support are first.
FAMILY_WRITERS: Mapping[str, FamilyWriter] = {
    "llama": FamilyWriter(_llama, "LlamaForCausalLM", "silu", heads_divide_hidden=True),
    "mistral": FamilyWriter(_mistral, "MistralForCausalLM", "silu"),
    "qwen2": FamilyWriter(_qwen2, "Qwen2ForCausalLM", "silu"),
    "qwen3": FamilyWriter(_qwen3, "Qwen3ForCausalLM", "silu"),
    "mixtral": FamilyWriter(_mixtral, "MixtralForCausalLM", "silu", has_experts=True),
    "qwen3_moe": FamilyWriter(_qwen3_moe, "Qwen3MoeForCausalLM", "silu", has_experts=True),
    "qwen2_moe": FamilyWriter(_qwen2_moe, "Qwen2MoeForCausalLM", "silu", has_experts=True),
    "glm4_moe": FamilyWriter(_glm4_moe, "Glm4MoeForCausalLM", "silu", has_experts=True),
    "gemma3_text": FamilyWriter(_gemma3_text, "Gemma3ForCausalLM", "gelu_tanh"),
    "olmo2": FamilyWriter(_olmo2, "Olmo2ForCausalLM", "silu"),
    "olmo3": FamilyWriter(_olmo3, "Olmo3ForCausalLM", "silu"),
    "smollm3": FamilyWriter(_smollm3, "SmolLM3ForCausalLM", "silu"),
    "phi3": FamilyWriter(_phi3, "Phi3ForCausalLM", "silu", heads_divide_hidden=True),
    "minimax_m2": FamilyWriter(_minimax_m2, "MiniMaxM2ForCausalLM", "silu", has_experts=True),
    "granite": FamilyWriter(_granite, "GraniteForCausalLM", "silu"),
    "granitemoe": FamilyWriter(_granitemoe, "GraniteMoeForCausalLM", "silu", has_experts=True),
    "ministral3": FamilyWriter(_ministral3, "Ministral3ForCausalLM", "silu"),
    "apertus": FamilyWriter(_apertus, "ApertusForCausalLM", "xielu"),
    "gpt_oss": FamilyWriter(_gpt_oss, "GptOssForCausalLM", "quick_gelu", has_experts=True),
    "gpt2": FamilyWriter(_gpt2, "GPT2LMHeadModel", "gelu_tanh", heads_divide_hidden=True),
    "opt": FamilyWriter(_opt, "OPTForCausalLM", "relu", heads_divide_hidden=True),
    "bloom": FamilyWriter(_bloom, "BloomForCausalLM", "gelu_tanh", heads_divide_hidden=True),
    "gpt_neox": FamilyWriter(_gpt_neox, "GPTNeoXForCausalLM", "gelu", heads_divide_hidden=True),
    "starcoder2": FamilyWriter(_starcoder2, "Starcoder2ForCausalLM", "gelu_tanh"),
    "nemotron": FamilyWriter(_nemotron, "NemotronForCausalLM", "relu2"),
}
