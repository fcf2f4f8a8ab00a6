"""Megatron-LM `torch` writer: plans one file per rank, with the tensors of that rank.

In each file, each virtual pipeline chunk has its own state dict, in which layers and experts are
numbered from 0. The file of an expert rank also has the tensors outside the experts. If the
embedding is tied, the last stage has a copy of it. The module maps state-dict keys to parts of
logical tensors; `torch_save` plans the bytes of the files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from checkpoints_tools.layout.layout import (
    Layout,
    ParallelSplit,
    TargetFile,
    literal_file,
    saved_part,
    stored_vocab_rows,
)
from checkpoints_tools.layout.torch_save import TensorPlaceholder, plan_archive
from checkpoints_tools.writers.megatron_args import (
    LayerSpec,
    ModelClass,
    build_args,
    check_layer_spec,
    check_supported,
    load_notes,
    plan_stages,
)
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.formats.mappings.hybrid_layers import hybrid_name
from gpt.formats.mappings.megatron_names import EMBEDDING, HEAD, LOCAL_EXPERT, renumber
from gpt.formats.megatron.rank_files import (
    TRACKER_FILE,
    WEIGHT_FILES,
    ParallelSizes,
    RankCoordinates,
)
from gpt.parallel.vocabulary_padding import VOCABULARY_MULTIPLE
from gpt.parallel.weight_sharding import (
    LAYERS_PREFIX,
    ParameterSpec,
    is_on_stage,
    layer_number,
    parameter_specs,
)

ITERATION_FOLDER = "release"  # Megatron's name for weights without optimizer state.
CHECKPOINT_VERSION = 3.0  # Megatron's version number for the row order of QKV weights.

# Local layer specs have separate norm modules; Transformer Engine fuses them into the next linear.
LOCAL_SPEC_NAMES: Mapping[str, str] = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
# Transformer Engine modules, which have an extra-state entry (for FP8 scales) in the state dict.
TE_MODULES = ("linear_qkv.", "linear_proj.", "linear_fc1.", "linear_fc2.")
EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class _ChunkParameter:
    """A parameter of a pipeline chunk, before experts are distributed over expert ranks."""

    parameter: ParameterSpec
    dtype: torch.dtype
    name: str  # The state-dict key in the chunk.
    expert: int | None  # Global expert number; None: not a parameter of an expert.


@dataclass(frozen=True)
class _SplitPlan:
    """Settings that are the same for all ranks."""

    config: GPTConfig
    split: ParallelSplit
    vocab_rows: int  # The padded vocabulary size.
    spec: LayerSpec


def plan_layout(
    checkpoint: Checkpoint,
    split: ParallelSplit,
    *,
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
    spec: LayerSpec = "te",
    model: ModelClass = "gpt",
) -> Layout:
    """Plan the target's files; `checkpoint` already has the target's dtype."""
    config = checkpoint.config
    check_supported(config, split, model)
    check_layer_spec(spec, model)
    vocab_rows = stored_vocab_rows(config, split.tp, vocabulary_multiple)
    args = build_args(
        config,
        split,
        vocabulary_multiple=vocabulary_multiple,
        spec=spec,
        model=model,
        tokenizer=checkpoint.tokenizer,
    )
    sizes = ParallelSizes(split.tp, split.pp, split.ep)
    files = []
    for rank, state_dicts in rank_state_dicts(checkpoint, split, vocab_rows, spec, model):
        record: dict[str, Any] = {
            "args": args,
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": 0,
        }
        for chunk, state_dict in enumerate(state_dicts):
            record[f"model{chunk}" if split.vpp > 1 else "model"] = state_dict
        archive = plan_archive(record)
        path = f"{ITERATION_FOLDER}/{sizes.folder_name(rank)}/{WEIGHT_FILES[0]}"
        files.append(
            TargetFile(path, archive.size, archive.literals, archive.placements, archive.patches)
        )
    last_files = (literal_file(TRACKER_FILE, ITERATION_FOLDER.encode()),)
    layout_notes = tuple(load_notes(config, split, spec, model))
    return Layout(
        "megatron",
        tuple(files),
        ITERATION_FOLDER,
        last_files,
        layout_notes,
        padded_vocab_size=vocab_rows,
    )


def rank_state_dicts(
    checkpoint: Checkpoint,
    split: ParallelSplit,
    vocab_rows: int,
    spec: LayerSpec = "te",
    model: ModelClass = "gpt",
) -> Iterator[tuple[RankCoordinates, list[dict[str, TensorPlaceholder | None]]]]:
    """Yield every rank with its state dicts, one per pipeline chunk.

    The embedding and the LM head are padded to `vocab_rows` rows.
    """
    config = checkpoint.config
    plan = _SplitPlan(config, split, vocab_rows, spec)
    table = _parameter_dtypes(checkpoint)
    chunks = [
        [_chunk_parameters(table, layers, config, spec, model) for layers in stage]
        for stage in plan_stages(config, split).layers
    ]
    for rank in ParallelSizes(split.tp, split.pp, split.ep).ranks():
        yield rank, [_rank_state_dict(plan, chunk, rank) for chunk in chunks[rank.stage]]


def _parameter_dtypes(checkpoint: Checkpoint) -> list[tuple[ParameterSpec, torch.dtype]]:
    """Return all parameters and the dtypes in which they are stored."""
    return [
        # Megatron stores the router's expert bias in fp32, whatever the model's dtype.
        (
            parameter,
            torch.float32 if name.endswith(".expert_bias") else checkpoint.tensors[name].dtype,
        )
        for name, parameter in parameter_specs(checkpoint.config).items()
    ]


def _chunk_parameters(
    table: list[tuple[ParameterSpec, torch.dtype]],
    layers: range,
    config: GPTConfig,
    spec: LayerSpec,
    model: ModelClass,
) -> list[_ChunkParameter]:
    """Return the parameters of a pipeline chunk; layers are numbered from 0 within the chunk."""
    selected_parameters = []
    is_first = layers.start == 0
    is_last = layers.stop == config.num_layers
    is_tied = not config.untie_embeddings_and_output_weights
    for parameter, dtype in table:
        name = parameter.name
        if not is_on_stage(config, name, layers):
            continue
        match = LOCAL_EXPERT.search(name)
        local_name = renumber(name, -layers.start, 0)
        if spec == "local" and layer_number(name) is not None:
            for fused, separate in LOCAL_SPEC_NAMES.items():
                local_name = local_name.replace(fused, separate)
        if model == "hybrid":
            local_name = hybrid_name(local_name)
        if name != EMBEDDING or is_first:
            selected_parameters.append(
                _ChunkParameter(parameter, dtype, local_name, int(match[1]) if match else None)
            )
        if name == EMBEDDING and is_last and is_tied and not is_first:
            selected_parameters.append(_ChunkParameter(parameter, dtype, HEAD, None))
    return selected_parameters


def _rank_state_dict(
    plan: _SplitPlan, chunk_parameters: list[_ChunkParameter], rank: RankCoordinates
) -> dict[str, TensorPlaceholder | None]:
    """Return the state dict of one chunk on one rank."""
    config, split = plan.config, plan.split
    experts_per_rank = config.num_experts // split.ep
    experts = range(rank.expert * experts_per_rank, (rank.expert + 1) * experts_per_rank)
    state_dict: dict[str, TensorPlaceholder | None] = {}
    for chunk_parameter in chunk_parameters:
        name, parameter = chunk_parameter.name, chunk_parameter.parameter
        if chunk_parameter.expert is not None:
            if chunk_parameter.expert not in experts:
                continue
            name = renumber(name, 0, -experts.start)
        part = saved_part(parameter, config, rank.tensor, split.tp, plan.vocab_rows)
        state_dict[name] = TensorPlaceholder(
            parameter.name, part, parameter.shape, chunk_parameter.dtype
        )
    if plan.spec == "te":
        state_dict.update(dict.fromkeys(_extra_state_keys(state_dict)))
    return state_dict


def _extra_state_keys(state_dict: Mapping[str, object]) -> Iterator[str]:
    """Yield the `_extra_state` keys of Transformer Engine modules.

    Older versions of Transformer Engine fail to load without these keys.
    """
    for name in state_dict:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and f"{module}.".endswith(TE_MODULES):
            yield f"{module}.{EXTRA_STATE}"
            if name.startswith(LAYERS_PREFIX) and name.endswith("linear_qkv.weight"):
                yield f"{module.removesuffix('linear_qkv')}core_attention.{EXTRA_STATE}"
