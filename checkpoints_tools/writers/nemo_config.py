"""An architecture and a division as NeMo 1's `model_config.yaml`: nemo_args, inverted.

NeMo builds Megatron-Core's GPT, so what that cannot be is refused as for Megatron; but NeMo's words
are its own, and it adds a few: gated GELU, and every stretching of positions by Llama 3.1's rule.
A field whose absence means its default is left out, as NeMo does not take null for absent.
It knows no tensors and no files.
"""

from collections.abc import Mapping
from typing import Any

from checkpoints_tools.layout.layout import VOCABULARY_MULTIPLE, Division, padded_vocabulary
from checkpoints_tools.writers.megatron_args import check as check_megatron
from checkpoints_tools.writers.megatron_args import stages
from gpt.config import GPTConfig
from gpt.errors import ConfigError

TARGET = "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel"
PRECISIONS: Mapping[str, str | int] = {"float32": 32, "bfloat16": "bf16", "float16": 16}
NORMS: Mapping[tuple[str, bool], str] = {
    ("LayerNorm", False): "layernorm",
    ("LayerNorm", True): "layernorm1p",
    ("RMSNorm", False): "rmsnorm",
    ("RMSNorm", True): "rmsnorm",  # And a field of its own.
}
ACTIVATIONS: Mapping[tuple[str, bool], str] = {
    ("gelu", False): "gelu",
    ("gelu_tanh", False): "gelu",
    ("relu2", False): "squared-relu",
    ("silu", True): "fast-swiglu",
    ("gelu", True): "fast-geglu",
    ("gelu_tanh", True): "fast-geglu",
}
# What NeMo asks of a config although a model that is only read does not need it.
NEEDED: Mapping[str, Any] = {
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "sequence_parallel": False,
    "activations_checkpoint_granularity": None,
    "activations_checkpoint_method": None,
    "activations_checkpoint_num_layers": None,
    "activations_checkpoint_layers_per_pipeline": None,
    "optim": {"name": "fused_adam", "lr": 0.0002},
}


def check(config: GPTConfig, division: Division) -> None:
    """Refuse what the config cannot say, and a division that a `.nemo` cannot have."""
    if division.vpp != 1:
        raise ConfigError(
            f"--to nemo has no virtual pipeline (--vpp {division.vpp}): NeMo 1 gave it up; leave it"
            " out, or choose --to megatron-dist"
        )
    if division.ep != 1:
        raise ConfigError(
            f"--to nemo has no expert ranks (--ep {division.ep}): a .nemo has no files for them; "
            "leave it out, or choose --to megatron-dist"
        )
    plain: dict[str, Any] = {"rope_scaling": None}
    if config.gated and config.activation in ("gelu", "gelu_tanh"):
        plain["activation"] = "silu"
    check_megatron(config.with_fields(**plain), division)


def model_config(
    config: GPTConfig,
    division: Division,
    *,
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
    tokenizer: Mapping[str, Any] | None = None,
    tokens: int = 0,
) -> dict[str, Any]:
    """Call `check` before. `tokenizer` is its section, `tokens` how many that has, 0 if unknown."""
    said = {
        "target": TARGET,
        "mcore_gpt": True,
        "megatron_amp_O2": False,
        "megatron_legacy": False,
        "transformer_engine": True,
        "precision": PRECISIONS[config.dtype],
        "tensor_model_parallel_size": division.tp,
        "pipeline_model_parallel_size": division.pp,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "tokenizer": dict(tokenizer or {"library": None, "type": None, "model": None}),
        **NEEDED,
        **_vocabulary(config, division.tp, vocabulary_multiple, tokens),
        **_sizes(config),
        **_function(config),
        **_positions(config),
        **(_experts(config) if any(config.moe_layers) else {}),
    }
    split = stages(config, division).arguments
    for end in ("first", "last"):
        count = split[f"decoder_{end}_pipeline_num_layers"]
        if count is not None:
            said[f"num_layers_in_{end}_pipeline_stage"] = count
    # NeMo's usual layers are all of one kind, and have no norms of queries and keys.
    if config.qk_layernorm or len(set(config.moe_layers)) > 1:
        said["name"] = "decoder_block_gpt"
    return said


def notes(config: GPTConfig, division: Division) -> list[str]:
    """What a user has to know before NeMo loads it."""
    found = []
    if config.num_query_groups % division.tp:
        found.append(
            f"{config.num_query_groups} query groups on {division.tp} tensor ranks: Megatron-Core "
            "from 0.16 on reads it, and NeMo 1 came with older ones"
        )
    if any(config.moe_layers) and config.moe_shared_expert_gate:
        found.append(
            "shared experts have a gate: NeMo's Megatron-Core needs moe_shared_expert_gate, which "
            "came late; without it the gate's weights are not loaded"
        )
    if config.qk_layernorm or len(set(config.moe_layers)) > 1:
        found.append("its layers are of NeMo's decoder_block_gpt, which came with 2.0")
    return found


def _vocabulary(config: GPTConfig, tp: int, multiple: int, tokens: int) -> dict[str, Any]:
    """NeMo pads its tokenizer's size; where that gives other rows, it is told how many there are.

    The true size, which it does not keep, is beside that for our own reader.
    """
    rows = padded_vocabulary(config, tp, multiple)
    step = multiple * tp
    said = {"make_vocab_size_divisible_by": multiple, "true_vocab_size": config.vocab_size}
    if -(-tokens // step) * step != rows:
        said["override_vocab_size"] = rows
    return said


def _sizes(config: GPTConfig) -> dict[str, Any]:
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


def _function(config: GPTConfig) -> dict[str, Any]:
    """Norms, activation, biases, attention."""
    said: dict[str, Any] = {
        "normalization": NORMS[config.normalization, config.layernorm_zero_centered_gamma],
        "layernorm_zero_centered_gamma": config.layernorm_zero_centered_gamma,
        "layernorm_epsilon": config.layernorm_epsilon,
        "activation": ACTIVATIONS[config.activation, config.gated],
        "openai_gelu": False,
        "onnx_safe": False,
        # Not only how, but which of the two GELUs is computed.
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
        said["window_size"] = [config.window_size - 1, 0]  # Those before a token.
    return said


def _positions(config: GPTConfig) -> dict[str, Any]:
    said: dict[str, Any] = {"position_embedding_type": config.position_embedding_type}
    if not config.rotary:
        return said
    said |= {
        "rotary_percentage": config.rotary_percent,
        "rotary_base": _whole(config.rotary_base),
        "rotary_interleaved": config.rotary_interleaved,
        "seq_len_interpolation_factor": None,
    }
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        said["seq_len_interpolation_factor"] = _whole(scaling.factor)
    elif scaling is not None:
        said |= {
            "scale_positional_embedding": True,
            "scale_factor": _whole(scaling.factor),
            "low_freq_factor": _whole(scaling.low_freq_factor),
            "high_freq_factor": _whole(scaling.high_freq_factor),
            "old_context_len": scaling.original_max_position_embeddings,
        }
    return said


def _experts(config: GPTConfig) -> dict[str, Any]:
    said: dict[str, Any] = {
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
        said["moe_router_topk_scaling_factor"] = config.moe_router_topk_scaling_factor
    if config.moe_shared_expert_intermediate_size:
        said["moe_shared_expert_intermediate_size"] = config.moe_shared_expert_intermediate_size
        said["moe_shared_expert_gate"] = config.moe_shared_expert_gate
    return said


def _whole(value: float) -> float:
    """As an int where it is one, which is what NeMo's own configs have."""
    return int(value) if value == int(value) else value
