"""The model family BLOOM: ALiBi positions, a norm of the embeddings."""

from collections.abc import Mapping

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.family import Family, TensorKeys

BLOOM_KEYS: Mapping[str, TensorKeys] = {
    "embedding.word_embeddings.weight": "transformer.word_embeddings.weight",
    "output_layer.weight": "lm_head.weight",
    **{
        f"{name}{leaf}": f"transformer.{key}.{leaf}"
        for name, key in {
            "embedding.word_embeddings_layernorm.": "word_embeddings_layernorm",
            "decoder.final_layernorm.": "ln_f",
            "self_attention.linear_qkv.layer_norm_": "h.{n}.input_layernorm",
            # The rows are already grouped by head: the query, key and value of each head.
            "self_attention.linear_qkv.": "h.{n}.self_attention.query_key_value",
            "self_attention.linear_proj.": "h.{n}.self_attention.dense",
            "mlp.linear_fc1.layer_norm_": "h.{n}.post_attention_layernorm",
            "mlp.linear_fc1.": "h.{n}.mlp.dense_h_to_4h",
            "mlp.linear_fc2.": "h.{n}.mlp.dense_4h_to_h",
        }.items()
        for leaf in ("weight", "bias")
    },
}
BLOOM_DEFAULTS = {
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 8,
    "layer_norm_epsilon": 1e-5,
    # The length of the training sequences. ALiBi has no limit of its own.
    "seq_length": 2048,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
}
# The names of the sizes in the first files of the family, and in transformers.
ALIASES = {
    "n_embed": "hidden_size",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}


def _bloom(fields: ConfigJson) -> GPTConfig:
    # Otherwise the residual would be the output of the norm.
    fields.require("apply_residual_connection_post_layernorm", False)
    sizes = {ALIASES[key]: fields.record[key] for key in ALIASES if fields.record.get(key)}
    fields = ConfigJson({**fields.record, **sizes}, fields.path)
    return GPTConfig(
        num_layers=fields.count("n_layer"),
        hidden_size=fields.integer("hidden_size"),
        num_attention_heads=fields.integer("n_head"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("seq_length"),
        position_embedding_type="alibi",
        embedding_layernorm=True,
        layernorm_epsilon=fields.number("layer_norm_epsilon"),
        activation="gelu_tanh",
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings"),
        hidden_dropout=fields.number("hidden_dropout"),
        attention_dropout=fields.number("attention_dropout"),
    )


BLOOM = Family(_bloom, BLOOM_KEYS, BLOOM_DEFAULTS, "transformer.")
