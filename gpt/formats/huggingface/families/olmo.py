"""OLMo 2 and OLMo 3: norms behind the linears, q/k norms over all heads."""

from collections.abc import Mapping
from typing import Any

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.family import Family, TensorKeys
from gpt.formats.huggingface.families.layer_fields import rotary_fields_by_type, window_fields
from gpt.formats.huggingface.families.llama import LLAMA_DEFAULTS, LLAMA_KEYS, llama_like

OLMO_KEYS: Mapping[str, TensorKeys] = {
    **{name: keys for name, keys in LLAMA_KEYS.items() if "layer_norm_weight" not in name},
    "self_attention.linear_proj.post_layernorm.weight": (
        "model.layers.{n}.post_attention_layernorm.weight"
    ),
    "mlp.linear_fc2.post_layernorm.weight": "model.layers.{n}.post_feedforward_layernorm.weight",
}
OLMO2_DEFAULTS = LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5}
OLMO3_DEFAULTS = OLMO2_DEFAULTS | {"rope_theta": 500000.0, "sliding_window": 4096}
# In OLMo 3, every fourth layer has full attention.
OLMO3_PATTERN = 4


def _olmo_like(fields: ConfigJson, **overrides: Any) -> GPTConfig:
    bias = fields.flag("attention_bias")
    return llama_like(
        fields,
        norm_placement="post",
        qkv_bias=bias,
        proj_bias=bias,
        qk_layernorm=True,
        qk_layernorm_scope="all_heads",
        **overrides,
    )


def _olmo3(fields: ConfigJson) -> GPTConfig:
    layers = range(fields.count("num_hidden_layers"))
    return _olmo_like(
        fields,
        rotary=rotary_fields_by_type(fields, sliding_theta_key="rope_theta"),
        **window_fields(fields, [(layer + 1) % OLMO3_PATTERN != 0 for layer in layers]),
    )


OLMO2 = Family(_olmo_like, OLMO_KEYS, OLMO2_DEFAULTS, "model.")
OLMO3 = Family(_olmo3, OLMO_KEYS, OLMO3_DEFAULTS, "model.")
