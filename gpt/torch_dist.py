"""Megatron-Core's distributed checkpoints (`torch_dist`): keys and chunks as one logical model.

The keys name whole tensors already, at any split; all layers may share one key, and all experts
one within it. So a key is taken apart along its leading dimensions, and each layer's tensor is a
map of the chunks that fall on it. The arguments lie beside the weights, or are asked for by name.
How an index and a chunk are read is known elsewhere.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, product
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.distcp_file import INDEX, Chunk, Entry, Index, read_index
from gpt.errors import CheckpointError, ConfigError
from gpt.logical import (
    FLOAT_NAMES,
    Checkpoint,
    Logical,
    Piece,
    common_dtype,
)
from gpt.megatron import find_tokenizer
from gpt.megatron_args import Args, Weights, describe, settle
from gpt.megatron_files import TRACKER, newer_iteration, tracked
from gpt.megatron_names import (
    DROPPED,
    EMBEDDING,
    EXTRA_HEADS,
    HEAD,
    PREFIX,
    canonical,
    refuse_foreign,
)
from gpt.sharding import LAYERS, parameters
from gpt.torch_dist_args import from_shapes
from gpt.unpickle import Stub, read_pickle

BACKEND, COMMON = "metadata.json", "common.pt"
COMMON_KEY = "common_state/shard_0_1"  # Since core 0.19, instead of the file.
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
    places = [path, path / "weights", path / "model_weights"]
    if (path / TRACKER).is_file():
        places.append(tracked(path))
    for place in places:
        if (place / INDEX).is_file() or (place / COMMON).is_file() or _backend(place):
            return place
        if any(place.glob("__*_*.distcp")):
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
    _refuse_other(folder)
    index = read_index(folder, _is_wanted)
    found = gather(index)
    config, notes = _config(found, index, changes or {})
    if not config.untie_embeddings_and_output_weights:
        _drop_tied_head(found, folder)
    newer = newer_iteration(folder)
    if newer:
        notes.append(
            f"{newer} is newer than {folder.name}, which the tracker names; its save may not have "
            "ended: give its own directory to read it"
        )
    table = parameters(config)
    left = [whole.key for name, whole in found.tensors.items() if name not in table]
    if left:
        raise CheckpointError(
            f"{folder}: the architecture has no place for {len(left)} tensors: "
            f"{', '.join(left[:3])}; they would change the result, so the model is not read"
        )
    tensors = {
        name: _logical(whole, table[name].shape if name in (EMBEDDING, HEAD) else whole.shape)
        for name, whole in ((name, found.tensors.get(name)) for name in table)
        if whole is not None
    }
    files = tuple(sorted(file.path for file in index.files.values()))
    tokenizer = find_tokenizer(folder)
    checkpoint = Checkpoint(folder, "torch_dist", config, tensors, files, tokenizer, tuple(notes))
    checkpoint.check()
    return checkpoint


def _is_wanted(key: str) -> bool:
    return key == COMMON_KEY or not (STATES.match(key) or "_extra_state" in key)


def _backend(folder: Path) -> str | None:
    """What `metadata.json` calls the format; None if there is no such file, or another's."""
    try:
        record = json.loads((folder / BACKEND).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    name = record.get("sharded_backend") if isinstance(record, dict) else None
    return name if isinstance(name, str) else None


def _refuse_other(folder: Path) -> None:
    """Formats that look alike, and saves that did not finish."""
    backend = _backend(folder)
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
    if not (folder / INDEX).is_file():
        raise CheckpointError(
            f"{folder} has no {INDEX}, so the save did not finish, or this node kept only its own "
            "share; copy the missing files, or take an earlier iteration"
        )
    if backend is None:
        keys = read_index(folder, lambda key: key.startswith("model.")).tensors
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
    if (folder / "modelopt_state").exists():
        raise CheckpointError(
            f"{folder} has modelopt_state: the model was quantized or pruned; give the one before"
        )


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
        spread = _spread(bare, entry)
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


def _refuse_unlike(entry: Entry, shared: int) -> None:
    sizes = entry.shape[:shared]
    if len(entry.shape) <= shared or 0 in sizes or math.prod(sizes) > SHARED_MAX:
        raise CheckpointError(
            f"{entry.key} has shape {entry.shape}, which is not that of one that layers or experts "
            "share; the index is of another format"
        )


def _spread(bare: str, entry: Entry) -> Spread:
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
    _refuse_unlike(entry, spread.shared)
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


def _arguments(index: Index) -> dict[str, Any] | None:
    """`args` of the training run; None where the config lies elsewhere."""
    path = index.folder / COMMON
    if (index.folder.parent / "context").is_dir():
        return None  # NeMo 2, whose common state is its trainer's own objects.
    if path.is_file():
        record = read_pickle(path)
    elif COMMON_KEY in index.objects:
        blob = index.objects[COMMON_KEY]
        path = blob.file.path
        record = read_pickle(path, (blob.offset, blob.length))
        record = record[0] if isinstance(record, list) and len(record) == 1 else record
    else:
        return None
    if not isinstance(record, dict):
        raise CheckpointError(f"{path} holds a {type(record).__name__}, not a run's common state")
    args = record.get("args")
    args = args.fields if isinstance(args, Stub) else args
    if not isinstance(args, dict | None):
        raise CheckpointError(f"{path} has args that are none; copy it again")
    return args or None


def _config(
    found: Found, index: Index, changes: GPTConfig | Mapping[str, Any]
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
    dtype = common_dtype(slabs)
    try:
        if isinstance(changes, GPTConfig):
            config, notes = changes, {}
        else:
            args, where = _arguments(index), str(folder)
            if args is None:
                answer = from_shapes(weights, changes, where)
            else:
                answer = describe(Args(args, where), weights)
            answer.fields["dtype"] = FLOAT_NAMES[dtype or torch.float32]
            config = GPTConfig.from_dict(settle(answer, changes, where))
            notes = {name: note for name, note in answer.notes.items() if name not in changes}
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    if config.vocab_size > embedding.shape[0]:
        raise CheckpointError(
            f"{folder}: vocab_size is overridden with {config.vocab_size}, but the embedding has "
            f"{embedding.shape[0]} rows; the true size can only be smaller"
        )
    if config.num_layers != found.num_layers:
        raise CheckpointError(
            f"{folder}: the config has {config.num_layers} layers, {INDEX} has {found.num_layers};"
            " the two are of different checkpoints: take both from one"
        )
    if found.extra_heads:
        notes["mtp"] = "its heads for multi-token prediction are left out; the main one is whole"
    return config, list(notes.values())


def _drop_tied_head(found: Found, folder: Path) -> None:
    """A copy of a tied embedding; a head of its own is refused."""
    head, embedding = found.tensors.pop(HEAD, None), found.tensors[EMBEDDING]
    if head is None:
        return
    left, right = (_logical(whole, whole.shape) for whole in (head, embedding))
    rows = {0, left.shape[0] // 2, left.shape[0] - 1}
    alike = left.shape == right.shape and not (left.fault() or right.fault())
    if not alike or not all(
        torch.equal(left.corner(row, 1, left.shape[1]), right.corner(row, 1, left.shape[1]))
        for row in rows
    ):
        raise CheckpointError(
            f"{folder}: args tie the head to the embedding, but {head.key} is not equal to "
            f"{embedding.key}; if they were trained apart, give "
            "untie_embeddings_and_output_weights in config"
        )
