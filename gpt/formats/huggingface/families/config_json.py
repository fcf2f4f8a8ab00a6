"""Hugging Face config.json: typed access to fields in transformers 4 and 5 spellings.

A value comes from config.json, or, for an absent key, from the defaults of the family's
configuration class. A value is refused if Preamble would not compute the same as transformers.
`families.py` defines the fields of each family; this module only reads and checks values.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt.config import Activation, RopeScaling, yarn_attention_factor
from gpt.errors import CheckpointError

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
}

ATTENTION_TYPES = {"full_attention", "sliding_attention"}

# The keys of config.json that may set a field of GPTConfig, for error messages.
GPT_FIELD_KEYS: Mapping[str, Sequence[str]] = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "rotary_base": ("rope_theta", "rotary_emb_base"),
    "rotary_percent": ("partial_rotary_factor", "rotary_pct"),
    "layernorm_epsilon": (
        "rms_norm_eps",
        "layer_norm_epsilon",
        "layer_norm_eps",
        "norm_epsilon",
        "norm_eps",
    ),
    "window_size": ("sliding_window",),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
    "moe_router_topk": ("num_experts_per_tok",),
    "hidden_dropout": ("resid_pdrop", "hidden_dropout", "residual_dropout"),
    "attention_dropout": ("attn_pdrop", "attention_dropout"),
}

# Exclusive limit of a size. It is above the sizes of all models, and keeps products of sizes small.
INTEGER_MAX = 1 << 31
# Exclusive limit of the numbers of layers and experts. It limits the parameter table, which has
# entries for each layer and expert.
COUNT_MAX = 1 << 16


class ConfigJson:
    """Checked access to the values of config.json, merged with the family's defaults."""

    def __init__(self, record: Mapping[str, Any], path: Path, section: str = "") -> None:
        """`section` is added to the keys in messages if `record` is a mapping inside the file."""
        self.record = record
        self.path = path
        self.section = section

    def integer(self, key: str, default: int | None = None, below: int = INTEGER_MAX) -> int:
        """Return a whole number from 0 to `below` - 1.

        If the key is absent or null, `default` is returned; without a `default`, an error is
        raised.
        """
        value = self.record.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 <= value < below:
            raise self.invalid_field_error(key, value, f"a whole number from 0 to {below - 1}")
        return value

    def count(self, key: str) -> int:
        """Return a number of layers or experts."""
        return self.integer(key, below=COUNT_MAX)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.record.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.invalid_field_error(key, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        # Python's JSON parser accepts NaN and Infinity.
        if not math.isfinite(number):
            raise self.invalid_field_error(key, value, "a finite number")
        return number

    def check_end_ids(self) -> None:
        """Refuse end-of-text ids that are no token ids.

        Ids above the vocabulary are accepted: small models that were trained from scratch often
        have the id of a large one, which their vocabulary does not contain.
        """
        value = self.record.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None and not (type(token_id) is int and 0 <= token_id < INTEGER_MAX):
                raise self.invalid_field_error(
                    "eos_token_id", value, "a token id of at least 0, a list of token ids, or null"
                )

    def name_key(self, message: str) -> str:
        """Add the file's key to an error message that begins with a field of GPTConfig."""
        name = message.partition(" ")[0]
        keys = [key for key in GPT_FIELD_KEYS.get(name, ()) if key in self.record and key != name]
        return f"{message} ({name} is {keys[0]} in this file)" if keys else message

    def flag(self, key: str) -> bool:
        value = self.record.get(key)
        if not isinstance(value, bool):
            raise self.invalid_field_error(key, value, "true or false")
        return value

    def activation(self, key: str) -> Activation:
        name = str(self.record.get(key))
        if name not in ACTIVATIONS:
            raise self.invalid_field_error(key, name, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def layer_types(self) -> list[str] | None:
        """Return the attention type of each layer; None if the file does not have layer_types."""
        value = self.record.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(kind, str) for kind in value):
            raise self.invalid_field_error("layer_types", value, "a list of names")
        return value

    def layer_numbers(self, key: str) -> list[int]:
        """Return a list of layer numbers; an absent or null list is empty."""
        value = self.record.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            raise self.invalid_field_error(key, value, "a list of layer numbers")
        return value

    def numbers(self, key: str) -> list[float]:
        """Return a list of numbers."""
        value = self.record.get(key)
        if not isinstance(value, list):
            raise self.invalid_field_error(key, value, "a list of numbers")
        entries = {f"{key}[{index}]": entry for index, entry in enumerate(value)}
        numbers = ConfigJson(entries, self.path, self.section)
        return [numbers.number(name) for name in entries]

    def require(self, key: str, *allowed: object) -> None:
        """Refuse a value that is not in `allowed`; an absent or null field is accepted."""
        value = self.record.get(key)
        if value is not None and value not in allowed:
            raise CheckpointError(
                f"{self.path}: {self.section}{key} is {json.dumps(value)[:60]}, which Preamble "
                f"does not support; it must be {json.dumps(allowed[0])}"
            )

    def invalid_field_error(self, key: str, value: object, expected: str) -> CheckpointError:
        actual = "is absent" if key not in self.record else f"is {json.dumps(value)[:60]}"
        return CheckpointError(
            f"{self.path}: {self.section}{key} {actual}; it must be {expected}: fetch the file "
            "again or correct it"
        )


def refuse_unknown_layer_types(fields: ConfigJson) -> None:
    """Refuse words in `layer_types` that no supported family has, whatever the family reads."""
    unknown = sorted(set(fields.layer_types() or ()) - ATTENTION_TYPES)
    if unknown:
        raise CheckpointError(
            f"{fields.path}: layer_types has {unknown[0][:60]!r}, which Preamble does not support; "
            f"it must have only {' and '.join(sorted(ATTENTION_TYPES))}: give another model"
        )


def refuse_mixed_attention(fields: ConfigJson) -> None:
    """Refuse layers of several attention types."""
    attention_types = set(fields.layer_types() or ())
    if len(attention_types) > 1:
        raise CheckpointError(
            f"{fields.path}: layer_types mixes {', '.join(sorted(attention_types))}, which "
            "Preamble does not support; all layers must have full_attention, or all must have "
            "sliding_attention"
        )


def rotary_fields(
    fields: ConfigJson, theta_key: str = "rope_theta", percent_key: str | None = None
) -> dict[str, Any]:
    """Return GPTConfig's RoPE fields.

    Files of transformers 5 have the values in rope_parameters. Files of transformers 4 have
    rope_scaling, and the top-level keys `theta_key` and `percent_key`. A family without a
    `percent_key` rotates all channels of a head.
    """
    section = "rope_parameters" if fields.record.get("rope_parameters") else "rope_scaling"
    rope = fields.record.get(section) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(
            f"{fields.path}: rope_parameters (or rope_scaling) is not one mapping for all layers, "
            "but all layers of this family must have the same RoPE parameters; give another model"
        )
    legacy_fields = {"rope_theta": fields.number(theta_key)}
    if percent_key is not None:
        legacy_fields["partial_rotary_factor"] = fields.number(percent_key)
    rope_fields = ConfigJson(legacy_fields | rope, fields.path, f"{section}.")
    gpt_fields: dict[str, Any] = {"rotary_base": rope_fields.number("rope_theta")}
    if percent_key is None:
        fields.require("partial_rotary_factor", 1.0)
        rope_fields.require("partial_rotary_factor", 1.0)
    else:
        gpt_fields["rotary_percent"] = rope_fields.number("partial_rotary_factor")
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        gpt_fields["rope_scaling"] = _rope_scaling(fields, rope_fields, rope_type)
    return gpt_fields


def _yarn_scaling(fields: ConfigJson, rope: ConfigJson) -> RopeScaling:
    original = rope.integer(
        "original_max_position_embeddings", fields.integer("max_position_embeddings")
    )
    factor = rope.number("factor")

    # As in transformers, 0 means that the key is absent.
    default_factor = yarn_attention_factor(
        factor, rope.number("mscale", 0.0) or None, rope.number("mscale_all_dim", 0.0) or None
    )
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 0.0) or 32.0,
        beta_slow=rope.number("beta_slow", 0.0) or 1.0,
        truncate=rope.flag("truncate") if rope.record.get("truncate") is not None else True,
        attention_factor=rope.number("attention_factor", default_factor),
    )


def _rope_scaling(fields: ConfigJson, rope: ConfigJson, rope_type: object) -> RopeScaling:
    if rope_type == "linear":
        return RopeScaling("linear", rope.number("factor"))
    if rope_type == "llama3":
        # As in transformers, the first of these values that is present:
        # original_max_position_embeddings of the top level, the same key of the RoPE section,
        # max_position_embeddings.
        original = fields.integer(
            "original_max_position_embeddings",
            rope.integer(
                "original_max_position_embeddings", fields.integer("max_position_embeddings")
            ),
        )
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return RopeScaling("llama3", rope.number("factor"), low, high, original)
    if rope_type == "yarn":
        return _yarn_scaling(fields, rope)
    raise CheckpointError(
        f"{fields.path}: rope type {rope_type!r} is not supported; it must be one of default, "
        f"linear, llama3, yarn ({rope.section}rope_type)"
    )
