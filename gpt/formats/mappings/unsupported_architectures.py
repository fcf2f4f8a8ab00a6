"""Architectures that Preamble does not compute: their markers in every format, and the way out.

`ARCHITECTURES` is the only list of them. The readers of all formats look up markers in it: keys of
Hugging Face's config.json, Megatron args and NeMo fields, symbols of HybridModel's layers, class
names, and tensor names. An error names the architecture, the marker, and what the user can do. The
module opens no files.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpt.errors import CheckpointError
from gpt.settings import short_repr

ValueTest = Callable[[Any], bool]


def _is_set(value: object) -> bool:
    """Tell whether a value switches a feature on: it is not null, false, 0 or empty."""
    if isinstance(value, bool | int | float | str | list | tuple | dict):
        return bool(value)
    return value is not None


def _has_mamba(value: object) -> bool:
    return isinstance(value, str) and "M" in value


@dataclass(frozen=True)
class Architecture:
    """One architecture; a value test tells whether the value of a key is a marker."""

    name: str
    way_out: str  # What the user can do, as the end of an error message.
    # Hugging Face: keys of config.json, values of `model_type`, and words of `layer_types`. If a
    # config has a list of layer types, a key is a marker only if the list has one of the words.
    config_keys: Mapping[str, ValueTest] = field(default_factory=dict)
    model_types: frozenset[str] = frozenset()
    layer_words: frozenset[str] = frozenset()
    # Megatron args, which NeMo 1, NeMo 2 and Megatron-Bridge have as fields of the same names.
    args: Mapping[str, ValueTest] = field(default_factory=dict)
    layer_symbols: str = ""  # In the pattern of a HybridModel.
    classes: str = ""  # Pattern of class names of NeMo and Megatron-Bridge.
    tensors: str = ""  # Pattern of tensor names of Megatron and NeMo.


def _keys(*names: str) -> dict[str, ValueTest]:
    return dict.fromkeys(names, _is_set)


VLLM = "serve the model with vLLM or SGLang"
LARGE_MODELS = "GLM-4.5, Qwen3-235B-A22B or Qwen3-30B-A3B"

# More specific architectures first: DeepSeek-V3.2 has the keys of MLA too, Kimi Linear those of
# MLA, and Gemma 4 those of softcaps.
ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        "DeepSeek sparse attention (DSA)",
        f"{VLLM}, or give a model with full attention, such as {LARGE_MODELS}",
        config_keys=_keys("index_topk", "index_head_dim", "compress_rates", "hc_mult"),
        model_types=frozenset({"deepseek_v32", "deepseek_v4", "glm_moe_dsa"}),
        layer_words=frozenset(
            {
                "indexed_attention",
                "deepseek_sparse_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            }
        ),
        args={"experimental_attention_variant": lambda value: value == "dsa"},
        layer_symbols="D",
        classes=r"DeepSeekV(32|4)|Dsa",
        tensors=r"\.indexer\.",
    ),
    Architecture(
        "Mamba layers",
        "serve the model with vLLM or TensorRT-LLM, or give a model with attention in all layers, "
        f"such as Nemotron-4, {LARGE_MODELS}",
        config_keys={
            **_keys("mamba_d_state", "mamba_d_ssm", "mamba_n_heads", "mamba_num_heads"),
            **_keys("n_mamba_heads", "ssm_state_size"),
            "hybrid_override_pattern": _has_mamba,
        },
        model_types=frozenset(
            {"nemotron_h", "falcon_h1", "bamba", "jamba", "zamba", "zamba2"}
            | {"mamba", "mamba2", "falcon_mamba"}
        ),
        layer_words=frozenset({"mamba", "mamba2", "hybrid", "linear_attention"}),
        layer_symbols="M",
        classes=r"mamba|ssm",
        tensors=r"mixer\.",
    ),
    Architecture(
        "linear attention (Gated Delta Net, KDA or lightning attention)",
        f"{VLLM}, or give a model with attention in all layers, such as {LARGE_MODELS}",
        config_keys=_keys("linear_conv_kernel_dim", "linear_num_value_heads", "linear_attn_config"),
        model_types=frozenset(
            {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
            | {"kimi_linear", "minimax", "minimax_m1", "minimax_text_01", "olmo_hybrid"}
        ),
        layer_words=frozenset({"linear_attention"}),
        args={
            **_keys("linear_attention_freq", "linear_attention_type"),
            "experimental_attention_variant": _is_set,
        },
        layer_symbols="G",
        classes=r"Qwen_?3_?Next|Qwen_?3_?5|KimiLinear|GatedDelta",
        tensors=r"self_attention\.(in_proj|conv1d|dt_bias|A_log|out_norm|out_proj)",
    ),
    Architecture(
        "multi-head latent attention (MLA)",
        f"{VLLM}, or give a model with grouped-query attention, such as {LARGE_MODELS}",
        config_keys=_keys("kv_lora_rank", "q_lora_rank"),
        model_types=frozenset(
            {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "longcat_flash", "minicpm3"}
        ),
        args=_keys("multi_latent_attention"),
        layer_symbols="+",
        classes=r"DeepSeekV[23]|KimiK2|Moonlight",
        tensors=r"linear_(q|kv)_(down|up)_proj|linear_q_proj",
    ),
    Architecture(
        "the attention of Llama 4",
        f"{VLLM}, or give Llama 3.3, {LARGE_MODELS}",
        config_keys=_keys("attention_chunk_size", "attn_temperature_tuning"),
        model_types=frozenset({"llama4", "llama4_text"}),
        layer_words=frozenset({"chunked_attention"}),
        args=_keys("qk_l2_norm"),
        classes=r"llama_?4",
    ),
    Architecture(
        "the per-layer embeddings or shared KV caches of Gemma 3n and Gemma 4",
        "serve the model with vLLM or transformers, or give a model of a similar size, such as "
        "Gemma 3-4B, Qwen3-4B or Qwen3-30B-A3B",
        config_keys=_keys("hidden_size_per_layer_input", "num_kv_shared_layers"),
        model_types=frozenset({"gemma3n", "gemma3n_text", "gemma4", "gemma4_text"}),
        classes=r"gemma_?(3n|4)",
    ),
    Architecture(
        "logit softcaps, as in Gemma 2",
        "serve the model with vLLM or transformers, or give a model of a similar size, such as "
        "Gemma 3-12B, Llama 3.1-8B, Qwen3-8B or Qwen3-32B",
        config_keys=_keys("attn_logit_softcapping", "final_logit_softcapping"),
        model_types=frozenset({"gemma2"}),
        args=_keys("attn_logit_softcapping", "final_logit_softcapping"),
        classes=r"gemma_?2",
    ),
    Architecture(
        "an encoder-decoder, such as T5",
        "run the model with transformers, or give a decoder-only model (GPT)",
        config_keys={"is_encoder_decoder": lambda value: value is True},
        model_types=frozenset({"t5", "mt5", "umt5", "bart", "mbart", "t5gemma"}),
        classes=r"t5|bart",
        tensors=r"inter_attention|cross_attention|cross_attn",
    ),
    Architecture(
        "a bidirectional encoder, as of BERT or T5",
        "run the model with transformers, or give a decoder-only model (GPT)",
        model_types=frozenset(
            {"bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "modernbert"}
            | {"deberta", "deberta-v2", "nomic_bert", "mpnet"}
        ),
        classes=r"bert",
        tensors=r"binary_head|pooler|tokentype_embeddings|lm_head"
        r"|encoder\.layers\.\d+\.self_attention\.linear_qkv",
    ),
    Architecture(
        "layers of different shapes, found by neural architecture search (NAS)",
        "serve the model with vLLM or TensorRT-LLM, or give the model that it was derived from, "
        "such as Llama 3.3",
        config_keys=_keys("block_configs", "per_layer_config"),
        model_types=frozenset({"nemotron-nas", "deci"}),
        args=_keys("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
        classes=r"heterogeneous|DeciLM|Nemotron_?Nas",
    ),
)

# Names of all args that can be markers.
MARKER_ARGS = frozenset(name for architecture in ARCHITECTURES for name in architecture.args)


def _unsupported_error(location: str, marker: str, architecture: Architecture) -> CheckpointError:
    return CheckpointError(
        f"{location}: {marker}, a sign of {architecture.name}, which Preamble does not support; "
        f"{architecture.way_out}"
    )


def refuse_hf_config(record: Mapping[str, Any], location: str) -> None:
    """Refuse a config.json with a marker, at the top level or in `text_config`.

    A key that configures the architecture tells more than the name of the family, so keys come
    first.
    """
    text_config = record.get("text_config")
    sections = {"": record, "text_config.": text_config if isinstance(text_config, dict) else {}}
    for find_marker in (_find_key, _find_model_type, _find_layer_word):
        for section, fields in sections.items():
            marker = find_marker(fields)
            if marker is not None:
                raise _unsupported_error(location, section + marker.text, marker.architecture)


@dataclass(frozen=True)
class _Marker:
    text: str  # What a config has, such as "kv_lora_rank is 512".
    architecture: Architecture


def _find_key(record: Mapping[str, Any]) -> _Marker | None:
    _, words = _layer_words(record)
    for architecture in ARCHITECTURES:
        if words and architecture.layer_words and not words & architecture.layer_words:
            continue
        for key, is_marker in architecture.config_keys.items():
            if is_marker(record.get(key)):
                return _Marker(f"{key} is {short_repr(record[key])}", architecture)
    return None


def _find_model_type(record: Mapping[str, Any]) -> _Marker | None:
    model_type = record.get("model_type")
    for architecture in ARCHITECTURES:
        if isinstance(model_type, str) and model_type in architecture.model_types:
            return _Marker(f"model_type is {model_type!r}", architecture)
    return None


def _find_layer_word(record: Mapping[str, Any]) -> _Marker | None:
    key, words = _layer_words(record)
    # In reverse, because transformers 5 writes "linear_attention" for Mamba too.
    for architecture in reversed(ARCHITECTURES):
        for word in sorted(words & architecture.layer_words):
            return _Marker(f"{key} has {word!r}", architecture)
    return None


def _layer_words(record: Mapping[str, Any]) -> tuple[str, set[str]]:
    """Return the key of the list of layer types, and the words in the list."""
    key = "layer_types" if record.get("layer_types") else "layers_block_type"
    layers = record.get(key)
    layers = layers if isinstance(layers, list) else []
    return key, {word for word in layers if isinstance(word, str)}


def refuse_args(
    values: Mapping[str, Any], location: str, display_name: Callable[[str], str]
) -> None:
    """Refuse Megatron args, or NeMo fields that were converted to args, with a marker."""
    for architecture in ARCHITECTURES:
        for name, is_marker in architecture.args.items():
            if is_marker(values.get(name)):
                marker = f"{display_name(name)} is {short_repr(values[name])}"
                raise _unsupported_error(location, marker, architecture)


def refuse_class(qualified_name: str, location: str, key: str) -> None:
    """Refuse the class of a model or its config in NeMo or Megatron-Bridge; `key` is its field."""
    class_name = qualified_name.rpartition(".")[2]
    for architecture in ARCHITECTURES:
        if architecture.classes and re.search(architecture.classes, class_name, re.IGNORECASE):
            raise _unsupported_error(location, f"{key} is {qualified_name[-60:]}", architecture)


def refuse_tensor(key: str, location: str) -> None:
    for architecture in ARCHITECTURES:
        if architecture.tensors and re.search(architecture.tensors, key):
            raise _unsupported_error(location, f"it has the tensor {key}", architecture)


def architecture_of_symbol(symbol: str) -> Architecture | None:
    """Return the unsupported architecture of a symbol in a HybridModel's pattern, or None."""
    return next((row for row in ARCHITECTURES if symbol in row.layer_symbols), None)
