"""An architecture and a division as Megatron's `args`, so that its own software builds the model.

The inverse of `gpt/formats/mappings/megatron_args.py`, for both of Megatron's formats. What
Megatron's GPT has no argument for, or refuses to build, is refused here by its name, before
anything is written: a file that loads and computes another function is worse than none. It knows no
tensors and no files.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from checkpoints_tools.layout.layout import (
    VOCABULARY_MULTIPLE,
    Division,
    check_experts,
    padded_vocabulary,
)
from gpt.config import GPTConfig, RopeScaling
from gpt.errors import ConfigError
from gpt.parallel.sharding import check_split, stage_layers

# Which classes hold the weights: Transformer Engine's, with norms fused into what follows them, or
# Megatron-Core's own. Its default is the first.
Spec = Literal["te", "local"]
Kind = Literal["torch", "torch_dist"]  # As `--ckpt-format` calls them.

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GPT2_TOKENS = 50257


@dataclass(frozen=True)
class Stages:
    """Where the layers are, `[stage][chunk]`, and how arguments say it."""

    layers: list[list[range]]
    arguments: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def arguments(
    config: GPTConfig,
    division: Division,
    *,
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
    spec: Spec = "te",
    kind: Kind = "torch",
    tokenizer: Path | None = None,
) -> Namespace:
    """Plain values only. Call `check` before: it refuses what they cannot say."""
    tp, pp, ep = division.tp, division.pp, division.ep
    return Namespace(
        **_sizes(config),
        **_function(config),
        **_positions(config),
        **_experts(config),
        **stages(config, division).arguments,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
        context_parallel_size=1,
        # Expert ranks are taken from the data-parallel ones.
        data_parallel_size=ep,
        world_size=tp * pp * ep,
        sequence_parallel=tp > 1 and any(config.moe_layers),
        # Not the padded one: that follows from the two after it, and from the tensor ranks.
        vocab_size=config.vocab_size,
        make_vocab_size_divisible_by=vocabulary_multiple,
        padded_vocab_size=padded_vocabulary(config, tp, vocabulary_multiple),
        tokenizer_type=_tokenizer(config, tokenizer),
        tokenizer_model=None,
        vocab_file=None,
        merge_file=None,
        ckpt_format=kind,
        transformer_impl="transformer_engine" if spec == "te" else "local",
        use_mcore_models=True,
        use_legacy_models=False,
        spec=None,
        params_dtype=DTYPES[config.dtype],
        fp16=config.dtype == "float16",
        bf16=config.dtype == "bfloat16",
    )


def check(config: GPTConfig, division: Division) -> None:
    """Refuse what Megatron's arguments cannot say, and a division that the model cannot have."""
    for trait in _inexpressible(config):
        raise ConfigError(f"Megatron's GPT has {trait}; choose another format with --to")
    if config.dtype not in DTYPES:
        raise ConfigError(
            f"Megatron keeps no weights in {config.dtype}; convert to {', '.join(DTYPES)}"
        )
    check_split(config, division.tp, division.pp)
    check_experts(config, division.ep)
    if division.vpp < 1 or (division.vpp > 1 and division.pp < 2):
        raise ConfigError(
            f"{division.vpp} virtual stages on {division.pp} pipeline ranks: Megatron has virtual "
            "stages from two pipeline ranks on; --vpp can be 1"
        )
    if division.pp * division.vpp > config.num_layers:
        raise ConfigError(
            f"pipeline parallel {division.pp} x {division.vpp} virtual stages leave some without a "
            f"layer: the model has {config.num_layers} layers; --vpp can be at most "
            f"{config.num_layers // division.pp}"
        )


def notes(config: GPTConfig, division: Division, spec: Spec = "te") -> list[str]:
    """What a user has to know, or to type, when Megatron loads it."""
    found = list(stages(config, division).notes)
    if config.num_query_groups % division.tp:
        found.append(
            f"{config.num_query_groups} query groups on {division.tp} tensor ranks: Megatron-Core "
            "from 0.16 on reads it, older ones do not"
        )
    if any(config.moe_layers) and config.moe_shared_expert_gate:
        found.append(
            "shared experts have a gate: Megatron needs moe_shared_expert_gate, which came late; "
            "without it the gate's weights are not loaded"
        )
    if config.position_embedding_type == "rope":
        found.append(
            "Megatron compares add_position_embedding, which is false here: start it with "
            "--no-position-embedding, or with --use-checkpoint-args"
        )
    if spec == "local":
        found.append("names are those of --transformer-impl local, which Megatron has to be given")
    return found


def stages(config: GPTConfig, division: Division) -> Stages:
    """Layers as even as can be; where that is not even, in the oldest words that can say it."""
    pp, vpp = division.pp, division.vpp
    layers = stage_layers(config.num_layers, pp, _sayable(config.num_layers, pp, vpp), vpp)
    counts = [[len(chunk) for chunk in chunks] for chunks in layers]
    said: dict[str, Any] = {
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
    balanced = all(len(set(stage)) == 1 for stage in counts)
    if balanced and len(set(totals)) == 1:
        if vpp > 1:
            said["num_layers_per_virtual_pipeline_stage"] = counts[0][0]
        return Stages(layers, said)
    # With two stages one number says all; with more, those between must be equal.
    middle = set(totals[1:-1] or totals[1:])
    if balanced and len(middle) == 1:
        usual = middle.pop()
        ends = {"first": totals[0], "last": totals[-1]}
        given = {end: count for end, count in ends.items() if count != usual}
        for end, count in given.items():
            said[f"decoder_{end}_pipeline_num_layers"] = count
        said["num_virtual_stages_per_pipeline_rank"] = vpp if vpp > 1 else None
        flags = " ".join(f"--decoder-{end}-pipeline-num-layers {n}" for end, n in given.items())
        found = f"{_shares(totals)}; start Megatron with {flags}"
        return Stages(layers, said, [found])
    text = _picture(counts)
    said["pipeline_model_parallel_layout"] = text
    found = (
        f"{_shares(totals)}; start Megatron with --pipeline-model-parallel-layout '{text}', which "
        "came in 2025"
    )
    return Stages(layers, said, [found])


def _sayable(num_layers: int, pp: int, vpp: int) -> list[int] | None:
    """Layers of each stage as `first, usual, ..., usual, last`, which all of Megatron's ages know.

    None where that is no better than any other way, or where virtual stages forbid it.
    """
    rows, left = divmod(num_layers, vpp)
    if left or pp < 3 or rows % pp == 0:
        return None
    found = []
    for usual in (rows // pp, rows // pp + 1):
        ends = rows - usual * (pp - 2)
        if usual and ends >= 2:
            found.append([ends - ends // 2, *[usual] * (pp - 2), ends // 2])
    # The ends have the embedding and the head besides.
    order = [(max(shares), -min(shares), shares[0] + shares[-1], shares) for shares in found]
    best = min(order)[-1] if order else None
    return [share * vpp for share in best] if best else None


def _shares(totals: list[int]) -> str:
    return f"stages are not even, they have {', '.join(map(str, totals))} layers"


def _picture(counts: list[list[int]]) -> str:
    """As `Ett|tt|ttL`: the stages' first chunks, then their second ones; t is a layer."""
    chunks = [
        counts[stage][chunk] for chunk in range(len(counts[0])) for stage in range(len(counts))
    ]
    return "E" + "|".join("t" * count for count in chunks) + "L"


def _inexpressible(config: GPTConfig) -> Iterator[str]:
    """Traits that no argument of Megatron's gives, or that it does not build."""
    gated, activation, biases = config.gated, config.activation, config.mlp_bias
    if config.parallel_residual:
        yield "no parallel_residual"
    if config.position_embedding_type == "learned_absolute+rope":
        yield "no learned_absolute+rope, which only its older classes had"
    if gated and activation != "silu":
        yield f"no gated {activation}: gated is silu only"
    if not gated and activation == "silu":
        yield "no silu that is not gated"
    if config.proj_bias != biases or (biases and not config.qkv_bias):
        yield (
            f"no biases as qkv_bias {config.qkv_bias}, proj_bias {config.proj_bias}, mlp_bias "
            f"{biases}: all have one, or none, or qkv alone"
        )
    if activation == "gelu_tanh" and not biases:
        yield "no gelu_tanh without mlp_bias: its kernel adds the bias, and plain GELU is with erf"
    if any(config.moe_layers):
        yield from _inexpressible_experts(config)
    scaling = config.rope_scaling
    if not config.rotary or scaling is None or scaling.kind == "linear":
        return
    if scaling != RopeScaling("llama3", scaling.factor):
        usual = RopeScaling("llama3", scaling.factor)
        yield (
            f"no llama3 rope_scaling from {scaling.original_max_position_embeddings} positions "
            f"with frequency factors {scaling.low_freq_factor} and {scaling.high_freq_factor}: "
            f"{usual.original_max_position_embeddings}, {usual.low_freq_factor} and "
            f"{usual.high_freq_factor} stand in its code"
        )


def _inexpressible_experts(config: GPTConfig) -> Iterator[str]:
    softmax = config.moe_router_score_function == "softmax"
    if config.mlp_bias:
        yield "no experts with mlp_bias, but where the router has a bias too"
    if softmax and config.moe_router_topk == 1 and not config.moe_router_pre_softmax:
        yield "no moe_router_topk 1 without moe_router_pre_softmax: every weight would be 1"
    if softmax and config.moe_router_expert_bias:
        yield "no moe_router_expert_bias with softmax: it takes one with sigmoid"


def _sizes(config: GPTConfig) -> dict[str, Any]:
    grouped = config.num_query_groups != config.num_attention_heads
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "group_query_attention": grouped,
        "num_query_groups": config.num_query_groups if grouped else 1,  # 1 is its default.
        "kv_channels": config.kv_channels,
        "max_position_embeddings": config.max_position_embeddings,
        "seq_length": config.max_position_embeddings,
        "untie_embeddings_and_output_weights": config.untie_embeddings_and_output_weights,
    }


def _function(config: GPTConfig) -> dict[str, Any]:
    """Norms, activation, biases, attention. Names that changed with a version are given twice."""
    window = config.window_size
    return {
        "normalization": config.normalization,
        "layernorm_epsilon": config.layernorm_epsilon,
        "norm_epsilon": config.layernorm_epsilon,
        "layernorm_zero_centered_gamma": config.layernorm_zero_centered_gamma,
        "apply_layernorm_1p": config.layernorm_zero_centered_gamma,
        "swiglu": config.gated,
        "squared_relu": config.activation == "relu2",
        "openai_gelu": False,
        "quick_geglu": False,
        # Not only how, but which of the two GELUs is computed.
        "bias_gelu_fusion": config.activation == "gelu_tanh",
        "add_bias_linear": config.mlp_bias,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_layernorm,
        "window_size": None if window is None else (window - 1, 0),  # Those before a token.
        "window_attn_skip_freq": None,
        "apply_residual_connection_post_layernorm": False,
        "apply_query_key_layer_scaling": False,
        "multi_latent_attention": False,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "mtp_num_layers": None,
    }


def _positions(config: GPTConfig) -> dict[str, Any]:
    scaling = config.rope_scaling if config.rotary else None
    linear = scaling is not None and scaling.kind == "linear"
    llama3 = scaling is not None and scaling.kind == "llama3"
    return {
        "position_embedding_type": config.position_embedding_type,
        # False with `none` is refused by Megatron, as an old way to say the same.
        "add_position_embedding": not config.rotary,
        "use_rotary_position_embeddings": config.rotary,
        "rotary_percent": config.rotary_percent,
        "rotary_base": _whole(config.rotary_base),
        "rotary_interleaved": config.rotary_interleaved,
        "rotary_seq_len_interpolation_factor": _whole(scaling.factor)
        if scaling and linear
        else None,
        "use_rope_scaling": llama3,
        "rope_scaling_factor": scaling.factor if scaling and llama3 else 8.0,
        "no_rope_freq": None,
    }


def _experts(config: GPTConfig) -> dict[str, Any]:
    """Without experts they stand as Megatron's defaults."""
    sparse = any(config.moe_layers)
    frequency = 1 if all(config.moe_layers) or not sparse else [int(x) for x in config.moe_layers]
    factor = config.moe_router_topk_scaling_factor
    shared = config.moe_shared_expert_intermediate_size
    return {
        "num_experts": config.num_experts if sparse else None,
        "moe_layer_freq": frequency,
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size if sparse else None,
        "moe_router_topk": config.moe_router_topk if sparse else 2,
        "moe_router_pre_softmax": sparse and config.moe_router_pre_softmax,
        "moe_router_score_function": config.moe_router_score_function if sparse else "softmax",
        "moe_router_enable_expert_bias": sparse and config.moe_router_expert_bias,
        "moe_router_topk_scaling_factor": factor if sparse and factor != 1 else None,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_shared_expert_intermediate_size": shared if sparse and shared else None,
        "moe_shared_expert_gate": sparse and config.moe_shared_expert_gate,
        "moe_grouped_gemm": False,
    }


def _whole(value: float) -> float:
    """As an int where it is one: Megatron's command line takes no other."""
    return int(value) if value == int(value) else value


def _tokenizer(config: GPTConfig, path: Path | None) -> str | None:
    """GPT-2's if its files are there: Megatron compares the kind with what it was started with.

    For others it takes its own command line's word, as None is no argument to it.
    """
    if path is None or not path.is_dir() or not any(path.glob("*merges.txt")):
        return None
    plain = not (path / "tokenizer.json").is_file() or config.vocab_size == GPT2_TOKENS
    return "GPT2BPETokenizer" if plain else None
