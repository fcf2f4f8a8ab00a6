"""The model families Llama and Mistral, and the conversion that similar families share."""

from collections.abc import Mapping
from typing import Any

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import (
    ConfigJson,
    refuse_mixed_attention,
    rotary_fields,
)
from gpt.formats.huggingface.families.family import Family, TensorKeys


def qkv_keys(leaf: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{{n}}.self_attn.{letter}_proj.{leaf}" for letter in "qkv")


def gate_up_keys(leaf: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{{n}}.mlp.{half}_proj.{leaf}" for half in ("gate", "up"))


LLAMA_KEYS: Mapping[str, TensorKeys] = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "self_attention.linear_qkv.layer_norm_weight": "model.layers.{n}.input_layernorm.weight",
    "self_attention.linear_qkv.weight": qkv_keys("weight"),
    "self_attention.linear_qkv.bias": qkv_keys("bias"),
    "self_attention.q_layernorm.weight": "model.layers.{n}.self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "model.layers.{n}.self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "model.layers.{n}.self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "model.layers.{n}.self_attn.o_proj.bias",
    "mlp.linear_fc1.layer_norm_weight": "model.layers.{n}.post_attention_layernorm.weight",
    "mlp.linear_fc1.weight": gate_up_keys("weight"),
    "mlp.linear_fc1.bias": gate_up_keys("bias"),
    "mlp.linear_fc2.weight": "model.layers.{n}.mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "model.layers.{n}.mlp.down_proj.bias",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
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


def llama_like(
    fields: ConfigJson,
    *,
    epsilon_key: str = "rms_norm_eps",
    activation_key: str = "hidden_act",
    theta_key: str = "rope_theta",
    percent_key: str | None = None,
    rotary: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> GPTConfig:
    """Convert the fields that Llama-like families share: RoPE, grouped queries, a gated MLP.

    `rotary`: GPTConfig's RoPE fields. None: they are the same for all layers.
    """
    if rotary is None:
        rotary = rotary_fields(fields, theta_key, percent_key)
    shared: dict[str, Any] = {
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "num_query_groups": fields.integer("num_key_value_heads", 0),
        "kv_channels": fields.integer("head_dim", 0),
        "normalization": "RMSNorm",
        "gated": True,
        "qkv_bias": False,
        "proj_bias": False,
        "mlp_bias": False,
    }
    if "activation" not in overrides:
        shared["activation"] = fields.activation(activation_key)
    return GPTConfig(
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=fields.integer("hidden_size"),
        num_attention_heads=fields.integer("num_attention_heads"),
        vocab_size=fields.integer("vocab_size"),
        ffn_hidden_size=fields.integer("intermediate_size"),
        position_embedding_type="rope",
        layernorm_epsilon=fields.number(epsilon_key),
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings"),
        attention_dropout=fields.number("attention_dropout", 0.0),
        **{**shared, **rotary, **overrides},
    )


def _llama(fields: ConfigJson) -> GPTConfig:
    bias = fields.flag("attention_bias")
    return llama_like(fields, qkv_bias=bias, proj_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def _mistral(fields: ConfigJson) -> GPTConfig:
    refuse_mixed_attention(fields)
    return llama_like(fields, window_size=fields.integer("sliding_window", 0) or None)


LLAMA = Family(_llama, LLAMA_KEYS, LLAMA_DEFAULTS, "model.")
MISTRAL = Family(_mistral, LLAMA_KEYS, MISTRAL_DEFAULTS, "model.")
