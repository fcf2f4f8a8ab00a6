"""Which Hugging Face family can hold a model, and the config.json that says so.

A family's record is written by its row of WRITERS and read back by the reader's own function: the
family holds the model if what comes back is the same network. A trait that differs stands in the
way, and a refusal names it; nothing is approximated. It knows no tensors and no files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.checkpoint.logical_tensor import some
from gpt.config import Activation, GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.huggingface.config_json import Fields
from gpt.formats.huggingface.families import FAMILIES

Record = dict[str, Any]

ACTIVATIONS: Mapping[Activation, str] = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "silu": "silu",
    "relu2": "relu2",
}
# What models as old as GPT-2 call tanh GELU.
OLD_ACTIVATIONS: Mapping[Activation, str] = {**ACTIVATIONS, "gelu_tanh": "gelu_new"}


@dataclass(frozen=True)
class Choice:
    """The family that a model is written as, and its config.json."""

    family: str
    record: Record
    notes: tuple[str, ...]  # What config.json has no field for, though no result depends on it.


def choose(config: GPTConfig, where: Path, wanted: str | None = None) -> Choice:
    """The best known family that holds the model exactly, or only `wanted`; else a refusal.

    `where` is the model's place, for messages.
    """
    if wanted is not None and wanted not in WRITERS:
        known = ", ".join(WRITERS)
        raise ConfigError(f"family {wanted!r} is none that can be written; known are: {known}")
    fits = {name: _fit(config, name) for name in ([wanted] if wanted else WRITERS)}
    nearest = min(fits, key=lambda name: (not fits[name].compared, len(fits[name].faults)))
    if fits[nearest].faults:
        lacks = f"{nearest}, has no place for {some(fits[nearest].faults)}"
        if wanted:
            raise CheckpointError(
                f"{where} cannot be written as the family asked for: {lacks}; choose another one, "
                "or another format"
            )
        raise CheckpointError(
            f"{where} cannot be written for Hugging Face: no family holds it, and the nearest, "
            f"{lacks}; choose another format"
        )
    # Where several do, the one whose usual activation it is: not all tools look at that field.
    name = min(
        (name for name in fits if not fits[name].faults),
        key=lambda name: WRITERS[name].activation != config.activation,
    )
    return Choice(name, _record(config, name), _lost(config, name))


def _record(config: GPTConfig, family: str) -> Record:
    writer = WRITERS[family]
    return {
        "architectures": [writer.architecture],
        "model_type": family,
        **writer.fields(config),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "torch_dtype": config.dtype,
        "dtype": config.dtype,
    }


def _read_back(config: GPTConfig, family: str) -> GPTConfig:
    record = {**FAMILIES[family].defaults, **_record(config, family)}
    return FAMILIES[family].config(Fields(record, Path(family)))


@dataclass(frozen=True)
class _Fit:
    faults: list[str]  # The traits of the model that a family cannot express.
    compared: bool  # Whether these are all; else what is named made it senseless to look for more.


def _fit(config: GPTConfig, family: str) -> _Fit:
    writer, heads = WRITERS[family], config.num_attention_heads
    if writer.experts != any(config.moe_layers):
        return _Fit([_experts(config)], compared=False)
    faults = []
    if writer.divided and config.hidden_size % heads:
        faults.append(f"a hidden_size of {config.hidden_size}, which {heads} heads do not divide")
    try:
        found = _read_back(config, family)
    except (CheckpointError, ConfigError):
        # Sizes are copied; only a head's width can come out as one that cannot be.
        return _Fit([*faults, HEADS.says(config)], compared=False)
    for trait in TRAITS:
        mine, its = trait.value(config), trait.value(found)
        if mine != its and mine is not None and its is not None:
            faults.append(trait.says(config))
    return _Fit(faults, compared=True)


def _lost(config: GPTConfig, family: str) -> tuple[str, ...]:
    found = _read_back(config, family)
    return tuple(
        f"{name} {getattr(config, name)} has no field in config.json of a {family} model; only "
        "further training would use it"
        for name in ("hidden_dropout", "attention_dropout")
        if getattr(config, name) != getattr(found, name)
    )


@dataclass(frozen=True)
class Trait:
    """Something that a family may lack. A value of None does not count in this model."""

    value: Callable[[GPTConfig], object]
    says: Callable[[GPTConfig], str]  # What the model has, after "has no place for".


def _either(name: str, present: str, absent: str) -> Trait:
    return Trait(lambda c: getattr(c, name), lambda c: present if getattr(c, name) else absent)


def _rotary(name: str, says: Callable[[GPTConfig], str]) -> Trait:
    return Trait(lambda c: getattr(c, name) if c.rotary else None, says)


def _expert(name: str, says: str) -> Trait:
    return Trait(
        lambda c: getattr(c, name) if any(c.moe_layers) else None,
        lambda c: f"{says} ({name} {getattr(c, name)})",
    )


def _scaling(config: GPTConfig) -> object:
    scaling = config.rope_scaling
    if not config.rotary:
        return None
    return (scaling.kind, scaling.factor) if scaling and scaling.kind == "linear" else (scaling,)


def _experts(config: GPTConfig) -> str:
    if not any(config.moe_layers):
        return "an MLP without experts"
    return "experts" if all(config.moe_layers) else "experts in some of the layers only"


POSITIONS: Mapping[str, str] = {
    "learned_absolute": "learned positions",
    "rope": "rotary positions",
    "learned_absolute+rope": "learned and rotary positions together",
    "none": "a model without positions",
}

HEADS = Trait(
    lambda c: c.kv_channels,
    lambda c: f"heads of {c.kv_channels} channels at a hidden_size of {c.hidden_size}",
)

TRAITS = (
    Trait(lambda c: c.position_embedding_type, lambda c: POSITIONS[c.position_embedding_type]),
    _rotary("rotary_interleaved", lambda c: "interleaved rotary channels (rotary_interleaved)"),
    _rotary("rotary_percent", lambda c: f"rotary_percent {c.rotary_percent}"),
    _rotary("rotary_base", lambda c: f"rotary_base {c.rotary_base}"),
    Trait(_scaling, lambda c: f"rope scaling of kind {c.rope_scaling and c.rope_scaling.kind}"),
    Trait(lambda c: c.normalization, lambda c: c.normalization),
    Trait(lambda c: c.layernorm_epsilon, lambda c: f"layernorm_epsilon {c.layernorm_epsilon}"),
    _either(
        "layernorm_zero_centered_gamma",
        "norms whose stored weight is gamma - 1 (layernorm_zero_centered_gamma)",
        "norms whose stored weight is gamma itself",
    ),
    Trait(lambda c: c.activation, lambda c: f"the activation {c.activation}"),
    Trait(
        lambda c: c.gated,
        lambda c: f"{'a gated MLP' if c.gated else 'an MLP without a gate'} ({c.activation})",
    ),
    Trait(
        lambda c: c.num_query_groups,
        lambda c: f"{c.num_query_groups} query groups of {c.num_attention_heads} heads",
    ),
    HEADS,
    _either("qk_layernorm", "norms of queries and keys", "queries and keys without norms"),
    _either("qkv_bias", "biases of q, k and v", "q, k and v without biases"),
    _either("proj_bias", "a bias of attention's output", "attention's output without a bias"),
    _either("mlp_bias", "biases in the MLP", "an MLP without biases"),
    _either("parallel_residual", "parallel_residual", "a residual that is not parallel"),
    Trait(lambda c: c.window_size or 0, lambda c: f"window_size {c.window_size}"),
    Trait(_experts, _experts),
    _expert("num_experts", "this number of experts"),
    _expert("moe_router_topk", "this number of experts for a token"),
    _expert("moe_router_score_function", "such scores of experts"),
    _expert("moe_router_pre_softmax", "a softmax before experts are chosen"),
    _expert("moe_router_expert_bias", "a bias for choosing experts"),
    _expert("moe_router_topk_scaling_factor", "scaled weights of experts"),
    _expert("moe_shared_expert_intermediate_size", "shared experts"),
    _expert("moe_shared_expert_gate", "a gate of shared experts"),
    _expert("moe_ffn_hidden_size", "experts of this width"),
    Trait(
        lambda c: None if all(c.moe_layers) else c.ffn_hidden_size,
        lambda c: f"ffn_hidden_size {c.ffn_hidden_size}",
    ),
)


def _gpt2(config: GPTConfig) -> Record:
    return {
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_hidden_size,
        "n_positions": config.max_position_embeddings,
        "n_ctx": config.max_position_embeddings,  # Its name once; some tools still ask for it.
        "activation_function": OLD_ACTIVATIONS[config.activation],
        "layer_norm_epsilon": config.layernorm_epsilon,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
    }


def _sizes(config: GPTConfig) -> Record:
    """What all families but GPT-2 have."""
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": ACTIVATIONS[config.activation],
        "attention_dropout": config.attention_dropout,
    }


def _decoder(config: GPTConfig, epsilon: str = "rms_norm_eps") -> Record:
    """What Llama and its kin share."""
    return {
        **_sizes(config),
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        epsilon: config.layernorm_epsilon,
        **_positions(config, "rope_theta"),
    }


def _positions(config: GPTConfig, theta: str, percent: str | None = None) -> Record:
    """As transformers 4 has it, `theta` and `percent` its names, and as 5 does."""
    scaling, beside = config.rope_scaling, {theta: config.rotary_base}
    rope: Record = {"rope_type": "default"}
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
                rope[name] = getattr(scaling, name)
    # The older name of the type is the only one that the first readers of linear scaling take.
    old = {"type": "linear", "factor": rope["factor"]} if rope["rope_type"] == "linear" else rope
    rope = {**rope, "rope_theta": config.rotary_base}
    if percent is not None:
        beside[percent] = rope["partial_rotary_factor"] = config.rotary_percent
    return {**beside, "rope_scaling": scaling and old, "rope_parameters": rope}


def _llama(config: GPTConfig) -> Record:
    return {
        **_decoder(config),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


def _mistral(config: GPTConfig) -> Record:
    return {**_decoder(config), "sliding_window": config.window_size}


def _qwen2(config: GPTConfig) -> Record:
    window = config.window_size
    return {
        **_decoder(config),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        # From which layer on there is a window.
        "max_window_layers": config.num_layers if window is None else 0,
    }


def _qwen3(config: GPTConfig) -> Record:
    return {**_qwen2(config), "attention_bias": config.qkv_bias}


def _mixtral(config: GPTConfig) -> Record:
    return {
        **_mistral(config),
        "intermediate_size": config.moe_ffn_hidden_size,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
    }


def _gpt_neox(config: GPTConfig) -> Record:
    return {
        **_sizes(config),
        "hidden_act": OLD_ACTIVATIONS[config.activation],
        "layer_norm_eps": config.layernorm_epsilon,
        **_positions(config, "rotary_emb_base", "rotary_pct"),
        "attention_bias": config.qkv_bias,
        "use_parallel_residual": config.parallel_residual,
        "hidden_dropout": config.hidden_dropout,
    }


def _starcoder2(config: GPTConfig) -> Record:
    return {
        **_decoder(config, "norm_epsilon"),
        "use_bias": config.qkv_bias,
        "sliding_window": config.window_size,
        "residual_dropout": config.hidden_dropout,
        "embedding_dropout": config.hidden_dropout,
    }


def _nemotron(config: GPTConfig) -> Record:
    return {
        **_decoder(config, "norm_eps"),
        **_positions(config, "rope_theta", "partial_rotary_factor"),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


@dataclass(frozen=True)
class Writer:
    fields: Callable[[GPTConfig], Record]
    architecture: str
    activation: Activation  # That all models of the family have had so far.
    divided: bool = False  # Its code wants heads that divide hidden_size, whatever their width.
    experts: bool = False  # In every layer.


# Those that the most tools know come first.
WRITERS: Mapping[str, Writer] = {
    "llama": Writer(_llama, "LlamaForCausalLM", "silu", divided=True),
    "mistral": Writer(_mistral, "MistralForCausalLM", "silu"),
    "qwen2": Writer(_qwen2, "Qwen2ForCausalLM", "silu"),
    "qwen3": Writer(_qwen3, "Qwen3ForCausalLM", "silu"),
    "mixtral": Writer(_mixtral, "MixtralForCausalLM", "silu", experts=True),
    "gpt2": Writer(_gpt2, "GPT2LMHeadModel", "gelu_tanh", divided=True),
    "gpt_neox": Writer(_gpt_neox, "GPTNeoXForCausalLM", "gelu", divided=True),
    "starcoder2": Writer(_starcoder2, "Starcoder2ForCausalLM", "gelu_tanh"),
    "nemotron": Writer(_nemotron, "NemotronForCausalLM", "relu2"),
}
