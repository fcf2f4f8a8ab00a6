"""GPT-OSS: windows in every other layer, attention sinks, and experts with a clamped SwiGLU."""

from collections.abc import Mapping
from typing import Any

from gpt.config import QUICK_GELU_FACTOR, GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.expert_keys import MOE_KEYS
from gpt.formats.huggingface.families.family import Family, FusedExperts, TensorKeys
from gpt.formats.huggingface.families.layer_fields import window_fields
from gpt.formats.huggingface.families.llama import LLAMA_DEFAULTS, llama_like

_EXPERT_PREFIX = "model.layers.{n}.mlp.experts.{expert}."
GPT_OSS_KEYS: Mapping[str, TensorKeys] = {
    **MOE_KEYS,
    "self_attention.core_attention.softmax_offset": "model.layers.{n}.self_attn.sinks",
    "mlp.router.weight": "model.layers.{n}.mlp.router.weight",
    "mlp.router.bias": "model.layers.{n}.mlp.router.bias",
    "mlp.experts.local_experts.{expert}.linear_fc1.bias": (
        f"{_EXPERT_PREFIX}gate_proj.bias",
        f"{_EXPERT_PREFIX}up_proj.bias",
    ),
    "mlp.experts.local_experts.{expert}.linear_fc2.bias": f"{_EXPERT_PREFIX}down_proj.bias",
}
# The matrices are stored as (in, out), and the columns of gate and up alternate.
GPT_OSS_FUSED_EXPERTS = {
    f"experts.{name}_proj{suffix}": FusedExperts(
        tuple(f"experts.{{expert}}.{part}_proj.{leaf}" for part in name.split("_")),
        transposed=True,
        interleaved=True,
    )
    for name in ("gate_up", "down")
    for suffix, leaf in (("_bias", "bias"), ("", "weight"))
}
GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS_DEFAULTS = LLAMA_DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": QUICK_GELU_FACTOR,
    "swiglu_limit": 7.0,
}


def _gpt_oss(fields: ConfigJson) -> GPTConfig:
    fields.require("hidden_act", "silu")  # Its clamped form, with the factor `swiglu_alpha`.
    fields.require("swiglu_alpha", QUICK_GELU_FACTOR)
    bias, layers = fields.flag("attention_bias"), fields.count("num_hidden_layers")
    if not (fields.record.get("rope_parameters") or fields.record.get("rope_scaling")):
        fields = ConfigJson({**fields.record, "rope_scaling": GPT_OSS_ROPE}, fields.path)
    return llama_like(
        fields,
        activation="quick_gelu",
        activation_func_clamp_value=fields.number("swiglu_limit"),
        glu_linear_offset=1.0,
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=True,
        attention_sinks=True,
        num_experts=fields.count(
            "num_experts" if "num_experts" in fields.record else "num_local_experts"
        ),
        moe_layers=(True,) * layers,
        moe_router_topk=fields.integer("num_experts_per_tok"),
        moe_router_bias=True,
        **window_fields(fields, [layer % 2 == 0 for layer in range(layers)]),
    )


GPT_OSS = Family(
    _gpt_oss,
    GPT_OSS_KEYS,
    GPT_OSS_DEFAULTS,
    "model.",
    fused_experts=GPT_OSS_FUSED_EXPERTS,
    writes_fused_experts=True,
)
