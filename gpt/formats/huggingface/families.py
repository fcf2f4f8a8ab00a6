"""The Hugging Face families that Preamble computes: their configs, and their names for tensors.

A family is a function that turns config.json into a GPTConfig, and a table from canonical names to
Hugging Face keys. Adding one is a row of FAMILIES. What the model would not compute exactly as
transformers does is refused by its name, never ignored. It knows no files.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.huggingface.config_json import Fields, refuse_mixture, rotary
from gpt.parallel.sharding import LAYERS, Parameter, layer_of

# The number of an expert in a canonical name.
EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class Packed:
    """Queries, keys and values in one tensor, all queries first; GPT-2's."""

    key: str


Keys = str | tuple[str, ...] | Packed


@dataclass(frozen=True)
class Family:
    """One model_type: how its config reads, and the key or keys of each canonical tensor.

    Keys of layers hold `{n}`, the layer's number, and those of experts `{expert}`; the names in
    front of them leave the layer out. A family has the keys that its files have had from the start;
    `renamed` and `fused` bring what transformers 5 calls the same in memory, and can save, to them.
    """

    config: Callable[[Fields], GPTConfig]
    keys: Mapping[str, Keys]
    defaults: Mapping[str, Any]
    prefix: str  # Of all keys but the head's; files of the bare model lack it.
    conv1d: bool = False  # Weights of linear layers are stored (in, out).
    renamed: Mapping[str, str] = field(default_factory=dict)  # Parts of keys: theirs, ours.
    # The end of a key that holds all experts, and the ends of one expert's keys, stacked in it.
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def keys_of(self, name: str) -> Keys | None:
        """The key or keys of a canonical tensor; None if no model of this family has it."""
        layer, expert = layer_of(name), EXPERT.search(name)
        general = EXPERT.sub("{expert}", name)
        keys = self.keys.get(general if layer is None else general.split(".", 3)[3])

        def fill(key: str) -> str:
            return key.format(n=layer, expert=expert and expert[0])

        match keys:
            case None:
                return None
            case str():
                return fill(keys)
            case Packed(key):
                return Packed(fill(key))
        return tuple(map(fill, keys))

    def turns(self, parameter: Parameter) -> bool:
        """Whether files hold this tensor (in, out)."""
        return self.conv1d and len(parameter.shape) == 2 and parameter.name.startswith(LAYERS)


def _gpt2(fields: Fields) -> GPTConfig:
    fields.refuse("scale_attn_by_inverse_layer_idx", False)
    fields.refuse("scale_attn_weights", True)
    fields.refuse("add_cross_attention", False)
    return GPTConfig(
        num_layers=fields.count("n_layer"),
        hidden_size=fields.whole("n_embd"),
        num_attention_heads=fields.whole("n_head"),
        vocab_size=fields.whole("vocab_size"),
        max_position_embeddings=fields.whole("n_positions"),
        ffn_hidden_size=fields.whole("n_inner", 0),
        layernorm_epsilon=fields.number("layer_norm_epsilon"),
        activation=fields.activation("activation_function"),
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings"),
        hidden_dropout=fields.number("resid_pdrop"),
        attention_dropout=fields.number("attn_pdrop"),
    )


def _decoder(
    fields: Fields,
    *,
    epsilon: str = "rms_norm_eps",
    theta: str = "rope_theta",
    percent: str | None = None,
    **traits: Any,
) -> GPTConfig:
    """What Llama and its kin share: rotary positions, grouped queries, mostly a gated MLP."""
    shared: dict[str, Any] = {
        "num_query_groups": fields.whole("num_key_value_heads", 0),
        "kv_channels": fields.whole("head_dim", 0),
        "normalization": "RMSNorm",
        "gated": True,
        "qkv_bias": False,
        "proj_bias": False,
        "mlp_bias": False,
    }
    return GPTConfig(
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=fields.whole("hidden_size"),
        num_attention_heads=fields.whole("num_attention_heads"),
        vocab_size=fields.whole("vocab_size"),
        max_position_embeddings=fields.whole("max_position_embeddings"),
        ffn_hidden_size=fields.whole("intermediate_size"),
        position_embedding_type="rope",
        layernorm_epsilon=fields.number(epsilon),
        activation=fields.activation("hidden_act"),
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings"),
        attention_dropout=fields.number("attention_dropout", 0.0),
        **(shared | rotary(fields, theta, percent) | traits),
    )


def _llama(fields: Fields) -> GPTConfig:
    bias = fields.flag("attention_bias")
    return _decoder(fields, qkv_bias=bias, proj_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def _mistral(fields: Fields) -> GPTConfig:
    refuse_mixture(fields)
    return _decoder(fields, window_size=fields.whole("sliding_window", 0) or None)


def _qwen2(fields: Fields) -> GPTConfig:
    return _decoder(fields, qkv_bias=True, window_size=_window(fields))


def _qwen3(fields: Fields) -> GPTConfig:
    bias = fields.flag("attention_bias")
    return _decoder(
        fields, window_size=_window(fields), qkv_bias=bias, proj_bias=bias, qk_layernorm=True
    )


def _mixtral(fields: Fields) -> GPTConfig:
    refuse_mixture(fields)
    # Its softmax over all experts, scaled to one over the chosen, is a softmax over the chosen.
    return _decoder(
        fields,
        window_size=fields.whole("sliding_window", 0) or None,
        num_experts=fields.count("num_local_experts"),
        moe_layers=(True,) * fields.count("num_hidden_layers"),
        moe_router_topk=fields.whole("num_experts_per_tok"),
    )


def _starcoder2(fields: Fields) -> GPTConfig:
    bias = fields.flag("use_bias")
    refuse_mixture(fields)
    return _decoder(
        fields,
        epsilon="norm_epsilon",
        normalization="LayerNorm",
        gated=False,
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=bias,
        window_size=fields.whole("sliding_window", 0) or None,
        hidden_dropout=fields.number("residual_dropout"),
    )


def _nemotron(fields: Fields) -> GPTConfig:
    bias = fields.flag("attention_bias")
    return _decoder(
        fields,
        epsilon="norm_eps",
        percent="partial_rotary_factor",
        normalization="LayerNorm",
        layernorm_zero_centered_gamma=True,
        gated=False,
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


def _gpt_neox(fields: Fields) -> GPTConfig:
    heads, bias = fields.whole("num_attention_heads"), fields.flag("attention_bias")
    # Its heads share the hidden size; a width of their own would turn the rotation alone.
    fields.refuse("head_dim", fields.whole("hidden_size") // max(1, heads))
    return _decoder(
        fields,
        epsilon="layer_norm_eps",
        theta="rotary_emb_base",
        percent="rotary_pct",
        num_query_groups=heads,
        normalization="LayerNorm",
        gated=False,
        qkv_bias=bias,
        proj_bias=bias,
        mlp_bias=True,
        parallel_residual=fields.flag("use_parallel_residual"),
        hidden_dropout=fields.number("hidden_dropout"),
    )


def _window(fields: Fields) -> int | None:
    """Qwen's window: none, or one for all layers."""
    window = fields.whole("sliding_window", 0)
    if not fields.flag("use_sliding_window") or not window:
        return None
    types = fields.layer_types()
    if types is not None:
        refuse_mixture(fields)
        return window if "sliding_attention" in types else None
    full, layers = fields.whole("max_window_layers"), fields.count("num_hidden_layers")
    if 0 < full < layers:
        raise CheckpointError(
            f"{fields.where}: max_window_layers {full} of {layers} layers mixes full and sliding "
            "attention, which Preamble does not compute; it reads models whose layers are alike"
        )
    return window if full == 0 else None


GPT2_KEYS: Mapping[str, Keys] = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "self_attention.linear_qkv.layer_norm_weight": "transformer.h.{n}.ln_1.weight",
    "self_attention.linear_qkv.layer_norm_bias": "transformer.h.{n}.ln_1.bias",
    "self_attention.linear_qkv.weight": Packed("transformer.h.{n}.attn.c_attn.weight"),
    "self_attention.linear_qkv.bias": Packed("transformer.h.{n}.attn.c_attn.bias"),
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


def _three(kind: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{{n}}.self_attn.{letter}_proj.{kind}" for letter in "qkv")


def _gate_up(kind: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{{n}}.mlp.{half}_proj.{kind}" for half in ("gate", "up"))


LLAMA_KEYS: Mapping[str, Keys] = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "self_attention.linear_qkv.layer_norm_weight": "model.layers.{n}.input_layernorm.weight",
    "self_attention.linear_qkv.weight": _three("weight"),
    "self_attention.linear_qkv.bias": _three("bias"),
    "self_attention.q_layernorm.weight": "model.layers.{n}.self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "model.layers.{n}.self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "model.layers.{n}.self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "model.layers.{n}.self_attn.o_proj.bias",
    "mlp.linear_fc1.layer_norm_weight": "model.layers.{n}.post_attention_layernorm.weight",
    "mlp.linear_fc1.weight": _gate_up("weight"),
    "mlp.linear_fc1.bias": _gate_up("bias"),
    "mlp.linear_fc2.weight": "model.layers.{n}.mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "model.layers.{n}.mlp.down_proj.bias",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}

MIXTRAL_KEYS: Mapping[str, Keys] = {
    **LLAMA_KEYS,
    "pre_mlp_layernorm.weight": "model.layers.{n}.post_attention_layernorm.weight",
    "mlp.router.weight": "model.layers.{n}.block_sparse_moe.gate.weight",
    "mlp.experts.local_experts.{expert}.linear_fc1.weight": (
        "model.layers.{n}.block_sparse_moe.experts.{expert}.w1.weight",
        "model.layers.{n}.block_sparse_moe.experts.{expert}.w3.weight",
    ),
    "mlp.experts.local_experts.{expert}.linear_fc2.weight": (
        "model.layers.{n}.block_sparse_moe.experts.{expert}.w2.weight"
    ),
}
MIXTRAL_FUSED = {
    "experts.gate_up_proj": ("experts.{expert}.w1.weight", "experts.{expert}.w3.weight"),
    "experts.down_proj": ("experts.{expert}.w2.weight",),
}

# Llama's, with norms that have biases and an MLP that has no gate.
PLAIN_KEYS: Mapping[str, Keys] = {
    **LLAMA_KEYS,
    "self_attention.linear_qkv.layer_norm_bias": "model.layers.{n}.input_layernorm.bias",
    "mlp.linear_fc1.layer_norm_bias": "model.layers.{n}.post_attention_layernorm.bias",
    "mlp.linear_fc1.weight": "model.layers.{n}.mlp.up_proj.weight",
    "mlp.linear_fc1.bias": "model.layers.{n}.mlp.up_proj.bias",
    "decoder.final_layernorm.bias": "model.norm.bias",
}
STARCODER2_KEYS: Mapping[str, Keys] = {
    **PLAIN_KEYS,
    "mlp.linear_fc1.weight": "model.layers.{n}.mlp.c_fc.weight",
    "mlp.linear_fc1.bias": "model.layers.{n}.mlp.c_fc.bias",
    "mlp.linear_fc2.weight": "model.layers.{n}.mlp.c_proj.weight",
    "mlp.linear_fc2.bias": "model.layers.{n}.mlp.c_proj.bias",
}

NEOX_KEYS: Mapping[str, Keys] = {
    "embedding.word_embeddings.weight": "gpt_neox.embed_in.weight",
    "self_attention.linear_qkv.layer_norm_weight": "gpt_neox.layers.{n}.input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "gpt_neox.layers.{n}.input_layernorm.bias",
    # By head already: its query, its key, its value.
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

# What each family's configuration class says where config.json is silent.
GPT2_DEFAULTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_positions": 1024,
    "tie_word_embeddings": True,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
}
LLAMA_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
MISTRAL_DEFAULTS = LLAMA_DEFAULTS | {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
QWEN_DEFAULTS = LLAMA_DEFAULTS | {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

MIXTRAL_DEFAULTS = MISTRAL_DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
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
NEMOTRON_DEFAULTS = LLAMA_DEFAULTS | {
    "hidden_act": "relu2",
    "norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.5,
}
NEOX_DEFAULTS = {
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

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(_gpt2, GPT2_KEYS, GPT2_DEFAULTS, "transformer.", conv1d=True),
    "llama": Family(_llama, LLAMA_KEYS, LLAMA_DEFAULTS, "model."),
    "mistral": Family(_mistral, LLAMA_KEYS, MISTRAL_DEFAULTS, "model."),
    "qwen2": Family(_qwen2, LLAMA_KEYS, QWEN_DEFAULTS, "model."),
    "qwen3": Family(_qwen3, LLAMA_KEYS, QWEN_DEFAULTS | {"head_dim": 128}, "model."),
    "mixtral": Family(
        _mixtral,
        MIXTRAL_KEYS,
        MIXTRAL_DEFAULTS,
        "model.",
        renamed={".mlp.": ".block_sparse_moe."},
        fused=MIXTRAL_FUSED,
    ),
    "starcoder2": Family(_starcoder2, STARCODER2_KEYS, STARCODER2_DEFAULTS, "model."),
    "nemotron": Family(_nemotron, PLAIN_KEYS, NEMOTRON_DEFAULTS, "model."),
    "gpt_neox": Family(
        _gpt_neox, NEOX_KEYS, NEOX_DEFAULTS, "gpt_neox.", renamed={"lm_head.": "embed_out."}
    ),
}
