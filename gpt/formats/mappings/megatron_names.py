"""The names that every generation of Megatron gave its tensors, turned into canonical ones.

Names changed without a version number, so they tell themselves apart: the older ones stand under
`language_model`, in `transformer` or `encoder`, the newer ones in `decoder`. Layers and experts are
still numbered within their own file here. What a GPT does not have names its model, for a refusal.
It knows no files and no shapes but that of grouped experts.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt.checkpoint.logical_tensor import InMemory
from gpt.dtypes import FLOAT_NAMES
from gpt.errors import CheckpointError
from gpt.parallel.sharding import LAYERS

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
POSITIONS = "embedding.position_embeddings.weight"

# Wrappers: torch's data-parallel one and its compiler's, and Megatron's and NeMo's own.
PREFIX = re.compile(r"(module\.|model\.|language_model\.|_orig_mod\.)*")
LAYER = re.compile(r"(transformer|encoder|decoder)\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")

# States of FP8 kernels, which are pickles of their own, and tables that are computed.
UPS = "_v"  # At the end of a name: the ups of a gated fc1 that has a matrix for each half.
DROPPED = re.compile(r"(.+\.)?(_extra_state\d*|rotary_pos_emb\.inv_freq|rotary_emb\.inv_freq)")
EXTRA_HEADS = "mtp."

# What follows `layers.N.`, old and new.
RENAMED: tuple[tuple[str, str], ...] = (
    (r"(?:self_)?attention\.query_key_value\.(.+)", r"self_attention.linear_qkv.\1"),
    (r"(?:self_)?attention\.dense\.(.+)", r"self_attention.linear_proj.\1"),
    (r"input_(?:layer)?norm\.(.+)", r"self_attention.linear_qkv.layer_norm_\1"),
    (r"post_attention_(?:layer)?norm\.(.+)", r"mlp.linear_fc1.layer_norm_\1"),
    (r"mlp\.dense_h_to_4h\.(.+)", r"mlp.linear_fc1.\1"),
    # NeMo's two matrices: this is what the first one gates.
    (r"mlp\.dense_h_to_4h_2\.(weight|bias)", rf"mlp.linear_fc1.\1{UPS}"),
    (r"mlp\.dense_4h_to_h\.(.+)", r"mlp.linear_fc2.\1"),
    # Layers of Transformer Engine as a whole.
    (
        r"self_attention\.layernorm_qkv\.(layer_norm_weight|layer_norm_bias|weight|bias)",
        r"self_attention.linear_qkv.\1",
    ),
    (r"self_attention\.proj\.(.+)", r"self_attention.linear_proj.\1"),
    (r"layernorm_mlp\.(layer_norm_.+)", r"mlp.linear_fc1.\1"),
    (r"layernorm_mlp\.fc([12])_(.+)", r"mlp.linear_fc\1.\2"),
    (
        r"mlp\.experts\.linear_fc([12])\.(weight|bias)(\d+)",
        r"mlp.experts.local_experts.\3.linear_fc\1.\2",
    ),
)
OUTSIDE: tuple[tuple[str, str], ...] = (
    (r"(?:transformer|encoder|decoder)\.final_(?:layer)?norm\.(.+)", r"decoder.final_layernorm.\1"),
    (r"embedding\.position_embeddings", POSITIONS),  # NeMo's `learned_parameters`.
    # The last stage's copy of a tied embedding.
    (r"word_embeddings(?:_for_head)?\.weight", HEAD),
)

# Parts that a GPT of ours does not have, and whose they are. The first that fits speaks.
FOREIGN: tuple[tuple[str, str], ...] = (
    (r"inter_attention|cross_attention|cross_attn", "an encoder-decoder such as T5, or Retro"),
    (r"binary_head|pooler|tokentype_embeddings|lm_head", "BERT"),
    (r"encoder\.layers\.\d+\.self_attention\.linear_qkv", "BERT or T5 of Megatron-Core"),
    (r"mixer\.", "Mamba or another hybrid"),
    (r"vision_|image_|projector", "a multimodal model"),
    (r"linear_(q|kv)_(down|up)_proj|linear_q_proj", "multi-latent or cross attention"),
    (r"softmax_offset", "attention with sinks"),
    (r"adapter|lora_|prompt_(table|encoder|embeddings)", "an adapter"),
    (r"layers\.\d+\.mlp\.local_experts", "the Switch experts of Megatron's older classes"),
    (r"(query|key|value)_weight", "Transformer Engine's layer with separate queries and keys"),
    (r"_(amax|scale_inv)$|_quantizer", "a quantized model"),
)


@dataclass(frozen=True)
class Names:
    """One rank's tensors of one chunk by canonical names, but for the numbers of its own."""

    tensors: dict[str, InMemory]
    layers: int
    legacy: bool  # The classes before Megatron-Core.
    extra_heads: bool = False  # Of multi-token prediction; left out.


def rename(model: Mapping[str, Any], where: str, expert_ranks: int) -> Names:
    """A rank's `model` dict, flat or nested. `expert_ranks` share out the experts."""
    tensors: dict[str, InMemory] = {}
    layers: set[int] = set()
    legacy = extra_heads = False
    for key, value in _flat(model, where, set()):
        bare = key[_prefix(key) :]
        if DROPPED.fullmatch(bare):
            continue
        if bare.startswith(EXTRA_HEADS):
            extra_heads = True
            continue
        refuse_foreign(key, where)
        legacy = legacy or bare.startswith(("transformer.", "encoder.", "word_embeddings_for"))
        name = canonical(bare)
        if name in tensors:
            raise CheckpointError(
                f"{where} holds {name} twice, as {key} and as {tensors[name].where.split(': ')[-1]}"
                "; it is not one model's file: take it from the training run again"
            )
        tensors[name] = InMemory(_plain(value, f"{where}: {key}"), f"{where}: {key}")
        match = LAYER.match(name)
        if match:
            layers.add(int(match[2]))
    if layers != set(range(len(layers))):
        raise CheckpointError(
            f"{where} has layers {_numbers(layers)}, which do not count from 0; every file numbers "
            "its own layers: take it from the training run again"
        )
    _move_norms(tensors, len(layers))
    _split_groups(tensors, expert_ranks)
    return Names(tensors, len(layers), legacy, extra_heads)


def renumbered(name: str, first_layer: int, first_expert: int) -> str:
    """The model's own number of a layer and an expert that a file numbers from 0."""
    if not name.startswith(LAYERS):
        return name
    number, rest = name[len(LAYERS) :].split(".", 1)
    rest = EXPERT.sub(lambda m: f".local_experts.{int(m[1]) + first_expert}.", f".{rest}")
    return f"{LAYERS}{int(number) + first_layer}{rest}"


def _prefix(key: str) -> int:
    match = PREFIX.match(key)
    return match.end() if match else 0


def _flat(
    record: Mapping[str, Any], where: str, seen: set[int], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """`seen` are the dicts that were met; one in itself, or everywhere, has no end."""
    if id(record) in seen:
        raise CheckpointError(
            f"{where} holds {prefix[:60]} more than once, which no model does; it is broken or "
            "hostile: take it from the training run again"
        )
    seen.add(id(record))
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, where, seen, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def canonical(bare: str) -> str:
    match = LAYER.fullmatch(bare)
    for old, new in RENAMED if match else OUTSIDE:
        found = re.fullmatch(old, match[3] if match else bare)
        if found:
            bare = found.expand(new)
            return f"{LAYERS}{match[2]}.{bare}" if match else bare
    return f"{LAYERS}{match[2]}.{match[3]}" if match else bare


def _plain(value: object, where: str) -> Tensor:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, not a plain tensor; save the state dict of the "
            "model as it was trained"
        )
    if value.dtype not in FLOAT_NAMES:
        raise CheckpointError(
            f"{where} is {value.dtype}, not one of {', '.join(FLOAT_NAMES.values())}; quantized "
            "weights are not read: take the checkpoint from before"
        )
    return value.detach()


def refuse_foreign(key: str, where: str) -> None:
    for pattern, model in FOREIGN:
        if re.search(pattern, key):
            raise CheckpointError(
                f"{where} holds {key}, a part of {model}, which Preamble does not compute; it "
                "reads GPT models"
            )


def _move_norms(tensors: dict[str, InMemory], layers: int) -> None:
    """A dense layer's second norm belongs to its fc1, an expert layer's stands for itself."""
    for layer in range(layers):
        prefix = f"{LAYERS}{layer}."
        experts = f"{prefix}mlp.router.weight" in tensors
        for leaf in ("weight", "bias"):
            apart, fused = f"{prefix}pre_mlp_layernorm.{leaf}", f"mlp.linear_fc1.layer_norm_{leaf}"
            if not experts and apart in tensors:
                tensors[f"{prefix}{fused}"] = tensors.pop(apart)


def _split_groups(tensors: dict[str, InMemory], expert_ranks: int) -> None:
    """Grouped experts are one matrix each way, in memory one expert after the other.

    The declared shape of the first, (hidden, experts x width), is not how it lies; its kernel
    views it as (experts, hidden, width). Both are (in, out), so each expert's is turned.
    """
    for name in [name for name in tensors if re.search(r"\.mlp\.experts\.weight[12]$", name)]:
        grouped = tensors.pop(name)
        prefix, number = name[: -len("experts.weight1")], name[-1]
        router = tensors.get(f"{prefix}router.weight")
        experts = router.shape[0] // expert_ranks if router and router.shape else 0
        whole = grouped.value
        hidden = whole.shape[0 if number == "1" else -1]
        if experts < 1 or whole.dim() != 2 or whole.numel() % (experts * hidden):
            raise CheckpointError(
                f"{grouped.where} has shape {grouped.shape}, which is not that of {experts} "
                "experts; the router and the experts disagree: take both from one checkpoint"
            )
        shape = (experts, hidden, -1) if number == "1" else (experts, -1, hidden)
        for expert, value in enumerate(whole.contiguous().view(shape)):
            leaf = f"{prefix}experts.local_experts.{expert}.linear_fc{number}.weight"
            tensors[leaf] = InMemory(value.t(), f"{grouped.where}, expert {expert}")


def _numbers(values: set[int]) -> str:
    return ", ".join(str(value) for value in sorted(values)[:8])
