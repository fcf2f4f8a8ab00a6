"""NeMo config writer: converts GPTConfig and split to NeMo 1's `model_config.yaml`.

The module is the inverse of `gpt/formats/mappings/nemo_args.py`. NeMo builds Megatron-Core's GPT,
so a model property that Megatron lacks is refused here too. NeMo has its own field names, and
supports two properties that Megatron's args cannot express: gated GELU, and `llama3` RoPE scaling
with parameters that differ from Llama 3.1's. A null value usually selects NeMo's default. A field
without a value is omitted if NeMo does not accept null for it.

NeMo 1 is the API that loads `.nemo` files; releases 2.x of the NeMo package also contain this API.
The module uses no tensors and opens no files.
"""

from collections.abc import Mapping
from typing import Any

from checkpoints_tools.layout.layout import ParallelSplit, stored_vocab_rows
from checkpoints_tools.writers.megatron_args import check_supported as check_megatron
from checkpoints_tools.writers.megatron_args import plan_stages
from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.parallel.vocabulary_padding import VOCABULARY_MULTIPLE, padded_vocab_size

TARGET_CLASS = "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel"
PRECISIONS: Mapping[str, str | int] = {"float32": 32, "bfloat16": "bf16", "float16": 16}
NORM_TYPES: Mapping[tuple[str, bool], str] = {
    ("LayerNorm", False): "layernorm",
    ("LayerNorm", True): "layernorm1p",
    ("RMSNorm", False): "rmsnorm",
    # NeMo has one value for both kinds of RMSNorm. The field layernorm_zero_centered_gamma
    # distinguishes them.
    ("RMSNorm", True): "rmsnorm",
}
ACTIVATIONS: Mapping[tuple[str, bool], str] = {
    ("gelu", False): "gelu",
    ("gelu_tanh", False): "gelu",
    ("relu2", False): "squared-relu",
    ("silu", True): "fast-swiglu",
    ("gelu", True): "fast-geglu",
    ("gelu_tanh", True): "fast-geglu",
}
# Fields that NeMo requires, although they have no effect on a loaded model.
REQUIRED_FIELDS: Mapping[str, Any] = {
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "sequence_parallel": False,
    "activations_checkpoint_granularity": None,
    "activations_checkpoint_method": None,
    "activations_checkpoint_num_layers": None,
    "activations_checkpoint_layers_per_pipeline": None,
    "optim": {"name": "fused_adam", "lr": 0.0002},
}


# Fields of GPTConfig that NeMo's configuration lacks, with the values that it can express.
_FIXED_FIELDS: Mapping[str, object] = {
    "window_layers": (),
    "rope_layers": (),
    "attention_sinks": False,
    "softmax_scale": 0.0,
    "activation_func_clamp_value": 0.0,
    "glu_linear_offset": 0.0,
    "moe_router_bias": False,
}


def check_supported(config: GPTConfig, split: ParallelSplit) -> None:
    """Refuse a config that NeMo cannot express, or a split that a `.nemo` does not support."""
    if split.vpp != 1:
        raise ConfigError(
            f"--to nemo does not support virtual stages (--vpp {split.vpp}), because the last "
            "releases of NeMo 1 have none; remove --vpp, or choose --to megatron-dist"
        )
    if split.ep != 1:
        raise ConfigError(
            f"--to nemo does not support expert parallel (--ep {split.ep}): a .nemo has no "
            "files for expert ranks; remove --ep, or choose --to megatron-dist"
        )
    for name, value in _FIXED_FIELDS.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"NeMo's GPT has no {name} {getattr(config, name)}; choose another format with --to"
            )
    scaling = config.rope_scaling if config.uses_rope else None
    if scaling is not None and scaling.kind not in ("linear", "llama3"):
        raise ConfigError(
            f"NeMo's GPT has no {scaling.kind} rope_scaling; choose another format with --to"
        )
    # Megatron's check refuses two properties that NeMo can express: `llama3` RoPE scaling with
    # parameters that differ from Llama 3.1's, and gated GELU. Therefore Megatron's check gets a
    # config with other values of these fields.
    neutral_fields: dict[str, Any] = {"rope_scaling": None}
    if config.gated and config.activation in ("gelu", "gelu_tanh"):
        neutral_fields["activation"] = "silu"
    check_megatron(config.with_fields(**neutral_fields), split)


def model_config(
    config: GPTConfig,
    split: ParallelSplit,
    *,
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
    tokenizer: Mapping[str, Any] | None = None,
    tokenizer_vocab_size: int = 0,
) -> dict[str, Any]:
    """Return the fields of model_config.yaml. Call `check_supported` first.

    `tokenizer` is the config's tokenizer section; `tokenizer_vocab_size` is 0 if unknown.
    """
    fields = {
        "target": TARGET_CLASS,
        "mcore_gpt": True,
        "megatron_amp_O2": False,
        "megatron_legacy": False,
        "transformer_engine": True,
        "precision": PRECISIONS[config.dtype],
        "tensor_model_parallel_size": split.tp,
        "pipeline_model_parallel_size": split.pp,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "tokenizer": dict(tokenizer or {"library": None, "type": None, "model": None}),
        **REQUIRED_FIELDS,
        **_vocab_fields(config, split.tp, vocabulary_multiple, tokenizer_vocab_size),
        **_size_fields(config),
        **_layer_fields(config),
        **_position_fields(config),
        **(_moe_fields(config) if any(config.moe_layers) else {}),
    }
    stage_args = plan_stages(config, split).args
    for end in ("first", "last"):
        count = stage_args[f"decoder_{end}_pipeline_num_layers"]
        if count is not None:
            fields[f"num_layers_in_{end}_pipeline_stage"] = count
    # NeMo's default layer spec supports no norms of queries and keys, and requires that either all
    # layers have experts or none.
    if config.qk_layernorm or len(set(config.moe_layers)) > 1:
        fields["name"] = "decoder_block_gpt"
    return fields


def load_notes(config: GPTConfig, split: ParallelSplit) -> list[str]:
    """Return hints for loading the target in NeMo, such as the required versions."""
    notes = []
    if config.num_query_groups % split.tp:
        notes.append(
            f"{config.num_query_groups} query groups on {split.tp} tensor ranks: this needs "
            "Megatron-Core 0.16 or later, and NeMo 1 was released with older versions"
        )
    if any(config.moe_layers) and config.moe_shared_expert_gate:
        notes.append(
            "shared experts have a gate: this needs a recent Megatron-Core with "
            "moe_shared_expert_gate; older versions do not load the gate's weights"
        )
    if config.qk_layernorm or len(set(config.moe_layers)) > 1:
        notes.append(
            "the layer spec is decoder_block_gpt: this needs version 2.0 or later of the NeMo "
            "package, which still loads .nemo files"
        )
    return notes


def _vocab_fields(
    config: GPTConfig, tp: int, multiple: int, tokenizer_vocab_size: int
) -> dict[str, Any]:
    """Return the vocabulary fields of the config.

    NeMo computes the number of embedding rows by padding the vocabulary size of its tokenizer. If
    the target's embedding has a different number of rows, override_vocab_size is set. NeMo has no
    field for the unpadded size, so true_vocab_size is added for Preamble's reader.
    """
    rows = stored_vocab_rows(config, tp, multiple)
    fields = {"make_vocab_size_divisible_by": multiple, "true_vocab_size": config.vocab_size}
    if padded_vocab_size(tokenizer_vocab_size, tp, multiple) != rows:
        fields["override_vocab_size"] = rows
    return fields


def _size_fields(config: GPTConfig) -> dict[str, Any]:
    grouped = config.num_query_groups != config.num_attention_heads
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_query_groups if grouped else None,
        "kv_channels": config.kv_channels,
        "encoder_seq_length": config.max_position_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "share_embeddings_and_output_weights": not config.untie_embeddings_and_output_weights,
    }


def _layer_fields(config: GPTConfig) -> dict[str, Any]:
    """Return the fields of norms, activation, biases and attention."""
    fields: dict[str, Any] = {
        "normalization": NORM_TYPES[config.normalization, config.layernorm_zero_centered_gamma],
        "layernorm_zero_centered_gamma": config.layernorm_zero_centered_gamma,
        "layernorm_epsilon": config.layernorm_epsilon,
        "activation": ACTIVATIONS[config.activation, config.gated],
        "openai_gelu": False,
        "onnx_safe": False,
        # Selects the GELU: the fused kernel uses the tanh approximation, the unfused kernel erf.
        # For silu, fusion does not change the function.
        "bias_activation_fusion": config.activation in ("gelu_tanh", "silu"),
        "bias": config.mlp_bias,
        "qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_layernorm,
        "transformer_block_type": "pre_ln",
        "normalize_attention_scores": True,
        "headscale": False,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
    }
    if config.window_size is not None:
        # NeMo's value is [tokens before the current token, tokens after the current token].
        # GPTConfig's window_size also counts the current token.
        fields["window_size"] = [config.window_size - 1, 0]
    return fields


def _position_fields(config: GPTConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"position_embedding_type": config.position_embedding_type}
    if not config.uses_rope:
        return fields
    fields |= {
        "rotary_percentage": config.rotary_percent,
        "rotary_base": _as_integer(config.rotary_base),
        "rotary_interleaved": config.rotary_interleaved,
        "seq_len_interpolation_factor": None,
    }
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        fields["seq_len_interpolation_factor"] = _as_integer(scaling.factor)
    elif scaling is not None:
        fields |= {
            "scale_positional_embedding": True,
            "scale_factor": _as_integer(scaling.factor),
            "low_freq_factor": _as_integer(scaling.low_freq_factor),
            "high_freq_factor": _as_integer(scaling.high_freq_factor),
            "old_context_len": scaling.original_max_position_embeddings,
        }
    return fields


def _moe_fields(config: GPTConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_moe_experts": config.num_experts,
        "moe_layer_freq": 1 if all(config.moe_layers) else [int(x) for x in config.moe_layers],
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size,
        "moe_router_topk": config.moe_router_topk,
        "moe_router_pre_softmax": config.moe_router_pre_softmax,
        "moe_router_score_function": config.moe_router_score_function,
        "moe_router_enable_expert_bias": config.moe_router_expert_bias,
        "moe_grouped_gemm": False,
    }
    if config.moe_router_topk_scaling_factor != 1:
        fields["moe_router_topk_scaling_factor"] = config.moe_router_topk_scaling_factor
    if config.moe_shared_expert_intermediate_size:
        fields["moe_shared_expert_intermediate_size"] = config.moe_shared_expert_intermediate_size
        fields["moe_shared_expert_gate"] = config.moe_shared_expert_gate
    return fields


def _as_integer(value: float) -> float:
    """Convert a whole number to int, as in NeMo's own configs."""
    return int(value) if value == int(value) else value
