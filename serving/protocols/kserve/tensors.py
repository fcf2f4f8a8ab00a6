"""Tensors of KServe's v2 protocol: from bytes or typed contents to Python values, and back.

A client says how many elements there are in two or three ways (shape, bytes, contents); each is
held against the others before anything is made of it, and every fault names its tensor. Knows the
messages by their fields alone, and nothing of what a tensor's name means.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpt.errors import RequestError
from gpt.settings import nearest, shown
from serving.request import RefusedError

DIMS_MAX = 8
ELEMENTS_MAX = 1 << 20  # Of one tensor; a small datatype's bytes become objects, each far larger.
# What a client may put anywhere in its own memory; here there is no way to reach that.
SHARED_MEMORY = "shared_memory_region"


@dataclass(frozen=True)
class Datatype:
    """How an element is written: by struct, and in which typed contents."""

    code: str
    contents: str | None  # None: raw bytes are the only way.

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
class Tensor:
    """An input. Its values are bool, int or float, all of one kind, or bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: tuple[Any, ...]


def read_tensors(message: Any) -> dict[str, Tensor]:
    """The inputs of a request by their names."""
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise RequestError(
            f"raw_input_contents has {len(raw)} and inputs has {len(message.inputs)}; send one for "
            "each input, in their order, or none",
            "raw_input_contents",
        )
    tensors: dict[str, Tensor] = {}
    for place, one in enumerate(message.inputs):
        if one.name in tensors:
            raise RequestError(f"input {shown(one.name)} is there twice; send it once", one.name)
        if SHARED_MEMORY in one.parameters:
            raise RefusedError(
                "UNSUPPORTED",
                f"input {shown(one.name)} lies in shared memory, which is not served here; send "
                "its values",
                one.name,
            )
        tensors[one.name] = _read(one, raw[place] if raw else None)
    return tensors


def _read(one: Any, raw: bytes | None) -> Tensor:
    name = shown(one.name)
    count = _count(one, name)
    if raw is not None and one.HasField("contents") and one.contents.ByteSize():
        raise RequestError(
            f"input {name} has contents, and the request has raw_input_contents; send one of them",
            one.name,
        )
    if one.datatype == BYTES:
        found: Sequence[Any]
        found = one.contents.bytes_contents if raw is None else _elements(raw, count, one.name)
    elif one.datatype in DATATYPES:
        found = _contents(one, name) if raw is None else _numbers(one, raw, count, name)
    else:
        known = nearest(one.datatype, (*DATATYPES, BYTES))
        raise RequestError(
            f"input {name} has datatype {shown(one.datatype)}, which is not one; {known}", one.name
        )
    if len(found) != count:
        where = "raw_input_contents" if raw is not None else f"contents.{_field(one.datatype)}"
        raise RequestError(
            f"input {name} has shape {list(one.shape)}, which is {count} elements, and "
            f"{len(found)} of them in {where}; make them the same",
            one.name,
        )
    return Tensor(one.name, one.datatype, tuple(one.shape), tuple(found))


def _field(datatype: str) -> str | None:
    """Where typed contents have elements of a datatype."""
    return "bytes_contents" if datatype == BYTES else DATATYPES[datatype].contents


def _count(one: Any, name: str) -> int:
    """How many elements the shape says."""
    if len(one.shape) > DIMS_MAX:
        raise RequestError(
            f"input {name} has {len(one.shape)} dimensions; at most {DIMS_MAX} may be", one.name
        )
    if any(dim < 0 for dim in one.shape):
        raise RequestError(
            f"input {name} has shape {list(one.shape)}; each dimension must be 0 or more", one.name
        )
    count = int(math.prod(one.shape))
    if count > ELEMENTS_MAX:
        raise RequestError(
            f"input {name} has shape {list(one.shape)}, which is {count} elements; at most "
            f"{ELEMENTS_MAX} may be",
            one.name,
        )
    return count


def _elements(raw: bytes, count: int, name: str) -> list[bytes]:
    """Each element is its length in 4 bytes, little-endian, and then itself."""
    found: list[bytes] = []
    at = 0
    while at < len(raw):
        if len(found) == count:
            break
        if at + 4 > len(raw):
            raise RequestError(
                f"input {shown(name)} ends after {len(raw) - at} bytes of an element's length, "
                "which is 4 bytes",
                name,
            )
        size = int.from_bytes(raw[at : at + 4], "little")
        at += 4
        if size > len(raw) - at:
            raise RequestError(
                f"input {shown(name)} has an element that says to be {size} bytes, and "
                f"{len(raw) - at} are left; each is its length (4 bytes, little-endian) and then "
                "itself",
                name,
            )
        found.append(raw[at : at + size])
        at += size
    if at < len(raw):
        raise RequestError(
            f"input {shown(name)} has {len(raw) - at} bytes after its {count} elements; leave them "
            "out, or make the shape larger",
            name,
        )
    return found


def _numbers(one: Any, raw: bytes, count: int, name: str) -> Sequence[Any]:
    kind = DATATYPES[one.datatype]
    if len(raw) != count * kind.size:
        raise RequestError(
            f"input {name} has {len(raw)} bytes; {count} elements of {one.datatype} (shape "
            f"{list(one.shape)}) are {count * kind.size}",
            one.name,
        )
    return struct.unpack(f"<{count}{kind.code}", raw)


def _contents(one: Any, name: str) -> Sequence[Any]:
    kind = DATATYPES[one.datatype]
    if kind.contents is None:
        raise RequestError(
            f"input {name} is {one.datatype}, which typed contents cannot hold; send it raw",
            one.name,
        )
    return tuple(getattr(one.contents, kind.contents))


def write_tensor(response: Any, name: str, datatype: str, rows: Sequence[Sequence[Any]]) -> None:
    """Add an output, raw: a row for each answer; ragged ones are filled up to the longest."""
    width = max(map(len, rows), default=0)
    output = response.outputs.add(name=name, datatype=datatype)
    output.shape.extend((len(rows), width))
    filler = -1 if datatype == "INT32" else 0
    values = [value for row in rows for value in (*row, *[filler] * (width - len(row)))]
    response.raw_output_contents.append(_bytes(datatype, values))


def write_values(response: Any, name: str, datatype: str, values: Sequence[Any]) -> None:
    """Add an output of one dimension, raw."""
    response.outputs.add(name=name, datatype=datatype).shape.append(len(values))
    response.raw_output_contents.append(_bytes(datatype, values))


def _bytes(datatype: str, values: Iterable[Any]) -> bytes:
    if datatype == BYTES:
        texts = [value.encode() for value in values]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    values = tuple(values)
    return struct.pack(f"<{len(values)}{DATATYPES[datatype].code}", *values)
