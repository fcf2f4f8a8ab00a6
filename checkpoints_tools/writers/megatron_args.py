"""Megatron args writer: converts GPTConfig and split to the `args` that Megatron loads.

The module is the inverse of `gpt/formats/mappings/megatron_args.py`, for both Megatron formats. If
Megatron's GPT does not support a property of the model, an error names the property before anything
is written: a checkpoint that loads but computes another function is worse than no checkpoint. The
module uses no tensors and opens no files. The args of a HybridModel are those of the GPT with the
pattern of its layers.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from checkpoints_tools.layout.layout import ParallelSplit, check_expert_parallel, stored_vocab_rows
from gpt.config import GPTConfig, RopeScaling, yarn_attention_factor
from gpt.errors import ConfigError
from gpt.formats.mappings.hybrid_layers import hybrid_pattern
from gpt.parallel.pipeline_stages import stage_layers
from gpt.parallel.vocabulary_padding import VOCABULARY_MULTIPLE
from gpt.parallel.weight_sharding import check_split

# Megatron-Core's layer spec. "te" (the default): Transformer Engine modules, with norms fused into
# the next linear. "local": Megatron-Core's own modules.
LayerSpec = Literal["te", "local"]
# Megatron-Core's model class: GPTModel, or HybridModel, whose layers are attention or an MLP.
ModelClass = Literal["gpt", "hybrid"]
CkptFormat = Literal["torch", "torch_dist"]  # Values of Megatron's `--ckpt-format`.

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GPT2_TOKENS = 50257
# Args that define pipeline stages by layer counts. A HybridModel's pattern replaces them.
UNEVEN_STAGE_ARGS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
)
HYBRID_STACK_SPEC = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")


@dataclass(frozen=True)
class StageLayout:
    """The layers of each `[stage][chunk]`, and the Megatron arguments for this distribution."""

    layers: list[list[range]]
    args: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def build_args(
    config: GPTConfig,
    split: ParallelSplit,
    *,
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
    spec: LayerSpec = "te",
    model: ModelClass = "gpt",
    ckpt_format: CkptFormat = "torch",
    tokenizer: Path | None = None,
) -> Namespace:
    """Return Megatron's args, without objects of Megatron's classes.

    Call `check_supported` first.
    """
    tp = split.tp
    pp = split.pp
    ep = split.ep
    hybrid_args = _hybrid_args(config, split) if model == "hybrid" else {}
    args = Namespace(
        **_size_args(config),
        **_layer_args(config),
        **_position_args(config),
        **_moe_args(config),
        **plan_stages(config, split).args,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
        context_parallel_size=1,
        # In Megatron the expert ranks are data-parallel ranks, so the data-parallel size must be at
        # least `ep`.
        data_parallel_size=ep,
        world_size=tp * pp * ep,
        sequence_parallel=tp > 1 and any(config.moe_layers),
        # The unpadded size; Megatron computes the padded size from tp and the next argument.
        vocab_size=config.vocab_size,
        make_vocab_size_divisible_by=vocabulary_multiple,
        padded_vocab_size=stored_vocab_rows(config, tp, vocabulary_multiple),
        tokenizer_type=_tokenizer_type(config, tokenizer),
        tokenizer_model=None,
        vocab_file=None,
        merge_file=None,
        ckpt_format=ckpt_format,
        transformer_impl="transformer_engine" if spec == "te" else "local",
        use_mcore_models=True,
        use_legacy_models=False,
        spec=None,
        params_dtype=DTYPES[config.dtype],
        fp16=config.dtype == "float16",
        bf16=config.dtype == "bfloat16",
    )
    vars(args).update(hybrid_args)
    return args


def check_supported(config: GPTConfig, split: ParallelSplit, model: ModelClass = "gpt") -> None:
    """Refuse a config that Megatron's arguments cannot express, or an impossible split."""
    for missing_trait in _unsupported_traits(config):
        raise ConfigError(f"Megatron's GPT has {missing_trait}; choose another format with --to")
    if model == "hybrid":
        for missing_trait in _unsupported_hybrid_traits(config):
            raise ConfigError(f"Megatron's HybridModel has {missing_trait}; choose --model gpt")
    if any(config.moe_layers) and config.mlp_bias and split.tp > 1:
        raise ConfigError(
            "Megatron-Core does not split experts with biases over tensor ranks "
            f"(--tp {split.tp}); give --tp 1"
        )
    if config.dtype not in DTYPES:
        raise ConfigError(
            f"Megatron has no dtype {config.dtype}; choose one of {', '.join(DTYPES)} with --dtype"
        )
    check_split(config, split.tp, split.pp)
    check_expert_parallel(config, split.ep)
    if split.vpp < 1:
        raise ConfigError(
            f"--vpp {split.vpp}: the number of virtual stages must be at least 1; give --vpp 1"
        )
    if split.vpp > 1 and split.pp < 2:
        raise ConfigError(
            f"--vpp {split.vpp} with --pp {split.pp}: Megatron's virtual stages need two or "
            "more pipeline ranks; give --vpp 1, or a larger --pp"
        )
    if split.pp * split.vpp > config.num_layers:
        raise ConfigError(
            f"pipeline parallel {split.pp} x {split.vpp} virtual stages are more stages than "
            f"the model has layers ({config.num_layers}); --vpp can be at most "
            f"{config.num_layers // split.pp}"
        )


def check_layer_spec(spec: LayerSpec, model: ModelClass) -> None:
    """Refuse a HybridModel of local layers: Megatron has only Transformer Engine's for it."""
    if model == "hybrid" and spec == "local":
        raise ConfigError(
            "Megatron's HybridModel has no local layer spec; remove --megatron-spec local, or "
            "choose --model gpt"
        )


def load_notes(
    config: GPTConfig, split: ParallelSplit, spec: LayerSpec = "te", model: ModelClass = "gpt"
) -> list[str]:
    """Return hints for loading the target in Megatron, such as the flags to give."""
    notes = list(plan_stages(config, split).notes)
    if model == "hybrid":
        notes = [
            "the target is a HybridModel: start Megatron with --hybrid-layer-pattern "
            f"'{_hybrid_args(config, split)['hybrid_layer_pattern']}', or with "
            "--use-checkpoint-args"
        ]
    if config.num_query_groups % split.tp:
        notes.append(
            f"{config.num_query_groups} query groups on {split.tp} tensor ranks: this needs "
            "Megatron-Core 0.16 or later"
        )
    if any(config.moe_layers) and config.moe_shared_expert_gate:
        notes.append(
            "shared experts have a gate: this needs a recent Megatron with moe_shared_expert_gate; "
            "older versions do not load the gate's weights"
        )
    if config.position_embedding_type == "rope":
        notes.append(
            "Megatron compares its flags with the checkpoint's add_position_embedding, which is "
            "false: start Megatron with --no-position-embedding, or with --use-checkpoint-args"
        )
    if spec == "local":
        notes.append(
            "tensor names are those of the local layer spec: start Megatron with "
            "--transformer-impl local"
        )
    return notes


def plan_stages(config: GPTConfig, split: ParallelSplit) -> StageLayout:
    """Distribute the layers over stages and chunks as evenly as possible.

    An uneven distribution uses the oldest Megatron arguments that can express it, so that old
    Megatron versions can load the checkpoint too.
    """
    pp, vpp = split.pp, split.vpp
    layers = stage_layers(
        config.num_layers, pp, _first_last_counts(config.num_layers, pp, vpp), vpp
    )
    counts = [[len(chunk) for chunk in chunks] for chunks in layers]
    args: dict[str, Any] = {
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
    }
    totals = [sum(stage) for stage in counts]
    # Whether, within each stage, all chunks have the same number of layers.
    balanced = all(len(set(stage)) == 1 for stage in counts)
    # First case: all chunks of all stages have the same number of layers.
    if balanced and len(set(totals)) == 1:
        if vpp > 1:
            args["num_layers_per_virtual_pipeline_stage"] = counts[0][0]
        return StageLayout(layers, args)
    # Second case: within each stage, all chunks have the same number of layers, and all stages
    # between the first and the last have the same number of layers. If there are only two stages,
    # the last stage counts as the middle.
    middle = set(totals[1:-1] or totals[1:])
    if balanced and len(middle) == 1:
        common_count = middle.pop()
        ends = {"first": totals[0], "last": totals[-1]}
        uneven_ends = {end: count for end, count in ends.items() if count != common_count}
        for end, count in uneven_ends.items():
            args[f"decoder_{end}_pipeline_num_layers"] = count
        args["num_virtual_stages_per_pipeline_rank"] = vpp if vpp > 1 else None
        flags = " ".join(
            f"--decoder-{end}-pipeline-num-layers {n}" for end, n in uneven_ends.items()
        )
        note = f"{_uneven_stages_note(totals)}; start Megatron with {flags}"
        return StageLayout(layers, args, [note])
    # Third case: any other distribution.
    pipeline_layout = _pipeline_layout(counts)
    args["pipeline_model_parallel_layout"] = pipeline_layout
    note = (
        f"{_uneven_stages_note(totals)}; start Megatron with --pipeline-model-parallel-layout "
        f"'{pipeline_layout}', which Megatron has since 2025"
    )
    return StageLayout(layers, args, [note])


def _first_last_counts(num_layers: int, pp: int, vpp: int) -> list[int] | None:
    """Return the layer counts of the stages in the form `first, middle, ..., middle, last`.

    More Megatron versions support this form than other uneven distributions, because it does not
    need --pipeline-model-parallel-layout. Returns None in these cases:

    - The layers divide evenly over all chunks of all stages.
    - There are fewer than three stages.
    - The number of layers is not a multiple of `vpp`.
    - No distribution has this form.
    """
    layers_per_chunk, remainder = divmod(num_layers, vpp)
    if remainder or pp < 3 or layers_per_chunk % pp == 0:
        return None
    candidates = []
    for middle_count in (layers_per_chunk // pp, layers_per_chunk // pp + 1):
        ends = layers_per_chunk - middle_count * (pp - 2)
        if middle_count and ends >= 2:
            candidates.append([ends - ends // 2, *[middle_count] * (pp - 2), ends // 2])
    # Prefer the most even distribution. If two are equally even, prefer fewer layers on the first
    # and last stages, which also have the embedding and the head.
    ranked_candidates = [
        (max(counts), -min(counts), counts[0] + counts[-1], counts) for counts in candidates
    ]
    best = min(ranked_candidates)[-1] if ranked_candidates else None
    return [count * vpp for count in best] if best else None


def _uneven_stages_note(totals: list[int]) -> str:
    return f"pipeline stages have unequal numbers of layers: {', '.join(map(str, totals))}"


def _pipeline_layout(counts: list[list[int]]) -> str:
    """Return Megatron's layout string, such as `Ett|tt|ttL`.

    E is the embedding, t a layer, L the loss, and | separates chunks. The first chunks of all
    stages come first, then the second chunks of all stages.
    """
    chunks = [
        counts[stage][chunk] for chunk in range(len(counts[0])) for stage in range(len(counts))
    ]
    return "E" + "|".join("t" * count for count in chunks) + "L"


def _unsupported_traits(config: GPTConfig) -> Iterator[str]:
    """Yield one phrase per property of the model that Megatron does not support.

    Each phrase begins with "no" and completes the sentence "Megatron's GPT has ...".
    """
    gated = config.gated
    activation = config.activation
    has_bias = config.mlp_bias
    if config.parallel_residual:
        yield "no parallel_residual"
    if config.position_embedding_type == "learned_absolute+rope":
        yield "no learned_absolute+rope (only Megatron's legacy classes had it)"
    if config.position_embedding_type == "alibi":
        yield "no ALiBi"
    if config.norm_placement != "pre":
        yield f"no norm_placement {config.norm_placement}: norms are in front of the linears"
    if config.embedding_layernorm:
        yield "no embedding_layernorm"
    if config.embedding_multiplier != 1:
        yield f"no embedding_multiplier {config.embedding_multiplier}"
    for name in ("residual_multiplier", "logits_scaling"):
        if getattr(config, name) != 1:
            yield f"no {name} {getattr(config, name)}"
    if config.query_scaling_beta:
        yield f"no query_scaling_beta {config.query_scaling_beta}"
    if config.qk_layernorm and config.qk_layernorm_scope != "head":
        yield "no qk_layernorm of all heads together"
    if config.window_rope is not None:
        yield "no window_rope: all layers have the same rotary embedding"
    if gated and activation not in ("silu", "quick_gelu"):
        yield f"no gated {activation}: only silu and quick_gelu can be gated"
    if not gated and activation in ("silu", "quick_gelu"):
        yield f"no {activation} without a gate"
    if activation in ("relu", "xielu"):
        yield f"no {activation}"
    if config.proj_bias != has_bias or (has_bias and not config.qkv_bias):
        yield (
            f"no combination of qkv_bias {config.qkv_bias}, proj_bias {config.proj_bias} and "
            f"mlp_bias {has_bias}: biases are on all three, on none, or on qkv alone"
        )
    if activation == "gelu_tanh" and not has_bias:
        yield (
            "no gelu_tanh without mlp_bias: Megatron's tanh kernel also adds a bias, and its only "
            "other GELU uses erf"
        )
    if any(config.moe_layers):
        yield from _unsupported_moe_traits(config)
    scaling = config.rope_scaling
    if not config.uses_rope or scaling is None or scaling.kind == "linear":
        return
    if scaling.kind == "longrope":
        yield "no longrope rope_scaling"
    elif scaling.kind == "yarn":
        if scaling.attention_factor not in (1.0, yarn_attention_factor(scaling.factor)):
            yield f"no yarn rope_scaling with attention_factor {scaling.attention_factor}"
    elif scaling != RopeScaling("llama3", scaling.factor):
        default_scaling = RopeScaling("llama3", scaling.factor)
        yield (
            "no llama3 rope_scaling with original_max_position_embeddings "
            f"{scaling.original_max_position_embeddings}, low_freq_factor "
            f"{scaling.low_freq_factor} and high_freq_factor {scaling.high_freq_factor}: "
            f"Megatron's code fixes these at {default_scaling.original_max_position_embeddings}, "
            f"{default_scaling.low_freq_factor} and {default_scaling.high_freq_factor}"
        )


def _unsupported_moe_traits(config: GPTConfig) -> Iterator[str]:
    softmax = config.moe_router_score_function == "softmax"
    if config.mlp_bias != config.moe_router_bias:
        yield (
            f"no experts with mlp_bias {config.mlp_bias} and moe_router_bias "
            f"{config.moe_router_bias}: the router has a bias if the linears have biases"
        )
    if softmax and config.moe_router_topk == 1 and not config.moe_router_pre_softmax:
        yield (
            "no moe_router_topk 1 without moe_router_pre_softmax: every expert weight would be 1"
        )
    if softmax and config.moe_router_expert_bias:
        yield "no moe_router_expert_bias with softmax: it needs sigmoid scores"


def _unsupported_hybrid_traits(config: GPTConfig) -> Iterator[str]:
    """Yield the properties that GPTModel supports but HybridModel ignores or computes wrongly."""
    if config.uses_rope and config.rotary_interleaved:
        yield "no rotary_interleaved: it rotates pairs of channels by the angles of halves"
    if config.uses_rope and config.rope_scaling and config.rope_scaling.kind != "linear":
        yield f"no {config.rope_scaling.kind} rope_scaling: it ignores Megatron's argument"


def _hybrid_args(config: GPTConfig, split: ParallelSplit) -> dict[str, Any]:
    """Return the args of a HybridModel that replace or complement those of the GPT.

    The pattern has segments only if Megatron would otherwise distribute the layers differently: a
    pattern with segments can be loaded only at this number of stages. Megatron refuses other args
    for stages beside segments.
    """
    stages = plan_stages(config, split).layers
    segments = [chunks[chunk] for chunk in range(split.vpp) for chunks in stages]
    if split.vpp == 1 and len({len(segment) for segment in segments}) == 1:
        segments = [range(config.num_layers)]
    return {
        **dict.fromkeys(UNEVEN_STAGE_ARGS),
        "num_layers": 2 * config.num_layers,
        "hybrid_layer_pattern": hybrid_pattern(config.moe_layers, segments),
        "moe_layer_freq": 1,
        "spec": list(HYBRID_STACK_SPEC),
        # Lists have a flag for each symbol of the pattern: attention, then the MLP.
        "window_attn_skip_freq": _spread_flags(_window_flags(config)),
        "no_rope_freq": _spread_flags(_flags_without_rope(config)),
    }


def _window_flags(config: GPTConfig) -> list[int] | None:
    """Return Megatron's `window_attn_skip_freq`: which layers have a window; None: all layers."""
    return [int(flag) for flag in config.window_layers] or None


def _flags_without_rope(config: GPTConfig) -> list[int] | None:
    """Return Megatron's `no_rope_freq`: which layers have no rotary embedding; None: no layer."""
    return [int(not flag) for flag in config.rope_layers] or None


def _spread_flags(flags: list[int] | None) -> list[int] | None:
    return None if flags is None else [entry for flag in flags for entry in (flag, 0)]


def _size_args(config: GPTConfig) -> dict[str, Any]:
    grouped = config.num_query_groups != config.num_attention_heads
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "group_query_attention": grouped,
        "num_query_groups": config.num_query_groups if grouped else 1,  # 1: Megatron's default.
        "kv_channels": config.kv_channels,
        "max_position_embeddings": config.max_position_embeddings,
        "seq_length": config.max_position_embeddings,
        "untie_embeddings_and_output_weights": config.untie_embeddings_and_output_weights,
    }


def _layer_args(config: GPTConfig) -> dict[str, Any]:
    """Return the args of norms, activation, biases and attention.

    An arg that Megatron renamed is written under its old and its new name.
    """
    window = config.window_size
    return {
        "normalization": config.normalization,
        "layernorm_epsilon": config.layernorm_epsilon,
        "norm_epsilon": config.layernorm_epsilon,
        "layernorm_zero_centered_gamma": config.layernorm_zero_centered_gamma,
        "apply_layernorm_1p": config.layernorm_zero_centered_gamma,
        "swiglu": config.gated and config.activation == "silu",
        "squared_relu": config.activation == "relu2",
        "openai_gelu": False,
        "quick_geglu": config.gated and config.activation == "quick_gelu",
        "activation_func_clamp_value": config.activation_func_clamp_value or None,
        "glu_linear_offset": config.glu_linear_offset,
        # Selects the GELU: the fused kernel uses the tanh approximation, the unfused kernel erf.
        "bias_gelu_fusion": config.activation == "gelu_tanh",
        "add_bias_linear": config.mlp_bias,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_layernorm,
        # Megatron's value is (tokens before the current token, tokens after the current token).
        # GPTConfig's window_size also counts the current token.
        "window_size": None if window is None else (window - 1, 0),
        "window_attn_skip_freq": _window_flags(config),
        "softmax_type": "learnable" if config.attention_sinks else "vanilla",
        "softmax_scale": config.softmax_scale or None,
        "apply_residual_connection_post_layernorm": False,
        "apply_query_key_layer_scaling": False,
        "multi_latent_attention": False,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "mtp_num_layers": None,
    }


def _position_args(config: GPTConfig) -> dict[str, Any]:
    scaling = config.rope_scaling if config.uses_rope else None
    linear = scaling is not None and scaling.kind == "linear"
    llama3 = scaling is not None and scaling.kind == "llama3"
    yarn = scaling is not None and scaling.kind == "yarn"
    return {
        "position_embedding_type": "yarn" if yarn else config.position_embedding_type,
        # Also true for position_embedding_type "none", for which Megatron refuses false.
        "add_position_embedding": not config.uses_rope,
        "use_rotary_position_embeddings": config.uses_rope,
        "rotary_percent": config.rotary_percent,
        "rotary_base": _as_integer(config.rotary_base),
        "rotary_interleaved": config.rotary_interleaved,
        "rotary_seq_len_interpolation_factor": _as_integer(scaling.factor)
        if scaling and linear
        else None,
        "use_rope_scaling": llama3,
        "rope_scaling_factor": scaling.factor if scaling and llama3 else 8.0,
        "no_rope_freq": _flags_without_rope(config),
        **(_yarn_args(scaling) if scaling and yarn else {}),
    }


def _yarn_args(scaling: RopeScaling) -> dict[str, Any]:
    # With equal values, Megatron-Core does not scale cos and sin. Without values, it scales them by
    # the factor of the authors.
    magnitude = 1.0 if scaling.attention_factor == 1 else None
    return {
        "yarn_rotary_scaling_factor": scaling.factor,
        "yarn_original_max_position_embeddings": scaling.original_max_position_embeddings,
        "yarn_beta_fast": scaling.beta_fast,
        "yarn_beta_slow": scaling.beta_slow,
        "yarn_correction_range_round_to_int": scaling.truncate,
        "yarn_mscale": magnitude,
        "yarn_mscale_all_dim": magnitude,
    }


def _moe_args(config: GPTConfig) -> dict[str, Any]:
    """Return the args of the experts; for a model without experts, Megatron's defaults."""
    has_experts = any(config.moe_layers)
    frequency = (
        1 if all(config.moe_layers) or not has_experts else [int(x) for x in config.moe_layers]
    )
    factor = config.moe_router_topk_scaling_factor
    shared = config.moe_shared_expert_intermediate_size
    return {
        "num_experts": config.num_experts if has_experts else None,
        "moe_layer_freq": frequency,
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size if has_experts else None,
        "moe_router_topk": config.moe_router_topk if has_experts else 2,
        "moe_router_pre_softmax": has_experts and config.moe_router_pre_softmax,
        "moe_router_score_function": config.moe_router_score_function if has_experts else "softmax",
        "moe_router_enable_expert_bias": has_experts and config.moe_router_expert_bias,
        "moe_router_topk_scaling_factor": factor if has_experts and factor != 1 else None,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_shared_expert_intermediate_size": shared if has_experts and shared else None,
        "moe_shared_expert_gate": has_experts and config.moe_shared_expert_gate,
        "moe_grouped_gemm": False,
    }


def _as_integer(value: float) -> float:
    """Convert a whole number to int; return other numbers unchanged.

    Megatron's --rotary-base and --rotary-seq-len-interpolation-factor are integer flags.
    """
    return int(value) if value == int(value) else value


def _tokenizer_type(config: GPTConfig, path: Path | None) -> str | None:
    """Return GPT2BPETokenizer if the tokenizer is GPT-2's, else None.

    Megatron compares a recorded type with its flag --tokenizer-type. If None is recorded, the flag
    alone decides.
    """
    if path is None or not path.is_dir() or not any(path.glob("*merges.txt")):
        return None
    is_gpt2 = not (path / "tokenizer.json").is_file() or config.vocab_size == GPT2_TOKENS
    return "GPT2BPETokenizer" if is_gpt2 else None
