"""Megatron-Core's distributed checkpoints (`torch_dist`): keys and chunks as one logical model.

The keys name whole tensors already, at any split; all layers may share one key, and all experts
one within it. So a key is taken apart along its leading dimensions, and each layer's tensor is a
map of the chunks that fall on it. The arguments lie beside the weights, or are asked for by name.
How an index and a chunk are read is known elsewhere.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.checkpoint.files.file_tree import FileTree, files_in
from gpt.checkpoint.files.torch_dcp import INDEX, Chunk, Entry, Index, read_index
from gpt.checkpoint.logical_tensor import (
    Checkpoint,
    InMemory,
    Logical,
    Piece,
    common_dtype,
    find_tokenizer,
    refuse_leftover,
    refuse_untied,
    some,
)
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_NAMES
from gpt.errors import CheckpointError
from gpt.formats.mappings.megatron_args import UNTIED, Answer, Weights, architecture
from gpt.formats.mappings.megatron_names import (
    DROPPED,
    EMBEDDING,
    EXTRA_HEADS,
    HEAD,
    PREFIX,
    canonical,
    refuse_foreign,
)
from gpt.formats.megatron.rank_files import TRACKER, bridge_iteration, newer_iteration, tracked
from gpt.formats.megatron.reader import tokenizer_beside
from gpt.formats.megatron.torch_dist_config import COMMON, COMMON_KEY, ask
from gpt.parallel.sharding import LAYERS, parameters

BACKEND, INTEGRITY = "metadata.json", "integrity.json"
TEXT_BYTES_MAX = 1 << 20
# What a training run keeps besides the model.
STATES = re.compile(
    r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine|opt_param_scheduler|common_state|"
    r"dataloader|iteration$|num_floating_point"
)
LAYER_KEY = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
# The word twice; a number where each expert has a key of its own.
EXPERT_KEY = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(linear_fc[12]\.(?:weight|bias).*)")
HALVES = ("_w", "_v")  # Gates and ups under keys of their own.
SHARED_MAX = 1 << 20  # Layers x experts; beyond it the index lies.


@dataclass(frozen=True)
class Slab:
    """One layer's, or one expert's, share of a chunk."""

    chunk: Chunk
    lead: tuple[int, ...]  # Its place in the chunk's leading dimensions.

    @property
    def shape(self) -> tuple[int, ...]:
        return self.chunk.sizes[len(self.lead) :]

    @property
    def dtype(self) -> torch.dtype:
        return self.chunk.dtype

    @property
    def where(self) -> str:
        return self.chunk.where

    def tensor(self) -> Tensor:
        return self.chunk.tensor()[self.lead]


@dataclass
class Whole:
    """A tensor under its canonical name: one key's share, or those of its two halves."""

    key: str
    dtype: torch.dtype
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    boxes: dict[int, list[tuple[tuple[int, ...], Slab]]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.shapes[min(self.shapes)]
        return (sum(shape[0] for shape in self.shapes.values()), *first[1:])


@dataclass(frozen=True)
class Spread:
    """How a key's leading dimensions count through layers and experts, and the names it gives."""

    before: str
    after: str
    layers: bool
    experts: bool
    half: int = 0

    @property
    def shared(self) -> int:
        return self.layers + self.experts

    def name(self, lead: tuple[int, ...]) -> str:
        layer = str(lead[0]) if self.layers else ""
        expert = f".mlp.experts.local_experts.{lead[-1]}" if self.experts else ""
        return f"{self.before}{layer}{expert}{self.after}"


@dataclass
class Found:
    tensors: dict[str, Whole] = field(default_factory=dict)
    num_layers: int = 0
    extra_heads: bool = False


def find_torch_dist(path: Path) -> Path | None:
    """The directory with the index: `path`, what its tracker names, or a NeMo one's weights."""
    if path.name in (BACKEND, INDEX, COMMON):
        path = path.parent
    if path.name == "context" and (path.parent / "weights").is_dir():
        path = path.parent
    places = [path, path / "weights", path / "model_weights"]
    if (path / TRACKER).is_file():
        places.append(tracked(path))
    elif bridge := bridge_iteration(path):
        places.append(bridge[0])
    for place in places:
        if (place / INDEX).is_file() or (place / COMMON).is_file():
            return place
        if any(place.glob("__*_*.distcp")):
            return place
        if (place / BACKEND).is_file() and _backend(files_in(place)):
            return place
    return None


def open_torch_dist(path: Path, changes: GPTConfig | Mapping[str, Any] | None = None) -> Checkpoint:
    """A root or an iteration. `changes` are fields of GPTConfig that override what is found."""
    folder = find_torch_dist(path)
    if folder is None:
        raise CheckpointError(
            f"{path} has no {BACKEND}, {INDEX} or .distcp files; give the directory that holds "
            "them, or the root with the tracker file"
        )
    tree, changes = files_in(folder), changes or {}
    checkpoint = join_chunks(tree, changes, lambda index, weights: ask(index, weights, changes))
    bridge = None if (path / TRACKER).is_file() else bridge_iteration(path)
    chosen = [bridge[1]] if bridge and bridge[1] and bridge[0] == folder else []
    context = folder.parent / "context"
    beside = find_tokenizer(context / "nemo_tokenizer", context) if context.is_dir() else None
    return replace(
        checkpoint,
        format="nemo" if context.is_dir() else "torch_dist",
        tokenizer=beside or tokenizer_beside(folder),
        notes=(*checkpoint.notes, *newer_iteration(folder), *chosen),
    )


def join_chunks(
    tree: FileTree,
    changes: GPTConfig | Mapping[str, Any],
    asks: Callable[[Index, Weights], Answer],
) -> Checkpoint:
    """One model of all chunks; `asks` describes it where `changes` are not a whole config."""
    _refuse_other(tree)
    _refuse_lost(tree)
    index = read_index(tree, _is_wanted)
    found = gather(index)
    config, notes = _config(found, index, changes, asks)
    if config.gated:
        _refuse_unsplit(found)
    if not config.untie_embeddings_and_output_weights and HEAD in found.tensors:
        _drop_tied_head(found, tree.path)
    table = parameters(config)
    left = [whole.key for name, whole in found.tensors.items() if name not in table]
    refuse_leftover(tree.path, left)
    tensors = {
        name: _logical(whole, table[name].shape if name in (EMBEDDING, HEAD) else whole.shape)
        for name, whole in ((name, found.tensors.get(name)) for name in table)
        if whole is not None
    }
    files = tuple(sorted({span.file.path for span in index.files.values()}))
    checkpoint = Checkpoint(tree.path, "torch_dist", config, tensors, files, notes=tuple(notes))
    checkpoint.check()
    return checkpoint


def _is_wanted(key: str) -> bool:
    return key == COMMON_KEY or not (STATES.match(key) or "_extra_state" in key)


def _backend(tree: FileTree) -> str | None:
    """What `metadata.json` calls the format; None if there is no such file, or another's."""
    name = json_of(tree, BACKEND).get("sharded_backend")
    return name if isinstance(name, str) else None


def _refuse_other(tree: FileTree) -> None:
    """Formats that look alike, and saves that did not finish."""
    folder, backend = tree.path, _backend(tree)
    if backend == "zarr":
        raise CheckpointError(
            f"{folder} is a zarr checkpoint, a format that Megatron-Core itself gave up; load it "
            "with a version of its time and save it as torch_dist"
        )
    if backend not in (None, "torch_dist"):
        raise CheckpointError(
            f"{folder} is a {backend} checkpoint by {BACKEND}; torch_dist is read: save it with "
            "--ckpt-format torch_dist"
        )
    if INDEX not in tree.spans:
        raise CheckpointError(
            f"{folder} has no {INDEX}, so the save did not finish, or this node kept only its own "
            "share; copy the missing files, or take an earlier iteration"
        )
    if backend is None:
        keys = read_index(tree, lambda key: key.startswith("model.")).tensors
        if keys:
            raise CheckpointError(
                f"{folder} is a torch_dcp or fsdp_dtensor checkpoint: it has no {BACKEND}, and keys"
                f" such as {next(iter(keys))}; torch_dist is read: save it with --ckpt-format "
                "torch_dist"
            )
        raise CheckpointError(
            f"{folder} has no readable {BACKEND}, which is written last: the save did not finish, "
            "or this node kept only its own share; copy the missing files, or take an earlier "
            "iteration"
        )
    if "adapter_metadata.json" in tree.spans:
        raise CheckpointError(f"{folder} is an adapter of NeMo 2, not a model; give its base model")
    inside = any(name.startswith("modelopt_state") for name in tree.spans)
    if inside or (folder / "modelopt_state").exists():
        raise CheckpointError(
            f"{folder} has modelopt_state: the model was quantized or pruned; give the one before"
        )


def _refuse_lost(tree: FileTree) -> None:
    """Newer saves list all their files. Their hashes are for whoever reads every byte."""
    listed = json_of(tree, INTEGRITY).get("files")
    names = [str(name) for name in listed] if isinstance(listed, dict) else []
    if lost := [name for name in names if "/" not in name and name not in tree.spans]:
        raise CheckpointError(
            f"{tree.path} lacks {some(lost)} of the {len(names)} files that {INTEGRITY} lists; "
            "copy the missing ones, each node of a cluster may have kept its own"
        )


def json_of(tree: FileTree, name: str) -> dict[str, Any]:
    """What a small file says; nothing, where it is not there or says something else."""
    try:
        record = json.loads(tree.spans[name].read(TEXT_BYTES_MAX))
    except (CheckpointError, KeyError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def gather(index: Index) -> Found:
    """Every tensor by its canonical name."""
    found = Found()
    layers: set[int] = set()
    for key, entry in index.tensors.items():
        match = PREFIX.match(key)
        bare = key[match.end() :] if match else key
        if DROPPED.fullmatch(bare) or STATES.match(bare):
            continue
        if bare.startswith(EXTRA_HEADS):
            found.extra_heads = True
            continue
        refuse_foreign(re.sub(r"\blayers\.(?!\d)", "layers.0.", key), f"{index.folder}/{INDEX}")
        spread = _spread(bare, entry, index.folder / INDEX)
        for lead in product(*(range(size) for size in entry.shape[: spread.shared])):
            name = spread.name(lead)
            if name.startswith(LAYERS):
                layers.add(int(name[len(LAYERS) :].split(".", 1)[0]))
            whole = found.tensors.setdefault(name, Whole(key, entry.dtype))
            if spread.half in whole.shapes:
                raise CheckpointError(
                    f"{index.folder} holds {name} twice, as {whole.key} and as {key}; two "
                    "checkpoints are mixed: take the directory from the training run again"
                )
            whole.shapes[spread.half] = entry.shape[spread.shared :]
            whole.boxes[spread.half] = []
        _share_out(found, spread, entry)
    if layers != set(range(len(layers))):
        held = ", ".join(str(layer) for layer in sorted(layers)[:8])
        raise CheckpointError(
            f"{index.folder} has layers {held}, which do not count from 0; keys are lost: copy "
            f"{INDEX} again"
        )
    found.num_layers = len(layers)
    _move_norms(found)
    return found


def _refuse_unlike(entry: Entry, shared: int, index: Path) -> None:
    sizes = entry.shape[:shared]
    if len(entry.shape) <= shared or 0 in sizes or math.prod(sizes) > SHARED_MAX:
        raise CheckpointError(
            f"{index}: {entry.key} has shape {entry.shape}, which is not that of one that layers "
            "or experts share; the index is of another format"
        )


def _spread(bare: str, entry: Entry, index: Path) -> Spread:
    match = LAYER_KEY.fullmatch(bare)
    if not match:
        return Spread(canonical(bare), "", False, False)
    layer, rest, half = match[1], match[2], 0
    if "linear_fc1." in rest and rest.endswith(HALVES):
        half, rest = HALVES.index(rest[-2:]), rest[:-2]
    experts = EXPERT_KEY.fullmatch(rest)
    if not experts:
        rest = canonical(f"{LAYERS}0.{rest}")[len(f"{LAYERS}0.") :]
        spread = Spread(f"{LAYERS}{layer or ''}", f".{rest}", layer is None, False, half)
    elif experts[1] is None:
        before = f"{LAYERS}{layer or ''}"
        spread = Spread(before, f".{experts[2]}", layer is None, True, half)
    else:
        after = f".mlp.experts.local_experts.{experts[1]}.{experts[2]}"
        spread = Spread(f"{LAYERS}{layer or ''}", after, layer is None, False, half)
    _refuse_unlike(entry, spread.shared, index)
    return spread


def _share_out(found: Found, spread: Spread, entry: Entry) -> None:
    """Each chunk to the tensors that it falls on; most have one layer and one expert."""
    count = spread.shared
    for chunk in entry.chunks:
        spans = zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
        if any(start + size > whole for start, size, whole in spans):
            raise CheckpointError(
                f"{chunk.where} has a chunk at {chunk.offsets} of {chunk.sizes}, beyond the whole "
                f"of {entry.shape}; {INDEX} is broken: copy it again"
            )
        for own in product(*(range(size) for size in chunk.sizes[:count])):
            lead = tuple(map(add, chunk.offsets, own))
            whole = found.tensors[spread.name(lead)]
            whole.boxes[spread.half].append((chunk.offsets[count:], Slab(chunk, own)))


def _move_norms(found: Found) -> None:
    """A dense layer's second norm belongs to its fc1, an expert layer's stands for itself.

    Megatron-Core's local spec stores an expert layer's as if it were dense.
    """
    for layer in range(found.num_layers):
        prefix = f"{LAYERS}{layer}."
        experts = f"{prefix}mlp.router.weight" in found.tensors
        for leaf in ("weight", "bias"):
            fused = f"{prefix}mlp.linear_fc1.layer_norm_{leaf}"
            apart = f"{prefix}pre_mlp_layernorm.{leaf}"
            source, target = (fused, apart) if experts else (apart, fused)
            if source in found.tensors and target not in found.tensors:
                found.tensors[target] = found.tensors.pop(source)


def _logical(whole: Whole, shape: tuple[int, ...]) -> Logical:
    """The map of a tensor onto chunks; rows beyond `shape`, a padded vocabulary's, are left out."""
    pieces, above = [], 0
    for half in sorted(whole.shapes):
        for offsets, slab in whole.boxes[half]:
            top = above + (offsets[0] if offsets else 0)
            bottom = min(top + (slab.shape[0] if slab.shape else 1), shape[0])
            columns = (offsets[1], offsets[1] + slab.shape[1]) if len(offsets) == 2 else None
            if top < bottom:
                pieces.append(Piece(slab, (top, bottom), columns))
        above += whole.shapes[half][0]
    return Logical(shape, whole.dtype, tuple(_in_bands(pieces)))


def _in_bands(pieces: list[Piece]) -> Iterator[Piece]:
    """Pieces cut where any other begins, so that those of the same rows lie side by side."""
    cuts = sorted({row for piece in pieces for row in piece.rows})
    after = dict(pairwise(cuts))
    for piece in pieces:
        top, first = piece.rows[0], piece.rows[0]
        while top < piece.rows[1]:
            bottom = after[top]
            yield Piece(piece.source, (top, bottom), piece.columns, source_row=top - first)
            top = bottom


def _config(
    found: Found,
    index: Index,
    changes: GPTConfig | Mapping[str, Any],
    asks: Callable[[Index, Weights], Answer],
) -> tuple[GPTConfig, list[str]]:
    """The architecture, and what a user should know of how it was found."""
    folder = index.folder
    embedding = found.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"{folder} holds no {EMBEDDING} as a matrix; it is not a GPT's, or only an adapter"
        )
    shapes = {name: [whole.shape] for name, whole in found.tensors.items()}
    weights = Weights(shapes, found.num_layers, legacy=False)
    slabs = (
        slab
        for whole in found.tensors.values()
        for boxes in whole.boxes.values()
        for _, slab in boxes
    )
    dtype = FLOAT_NAMES[common_dtype(slabs) or torch.float32]
    config, notes = architecture(
        *(folder, weights, dtype, changes), lambda weights: asks(index, weights)
    )
    if found.extra_heads:
        notes["mtp"] = "its heads for multi-token prediction are left out; the main one is whole"
    return config, list(notes.values())


def _drop_tied_head(found: Found, folder: Path) -> None:
    """A copy of a tied embedding; a head of its own is refused."""
    samples = []
    for whole in (found.tensors.pop(HEAD), found.tensors[EMBEDDING]):
        logical = _logical(whole, whole.shape)
        if fault := logical.fault():
            raise CheckpointError(f"{folder}: {whole.key}: {fault}; copy the checkpoint again")
        rows = (0, logical.shape[0] // 2, logical.shape[0] - 1)
        sample = torch.cat([logical.corner(row, 1, logical.shape[1]) for row in rows])
        samples.append([InMemory(sample, whole.key)])
    refuse_untied(folder, samples[0], samples[1], UNTIED)


def _refuse_unsplit(found: Found) -> None:
    """Transformer Engine's own layer saves gates and ups as its ranks held them, in turns."""
    for name, whole in found.tensors.items():
        tops = {offsets[0] for boxes in whole.boxes.values() for offsets, _ in boxes if offsets}
        if "layernorm_mlp.fc1" in whole.key and len(tops) > 1:
            raise CheckpointError(
                f"{whole.boxes[0][0][1].where}: {name} was saved by {len(tops)} tensor ranks, each "
                "with its gates over its ups, and no file says how to undo that; save it with "
                "tensor_model_parallel_size 1, or from Megatron-Core's own layers"
            )
