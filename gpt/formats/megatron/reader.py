"""Megatron-LM reader (`--ckpt-format torch`): joins rank files of any split to logical tensors.

Each rank's tensors get canonical names, and layers get global numbers by counting the layers of the
pipeline stages in order. A logical (unsharded) tensor is mapped to its parts on the tensor parallel
ranks: the parts are concatenated along rows or columns, gate rows are placed above up rows, and the
QKV rows of old versions are mapped to the current order. The module reads only a few rows of some
weights, to compare copies of a tensor. `rank_files` finds the files, and
`gpt/formats/mappings/megatron_args.py` interprets the args.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from gpt.checkpoint.logical_tensor import (
    Checkpoint,
    InMemoryTensor,
    LogicalTensor,
    ReplicaPair,
    SourceSlice,
    find_tokenizer,
    majority_dtype,
    refuse_unexpected_weights,
    refuse_untied_head,
    samples_equal,
)
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPE_NAMES
from gpt.errors import CheckpointError
from gpt.formats.mappings.hybrid_args import config_from_args
from gpt.formats.mappings.hybrid_layers import gpt_name, refuse_unpaired_layers, stored_layers
from gpt.formats.mappings.megatron_args import (
    UNTIED_HINT,
    MegatronArgs,
    PartialConfig,
    WeightShapes,
    config_from_shapes,
    resolve_config,
)
from gpt.formats.mappings.megatron_names import (
    EMBEDDING,
    HEAD,
    LOCAL_EXPERT,
    MTP_NOTE,
    UP_SUFFIX,
    ChunkTensors,
    rename_tensors,
    renumber,
)
from gpt.formats.megatron.qkv_layout import RankParts, RowRun, current_qkv_rows
from gpt.formats.megatron.rank_files import (
    RankCoordinates,
    RankFiles,
    find_iteration,
    newer_iteration_notes,
    open_rank_files,
)
from gpt.parallel.vocabulary_padding import local_vocab_range
from gpt.parallel.weight_sharding import ParameterSpec, ShardRule, parameter_specs

FINAL_NORM = "decoder.final_layernorm.weight"


@dataclass
class GatheredTensors:
    """The tensors of all ranks by canonical name, with global layer and expert numbers."""

    parts: dict[str, RankParts] = field(default_factory=dict)
    # If two stages or model chunks have the same tensor, `parts` contains the earlier copy, and
    # this list contains (name, parts) of the later copy.
    stage_duplicates: list[tuple[str, RankParts]] = field(default_factory=list)
    # The replicas of non-expert tensors on expert ranks other than 0.
    expert_replicas: list[ReplicaPair] = field(default_factory=list)
    # Names of tensors whose parts are the gate matrices of all ranks, then the up matrices of all
    # ranks.
    separate_gate_up: set[str] = field(default_factory=set)
    num_layers: int = 0
    legacy: bool = False  # Saved by Megatron-LM's model classes from before Megatron-Core.
    has_mtp_heads: bool = False  # Multi-token prediction heads, which are ignored.
    # The pattern of the layers in the files if they are a HybridModel's, else empty.
    hybrid_layers: str = ""


def open_megatron(path: Path, overrides: GPTConfig | Mapping[str, Any] | None = None) -> Checkpoint:
    """Open a checkpoint root or an iteration. `overrides` replaces fields of GPTConfig."""
    iteration = find_iteration(path)
    if iteration is None:
        raise CheckpointError(
            f"{path} has no rank directories such as mp_rank_00 with model_optim_rng.pt; give the "
            "directory that contains them, or the root with the tracker file"
        )
    ranks = open_rank_files(iteration)
    args = next(iter(ranks.files.values())).args

    def infer_config(weights: WeightShapes) -> PartialConfig:
        return (
            config_from_shapes(weights)
            if args is None
            else config_from_args(MegatronArgs(args, str(iteration)), weights)
        )

    checkpoint = join_ranks(ranks, iteration, overrides or {}, infer_config)
    notes = (*checkpoint.notes, *newer_iteration_notes(iteration))
    return replace(checkpoint, tokenizer=find_tokenizer_near(iteration), notes=notes)


def join_ranks(
    ranks: RankFiles,
    path: Path,
    overrides: GPTConfig | Mapping[str, Any],
    infer_config: Callable[[WeightShapes], PartialConfig],
) -> Checkpoint:
    """Join the tensors of all ranks to one checkpoint.

    `infer_config` returns the config; it is not called if `overrides` is a GPTConfig. NeMo 1 files
    have the same tensor names and sharding, so NeMo's readers call this function too.
    """
    gathered = gather_tensors(ranks)
    _pair_hybrid_layers(gathered, path)
    config, notes = _resolve_config(gathered, path, overrides, infer_config)
    if not config.untie_embeddings_and_output_weights and HEAD in gathered.parts:
        # With a tied embedding, the head is the last stage's copy of the embedding.
        head = gathered.parts.pop(HEAD)
        refuse_untied_head(path, head, gathered.parts[EMBEDDING], UNTIED_HINT)
        gathered.stage_duplicates.append((EMBEDDING, head))
    for name, duplicate in gathered.stage_duplicates:
        _refuse_unequal_parts(name, gathered.parts[name], duplicate)
    # Megatron-Core has only the current order of QKV rows, which checkpoint_version 2 introduced.
    version = next(iter(ranks.files.values())).version if gathered.legacy else 3.0
    table = parameter_specs(config)
    unexpected_tensors = (
        parts[0].location for name, parts in gathered.parts.items() if name not in table
    )
    refuse_unexpected_weights(path, unexpected_tensors)
    tensors = {}
    for name, parameter in table.items():
        if name in gathered.parts:
            # Separate gate and up matrices are concatenated along rows: the gate matrices of all
            # ranks, then the up matrices of all ranks.
            is_gate_up_pair = (
                name in gathered.separate_gate_up and parameter.shard_rule is ShardRule.GATED
            )
            effective_parameter = (
                replace(parameter, shard_rule=ShardRule.ROWS) if is_gate_up_pair else parameter
            )
            tensors[name] = _join_parts(effective_parameter, gathered.parts[name], config, version)
    checkpoint = Checkpoint(
        path,
        "megatron",
        config,
        tensors,
        files=tuple(file.path for file in ranks.files.values()),
        notes=tuple(notes),
        split={**asdict(ranks.parallel_sizes), "vpp": ranks.chunks},
        copies=_replica_pairs(gathered, table),
        hybrid_layers=gathered.hybrid_layers,
    )
    checkpoint.check()
    return checkpoint


def gather_tensors(ranks: RankFiles) -> GatheredTensors:
    """Collect all tensors by name.

    Layers are numbered globally: model chunk 0 of all stages, then model chunk 1 of all stages, and
    so on.
    """
    gathered = GatheredTensors()
    for chunk in range(ranks.chunks):
        for stage in range(ranks.parallel_sizes.pp):
            tensors_by_rank = {
                rank: rename_tensors(
                    file.chunks.get(chunk, {}),
                    str(file.path) + (f": model{chunk}" if ranks.chunks > 1 else ""),
                    ranks.parallel_sizes.ep,
                )
                for rank, file in ranks.files.items()
                if rank.stage == stage
            }
            _add_stage(gathered, tensors_by_rank, ranks)
    for name in [name for name in gathered.parts if name.endswith(UP_SUFFIX)]:
        gates = gathered.parts.get(name.removesuffix(UP_SUFFIX))
        if gates is not None:
            gates += gathered.parts.pop(name)
            gathered.separate_gate_up.add(name.removesuffix(UP_SUFFIX))
    return gathered


def _pair_hybrid_layers(gathered: GatheredTensors, path: Path) -> None:
    """Give the tensors of a HybridModel the names and the number of layers of a GPT."""
    layers = stored_layers(gathered.parts, gathered.num_layers)
    if not layers:
        return
    refuse_unpaired_layers(layers, f"{path}: the pattern of its layers")
    gathered.parts = {gpt_name(name): parts for name, parts in gathered.parts.items()}
    gathered.stage_duplicates = [
        (gpt_name(name), parts) for name, parts in gathered.stage_duplicates
    ]
    gathered.expert_replicas = [
        replace(pair, name=gpt_name(pair.name)) for pair in gathered.expert_replicas
    ]
    gathered.separate_gate_up = {gpt_name(name) for name in gathered.separate_gate_up}
    gathered.num_layers //= 2
    gathered.hybrid_layers = layers


def _add_stage(
    gathered: GatheredTensors,
    tensors_by_rank: Mapping[RankCoordinates, ChunkTensors],
    ranks: RankFiles,
) -> None:
    sizes = ranks.parallel_sizes
    stage = next(iter(tensors_by_rank)).stage
    first = tensors_by_rank[RankCoordinates(0, stage, 0)]
    for rank, chunk_tensors in tensors_by_rank.items():
        differing = sorted(set(chunk_tensors.tensors) ^ set(first.tensors))
        if differing:
            raise CheckpointError(
                f"{ranks.files[RankCoordinates(0, stage, 0)].path} and {ranks.files[rank].path} "
                f"are of the same stage, but only one of them has {differing[0]}; two checkpoints "
                "are mixed: take all ranks from the same checkpoint"
            )
    _refuse_swapped_stages(gathered, first, ranks.files[RankCoordinates(0, stage, 0)].path)
    experts_per_rank: dict[str, int] = {}  # By the name's prefix before the expert number.
    for name in first.tensors:
        match = LOCAL_EXPERT.search(name)
        if match:
            prefix = name[: match.start()]
            experts_per_rank[prefix] = max(experts_per_rank.get(prefix, 0), int(match[1]) + 1)
    for name in first.tensors:
        match = LOCAL_EXPERT.search(name)
        local_experts = experts_per_rank[name[: match.start()]] if match else 0
        # Each expert rank has its own experts; other tensors are replicated on the expert ranks.
        for expert_rank in range(sizes.ep if match else 1):
            global_name = renumber(name, gathered.num_layers, expert_rank * local_experts)
            parts = [
                tensors_by_rank[RankCoordinates(t, stage, expert_rank)].tensors[name]
                for t in range(sizes.tp)
            ]
            if global_name in gathered.parts:
                gathered.stage_duplicates.append((global_name, parts))
            else:
                gathered.parts[global_name] = parts
            if match:
                continue
            for replica_rank in range(1, sizes.ep):
                for t, primary in enumerate(parts):
                    coordinates = RankCoordinates(t, stage, replica_rank)
                    replica = tensors_by_rank[coordinates].tensors[name]
                    gathered.expert_replicas.append(ReplicaPair(global_name, primary, replica))
    gathered.num_layers += first.num_layers
    gathered.legacy = gathered.legacy or first.legacy
    gathered.has_mtp_heads = gathered.has_mtp_heads or first.has_mtp_heads


def _refuse_swapped_stages(
    gathered: GatheredTensors, chunk_tensors: ChunkTensors, path: Path
) -> None:
    """Refuse swapped stages: layers after the final norm, or an embedding after layers."""
    layers_after_norm = chunk_tensors.num_layers and FINAL_NORM in gathered.parts
    embedding_after_layers = (
        gathered.num_layers
        and EMBEDDING in chunk_tensors.tensors
        and EMBEDDING not in gathered.parts
    )
    if layers_after_norm or embedding_after_layers:
        problem = (
            f"has layers, although an earlier stage has {FINAL_NORM}"
            if layers_after_norm
            else f"has {EMBEDDING}, although an earlier stage has layers"
        )
        raise CheckpointError(
            f"{path} {problem}; the files of two stages are swapped: put each rank's file into its "
            "own directory"
        )


def _resolve_config(
    gathered: GatheredTensors,
    path: Path,
    overrides: GPTConfig | Mapping[str, Any],
    infer_config: Callable[[WeightShapes], PartialConfig],
) -> tuple[GPTConfig, list[str]]:
    """Return the config, and notes for the user about fields that are assumed."""
    parts = gathered.parts
    shapes = {name: [part.shape for part in rank_parts] for name, rank_parts in parts.items()}
    if any(len(shape) != 2 for shape in shapes.get(EMBEDDING, [()])):
        raise CheckpointError(
            f"{path}: no rank has {EMBEDDING} as a matrix; the model is not a GPT, or the files of "
            "the first stage are missing: take all ranks from the same checkpoint"
        )
    weights = WeightShapes(shapes, gathered.num_layers, gathered.legacy, gathered.hybrid_layers)
    dtype = majority_dtype(part for rank_parts in parts.values() for part in rank_parts)
    config, notes = resolve_config(
        path, weights, FLOAT_DTYPE_NAMES[dtype or torch.float32], overrides, infer_config
    )
    if gathered.has_mtp_heads:
        notes["mtp"] = MTP_NOTE
    return config, list(notes.values())


def _join_parts(
    parameter: ParameterSpec, parts: RankParts, config: GPTConfig, version: float
) -> LogicalTensor:
    """Map one canonical tensor to its parts on the tensor parallel ranks."""
    shape = parameter.shape
    ranks = len(parts)
    for part in parts:
        _check_shape(parameter, part, parts)
    match parameter.shard_rule:
        case ShardRule.REPLICATED:
            return _concat_runs(shape, [(parts[0], 0, shape[0], 1)])
        case ShardRule.ROWS:
            return _concat_runs(shape, [(part, 0, part.shape[0], 1) for part in parts])
        case ShardRule.COLUMNS:
            width = shape[1] // ranks
            slices = [
                SourceSlice(part, (0, shape[0]), (t * width, (t + 1) * width))
                for t, part in enumerate(parts)
            ]
            return _logical_tensor(shape, slices)
        case ShardRule.GATED:
            # A rank has its gate rows above its up rows; the logical tensor has the gate rows of
            # all ranks above the up rows of all ranks.
            half = shape[0] // ranks // 2
            return _concat_runs(
                shape, [(part, half_start, half, 1) for half_start in (0, half) for part in parts]
            )
        case ShardRule.QKV:
            return _concat_runs(shape, current_qkv_rows(parts, config, version))
        case ShardRule.KV_HEADS:
            raise AssertionError("Megatron-LM has no parameter that is split by KV heads")
        case ShardRule.VOCAB:
            padded_rows = parts[0].shape[0]
            ranges = [local_vocab_range(shape[0], padded_rows, t) for t in range(ranks)]
            runs = [
                (part, 0, stop - start, 1)
                for part, (start, stop) in zip(parts, ranges, strict=True)
                if start < stop
            ]
            return _concat_runs(shape, runs)


def _check_shape(parameter: ParameterSpec, part: InMemoryTensor, parts: RankParts) -> None:
    shape, ranks = parameter.shape, len(parts)
    dim = 1 if parameter.shard_rule is ShardRule.COLUMNS else 0
    if parameter.shard_rule is ShardRule.REPLICATED:
        expected_shape: tuple[int, ...] = shape
    elif parameter.shard_rule is ShardRule.VOCAB:
        expected_shape = (parts[0].shape[0] if parts[0].shape else 0, *shape[1:])
    else:
        expected_shape = (*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :])
        halves = 2 if parameter.shard_rule is ShardRule.GATED else 1
        if shape[dim] % (ranks * halves):
            expected_shape = ()
    if part.shape != expected_shape:
        if expected_shape:
            expectation = (
                f"need {expected_shape} for {parameter.name} of shape {shape} on {ranks} tensor "
                "ranks"
            )
        else:
            expectation = (
                f"but {parameter.name} of shape {shape} cannot be divided equally over {ranks} "
                f"tensor ranks along dimension {dim}"
            )
        raise CheckpointError(
            f"{part.location}: found {part.shape}, {expectation}; the args do not fit the weights: "
            "take both from the same checkpoint"
        )


def _concat_runs(shape: tuple[int, ...], runs: list[RowRun]) -> LogicalTensor:
    slices = []
    row = 0
    for part, first_row, count, stride in runs:
        slices.append(
            SourceSlice(part, (row, row + count), source_row=first_row, row_stride=stride)
        )
        row += count
    return _logical_tensor(shape, slices)


def _logical_tensor(shape: tuple[int, ...], slices: list[SourceSlice]) -> LogicalTensor:
    """Make a logical tensor whose dtype represents the values of all parts exactly."""
    dtype = reduce(torch.promote_types, (source_slice.source.dtype for source_slice in slices))
    return LogicalTensor(shape, dtype, tuple(slices))


def _replica_pairs(
    gathered: GatheredTensors, table: Mapping[str, ParameterSpec]
) -> tuple[ReplicaPair, ...]:
    """Return a pair for each replica of a tensor on another tensor rank, expert rank or stage."""
    replica_pairs = list(gathered.expert_replicas)
    for name, parts in gathered.parts.items():
        if table[name].shard_rule is ShardRule.REPLICATED:
            replica_pairs += [ReplicaPair(name, parts[0], part) for part in parts[1:]]
    for name, parts in gathered.stage_duplicates:
        pairs = zip(gathered.parts[name], parts, strict=True)
        replica_pairs += [ReplicaPair(name, primary, part) for primary, part in pairs]
    return tuple(replica_pairs)


def _refuse_unequal_parts(name: str, first: RankParts, duplicate: RankParts) -> None:
    if not samples_equal(first, duplicate):
        raise CheckpointError(
            f"{duplicate[0].location} is not equal to {first[0].location}, although both store "
            f"{name}; files are swapped or belong to two checkpoints: take all ranks from the same "
            "checkpoint"
        )


def find_tokenizer_near(folder: Path) -> Path | None:
    """Find a tokenizer in `folder`, in its parent, or in their subfolders `tokenizer`."""
    folders = (folder, folder.parent)
    return find_tokenizer(
        *(candidate for parent in folders for candidate in (parent, parent / "tokenizer"))
    )
