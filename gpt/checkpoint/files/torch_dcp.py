"""PyTorch distributed checkpoint (DCP) files: the `.metadata` index and mapped tensor chunks.

The index is a pickle. Its objects are read as inert stubs, so no class of torch or of a training
framework is imported or run. A chunk is the part of a tensor that one rank saved. It is stored as a
complete `torch.save` archive inside a larger file, and is read as a view of the mapped file,
without a copy. The files can be in a folder or in an uncompressed .nemo archive. The module is
independent of the model and of parameter names.
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
from gpt.checkpoint.files.restricted_unpickle import Stub, StubUnpickler
from gpt.checkpoint.files.safetensors_file import SIZE_MAX, MappedFile, refuse_git_lfs_pointer
from gpt.checkpoint.files.torch_zip import view_archive
from gpt.checkpoint.logical_tensor import summarize_names
from gpt.errors import CheckpointError
from gpt.settings import short_repr

METADATA_FILE = ".metadata"
METADATA_BYTES_MAX = 1 << 30  # The indexes of the largest runs have tens of megabytes.
# Classes of the index, in any torch version; their objects become stubs.
DCP_CLASSES = re.compile(
    r"torch\.distributed\.(checkpoint|_shard)\..+|torch\.serialization\._get_layout"
)


@dataclass
class Chunk:
    """A rectangular part (box) of a tensor, saved by one rank."""

    key: str  # The tensor's key in the index.
    offsets: tuple[int, ...]  # First index of the box in each dimension of the tensor.
    sizes: tuple[int, ...]
    dtype: torch.dtype
    span: Span
    view: Tensor | None = None  # Set at the first call of `tensor`.

    @property
    def location(self) -> str:
        return f"{self.span.path}: {self.key}"

    def tensor(self) -> Tensor:
        """Return a view of the mapped file, which must not be written."""
        if self.view is None:
            try:
                self.view = self._open_view()
            except CheckpointError:
                raise
            # A broken or hostile archive can raise any exception.
            except Exception as error:
                raise self.corruption_error(f"{type(error).__name__}: {error}"[:120]) from None
        return self.view

    def _open_view(self) -> Tensor:
        tensor = view_archive(self.span)
        if not isinstance(tensor, Tensor):
            raise self.corruption_error("it is not a dense tensor")
        if tuple(tensor.shape) != self.sizes or tensor.dtype != self.dtype:
            actual = f"found {tuple(tensor.shape)} of {tensor.dtype}"
            raise self.corruption_error(f"{actual}, need {self.sizes} of {self.dtype}")
        return tensor

    def corruption_error(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.location} at byte {self.span.offset} is not the tensor that {METADATA_FILE} "
            f"describes ({reason}); the file is broken or belongs to another save: copy it again"
        )


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor of the index: its key, the shape of the whole tensor, and its chunks."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass
class DcpIndex:
    """The entries of `.metadata` for the requested keys, and the files that contain their data."""

    tree: FileTree
    tensors: dict[str, ChunkedTensor] = field(default_factory=dict)  # By key.
    object_spans: dict[str, Span] = field(default_factory=dict)  # Pickled objects, by key.
    file_spans: dict[str, Span] = field(default_factory=dict)  # Existing files, by name.
    missing_files: set[str] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        return self.tree.path


def read_index(tree: FileTree, key_filter: Callable[[str], bool]) -> DcpIndex:
    """Read the index entries whose keys `key_filter` accepts; check that their files are complete.

    A file is complete if it exists and contains the byte ranges of the entries.
    """
    metadata = _read_metadata(tree)
    index = DcpIndex(tree)
    try:
        spans = _storage_spans(metadata["storage_data"])
        for key, entry in metadata["state_dict_metadata"].items():
            if key_filter(key):
                _add_entry(index, key, entry, spans)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _unreadable_error(tree.path / METADATA_FILE, error) from None
    _check_files(index)
    return index


# Maps pairs of (tensor's key in the index, the chunk's `offsets` in the tensor) to the chunk's
# storage entry: a mapping with the file name, byte offset and length. The second element of the
# pair is None for a pickled object.
StorageSpans = dict[tuple[str, tuple[int, ...] | None], Mapping[str, Any]]


def _storage_spans(storage: Mapping[Stub, Stub]) -> StorageSpans:
    return {
        (metadata_index.fields["fqn"], metadata_index.fields.get("offset")): span.fields
        for metadata_index, span in storage.items()
    }


def _add_entry(index: DcpIndex, key: str, entry: Stub, spans: StorageSpans) -> None:
    kind = entry.qualified_name.rpartition(".")[2]
    if kind == "BytesStorageMetadata":
        index.object_spans[key] = _chunk_span(index, key, spans.get((key, None)))
        return
    if kind != "TensorStorageMetadata":
        raise ValueError(f"{key} is a {kind}")
    properties = entry.fields["properties"]
    dtype = properties.state[0] if properties.state else properties.fields["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key} has dtype {dtype!r}")
    shape = _parse_sizes(entry.fields["size"])
    chunks = []
    for chunk in entry.fields["chunks"]:
        offsets, sizes = _parse_sizes(chunk.fields["offsets"]), _parse_sizes(chunk.fields["sizes"])
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"a chunk of {key} does not have the {len(shape)} dimensions of {key}")
        chunk_span = _chunk_span(index, key, spans.get((key, offsets)))
        chunks.append(Chunk(key, offsets, sizes, dtype, chunk_span))
    index.tensors[key] = ChunkedTensor(key, shape, dtype, tuple(chunks))


def _chunk_span(index: DcpIndex, key: str, span: Mapping[str, Any] | None) -> Span:
    if span is None:
        raise ValueError(f"a chunk of {key} has no file")
    name = span["relative_path"]
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
        raise ValueError(f"the file of {key} is {name!r}, outside the directory")
    if transforms := span.get("transform_descriptors"):
        raise CheckpointError(
            f"{index.folder}: {key} is stored with the transform {short_repr(transforms)}, which is"
            " not supported; save the checkpoint again without transforms such as compression"
        )
    offset, length = _parse_sizes((span["offset"], span["length"]))
    file_span = index.tree.spans.get(name)
    if file_span is None:
        index.missing_files.add(name)
        return Span(MappedFile(index.folder / name, 0), offset, length, index.folder / name)
    index.file_spans[name] = file_span
    return Span(file_span.file, file_span.offset + offset, length, file_span.path)


def _parse_sizes(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(
        type(n) is int and 0 <= n <= SIZE_MAX for n in values
    ):
        raise ValueError(f"expected sizes, found {short_repr(values)}")
    return tuple(values)


def _check_files(index: DcpIndex) -> None:
    if index.missing_files:
        count = len(index.missing_files | set(index.file_spans))
        raise CheckpointError(
            f"{index.folder} lacks {summarize_names(sorted(index.missing_files))} of the {count} "
            f"files that {METADATA_FILE} requires; copy the missing files from all nodes of the "
            "cluster: each node may have saved only its own files"
        )
    bytes_min = dict.fromkeys(index.file_spans, 0)
    spans = [chunk.span for entry in index.tensors.values() for chunk in entry.chunks]
    for span in [*spans, *index.object_spans.values()]:
        name = span.path.name
        end = span.offset + span.length - index.file_spans[name].offset
        bytes_min[name] = max(bytes_min[name], end)
    for name, file_span in index.file_spans.items():
        refuse_git_lfs_pointer(file_span.path, file_span.peek(8))
        if file_span.length < bytes_min[name]:
            raise CheckpointError(
                f"{file_span.path} is truncated: it has {file_span.length} bytes, but "
                f"{METADATA_FILE} requires {bytes_min[name]}; copy it again"
            )


class _MetadataUnpickler(StubUnpickler):
    """Unpickler of `.metadata`; objects of torch's DCP classes become stubs."""

    extra_names = DCP_CLASSES


def _read_metadata(tree: FileTree) -> Mapping[str, Any]:
    path = tree.path / METADATA_FILE
    span = tree.spans.get(METADATA_FILE)
    if span is None:
        raise CheckpointError(f"{path} does not exist; copy the checkpoint again")
    refuse_git_lfs_pointer(path, span.peek(8))
    try:
        metadata = _MetadataUnpickler(io.BytesIO(span.read(METADATA_BYTES_MAX))).load()
        fields: Mapping[str, Any] = metadata.fields
        return fields
    except (CheckpointError, OSError):
        raise
    # A broken or hostile pickle can raise any exception.
    except Exception as error:
        raise _unreadable_error(path, error, span.length) from None


def _unreadable_error(path: Path, error: Exception, size: int | None = None) -> CheckpointError:
    reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:160]
    subject = "it" if size is None else f"it has {size} bytes and"
    return CheckpointError(
        f"{path} is not a readable index ({reason}); {subject} is broken or hostile: "
        "copy it again from the training run"
    )
