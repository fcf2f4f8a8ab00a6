"""The model family GLM-4.5 to GLM-4.7."""

from collections.abc import Mapping

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.expert_keys import MOE_FUSED_EXPERTS, MOE_KEYS
from gpt.formats.huggingface.families.family import Family, TensorKeys
from gpt.formats.huggingface.families.llama import LLAMA_DEFAULTS, llama_like

GLM4_MOE_KEYS: Mapping[str, TensorKeys] = {
    **MOE_KEYS,
    "mlp.router.expert_bias": "model.layers.{n}.mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.linear_fc1.weight": (
        "model.layers.{n}.mlp.shared_experts.gate_proj.weight",
        "model.layers.{n}.mlp.shared_experts.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": "model.layers.{n}.mlp.shared_experts.down_proj.weight",
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


def _glm4_moe(fields: ConfigJson) -> GPTConfig:
    top_k = fields.integer("num_experts_per_tok")
    layers, dense_layers = fields.count("num_hidden_layers"), fields.count("first_k_dense_replace")
    # GPTConfig has no groups of experts, and normalizes sigmoid scores if more than one is chosen.
    fields.require("n_group", 1)
    fields.require("topk_group", 1)
    fields.require("norm_topk_prob", top_k > 1)
    expert_width = fields.integer("moe_intermediate_size")
    return llama_like(
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


GLM4_MOE = Family(
    _glm4_moe,
    GLM4_MOE_KEYS,
    GLM4_MOE_DEFAULTS,
    "model.",
    fused_experts=MOE_FUSED_EXPERTS,
    mtp_layer_keys=("num_nextn_predict_layers", "num_mtp_layers"),
)
