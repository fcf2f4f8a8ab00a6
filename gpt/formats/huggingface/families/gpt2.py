"""The model family GPT-2."""

from collections.abc import Mapping

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.family import Family, FusedQKV, TensorKeys

GPT2_KEYS: Mapping[str, TensorKeys] = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "self_attention.linear_qkv.layer_norm_weight": "transformer.h.{n}.ln_1.weight",
    "self_attention.linear_qkv.layer_norm_bias": "transformer.h.{n}.ln_1.bias",
    "self_attention.linear_qkv.weight": FusedQKV("transformer.h.{n}.attn.c_attn.weight"),
    "self_attention.linear_qkv.bias": FusedQKV("transformer.h.{n}.attn.c_attn.bias"),
    "self_attention.linear_proj.weight": "transformer.h.{n}.attn.c_proj.weight",
    "self_attention.linear_proj.bias": "transformer.h.{n}.attn.c_proj.bias",
    "mlp.linear_fc1.layer_norm_weight": "transformer.h.{n}.ln_2.weight",
    "mlp.linear_fc1.layer_norm_bias": "transformer.h.{n}.ln_2.bias",
    "mlp.linear_fc1.weight": "transformer.h.{n}.mlp.c_fc.weight",
    "mlp.linear_fc1.bias": "transformer.h.{n}.mlp.c_fc.bias",
    "mlp.linear_fc2.weight": "transformer.h.{n}.mlp.c_proj.weight",
    "mlp.linear_fc2.bias": "transformer.h.{n}.mlp.c_proj.bias",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
    "output_layer.weight": "lm_head.weight",
}

# Defaults of each family's configuration class in transformers, for keys absent in config.json.
GPT2_DEFAULTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_positions": 1024,
    "tie_word_embeddings": True,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
}


def _gpt2(fields: ConfigJson) -> GPTConfig:
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("scale_attn_weights", True)
    fields.require("add_cross_attention", False)
    return GPTConfig(
        num_layers=fields.count("n_layer"),
        hidden_size=fields.integer("n_embd"),
        num_attention_heads=fields.integer("n_head"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("n_positions"),
        ffn_hidden_size=fields.integer("n_inner", 0),
        layernorm_epsilon=fields.number("layer_norm_epsilon"),
        activation=fields.activation("activation_function"),
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings"),
        hidden_dropout=fields.number("resid_pdrop"),
        attention_dropout=fields.number("attn_pdrop"),
    )


GPT2 = Family(_gpt2, GPT2_KEYS, GPT2_DEFAULTS, "transformer.", conv1d=True)
