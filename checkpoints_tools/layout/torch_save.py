"""`torch.save` archives whose weights are still to come: every byte's place, before any is there.

Such a file is a zip of stored members: a pickle that says how the tensors lie in their storages,
and the storages, each aligned. The pickle is written from stand-ins that know shapes alone; the
storages' places become placements, their checksums patches. torch reads the result as its own.
It knows no models.
"""

import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2

from checkpoints_tools.layout.layout import Patch, Placement, Text
from gpt.parallel.sharding import Part

FOLDER = "archive"
ALIGNMENT = 64  # Of storages, counted from the archive's start; torch's own.
LIMIT_32 = 0xFFFFFFFF  # Sizes and offsets beyond it stand in a 64-bit field of their own.
STORAGES: Mapping[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
}


@dataclass(frozen=True, slots=True)
class Promise:
    """A tensor that will stand in the archive: a part of a logical one, contiguous."""

    name: str
    part: Part
    full: tuple[int, ...]  # The logical tensor's shape.
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None  # Where it differs from the part's, as [1, rows, columns].

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.part.shape(self.full) if self.shape is None else self.shape


@dataclass(frozen=True)
class Archive:
    """Where everything of one archive lies in its file."""

    start: int
    size: int
    texts: tuple[Text, ...]
    placements: tuple[Placement, ...]
    patches: tuple[Patch, ...]  # Their numbers count from this archive's first placement.


def archive(record: Any, start: int = 0) -> Archive:
    """The archive of plain values, dicts and lists, in which tensors are `Promise`s."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(record)
    zipped = _Zip(start)
    zipped.add("data.pkl", pickled.getvalue())
    zipped.add("byteorder", b"little")
    for number, promise in enumerate(pickler.promises):
        zipped.promise(f"data/{number}", promise)
    zipped.add("version", b"3\n")
    return zipped.close()


class _Storage:
    """Named in the pickle by its number only."""

    def __init__(self, promise: Promise, number: int) -> None:
        self.promise, self.number = promise, number


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.promises: list[Promise] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Promise):
            return NotImplemented
        storage = _Storage(value, len(self.promises))
        self.promises.append(value)
        sizes = value.sizes
        strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
        return _rebuild_tensor_v2, (storage, 0, sizes, strides, False, OrderedDict())

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        kind, count = STORAGES[value.promise.dtype], math.prod(value.promise.sizes)
        return "storage", kind, str(value.number), "cpu", count


@dataclass
class _Member:
    name: bytes
    at: int  # Of its local header, from the archive's start.
    size: int
    crc: int
    placement: int | None = None


@dataclass
class _Zip:
    """A zip of stored members, laid out front to back."""

    start: int
    end: int = 0
    texts: list[Text] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)
    members: list[_Member] = field(default_factory=list)

    def add(self, name: str, content: bytes) -> None:
        member = _Member(f"{FOLDER}/{name}".encode(), self.end, len(content), zlib.crc32(content))
        self._open(member)
        self._text(content)

    def promise(self, name: str, promise: Promise) -> None:
        size = math.prod(promise.sizes) * promise.dtype.itemsize
        number = len(self.placements)
        member = _Member(f"{FOLDER}/{name}".encode(), self.end, size, 0, number)
        self.patches.append(Patch(self.start + member.at + 14, number))
        self._open(member)
        offset = self.start + self.end
        self.placements.append(Placement(promise.name, promise.part, offset, promise.dtype))
        self.end += size

    def _open(self, member: _Member) -> None:
        """A local header, its extra field long enough that what follows is aligned."""
        large = member.size >= LIMIT_32
        sizes = struct.pack("<HHQQ", 1, 16, member.size, member.size) if large else b""
        fixed = 30 + len(member.name) + len(sizes) + 4
        gap = -(self.end + fixed) % ALIGNMENT
        extra = sizes + struct.pack("<HH", 0x4246, gap) + b"\0" * gap  # "FB", as torch pads.
        size = LIMIT_32 if large else member.size
        self.members.append(member)
        self._text(
            struct.pack(
                "<4s5H3I2H",
                *(b"PK\x03\x04", 45 if large else 20, 0, 0, 0, 0),
                *(member.crc, size, size, len(member.name), len(extra)),
            )
            + member.name
            + extra
        )

    def close(self) -> Archive:
        directory = self.end
        for member in self.members:
            if member.placement is not None:
                self.patches.append(Patch(self.start + self.end + 16, member.placement))
            self._text(_entry(member))
        size, count = self.end - directory, len(self.members)
        # The 64-bit form is always there, as torch writes it; readers of either find it.
        at = self.end
        self._text(
            struct.pack(
                "<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, directory
            )
            + struct.pack("<4sIQI", b"PK\x06\x07", 0, at, 1)
            + struct.pack(
                "<4s4H2IH",
                *(b"PK\x05\x06", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF)),
                *(min(size, LIMIT_32), min(directory, LIMIT_32), 0),
            )
        )
        found = (tuple(self.texts), tuple(self.placements), tuple(self.patches))
        return Archive(self.start, self.end, *found)

    def _text(self, content: bytes) -> None:
        self.texts.append(Text(self.start + self.end, content))
        self.end += len(content)


def _entry(member: _Member) -> bytes:
    """A member's line in the central directory."""
    wide = [member.size] * 2 if member.size >= LIMIT_32 else []
    wide += [member.at] if member.at >= LIMIT_32 else []
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, at = min(member.size, LIMIT_32), min(member.at, LIMIT_32)
    version = 45 if wide else 20
    return (
        struct.pack(
            "<4s6H3I5H2I",
            *(b"PK\x01\x02", version, version, 0, 0, 0, 0),
            *(member.crc, size, size, len(member.name), len(extra), 0, 0, 0, 0, at),
        )
        + member.name
        + extra
    )
