"""HybridModel args mapping: converts the args of Megatron-Core's HybridModel to those of a GPT.

A pattern in the args tells that the run trained a HybridModel. Its per-layer args count attention
and MLP layers separately, and some args of a GPT have no effect or another effect on it.
`megatron_args` then converts the args of the GPT. A pattern that does not fit the weights is
refused.
"""

import re
from collections.abc import Callable
from typing import Any

from gpt.errors import CheckpointError
from gpt.formats.mappings.hybrid_layers import (
    ATTENTION,
    HybridPattern,
    parse_pattern,
    show_layers,
)
from gpt.formats.mappings.megatron_args import (
    HYBRID_ARGS,
    MegatronArgs,
    PartialConfig,
    WeightShapes,
    config_from_gpt_args,
    layer_flags,
)
from gpt.formats.mappings.megatron_names import MTP_NOTE
from gpt.settings import short_repr

# `spec` names the module and the variable of the layers. These are Megatron-Core's own, under its
# current and its former name; others may compute another function.
HYBRID_STACK_SPEC = re.compile(
    r"megatron\.core\.models\.(hybrid|mamba)\.\1_layer_specs (hybrid|mamba)_(inference_)?stack_spec"
)


def config_from_args(args: MegatronArgs, weights: WeightShapes) -> PartialConfig:
    """Convert the args of any Megatron version, of a GPT or of a HybridModel, to config fields."""
    pattern = _read_pattern(args)
    _refuse_other_layers(args, pattern, weights)
    if pattern is None:
        return config_from_gpt_args(args, weights)
    gpt_values = _gpt_values(args, pattern)
    partial_config = config_from_gpt_args(
        MegatronArgs(gpt_values, args.location, args.display_names), weights
    )
    if pattern.has_mtp_heads:
        partial_config.notes["mtp"] = MTP_NOTE
    uses_rotary = partial_config.fields["position_embedding_type"] == "rope"
    if uses_rotary and args.flag("use_rope_scaling"):
        # HybridModel of Megatron-Core 0.19 ignores this arg.
        partial_config.fields.pop("rope_scaling", None)
        partial_config.notes.pop("rope_scaling", None)
        partial_config.undetermined_fields.append("rope_scaling")
    return partial_config


def _read_pattern(args: MegatronArgs) -> HybridPattern | None:
    """Return the pattern in the args, under its current or its former names; None without one."""
    patterns = []
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        text = args.get(name)
        if text is None:
            continue
        if not isinstance(text, str):
            raise args.invalid_arg_error(name, "a text of layer symbols")
        patterns.append(parse_pattern(text, f"{args.location}: {args.display_name(name)}"))
    if not patterns:
        for name in ("hybrid_attention_ratio", "hybrid_mlp_ratio"):
            # Megatron-Core's rule for these ratios never begins a pattern with attention and MLP.
            if args.number(name, 0.0):
                raise args.unsupported_arg_error(name)
        return None
    if len({pattern.layers for pattern in patterns}) > 1:
        texts = [short_repr(args.get(name)) for name in HYBRID_ARGS[:2]]
        raise CheckpointError(
            f"{args.location}: {args.display_name(HYBRID_ARGS[0])} is {texts[0]}, but "
            f"{args.display_name(HYBRID_ARGS[1])} is {texts[1]}; copy the file from the training "
            "run again"
        )
    # The former args of multi-token prediction: the pattern of one head, and the number of heads.
    former_heads = args.get("mtp_hybrid_override_pattern", "")
    if not isinstance(former_heads, str):
        raise args.invalid_arg_error("mtp_hybrid_override_pattern", "a text of layer symbols")
    has_former_heads = former_heads != "" and args.integer("mtp_num_layers") > 0
    return HybridPattern(
        patterns[0].layers,
        has_former_heads or any(pattern.has_mtp_heads for pattern in patterns),
    )


def _refuse_other_layers(
    args: MegatronArgs, pattern: HybridPattern | None, weights: WeightShapes
) -> None:
    """Refuse args and weights of different models."""
    pattern_layers = pattern.layers if pattern else ""
    if pattern_layers == weights.hybrid_layers:
        return
    name = args.display_name(HYBRID_ARGS[0])
    recorded = f"{name} is {show_layers(pattern_layers)!r}" if pattern else f"{name} is absent"
    stored = (
        f"the layers of the weights are {show_layers(weights.hybrid_layers)!r}"
        if weights.hybrid_layers
        else f"the weights have {weights.num_layers} layers with both attention and MLP, as a "
        "GPTModel has"
    )
    raise CheckpointError(
        f"{args.location}: {recorded}, but {stored}; take the args and all weights from the same "
        "checkpoint"
    )


def _gpt_values(args: MegatronArgs, pattern: HybridPattern) -> dict[str, Any]:
    """Return the args of the GPT that computes the same function as the HybridModel."""
    layers = pattern.layers
    if args.integer("num_layers", len(layers)) != len(layers):
        raise CheckpointError(
            f"{args.location}: {args.display_name('num_layers')} is {args.integer('num_layers')}, "
            f"but the pattern {show_layers(layers)!r} has {len(layers)} layers; copy the file from "
            "the training run again"
        )
    values = {name: value for name, value in args.values.items() if name not in HYBRID_ARGS}
    values["num_layers"] = len(layers) // 2
    values["spec"] = _custom_spec(args)
    _convert_windows(args, layers, values)
    _convert_rotary(args, layers, values)
    return values


def _custom_spec(args: MegatronArgs) -> object:
    """Return `spec`; None if it names Megatron-Core's own layers."""
    spec = args.get("spec")
    names = spec if isinstance(spec, list | tuple) else [spec]
    if not all(isinstance(name, str) for name in names):
        return spec
    return None if HYBRID_STACK_SPEC.fullmatch(" ".join(names)) else spec


def _convert_windows(args: MegatronArgs, layers: str, values: dict[str, Any]) -> None:
    """Set the window args of the GPT: a list if only some attention layers have a window."""
    name = "window_attn_skip_freq"
    values[name] = None
    if args.get(name) is None or args.get("window_size") is None:
        return
    if args.literal(name) == 0:  # Megatron-Core cannot run such a model.
        raise args.unsupported_arg_error(name)
    has_window = _attention_flags(args, name, layers, lambda number, period: number % period != 0)
    if not any(has_window):
        values["window_size"] = None
    elif not all(has_window):
        values[name] = has_window


def _convert_rotary(args: MegatronArgs, layers: str, values: dict[str, Any]) -> None:
    """Set `no_rope_freq` of the GPT: a list if some attention layers have no rotary embedding."""
    name = "no_rope_freq"
    values[name] = None
    if args.get(name) is not None:
        without_rotary = _attention_flags(
            args, name, layers, lambda number, period: number % period == 0
        )
        values[name] = without_rotary if any(without_rotary) else None
    uses_rotary = args.get("position_embedding_type") == "rope" or args.flag(
        "use_rotary_position_embeddings"
    )
    if uses_rotary and args.flag("rotary_interleaved"):
        # HybridModel of Megatron-Core 0.19 computes the angles for the half-split layout but
        # rotates interleaved channels, which no other model does.
        raise args.unsupported_arg_error("rotary_interleaved")


def _attention_flags(
    args: MegatronArgs, name: str, layers: str, periodic_flag: Callable[[int, int], bool]
) -> list[int]:
    """Return the flags, 0 or 1, of the attention layers."""
    flags = layer_flags(args, name, len(layers), periodic_flag)
    return [int(flag) for flag, layer in zip(flags, layers, strict=True) if layer == ATTENTION]
