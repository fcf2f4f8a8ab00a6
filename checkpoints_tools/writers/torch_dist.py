"""torch_dist writer: plans a Megatron-Core distributed checkpoint, its index and chunk files.

A stored tensor is unsharded, with one chunk per layer or per expert. Therefore the parallel split
has only two effects: the args record it, and its tensor-parallel size sets the vocabulary padding.
The index (`.metadata`) is a pickle of torch's own classes. It records the file, offset and size of
every chunk, which are all known before any weight is read. The module only plans; it reads no
weights.
"""

import json
import pickle
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoints_tools.layout.layout import (
    CrcPatch,
    Layout,
    LiteralBytes,
    ParallelSplit,
    Placement,
    TargetFile,
    literal_file,
    stored_vocab_rows,
)
from checkpoints_tools.layout.torch_save import (
    ALIGNMENT,
    ArchiveLayout,
    TensorPlaceholder,
    plan_archive,
)
from checkpoints_tools.writers.megatron_args import (
    LayerSpec,
    ModelClass,
    build_args,
    check_layer_spec,
    check_supported,
    load_notes,
)
from gpt.checkpoint.files.torch_dcp import METADATA_FILE
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.formats.mappings.hybrid_layers import hybrid_name
from gpt.formats.megatron.rank_files import TRACKER_FILE
from gpt.formats.megatron.torch_dist import BACKEND_FILE
from gpt.formats.megatron.torch_dist_config import COMMON_FILE, COMMON_KEY
from gpt.parallel.vocabulary_padding import VOCABULARY_MULTIPLE
from gpt.parallel.weight_sharding import (
    LAYERS_PREFIX,
    ParameterSpec,
    ShardRule,
    ShardSpec,
    parameter_specs,
)

ITERATION_FOLDER = "release"  # Megatron's name for weights without optimizer state.
BACKEND_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
FILE_BYTES_MAX = 4 << 30
# Threads that write to the same file wait for each other, so a checkpoint has several files. From
# 1 GiB on, a checkpoint has about 16 files, or more if a file would exceed FILE_BYTES_MAX. A
# smaller checkpoint has fewer files, each of about FILE_BYTES_MIN.
FILES_MIN, FILE_BYTES_MIN = 16, 64 << 20
# Python 3.4 and later can read protocol 4; the default of a newer Python may be a later protocol.
PICKLE_PROTOCOL = 4
LAYER_TENSOR_NAME = re.compile(
    r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.local_experts\.(\d+)\.)?(.+)"
)


def plan_layout(
    checkpoint: Checkpoint,
    split: ParallelSplit,
    *,
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
    spec: LayerSpec = "te",
    model: ModelClass = "gpt",
    file_bytes_max: int = FILE_BYTES_MAX,
) -> Layout:
    """Plan the target's files; `checkpoint` already has the target's dtype."""
    config = checkpoint.config
    check_supported(config, split, model)
    check_layer_spec(spec, model)
    args = build_args(
        config,
        split,
        vocabulary_multiple=vocabulary_multiple,
        spec=spec,
        model=model,
        ckpt_format="torch_dist",
        tokenizer=checkpoint.tokenizer,
    )
    keys = KeyNaming(config, spec, model, model == "hybrid" or _has_per_layer_keys(args))
    common = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {
            "singleton_local_shards": False,
            "non_homogeneous_layers": keys.per_layer_keys,
        },
    }
    nbytes = sum(logical.nbytes for logical in checkpoint.tensors.values())
    chunk_files = ChunkFiles(min(file_bytes_max, max(FILE_BYTES_MIN, nbytes // FILES_MIN)))
    index = MetadataBuilder(chunk_files)
    table = parameter_specs(config)
    index.add_objects([COMMON_KEY], [common])
    # Megatron loads the extra state of each module in `_modules_with_extra_state`, but only FP8
    # modules use its value. Therefore all these keys refer to one stored object, the list [None].
    index.add_objects(
        (keys.extra_state_key(module) for module in _modules_with_extra_state(table, spec, model)),
        [None],
    )
    vocab_rows = stored_vocab_rows(config, split.tp, vocabulary_multiple)
    placeholders = {
        name: _make_placeholder(checkpoint, parameter, vocab_rows)
        for name, parameter in table.items()
    }
    dtypes = _key_dtypes(keys, placeholders)
    for name, placeholder in placeholders.items():
        position = keys.position(name)
        index.add_tensor(position, replace(placeholder, dtype=dtypes[position.key]))
    archive = plan_archive(common)
    files = [
        *chunk_files.target_files(),
        literal_file(f"{ITERATION_FOLDER}/{METADATA_FILE}", index.to_bytes()),
        TargetFile(f"{ITERATION_FOLDER}/{COMMON_FILE}", archive.size, archive.literals),
    ]
    last_files = (
        literal_file(f"{ITERATION_FOLDER}/{BACKEND_FILE}", json.dumps(BACKEND_METADATA).encode()),
        literal_file(TRACKER_FILE, b"release"),
    )
    layout_notes = [*load_notes(config, split, spec, model)]
    if model == "gpt":
        layout_notes += _spec_notes(config, spec)
    return Layout(
        "torch_dist",
        tuple(files),
        ITERATION_FOLDER,
        last_files,
        tuple(layout_notes),
        padded_vocab_size=vocab_rows,
    )


@dataclass(frozen=True)
class KeyPosition:
    """Position of a logical tensor in a stored tensor: the key, and an index on the leading axes.

    The leading axes of a stored tensor are a layer axis, an expert axis, both, or none. The axes of
    the logical tensor follow.
    """

    key: str
    leading_index: tuple[int, ...]  # Layer number, expert number, both, or empty.
    leading_sizes: tuple[int, ...]  # Number of layers, number of experts, both, or empty.


@dataclass(frozen=True)
class KeyNaming:
    """Maps logical tensor names to the keys of torch_dist."""

    config: GPTConfig
    spec: LayerSpec
    model: ModelClass
    # True: each layer has its own keys, because the layers differ. False: one key is the stored
    # tensor of all layers, which has a layer axis.
    per_layer_keys: bool

    def position(self, name: str) -> KeyPosition:
        if self.model == "hybrid":
            name = hybrid_name(name)
        match = LAYER_TENSOR_NAME.fullmatch(name)
        if not match:
            return KeyPosition(name, (), ())
        layer = int(match[1])
        expert = match[2]
        leaf = match[3]
        if self.spec == "local":
            leaf = leaf.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        prefix = f"{LAYERS_PREFIX}{layer}." if self.per_layer_keys else LAYERS_PREFIX
        leading_index = () if self.per_layer_keys else (layer,)
        leading_sizes = () if self.per_layer_keys else (self.config.num_layers,)
        if expert is None:
            return KeyPosition(prefix + leaf, leading_index, leading_sizes)
        key = f"{prefix}mlp.experts.experts.{leaf}"
        return KeyPosition(
            key, (*leading_index, int(expert)), (*leading_sizes, self.config.num_experts)
        )

    def extra_state_key(self, module: str) -> str:
        """Return the key of a module's extra state.

        The key ends with the layer and expert numbers and their counts, e.g. `/shard_3_24`.
        """
        position = self.position(f"{module}._extra_state")
        leading_index, leading_sizes = (
            ".".join(map(str, numbers))
            for numbers in (position.leading_index, position.leading_sizes)
        )
        return f"{position.key}/shard_{leading_index or 0}_{leading_sizes or 1}"


@dataclass
class ChunkFile:
    """Builds one `.distcp` file, a sequence of `torch.save` archives."""

    end: int = 0
    literals: list[LiteralBytes] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    patches: list[CrcPatch] = field(default_factory=list)

    @property
    def next_offset(self) -> int:
        """Offset of the next archive, aligned so that tensors in a mapped file are aligned."""
        return self.end + -self.end % ALIGNMENT

    def add_archive(self, archive: ArchiveLayout) -> None:
        placements_before = len(self.placements)
        self.patches += [
            CrcPatch(p.offset, placements_before + p.placement_index) for p in archive.patches
        ]
        self.placements += archive.placements
        for literal in (LiteralBytes(self.end, bytes(archive.start - self.end)), *archive.literals):
            self._add_literal(literal)
        self.end = archive.start + archive.size

    def _add_literal(self, literal: LiteralBytes) -> None:
        """Append a literal. Adjacent literals are merged, so that fewer writes are needed."""
        if self.literals:
            last = self.literals[-1]
            if last.offset + len(last.content) == literal.offset:
                self.literals[-1] = LiteralBytes(last.offset, last.content + literal.content)
                return
        if literal.content:
            self.literals.append(literal)


@dataclass
class ChunkFiles:
    """The `.distcp` files; a new file begins when the current file would exceed `bytes_max`."""

    bytes_max: int
    files: list[ChunkFile] = field(default_factory=lambda: [ChunkFile()])

    def add_record(self, record: Any) -> _StorageInfo:
        """Add `record` as an archive, and return the archive's file, offset and size."""
        chunk_file = self.files[-1]
        archive = plan_archive(record, chunk_file.next_offset)
        if chunk_file.end and archive.start + archive.size > self.bytes_max:
            chunk_file = ChunkFile()
            self.files.append(chunk_file)
            archive = plan_archive(record)
        chunk_file.add_archive(archive)
        return _StorageInfo(_chunk_file_name(len(self.files) - 1), archive.start, archive.size)

    def target_files(self) -> list[TargetFile]:
        files = []
        for index, chunk_file in enumerate(self.files):
            contents = (
                tuple(chunk_file.literals),
                tuple(chunk_file.placements),
                tuple(chunk_file.patches),
            )
            files.append(
                TargetFile(
                    f"{ITERATION_FOLDER}/{_chunk_file_name(index)}", chunk_file.end, *contents
                )
            )
        return files


def _chunk_file_name(index: int) -> str:
    return f"__0_{index}.distcp"


@dataclass
class MetadataBuilder:
    """Builds `.metadata`: the keys, and the file and offset of each tensor chunk and object."""

    chunk_files: ChunkFiles
    keys: dict[str, TensorStorageMetadata | BytesStorageMetadata] = field(default_factory=dict)
    storage: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)

    def add_objects(self, keys: Iterable[str], value: list[Any]) -> None:
        """Add keys that all have the same value; the value is stored once."""
        storage_info = self.chunk_files.add_record(value)
        for key in keys:
            self.keys[key] = BytesStorageMetadata()
            self.storage[MetadataIndex(key)] = storage_info

    def add_tensor(self, position: KeyPosition, placeholder: TensorPlaceholder) -> None:
        """Add a logical tensor as one chunk of the stored tensor `position.key`."""
        sizes = (*(1 for _ in position.leading_index), *placeholder.sizes)
        offsets = (*position.leading_index, *(0 for _ in placeholder.sizes))
        entry = self.keys.get(position.key)
        if entry is None:
            full_size = torch.Size((*position.leading_sizes, *placeholder.sizes))
            entry = TensorStorageMetadata(TensorProperties(placeholder.dtype), full_size, [])
            self.keys[position.key] = entry
        assert isinstance(entry, TensorStorageMetadata), position.key
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        storage_info = self.chunk_files.add_record(replace(placeholder, shape=sizes))
        self.storage[MetadataIndex(position.key, offsets)] = storage_info

    def to_bytes(self) -> bytes:
        # No field has a run name or a time, so two conversions of a model write the same bytes.
        record = Metadata(self.keys, planner_data={}, storage_data=self.storage)
        return pickle.dumps(record, PICKLE_PROTOCOL)


def _has_per_layer_keys(args: Namespace) -> bool:
    """Tell whether each layer has its own keys, by Megatron-Core's rule for moe_layer_freq."""
    frequency = args.moe_layer_freq
    return not isinstance(frequency, int) or frequency > 1


def _make_placeholder(
    checkpoint: Checkpoint, parameter: ParameterSpec, vocab_rows: int
) -> TensorPlaceholder:
    logical = checkpoint.tensors[parameter.name]
    height = logical.shape[0]
    size = vocab_rows if parameter.shard_rule is ShardRule.VOCAB else height
    return TensorPlaceholder(
        parameter.name, ShardSpec(0, ((0, height),), size), logical.shape, logical.dtype
    )


def _key_dtypes(
    keys: KeyNaming, placeholders: Mapping[str, TensorPlaceholder]
) -> dict[str, torch.dtype]:
    """Return each key's dtype: the narrowest that represents all its logical tensors exactly."""
    dtypes: dict[str, torch.dtype] = {}
    for name, placeholder in placeholders.items():
        key = keys.position(name).key
        dtypes[key] = torch.promote_types(dtypes.get(key, placeholder.dtype), placeholder.dtype)
    return dtypes


def _modules_with_extra_state(
    names: Iterable[str], spec: LayerSpec, model: ModelClass
) -> Iterator[str]:
    """Yield the modules for which Megatron loads an extra state."""
    if model == "hybrid":
        yield "output_layer"  # Also if the embedding is tied; GPTModel loads none.
    for name in names:
        module, _, leaf = name.rpartition(".")
        leaf_module = module.rpartition(".")[2]
        if leaf != "weight":
            continue
        if leaf_module.startswith("linear_") or (
            spec == "te" and leaf_module.endswith("layernorm")
        ):
            yield module
        if spec == "te" and leaf_module == "linear_proj":
            yield f"{module.removesuffix(leaf_module)}core_attention"


def _spec_notes(config: GPTConfig, spec: LayerSpec) -> Iterator[str]:
    if spec == "te" and any(config.moe_layers):
        yield (
            "Megatron with --transformer-impl local cannot load this target, because that "
            "implementation has different names for the norms of layers with experts; to load the "
            "model there, convert again with --megatron-spec local"
        )
