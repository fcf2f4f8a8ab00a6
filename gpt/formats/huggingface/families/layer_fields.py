"""Fields of config.json that differ between layers: attention windows and rotary embeddings."""

from collections.abc import Sequence
from typing import Any

from gpt.config import RopeConfig
from gpt.formats.huggingface.families.config_json import ConfigJson, rotary_fields

# The keys of `rope_parameters` in files with one mapping for each attention type.
FULL, SLIDING = "full_attention", "sliding_attention"


def window_fields(fields: ConfigJson, default_sliding_layers: Sequence[bool]) -> dict[str, Any]:
    """Return GPTConfig's fields of attention windows.

    `layer_types` says which layers have sliding attention; `default_sliding_layers` is the
    family's rule for files without it.
    """
    types = fields.layer_types()
    sliding_layers = tuple(default_sliding_layers)
    if types is not None:
        layers = fields.count("num_hidden_layers")
        if len(types) != layers:
            raise fields.invalid_field_error("layer_types", types, f"a list of {layers} names")
        sliding_layers = tuple(kind == SLIDING for kind in types)
    if not any(sliding_layers):
        return {}
    window = fields.integer("sliding_window")
    return {"window_size": window, "window_layers": sliding_layers}


def rotary_fields_by_type(
    fields: ConfigJson, *, sliding_theta_key: str, percent_key: str | None = None
) -> dict[str, Any]:
    """Return GPTConfig's RoPE fields of a family whose sliding layers have their own RoPE.

    Files of transformers 5 have one mapping in `rope_parameters` for each attention type. In files
    of transformers 4, `rope_scaling` applies to the layers with full attention only, and the
    sliding layers have the base in `sliding_theta_key`.
    """
    rope_parameters = fields.record.get("rope_parameters")
    if isinstance(rope_parameters, dict) and {FULL, SLIDING} & rope_parameters.keys():
        records = [{"rope_parameters": rope_parameters.get(kind)} for kind in (FULL, SLIDING)]
        for kind, record in zip((FULL, SLIDING), records, strict=True):
            if not isinstance(record["rope_parameters"], dict | None):
                raise fields.invalid_field_error("rope_parameters", rope_parameters, "mappings")
            if record["rope_parameters"] is None and kind == SLIDING:
                record["rope_parameters"] = {"rope_theta": fields.number(sliding_theta_key)}
    else:
        sliding_rope = {"rope_theta": fields.number(sliding_theta_key), "rope_type": "default"}
        records = [{}, {"rope_parameters": sliding_rope}]
    full, sliding = (
        rotary_fields(
            ConfigJson({**fields.record, "rope_scaling": None, **record}, fields.path)
            if record
            else fields,
            percent_key=percent_key,
        )
        for record in records
    )
    window_rope = RopeConfig(
        base=sliding["rotary_base"],
        percent=sliding.get("rotary_percent", 1.0),
        scaling=sliding.get("rope_scaling"),
    )
    return {**full, "window_rope": window_rope}
