"""Megatron-LM checkpoints of `--ckpt-format torch`, at any split: rank files as one logical model.

Each rank's tensors get canonical names; stages are put in order by counting the layers that they
hold; and a whole tensor is a map of its parts on the tensor ranks: joined along rows or columns,
gates over ups, rows of the oldest attentions put in today's order. No weight is read.
Where the files came from, and what the arguments mean, is known elsewhere.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.logical import FLOAT_NAMES, Checkpoint, InMemory, Logical, Piece, common_dtype
from gpt.megatron_args import Args, Weights, describe, infer, settle
from gpt.megatron_files import Place, Ranks, find_iteration, newer_iteration, open_ranks
from gpt.megatron_names import EMBEDDING, EXPERT, HEAD, Names, rename, renumbered
from gpt.sharding import Parameter, Split, parameters

# Beside the weights, or in the root above, or in a folder `tokenizer` of either.
TOKENIZER_FILES = ("tokenizer.json", "*.model", "*vocab.json", "null.json")

Parts = list[InMemory]  # One logical tensor on tensor rank 0, 1, and so on.


@dataclass
class Gathered:
    """All ranks' tensors under the model's own numbers."""

    parts: dict[str, Parts] = field(default_factory=dict)
    copies: list[tuple[str, Parts]] = field(default_factory=list)  # Of what a stage had before.
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
    gathered = gather(ranks)
    first = next(iter(ranks.saved.values()))
    config, notes = _config(gathered, first.args, iteration, changes or {})
    if not config.untie_embeddings_and_output_weights:
        _drop_tied_head(gathered, iteration)
    for name, copy in gathered.copies:
        _refuse_unequal(name, gathered.parts[name], copy)
    newer = newer_iteration(iteration)
    if newer:
        notes.append(
            f"{newer} is newer than {iteration.name}, which the tracker names; its save may not "
            "have ended: give its own directory to read it"
        )
    # Rows were put in order from the second version on; Megatron-Core never knew another.
    version = first.version if gathered.legacy else 3.0
    table = parameters(config)
    tensors = {
        name: _join(parameter, gathered.parts[name], config, version)
        for name, parameter in table.items()
        if name in gathered.parts
    }
    _refuse_leftover(iteration, gathered, table)
    files = tuple(saved.path for saved in ranks.saved.values())
    checkpoint = Checkpoint(
        iteration, "megatron", config, tensors, files, find_tokenizer(iteration), tuple(notes)
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
    gathered.num_layers += first.layers
    gathered.legacy = gathered.legacy or first.legacy
    gathered.extra_heads = gathered.extra_heads or first.extra_heads


def _config(
    gathered: Gathered,
    args: Mapping[str, Any] | None,
    iteration: Path,
    changes: GPTConfig | Mapping[str, Any],
) -> tuple[GPTConfig, list[str]]:
    """The architecture, and what a user should know of how it was found."""
    parts = gathered.parts
    shapes = {name: [part.shape for part in on_ranks] for name, on_ranks in parts.items()}
    if any(len(shape) != 2 for shape in shapes.get(EMBEDDING, [()])):
        raise CheckpointError(
            f"{iteration}: no rank holds {EMBEDDING} as a matrix; the files are not a GPT's, or "
            "the first stage's are lost: take all ranks from one checkpoint"
        )
    weights = Weights(shapes, gathered.num_layers, gathered.legacy)
    dtype = common_dtype(part for on_ranks in parts.values() for part in on_ranks)
    where = str(iteration)
    try:
        if isinstance(changes, GPTConfig):
            config, notes = changes, {}
        else:
            answer = infer(weights) if args is None else describe(Args(args, where), weights)
            answer.fields["dtype"] = FLOAT_NAMES[dtype or torch.float32]
            config = GPTConfig.from_dict(settle(answer, changes, where))
            notes = {name: note for name, note in answer.notes.items() if name not in changes}
    except ConfigError as error:
        raise CheckpointError(f"{iteration}: {error}") from None
    rows = weights.rows(EMBEDDING)
    if config.vocab_size > rows:
        raise CheckpointError(
            f"{iteration}: vocab_size is overridden with {config.vocab_size}, but the embedding "
            f"has {rows} rows; the true size can only be smaller"
        )
    if config.num_layers != gathered.num_layers:
        raise CheckpointError(
            f"{iteration}: the config has {config.num_layers} layers, the stages hold "
            f"{gathered.num_layers}; files of a stage are lost or of another checkpoint"
        )
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


def _drop_tied_head(gathered: Gathered, iteration: Path) -> None:
    """The last stage's copy of a tied embedding; a head of its own is refused."""
    head = gathered.parts.pop(HEAD, None)
    if head is not None and not _alike(head, gathered.parts[EMBEDDING]):
        raise CheckpointError(
            f"{iteration}: args tie the head to the embedding, but {head[0].where} is not equal to "
            f"{gathered.parts[EMBEDDING][0].where}; if they were trained apart, give "
            "untie_embeddings_and_output_weights in config"
        )


def _alike(left: Parts, right: Parts) -> bool:
    """A few rows tell a copy from weights that were trained apart."""
    for mine, its in zip(left, right, strict=True):
        if mine.shape != its.shape:
            return False
        rows = [0, mine.shape[0] // 2, mine.shape[0] - 1]
        if not torch.equal(mine.tensor()[rows], its.tensor()[rows]):
            return False
    return True


def _refuse_unequal(name: str, first: Parts, copy: Parts) -> None:
    if not _alike(first, copy):
        raise CheckpointError(
            f"{copy[0].where} is not equal to {first[0].where}, though both are {name}; files of "
            "stages are swapped or of two checkpoints: take all ranks from one"
        )


def _refuse_leftover(iteration: Path, gathered: Gathered, known: Container[str]) -> None:
    left = [parts[0].where for name, parts in gathered.parts.items() if name not in known]
    if left:
        raise CheckpointError(
            f"{iteration}: the architecture has no place for {len(left)} tensors: "
            f"{', '.join(left[:3])}; they would change the result, so the model is not read"
        )


def find_tokenizer(iteration: Path) -> Path | None:
    for folder in (iteration, iteration.parent):
        for place in (folder, folder / "tokenizer"):
            if any(any(place.glob(name)) for name in TOKENIZER_FILES):
                return place
    return None
