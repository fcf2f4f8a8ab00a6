"""Megatron-Core distributed checkpoint (`torch_dist`): maps keys and chunks to logical tensors.

A key names an unsharded tensor, independently of the parallel sizes. The tensor of a key can stack
the tensors of all layers, or of all experts, along leading dimensions. This module splits the
leading dimensions, and maps the tensor of each layer and expert to the chunks that overlap with it.
Megatron-FSDP's format `fsdp_dtensor` has the same files with the keys of a wrapped module: each
layer and expert has its own keys, and the gate and up matrices are separate.
`torch_dist_config.py` infers the config; `gpt/checkpoint/files/torch_dcp.py` reads the index and
the chunks.
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

from gpt.checkpoint.files.file_tree import FileTree, scan_folder
from gpt.checkpoint.files.torch_dcp import METADATA_FILE, Chunk, ChunkedTensor, DcpIndex, read_index
from gpt.checkpoint.logical_tensor import (
    Checkpoint,
    InMemoryTensor,
    LogicalTensor,
    SourceSlice,
    find_tokenizer,
    majority_dtype,
    refuse_unexpected_weights,
    refuse_untied_head,
    summarize_names,
)
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPE_NAMES
from gpt.errors import CheckpointError
from gpt.formats.mappings.hybrid_layers import gpt_name, refuse_unpaired_layers, stored_layers
from gpt.formats.mappings.megatron_args import (
    UNTIED_HINT,
    PartialConfig,
    WeightShapes,
    resolve_config,
)
from gpt.formats.mappings.megatron_names import (
    EMBEDDING,
    HEAD,
    IGNORED_KEYS,
    MTP_NOTE,
    MTP_PREFIX,
    WRAPPER_PREFIX,
    canonical_key,
    refuse_unsupported_part,
)
from gpt.formats.megatron.rank_files import (
    TRACKER_FILE,
    bridge_iteration,
    newer_iteration_notes,
    tracked_iteration,
)
from gpt.formats.megatron.reader import find_tokenizer_near
from gpt.formats.megatron.torch_dist_config import (
    ARGS_KEY,
    COMMON_FILE,
    COMMON_KEY,
    infer_dist_config,
    read_common_args,
)
from gpt.parallel.weight_sharding import LAYERS_PREFIX, parameter_specs

BACKEND_FILE, INTEGRITY_FILE = "metadata.json", "integrity.json"
# Formats that this module reads; values of Megatron's `--ckpt-format`.
TORCH_DIST, FSDP_DTENSOR = "torch_dist", "fsdp_dtensor"
TEXT_BYTES_MAX = 1 << 20
# Keys of the training state, which are not part of the model.
TRAINING_STATE_KEYS = re.compile(
    r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine|opt_param_scheduler|common_state|"
    r"dataloader|iteration$|num_floating_point"
)
LAYER_KEY = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
# Megatron-Core writes `experts.experts`. A number follows only if each expert has its own key.
EXPERT_KEY = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(linear_fc[12]\.(?:weight|bias).*)")
GATE_UP_SUFFIXES = ("_w", "_v")  # Key endings of separate gate and up matrices.
LAYER_EXPERTS_MAX = 1 << 20  # Limit of layers x experts; an index with more is broken or hostile.


@dataclass(frozen=True)
class ChunkSlice:
    """The part of a chunk that belongs to one layer, or to one expert of a layer."""

    chunk: Chunk
    leading_index: tuple[int, ...]  # Index in the stacked (leading) dimensions of the chunk.

    @property
    def shape(self) -> tuple[int, ...]:
        return self.chunk.sizes[len(self.leading_index) :]

    @property
    def dtype(self) -> torch.dtype:
        return self.chunk.dtype

    @property
    def location(self) -> str:
        return self.chunk.location

    def tensor(self) -> Tensor:
        return self.chunk.tensor()[self.leading_index]


@dataclass
class ShardedTensor:
    """The chunk slices of a canonical tensor.

    If a gated fc1 has separate keys for gate and up, the gate matrix is half 0 and the up matrix is
    half 1. A tensor with a single key has only half 0. `shapes` and `chunk_slices` are indexed by
    half; each chunk slice is paired with its offsets in the matrix of this half.
    """

    key: str
    dtype: torch.dtype
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    chunk_slices: dict[int, list[tuple[tuple[int, ...], ChunkSlice]]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.shapes[min(self.shapes)]
        return (sum(shape[0] for shape in self.shapes.values()), *first[1:])


@dataclass(frozen=True)
class KeyPattern:
    """Maps a key to the canonical names of the tensors that the key stacks.

    A canonical name is the concatenation of:

    - the prefix;
    - the layer number, if the key stacks layers;
    - the expert's path, if the key stacks experts;
    - the suffix.
    """

    prefix: str
    suffix: str
    spans_layers: bool
    spans_experts: bool
    half: int = 0  # 1 for the key of a separate up matrix.

    @property
    def leading_dims(self) -> int:
        return self.spans_layers + self.spans_experts

    def canonical_name(self, leading_index: tuple[int, ...]) -> str:
        layer = str(leading_index[0]) if self.spans_layers else ""
        expert = f".mlp.experts.local_experts.{leading_index[-1]}" if self.spans_experts else ""
        return f"{self.prefix}{layer}{expert}{self.suffix}"


@dataclass
class DistCheckpoint:
    """The tensors of a distributed checkpoint by canonical name."""

    tensors: dict[str, ShardedTensor] = field(default_factory=dict)
    num_layers: int = 0
    has_mtp_heads: bool = False
    # The pattern of the layers in the files if they are a HybridModel's, else empty.
    hybrid_layers: str = ""


def find_torch_dist(path: Path) -> Path | None:
    """Find the directory of a distributed checkpoint; return None if there is none.

    The candidates are `path`, NeMo's subfolders, and the iteration that a tracker file names. A
    directory without an index is returned too if other files identify the format, so that the
    caller can report the missing files.
    """
    if path.name in (BACKEND_FILE, METADATA_FILE, COMMON_FILE):
        path = path.parent
    if path.name == "context" and (path.parent / "weights").is_dir():
        path = path.parent
    candidates = [path, path / "weights", path / "model_weights"]
    if (path / TRACKER_FILE).is_file():
        candidates.append(tracked_iteration(path))
    elif bridge_target := bridge_iteration(path):
        candidates.append(bridge_target[0])
    for folder in candidates:
        if (folder / METADATA_FILE).is_file() or (folder / COMMON_FILE).is_file():
            return folder
        if any(folder.glob("__*_*.distcp")):
            return folder
        if (folder / BACKEND_FILE).is_file() and _read_backend(scan_folder(folder)):
            return folder
    return None


def open_torch_dist(
    path: Path, overrides: GPTConfig | Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open a checkpoint root or an iteration. `overrides` replaces fields of GPTConfig."""
    folder = find_torch_dist(path)
    if folder is None:
        raise CheckpointError(
            f"{path} has no {BACKEND_FILE}, {METADATA_FILE} or .distcp files; give the directory "
            "that contains them, or the root with the tracker file"
        )
    tree, overrides = scan_folder(folder), overrides or {}
    checkpoint = join_chunks(
        tree, overrides, lambda index, weights: infer_dist_config(index, weights, overrides)
    )
    bridge_target = None if (path / TRACKER_FILE).is_file() else bridge_iteration(path)
    bridge_notes = (
        [bridge_target[1]]
        if bridge_target and bridge_target[1] and bridge_target[0] == folder
        else []
    )
    context_folder = folder.parent / "context"
    nemo_tokenizer = (
        find_tokenizer(context_folder / "nemo_tokenizer", context_folder)
        if context_folder.is_dir()
        else None
    )
    return replace(
        checkpoint,
        format="nemo" if context_folder.is_dir() else checkpoint.format,
        tokenizer=nemo_tokenizer or find_tokenizer_near(folder),
        notes=(*checkpoint.notes, *newer_iteration_notes(folder), *bridge_notes),
    )


def join_chunks(
    tree: FileTree,
    overrides: GPTConfig | Mapping[str, Any],
    infer_config: Callable[[DcpIndex, WeightShapes], PartialConfig],
) -> Checkpoint:
    """Join the chunks of a distributed checkpoint to one logical checkpoint.

    `infer_config` returns the config; it is not called if `overrides` is a GPTConfig.
    """
    checkpoint_format = _identify_format(tree)
    _refuse_missing_files(tree)
    index = read_index(tree, _is_model_key)
    dist_checkpoint = gather_tensors(index)
    _pair_hybrid_layers(dist_checkpoint, tree.path)
    config, notes = _resolve_config(dist_checkpoint, index, overrides, infer_config)
    if config.gated:
        _refuse_interleaved_gates(dist_checkpoint)
    if not config.untie_embeddings_and_output_weights and HEAD in dist_checkpoint.tensors:
        _drop_tied_head(dist_checkpoint, tree.path)
    table = parameter_specs(config)
    unexpected_keys = [
        sharded_tensor.key
        for name, sharded_tensor in dist_checkpoint.tensors.items()
        if name not in table
    ]
    refuse_unexpected_weights(tree.path, unexpected_keys)
    tensors = {}
    for name, parameter in table.items():
        sharded_tensor = dist_checkpoint.tensors.get(name)
        if sharded_tensor is not None:
            # The stored embedding and head may have padding rows, which `parameter.shape` excludes.
            has_vocab_rows = name in (EMBEDDING, HEAD)
            shape = parameter.shape if has_vocab_rows else sharded_tensor.shape
            tensors[name] = _logical_tensor(sharded_tensor, shape)
    files = tuple(sorted({span.file.path for span in index.file_spans.values()}))
    checkpoint = Checkpoint(
        tree.path,
        checkpoint_format,
        config,
        tensors,
        files,
        notes=tuple(notes),
        hybrid_layers=dist_checkpoint.hybrid_layers,
    )
    checkpoint.check()
    return checkpoint


def _is_model_key(key: str) -> bool:
    return key == COMMON_KEY or not (TRAINING_STATE_KEYS.match(key) or "_extra_state" in key)


def _read_backend(tree: FileTree) -> str | None:
    """Return the format's name in `metadata.json`; None if the file or the name is unreadable."""
    name = read_json(tree, BACKEND_FILE).get("sharded_backend")
    return name if isinstance(name, str) else None


def _identify_format(tree: FileTree) -> str:
    """Return the format; refuse other formats, incomplete saves, adapters and quantized models."""
    folder, backend = tree.path, _read_backend(tree)
    if backend == "zarr":
        raise CheckpointError(
            f"{folder} is a zarr checkpoint, a format that Megatron-Core has removed; load it with "
            "a Megatron-Core version that supports zarr, and save it as torch_dist"
        )
    if backend not in (None, TORCH_DIST, FSDP_DTENSOR):
        raise CheckpointError(
            f"{folder} is a {backend} checkpoint according to {BACKEND_FILE}; only torch_dist and "
            "fsdp_dtensor are supported: save it with --ckpt-format torch_dist"
        )
    if METADATA_FILE not in tree.spans:
        raise CheckpointError(
            f"{folder} has no {METADATA_FILE}, so the save did not finish, or another node saved "
            "this file; copy the missing files from all nodes, or take an earlier iteration"
        )
    if backend is None:
        backend = _identify_by_keys(tree)
    if "adapter_metadata.json" in tree.spans:
        raise CheckpointError(f"{folder} is a NeMo 2 adapter, not a model; give its base model")
    has_modelopt_state = any(name.startswith("modelopt_state") for name in tree.spans)
    if has_modelopt_state or (folder / "modelopt_state").exists():
        raise CheckpointError(
            f"{folder} has modelopt_state: the model was quantized or pruned; give the original "
            "model"
        )
    return backend


def _identify_by_keys(tree: FileTree) -> str:
    """Return the format of a checkpoint without `metadata.json`, which must be fsdp_dtensor.

    torch_dcp, the format of torch's own FSDP, has the same files and keys. The args name the
    format; without args, only fsdp_dtensor separates the gate and up matrices.
    """
    index = read_index(tree, lambda key: key == ARGS_KEY or key.startswith("model."))
    if not index.tensors:
        raise CheckpointError(
            f"{tree.path} has no readable {BACKEND_FILE}, which is written last, so the save did "
            "not finish, or another node saved this file; copy the missing files from all nodes, "
            "or take an earlier iteration"
        )
    has_halves = any(key.endswith(GATE_UP_SUFFIXES) for key in index.tensors)
    saved_format = (read_common_args(index) or {}).get("ckpt_format")
    if saved_format == FSDP_DTENSOR or (saved_format is None and has_halves):
        return FSDP_DTENSOR
    name = "torch_dcp" if saved_format == "torch_dcp" else "torch_dcp or fsdp_dtensor"
    raise CheckpointError(
        f"{tree.path} is a {name} checkpoint: it has keys such as {next(iter(index.tensors))}, but "
        f"no readable {BACKEND_FILE}, and no args that name fsdp_dtensor; save it with "
        "--ckpt-format torch_dist"
    )


def _refuse_missing_files(tree: FileTree) -> None:
    """Refuse a checkpoint that lacks a file in the list of `integrity.json`.

    Only newer saves contain `integrity.json`. Its hashes are not compared, because this would read
    all files completely.
    """
    hash_by_name = read_json(tree, INTEGRITY_FILE).get("files")
    names = [str(name) for name in hash_by_name] if isinstance(hash_by_name, dict) else []
    if missing := [name for name in names if "/" not in name and name not in tree.spans]:
        raise CheckpointError(
            f"{tree.path} lacks {summarize_names(missing)} of the {len(names)} files that "
            f"{INTEGRITY_FILE} lists; copy the missing files from all nodes of the cluster: each "
            "node may have saved only its own files"
        )


def read_json(tree: FileTree, name: str) -> dict[str, Any]:
    """Read the JSON object of a small file; return an empty dict if it is absent or unreadable."""
    try:
        record = json.loads(tree.spans[name].read(TEXT_BYTES_MAX))
    except (CheckpointError, KeyError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def gather_tensors(index: DcpIndex) -> DistCheckpoint:
    """Collect the tensors of the index by canonical name."""
    dist_checkpoint = DistCheckpoint()
    layers: set[int] = set()
    for key, entry in index.tensors.items():
        match = WRAPPER_PREFIX.match(key)
        unprefixed_key = key[match.end() :] if match else key
        if IGNORED_KEYS.fullmatch(unprefixed_key) or TRAINING_STATE_KEYS.match(unprefixed_key):
            continue
        if unprefixed_key.startswith(MTP_PREFIX):
            dist_checkpoint.has_mtp_heads = True
            continue
        # `refuse_unsupported_part` expects a layer number, which the key of stacked layers lacks.
        numbered_key = re.sub(r"\blayers\.(?!\d)", "layers.0.", key)
        refuse_unsupported_part(numbered_key, f"{index.folder}/{METADATA_FILE}")
        pattern = _parse_key(unprefixed_key, entry, index.folder / METADATA_FILE)
        for leading_index in product(
            *(range(size) for size in entry.shape[: pattern.leading_dims])
        ):
            name = pattern.canonical_name(leading_index)
            if name.startswith(LAYERS_PREFIX):
                layers.add(int(name[len(LAYERS_PREFIX) :].split(".", 1)[0]))
            sharded_tensor = dist_checkpoint.tensors.setdefault(
                name, ShardedTensor(key, entry.dtype)
            )
            if pattern.half in sharded_tensor.shapes:
                raise CheckpointError(
                    f"{index.folder} has {name} twice, as {sharded_tensor.key} and as {key}; two "
                    "checkpoints are mixed: copy the directory from the training run again"
                )
            sharded_tensor.shapes[pattern.half] = entry.shape[pattern.leading_dims :]
            sharded_tensor.chunk_slices[pattern.half] = []
        _assign_chunks(dist_checkpoint, pattern, entry)
    if layers != set(range(len(layers))):
        first_missing = min(set(range(len(layers))) - layers)
        raise CheckpointError(
            f"{index.folder} has {len(layers)} layers up to layer {max(layers)}, but not layer "
            f"{first_missing}; keys are missing: copy {METADATA_FILE} again"
        )
    dist_checkpoint.num_layers = len(layers)
    _move_norms(dist_checkpoint)
    return dist_checkpoint


def _refuse_wrong_shape(entry: ChunkedTensor, leading_dims: int, index: Path) -> None:
    sizes = entry.shape[:leading_dims]
    if len(entry.shape) <= leading_dims or 0 in sizes or math.prod(sizes) > LAYER_EXPERTS_MAX:
        raise CheckpointError(
            f"{index}: {entry.key} has shape {entry.shape}, which is not a stack of the tensors of "
            "layers or experts; the index is of another format: save the checkpoint as torch_dist"
        )


def _parse_key(key: str, entry: ChunkedTensor, index: Path) -> KeyPattern:
    """Return the pattern of a key without wrapper prefix; refuse a shape that does not fit it."""
    match = LAYER_KEY.fullmatch(key)
    if not match:
        return KeyPattern(canonical_key(key), "", False, False)
    layer = match[1]
    layer_key = match[2]
    half = 0
    if "linear_fc1." in layer_key and layer_key.endswith(GATE_UP_SUFFIXES):
        half = GATE_UP_SUFFIXES.index(layer_key[-2:])
        layer_key = layer_key[:-2]
    prefix = f"{LAYERS_PREFIX}{layer or ''}"
    spans_layers = layer is None
    expert_match = EXPERT_KEY.fullmatch(layer_key)
    if not expert_match:
        layer_key = canonical_key(f"{LAYERS_PREFIX}0.{layer_key}")[len(f"{LAYERS_PREFIX}0.") :]
        pattern = KeyPattern(prefix, f".{layer_key}", spans_layers, False, half)
    elif expert_match[1] is None:
        pattern = KeyPattern(prefix, f".{expert_match[2]}", spans_layers, True, half)
    else:
        suffix = f".mlp.experts.local_experts.{expert_match[1]}.{expert_match[2]}"
        pattern = KeyPattern(prefix, suffix, spans_layers, False, half)
    _refuse_wrong_shape(entry, pattern.leading_dims, index)
    return pattern


def _assign_chunks(
    dist_checkpoint: DistCheckpoint, pattern: KeyPattern, entry: ChunkedTensor
) -> None:
    """Split each chunk of a key into slices, and assign each slice to its canonical tensor."""
    leading_dims = pattern.leading_dims
    for chunk in entry.chunks:
        dims = zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
        if any(offset + size > extent for offset, size, extent in dims):
            raise CheckpointError(
                f"{chunk.location} has a chunk of {chunk.sizes} at {chunk.offsets}, outside the "
                f"tensor's shape {entry.shape}; {METADATA_FILE} is broken: copy it again"
            )
        for local_index in product(*(range(size) for size in chunk.sizes[:leading_dims])):
            leading_index = tuple(map(add, chunk.offsets, local_index))
            sharded_tensor = dist_checkpoint.tensors[pattern.canonical_name(leading_index)]
            sharded_tensor.chunk_slices[pattern.half].append(
                (chunk.offsets[leading_dims:], ChunkSlice(chunk, local_index))
            )


def _move_norms(dist_checkpoint: DistCheckpoint) -> None:
    """Give the norm before the MLP of each layer its canonical name.

    The name is `mlp.linear_fc1.layer_norm_*` in dense layers and `pre_mlp_layernorm.*` in MoE
    layers. Megatron-Core's local layer spec saves the dense name in MoE layers too.
    """
    for layer in range(dist_checkpoint.num_layers):
        prefix = f"{LAYERS_PREFIX}{layer}."
        has_experts = f"{prefix}mlp.router.weight" in dist_checkpoint.tensors
        for leaf in ("weight", "bias"):
            fused = f"{prefix}mlp.linear_fc1.layer_norm_{leaf}"
            separate = f"{prefix}pre_mlp_layernorm.{leaf}"
            source, target = (fused, separate) if has_experts else (separate, fused)
            if source in dist_checkpoint.tensors and target not in dist_checkpoint.tensors:
                dist_checkpoint.tensors[target] = dist_checkpoint.tensors.pop(source)


def _pair_hybrid_layers(dist_checkpoint: DistCheckpoint, folder: Path) -> None:
    """Give the tensors of a HybridModel the names and the number of layers of a GPT."""
    layers = stored_layers(dist_checkpoint.tensors, dist_checkpoint.num_layers)
    if not layers:
        return
    refuse_unpaired_layers(layers, f"{folder}: the pattern of its layers")
    dist_checkpoint.tensors = {
        gpt_name(name): tensor for name, tensor in dist_checkpoint.tensors.items()
    }
    dist_checkpoint.num_layers //= 2
    dist_checkpoint.hybrid_layers = layers


def _logical_tensor(sharded_tensor: ShardedTensor, shape: tuple[int, ...]) -> LogicalTensor:
    """Map a tensor to its chunk slices; omit vocabulary padding, the rows from `shape[0]` on."""
    slices = []
    row_offset = 0
    for half in sorted(sharded_tensor.shapes):
        for offsets, chunk_slice in sharded_tensor.chunk_slices[half]:
            top = row_offset + (offsets[0] if offsets else 0)
            bottom = min(top + (chunk_slice.shape[0] if chunk_slice.shape else 1), shape[0])
            columns = (offsets[1], offsets[1] + chunk_slice.shape[1]) if len(offsets) == 2 else None
            if top < bottom:
                slices.append(SourceSlice(chunk_slice, (top, bottom), columns))
        row_offset += sharded_tensor.shapes[half][0]
    return LogicalTensor(shape, sharded_tensor.dtype, tuple(_split_at_row_cuts(slices)))


def _split_at_row_cuts(slices: list[SourceSlice]) -> Iterator[SourceSlice]:
    """Split slices at the row bounds of all slices.

    Any two resulting slices have the same rows or disjoint rows, as `LogicalTensor.mapping_error`
    requires.
    """
    cuts = sorted({row for source_slice in slices for row in source_slice.rows})
    next_cut = dict(pairwise(cuts))
    for source_slice in slices:
        first_row, stop_row = source_slice.rows
        top = first_row
        while top < stop_row:
            bottom = next_cut[top]
            yield SourceSlice(
                source_slice.source,
                (top, bottom),
                source_slice.columns,
                source_row=top - first_row,
            )
            top = bottom


def _resolve_config(
    dist_checkpoint: DistCheckpoint,
    index: DcpIndex,
    overrides: GPTConfig | Mapping[str, Any],
    infer_config: Callable[[DcpIndex, WeightShapes], PartialConfig],
) -> tuple[GPTConfig, list[str]]:
    """Return the config, and notes for the user about fields that are assumed."""
    folder = index.folder
    embedding = dist_checkpoint.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"{folder} has no matrix {EMBEDDING}, so it is an adapter or not a GPT; give the "
            "checkpoint of a GPT"
        )
    shapes = {
        name: [sharded_tensor.shape] for name, sharded_tensor in dist_checkpoint.tensors.items()
    }
    weights = WeightShapes(
        shapes,
        dist_checkpoint.num_layers,
        legacy=False,
        hybrid_layers=dist_checkpoint.hybrid_layers,
    )
    chunk_slices = (
        chunk_slice
        for sharded_tensor in dist_checkpoint.tensors.values()
        for half_slices in sharded_tensor.chunk_slices.values()
        for _, chunk_slice in half_slices
    )
    dtype = FLOAT_DTYPE_NAMES[majority_dtype(chunk_slices) or torch.float32]
    config, notes = resolve_config(
        folder, weights, dtype, overrides, lambda weights: infer_config(index, weights)
    )
    if dist_checkpoint.has_mtp_heads:
        notes["mtp"] = MTP_NOTE
    return config, list(notes.values())


def _drop_tied_head(dist_checkpoint: DistCheckpoint, folder: Path) -> None:
    """Remove the head of a tied model; refuse a head that is not a copy of the embedding."""
    samples = []
    for sharded_tensor in (dist_checkpoint.tensors.pop(HEAD), dist_checkpoint.tensors[EMBEDDING]):
        logical = _logical_tensor(sharded_tensor, sharded_tensor.shape)
        if error := logical.mapping_error():
            raise CheckpointError(
                f"{folder}: {sharded_tensor.key}: {error}; copy the checkpoint again"
            )
        rows = (0, logical.shape[0] // 2, logical.shape[0] - 1)
        sample = torch.cat([logical.read_sample(row, 1, logical.shape[1]) for row in rows])
        samples.append([InMemoryTensor(sample, sharded_tensor.key)])
    refuse_untied_head(folder, samples[0], samples[1], UNTIED_HINT)


def _refuse_interleaved_gates(dist_checkpoint: DistCheckpoint) -> None:
    """Refuse a gated MLP that several ranks saved from Transformer Engine's TransformerLayer.

    Each rank saved its gate rows above its up rows, so the row order depends on the tensor parallel
    size, which is not recorded.
    """
    for name, sharded_tensor in dist_checkpoint.tensors.items():
        row_offsets = {
            offsets[0]
            for half_slices in sharded_tensor.chunk_slices.values()
            for offsets, _ in half_slices
            if offsets
        }
        if "layernorm_mlp.fc1" in sharded_tensor.key and len(row_offsets) > 1:
            raise CheckpointError(
                f"{sharded_tensor.chunk_slices[0][0][1].location}: {name} was saved by "
                f"{len(row_offsets)} tensor ranks, each with its gate rows above its up rows, and "
                "no file records this order; save the model with tensor_model_parallel_size 1, or "
                "from Megatron-Core's own layers"
            )
