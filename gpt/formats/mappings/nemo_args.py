"""NeMo's and Megatron-Bridge's words for a network, turned into those of Megatron's arguments.

NeMo 1 has a config of its own; NeMo 2 and the Bridge write Megatron-Core's TransformerConfig and
the model's own fields. What they name and Preamble does not compute is refused in their words. A
default counts only where the format has one: a preset class that wrote down half is asked.
It knows no files.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpt.errors import CheckpointError
from gpt.formats.mappings.megatron_args import (
    DESCRIBING,
    REFUSED,
    Answer,
    Args,
    Weights,
    describe,
    infer,
)
from gpt.formats.mappings.megatron_names import HEAD
from gpt.formats.mappings.nemo_yaml import Fields
from gpt.settings import shown

# Fields that have the same name and meaning in all dialects.
SHARED = {*DESCRIBING, *REFUSED, "hidden_dropout", "attention_dropout", "disable_bias_linear"}
SHARED |= {"moe_expert_capacity_factor", "moe_router_load_balancing_type", "bias_activation_fusion"}
SHARED -= {"spec", "padded_vocab_size", "vocab_size", "position_embedding_type", "normalization"}
SHARED -= {"num_query_groups", "group_query_attention", "bias_gelu_fusion", "swiglu", "onnx_safe"}
SHARED -= {"openai_gelu", "squared_relu", "use_rope_scaling", "untie_embeddings_and_output_weights"}

# What the words of a NeMo 1 config are called in Megatron's, for messages.
CALLED = {
    "rotary_percent": "rotary_percentage",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "add_bias_linear": "bias",
    "add_qkv_bias": "qkv_bias",
    "activation_func": "activation",
    "num_experts": "num_moe_experts",
    "vocab_size": "override_vocab_size",
    "seq_length": "encoder_seq_length",
}
# A field of GPTConfig to ask for, where the config's own refers to something outside its file.
ASKED = {
    "encoder_seq_length": "max_position_embeddings",
    "rotary_percentage": "rotary_percent",
    "seq_len_interpolation_factor": "rope_scaling",
    "override_vocab_size": "vocab_size",
    "bias": "mlp_bias",
    "share_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
    "num_moe_experts": "num_experts",
    "openai_gelu": "activation",
    "bias_activation_fusion": "activation",
    "onnx_safe": "activation",
    "activation_func": "activation",
    "gated_linear_unit": "gated",
    "qkv_bias": "qkv_bias",
    "seq_length": "max_position_embeddings",
    "scale_positional_embedding": "rope_scaling",
    "rope_scaling": "rope_scaling",
    "moe_router_enable_expert_bias": "moe_router_expert_bias",
    **{
        name: name
        for name in (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
            *("num_query_groups", "kv_channels", "max_position_embeddings", "normalization"),
            *("layernorm_epsilon", "activation", "position_embedding_type", "rotary_base"),
            *("rotary_interleaved", "qk_layernorm", "window_size", "moe_router_topk"),
            *("layernorm_zero_centered_gamma", "moe_ffn_hidden_size", "vocab_size"),
            *("rotary_percent", "moe_router_pre_softmax", "moe_router_score_function"),
            *("moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size"),
        )
    },
}

# Fields that change nothing in what is computed here.
IDLE = {
    *("hidden_dropout", "attention_dropout", "make_vocab_size_divisible_by", "_target_", "name"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "target"),
    *("expert_tensor_parallel_size", "moe_expert_capacity_factor", "tokenizer"),
    "moe_router_load_balancing_type",
}

NORMS: Mapping[str, tuple[str, bool]] = {
    "layernorm": ("LayerNorm", False),
    "low_precision_layernorm": ("LayerNorm", False),
    "layernorm1p": ("LayerNorm", True),
    "rmsnorm": ("RMSNorm", False),
}
ACTIVATIONS: Mapping[str, tuple[str, bool]] = {
    "gelu": ("gelu", False),
    "squared-relu": ("squared_relu", False),
    "geglu": ("gelu", True),
    "fast-geglu": ("gelu", True),
    "swiglu": ("silu", True),
    "fast-swiglu": ("silu", True),
}
# Fields of NeMo 1 that change the function, and the values that Preamble computes.
NEMO_1_REFUSED: Mapping[str, tuple[object, ...]] = {
    "transformer_block_type": ("pre_ln",),
    "normalize_attention_scores": (True,),
    "headscale": (False,),
    "attention_type": ("multihead",),
    "encoder_attn_mask_type": ("causal",),
    "fsdp": (False,),
    "moe_frequency": (1,),
    "hyena": (False,),
    "rotary_base_per_layer": (),
    "mcore_customization_config": (),
}
POSITIONS: Mapping[str, str] = {
    "learned_absolute": "learned_absolute",
    "learned_parameters": "learned_absolute",
    "rope": "rope",
    "none": "none",
}
# Models whose classes compute what no field says: scaled embeddings, other layers, other stacks.
FOREIGN = re.compile(
    r"(?i)gemma|mamba|hyena|ssm|griffin|falcon|retro|bert|t5|vision|llava|llama4|gpt_?oss|diffusion"
    r"|embedding|rerank|olmoe|ministral"
)
# What gives layers that compute as Megatron-Core's own, whoever's kernels they use.
LAYERS_OF = re.compile(
    r"(default|local|transformer_engine|transformer_engine_full|transformer_engine_layer"
    r"|modelopt_transformer|quantization)_(layer_)?spec|ModuleSpec"
    r"|get_gpt_(layer_local|layer_with_transformer_engine|layer_with_inference|decoder_block"
    r"|full_te_layer_autocast|modelopt|layer_modelopt)_spec"
)


def describe_nemo_1(fields: Fields, weights: Weights, tokens: int = 0) -> Answer:
    """The architecture by a `model_config.yaml`. `tokens` are the tokenizer's, 0 if not known."""
    _refuse(fields)
    values = {name: fields.get(name) for name in SHARED if name in fields}
    norm = fields.text("normalization", "layernorm").lower()
    if norm not in NORMS:
        raise _refused(fields, "normalization")
    values["normalization"], centred = NORMS[norm]
    centred = centred or fields.get("layernorm_zero_centered_gamma") is True
    values["layernorm_zero_centered_gamma"] = centred
    positions = fields.text("position_embedding_type", "learned_absolute")
    if positions not in POSITIONS:
        raise _refused(fields, "position_embedding_type")
    function, gated, fused = _activation_1(fields, weights.legacy)
    share = fields.get("share_embeddings_and_output_weights", True)
    values |= {
        "position_embedding_type": POSITIONS[positions],
        "activation_func": function,
        "gated_linear_unit": gated,
        "bias_activation_fusion": fused,
        "add_bias_linear": fields.get("bias", True),
        # Versions read it from different fields; one that is there was trained.
        "add_qkv_bias": fields.get("qkv_bias") or weights.has("linear_qkv.bias"),
        "seq_length": fields.get("encoder_seq_length"),
        "rotary_percent": fields.get("rotary_percentage"),
        "rotary_seq_len_interpolation_factor": fields.get("seq_len_interpolation_factor"),
        "use_rope_scaling": fields.get("scale_positional_embedding"),
        "num_experts": fields.get("num_moe_experts"),
        # NeMo keeps the padded size alone; our own writer puts the true one beside it.
        "vocab_size": fields.get("true_vocab_size") or fields.get("override_vocab_size") or tokens,
        **_groups(fields),
        "untie_embeddings_and_output_weights": not share if isinstance(share, bool) else share,
    }
    # Its own older classes obey what Megatron's of their time did not.
    answer = describe(Args(values, fields.where, CALLED), replace(weights, legacy=False))
    if _unsure_of_gelu(fields, function, weights.legacy):
        answer.unknown.append("activation")
    if "rope_scaling" in answer.fields and values["use_rope_scaling"]:
        _llama3(fields, answer)
    _ask_unanswered(fields, answer)
    return answer


def describe_transformer(fields: Fields, weights: Weights) -> Answer:
    """The architecture by a TransformerConfig and its model's fields, as NeMo 2 and Bridge write.

    What shapes tell need not be there; for what they do not, absent is not the default.
    """
    kind = fields.text("_target_")
    if FOREIGN.search(kind.rpartition(".")[2]):
        raise CheckpointError(
            f"{fields.where}: _target_ is {kind[-60:]}, whose own code Preamble does not compute; "
            "it reads GPT models such as Llama, Mistral, Mixtral, Nemotron and Qwen"
        )
    layers = _function(fields.get("transformer_layer_spec"))
    if layers is not None and not LAYERS_OF.fullmatch(str(layers)):
        raise CheckpointError(
            f"{fields.where}: transformer_layer_spec is {shown(layers)}, whose layers may compute "
            "something else than Megatron-Core's own; if they do not, give a whole config"
        )
    share = fields.get("share_embeddings_and_output_weights")
    values = {name: fields.get(name) for name in SHARED if name in fields}
    values |= {
        "num_experts": fields.get("num_moe_experts"),
        "normalization": fields.get("normalization"),
        "position_embedding_type": fields.get("position_embedding_type"),
        "activation_func": _function(fields.get("activation_func")),
        "gated_linear_unit": fields.get("gated_linear_unit"),
        "rotary_seq_len_interpolation_factor": fields.get("seq_len_interpolation_factor"),
        "use_rope_scaling": fields.get("rope_scaling"),
        "vocab_size": fields.get("vocab_size"),
        "untie_embeddings_and_output_weights": not share if isinstance(share, bool) else share,
        **_groups(fields),
    }
    called = {name: name for name in values} | {"num_experts": "num_moe_experts"}
    answer = describe(Args(values, fields.where, called), weights)
    _llama3(fields, answer)
    seen = infer(weights).fields
    seen["untie_embeddings_and_output_weights"] = HEAD in weights.parts
    if fields.get("activation_func") is None:
        answer.fields["gated"] = fields.get("gated_linear_unit", seen["gated"])
    if weights.positions:
        seen["position_embedding_type"] = "learned_absolute"
    for name, told_by in _told_by(fields, answer, weights).items():
        if any(told in fields for told in told_by):
            continue
        if name in seen:
            answer.fields[name] = seen[name]
        else:
            answer.unknown.append(name)
    answer.notes.pop("activation", None)
    whole_layers = fields.get("use_transformer_engine_full_layer_spec") is True
    if whole_layers and answer.fields.get("activation") == "gelu":
        # The engine's layer is told no activation, its own is the tanh form; was there an engine?
        answer.unknown += ["activation"] if "activation" not in answer.unknown else []
    _ask_unanswered(fields, answer)
    return answer


def _activation_1(fields: Fields, legacy: bool) -> tuple[str, bool, Any]:
    """The function, whether it gates, and whether the kernel that adds the bias computes it."""
    activation = fields.text("activation", "gelu")
    fused = fields.get("bias_activation_fusion", True)
    engine = legacy and fields.get("transformer_engine") is True
    if engine or fields.text("name").endswith("full_te_layer_autocast"):
        # The engine's layer is told no activation; its own is the tanh form.
        if activation != "gelu":
            raise _refused(fields, "activation")
        return "openai_gelu", False, False
    if activation not in ACTIVATIONS:
        raise _refused(fields, "activation")
    function, gated = ACTIVATIONS[activation]
    if legacy and fields.get("openai_gelu") is True:
        function = "openai_gelu"  # Before all others.
    elif legacy and fields.get("onnx_safe") is True and function != "gelu":
        raise _refused(fields, "onnx_safe")
    if legacy and fused is True and activation not in ("gelu", "geglu", "fast-geglu"):
        raise CheckpointError(
            f"{fields.where}: activation is {activation} with bias_activation_fusion, where NeMo's "
            "own older layers apply no activation at all, which Preamble does not compute; the "
            "model cannot be read"
        )
    return function, gated, fused


def _unsure_of_gelu(fields: Fields, function: str, legacy: bool) -> bool:
    """Before 2.0 NeMo did not pass `openai_gelu` on to Megatron-Core; now it goes before all."""
    if legacy or fields.get("openai_gelu") is not True:
        return False
    fused = fields.get("bias_activation_fusion", True) and fields.get("bias", True)
    return not (fused and function == "gelu")


def tokens_of(fields: Fields, tokens: int, rows: int) -> int:
    """A tokenizer's count, if NeMo would have padded it to these rows; else 0, not known."""
    multiple = fields.get("make_vocab_size_divisible_by", 128)
    split = fields.get("tensor_model_parallel_size", 1)
    if type(multiple) is not int or type(split) is not int or multiple * split <= 0:
        return 0
    return tokens if -(-tokens // (multiple * split)) * multiple * split == rows else 0


def _told_by(fields: Fields, answer: Answer, weights: Weights) -> dict[str, tuple[str, ...]]:
    """Fields of GPTConfig that must not be guessed, and the names that tell them."""
    rotary = str(answer.fields.get("position_embedding_type")).endswith("rope")
    rotary = rotary or not (weights.positions or "position_embedding_type" in fields)
    named = {
        "num_layers": ("num_layers",),
        "hidden_size": ("hidden_size",),
        "num_attention_heads": ("num_attention_heads",),
        "num_query_groups": ("num_query_groups",),
        "activation": ("activation_func",),
        "gated": ("gated_linear_unit",),
        "normalization": ("normalization",),
        "layernorm_epsilon": ("layernorm_epsilon", "norm_epsilon"),
        "layernorm_zero_centered_gamma": ("layernorm_zero_centered_gamma",),
        "position_embedding_type": ("position_embedding_type",),
        "untie_embeddings_and_output_weights": ("share_embeddings_and_output_weights",),
        "qkv_bias": ("add_bias_linear",),
        "proj_bias": ("add_bias_linear",),
        "mlp_bias": ("add_bias_linear",),
        "qk_layernorm": ("qk_layernorm",),
    }
    if not any(weights.moe_layers):
        named["ffn_hidden_size"] = ("ffn_hidden_size",)
    else:
        named["moe_router_topk"] = ("moe_router_topk",)
        named["moe_router_pre_softmax"] = ("moe_router_pre_softmax",)
    if rotary:
        named["rotary_base"] = ("rotary_base",)
        named["rotary_percent"] = ("rotary_percent",)
    if not weights.positions:
        named["max_position_embeddings"] = ("seq_length", "max_position_embeddings")
    return named


def _groups(fields: Fields) -> dict[str, Any]:
    """Null is one group for each head."""
    groups = fields.get("num_query_groups")
    return {"group_query_attention": groups is not None, "num_query_groups": groups}


def _llama3(fields: Fields, answer: Answer) -> None:
    """NeMo's Llama 3.1 says how it stretches in four fields of its own."""
    names = ("scale_factor", "low_freq_factor", "high_freq_factor", "old_context_len")
    values = [fields.get(name) for name in names]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        factor, low, high, context = values
        answer.fields["rope_scaling"] = {
            "kind": "llama3",
            "factor": float(factor),
            "low_freq_factor": float(low),
            "high_freq_factor": float(high),
            "original_max_position_embeddings": int(context),
        }
    elif any(value is not None for value in values):
        answer.unknown.append("rope_scaling")


def _function(value: Any) -> Any:
    """The last part of a function's name, however it was written down."""
    if isinstance(value, Mapping):
        if value.get("approximate") == "tanh":
            return "openai_gelu"
        value = value.get("_target_", value.get("name"))
    return value.rpartition(".")[2] if isinstance(value, str) else value


def _refuse(fields: Fields) -> None:
    for name, computed in NEMO_1_REFUSED.items():
        value = fields.get(name)
        if isinstance(value, Mapping):
            value = {key: one for key, one in value.items() if one} or None
        if value is not None and value not in computed:
            raise _refused(fields, name)
    for name in ("name", "target"):
        if FOREIGN.search(fields.text(name).rpartition(".")[2]):
            raise _refused(fields, name)


def _refused(fields: Fields, name: str) -> CheckpointError:
    return CheckpointError(
        f"{fields.where}: {name} is {shown(fields.get(name))}, which Preamble does not "
        "compute; the model cannot be read"
    )


def _ask_unanswered(fields: Fields, answer: Answer) -> None:
    for name, reference in fields.unanswered.items():
        if name in ASKED and ASKED[name] not in answer.unknown:
            answer.unknown.append(ASKED[name])
        elif name not in ASKED and name not in IDLE:
            raise CheckpointError(
                f"{fields.where}: {name} is {shown(reference)}, which the file itself does not "
                "answer; write its value there, or give a whole config"
            )
