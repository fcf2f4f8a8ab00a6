"""KServe v2 tensors: converts raw bytes or typed contents to Python values, and values to bytes.

A request states a tensor's number of elements twice: by the shape, and by the raw bytes or typed
contents. Different numbers are an error. Each error names the tensor. The meaning of each tensor is
in `inputs` and `outputs`.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpt.errors import RequestError
from gpt.settings import short_repr, suggest_nearest
from serving.request import RefusedError

DIMS_MAX = 8
# Maximum number of elements of a tensor. The limit of the message's size is not enough: an element
# can be 1 byte in the message, but becomes a Python object, which is far larger.
ELEMENTS_MAX = 1 << 20
# Triton's parameter for tensors in shared memory, which this server does not support.
SHARED_MEMORY = "shared_memory_region"


@dataclass(frozen=True)
class Datatype:
    """Encoding of an element: its `struct` code, and its field in the message's typed contents."""

    code: str
    contents_field: str | None  # None: the datatype exists only as raw bytes.

    @property
    def size(self) -> int:
        return struct.calcsize(f"<{self.code}")


BYTES = "BYTES"
DATATYPES: Mapping[str, Datatype] = {
    "BOOL": Datatype("?", "bool_contents"),
    "INT8": Datatype("b", "int_contents"),
    "INT16": Datatype("h", "int_contents"),
    "INT32": Datatype("i", "int_contents"),
    "INT64": Datatype("q", "int64_contents"),
    "UINT8": Datatype("B", "uint_contents"),
    "UINT16": Datatype("H", "uint_contents"),
    "UINT32": Datatype("I", "uint_contents"),
    "UINT64": Datatype("Q", "uint64_contents"),
    "FP16": Datatype("e", None),
    "FP32": Datatype("f", "fp32_contents"),
    "FP64": Datatype("d", "fp64_contents"),
}


@dataclass(frozen=True)
class InputTensor:
    """An input tensor. All values have one type: bool, int, float or bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: tuple[Any, ...]


def read_tensors(message: Any) -> dict[str, InputTensor]:
    """Return the input tensors of a request, by name."""
    raw_contents = message.raw_input_contents
    if raw_contents and len(raw_contents) != len(message.inputs):
        raise RequestError(
            f"raw_input_contents has {len(raw_contents)} entries and inputs has "
            f"{len(message.inputs)}; send one entry for each input, in the same order, or none",
            "raw_input_contents",
        )
    tensors: dict[str, InputTensor] = {}
    for index, input_tensor in enumerate(message.inputs):
        if input_tensor.name in tensors:
            raise RequestError(
                f"input {short_repr(input_tensor.name)} occurs twice; send it once",
                input_tensor.name,
            )
        if SHARED_MEMORY in input_tensor.parameters:
            raise RefusedError(
                "UNSUPPORTED",
                f"input {short_repr(input_tensor.name)} is in shared memory, which is not "
                "supported; send its values in the request",
                input_tensor.name,
            )
        tensors[input_tensor.name] = _read_tensor(
            input_tensor, raw_contents[index] if raw_contents else None
        )
    return tensors


def _read_tensor(input_tensor: Any, raw: bytes | None) -> InputTensor:
    name = short_repr(input_tensor.name)
    count = _element_count(input_tensor, name)
    if raw is not None and input_tensor.HasField("contents") and input_tensor.contents.ByteSize():
        raise RequestError(
            f"input {name} has contents, but the request has raw_input_contents too; send only one "
            "of them",
            input_tensor.name,
        )
    if input_tensor.datatype == BYTES:
        elements: Sequence[Any]
        elements = (
            input_tensor.contents.bytes_contents
            if raw is None
            else _split_elements(raw, count, input_tensor.name)
        )
    elif input_tensor.datatype in DATATYPES:
        elements = (
            _typed_contents(input_tensor, name)
            if raw is None
            else _unpack_raw(input_tensor, raw, count, name)
        )
    else:
        suggestion = suggest_nearest(input_tensor.datatype, (*DATATYPES, BYTES))
        raise RequestError(
            f"input {name} has unknown datatype {short_repr(input_tensor.datatype)}; {suggestion}",
            input_tensor.name,
        )
    if len(elements) != count:
        location = (
            "raw_input_contents"
            if raw is not None
            else f"contents.{_contents_field(input_tensor.datatype)}"
        )
        raise RequestError(
            f"input {name} has shape {list(input_tensor.shape)}, which is {count} elements, but "
            f"{location} has {len(elements)}; make the two numbers equal",
            input_tensor.name,
        )
    return InputTensor(
        input_tensor.name, input_tensor.datatype, tuple(input_tensor.shape), tuple(elements)
    )


def _contents_field(datatype: str) -> str | None:
    """Return the field of the typed contents for a datatype; None if there is no such field."""
    return "bytes_contents" if datatype == BYTES else DATATYPES[datatype].contents_field


def _element_count(input_tensor: Any, name: str) -> int:
    """Return the number of elements according to the shape."""
    if len(input_tensor.shape) > DIMS_MAX:
        raise RequestError(
            f"input {name} has {len(input_tensor.shape)} dimensions; at most {DIMS_MAX} are "
            "allowed",
            input_tensor.name,
        )
    if any(dim < 0 for dim in input_tensor.shape):
        raise RequestError(
            f"input {name} has shape {list(input_tensor.shape)}; each dimension must be 0 or more",
            input_tensor.name,
        )
    count = int(math.prod(input_tensor.shape))
    if count > ELEMENTS_MAX:
        raise RequestError(
            f"input {name} has shape {list(input_tensor.shape)}, which is {count} elements; at "
            f"most {ELEMENTS_MAX} are allowed",
            input_tensor.name,
        )
    return count


def _split_elements(raw: bytes, count: int, name: str) -> list[bytes]:
    """Split raw BYTES: each element is a 4-byte little-endian length, followed by its data."""
    elements: list[bytes] = []
    offset = 0
    while offset < len(raw):
        if len(elements) == count:
            break
        if offset + 4 > len(raw):
            raise RequestError(
                f"input {short_repr(name)} ends after {len(raw) - offset} bytes of an element's "
                "length; a length is 4 bytes",
                name,
            )
        size = int.from_bytes(raw[offset : offset + 4], "little")
        offset += 4
        if size > len(raw) - offset:
            raise RequestError(
                f"input {short_repr(name)} has an element of length {size} bytes, but only "
                f"{len(raw) - offset} bytes remain; write each element as its length (4 bytes, "
                "little-endian) followed by its data",
                name,
            )
        elements.append(raw[offset : offset + size])
        offset += size
    if offset < len(raw):
        raise RequestError(
            f"input {short_repr(name)} has {len(raw) - offset} bytes after its {count} elements; "
            "remove them, or enlarge the shape",
            name,
        )
    return elements


def _unpack_raw(input_tensor: Any, raw: bytes, count: int, name: str) -> Sequence[Any]:
    element_type = DATATYPES[input_tensor.datatype]
    if len(raw) != count * element_type.size:
        raise RequestError(
            f"input {name} has {len(raw)} bytes; {count} elements of {input_tensor.datatype} "
            f"(shape {list(input_tensor.shape)}) need {count * element_type.size}",
            input_tensor.name,
        )
    return struct.unpack(f"<{count}{element_type.code}", raw)


def _typed_contents(input_tensor: Any, name: str) -> Sequence[Any]:
    element_type = DATATYPES[input_tensor.datatype]
    if element_type.contents_field is None:
        raise RequestError(
            f"input {name} has datatype {input_tensor.datatype}, which has no typed contents; send "
            "it in raw_input_contents",
            input_tensor.name,
        )
    return tuple(getattr(input_tensor.contents, element_type.contents_field))


def write_tensor(response: Any, name: str, datatype: str, rows: Sequence[Sequence[Any]]) -> None:
    """Add a raw 2-D output with a row for each completion.

    Shorter rows are padded to the length of the longest row: INT32 with -1, other types with 0.
    """
    width = max(map(len, rows), default=0)
    output = response.outputs.add(name=name, datatype=datatype)
    output.shape.extend((len(rows), width))
    filler = -1 if datatype == "INT32" else 0
    values = [value for row in rows for value in (*row, *[filler] * (width - len(row)))]
    response.raw_output_contents.append(_pack(datatype, values))


def write_values(response: Any, name: str, datatype: str, values: Sequence[Any]) -> None:
    """Add a raw 1-D output."""
    response.outputs.add(name=name, datatype=datatype).shape.append(len(values))
    response.raw_output_contents.append(_pack(datatype, values))


def _pack(datatype: str, values: Iterable[Any]) -> bytes:
    if datatype == BYTES:
        texts = [value.encode() for value in values]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    values = tuple(values)
    return struct.pack(f"<{len(values)}{DATATYPES[datatype].code}", *values)
