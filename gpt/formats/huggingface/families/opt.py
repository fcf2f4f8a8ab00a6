"""The model family OPT: learned positions with an offset, ReLU."""

from collections.abc import Mapping

from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.family import Family, OffsetRows, TensorKeys

_LAYER = "model.decoder.layers.{n}."
OPT_KEYS: Mapping[str, TensorKeys] = {
    "embedding.word_embeddings.weight": "model.decoder.embed_tokens.weight",
    # transformers reads the embedding of position p from row p + 2.
    "embedding.position_embeddings.weight": OffsetRows("model.decoder.embed_positions.weight", 2),
    "decoder.final_layernorm.weight": "model.decoder.final_layer_norm.weight",
    "decoder.final_layernorm.bias": "model.decoder.final_layer_norm.bias",
    "output_layer.weight": "lm_head.weight",
    **{
        f"{name}{leaf}": f"{_LAYER}{key}.{leaf}"
        for name, key in {
            "self_attention.linear_qkv.layer_norm_": "self_attn_layer_norm",
            "self_attention.linear_proj.": "self_attn.out_proj",
            "mlp.linear_fc1.layer_norm_": "final_layer_norm",
            "mlp.linear_fc1.": "fc1",
            "mlp.linear_fc2.": "fc2",
        }.items()
        for leaf in ("weight", "bias")
    },
    **{
        f"self_attention.linear_qkv.{leaf}": tuple(
            f"{_LAYER}self_attn.{letter}_proj.{leaf}" for letter in "qkv"
        )
        for leaf in ("weight", "bias")
    },
}
OPT_DEFAULTS = {
    "activation_function": "relu",
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "enable_bias": True,
    "tie_word_embeddings": True,
}


def _opt(fields: ConfigJson) -> GPTConfig:
    if not fields.flag("do_layer_norm_before"):
        raise CheckpointError(
            f"{fields.path}: do_layer_norm_before is false: this is OPT-350M or a model like it, "
            "whose norms follow the residual sums, which Preamble does not support; take another "
            "size of OPT"
        )
    hidden_size = fields.integer("hidden_size")
    fields.require("word_embed_proj_dim", hidden_size)
    fields.require("_remove_final_layer_norm", False)
    fields.require("layer_norm_elementwise_affine", True)
    bias = fields.flag("enable_bias")
    return GPTConfig(
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=fields.integer("num_attention_heads"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        ffn_hidden_size=fields.integer("ffn_dim"),
        activation=fields.activation("activation_function"),
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=bias,
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings"),
        hidden_dropout=fields.number("dropout"),
        attention_dropout=fields.number("attention_dropout"),
    )


OPT = Family(_opt, OPT_KEYS, OPT_DEFAULTS, "model.")
