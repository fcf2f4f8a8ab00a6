"""Megatron names mapping: converts tensor names of every Megatron generation to canonical names.

Names changed without a version number, so the generation is inferred from the names: older names
begin with `language_model.transformer` or `language_model.encoder`, newer names with `decoder`.
Canonical names keep a file's layer and expert numbers until `renumber` replaces them. A tensor of
an unsupported architecture is refused, and the error names the architecture. The module opens no
files. It uses shapes only to split grouped experts.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt.checkpoint.logical_tensor import InMemoryTensor
from gpt.dtypes import FLOAT_DTYPE_NAMES
from gpt.errors import CheckpointError
from gpt.formats.mappings.unsupported_architectures import refuse_tensor
from gpt.parallel.weight_sharding import LAYERS_PREFIX

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
POSITION_EMBEDDING = "embedding.position_embeddings.weight"

# Name prefixes from the wrappers of DDP and torch.compile, and from the outer modules of Megatron
# and NeMo.
WRAPPER_PREFIX = re.compile(r"(module\.|model\.|language_model\.|_orig_mod\.)*")
LAYER_NAME = re.compile(r"(transformer|encoder|decoder)\.layers\.(\d+)\.(.+)")
LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")

UP_SUFFIX = "_v"  # Marks the up half of a gated fc1 that is stored as two matrices.
# FP8 states of Transformer Engine, which are pickles, and computed rotary tables.
IGNORED_KEYS = re.compile(r"(.+\.)?(_extra_state\d*|rotary_pos_emb\.inv_freq|rotary_emb\.inv_freq)")
MTP_PREFIX = "mtp."
MTP_NOTE = "heads for multi-token prediction are ignored; the main head is complete"

# Patterns of the part of a name after `layers.N.`, and their replacements.
LAYER_RENAMES: tuple[tuple[str, str], ...] = (
    (r"(?:self_)?attention\.query_key_value\.(.+)", r"self_attention.linear_qkv.\1"),
    (r"(?:self_)?attention\.dense\.(.+)", r"self_attention.linear_proj.\1"),
    (r"input_(?:layer)?norm\.(.+)", r"self_attention.linear_qkv.layer_norm_\1"),
    (r"post_attention_(?:layer)?norm\.(.+)", r"mlp.linear_fc1.layer_norm_\1"),
    (r"mlp\.dense_h_to_4h\.(.+)", r"mlp.linear_fc1.\1"),
    # NeMo's legacy layers store the gate and up matrices separately; this is the up matrix.
    (r"mlp\.dense_h_to_4h_2\.(weight|bias)", rf"mlp.linear_fc1.\1{UP_SUFFIX}"),
    (r"mlp\.dense_4h_to_h\.(.+)", r"mlp.linear_fc2.\1"),
    # Names in Transformer Engine's TransformerLayer.
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
NON_LAYER_RENAMES: tuple[tuple[str, str], ...] = (
    (r"(?:transformer|encoder|decoder)\.final_(?:layer)?norm\.(.+)", r"decoder.final_layernorm.\1"),
    # NeMo's position embedding type `learned_parameters`.
    (r"embedding\.position_embeddings", POSITION_EMBEDDING),
    # The last stage's copy of a tied embedding.
    (r"word_embeddings(?:_for_head)?\.weight", HEAD),
)

# Name patterns of other unsupported parts, and their names for the error message. The first match
# is used. `unsupported_architectures` has the patterns of other architectures.
UNSUPPORTED_PARTS: tuple[tuple[str, str], ...] = (
    (r"vision_|image_|projector", "a multimodal model"),
    (r"adapter|lora_|prompt_(table|encoder|embeddings)", "an adapter"),
    (r"layers\.\d+\.mlp\.local_experts", "the Switch experts of Megatron's older classes"),
    (r"(query|key|value)_weight", "Transformer Engine's layer with separate queries and keys"),
    (r"_(amax|scale_inv)$|_quantizer", "a quantized model"),
)


@dataclass(frozen=True)
class ChunkTensors:
    """One rank's tensors of one model chunk by canonical name, with the file's layer numbers."""

    tensors: dict[str, InMemoryTensor]
    num_layers: int
    legacy: bool  # Saved by Megatron-LM's model classes from before Megatron-Core.
    has_mtp_heads: bool = False  # Multi-token prediction heads, which are ignored.


def rename_tensors(state_dict: Mapping[str, Any], location: str, expert_ranks: int) -> ChunkTensors:
    """Rename the tensors of a rank's `model` dict, flat or nested.

    `expert_ranks` is the expert parallel size.
    """
    tensors: dict[str, InMemoryTensor] = {}
    layers: set[int] = set()
    legacy = has_mtp_heads = False
    for key, value in _flatten(state_dict, location, set()):
        unprefixed_key = key[_wrapper_prefix_length(key) :]
        if IGNORED_KEYS.fullmatch(unprefixed_key):
            continue
        if unprefixed_key.startswith(MTP_PREFIX):
            has_mtp_heads = True
            continue
        refuse_unsupported_part(key, location)
        legacy = legacy or unprefixed_key.startswith(
            ("transformer.", "encoder.", "word_embeddings_for")
        )
        name = canonical_key(unprefixed_key)
        if name in tensors:
            raise CheckpointError(
                f"{location} has {name} twice, as {key} and as "
                f"{tensors[name].location.split(': ')[-1]}; the file mixes several models: copy it "
                "from the training run again"
            )
        tensors[name] = InMemoryTensor(
            _plain_tensor(value, f"{location}: {key}"), f"{location}: {key}"
        )
        match = LAYER_NAME.match(name)
        if match:
            layers.add(int(match[2]))
    if layers != set(range(len(layers))):
        raise CheckpointError(
            f"{location} has layers {_format_layer_numbers(layers)}, but each rank's file must "
            "have all layers from 0 on, without gaps: copy it from the training run again"
        )
    _move_norms(tensors, len(layers))
    _split_grouped_experts(tensors, expert_ranks)
    return ChunkTensors(tensors, len(layers), legacy, has_mtp_heads)


def renumber(name: str, first_layer: int, first_expert: int) -> str:
    """Replace a file's layer and expert numbers, which start at 0, with the model's numbers."""
    if not name.startswith(LAYERS_PREFIX):
        return name
    number, suffix = name[len(LAYERS_PREFIX) :].split(".", 1)
    suffix = LOCAL_EXPERT.sub(lambda m: f".local_experts.{int(m[1]) + first_expert}.", f".{suffix}")
    return f"{LAYERS_PREFIX}{int(number) + first_layer}{suffix}"


def _wrapper_prefix_length(key: str) -> int:
    match = WRAPPER_PREFIX.match(key)
    return match.end() if match else 0


def _flatten(
    record: Mapping[str, Any], location: str, visited_ids: set[int], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each value in nested dicts; a name joins the keys with dots.

    `visited_ids` has the ids of visited dicts. A repeated or cyclic dict is refused, because the
    output could grow without limit.
    """
    if id(record) in visited_ids:
        raise CheckpointError(
            f"{location} contains the dict {prefix[:60]} more than once, so it is broken or "
            "hostile: copy it from the training run again"
        )
    visited_ids.add(id(record))
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flatten(value, location, visited_ids, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def canonical_key(key: str) -> str:
    """Return the canonical name of a key that has no wrapper prefix."""
    match = LAYER_NAME.fullmatch(key)
    prefix = f"{LAYERS_PREFIX}{match[2]}." if match else ""
    suffix = match[3] if match else key
    for pattern, replacement in LAYER_RENAMES if match else NON_LAYER_RENAMES:
        rename_match = re.fullmatch(pattern, suffix)
        if rename_match:
            return prefix + rename_match.expand(replacement)
    return prefix + suffix


def _plain_tensor(value: object, location: str) -> Tensor:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        raise CheckpointError(
            f"{location} is a {type(value).__name__}, not a dense tensor; give the checkpoint that "
            "training saved, before any conversion"
        )
    if value.dtype not in FLOAT_DTYPE_NAMES:
        raise CheckpointError(
            f"{location} is {value.dtype}, not one of {', '.join(FLOAT_DTYPE_NAMES.values())}; "
            "quantized weights are not supported: give the checkpoint before quantization"
        )
    return value.detach()


def refuse_unsupported_part(key: str, location: str) -> None:
    """Refuse a key of a model that is not a GPT or is not supported."""
    refuse_tensor(key, location)
    for pattern, name in UNSUPPORTED_PARTS:
        if re.search(pattern, key):
            raise CheckpointError(
                f"{location} has {key}, a part of {name}, which Preamble does not support; "
                "give the checkpoint of a GPT model"
            )


def _move_norms(tensors: dict[str, InMemoryTensor], layers: int) -> None:
    """In dense layers, rename `pre_mlp_layernorm` to the norm fused into fc1."""
    for layer in range(layers):
        prefix = f"{LAYERS_PREFIX}{layer}."
        has_experts = f"{prefix}mlp.router.weight" in tensors
        for leaf in ("weight", "bias"):
            separate = f"{prefix}pre_mlp_layernorm.{leaf}"
            fused = f"{prefix}mlp.linear_fc1.layer_norm_{leaf}"
            if not has_experts and separate in tensors:
                tensors[fused] = tensors.pop(separate)


def _split_grouped_experts(tensors: dict[str, InMemoryTensor], expert_ranks: int) -> None:
    """Split grouped experts, which have one matrix for all fc1 and one matrix for all fc2.

    In memory, the experts' weights follow each other as (in, out) matrices, which are transposed
    here. The declared shape of the fc1 matrix is (hidden, experts x width), but the grouped GEMM
    views its memory as (experts, hidden, width).
    """
    for name in [name for name in tensors if re.search(r"\.mlp\.experts\.weight[12]$", name)]:
        grouped = tensors.pop(name)
        prefix, linear_number = name[: -len("experts.weight1")], name[-1]
        router = tensors.get(f"{prefix}router.weight")
        experts = router.shape[0] // expert_ranks if router and router.shape else 0
        weight = grouped.torch_tensor
        hidden = weight.shape[0 if linear_number == "1" else -1]
        if experts < 1 or weight.dim() != 2 or weight.numel() % (experts * hidden):
            raise CheckpointError(
                f"{grouped.location} has shape {grouped.shape}, which does not fit {experts} "
                "experts of the router; take the router and the experts from the same checkpoint"
            )
        shape = (experts, hidden, -1) if linear_number == "1" else (experts, -1, hidden)
        for expert, expert_weight in enumerate(weight.contiguous().view(shape)):
            expert_name = f"{prefix}experts.local_experts.{expert}.linear_fc{linear_number}.weight"
            location = f"{grouped.location}, expert {expert}"
            tensors[expert_name] = InMemoryTensor(expert_weight.t(), location)


def _format_layer_numbers(layers: set[int]) -> str:
    """Return the first eight layer numbers, for an error message."""
    return ", ".join(str(layer) for layer in sorted(layers)[:8])
