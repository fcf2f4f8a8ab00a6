"""Unpickler of `torch.save` files: tensors become views of the mapped file, the rest inert stubs.

A `torch.save` file has a pickle and the bytes of storages, which are the memory of tensors. The
pickle describes each tensor as a part of a storage. `TensorUnpickler` reads the pickle;
`build_tensors` replaces the descriptions by views, so no storage is copied. Where the storages are
in the file depends on the file's format: `torch_zip`, `torch_legacy`. Both functions may raise any
exception for a broken pickle.
"""

import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpt.checkpoint.files.restricted_unpickle import Stub, StubUnpickler
from gpt.checkpoint.files.safetensors_file import SIZE_MAX
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
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,
    # Quantized tensors are not supported, but a file may contain some beside the weights.
    "QUInt8Storage": torch.uint8,
    "QInt8Storage": torch.int8,
    "QInt32Storage": torch.int32,
    "QUInt4x2Storage": torch.uint8,
    "QUInt2x4Storage": torch.uint8,
}
PICKLE_BYTES_MAX = 256 << 20  # The pickle of the largest model has a few megabytes.


class PickleReader:
    """Reads consecutive pickles from memory; `position` is the offset of the next byte.

    It never allocates a length that a pickle states but the memory does not have, which the
    buffered readers of `io` would do.
    """

    def __init__(self, memory: memoryview) -> None:
        self.position = 0
        self._memory = memory[:PICKLE_BYTES_MAX]

    def read(self, length: int) -> bytes:
        content = bytes(self._memory[self.position : self.position + length])
        self.position += len(content)
        return content

    def readline(self) -> bytes:
        # A line of a pickle has a name or a number. Longer lines are truncated, which is an error.
        line, separator, _ = bytes(self._memory[self.position :][:1000]).partition(b"\n")
        self.position += len(line) + len(separator)
        return line + separator


@dataclass(frozen=True)
class Storage:
    """A storage that a pickle refers to."""

    key: str
    dtype: torch.dtype
    element_count: int


class TensorUnpickler(StubUnpickler):
    """Unpickler that collects the storages; a tensor becomes a `_RebuildTensor`."""

    def __init__(self, reader: PickleReader) -> None:
        super().__init__(reader)
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in TENSOR_CLASSES:
            return TENSOR_CLASSES[name]
        if module in ("torch._utils", "torch._tensor") and name.startswith("_rebuild_"):
            return _UnsupportedTensor
        if module == "torch.serialization" and name == "_get_layout":
            return _UnsupportedTensor
        if module in ("torch", "torch.storage") and name in STORAGE_DTYPES:
            return type(name, (_StorageType,), {"dtype": STORAGE_DTYPES[name]})
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """Return the object of a persistent id, which is a storage or the class of a module.

        The id of a storage is (tag, class, key, device, element count); a file of torch < 1.6 has
        a sixth entry, which is None unless the storage is a part of another one.
        """
        tag, storage_type, key, _device, element_count, *view = pid
        if tag != "storage" or view not in ([], [None]):
            raise pickle.UnpicklingError("a persistent id has an unsupported form")
        if not (isinstance(storage_type, type) and issubclass(storage_type, _StorageType)):
            raise pickle.UnpicklingError("a storage has an unsupported type")
        if not isinstance(key, str):
            raise pickle.UnpicklingError("the key of a storage is not a text")
        storage = Storage(key, storage_type.dtype, *_parse_sizes((element_count,)))
        if self.storages.setdefault(key, storage) != storage:
            raise pickle.UnpicklingError("a storage has two types")
        return storage


def build_tensors(
    unpickled_object: Any, memory: memoryview, storage_offset: Callable[[Storage], int]
) -> Any:
    """Replace the descriptions of tensors in nested containers by views of `memory`.

    `storage_offset` returns the offset of a storage's first byte, and checks that the whole storage
    is in `memory`.
    """

    def view(rebuild: _RebuildTensor) -> Tensor:
        return _view_tensor(rebuild, memory, storage_offset)

    return _replace_tensors(unpickled_object, view, {})


def _view_tensor(
    rebuild: "_RebuildTensor", memory: memoryview, storage_offset: Callable[[Storage], int]
) -> Tensor:
    storage = rebuild.arguments[0]
    if not isinstance(storage, Storage):
        raise ValueError("a tensor has no storage")
    (first_element,) = _parse_sizes((rebuild.arguments[1],))
    size = _parse_sizes(rebuild.arguments[2])
    stride = _parse_sizes(rebuild.arguments[3])
    dtype = rebuild.dtype(storage)
    element_count = storage.element_count * storage.dtype.itemsize // dtype.itemsize
    start = storage_offset(storage)
    if math.prod(size) == 0:
        return torch.empty(size, dtype=dtype)
    last_element = first_element + sum(
        (n - 1) * dim_stride for n, dim_stride in zip(size, stride, strict=True)
    )
    if last_element >= element_count:
        raise ValueError("a tensor exceeds its storage")
    # An archive in a larger file may be unaligned. frombuffer accepts any offset, but view(dtype)
    # needs a multiple of the element size.
    flat = torch.frombuffer(memory, dtype=dtype, count=element_count, offset=start)
    return flat.as_strided(size, stride, first_element)


def _replace_tensors(
    node: Any, view: Callable[["_RebuildTensor"], Tensor], memo: dict[int, Any]
) -> Any:
    """Replace each `_RebuildTensor` in nested containers by a view; return the new `node`.

    The fields of stubs are containers too; their arguments and states are not searched.

    `memo` maps the ids of visited objects to their replacements, so that an object with several
    references is replaced once, and the recursion ends for cyclic references.
    """
    if isinstance(node, _RebuildTensor):
        if id(node) not in memo:
            memo[id(node)] = view(node)
        return memo[id(node)]
    if not isinstance(node, dict | list | tuple | Stub):
        return node
    if id(node) in memo:
        return memo[id(node)]
    memo[id(node)] = node
    if isinstance(node, Stub):
        _replace_tensors(node.fields, view, memo)
        return node
    if isinstance(node, tuple):
        memo[id(node)] = tuple(_replace_tensors(child, view, memo) for child in node)
    elif isinstance(node, list):
        node[:] = [_replace_tensors(child, view, memo) for child in node]
    else:
        for key, child in node.items():
            node[key] = _replace_tensors(child, view, memo)
    return memo[id(node)]


def _parse_sizes(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(
        type(n) is int and 0 <= n <= SIZE_MAX for n in values
    ):
        raise ValueError(f"expected sizes, found {short_repr(values)}")
    return tuple(values)


class _StorageType(Stub):
    """Stub of a storage class, such as `torch.FloatStorage`."""

    dtype: ClassVar[torch.dtype]


class _UnsupportedTensor(Stub):
    """Stub of a tensor that is not supported: sparse, quantized or a tensor subclass."""


class _RebuildTensor(Stub):
    """Stub of `_rebuild_tensor_v2`; arguments: (storage, offset in elements, size, stride, ...)."""

    def dtype(self, storage: Storage) -> torch.dtype:
        return storage.dtype


class _RebuildTensorV3(_RebuildTensor):
    """Stub of `_rebuild_tensor_v3`: the storage has bytes, and argument 6 is the tensor's dtype."""

    def dtype(self, storage: Storage) -> torch.dtype:
        dtype = self.arguments[6]
        if not isinstance(dtype, torch.dtype):
            raise ValueError("a tensor has no dtype")
        return dtype


class _RebuildParameter(Stub):
    """Stub of `_rebuild_parameter`; the unpickled object is the parameter's tensor."""

    def __new__(cls, *arguments: Any, **_: Any) -> Any:
        return arguments[0]


TENSOR_CLASSES: Mapping[str, type[Stub]] = {
    "_rebuild_tensor": _RebuildTensor,
    "_rebuild_tensor_v2": _RebuildTensor,
    "_rebuild_tensor_v3": _RebuildTensorV3,
    "_rebuild_parameter": _RebuildParameter,
    "_rebuild_parameter_with_state": _RebuildParameter,
}
