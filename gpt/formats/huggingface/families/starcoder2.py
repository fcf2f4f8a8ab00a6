"""The model family StarCoder2."""

from collections.abc import Mapping

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson, refuse_mixed_attention
from gpt.formats.huggingface.families.family import Family, TensorKeys
from gpt.formats.huggingface.families.llama import LLAMA_DEFAULTS, UNGATED_KEYS, llama_like

STARCODER2_KEYS: Mapping[str, TensorKeys] = {
    **UNGATED_KEYS,
    "mlp.linear_fc1.weight": "model.layers.{n}.mlp.c_fc.weight",
    "mlp.linear_fc1.bias": "model.layers.{n}.mlp.c_fc.bias",
    "mlp.linear_fc2.weight": "model.layers.{n}.mlp.c_proj.weight",
    "mlp.linear_fc2.bias": "model.layers.{n}.mlp.c_proj.bias",
}

STARCODER2_DEFAULTS = LLAMA_DEFAULTS | {
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "residual_dropout": 0.0,
    "use_bias": True,
}


def _starcoder2(fields: ConfigJson) -> GPTConfig:
    bias = fields.flag("use_bias")
    refuse_mixed_attention(fields)
    return llama_like(
        fields,
        epsilon_key="norm_epsilon",
        normalization="LayerNorm",
        gated=False,
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=bias,
        window_size=fields.integer("sliding_window", 0) or None,
        hidden_dropout=fields.number("residual_dropout"),
    )


STARCODER2 = Family(_starcoder2, STARCODER2_KEYS, STARCODER2_DEFAULTS, "model.")
