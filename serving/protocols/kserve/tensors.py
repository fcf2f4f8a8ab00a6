"""KServe v2 tensors: converts raw bytes or typed contents to Python values, and values to bytes.

A request states a tensor's number of elements twice: by the shape, and by the raw bytes or typed
contents. Different numbers are an error. Each error names the tensor. The raw bytes are the same in
gRPC and HTTP. The meaning of each tensor is in `inputs` and `outputs`.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class TensorHeader(Protocol):
    """The part of a request's tensor without its values: a message of gRPC, or a JSON object."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def parameters(self) -> Mapping[str, Any] | None: ...


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
    check_headers(message.inputs)
    return {
        input_tensor.name: (
            _read_raw_contents(input_tensor, raw_contents[index])
            if raw_contents
            else _read_typed_contents(input_tensor)
        )
        for index, input_tensor in enumerate(message.inputs)
    }


def check_headers(headers: Iterable[TensorHeader]) -> None:
    """Raise an error if two tensors have one name, or a tensor is in shared memory."""
    names: set[str] = set()
    for header in headers:
        if header.name in names:
            raise RequestError(
                f"input {short_repr(header.name)} occurs twice; send it once", header.name
            )
        if SHARED_MEMORY in (header.parameters or ()):
            raise RefusedError(
                "UNSUPPORTED",
                f"input {short_repr(header.name)} is in shared memory, which is not supported; "
                "send its values in the request",
                header.name,
            )
        names.add(header.name)


def _read_raw_contents(input_tensor: Any, raw: bytes) -> InputTensor:
    if input_tensor.HasField("contents") and input_tensor.contents.ByteSize():
        raise RequestError(
            f"input {short_repr(input_tensor.name)} has contents, but the request has "
            "raw_input_contents too; send only one of them",
            input_tensor.name,
        )
    return read_raw(input_tensor, raw, "raw_input_contents")


def _read_typed_contents(input_tensor: Any) -> InputTensor:
    count = check_header(input_tensor)
    field = "bytes_contents"
    if input_tensor.datatype != BYTES:
        field = DATATYPES[input_tensor.datatype].contents_field or ""
    if not field:
        raise RequestError(
            f"input {short_repr(input_tensor.name)} has datatype {input_tensor.datatype}, which "
            "has no typed contents; send it in raw_input_contents",
            input_tensor.name,
        )
    for other, _ in input_tensor.contents.ListFields():
        if other.name != field:
            raise RequestError(
                f"input {short_repr(input_tensor.name)} has values in contents.{other.name}; send "
                f"values of {input_tensor.datatype} in contents.{field} only",
                input_tensor.name,
            )
    elements = getattr(input_tensor.contents, field)
    check_count(input_tensor, count, elements, f"contents.{field}")
    if input_tensor.datatype != BYTES:
        _check_range(input_tensor, elements)
    return build_tensor(input_tensor, elements)


def _check_range(header: TensorHeader, elements: Sequence[Any]) -> None:
    """Raise an error for typed values that are not of the datatype, such as 300 of INT8."""
    try:
        struct.pack(f"<{len(elements)}{DATATYPES[header.datatype].code}", *elements)
    except struct.error:
        raise RequestError(
            f"input {short_repr(header.name)} has a value out of the range of {header.datatype}; "
            "correct the value, or send it in a larger datatype",
            header.name,
        ) from None


def read_raw(header: TensorHeader, raw: bytes, location: str) -> InputTensor:
    """Return the tensor with the values in `raw`; `location` names the bytes in errors."""
    count = check_header(header)
    elements: Sequence[Any]
    if header.datatype == BYTES:
        elements = _split_elements(raw, count, header.name)
    else:
        elements = _unpack_raw(header, raw, count)
    check_count(header, count, elements, location)
    return build_tensor(header, elements)


def build_tensor(header: TensorHeader, elements: Sequence[Any]) -> InputTensor:
    return InputTensor(header.name, header.datatype, tuple(header.shape), tuple(elements))


def check_count(header: TensorHeader, count: int, elements: Sequence[Any], location: str) -> None:
    """Raise an error if the number of elements is not `count`, the number of the shape.

    `location` names the place of the elements in errors.
    """
    if len(elements) != count:
        raise RequestError(
            f"input {short_repr(header.name)} has shape {list(header.shape)}, which is {count} "
            f"elements, but {location} has {len(elements)}; make the two numbers equal",
            header.name,
        )


def check_header(header: TensorHeader) -> int:
    """Check datatype and shape of a tensor; return its number of elements by its shape."""
    name = short_repr(header.name)
    if header.datatype != BYTES and header.datatype not in DATATYPES:
        suggestion = suggest_nearest(header.datatype, (*DATATYPES, BYTES))
        raise RequestError(
            f"input {name} has unknown datatype {short_repr(header.datatype)}; {suggestion}",
            header.name,
        )
    if len(header.shape) > DIMS_MAX:
        raise RequestError(
            f"input {name} has {len(header.shape)} dimensions; at most {DIMS_MAX} are allowed",
            header.name,
        )
    if any(dim < 0 for dim in header.shape):
        raise RequestError(
            f"input {name} has shape {list(header.shape)}; each dimension must be 0 or more",
            header.name,
        )
    count = int(math.prod(header.shape))
    if count > ELEMENTS_MAX:
        raise RequestError(
            f"input {name} has shape {list(header.shape)}, which is {count} elements; at most "
            f"{ELEMENTS_MAX} are allowed",
            header.name,
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


def _unpack_raw(header: TensorHeader, raw: bytes, count: int) -> Sequence[Any]:
    element_type = DATATYPES[header.datatype]
    if len(raw) != count * element_type.size:
        raise RequestError(
            f"input {short_repr(header.name)} has {len(raw)} bytes; {count} elements of "
            f"{header.datatype} (shape {list(header.shape)}) need {count * element_type.size}",
            header.name,
        )
    return struct.unpack(f"<{count}{element_type.code}", raw)


@dataclass(frozen=True)
class OutputTensor:
    """An output tensor. The first axis of its shape is the completion."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: tuple[Any, ...]  # In row-major order; texts are strings.

    @classmethod
    def from_values(cls, name: str, datatype: str, values: Sequence[Any]) -> "OutputTensor":
        """Build a 1-D output with a value for each completion."""
        return cls(name, datatype, (len(values),), tuple(values))

    @classmethod
    def from_rows(cls, name: str, datatype: str, rows: Sequence[Sequence[Any]]) -> "OutputTensor":
        """Build a 2-D output with a row for each completion.

        Shorter rows are padded to the length of the longest row: INT32 with -1, other types with 0.
        """
        width = max(map(len, rows), default=0)
        filler = -1 if datatype == "INT32" else 0
        values = [value for row in rows for value in (*row, *[filler] * (width - len(row)))]
        return cls(name, datatype, (len(rows), width), tuple(values))

    def to_raw(self) -> bytes:
        """Return the raw bytes of the values."""
        if self.datatype == BYTES:
            texts = [value.encode() for value in self.values]
            return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        code = DATATYPES[self.datatype].code
        return struct.pack(f"<{len(self.values)}{code}", *self.values)


def write_tensors(response: Any, tensors: Iterable[OutputTensor]) -> None:
    """Add outputs with raw contents to a response message."""
    for tensor in tensors:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(tensor.to_raw())
