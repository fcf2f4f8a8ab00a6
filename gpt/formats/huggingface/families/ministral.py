"""The model family Ministral 3: Mistral with position-dependent query scaling."""

from typing import Any

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson, refuse_mixed_attention
from gpt.formats.huggingface.families.family import Family
from gpt.formats.huggingface.families.llama import LLAMA_KEYS, MISTRAL_DEFAULTS, llama_like

MINISTRAL3_DEFAULTS = MISTRAL_DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "head_dim": 128,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _ministral3(fields: ConfigJson) -> GPTConfig:
    refuse_mixed_attention(fields)
    if not (fields.record.get("rope_parameters") or fields.record.get("rope_scaling")):
        fields = ConfigJson({**fields.record, "rope_scaling": MINISTRAL3_ROPE}, fields.path)
    return llama_like(
        fields, window_size=fields.integer("sliding_window", 0) or None, **_query_scaling(fields)
    )


def _query_scaling(fields: ConfigJson) -> dict[str, Any]:
    """Return GPTConfig's fields of the factors of the queries."""
    section = "rope_parameters" if fields.record.get("rope_parameters") else "rope_scaling"
    rope = fields.record[section]
    if not isinstance(rope, dict):
        raise fields.invalid_field_error(section, rope, "a mapping")
    rope_fields = ConfigJson(rope, fields.path, f"{section}.")
    beta = rope_fields.number("llama_4_scaling_beta")
    if beta < 0:
        raise rope_fields.invalid_field_error(
            "llama_4_scaling_beta", beta, "a number of at least 0"
        )
    return {
        "query_scaling_beta": beta,
        "query_scaling_length": rope_fields.integer(
            "original_max_position_embeddings", fields.integer("max_position_embeddings")
        ),
    }


MINISTRAL3 = Family(_ministral3, LLAMA_KEYS, MINISTRAL3_DEFAULTS, "model.")
