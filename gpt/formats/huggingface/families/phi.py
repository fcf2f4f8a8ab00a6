"""The model families Phi-3, Phi-3.5 and Phi-4."""

import math
from collections.abc import Mapping
from typing import Any

from gpt.config import GPTConfig, RopeScaling
from gpt.errors import CheckpointError
from gpt.formats.huggingface.families.config_json import ConfigJson, rotary_fields
from gpt.formats.huggingface.families.family import Family, FusedQKV, TensorKeys
from gpt.formats.huggingface.families.llama import LLAMA_DEFAULTS, LLAMA_KEYS, llama_like

PHI3_KEYS: Mapping[str, TensorKeys] = {
    **LLAMA_KEYS,
    "self_attention.linear_qkv.weight": FusedQKV("model.layers.{n}.self_attn.qkv_proj.weight"),
    "mlp.linear_fc1.weight": "model.layers.{n}.mlp.gate_up_proj.weight",
}
PHI3_DEFAULTS = LLAMA_DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 1.0,
    "resid_pdrop": 0.0,
}
# Names of LongRoPE. The first models call it "su", and some of its files "yarn".
LONGROPE_TYPES = ("longrope", "su", "yarn")


def _phi3(fields: ConfigJson) -> GPTConfig:
    section = "rope_parameters" if fields.record.get("rope_parameters") else "rope_scaling"
    rope = fields.record.get(section)
    rotary: dict[str, Any] | None = None
    if isinstance(rope, dict):
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        if rope_type in LONGROPE_TYPES:
            rotary = _longrope_fields(fields, section, rope)
        elif rope_type != "default":
            raise CheckpointError(
                f"{fields.path}: rope type {str(rope_type)[:60]!r} is not supported in Phi-3; it "
                f"must be default or longrope ({section}.rope_type)"
            )
    return llama_like(
        fields,
        percent_key="partial_rotary_factor",
        rotary=rotary,
        window_size=fields.integer("sliding_window", 0) or None,
        hidden_dropout=fields.number("resid_pdrop"),
    )


def _longrope_fields(fields: ConfigJson, section: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return GPTConfig's RoPE fields, with the factors for short and for long contexts."""
    plain_rope = {key: value for key, value in rope.items() if key not in ("rope_type", "type")}
    plain_fields = ConfigJson({**fields.record, section: plain_rope}, fields.path)
    gpt_fields = rotary_fields(plain_fields, percent_key="partial_rotary_factor")
    longest = fields.integer("max_position_embeddings")
    rope_fields = ConfigJson(rope, fields.path, f"{section}.")
    # As in transformers, the key of the top level counts, and the same key of the section does not.
    original = fields.integer("original_max_position_embeddings")
    if original < 2:
        raise fields.invalid_field_error(
            "original_max_position_embeddings", original, "a whole number of at least 2"
        )
    scale = rope_fields.number("factor", longest / original)
    default_factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    gpt_fields["rope_scaling"] = RopeScaling(
        "longrope",
        1.0,
        original_max_position_embeddings=original,
        attention_factor=rope_fields.number("attention_factor", default_factor),
        frequency_factors=tuple(rope_fields.numbers("short_factor")),
        long_frequency_factors=tuple(rope_fields.numbers("long_factor")),
    )
    return gpt_fields


PHI3 = Family(_phi3, PHI3_KEYS, PHI3_DEFAULTS, "model.")
