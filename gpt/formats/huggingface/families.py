"""Hugging Face model families (model_type): config conversion and tensor key tables.

A family is a function that converts config.json to a GPTConfig, and a table from canonical names to
Hugging Face keys. A new family is a new entry of FAMILIES. A config value is refused if Preamble
would not compute the same as transformers. The module opens no files.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.huggingface.config_json import (
    ATTENTION_TYPES,
    ConfigJson,
    refuse_mixed_attention,
    rotary_fields,
)
from gpt.parallel.weight_sharding import LAYERS_PREFIX, ParameterSpec, layer_number

# The number of an expert in a canonical name.
EXPERT_NUMBER = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class FusedQKV:
    """The key of a tensor that has all queries, then all keys, then all values, as in GPT-2."""

    key: str


TensorKeys = str | tuple[str, ...] | FusedQKV


@dataclass(frozen=True)
class Family:
    """One model_type: the conversion of its config, and the file keys of each canonical tensor.

    `key_table` maps canonical names without the layer prefix to the keys in files of transformers
    4. A key contains `{n}` for the number of a layer, and `{expert}` for the number of an expert.
    `key_renames` and `fused_experts` convert the keys that are different in transformers 5.
    """

    to_gpt_config: Callable[[ConfigJson], GPTConfig]
    key_table: Mapping[str, TensorKeys]
    defaults: Mapping[str, Any]
    # Prefix of all keys except the head's. Files of the base model without a head lack the prefix.
    prefix: str
    conv1d: bool = False  # The weights of linears are stored as (in, out).
    # Parts of keys in files, and the parts of `key_table` keys that replace them.
    key_renames: Mapping[str, str] = field(default_factory=dict)
    # Suffix of a key that stacks all experts, and the suffixes of one expert's keys in `key_table`.
    fused_experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Keys of config.json for the number of layers for multi-token prediction. Files have these
    # layers after the model's layers; they are ignored.
    mtp_layer_keys: tuple[str, ...] = ()

    def mtp_layers(self, fields: ConfigJson) -> int:
        return max(
            [fields.count(key) for key in self.mtp_layer_keys if key in fields.record] or [0]
        )

    def tensor_keys(self, name: str) -> TensorKeys | None:
        """Return the keys of a canonical tensor; None if the family does not have this tensor."""
        layer = layer_number(name)
        expert_match = EXPERT_NUMBER.search(name)
        template = EXPERT_NUMBER.sub("{expert}", name)
        if layer is not None:
            template = template.split(".", 3)[3]  # Without the prefix `decoder.layers.N.`.
        keys = self.key_table.get(template)

        def format_key(key: str) -> str:
            return key.format(n=layer, expert=expert_match and expert_match[0])

        match keys:
            case None:
                return None
            case str():
                return format_key(keys)
            case FusedQKV(key):
                return FusedQKV(format_key(key))
        return tuple(map(format_key, keys))

    def stores_transposed(self, parameter: ParameterSpec) -> bool:
        """Tell whether files store this tensor as (in, out)."""
        return (
            self.conv1d and len(parameter.shape) == 2 and parameter.name.startswith(LAYERS_PREFIX)
        )


def _gpt2(fields: ConfigJson) -> GPTConfig:
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("scale_attn_weights", True)
    fields.require("add_cross_attention", False)
    return GPTConfig(
        num_layers=fields.count("n_layer"),
        hidden_size=fields.integer("n_embd"),
        num_attention_heads=fields.integer("n_head"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("n_positions"),
        ffn_hidden_size=fields.integer("n_inner", 0),
        layernorm_epsilon=fields.number("layer_norm_epsilon"),
        activation=fields.activation("activation_function"),
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings"),
        hidden_dropout=fields.number("resid_pdrop"),
        attention_dropout=fields.number("attn_pdrop"),
    )


def _llama_like(
    fields: ConfigJson,
    *,
    epsilon_key: str = "rms_norm_eps",
    theta_key: str = "rope_theta",
    percent_key: str | None = None,
    **overrides: Any,
) -> GPTConfig:
    """Convert the fields that Llama-like families share: RoPE, grouped queries, a gated MLP."""
    shared: dict[str, Any] = {
        "num_query_groups": fields.integer("num_key_value_heads", 0),
        "kv_channels": fields.integer("head_dim", 0),
        "normalization": "RMSNorm",
        "gated": True,
        "qkv_bias": False,
        "proj_bias": False,
        "mlp_bias": False,
    }
    return GPTConfig(
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=fields.integer("hidden_size"),
        num_attention_heads=fields.integer("num_attention_heads"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        ffn_hidden_size=fields.integer("intermediate_size"),
        position_embedding_type="rope",
        layernorm_epsilon=fields.number(epsilon_key),
        activation=fields.activation("hidden_act"),
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings"),
        attention_dropout=fields.number("attention_dropout", 0.0),
        **(shared | rotary_fields(fields, theta_key, percent_key) | overrides),
    )


def _llama(fields: ConfigJson) -> GPTConfig:
    bias = fields.flag("attention_bias")
    return _llama_like(fields, qkv_bias=bias, proj_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def _mistral(fields: ConfigJson) -> GPTConfig:
    refuse_mixed_attention(fields)
    return _llama_like(fields, window_size=fields.integer("sliding_window", 0) or None)


def _qwen2(fields: ConfigJson) -> GPTConfig:
    return _llama_like(fields, qkv_bias=True, window_size=_qwen_window(fields))


def _qwen3(fields: ConfigJson) -> GPTConfig:
    bias = fields.flag("attention_bias")
    return _llama_like(
        fields, window_size=_qwen_window(fields), qkv_bias=bias, proj_bias=bias, qk_layernorm=True
    )


def _mixtral(fields: ConfigJson) -> GPTConfig:
    refuse_mixed_attention(fields)
    # transformers computes a softmax over all experts and renormalizes the top k. This equals a
    # softmax over the top k, which is GPTConfig's default.
    return _llama_like(
        fields,
        window_size=fields.integer("sliding_window", 0) or None,
        num_experts=fields.count("num_local_experts"),
        moe_layers=(True,) * fields.count("num_hidden_layers"),
        moe_router_topk=fields.integer("num_experts_per_tok"),
    )


def _qwen2_moe(fields: ConfigJson) -> GPTConfig:
    return _llama_like(
        fields,
        qkv_bias=fields.flag("qkv_bias"),
        window_size=_qwen2_moe_window(fields),
        moe_shared_expert_intermediate_size=fields.integer("shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
        **_qwen_expert_fields(fields),
    )


def _qwen3_moe(fields: ConfigJson) -> GPTConfig:
    bias = fields.flag("attention_bias")
    has_window = fields.flag("use_sliding_window")
    return _llama_like(
        fields,
        qkv_bias=bias,
        proj_bias=bias,
        qk_layernorm=True,
        window_size=(fields.integer("sliding_window", 0) or None) if has_window else None,
        **_qwen_expert_fields(fields),
    )


def _qwen_expert_fields(fields: ConfigJson) -> dict[str, Any]:
    """Return GPTConfig's fields of the experts of Qwen2-MoE and Qwen3-MoE."""
    step = fields.count("decoder_sparse_step")
    if step < 1:
        raise fields.invalid_field_error(
            "decoder_sparse_step", step, "a whole number of at least 1"
        )
    dense_layers = set(fields.layer_numbers("mlp_only_layers"))
    return {
        # transformers 5 writes the key `num_local_experts` for some families.
        "num_experts": fields.count(
            "num_local_experts" if "num_local_experts" in fields.record else "num_experts"
        ),
        "moe_layers": tuple(
            layer not in dense_layers and (layer + 1) % step == 0
            for layer in range(fields.count("num_hidden_layers"))
        ),
        "moe_router_topk": fields.integer("num_experts_per_tok"),
        "moe_ffn_hidden_size": fields.integer("moe_intermediate_size"),
        # Softmax over all experts, renormalized over the top k, equals softmax over the top k.
        "moe_router_pre_softmax": not fields.flag("norm_topk_prob"),
    }


def _glm4_moe(fields: ConfigJson) -> GPTConfig:
    top_k = fields.integer("num_experts_per_tok")
    layers, dense_layers = fields.count("num_hidden_layers"), fields.count("first_k_dense_replace")
    # GPTConfig has no groups of experts, and normalizes sigmoid scores if more than one is chosen.
    fields.require("n_group", 1)
    fields.require("topk_group", 1)
    fields.require("norm_topk_prob", top_k > 1)
    expert_width = fields.integer("moe_intermediate_size")
    return _llama_like(
        fields,
        percent_key="partial_rotary_factor",
        qkv_bias=fields.flag("attention_bias"),
        qk_layernorm=fields.flag("use_qk_norm"),
        num_experts=fields.count(
            "num_local_experts" if "num_local_experts" in fields.record else "n_routed_experts"
        ),
        moe_layers=tuple(layer >= dense_layers for layer in range(layers)),
        moe_router_topk=top_k,
        moe_ffn_hidden_size=expert_width,
        moe_router_score_function="sigmoid",
        moe_router_expert_bias=True,
        moe_router_topk_scaling_factor=fields.number("routed_scaling_factor"),
        moe_shared_expert_intermediate_size=expert_width * fields.count("n_shared_experts"),
    )


def _starcoder2(fields: ConfigJson) -> GPTConfig:
    bias = fields.flag("use_bias")
    refuse_mixed_attention(fields)
    return _llama_like(
        fields,
        epsilon_key="norm_epsilon",
        normalization="LayerNorm",
        gated=False,
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=bias,
        window_size=fields.integer("sliding_window", 0) or None,
        hidden_dropout=fields.number("residual_dropout"),
    )


def _nemotron(fields: ConfigJson) -> GPTConfig:
    bias = fields.flag("attention_bias")
    return _llama_like(
        fields,
        epsilon_key="norm_eps",
        percent_key="partial_rotary_factor",
        normalization="LayerNorm",
        layernorm_zero_centered_gamma=True,
        gated=False,
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


def _gpt_neox(fields: ConfigJson) -> GPTConfig:
    heads, bias = fields.integer("num_attention_heads"), fields.flag("attention_bias")
    # GPT-NeoX always has hidden_size // heads channels per head. A different head_dim is refused:
    # transformers would use it for RoPE, but not as the size of a head.
    fields.require("head_dim", fields.integer("hidden_size") // max(1, heads))
    return _llama_like(
        fields,
        epsilon_key="layer_norm_eps",
        theta_key="rotary_emb_base",
        percent_key="rotary_pct",
        num_query_groups=heads,
        normalization="LayerNorm",
        gated=False,
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=True,
        parallel_residual=fields.flag("use_parallel_residual"),
        hidden_dropout=fields.number("hidden_dropout"),
    )


def _qwen_window(fields: ConfigJson) -> int | None:
    """Return Qwen's attention window; refuse a window that applies only to some layers."""
    window = fields.integer("sliding_window", 0)
    types = fields.layer_types()
    if not fields.flag("use_sliding_window") or not window:
        # Without a window, full and sliding attention are equal, so layers may mix these two types.
        if set(types or ()) - ATTENTION_TYPES:
            refuse_mixed_attention(fields)
        return None
    if types is not None:
        refuse_mixed_attention(fields)
        return window if "sliding_attention" in types else None
    # The first max_window_layers layers have full attention.
    full_attention_layers = fields.integer("max_window_layers")
    layers = fields.count("num_hidden_layers")
    if 0 < full_attention_layers < layers:
        raise CheckpointError(
            f"{fields.path}: max_window_layers is {full_attention_layers}, so only some of the "
            f"{layers} layers have sliding attention, which Preamble does not support; all layers "
            "must have the same attention"
        )
    return window if full_attention_layers == 0 else None


def _qwen2_moe_window(fields: ConfigJson) -> int | None:
    """Return Qwen2-MoE's attention window, which applies to every other layer by default."""
    window = fields.integer("sliding_window", 0) if fields.flag("use_sliding_window") else 0
    types = fields.layer_types()
    if not window:
        # Without a window, full and sliding attention are equal, so layers may mix these two types.
        if set(types or ()) - ATTENTION_TYPES:
            refuse_mixed_attention(fields)
        return None
    if types is None:
        if min(fields.count("num_hidden_layers"), fields.count("max_window_layers")) == 0:
            return None
        raise CheckpointError(
            f"{fields.path}: use_sliding_window is true without layer_types, so every other layer "
            "has sliding attention, which Preamble does not support; all layers must have the same "
            "attention"
        )
    refuse_mixed_attention(fields)
    return window if "sliding_attention" in types else None


GPT2_KEYS: Mapping[str, TensorKeys] = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "self_attention.linear_qkv.layer_norm_weight": "transformer.h.{n}.ln_1.weight",
    "self_attention.linear_qkv.layer_norm_bias": "transformer.h.{n}.ln_1.bias",
    "self_attention.linear_qkv.weight": FusedQKV("transformer.h.{n}.attn.c_attn.weight"),
    "self_attention.linear_qkv.bias": FusedQKV("transformer.h.{n}.attn.c_attn.bias"),
    "self_attention.linear_proj.weight": "transformer.h.{n}.attn.c_proj.weight",
    "self_attention.linear_proj.bias": "transformer.h.{n}.attn.c_proj.bias",
    "mlp.linear_fc1.layer_norm_weight": "transformer.h.{n}.ln_2.weight",
    "mlp.linear_fc1.layer_norm_bias": "transformer.h.{n}.ln_2.bias",
    "mlp.linear_fc1.weight": "transformer.h.{n}.mlp.c_fc.weight",
    "mlp.linear_fc1.bias": "transformer.h.{n}.mlp.c_fc.bias",
    "mlp.linear_fc2.weight": "transformer.h.{n}.mlp.c_proj.weight",
    "mlp.linear_fc2.bias": "transformer.h.{n}.mlp.c_proj.bias",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
    "output_layer.weight": "lm_head.weight",
}


def _qkv_keys(leaf: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{{n}}.self_attn.{letter}_proj.{leaf}" for letter in "qkv")


def _gate_up_keys(leaf: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{{n}}.mlp.{half}_proj.{leaf}" for half in ("gate", "up"))


LLAMA_KEYS: Mapping[str, TensorKeys] = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "self_attention.linear_qkv.layer_norm_weight": "model.layers.{n}.input_layernorm.weight",
    "self_attention.linear_qkv.weight": _qkv_keys("weight"),
    "self_attention.linear_qkv.bias": _qkv_keys("bias"),
    "self_attention.q_layernorm.weight": "model.layers.{n}.self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "model.layers.{n}.self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "model.layers.{n}.self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "model.layers.{n}.self_attn.o_proj.bias",
    "mlp.linear_fc1.layer_norm_weight": "model.layers.{n}.post_attention_layernorm.weight",
    "mlp.linear_fc1.weight": _gate_up_keys("weight"),
    "mlp.linear_fc1.bias": _gate_up_keys("bias"),
    "mlp.linear_fc2.weight": "model.layers.{n}.mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "model.layers.{n}.mlp.down_proj.bias",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}

MIXTRAL_KEYS: Mapping[str, TensorKeys] = {
    **LLAMA_KEYS,
    "pre_mlp_layernorm.weight": "model.layers.{n}.post_attention_layernorm.weight",
    "mlp.router.weight": "model.layers.{n}.block_sparse_moe.gate.weight",
    "mlp.experts.local_experts.{expert}.linear_fc1.weight": (
        "model.layers.{n}.block_sparse_moe.experts.{expert}.w1.weight",
        "model.layers.{n}.block_sparse_moe.experts.{expert}.w3.weight",
    ),
    "mlp.experts.local_experts.{expert}.linear_fc2.weight": (
        "model.layers.{n}.block_sparse_moe.experts.{expert}.w2.weight"
    ),
}
MIXTRAL_FUSED_EXPERTS = {
    "experts.gate_up_proj": ("experts.{expert}.w1.weight", "experts.{expert}.w3.weight"),
    "experts.down_proj": ("experts.{expert}.w2.weight",),
}

# The experts of Qwen2-MoE, Qwen3-MoE and GLM-4 MoE.
MOE_KEYS: Mapping[str, TensorKeys] = {
    **LLAMA_KEYS,
    "pre_mlp_layernorm.weight": "model.layers.{n}.post_attention_layernorm.weight",
    "mlp.router.weight": "model.layers.{n}.mlp.gate.weight",
    "mlp.experts.local_experts.{expert}.linear_fc1.weight": (
        "model.layers.{n}.mlp.experts.{expert}.gate_proj.weight",
        "model.layers.{n}.mlp.experts.{expert}.up_proj.weight",
    ),
    "mlp.experts.local_experts.{expert}.linear_fc2.weight": (
        "model.layers.{n}.mlp.experts.{expert}.down_proj.weight"
    ),
}
MOE_FUSED_EXPERTS = {
    "experts.gate_up_proj": (
        "experts.{expert}.gate_proj.weight",
        "experts.{expert}.up_proj.weight",
    ),
    "experts.down_proj": ("experts.{expert}.down_proj.weight",),
}
QWEN2_MOE_KEYS: Mapping[str, TensorKeys] = {
    **MOE_KEYS,
    "mlp.shared_experts.linear_fc1.weight": (
        "model.layers.{n}.mlp.shared_expert.gate_proj.weight",
        "model.layers.{n}.mlp.shared_expert.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": "model.layers.{n}.mlp.shared_expert.down_proj.weight",
    "mlp.shared_experts.gate_weight": "model.layers.{n}.mlp.shared_expert_gate.weight",
}
GLM4_MOE_KEYS: Mapping[str, TensorKeys] = {
    **MOE_KEYS,
    "mlp.router.expert_bias": "model.layers.{n}.mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.linear_fc1.weight": (
        "model.layers.{n}.mlp.shared_experts.gate_proj.weight",
        "model.layers.{n}.mlp.shared_experts.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": "model.layers.{n}.mlp.shared_experts.down_proj.weight",
}

# Llama's keys, with biases of norms and an MLP without a gate.
UNGATED_KEYS: Mapping[str, TensorKeys] = {
    **LLAMA_KEYS,
    "self_attention.linear_qkv.layer_norm_bias": "model.layers.{n}.input_layernorm.bias",
    "mlp.linear_fc1.layer_norm_bias": "model.layers.{n}.post_attention_layernorm.bias",
    "mlp.linear_fc1.weight": "model.layers.{n}.mlp.up_proj.weight",
    "mlp.linear_fc1.bias": "model.layers.{n}.mlp.up_proj.bias",
    "decoder.final_layernorm.bias": "model.norm.bias",
}
STARCODER2_KEYS: Mapping[str, TensorKeys] = {
    **UNGATED_KEYS,
    "mlp.linear_fc1.weight": "model.layers.{n}.mlp.c_fc.weight",
    "mlp.linear_fc1.bias": "model.layers.{n}.mlp.c_fc.bias",
    "mlp.linear_fc2.weight": "model.layers.{n}.mlp.c_proj.weight",
    "mlp.linear_fc2.bias": "model.layers.{n}.mlp.c_proj.bias",
}

GPT_NEOX_KEYS: Mapping[str, TensorKeys] = {
    "embedding.word_embeddings.weight": "gpt_neox.embed_in.weight",
    "self_attention.linear_qkv.layer_norm_weight": "gpt_neox.layers.{n}.input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "gpt_neox.layers.{n}.input_layernorm.bias",
    # The rows are already grouped by head: the query, key and value of each head.
    "self_attention.linear_qkv.weight": "gpt_neox.layers.{n}.attention.query_key_value.weight",
    "self_attention.linear_qkv.bias": "gpt_neox.layers.{n}.attention.query_key_value.bias",
    "self_attention.linear_proj.weight": "gpt_neox.layers.{n}.attention.dense.weight",
    "self_attention.linear_proj.bias": "gpt_neox.layers.{n}.attention.dense.bias",
    "mlp.linear_fc1.layer_norm_weight": "gpt_neox.layers.{n}.post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "gpt_neox.layers.{n}.post_attention_layernorm.bias",
    "mlp.linear_fc1.weight": "gpt_neox.layers.{n}.mlp.dense_h_to_4h.weight",
    "mlp.linear_fc1.bias": "gpt_neox.layers.{n}.mlp.dense_h_to_4h.bias",
    "mlp.linear_fc2.weight": "gpt_neox.layers.{n}.mlp.dense_4h_to_h.weight",
    "mlp.linear_fc2.bias": "gpt_neox.layers.{n}.mlp.dense_4h_to_h.bias",
    "decoder.final_layernorm.weight": "gpt_neox.final_layer_norm.weight",
    "decoder.final_layernorm.bias": "gpt_neox.final_layer_norm.bias",
    "output_layer.weight": "embed_out.weight",
}

# Defaults of each family's configuration class in transformers, for keys absent in config.json.
GPT2_DEFAULTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_positions": 1024,
    "tie_word_embeddings": True,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
}
LLAMA_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
MISTRAL_DEFAULTS = LLAMA_DEFAULTS | {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
QWEN_DEFAULTS = LLAMA_DEFAULTS | {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

MIXTRAL_DEFAULTS = MISTRAL_DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN2_MOE_DEFAULTS = LLAMA_DEFAULTS | {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 16,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "qkv_bias": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
}
QWEN3_MOE_DEFAULTS = LLAMA_DEFAULTS | {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
GLM4_MOE_DEFAULTS = LLAMA_DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": False,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
STARCODER2_DEFAULTS = LLAMA_DEFAULTS | {
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "residual_dropout": 0.0,
    "use_bias": True,
}
NEMOTRON_DEFAULTS = LLAMA_DEFAULTS | {
    "hidden_act": "relu2",
    "norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.5,
}
GPT_NEOX_DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rotary_emb_base": 10000.0,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "use_parallel_residual": True,
}

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(_gpt2, GPT2_KEYS, GPT2_DEFAULTS, "transformer.", conv1d=True),
    "llama": Family(_llama, LLAMA_KEYS, LLAMA_DEFAULTS, "model."),
    "mistral": Family(_mistral, LLAMA_KEYS, MISTRAL_DEFAULTS, "model."),
    "qwen2": Family(_qwen2, LLAMA_KEYS, QWEN_DEFAULTS, "model."),
    "qwen3": Family(_qwen3, LLAMA_KEYS, QWEN_DEFAULTS | {"head_dim": 128}, "model."),
    "mixtral": Family(
        _mixtral,
        MIXTRAL_KEYS,
        MIXTRAL_DEFAULTS,
        "model.",
        key_renames={".mlp.": ".block_sparse_moe."},
        fused_experts=MIXTRAL_FUSED_EXPERTS,
    ),
    "qwen2_moe": Family(
        _qwen2_moe, QWEN2_MOE_KEYS, QWEN2_MOE_DEFAULTS, "model.", fused_experts=MOE_FUSED_EXPERTS
    ),
    "qwen3_moe": Family(
        _qwen3_moe, MOE_KEYS, QWEN3_MOE_DEFAULTS, "model.", fused_experts=MOE_FUSED_EXPERTS
    ),
    "glm4_moe": Family(
        _glm4_moe,
        GLM4_MOE_KEYS,
        GLM4_MOE_DEFAULTS,
        "model.",
        fused_experts=MOE_FUSED_EXPERTS,
        mtp_layer_keys=("num_nextn_predict_layers", "num_mtp_layers"),
    ),
    "starcoder2": Family(_starcoder2, STARCODER2_KEYS, STARCODER2_DEFAULTS, "model."),
    "nemotron": Family(_nemotron, UNGATED_KEYS, NEMOTRON_DEFAULTS, "model."),
    "gpt_neox": Family(
        _gpt_neox,
        GPT_NEOX_KEYS,
        GPT_NEOX_DEFAULTS,
        "gpt_neox.",
        key_renames={"lm_head.": "embed_out."},
    ),
}
