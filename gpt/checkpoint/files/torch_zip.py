"""A `torch.save` archive as data: what it holds, its tensors viewed where their numbers lie.

The archive is a zip of stored members, anywhere in a file: a pickle, read with stand-ins alone, and
the storages that its tensors lie in. No storage is copied or even touched; a tensor is a view of
the mapped file. A claim that does not fit the archive is an error of any kind, for the caller to
put in a sentence. It knows no models.
"""

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpt.checkpoint.files.file_tree import Span
from gpt.checkpoint.files.restricted_unpickle import StandIns, Stub
from gpt.checkpoint.files.safetensors_file import refuse_pointer
from gpt.checkpoint.files.torch_save import ZIP
from gpt.errors import CheckpointError
from gpt.settings import shown

STORAGES: Mapping[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
# Bytes before a zip member's name and extra field, which have their lengths last.
LOCAL_HEADER = 30
PICKLE_BYTES_MAX = 256 << 20  # The largest model's names take a few megabytes.


def read_archive(span: Span) -> Any:
    """What the archive in a file holds, or one sentence that says why it cannot be read."""
    head = span.head(8)
    refuse_pointer(span.path, head)
    try:
        if not head.startswith(ZIP):
            raise ValueError("no archive of torch 1.6 or newer begins here")
        return view_archive(span)
    except OSError:
        raise
    # A broken archive or a hostile recipe fails in its own way.
    except Exception as error:
        if "asks to run" in str(error):
            raise CheckpointError(
                f"{span.path}: {error}; load it only where you trust its author, and save it again "
                "without that"
            ) from None
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:160]
        raise CheckpointError(
            f"{span.path} cannot be read ({reason}); it has {span.length} bytes and is truncated or"
            " broken: copy it again"
        ) from None


def view_archive(span: Span) -> Any:
    """The object that the archive holds; its dense tensors are views of the mapped file."""
    window = span.memory()
    if len(window) < span.length:
        raise ValueError("the file ends before the archive does")
    with zipfile.ZipFile(Window(window)) as archive:
        # All members lie in one folder, whose name is anyone's.
        members: dict[str, zipfile.ZipInfo] = {}
        for member in archive.infolist():
            name = member.filename.partition("/")[2]
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                raise ValueError(f"{member.filename} is compressed, which torch.save never does")
            if name in members:
                raise ValueError(f"it holds {member.filename} twice")
            members[name] = member
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise ValueError("its bytes are in big-endian order")
        if members["data.pkl"].file_size > PICKLE_BYTES_MAX:
            raise ValueError("its pickle is larger than that of any model")
        made = _Recipe(io.BytesIO(archive.read(members["data.pkl"]))).load()

    def place(storage: _Storage) -> int:
        member = members[storage.name]
        head = member.header_offset
        extra = [int.from_bytes(window[head + at : head + at + 2], "little") for at in (26, 28)]
        start = head + LOCAL_HEADER + sum(extra)
        whole = storage.count * storage.dtype.itemsize <= member.file_size
        if not whole or start + member.file_size > span.length:
            raise ValueError(f"{storage.name} lies beyond the archive")
        return start

    return _built(made, lambda tensor: _view(tensor, window, place), {})


def _view(made: "_Tensor", window: memoryview, place: Callable[["_Storage"], int]) -> Tensor:
    storage, first, size, stride = made.arguments[:4]
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor lies in no storage")
    (first,), size, stride = _numbers((first,)), _numbers(size), _numbers(stride)
    start = place(storage)
    if math.prod(size) == 0:
        return torch.empty(size, dtype=storage.dtype)
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if last >= storage.count:
        raise ValueError("a tensor lies beyond its own storage")
    # Archives follow each other unaligned; a buffer, unlike a tensor's view, may start anywhere.
    flat = torch.frombuffer(window, dtype=storage.dtype, count=storage.count, offset=start)
    return flat.as_strided(size, stride, first)


def _built(value: Any, view: Callable[["_Tensor"], Tensor], known: dict[int, Any]) -> Any:
    """The same with views for recipes of tensors. What is shared, or in a circle, is done once."""
    if isinstance(value, _Tensor):
        if id(value) not in known:
            known[id(value)] = view(value)
        return known[id(value)]
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = value
    if isinstance(value, tuple):
        known[id(value)] = tuple(_built(inner, view, known) for inner in value)
    elif isinstance(value, list):
        value[:] = [_built(inner, view, known) for inner in value]
    else:
        for key, inner in value.items():
            value[key] = _built(inner, view, known)
    return known[id(value)]


def _numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(type(n) is int and n >= 0 for n in values):
        raise ValueError(f"{shown(values)} where sizes are needed")
    return tuple(values)


class Window(io.RawIOBase):
    """A span as a file of its own."""

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


class _Parameter(Stub):
    """A tensor that was trained; here it is a tensor."""

    def __new__(cls, *arguments: Any) -> Any:
        return arguments[0]


class _StorageKind(Stub):
    dtype: ClassVar[torch.dtype]


class _Unread(Stub):
    """A tensor of a kind that has no plain numbers: sparse, quantized, of 8 bits."""


class _Recipe(StandIns):
    """How an archive's tensors lie in its storages."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return _Tensor
        if module == "torch._utils" and name == "_rebuild_parameter":
            return _Parameter
        if module in ("torch._utils", "torch._tensor") and name.startswith("_rebuild_"):
            return _Unread
        if module == "torch.serialization" and name == "_get_layout":
            return _Unread
        if module in ("torch", "torch.storage") and name in STORAGES:
            return type(name, (_StorageKind,), {"dtype": STORAGES[name]})
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> _Storage:
        _tag, kind, name, _device, count = pid
        if not (isinstance(kind, type) and issubclass(kind, _StorageKind)):
            raise pickle.UnpicklingError("a storage of no known kind")
        return _Storage(f"data/{name}", kind.dtype, *_numbers((count,)))
