"""The files of PyTorch's distributed checkpoints: an index, and chunks of tensors in large files.

The index, `.metadata`, is a pickle; every object in it becomes a stand-in that holds values and
does nothing, so no class of torch's or of a trainer's is needed or run. A chunk is a whole
`torch.save` archive somewhere in a file; its numbers are viewed where they lie, never copied.
It knows no models and no names.
"""

import io
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpt.errors import CheckpointError
from gpt.safetensors_file import MappedFile, refuse_pointer
from gpt.unpickle import GETATTR, HOLDERS, TRAINERS, Stub

INDEX = ".metadata"
# Its classes moved within torch over the years; none of them is ever run.
CLASSES = re.compile(
    r"torch\.distributed\.(checkpoint|_shard)\..+|torch\.serialization\._get_layout"
)
STORAGES: Mapping[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
}
LOCAL_HEADER = (
    30  # Bytes before a zip member's name and extra field, which have their lengths last.
)


@dataclass(frozen=True)
class Blob:
    """Some bytes of a file: one `torch.save` archive."""

    file: MappedFile
    offset: int
    length: int


@dataclass
class Chunk:
    """A box of a tensor, as one rank saved it."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    blob: Blob
    view: Tensor | None = None

    @property
    def where(self) -> str:
        return f"{self.blob.file.path}: {self.key}"

    def tensor(self) -> Tensor:
        """A view of the mapped file; read only."""
        if self.view is None:
            try:
                self.view = _view(self)
            except CheckpointError:
                raise
            # A broken archive or a hostile recipe fails in its own way.
            except Exception as error:
                raise self.broken(f"{type(error).__name__}: {error}"[:120]) from None
        return self.view

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

    folder: Path
    tensors: dict[str, Entry] = field(default_factory=dict)
    objects: dict[str, Blob] = field(default_factory=dict)
    files: dict[str, MappedFile] = field(default_factory=dict)


def read_index(folder: Path, wanted: Callable[[str], bool]) -> Index:
    """The index, each file that the wanted keys need being there and long enough."""
    record = _values(folder)
    index = Index(folder)
    try:
        spans = _spans(record["storage_data"])
        for key, entry in record["state_dict_metadata"].items():
            if wanted(key):
                _add(index, key, entry, spans)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _unreadable(folder / INDEX, error) from None
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


def _blob(index: Index, key: str, span: Mapping[str, Any] | None) -> Blob:
    if span is None:
        raise ValueError(f"no file is named for a chunk of {key}")
    name = span["relative_path"]
    file = index.files.get(name)
    if file is None:
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise ValueError(f"{key} is said to lie in {name!r}, outside the directory")
        file = index.files[name] = MappedFile(index.folder / name, 0)
    if span.get("transform_descriptors"):
        raise CheckpointError(
            f"{index.folder}: {key} is stored with {span['transform_descriptors']!r}, which is not "
            "read; save the checkpoint again without compression"
        )
    offset, length = _numbers((span["offset"], span["length"]))
    return Blob(file, offset, length)


def _numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(type(n) is int and n >= 0 for n in values):
        raise ValueError(f"{values!r} where sizes are needed")
    return tuple(values)


def _check_files(index: Index) -> None:
    missing = [name for name, file in sorted(index.files.items()) if not file.path.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{index.folder} lacks {', '.join(missing[:3])}{more} of the {len(index.files)} files "
            f"that {INDEX} names; copy the missing ones, each node of a cluster may have kept its "
            "own"
        )
    ends = dict.fromkeys((file.path.name for file in index.files.values()), 0)
    blobs = [chunk.blob for entry in index.tensors.values() for chunk in entry.chunks]
    for blob in [*blobs, *index.objects.values()]:
        name = blob.file.path.name
        ends[name] = max(ends[name], blob.offset + blob.length)
    for name, end in ends.items():
        path = index.folder / name
        with open(path, "rb") as file:
            refuse_pointer(path, file.read(8))
        size = path.stat().st_size
        if size < end:
            raise CheckpointError(
                f"{path} is truncated: it has {size} bytes, {INDEX} needs {end}; copy it again"
            )


class _Size(Stub):
    """`torch.Size`, and other tuples by name."""

    def __new__(cls, values: Any = ()) -> Any:
        return tuple(values)


class _Member(Stub):
    """What `getattr` is allowed to be. Some Pythons pickle an enum as getattr(Class, "NAME")."""

    def __new__(cls, *arguments: Any) -> Any:
        owner, name = arguments
        if not (isinstance(owner, type) and issubclass(owner, Stub) and isinstance(name, str)):
            raise pickle.UnpicklingError(f"it asks to run {GETATTR}")
        return owner(name)


class _Reader(pickle.Unpickler):
    """Every name is a stand-in, a dtype or a dict; what else is asked for is refused."""

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        if path == "torch.Size":
            return _Size
        if path == "collections.OrderedDict":
            return dict
        if path == GETATTR:
            return _Member
        if CLASSES.fullmatch(path) or TRAINERS.fullmatch(path) or HOLDERS.fullmatch(path):
            return _stand_in(path)
        raise pickle.UnpicklingError(f"it asks to run {path}, which is not data")


@cache
def _stand_in(path: str) -> type[Stub]:
    return type(path.rpartition(".")[2], (Stub,), {"path": path})


def _values(folder: Path) -> Mapping[str, Any]:
    path = folder / INDEX
    try:
        with open(path, "rb") as file:
            refuse_pointer(path, file.read(8))
            file.seek(0)
            record = _Reader(file).load()
        fields: Mapping[str, Any] = record.fields
        return fields
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; copy the checkpoint again") from None
    # Whatever stands in a broken or a hostile pickle, the loader meets it in its own ways.
    except Exception as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:160]
    return CheckpointError(
        f"{path} is not an index that can be read ({reason}); it has {path.stat().st_size} bytes "
        "and is broken or hostile: copy it again from where it was trained"
    )


class _Window(io.RawIOBase):
    """A blob as a file of its own."""

    def __init__(self, memory: memoryview) -> None:
        self.memory, self.place = memory, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.place = max(0, offset + (0, self.place, len(self.memory))[whence])
        return self.place

    def tell(self) -> int:
        return self.place

    def readinto(self, buffer: Any) -> int:
        found = self.memory[self.place : self.place + len(buffer)]
        buffer[: len(found)] = found
        self.place += len(found)
        return len(found)


@dataclass(frozen=True)
class _Storage:
    name: str
    dtype: torch.dtype
    count: int


class _Tensor(Stub):
    """`_rebuild_tensor_v2`: (storage, first element, size, stride, ...)."""


class _StorageKind(Stub):
    dtype: ClassVar[torch.dtype]


class _Recipe(pickle.Unpickler):
    """How an archive's one tensor lies in its one storage."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Tensor
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in STORAGES:
            return type(name, (_StorageKind,), {"dtype": STORAGES[name]})
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        _tag, kind, name, _device, count = pid
        return _Storage(f"data/{name}", kind.dtype, *_numbers((count,)))


def _view(chunk: Chunk) -> Tensor:
    blob = chunk.blob
    memory = blob.file.bytes().numpy().data
    window = memory[blob.offset : blob.offset + blob.length]
    with zipfile.ZipFile(_Window(window)) as archive:
        # All members lie in one folder, whose name is anyone's.
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
            raise chunk.broken("it is compressed")
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise chunk.broken("its bytes are in big-endian order")
        made = _Recipe(io.BytesIO(archive.read(members["data.pkl"]))).load()
    if not isinstance(made, _Tensor):
        raise chunk.broken("it is no plain tensor")
    storage, first, size, stride = made.arguments[:4]
    (first,), size, stride = _numbers((first,)), _numbers(size), _numbers(stride)
    if size != chunk.sizes or storage.dtype != chunk.dtype:
        raise chunk.broken(f"found {size} of {storage.dtype}, need {chunk.sizes} of {chunk.dtype}")
    member = members[storage.name]
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    fits = last < storage.count and storage.count * chunk.dtype.itemsize <= member.file_size
    if math.prod(size) == 0:
        return torch.empty(size, dtype=chunk.dtype)
    head = member.header_offset
    extra = [int.from_bytes(window[head + at : head + at + 2], "little") for at in (26, 28)]
    start = head + LOCAL_HEADER + sum(extra)
    if not fits or start + member.file_size > blob.length:
        raise chunk.broken("it lies beyond its own storage")
    # Archives follow each other unaligned; a buffer, unlike a tensor's view, may start anywhere.
    flat = torch.frombuffer(
        memory, dtype=chunk.dtype, count=storage.count, offset=blob.offset + start
    )
    return flat.as_strided(size, stride, first)
