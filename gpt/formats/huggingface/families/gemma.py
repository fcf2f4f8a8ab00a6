"""The model family Gemma 3: text models."""

from collections.abc import Mapping

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.family import Family, TensorKeys
from gpt.formats.huggingface.families.layer_fields import rotary_fields_by_type, window_fields
from gpt.formats.huggingface.families.llama import LLAMA_DEFAULTS, LLAMA_KEYS, llama_like

GEMMA3_KEYS: Mapping[str, TensorKeys] = {
    **LLAMA_KEYS,
    "self_attention.linear_proj.post_layernorm.weight": (
        "model.layers.{n}.post_attention_layernorm.weight"
    ),
    "mlp.linear_fc1.layer_norm_weight": "model.layers.{n}.pre_feedforward_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.weight": "model.layers.{n}.post_feedforward_layernorm.weight",
}
GEMMA3_DEFAULTS = LLAMA_DEFAULTS | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}


def _gemma3(fields: ConfigJson) -> GPTConfig:
    fields.require("attn_logit_softcapping", None)
    fields.require("final_logit_softcapping", None)
    fields.require("use_bidirectional_attention", False)
    bias, pattern = fields.flag("attention_bias"), fields.count("sliding_window_pattern")
    if pattern < 1:
        raise fields.invalid_field_error(
            "sliding_window_pattern", pattern, "a whole number of at least 1"
        )
    layers = range(fields.count("num_hidden_layers"))
    scale = fields.number("query_pre_attn_scalar")
    if scale <= 0:
        raise fields.invalid_field_error("query_pre_attn_scalar", scale, "a number above 0")
    return llama_like(
        fields,
        activation_key="hidden_activation",
        rotary=rotary_fields_by_type(fields, sliding_theta_key="rope_local_base_freq"),
        layernorm_zero_centered_gamma=True,
        norm_placement="pre_and_post",
        qkv_bias=bias,
        proj_bias=bias,
        qk_layernorm=True,
        softmax_scale=scale**-0.5,
        # transformers rounds the factor to the dtype of the embedding, as gpt/model/embedding.py.
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        **window_fields(fields, [(layer + 1) % pattern != 0 for layer in layers]),
    )


GEMMA3_TEXT = Family(_gemma3, GEMMA3_KEYS, GEMMA3_DEFAULTS, "model.")
