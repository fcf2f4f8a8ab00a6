"""Writes Megatron-Core's distributed checkpoints (`torch_dist`): one index, chunks in a few files.

Tensors are whole in it at any split, one chunk for each layer's or each expert's; tensor ranks
decide how far the vocabulary is padded, and nothing else. The index is of torch's own classes and
names every byte, so it is known before a weight is read. It only plans.
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
    VOCABULARY_MULTIPLE,
    Division,
    File,
    Layout,
    Patch,
    Placement,
    Text,
    padded_vocabulary,
    text_file,
)
from checkpoints_tools.layout.torch_save import ALIGNMENT, Archive, Promise, archive
from checkpoints_tools.writers.megatron_args import Spec, arguments, check, notes
from gpt.checkpoint.files.torch_dcp import INDEX
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.formats.megatron.rank_files import TRACKER
from gpt.formats.megatron.torch_dist import BACKEND
from gpt.formats.megatron.torch_dist_config import COMMON, COMMON_KEY
from gpt.parallel.sharding import LAYERS, Parameter, Part, Split, parameters

FOLDER = "release"  # Weights only: Megatron looks for no optimizer and no random states.
BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
FILE_BYTES_MAX = 4 << 30
# Writers of one file wait for each other, so there are several, unless they would be tiny.
FILES_MIN, SHARED_BYTES = 16, 64 << 20
# The protocol of Python 3.4 and later; the default of one that is newer may be too new elsewhere.
PICKLE_PROTOCOL = 4
NUMBERED = re.compile(r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.local_experts\.(\d+)\.)?(.+)")


def layout(
    checkpoint: Checkpoint,
    division: Division,
    *,
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
    spec: Spec = "te",
    file_bytes_max: int = FILE_BYTES_MAX,
) -> Layout:
    """`checkpoint` is in the dtype that is to be stored."""
    config = checkpoint.config
    check(config, division)
    args = arguments(
        config,
        division,
        vocabulary_multiple=vocabulary_multiple,
        spec=spec,
        kind="torch_dist",
        tokenizer=checkpoint.tokenizer,
    )
    keys = Keys(config, spec, apart=_apart(args))
    common = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {
            "singleton_local_shards": False,
            "non_homogeneous_layers": keys.apart,
        },
    }
    nbytes = sum(logical.nbytes for logical in checkpoint.tensors.values())
    shards = Shards(min(file_bytes_max, max(SHARED_BYTES, nbytes // FILES_MIN)))
    index = Index(shards)
    table = parameters(config)
    index.add_objects([COMMON_KEY], [common])
    # A module asks for its state although only FP8 kernels have one. One None stands for all.
    index.add_objects((keys.state(module) for module in _modules(table, spec)), [None])
    rows = padded_vocabulary(config, division.tp, vocabulary_multiple)
    promises = {name: _promise(checkpoint, parameter, rows) for name, parameter in table.items()}
    dtypes = _dtypes(keys, promises)
    for name, promise in promises.items():
        place = keys.place(name)
        index.add_tensor(place, replace(promise, dtype=dtypes[place.key]))
    made = archive(common)
    files = [
        *shards.closed(),
        text_file(f"{FOLDER}/{INDEX}", index.pickled()),
        File(f"{FOLDER}/{COMMON}", made.size, made.texts),
    ]
    last = (
        text_file(f"{FOLDER}/{BACKEND}", json.dumps(BACKENDS).encode()),
        text_file(TRACKER, b"release"),
    )
    found = [*notes(config, division, spec), *_notes(config, spec)]
    return Layout("torch_dist", tuple(files), FOLDER, last, tuple(found), vocabulary_rows=rows)


@dataclass(frozen=True)
class Place:
    """A key, and the place among its layers and experts where a logical tensor goes."""

    key: str
    at: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Keys:
    """What this form calls things."""

    config: GPTConfig
    spec: Spec
    apart: bool  # Each layer has keys of its own, as where not all layers are alike.

    def place(self, name: str) -> Place:
        match = NUMBERED.fullmatch(name)
        if not match:
            return Place(name, (), ())
        layer, expert, leaf = int(match[1]), match[2], match[3]
        if self.spec == "local":
            leaf = leaf.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        before = f"{LAYERS}{layer}." if self.apart else LAYERS
        at = () if self.apart else (layer,)
        counts = () if self.apart else (self.config.num_layers,)
        if expert is None:
            return Place(before + leaf, at, counts)
        key = f"{before}mlp.experts.experts.{leaf}"
        return Place(key, (*at, int(expert)), (*counts, self.config.num_experts))

    def state(self, module: str) -> str:
        """The key of a module's state, which is no tensor and has its place in its name."""
        place = self.place(f"{module}._extra_state")
        at, counts = (".".join(map(str, numbers)) for numbers in (place.at, place.counts))
        return f"{place.key}/shard_{at or 0}_{counts or 1}"


@dataclass
class Shard:
    """A file of archives, laid out front to back."""

    end: int = 0
    texts: list[Text] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Of the next archive: aligned, so that a mapped file's numbers are."""
        return self.end + -self.end % ALIGNMENT

    def add(self, made: Archive) -> None:
        before = len(self.placements)
        self.patches += [Patch(p.offset, before + p.placement) for p in made.patches]
        self.placements += made.placements
        for text in (Text(self.end, bytes(made.start - self.end)), *made.texts):
            self._add_text(text)
        self.end = made.start + made.size

    def _add_text(self, text: Text) -> None:
        """Many small texts follow each other; they are written as one."""
        if self.texts:
            last = self.texts[-1]
            if last.offset + len(last.content) == text.offset:
                self.texts[-1] = Text(last.offset, last.content + text.content)
                return
        if text.content:
            self.texts.append(text)


@dataclass
class Shards:
    """The files, each filled up to `limit` before the next is begun."""

    limit: int
    shards: list[Shard] = field(default_factory=lambda: [Shard()])

    def add(self, record: Any) -> _StorageInfo:
        shard = self.shards[-1]
        made = archive(record, shard.start)
        if shard.end and made.start + made.size > self.limit:
            shard = Shard()
            self.shards.append(shard)
            made = archive(record)
        shard.add(made)
        return _StorageInfo(_name(len(self.shards) - 1), made.start, made.size)

    def closed(self) -> list[File]:
        files = []
        for number, shard in enumerate(self.shards):
            said = tuple(shard.texts), tuple(shard.placements), tuple(shard.patches)
            files.append(File(f"{FOLDER}/{_name(number)}", shard.end, *said))
        return files


def _name(number: int) -> str:
    return f"__0_{number}.distcp"


@dataclass
class Index:
    """What `.metadata` says: the keys, and where each chunk and each object lies."""

    shards: Shards
    keys: dict[str, TensorStorageMetadata | BytesStorageMetadata] = field(default_factory=dict)
    storage: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)

    def add_objects(self, keys: Iterable[str], value: list[Any]) -> None:
        """Keys of one value, which is stored once."""
        where = self.shards.add(value)
        for key in keys:
            self.keys[key] = BytesStorageMetadata()
            self.storage[MetadataIndex(key)] = where

    def add_tensor(self, place: Place, promise: Promise) -> None:
        sizes = (*(1 for _ in place.at), *promise.sizes)
        offsets = (*place.at, *(0 for _ in promise.sizes))
        entry = self.keys.get(place.key)
        if entry is None:
            whole = torch.Size((*place.counts, *promise.sizes))
            entry = TensorStorageMetadata(TensorProperties(promise.dtype), whole, [])
            self.keys[place.key] = entry
        assert isinstance(entry, TensorStorageMetadata), place.key
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        where = self.shards.add(replace(promise, shape=sizes))
        self.storage[MetadataIndex(place.key, offsets)] = where

    def pickled(self) -> bytes:
        # No field that names a run or a moment: the same model gives the same bytes.
        record = Metadata(self.keys, planner_data={}, storage_data=self.storage)
        return pickle.dumps(record, PICKLE_PROTOCOL)


def _apart(args: Namespace) -> bool:
    """Megatron-Core itself decides by this argument how its layers are keyed."""
    frequency = args.moe_layer_freq
    return not isinstance(frequency, int) or frequency > 1


def _promise(checkpoint: Checkpoint, parameter: Parameter, rows: int) -> Promise:
    logical = checkpoint.tensors[parameter.name]
    height = logical.shape[0]
    size = rows if parameter.split is Split.VOCAB else height
    return Promise(parameter.name, Part(0, ((0, height),), size), logical.shape, logical.dtype)


def _dtypes(keys: Keys, promises: Mapping[str, Promise]) -> dict[str, torch.dtype]:
    """Each key's: one that holds the numbers of all its layers exactly."""
    dtypes: dict[str, torch.dtype] = {}
    for name, promise in promises.items():
        key = keys.place(name).key
        dtypes[key] = torch.promote_types(dtypes.get(key, promise.dtype), promise.dtype)
    return dtypes


def _modules(names: Iterable[str], spec: Spec) -> Iterator[str]:
    """Those that ask for a state when they are loaded."""
    for name in names:
        module, _, leaf = name.rpartition(".")
        kind = module.rpartition(".")[2]
        if leaf != "weight":
            continue
        if kind.startswith("linear_") or (spec == "te" and kind.endswith("layernorm")):
            yield module
        if spec == "te" and kind == "linear_proj":
            yield f"{module.removesuffix(kind)}core_attention"


def _notes(config: GPTConfig, spec: Spec) -> Iterator[str]:
    if spec == "te" and any(config.moe_layers):
        yield (
            "Megatron with --transformer-impl local asks for the norms of layers with experts by "
            "another name; for it, write with --megatron-spec local"
        )
