"""SmolLM3: Llama without rotary embedding in some layers."""

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.family import Family
from gpt.formats.huggingface.families.layer_fields import window_fields
from gpt.formats.huggingface.families.llama import LLAMA_DEFAULTS, LLAMA_KEYS, llama_like

SMOLLM3_DEFAULTS = LLAMA_DEFAULTS | {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "no_rope_layer_interval": 4,
}


def _smollm3(fields: ConfigJson) -> GPTConfig:
    bias = fields.flag("attention_bias")
    rope_layers = _rope_layers(fields)
    has_window = fields.flag("use_sliding_window") and fields.integer("sliding_window", 0) > 0
    windows = window_fields(fields, [has_window and not has_rope for has_rope in rope_layers])
    return llama_like(
        fields,
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        rope_layers=tuple(rope_layers),
        **windows,
    )


def _rope_layers(fields: ConfigJson) -> list[bool]:
    """Return for each layer whether it has a rotary embedding.

    In spite of its name, `no_rope_layers` has 1 for the layers with a rotary embedding.
    """
    layers = fields.count("num_hidden_layers")
    listed = fields.layer_numbers("no_rope_layers")
    if listed:
        if len(listed) != layers or set(listed) - {0, 1}:
            raise fields.invalid_field_error("no_rope_layers", listed, f"{layers} zeros and ones")
        return [bool(number) for number in listed]
    interval = fields.count("no_rope_layer_interval")
    if interval < 1:
        raise fields.invalid_field_error(
            "no_rope_layer_interval", interval, "a whole number of at least 1"
        )
    return [(layer + 1) % interval != 0 for layer in range(layers)]


SMOLLM3 = Family(_smollm3, LLAMA_KEYS, SMOLLM3_DEFAULTS, "model.")
