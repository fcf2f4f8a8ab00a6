"""MiniMax M2: experts in all layers, q/k norms over all heads, partial rotary embedding."""

from collections.abc import Mapping

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson, rotary_fields
from gpt.formats.huggingface.families.family import Family, TensorKeys
from gpt.formats.huggingface.families.llama import LLAMA_DEFAULTS, llama_like
from gpt.formats.huggingface.families.mixtral import MIXTRAL_FUSED_EXPERTS, MIXTRAL_KEYS

MINIMAX_M2_KEYS: Mapping[str, TensorKeys] = {
    **MIXTRAL_KEYS,
    "mlp.router.expert_bias": "model.layers.{n}.block_sparse_moe.e_score_correction_bias",
}
MINIMAX_M2_DEFAULTS = LLAMA_DEFAULTS | {
    "max_position_embeddings": 196608,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 5000000.0,
    "partial_rotary_factor": 1.0,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}


def _minimax_m2(fields: ConfigJson) -> GPTConfig:
    top_k = fields.integer("num_experts_per_tok")
    if top_k < 2:
        # GPTConfig's weight of a single expert is its score, but this family's is 1.
        raise fields.invalid_field_error("num_experts_per_tok", top_k, "at least 2")
    rotary_dim = fields.integer("rotary_dim", 0)
    if rotary_dim:  # Files of transformers 4 have the number of rotated channels.
        share = rotary_dim / max(1, fields.integer("head_dim"))
        fields = ConfigJson({**fields.record, "partial_rotary_factor": share}, fields.path)
    return llama_like(
        fields,
        rotary=rotary_fields(fields, percent_key="partial_rotary_factor"),
        qk_layernorm=True,
        qk_layernorm_scope="all_heads",
        num_experts=fields.count("num_local_experts"),
        moe_layers=(True,) * fields.count("num_hidden_layers"),
        moe_router_topk=top_k,
        moe_router_score_function="sigmoid",
        moe_router_expert_bias=True,
    )


MINIMAX_M2 = Family(
    _minimax_m2,
    MINIMAX_M2_KEYS,
    MINIMAX_M2_DEFAULTS,
    "model.",
    key_renames={".mlp.": ".block_sparse_moe."},
    fused_experts=MIXTRAL_FUSED_EXPERTS,
)
