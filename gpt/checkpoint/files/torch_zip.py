"""`torch.save` zip archives as data: tensors viewed in the mapped file, pickles read as stubs.

The archive is a zip file, or a byte range of a larger file. One member is a pickle, whose foreign
classes are read as inert stubs; the other members are the storages of the tensors. No member is
compressed. A tensor is a view of the mapped file, so no storage is copied. `view_archive` may raise
any exception for a broken archive; `read_archive` converts the exception to a `CheckpointError`.
The module is independent of the model.
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
from gpt.checkpoint.files.restricted_unpickle import Stub, StubUnpickler
from gpt.checkpoint.files.safetensors_file import refuse_git_lfs_pointer
from gpt.checkpoint.files.torch_save import ZIP_MAGIC
from gpt.errors import CheckpointError
from gpt.settings import short_repr

STORAGE_DTYPES: Mapping[str, torch.dtype] = {
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
# Size of a zip member's local header, without the name and the extra field that follow it.
LOCAL_HEADER_BYTES = 30
# The local header states the length of the name at byte 26 and the length of the extra field at
# byte 28, each as a two-byte integer.
LENGTH_OFFSETS = (26, 28)
PICKLE_BYTES_MAX = 256 << 20  # The pickle of the largest model has a few megabytes.


def read_archive(span: Span) -> Any:
    """Load the object of an archive; raise a CheckpointError if the archive is unreadable."""
    magic = span.peek(8)
    refuse_git_lfs_pointer(span.path, magic)
    try:
        if not magic.startswith(ZIP_MAGIC):
            raise ValueError("it does not begin like an archive of torch 1.6 or newer")
        return view_archive(span)
    except OSError:
        raise
    # A broken or hostile archive can raise any exception.
    except Exception as error:
        if "asks to run" in str(error):
            raise CheckpointError(
                f"{span.path}: {error}; if you trust the author of the file, load it with torch "
                "and save it again without that object"
            ) from None
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:160]
        raise CheckpointError(
            f"{span.path} cannot be read ({reason}); it has {span.length} bytes and is truncated or"
            " broken: copy it again"
        ) from None


def view_archive(span: Span) -> Any:
    """Load the object of an archive; its tensors are views of the mapped file."""
    memory = span.memory()
    if len(memory) < span.length:
        raise ValueError("the file ends before the archive does")
    with zipfile.ZipFile(MemoryFile(memory)) as archive:
        # All members are in one folder, whose name varies.
        members: dict[str, zipfile.ZipInfo] = {}
        for member in archive.infolist():
            name = member.filename.partition("/")[2]
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                raise ValueError(f"{member.filename} is compressed; torch.save does not compress")
            if name in members:
                raise ValueError(f"it contains {member.filename} twice")
            members[name] = member
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise ValueError("its bytes are in big-endian order")
        if members["data.pkl"].file_size > PICKLE_BYTES_MAX:
            raise ValueError(f"its pickle has more than {PICKLE_BYTES_MAX} bytes")
        unpickled_object = _ArchiveUnpickler(io.BytesIO(archive.read(members["data.pkl"]))).load()

    def storage_offset(storage: _Storage) -> int:
        member = members[storage.name]
        header = member.header_offset
        lengths = [
            int.from_bytes(memory[header + field_offset : header + field_offset + 2], "little")
            for field_offset in LENGTH_OFFSETS
        ]
        start = header + LOCAL_HEADER_BYTES + sum(lengths)
        is_in_member = storage.element_count * storage.dtype.itemsize <= member.file_size
        if not is_in_member or start + member.file_size > span.length:
            raise ValueError(f"{storage.name} is outside the archive")
        return start

    return _build_tensors(
        unpickled_object, lambda tensor: _view_tensor(tensor, memory, storage_offset), {}
    )


def _view_tensor(
    rebuild: "_RebuildTensor", memory: memoryview, storage_offset: Callable[["_Storage"], int]
) -> Tensor:
    storage = rebuild.arguments[0]
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor has no storage")
    (first_element,) = _parse_sizes((rebuild.arguments[1],))
    size = _parse_sizes(rebuild.arguments[2])
    stride = _parse_sizes(rebuild.arguments[3])
    start = storage_offset(storage)
    if math.prod(size) == 0:
        return torch.empty(size, dtype=storage.dtype)
    last_element = first_element + sum(
        (n - 1) * dim_stride for n, dim_stride in zip(size, stride, strict=True)
    )
    if last_element >= storage.element_count:
        raise ValueError("a tensor exceeds its storage")
    # An archive in a larger file may be unaligned. frombuffer accepts any offset, but view(dtype)
    # needs a multiple of the element size.
    flat = torch.frombuffer(memory, dtype=storage.dtype, count=storage.element_count, offset=start)
    return flat.as_strided(size, stride, first_element)


def _build_tensors(
    node: Any, view: Callable[["_RebuildTensor"], Tensor], memo: dict[int, Any]
) -> Any:
    """Replace each `_RebuildTensor` in nested containers by a view; return the new `node`.

    `memo` maps the ids of visited objects to their replacements, so that an object with several
    references is replaced once, and the recursion ends for cyclic references.
    """
    if isinstance(node, _RebuildTensor):
        if id(node) not in memo:
            memo[id(node)] = view(node)
        return memo[id(node)]
    if not isinstance(node, dict | list | tuple):
        return node
    if id(node) in memo:
        return memo[id(node)]
    memo[id(node)] = node
    if isinstance(node, tuple):
        memo[id(node)] = tuple(_build_tensors(child, view, memo) for child in node)
    elif isinstance(node, list):
        node[:] = [_build_tensors(child, view, memo) for child in node]
    else:
        for key, child in node.items():
            node[key] = _build_tensors(child, view, memo)
    return memo[id(node)]


def _parse_sizes(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(type(n) is int and n >= 0 for n in values):
        raise ValueError(f"expected sizes, found {short_repr(values)}")
    return tuple(values)


class MemoryFile(io.RawIOBase):
    """A memory buffer as a read-only file object."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = max(0, offset + (0, self.position, len(self.memory))[whence])
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        block = self.memory[self.position : self.position + len(buffer)]
        buffer[: len(block)] = block
        self.position += len(block)
        return len(block)


@dataclass(frozen=True)
class _Storage:
    name: str  # The member's name, without the folder of the archive.
    dtype: torch.dtype
    element_count: int


class _RebuildTensor(Stub):
    """Stub of `_rebuild_tensor_v2`; arguments: (storage, offset in elements, size, stride, ...)."""


class _RebuildParameter(Stub):
    """Stub of `_rebuild_parameter`; the unpickled object is the parameter's tensor."""

    def __new__(cls, *arguments: Any) -> Any:
        return arguments[0]


class _StorageType(Stub):
    """Stub of a storage class, such as `torch.FloatStorage`."""

    dtype: ClassVar[torch.dtype]


class _UnsupportedTensor(Stub):
    """Stub of a tensor that is not supported: sparse, quantized or a tensor subclass."""


class _ArchiveUnpickler(StubUnpickler):
    """Unpickler of an archive: tensors become `_RebuildTensor`, storages become `_Storage`."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return _RebuildTensor
        if module == "torch._utils" and name == "_rebuild_parameter":
            return _RebuildParameter
        if module in ("torch._utils", "torch._tensor") and name.startswith("_rebuild_"):
            return _UnsupportedTensor
        if module == "torch.serialization" and name == "_get_layout":
            return _UnsupportedTensor
        if module in ("torch", "torch.storage") and name in STORAGE_DTYPES:
            return type(name, (_StorageType,), {"dtype": STORAGE_DTYPES[name]})
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> _Storage:
        _tag, storage_type, name, _device, element_count = pid
        if not (isinstance(storage_type, type) and issubclass(storage_type, _StorageType)):
            raise pickle.UnpicklingError("a storage has an unsupported type")
        return _Storage(f"data/{name}", storage_type.dtype, *_parse_sizes((element_count,)))
