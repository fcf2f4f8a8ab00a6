"""The files of PyTorch's distributed checkpoints: an index, and chunks of tensors in large files.

The index, `.metadata`, is a pickle; every object in it becomes a stand-in that holds values and
does nothing, so no class of torch's or of a trainer's is needed or run. A chunk is a whole
`torch.save` archive somewhere in a file; its numbers are viewed where they lie, never copied.
It knows no models, no names, and not whether the files lie in a folder or in an archive.
"""

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.checkpoint.files.file_tree import FileTree, Span
from gpt.checkpoint.files.restricted_unpickle import StandIns, Stub
from gpt.checkpoint.files.safetensors_file import MappedFile, refuse_pointer
from gpt.checkpoint.files.torch_zip import view_archive
from gpt.checkpoint.logical_tensor import some
from gpt.errors import CheckpointError
from gpt.settings import shown

INDEX = ".metadata"
INDEX_BYTES_MAX = 1 << 30  # Of the largest runs it has some tens of megabytes.
# Its classes moved within torch over the years; none of them is ever run.
CLASSES = re.compile(
    r"torch\.distributed\.(checkpoint|_shard)\..+|torch\.serialization\._get_layout"
)


@dataclass
class Chunk:
    """A box of a tensor, as one rank saved it."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    blob: Span
    view: Tensor | None = None

    @property
    def where(self) -> str:
        return f"{self.blob.path}: {self.key}"

    def tensor(self) -> Tensor:
        """A view of the mapped file; read only."""
        if self.view is None:
            try:
                self.view = self._view()
            except CheckpointError:
                raise
            # A broken archive or a hostile recipe fails in its own way.
            except Exception as error:
                raise self.broken(f"{type(error).__name__}: {error}"[:120]) from None
        return self.view

    def _view(self) -> Tensor:
        made = view_archive(self.blob)
        if not isinstance(made, Tensor):
            raise self.broken("it is no plain tensor")
        if tuple(made.shape) != self.sizes or made.dtype != self.dtype:
            found = f"found {tuple(made.shape)} of {made.dtype}"
            raise self.broken(f"{found}, need {self.sizes} of {self.dtype}")
        return made

    def broken(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where} at byte {self.blob.offset} is not the tensor that {INDEX} promises "
            f"({reason}); the file is broken or of another save: copy it again"
        )


@dataclass(frozen=True)
class Entry:
    """A whole tensor under its key, and the chunks that make it up."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass
class Index:
    """What `.metadata` says of the keys that were asked for."""

    tree: FileTree
    tensors: dict[str, Entry] = field(default_factory=dict)
    objects: dict[str, Span] = field(default_factory=dict)
    files: dict[str, Span] = field(default_factory=dict)  # Those that the keys need.
    missing: set[str] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        return self.tree.path


def read_index(tree: FileTree, wanted: Callable[[str], bool]) -> Index:
    """The index, each file that the wanted keys need being there and long enough."""
    record = _values(tree)
    index = Index(tree)
    try:
        spans = _spans(record["storage_data"])
        for key, entry in record["state_dict_metadata"].items():
            if wanted(key):
                _add(index, key, entry, spans)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _unreadable(tree.path / INDEX, error) from None
    _check_files(index)
    return index


Spans = dict[tuple[str, tuple[int, ...] | None], Mapping[str, Any]]


def _spans(storage: Mapping[Stub, Stub]) -> Spans:
    return {
        (place.fields["fqn"], place.fields.get("offset")): span.fields
        for place, span in storage.items()
    }


def _add(index: Index, key: str, entry: Stub, spans: Spans) -> None:
    kind = entry.path.rpartition(".")[2]
    if kind == "BytesStorageMetadata":
        index.objects[key] = _blob(index, key, spans.get((key, None)))
        return
    if kind != "TensorStorageMetadata":
        raise ValueError(f"{key} is a {kind}")
    properties = entry.fields["properties"]
    dtype = properties.state[0] if properties.state else properties.fields["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key} has dtype {dtype!r}")
    shape = _numbers(entry.fields["size"])
    chunks = []
    for chunk in entry.fields["chunks"]:
        offsets, sizes = _numbers(chunk.fields["offsets"]), _numbers(chunk.fields["sizes"])
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"a chunk of {key} has other dimensions than {shape}")
        blob = _blob(index, key, spans.get((key, offsets)))
        chunks.append(Chunk(key, offsets, sizes, dtype, blob))
    index.tensors[key] = Entry(key, shape, dtype, tuple(chunks))


def _blob(index: Index, key: str, span: Mapping[str, Any] | None) -> Span:
    if span is None:
        raise ValueError(f"no file is named for a chunk of {key}")
    name = span["relative_path"]
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
        raise ValueError(f"{key} is said to lie in {name!r}, outside the directory")
    if packing := span.get("transform_descriptors"):
        raise CheckpointError(
            f"{index.folder}: {key} is stored with {shown(packing)}, which is not read; save the "
            "checkpoint again without compression"
        )
    offset, length = _numbers((span["offset"], span["length"]))
    whole = index.tree.spans.get(name)
    if whole is None:
        index.missing.add(name)
        return Span(MappedFile(index.folder / name, 0), offset, length, index.folder / name)
    index.files[name] = whole
    return Span(whole.file, whole.offset + offset, length, whole.path)


def _numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(type(n) is int and n >= 0 for n in values):
        raise ValueError(f"{shown(values)} where sizes are needed")
    return tuple(values)


def _check_files(index: Index) -> None:
    if index.missing:
        count = len(index.missing | set(index.files))
        raise CheckpointError(
            f"{index.folder} lacks {some(sorted(index.missing))} of the {count} files that {INDEX} "
            "names; copy the missing ones, each node of a cluster may have kept its own"
        )
    ends = dict.fromkeys(index.files, 0)
    blobs = [chunk.blob for entry in index.tensors.values() for chunk in entry.chunks]
    for blob in [*blobs, *index.objects.values()]:
        start = index.files[blob.path.name].offset
        ends[blob.path.name] = max(ends[blob.path.name], blob.offset + blob.length - start)
    for name, end in ends.items():
        whole = index.files[name]
        refuse_pointer(whole.path, whole.head(8))
        if whole.length < end:
            raise CheckpointError(
                f"{whole.path} is truncated: it has {whole.length} bytes, {INDEX} needs {end}; "
                "copy it again"
            )


class _Reader(StandIns):
    """Torch's own classes of an index are stand-ins too."""

    also = CLASSES


def _values(tree: FileTree) -> Mapping[str, Any]:
    path, span = tree.path / INDEX, tree.spans.get(INDEX)
    if span is None:
        raise CheckpointError(f"{path} does not exist; copy the checkpoint again")
    refuse_pointer(path, span.head(8))
    try:
        record = _Reader(io.BytesIO(span.read(INDEX_BYTES_MAX))).load()
        fields: Mapping[str, Any] = record.fields
        return fields
    except (CheckpointError, OSError):
        raise
    # Whatever stands in a broken or a hostile pickle, the loader meets it in its own ways.
    except Exception as error:
        raise _unreadable(path, error, span.length) from None


def _unreadable(path: Path, error: Exception, size: int | None = None) -> CheckpointError:
    reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:160]
    has = "" if size is None else f"it has {size} bytes and "
    return CheckpointError(
        f"{path} is not an index that can be read ({reason}); {has or 'it '}is broken or hostile: "
        "copy it again from where it was trained"
    )
