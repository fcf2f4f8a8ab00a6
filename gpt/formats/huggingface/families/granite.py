"""The model families Granite 3, dense and with experts: Llama with four factors."""

from collections.abc import Mapping
from typing import Any

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.family import Family, FusedExperts, TensorKeys
from gpt.formats.huggingface.families.llama import LLAMA_DEFAULTS, LLAMA_KEYS, llama_like
from gpt.formats.huggingface.families.mixtral import MIXTRAL_FUSED_EXPERTS, MIXTRAL_KEYS

GRANITEMOE_KEYS: Mapping[str, TensorKeys] = {
    **MIXTRAL_KEYS,
    "mlp.router.weight": "model.layers.{n}.block_sparse_moe.router.layer.weight",
}
# The keys in files, then those in memory, in transformers 5.
GRANITEMOE_FUSED_EXPERTS: Mapping[str, FusedExperts] = {
    "input_linear.weight": MIXTRAL_FUSED_EXPERTS["experts.gate_up_proj"],
    "output_linear.weight": MIXTRAL_FUSED_EXPERTS["experts.down_proj"],
    **MIXTRAL_FUSED_EXPERTS,
}
GRANITE_DEFAULTS = LLAMA_DEFAULTS | {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
GRANITEMOE_DEFAULTS = GRANITE_DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2}


def _granite(fields: ConfigJson) -> GPTConfig:
    bias = fields.flag("attention_bias")
    return llama_like(
        fields,
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        **_factors(fields),
    )


def _granitemoe(fields: ConfigJson) -> GPTConfig:
    bias = fields.flag("attention_bias")
    return llama_like(
        fields,
        qkv_bias=bias,
        proj_bias=bias,
        num_experts=fields.count("num_local_experts"),
        moe_layers=(True,) * fields.count("num_hidden_layers"),
        moe_router_topk=fields.integer("num_experts_per_tok"),
        **_factors(fields),
    )


def _factors(fields: ConfigJson) -> dict[str, Any]:
    """Return GPTConfig's fields of the four factors."""
    scale = fields.number("attention_multiplier")
    if scale <= 0:
        raise fields.invalid_field_error("attention_multiplier", scale, "a number above 0")
    return {
        "embedding_multiplier": fields.number("embedding_multiplier"),
        "embedding_multiplier_scope": "all",
        "softmax_scale": scale,  # In place of 1 / sqrt(width of a head), also if it is 1.
        "residual_multiplier": fields.number("residual_multiplier"),
        "logits_scaling": fields.number("logits_scaling"),
    }


GRANITE = Family(_granite, LLAMA_KEYS, GRANITE_DEFAULTS, "model.")
GRANITEMOE = Family(
    _granitemoe,
    GRANITEMOE_KEYS,
    GRANITEMOE_DEFAULTS,
    "model.",
    key_renames={".router.weight": ".router.layer.weight"},
    fused_experts=GRANITEMOE_FUSED_EXPERTS,
    writes_fused_experts=True,
)
