"""NeMo config mapping: converts NeMo and Megatron-Bridge config fields to GPTConfig fields.

NeMo 1 has its own config format. NeMo 2 and Megatron-Bridge write the fields of Megatron-Core's
TransformerConfig, and fields of their model classes, such as vocab_size and seq_length. The fields
of both formats are converted to Megatron args first. A field that Preamble does not support is
refused, and the error uses the name of the field in the config. An absent field of NeMo 1 has NeMo
1's default. In NeMo 2 and Megatron-Bridge each preset class, such as NeMo 2's Llama3Config8B, has
its own defaults. If a config does not record them, an error asks the user for the missing fields.
The module opens no files.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpt.errors import CheckpointError
from gpt.formats.mappings.hybrid_args import config_from_args
from gpt.formats.mappings.megatron_args import (
    ARCHITECTURE_ARGS,
    HYBRID_ARGS,
    UNSUPPORTED_ARGS,
    MegatronArgs,
    PartialConfig,
    WeightShapes,
    config_from_shapes,
)
from gpt.formats.mappings.megatron_names import HEAD
from gpt.formats.mappings.nemo_yaml import NemoConfig
from gpt.formats.mappings.unsupported_architectures import MARKER_ARGS, refuse_class
from gpt.parallel.vocabulary_padding import VOCABULARY_MULTIPLE, padded_vocab_size
from gpt.settings import short_repr

# Fields with the same name and meaning in Megatron args and in both NeMo configs.
SHARED_FIELDS = {
    *ARCHITECTURE_ARGS,
    *UNSUPPORTED_ARGS,
    *MARKER_ARGS,
    "hidden_dropout",
    "attention_dropout",
    "disable_bias_linear",
    "moe_expert_capacity_factor",
    "moe_router_load_balancing_type",
    "bias_activation_fusion",
} - {
    "spec",
    "padded_vocab_size",
    "vocab_size",
    "position_embedding_type",
    "normalization",
    "num_query_groups",
    "group_query_attention",
    "bias_gelu_fusion",
    "swiglu",
    "onnx_safe",
    "openai_gelu",
    "squared_relu",
    "use_rope_scaling",
    "untie_embeddings_and_output_weights",
}

# NeMo 1's names of Megatron args, by arg, for error messages.
NEMO1_FIELD_NAMES = {
    "rotary_percent": "rotary_percentage",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "add_bias_linear": "bias",
    "add_qkv_bias": "qkv_bias",
    "activation_func": "activation",
    "num_experts": "num_moe_experts",
    "vocab_size": "override_vocab_size",
    "seq_length": "encoder_seq_length",
}
# Maps config fields to fields of GPTConfig. If the value of a config field is a reference ${...} to
# a value that the file does not contain, the user must give the field of GPTConfig.
GPT_CONFIG_FIELDS = {
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
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "max_position_embeddings",
            "normalization",
            "layernorm_epsilon",
            "activation",
            "position_embedding_type",
            "rotary_base",
            "rotary_interleaved",
            "qk_layernorm",
            "window_size",
            "moe_router_topk",
            "layernorm_zero_centered_gamma",
            "moe_ffn_hidden_size",
            "vocab_size",
            "rotary_percent",
            "moe_router_pre_softmax",
            "moe_router_score_function",
            "moe_router_topk_scaling_factor",
            "moe_shared_expert_intermediate_size",
        )
    },
}

# Fields without an effect on inference. If such a field is an unresolved reference, it is ignored.
IGNORED_FIELDS = {
    "hidden_dropout",
    "attention_dropout",
    "make_vocab_size_divisible_by",
    "_target_",
    "name",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "target",
    "expert_tensor_parallel_size",
    "moe_expert_capacity_factor",
    "tokenizer",
    "moe_router_load_balancing_type",
}

# The key of the activation's name in Megatron-Bridge's `extra_checkpoint_metadata`.
BRIDGE_ACTIVATION_KEY = "megatron_bridge.activation_func"

# NeMo 1's norms: (Megatron's name, whether gamma - 1 is stored).
NORM_TYPES: Mapping[str, tuple[str, bool]] = {
    "layernorm": ("LayerNorm", False),
    "low_precision_layernorm": ("LayerNorm", False),
    "layernorm1p": ("LayerNorm", True),
    "rmsnorm": ("RMSNorm", False),
}
# NeMo 1's activations: (function, whether the MLP is gated).
ACTIVATIONS: Mapping[str, tuple[str, bool]] = {
    "gelu": ("gelu", False),
    "squared-relu": ("squared_relu", False),
    "geglu": ("gelu", True),
    "fast-geglu": ("gelu", True),
    "swiglu": ("silu", True),
    "fast-swiglu": ("silu", True),
}
# Fields of NeMo 1 that change the computed function, and the values that Preamble supports.
NEMO1_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
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
POSITION_TYPES: Mapping[str, str] = {
    "learned_absolute": "learned_absolute",
    "learned_parameters": "learned_absolute",
    "rope": "rope",
    "none": "none",
}
# Model classes with unsupported computations, such as scaled embeddings, that no field records.
# `unsupported_architectures` has the classes of other architectures.
UNSUPPORTED_MODELS = re.compile(
    r"(?i)gemma|hyena|griffin|falcon|retro|vision|llava|gpt_?oss|diffusion|embedding|rerank|olmoe"
    r"|ministral"
)
# Classes of Megatron-Core's HybridModel under its current and its former names. They are supported
# if the config has the pattern of the layers, because the pattern tells whether a layer is Mamba.
HYBRID_CLASSES = re.compile(r"(Hybrid|Mamba)Model(Provider|Config)?|SSMConfig")
# Specs of HybridModel's layers, from Megatron-Core and Megatron-Bridge.
SUPPORTED_STACK_SPECS = re.compile(
    r"ModuleSpec|(get_default_|transformer_engine_)?(hybrid|mamba)_(inference_)?stack_spec"
)
# Layer specs that compute the same function as Megatron-Core's layers; only the kernels differ.
SUPPORTED_LAYER_SPECS = re.compile(
    r"(default|local|transformer_engine|transformer_engine_full|transformer_engine_layer"
    r"|modelopt_transformer|quantization)_(layer_)?spec|ModuleSpec"
    r"|get_gpt_(layer_local|layer_with_transformer_engine|layer_with_inference|decoder_block"
    r"|full_te_layer_autocast|modelopt|layer_modelopt)_spec"
)


def config_from_nemo1(
    fields: NemoConfig, weights: WeightShapes, tokenizer_vocab_size: int = 0
) -> PartialConfig:
    """Convert a NeMo 1 `model_config.yaml`; `tokenizer_vocab_size` is 0 if unknown."""
    _refuse_unsupported(fields)
    values = {name: fields.get(name) for name in SHARED_FIELDS if name in fields}
    norm = fields.text("normalization", "layernorm").lower()
    if norm not in NORM_TYPES:
        raise _unsupported_field_error(fields, "normalization")
    values["normalization"], is_zero_centered = NORM_TYPES[norm]
    is_zero_centered = is_zero_centered or fields.get("layernorm_zero_centered_gamma") is True
    values["layernorm_zero_centered_gamma"] = is_zero_centered
    positions = fields.text("position_embedding_type", "learned_absolute")
    if positions not in POSITION_TYPES:
        raise _unsupported_field_error(fields, "position_embedding_type")
    activation, gated, fuses_bias = _nemo1_activation(fields, weights.legacy)
    share_embeddings = fields.get("share_embeddings_and_output_weights", True)
    values |= {
        "position_embedding_type": POSITION_TYPES[positions],
        "activation_func": activation,
        "gated_linear_unit": gated,
        "bias_activation_fusion": fuses_bias,
        "add_bias_linear": fields.get("bias", True),
        # Only some NeMo versions read `qkv_bias`, so a QKV bias in the weights counts too.
        "add_qkv_bias": fields.get("qkv_bias") or weights.has_tensor("linear_qkv.bias"),
        "seq_length": fields.get("encoder_seq_length"),
        "rotary_percent": fields.get("rotary_percentage"),
        "rotary_seq_len_interpolation_factor": fields.get("seq_len_interpolation_factor"),
        "use_rope_scaling": fields.get("scale_positional_embedding"),
        "num_experts": fields.get("num_moe_experts"),
        # NeMo records only the padded size. Preamble's NeMo writer adds `true_vocab_size`.
        "vocab_size": fields.get("true_vocab_size")
        or fields.get("override_vocab_size")
        or tokenizer_vocab_size,
        **_query_group_args(fields),
        "untie_embeddings_and_output_weights": not share_embeddings
        if isinstance(share_embeddings, bool)
        else share_embeddings,
    }
    # `legacy` is False, because NeMo's legacy classes use args that Megatron's legacy classes
    # ignore.
    partial_config = config_from_args(
        MegatronArgs(values, fields.location, NEMO1_FIELD_NAMES), replace(weights, legacy=False)
    )
    if _is_gelu_ambiguous(fields, activation, weights.legacy):
        partial_config.undetermined_fields.append("activation")
    if "rope_scaling" in partial_config.fields and values["use_rope_scaling"]:
        _set_llama3_scaling(fields, partial_config)
    _handle_unresolved(fields, partial_config)
    return partial_config


def bridge_model_fields(root_fields: NemoConfig) -> NemoConfig:
    """Return the model's fields in a `run_config.yaml`.

    Newer versions of Megatron-Bridge nest the fields of TransformerConfig in `transformer`, and
    record the activation by name, because a function cannot be written to the file.
    """
    model_fields = root_fields.section("model")
    transformer = model_fields.get("transformer")
    if not isinstance(transformer, Mapping):
        return model_fields
    record = {**transformer, **model_fields.record}
    metadata = model_fields.get("extra_checkpoint_metadata")
    activation = metadata.get(BRIDGE_ACTIVATION_KEY) if isinstance(metadata, Mapping) else None
    if record.get("activation_func") is None and activation is not None:
        record["activation_func"] = activation
    return NemoConfig(record, model_fields.location, root_fields.scopes)


def config_from_transformer(fields: NemoConfig, weights: WeightShapes) -> PartialConfig:
    """Convert a TransformerConfig and model fields of NeMo 2 or Megatron-Bridge.

    An absent field is inferred from the shapes if they determine it. Otherwise it is undetermined;
    the default of the class is not used.
    """
    target_class = fields.text("_target_")
    class_name = target_class.rpartition(".")[2]
    has_pattern = any(fields.get(name) is not None for name in HYBRID_ARGS[:2])
    if not (has_pattern and HYBRID_CLASSES.fullmatch(class_name)):
        refuse_class(target_class, fields.location, "_target_")
    if UNSUPPORTED_MODELS.search(class_name):
        raise CheckpointError(
            f"{fields.location}: _target_ is {target_class[-60:]}, which Preamble does not "
            "support; give a GPT model such as Llama, Mistral, Mixtral, Nemotron or Qwen"
        )
    for name, supported_specs in (
        ("transformer_layer_spec", SUPPORTED_LAYER_SPECS),
        ("hybrid_stack_spec", SUPPORTED_STACK_SPECS),
        ("mamba_stack_spec", SUPPORTED_STACK_SPECS),
    ):
        spec = _function_name(fields.get(name))
        if spec is not None and not supported_specs.fullmatch(str(spec)):
            raise CheckpointError(
                f"{fields.location}: {name} is {short_repr(spec)}, whose layers may differ from "
                "Megatron-Core's; if they compute the same function, give a complete config with "
                "--config-json"
            )
    share_embeddings = fields.get("share_embeddings_and_output_weights")
    values = {name: fields.get(name) for name in SHARED_FIELDS if name in fields}
    values |= {
        "num_experts": fields.get("num_moe_experts"),
        "normalization": fields.get("normalization"),
        "position_embedding_type": fields.get("position_embedding_type"),
        "activation_func": _function_name(fields.get("activation_func")),
        "gated_linear_unit": fields.get("gated_linear_unit"),
        "rotary_seq_len_interpolation_factor": fields.get("seq_len_interpolation_factor"),
        "use_rope_scaling": fields.get("rope_scaling"),
        "vocab_size": fields.get("vocab_size"),
        "untie_embeddings_and_output_weights": not share_embeddings
        if isinstance(share_embeddings, bool)
        else share_embeddings,
        **_query_group_args(fields),
    }
    display_names = {name: name for name in values} | {"num_experts": "num_moe_experts"}
    partial_config = config_from_args(MegatronArgs(values, fields.location, display_names), weights)
    _set_llama3_scaling(fields, partial_config)
    inferred_fields = config_from_shapes(weights).fields
    inferred_fields["untie_embeddings_and_output_weights"] = HEAD in weights.rank_shapes
    if fields.get("activation_func") is None:
        partial_config.fields["gated"] = fields.get("gated_linear_unit", inferred_fields["gated"])
    if weights.position_rows:
        inferred_fields["position_embedding_type"] = "learned_absolute"
    for name, sources in _field_sources(fields, partial_config, weights).items():
        if any(source in fields for source in sources):
            continue
        if name in inferred_fields:
            partial_config.fields[name] = inferred_fields[name]
        else:
            partial_config.undetermined_fields.append(name)
    partial_config.notes.pop("activation", None)
    uses_full_te_layers = fields.get("use_transformer_engine_full_layer_spec") is True
    # If Transformer Engine was installed, its TransformerLayer gets no activation argument and uses
    # the tanh approximation. The config does not record whether it was installed.
    is_ambiguous_gelu = uses_full_te_layers and partial_config.fields.get("activation") == "gelu"
    if is_ambiguous_gelu and "activation" not in partial_config.undetermined_fields:
        partial_config.undetermined_fields.append("activation")
    _handle_unresolved(fields, partial_config)
    return partial_config


def _nemo1_activation(fields: NemoConfig, legacy: bool) -> tuple[str, bool, Any]:
    """Return the activation function, whether the MLP is gated, and whether bias fusion is on."""
    activation = fields.text("activation", "gelu")
    fuses_bias = fields.get("bias_activation_fusion", True)
    uses_te = legacy and fields.get("transformer_engine") is True
    if uses_te or fields.text("name").endswith("full_te_layer_autocast"):
        # Transformer Engine's TransformerLayer gets no activation argument and uses the tanh
        # approximation.
        if activation != "gelu":
            raise _unsupported_field_error(fields, "activation")
        return "openai_gelu", False, False
    if activation not in ACTIVATIONS:
        raise _unsupported_field_error(fields, "activation")
    function, gated = ACTIVATIONS[activation]
    if legacy and fields.get("openai_gelu") is True:
        function = "openai_gelu"  # The field openai_gelu has precedence over `activation`.
    elif legacy and fields.get("onnx_safe") is True and function != "gelu":
        raise _unsupported_field_error(fields, "onnx_safe")
    if legacy and fuses_bias is True and activation not in ("gelu", "geglu", "fast-geglu"):
        raise CheckpointError(
            f"{fields.location}: activation is {activation} with bias_activation_fusion, for "
            "which NeMo's legacy layers apply no activation; Preamble does not support this: give "
            "a model without this combination"
        )
    return function, gated, fuses_bias


def _is_gelu_ambiguous(fields: NemoConfig, function: str, legacy: bool) -> bool:
    """Tell whether the effect of `openai_gelu` depends on the NeMo version.

    NeMo before 2.0 did not pass `openai_gelu` to Megatron-Core; in NeMo 2.0 and newer it has
    precedence over `activation`.
    """
    if legacy or fields.get("openai_gelu") is not True:
        return False
    fuses_bias = fields.get("bias_activation_fusion", True) and fields.get("bias", True)
    return not (fuses_bias and function == "gelu")


def matching_vocab_size(fields: NemoConfig, tokenizer_vocab_size: int, rows: int) -> int:
    """Return the tokenizer's size if NeMo would pad this size to `rows`, else 0 (unknown)."""
    multiple = fields.get("make_vocab_size_divisible_by", VOCABULARY_MULTIPLE)
    tp = fields.get("tensor_model_parallel_size", 1)
    if type(multiple) is not int or type(tp) is not int or multiple * tp <= 0:
        return 0
    is_padded_to_rows = padded_vocab_size(tokenizer_vocab_size, tp, multiple) == rows
    return tokenizer_vocab_size if is_padded_to_rows else 0


def _field_sources(
    fields: NemoConfig, partial_config: PartialConfig, weights: WeightShapes
) -> dict[str, tuple[str, ...]]:
    """Return the required GPTConfig fields, each with the config fields that determine it."""
    uses_rope = str(partial_config.fields.get("position_embedding_type")).endswith("rope")
    may_use_rope = not (weights.position_rows or "position_embedding_type" in fields)
    sources = {
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
        sources["ffn_hidden_size"] = ("ffn_hidden_size",)
    else:
        sources["moe_router_topk"] = ("moe_router_topk",)
        sources["moe_router_pre_softmax"] = ("moe_router_pre_softmax",)
    if uses_rope or may_use_rope:
        sources["rotary_base"] = ("rotary_base",)
        sources["rotary_percent"] = ("rotary_percent",)
    if not weights.position_rows:
        sources["max_position_embeddings"] = ("seq_length", "max_position_embeddings")
    return sources


def _query_group_args(fields: NemoConfig) -> dict[str, Any]:
    """Return Megatron's query group args; null in the config means that each head is a group."""
    groups = fields.get("num_query_groups")
    return {"group_query_attention": groups is not None, "num_query_groups": groups}


def _set_llama3_scaling(fields: NemoConfig, partial_config: PartialConfig) -> None:
    """Set Llama 3's RoPE scaling from the four fields of NeMo's config for Llama 3.1."""
    names = ("scale_factor", "low_freq_factor", "high_freq_factor", "old_context_len")
    values = [fields.get(name) for name in names]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        factor, low, high, original_context = values
        partial_config.fields["rope_scaling"] = {
            "kind": "llama3",
            "factor": float(factor),
            "low_freq_factor": float(low),
            "high_freq_factor": float(high),
            "original_max_position_embeddings": int(original_context),
        }
    elif any(value is not None for value in values):
        partial_config.undetermined_fields.append("rope_scaling")


def _function_name(value: Any) -> Any:
    """Return a function's name without its module, from any form in which a config records it."""
    if isinstance(value, Mapping):
        if value.get("approximate") == "tanh":
            return "openai_gelu"
        value = value.get("_target_", value.get("name"))
    return value.rpartition(".")[2] if isinstance(value, str) else value


def _refuse_unsupported(fields: NemoConfig) -> None:
    for name, accepted_values in NEMO1_UNSUPPORTED.items():
        value = fields.get(name)
        if isinstance(value, Mapping):
            # A mapping whose values are all false, 0, empty or null counts as absent.
            value = {key: inner for key, inner in value.items() if inner} or None
        if value is not None and value not in accepted_values:
            raise _unsupported_field_error(fields, name)
    for name in ("name", "target"):
        refuse_class(fields.text(name), fields.location, name)
        if UNSUPPORTED_MODELS.search(fields.text(name).rpartition(".")[2]):
            raise _unsupported_field_error(fields, name)


def _unsupported_field_error(fields: NemoConfig, name: str) -> CheckpointError:
    return CheckpointError(
        f"{fields.location}: {name} is {short_repr(fields.get(name))}, which Preamble does not "
        "support; give a model without this setting"
    )


def _handle_unresolved(fields: NemoConfig, partial_config: PartialConfig) -> None:
    """Mark fields whose values are unresolved references as fields that the user must give.

    An unresolved reference that affects inference but has no field of GPTConfig is refused.
    """
    for name, reference in fields.unresolved_references.items():
        if (
            name in GPT_CONFIG_FIELDS
            and GPT_CONFIG_FIELDS[name] not in partial_config.undetermined_fields
        ):
            partial_config.undetermined_fields.append(GPT_CONFIG_FIELDS[name])
        elif name not in GPT_CONFIG_FIELDS and name not in IGNORED_FIELDS:
            raise CheckpointError(
                f"{fields.location}: {name} is {short_repr(reference)}, a reference to a value "
                "that the file does not contain; write the value into the file, or give a complete "
                "config with --config-json"
            )
