"""The model families Qwen2 and Qwen3, dense and with experts."""

from collections.abc import Mapping
from typing import Any

from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.huggingface.families.config_json import (
    ATTENTION_TYPES,
    ConfigJson,
    refuse_mixed_attention,
)
from gpt.formats.huggingface.families.expert_keys import MOE_FUSED_EXPERTS, MOE_KEYS
from gpt.formats.huggingface.families.family import Family, TensorKeys
from gpt.formats.huggingface.families.llama import LLAMA_DEFAULTS, LLAMA_KEYS, llama_like

QWEN2_MOE_KEYS: Mapping[str, TensorKeys] = {
    **MOE_KEYS,
    "mlp.shared_experts.linear_fc1.weight": (
        "model.layers.{n}.mlp.shared_expert.gate_proj.weight",
        "model.layers.{n}.mlp.shared_expert.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": "model.layers.{n}.mlp.shared_expert.down_proj.weight",
    "mlp.shared_experts.gate_weight": "model.layers.{n}.mlp.shared_expert_gate.weight",
}

QWEN_DEFAULTS = LLAMA_DEFAULTS | {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
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


def _qwen2(fields: ConfigJson) -> GPTConfig:
    return llama_like(fields, qkv_bias=True, window_size=_qwen_window(fields))


def _qwen3(fields: ConfigJson) -> GPTConfig:
    bias = fields.flag("attention_bias")
    return llama_like(
        fields, window_size=_qwen_window(fields), qkv_bias=bias, proj_bias=bias, qk_layernorm=True
    )


def _qwen2_moe(fields: ConfigJson) -> GPTConfig:
    return llama_like(
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
    return llama_like(
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


QWEN2 = Family(_qwen2, LLAMA_KEYS, QWEN_DEFAULTS, "model.")
QWEN3 = Family(_qwen3, LLAMA_KEYS, QWEN_DEFAULTS | {"head_dim": 128}, "model.")
QWEN2_MOE = Family(
    _qwen2_moe, QWEN2_MOE_KEYS, QWEN2_MOE_DEFAULTS, "model.", fused_experts=MOE_FUSED_EXPERTS
)
QWEN3_MOE = Family(
    _qwen3_moe, MOE_KEYS, QWEN3_MOE_DEFAULTS, "model.", fused_experts=MOE_FUSED_EXPERTS
)
