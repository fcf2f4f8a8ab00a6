"""The model family Mixtral."""

from collections.abc import Mapping

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson, refuse_mixed_attention
from gpt.formats.huggingface.families.family import Family, FusedExperts, TensorKeys
from gpt.formats.huggingface.families.llama import LLAMA_KEYS, MISTRAL_DEFAULTS, llama_like

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
    "experts.gate_up_proj": FusedExperts(
        ("experts.{expert}.w1.weight", "experts.{expert}.w3.weight")
    ),
    "experts.down_proj": FusedExperts(("experts.{expert}.w2.weight",)),
}

MIXTRAL_DEFAULTS = MISTRAL_DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def _mixtral(fields: ConfigJson) -> GPTConfig:
    refuse_mixed_attention(fields)
    # transformers computes a softmax over all experts and renormalizes the top k. This equals a
    # softmax over the top k, which is GPTConfig's default.
    return llama_like(
        fields,
        window_size=fields.integer("sliding_window", 0) or None,
        num_experts=fields.count("num_local_experts"),
        moe_layers=(True,) * fields.count("num_hidden_layers"),
        moe_router_topk=fields.integer("num_experts_per_tok"),
    )


MIXTRAL = Family(
    _mixtral,
    MIXTRAL_KEYS,
    MIXTRAL_DEFAULTS,
    "model.",
    key_renames={".mlp.": ".block_sparse_moe."},
    fused_experts=MIXTRAL_FUSED_EXPERTS,
)
