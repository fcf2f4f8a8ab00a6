"""The model family Apertus: Llama with an ungated MLP and the learned activation xIELU."""

from collections.abc import Mapping

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.family import Family, ScalarKey, TensorKeys
from gpt.formats.huggingface.families.llama import LLAMA_DEFAULTS, LLAMA_KEYS, llama_like

APERTUS_KEYS: Mapping[str, TensorKeys] = {
    **LLAMA_KEYS,
    "self_attention.linear_qkv.layer_norm_weight": "model.layers.{n}.attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "model.layers.{n}.feedforward_layernorm.weight",
    "mlp.linear_fc1.weight": "model.layers.{n}.mlp.up_proj.weight",
    "mlp.activation_func.alpha_p": "model.layers.{n}.mlp.act_fn.alpha_p",
    "mlp.activation_func.alpha_n": "model.layers.{n}.mlp.act_fn.alpha_n",
    "mlp.activation_func.beta": ScalarKey("model.layers.{n}.mlp.act_fn.beta"),
    "mlp.activation_func.eps": ScalarKey("model.layers.{n}.mlp.act_fn.eps"),
}
APERTUS_DEFAULTS = LLAMA_DEFAULTS | {
    "hidden_act": "xielu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 65536,
    "rope_theta": 12000000.0,
}
APERTUS_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _apertus(fields: ConfigJson) -> GPTConfig:
    bias = fields.flag("attention_bias")
    if not (fields.record.get("rope_parameters") or fields.record.get("rope_scaling")):
        fields = ConfigJson({**fields.record, "rope_scaling": APERTUS_ROPE}, fields.path)
    has_xielu = fields.record.get("hidden_act") == "xielu"
    return llama_like(
        fields,
        activation="xielu" if has_xielu else fields.activation("hidden_act"),
        gated=False,
        qkv_bias=bias,
        proj_bias=bias,
        qk_layernorm=True,
    )


APERTUS = Family(_apertus, APERTUS_KEYS, APERTUS_DEFAULTS, "model.")
