"""The model family Nemotron, without Mamba layers."""

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.family import Family
from gpt.formats.huggingface.families.llama import LLAMA_DEFAULTS, UNGATED_KEYS, llama_like

NEMOTRON_DEFAULTS = LLAMA_DEFAULTS | {
    "hidden_act": "relu2",
    "norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.5,
}


def _nemotron(fields: ConfigJson) -> GPTConfig:
    bias = fields.flag("attention_bias")
    return llama_like(
        fields,
        epsilon_key="norm_eps",
        percent_key="partial_rotary_factor",
        normalization="LayerNorm",
        layernorm_zero_centered_gamma=True,
        gated=False,
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


NEMOTRON = Family(_nemotron, UNGATED_KEYS, NEMOTRON_DEFAULTS, "model.")
