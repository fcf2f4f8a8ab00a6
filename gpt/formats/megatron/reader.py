"""Megatron-LM checkpoints of `--ckpt-format torch`, at any split: rank files as one logical model.

Each rank's tensors get canonical names; stages are put in order by counting the layers that they
hold; and a whole tensor is a map of its parts on the tensor ranks: joined along rows or columns,
gates over ups, rows of the oldest attentions put in today's order. No weight is read.
Where the files came from, and what the arguments mean, is known elsewhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from gpt.checkpoint.logical_tensor import (
    Checkpoint,
    Copy,
    InMemory,
    Logical,
    Piece,
    alike,
    common_dtype,
    find_tokenizer,
    refuse_leftover,
    refuse_untied,
)
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_NAMES
from gpt.errors import CheckpointError
from gpt.formats.mappings.megatron_args import (
    UNTIED,
    Answer,
    Args,
    Weights,
    architecture,
    describe,
    infer,
)
from gpt.formats.mappings.megatron_names import (
    EMBEDDING,
    EXPERT,
    HEAD,
    UPS,
    Names,
    rename,
    renumbered,
)
from gpt.formats.megatron.rank_files import (
    Place,
    Ranks,
    find_iteration,
    newer_iteration,
    open_ranks,
)
from gpt.parallel.sharding import Parameter, Split, parameters

LAST_NORM = "decoder.final_layernorm.weight"

Parts = list[InMemory]  # One logical tensor on tensor rank 0, 1, and so on.


@dataclass
class Gathered:
    """All ranks' tensors under the model's own numbers."""

    parts: dict[str, Parts] = field(default_factory=dict)
    copies: list[tuple[str, Parts]] = field(default_factory=list)  # Of what a stage had before.
    replicas: list[Copy] = field(default_factory=list)  # On the expert ranks.
    paired: set[str] = field(default_factory=set)  # All gates' parts, then all ups'.
    num_layers: int = 0
    legacy: bool = False
    extra_heads: bool = False


def open_megatron(path: Path, changes: GPTConfig | Mapping[str, Any] | None = None) -> Checkpoint:
    """A root or an iteration. `changes` are fields of GPTConfig that override what is found."""
    iteration = find_iteration(path)
    if iteration is None:
        raise CheckpointError(
            f"{path} has no rank directories such as mp_rank_00 with model_optim_rng.pt; give the "
            "directory that holds them, or the root with the tracker file"
        )
    ranks = open_ranks(iteration)
    args = next(iter(ranks.saved.values())).args

    def ask(weights: Weights) -> Answer:
        return infer(weights) if args is None else describe(Args(args, str(iteration)), weights)

    checkpoint = join_ranks(ranks, iteration, changes or {}, ask)
    notes = (*checkpoint.notes, *newer_iteration(iteration))
    return replace(checkpoint, tokenizer=tokenizer_beside(iteration), notes=notes)


def join_ranks(
    ranks: Ranks,
    path: Path,
    changes: GPTConfig | Mapping[str, Any],
    ask: Callable[[Weights], Answer],
) -> Checkpoint:
    """One model of all ranks' tensors; `ask` describes it where `changes` are not a whole config.

    Formats that share these names and this split are told apart by whoever calls.
    """
    gathered = gather(ranks)
    config, notes = _config(gathered, path, changes, ask)
    if not config.untie_embeddings_and_output_weights and HEAD in gathered.parts:
        # The last stage's copy of a tied embedding; a head of its own is refused.
        head = gathered.parts.pop(HEAD)
        refuse_untied(path, head, gathered.parts[EMBEDDING], UNTIED)
        gathered.copies.append((EMBEDDING, head))
    for name, copy in gathered.copies:
        _refuse_unequal(name, gathered.parts[name], copy)
    # Rows were put in order from the second version on; Megatron-Core never knew another.
    version = next(iter(ranks.saved.values())).version if gathered.legacy else 3.0
    table = parameters(config)
    left = (parts[0].where for name, parts in gathered.parts.items() if name not in table)
    refuse_leftover(path, left)
    tensors = {}
    for name, parameter in table.items():
        if name in gathered.parts:
            # Where gates and ups have a matrix each, all parts lie one under the other.
            pair = name in gathered.paired and parameter.split is Split.GATED
            whole = replace(parameter, split=Split.ROWS) if pair else parameter
            tensors[name] = _join(whole, gathered.parts[name], config, version)
    checkpoint = Checkpoint(
        *(path, "megatron", config, tensors),
        files=tuple(saved.path for saved in ranks.saved.values()),
        notes=tuple(notes),
        split={**asdict(ranks.split), "vpp": ranks.chunks},
        copies=_copies(gathered, table),
    )
    checkpoint.check()
    return checkpoint


def gather(ranks: Ranks) -> Gathered:
    """Every tensor by its name in the model. Layers run through all stages, chunk by chunk."""
    gathered = Gathered()
    for chunk in range(ranks.chunks):
        for stage in range(ranks.split.pp):
            held = {
                place: rename(
                    saved.chunks.get(chunk, {}),
                    str(saved.path) + (f": model{chunk}" if ranks.chunks > 1 else ""),
                    ranks.split.ep,
                )
                for place, saved in ranks.saved.items()
                if place.stage == stage
            }
            _add_stage(gathered, held, ranks)
    for name in [name for name in gathered.parts if name.endswith(UPS)]:
        gates = gathered.parts.get(name.removesuffix(UPS))
        if gates is not None:
            gates += gathered.parts.pop(name)
            gathered.paired.add(name.removesuffix(UPS))
    return gathered


def _add_stage(gathered: Gathered, held: Mapping[Place, Names], ranks: Ranks) -> None:
    split, stage = ranks.split, next(iter(held)).stage
    first = held[Place(0, stage, 0)]
    for place, names in held.items():
        different = sorted(set(names.tensors) ^ set(first.tensors))
        if different:
            raise CheckpointError(
                f"{ranks.saved[Place(0, stage, 0)].path} and {ranks.saved[place].path} are of one "
                f"stage, but only one of them holds {different[0]}; two checkpoints are mixed: take"
                " all ranks from one"
            )
    _refuse_misplaced(gathered, first, ranks.saved[Place(0, stage, 0)].path)
    local_experts: dict[str, int] = {}
    for name in first.tensors:
        match = EXPERT.search(name)
        if match:
            layer = name[: match.start()]
            local_experts[layer] = max(local_experts.get(layer, 0), int(match[1]) + 1)
    for name in first.tensors:
        match = EXPERT.search(name)
        count = local_experts[name[: match.start()]] if match else 0
        # All expert ranks hold the same of what is no expert's.
        for expert in range(split.ep if match else 1):
            own = renumbered(name, gathered.num_layers, expert * count)
            parts = [held[Place(t, stage, expert)].tensors[name] for t in range(split.tp)]
            if own in gathered.parts:
                gathered.copies.append((own, parts))
            else:
                gathered.parts[own] = parts
            for other in range(1, 1 if match else split.ep):
                for t, kept in enumerate(parts):
                    replica = held[Place(t, stage, other)].tensors[name]
                    gathered.replicas.append(Copy(own, kept, replica))
    gathered.num_layers += first.layers
    gathered.legacy = gathered.legacy or first.legacy
    gathered.extra_heads = gathered.extra_heads or first.extra_heads


def _refuse_misplaced(gathered: Gathered, names: Names, path: Path) -> None:
    """Layers stand before the last norm and after the embedding, however stages are laid out."""
    wrong = names.layers and LAST_NORM in gathered.parts
    late = gathered.num_layers and EMBEDDING in names.tensors and EMBEDDING not in gathered.parts
    if wrong or late:
        what = f"holds layers, though a stage before it has {LAST_NORM}"
        what = what if wrong else f"holds {EMBEDDING}, though a stage before it has layers"
        raise CheckpointError(
            f"{path} {what}; files of stages are swapped: give each rank's directory its own"
        )


def _config(
    gathered: Gathered,
    path: Path,
    changes: GPTConfig | Mapping[str, Any],
    ask: Callable[[Weights], Answer],
) -> tuple[GPTConfig, list[str]]:
    """The architecture, and what a user should know of how it was found."""
    parts = gathered.parts
    shapes = {name: [part.shape for part in on_ranks] for name, on_ranks in parts.items()}
    if any(len(shape) != 2 for shape in shapes.get(EMBEDDING, [()])):
        raise CheckpointError(
            f"{path}: no rank holds {EMBEDDING} as a matrix; the files are not a GPT's, or "
            "the first stage's are lost: take all ranks from one checkpoint"
        )
    weights = Weights(shapes, gathered.num_layers, gathered.legacy)
    dtype = common_dtype(part for on_ranks in parts.values() for part in on_ranks)
    config, notes = architecture(path, weights, FLOAT_NAMES[dtype or torch.float32], changes, ask)
    if gathered.extra_heads:
        notes["mtp"] = "its heads for multi-token prediction are left out; the main one is whole"
    return config, list(notes.values())


def _join(parameter: Parameter, parts: Parts, config: GPTConfig, version: float) -> Logical:
    """The map of one canonical tensor onto what the tensor ranks hold of it."""
    name, shape, split = parameter.name, parameter.shape, parameter.split
    ranks = len(parts)
    for part in parts:
        _check_shape(parameter, part, parts)
    match split:
        case Split.WHOLE:
            return _stacked(shape, [(parts[0], 0, shape[0], 1)])
        case Split.ROWS:
            return _stacked(shape, [(part, 0, part.shape[0], 1) for part in parts])
        case Split.COLUMNS:
            width = shape[1] // ranks
            pieces = [
                Piece(part, (0, shape[0]), (t * width, (t + 1) * width))
                for t, part in enumerate(parts)
            ]
            return _logical(shape, pieces)
        case Split.GATED:
            # Each rank has its gates over its own ups; whole, all gates are over all ups.
            half = shape[0] // ranks // 2
            return _stacked(shape, [(part, at, half, 1) for at in (0, half) for part in parts])
        case Split.QKV:
            return _stacked(shape, _attention_rows(name, parts, config, version))
        case Split.VOCAB:
            size = parts[0].shape[0]
            runs = [(part, 0, min(size, shape[0] - t * size), 1) for t, part in enumerate(parts)]
            return _stacked(shape, [run for run in runs if run[2] > 0])


Run = tuple[InMemory, int, int, int]  # A part, its first row, how many rows, and their distance.


def _attention_rows(name: str, parts: Parts, config: GPTConfig, version: float) -> list[Run]:
    """Every head's queries, keys and values in today's order: (groups, queries + 2, channels)."""
    if version >= 2:
        return [(part, 0, part.shape[0], 1) for part in parts]
    if config.num_query_groups != config.num_attention_heads:
        raise CheckpointError(
            f"{parts[0].where}: checkpoint_version {version} has no query groups, the config has "
            f"{config.num_query_groups}; correct num_query_groups"
        )
    d, heads = config.kv_channels, config.num_attention_heads // len(parts)
    runs: list[Run] = []
    for part in parts:
        for head in range(heads):
            for kind in range(3):
                if version < 1:  # (3, heads, channels)
                    runs.append((part, (kind * heads + head) * d, d, 1))
                else:  # (heads, channels, 3)
                    runs.append((part, head * 3 * d + kind, d, 3))
    return runs


def _check_shape(parameter: Parameter, part: InMemory, parts: Parts) -> None:
    shape, ranks = parameter.shape, len(parts)
    dim = 1 if parameter.split is Split.COLUMNS else 0
    if parameter.split is Split.WHOLE:
        need: tuple[int, ...] = shape
    elif parameter.split is Split.VOCAB:
        need = (parts[0].shape[0] if parts[0].shape else 0, *shape[1:])
    else:
        need = (*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :])
        pairs = 2 if parameter.split is Split.GATED else 1
        if shape[dim] % (ranks * pairs):
            need = ()
    if part.shape != need:
        needed = f"need {need}" if need else "which cannot be a part"
        raise CheckpointError(
            f"{part.where}: found {part.shape}, {needed} for {parameter.name} {shape} on {ranks} "
            "tensor ranks; the args and the weights disagree: take both from the same checkpoint"
        )


def _stacked(shape: tuple[int, ...], runs: list[Run]) -> Logical:
    pieces, row = [], 0
    for part, first, count, step in runs:
        pieces.append(Piece(part, (row, row + count), source_row=first, row_step=step))
        row += count
    return _logical(shape, pieces)


def _logical(shape: tuple[int, ...], pieces: list[Piece]) -> Logical:
    """Where parts differ in precision, the whole has one that holds all of them exactly."""
    dtype = reduce(torch.promote_types, (piece.source.dtype for piece in pieces))
    return Logical(shape, dtype, tuple(pieces))


def _copies(gathered: Gathered, table: Mapping[str, Parameter]) -> tuple[Copy, ...]:
    """What several ranks hold alike: norms and routers on tensor ranks, and what is read once."""
    copies = list(gathered.replicas)
    for name, parts in gathered.parts.items():
        if table[name].split is Split.WHOLE:
            copies += [Copy(name, parts[0], part) for part in parts[1:]]
    for name, parts in gathered.copies:
        pairs = zip(gathered.parts[name], parts, strict=True)
        copies += [Copy(name, kept, part) for kept, part in pairs]
    return tuple(copies)


def _refuse_unequal(name: str, first: Parts, copy: Parts) -> None:
    if not alike(first, copy):
        raise CheckpointError(
            f"{copy[0].where} is not equal to {first[0].where}, though both are {name}; files of "
            "stages are swapped or of two checkpoints: take all ranks from one"
        )


def tokenizer_beside(folder: Path) -> Path | None:
    """With the weights, or in the root above, or in a folder `tokenizer` of either."""
    places = (folder, folder.parent)
    return find_tokenizer(*(place for one in places for place in (one, one / "tokenizer")))
