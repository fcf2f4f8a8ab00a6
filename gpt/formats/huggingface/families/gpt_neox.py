"""The model family GPT-NeoX, with Pythia."""

from collections.abc import Mapping

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.family import Family, TensorKeys
from gpt.formats.huggingface.families.llama import llama_like

GPT_NEOX_KEYS: Mapping[str, TensorKeys] = {
    "embedding.word_embeddings.weight": "gpt_neox.embed_in.weight",
    "self_attention.linear_qkv.layer_norm_weight": "gpt_neox.layers.{n}.input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "gpt_neox.layers.{n}.input_layernorm.bias",
    # The rows are already grouped by head: the query, key and value of each head.
    "self_attention.linear_qkv.weight": "gpt_neox.layers.{n}.attention.query_key_value.weight",
    "self_attention.linear_qkv.bias": "gpt_neox.layers.{n}.attention.query_key_value.bias",
    "self_attention.linear_proj.weight": "gpt_neox.layers.{n}.attention.dense.weight",
    "self_attention.linear_proj.bias": "gpt_neox.layers.{n}.attention.dense.bias",
    "mlp.linear_fc1.layer_norm_weight": "gpt_neox.layers.{n}.post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "gpt_neox.layers.{n}.post_attention_layernorm.bias",
    "mlp.linear_fc1.weight": "gpt_neox.layers.{n}.mlp.dense_h_to_4h.weight",
    "mlp.linear_fc1.bias": "gpt_neox.layers.{n}.mlp.dense_h_to_4h.bias",
    "mlp.linear_fc2.weight": "gpt_neox.layers.{n}.mlp.dense_4h_to_h.weight",
    "mlp.linear_fc2.bias": "gpt_neox.layers.{n}.mlp.dense_4h_to_h.bias",
    "decoder.final_layernorm.weight": "gpt_neox.final_layer_norm.weight",
    "decoder.final_layernorm.bias": "gpt_neox.final_layer_norm.bias",
    "output_layer.weight": "embed_out.weight",
}

GPT_NEOX_DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rotary_emb_base": 10000.0,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "use_parallel_residual": True,
}


def _gpt_neox(fields: ConfigJson) -> GPTConfig:
    heads, bias = fields.integer("num_attention_heads"), fields.flag("attention_bias")
    # GPT-NeoX always has hidden_size // heads channels per head. A different head_dim is refused:
    # transformers would use it for RoPE, but not as the size of a head.
    fields.require("head_dim", fields.integer("hidden_size") // max(1, heads))
    return llama_like(
        fields,
        epsilon_key="layer_norm_eps",
        theta_key="rotary_emb_base",
        percent_key="rotary_pct",
        num_query_groups=heads,
        normalization="LayerNorm",
        gated=False,
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=True,
        parallel_residual=fields.flag("use_parallel_residual"),
        hidden_dropout=fields.number("hidden_dropout"),
    )


GPT_NEOX = Family(
    _gpt_neox,
    GPT_NEOX_KEYS,
    GPT_NEOX_DEFAULTS,
    "gpt_neox.",
    key_renames={"lm_head.": "embed_out."},
)
