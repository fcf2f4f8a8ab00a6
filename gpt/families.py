"""The Hugging Face families that Preamble computes: their configs, and their names for tensors.

A family is a function that turns config.json into a GPTConfig, and a table from canonical names to
Hugging Face keys. Adding one is a row of FAMILIES. What the model would not compute exactly as
transformers does is refused by its name, never ignored.
It knows no files.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.config import Activation, GPTConfig, RopeScaling
from gpt.errors import CheckpointError

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu2": "relu2",
}


class Fields:
    """config.json, over what the family's configuration class defaults to; values are checked."""

    def __init__(self, record: Mapping[str, Any], where: Path) -> None:
        self.record, self.where = record, where

    def whole(self, key: str, absent: int | None = None) -> int:
        """A whole number; null, or no value, is `absent`, or an error if that is None."""
        value = self.record.get(key)
        value = absent if value is None else value
        if type(value) is not int or value < 0:
            raise self.wrong(key, value, "a whole number")
        return value

    def number(self, key: str, absent: float | None = None) -> float:
        value = self.record.get(key)
        value = absent if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.record.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def activation(self, key: str) -> Activation:
        name = str(self.record.get(key))
        if name not in ACTIVATIONS:
            raise self.wrong(key, name, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def refuse(self, key: str, *allowed: object) -> None:
        """Refuse a trait that changes the function, and that the model does not have."""
        value = self.record.get(key)
        if value is not None and value not in allowed:
            raise CheckpointError(
                f"{self.where}: {key} is {json.dumps(value)[:60]}, which Preamble does not compute;"
                f" it reads only models where it is {json.dumps(allowed[0])}"
            )

    def wrong(self, key: str, value: object, need: str) -> CheckpointError:
        found = "is absent" if key not in self.record else f"is {json.dumps(value)}"
        return CheckpointError(
            f"{self.where}: {key} {found}; it must be {need}: fetch the file again or correct it"
        )


@dataclass(frozen=True)
class Packed:
    """Queries, keys and values in one tensor, all queries first; GPT-2's."""

    key: str


Keys = str | tuple[str, ...] | Packed


@dataclass(frozen=True)
class Family:
    """One model_type: how its config reads, and the key or keys of each canonical tensor.

    Keys of layers hold `{n}`, the layer's number; the names in front of them leave the layer out.
    """

    config: Callable[[Fields], GPTConfig]
    keys: Mapping[str, Keys]
    defaults: Mapping[str, Any]
    prefix: str  # Of all keys but the head's; files of the bare model lack it.
    conv1d: bool = False  # Weights of linear layers are stored (in, out).


def _gpt2(fields: Fields) -> GPTConfig:
    fields.refuse("scale_attn_by_inverse_layer_idx", False)
    fields.refuse("scale_attn_weights", True)
    fields.refuse("add_cross_attention", False)
    return GPTConfig(
        num_layers=fields.whole("n_layer"),
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


def _decoder(fields: Fields, **traits: Any) -> GPTConfig:
    """What Llama and its kin share: RMSNorm, rotary positions, a gated MLP, grouped queries."""
    fields.refuse("partial_rotary_factor", 1.0)  # Their code in transformers rotates all.
    biases = {"qkv_bias": False, "proj_bias": False, "mlp_bias": False}
    config = GPTConfig(
        num_layers=fields.whole("num_hidden_layers"),
        hidden_size=fields.whole("hidden_size"),
        num_attention_heads=fields.whole("num_attention_heads"),
        vocab_size=fields.whole("vocab_size"),
        max_position_embeddings=fields.whole("max_position_embeddings"),
        ffn_hidden_size=fields.whole("intermediate_size"),
        num_query_groups=fields.whole("num_key_value_heads", 0),
        kv_channels=fields.whole("head_dim", 0),
        position_embedding_type="rope",
        normalization="RMSNorm",
        layernorm_epsilon=fields.number("rms_norm_eps"),
        activation=fields.activation("hidden_act"),
        gated=True,
        untie_embeddings_and_output_weights=not fields.flag("tie_word_embeddings"),
        attention_dropout=fields.number("attention_dropout", 0.0),
        **(biases | traits),
    )
    return _with_rotary(fields, config)


def _llama(fields: Fields) -> GPTConfig:
    bias = fields.flag("attention_bias")
    return _decoder(fields, qkv_bias=bias, proj_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def _mistral(fields: Fields) -> GPTConfig:
    _refuse_mixture(fields)
    return _decoder(fields, window_size=fields.whole("sliding_window", 0) or None)


def _qwen2(fields: Fields) -> GPTConfig:
    return _decoder(fields, qkv_bias=True, window_size=_window(fields))


def _qwen3(fields: Fields) -> GPTConfig:
    bias = fields.flag("attention_bias")
    traits = {"qkv_bias": bias, "proj_bias": bias, "qk_layernorm": True}
    return _decoder(fields, window_size=_window(fields), **traits)


def _window(fields: Fields) -> int | None:
    """Qwen's window: none, or one for all layers."""
    window = fields.whole("sliding_window", 0)
    if not fields.flag("use_sliding_window") or not window:
        return None
    types = fields.record.get("layer_types")
    if types is not None:
        _refuse_mixture(fields)
        return window if "sliding_attention" in types else None
    full, layers = fields.whole("max_window_layers"), fields.whole("num_hidden_layers")
    if 0 < full < layers:
        raise CheckpointError(
            f"{fields.where}: max_window_layers {full} of {layers} layers mixes full and sliding "
            "attention, which Preamble does not compute; it reads models whose layers are alike"
        )
    return window if full == 0 else None


def _refuse_mixture(fields: Fields) -> None:
    types = fields.record.get("layer_types")
    kinds = set(types) if isinstance(types, list) else set()
    if kinds - {"full_attention", "sliding_attention"} or len(kinds) > 1:
        raise CheckpointError(
            f"{fields.where}: layer_types mixes {', '.join(sorted(map(str, kinds)))}, which "
            "Preamble does not compute; it reads models whose layers are alike"
        )


def _with_rotary(fields: Fields, config: GPTConfig) -> GPTConfig:
    """transformers 5 keeps it all in rope_parameters; 4 had rope_theta and rope_scaling."""
    rope = fields.record.get("rope_parameters") or fields.record.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(
            f"{fields.where}: rope_parameters differ by layer, which Preamble does not compute; it "
            "reads models whose layers are alike"
        )
    inner = Fields({"rope_theta": fields.number("rope_theta")} | rope, fields.where)
    inner.refuse("partial_rotary_factor", 1.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    base = inner.number("rope_theta")
    if kind == "default":
        return config.with_fields(rotary_base=base)
    if kind == "linear":
        scaling = RopeScaling("linear", inner.number("factor"))
    elif kind == "llama3":
        # A value beside the rope's own wins in transformers, and the context stands in for none.
        original = fields.whole(
            "original_max_position_embeddings",
            inner.whole("original_max_position_embeddings", config.max_position_embeddings),
        )
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        scaling = RopeScaling("llama3", inner.number("factor"), low, high, original)
    else:
        raise CheckpointError(
            f"{fields.where}: rope type {kind!r} is not one that Preamble computes; known are "
            "default, linear, llama3"
        )
    return config.with_fields(rotary_base=base, rope_scaling=scaling)


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

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(_gpt2, GPT2_KEYS, GPT2_DEFAULTS, "transformer.", conv1d=True),
    "llama": Family(_llama, LLAMA_KEYS, LLAMA_DEFAULTS, "model."),
    "mistral": Family(_mistral, LLAMA_KEYS, MISTRAL_DEFAULTS, "model."),
    "qwen2": Family(_qwen2, LLAMA_KEYS, QWEN_DEFAULTS, "model."),
    "qwen3": Family(_qwen3, LLAMA_KEYS, QWEN_DEFAULTS | {"head_dim": 128}, "model."),
}
