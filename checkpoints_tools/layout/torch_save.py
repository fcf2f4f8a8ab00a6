"""Layout of a `torch.save` archive: plans members, pickle and CRC offsets without reading weights.

A `torch.save` file is an uncompressed zip. It contains a pickle that describes each tensor as a
view of a storage, and one aligned member per storage. The pickle is written from placeholders,
which have shapes but no data. Each storage becomes a placement. The CRC of a storage depends on the
weights, so the layout reserves its bytes as a patch, which is written after the weights. The module
is independent of the model.
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

from checkpoints_tools.layout.layout import CrcPatch, LiteralBytes, Placement
from gpt.parallel.weight_sharding import ShardSpec

ARCHIVE_FOLDER = "archive"
ALIGNMENT = 64  # Alignment of storages relative to the archive's start, as in torch.
ZIP32_MAX = 0xFFFFFFFF  # Larger sizes and offsets need zip64 fields.
# Offsets of the CRC-32 in a local header and in a central directory entry.
LOCAL_CRC_OFFSET, CENTRAL_CRC_OFFSET = 14, 16
STORAGE_TYPES: Mapping[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
}


@dataclass(frozen=True, slots=True)
class TensorPlaceholder:
    """A tensor of the archive, before its data is read: the stored part of a logical tensor."""

    name: str
    part: ShardSpec
    full_shape: tuple[int, ...]  # The logical tensor's shape.
    dtype: torch.dtype
    # Shape of the stored tensor, if it differs from the part's shape, e.g. (1, rows, columns).
    shape: tuple[int, ...] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.part.local_shape(self.full_shape) if self.shape is None else self.shape


@dataclass(frozen=True)
class ArchiveLayout:
    """Literals, placements and patches of one archive; offsets count from the file's start."""

    start: int
    size: int
    literals: tuple[LiteralBytes, ...]
    placements: tuple[Placement, ...]
    patches: tuple[CrcPatch, ...]  # `placement_index` is the index in this archive's placements.


def plan_archive(record: Any, start: int = 0) -> ArchiveLayout:
    """Plan the archive of `torch.save(record)` at byte `start` of a file.

    `record` is any object that pickle accepts, with a `TensorPlaceholder` in place of each tensor.
    """
    pickled = io.BytesIO()
    pickler = _PlaceholderPickler(pickled)
    pickler.dump(record)
    zip_layout = _ZipLayout(start)
    zip_layout.add_member("data.pkl", pickled.getvalue())
    zip_layout.add_member("byteorder", b"little")
    for index, placeholder in enumerate(pickler.placeholders):
        zip_layout.add_tensor(f"data/{index}", placeholder)
    zip_layout.add_member("version", b"3\n")
    return zip_layout.finish()


class _PlaceholderStorage:
    """The storage of one tensor. The pickle contains the storage's index, but not its data."""

    def __init__(self, placeholder: TensorPlaceholder, index: int) -> None:
        self.placeholder = placeholder
        self.index = index


class _PlaceholderPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.placeholders: list[TensorPlaceholder] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, TensorPlaceholder):
            return NotImplemented
        storage = _PlaceholderStorage(value, len(self.placeholders))
        self.placeholders.append(value)
        sizes = value.sizes
        strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
        return _rebuild_tensor_v2, (storage, 0, sizes, strides, False, OrderedDict())

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _PlaceholderStorage):
            return None
        storage_type = STORAGE_TYPES[value.placeholder.dtype]
        count = math.prod(value.placeholder.sizes)
        return "storage", storage_type, str(value.index), "cpu", count


@dataclass
class _ZipMember:
    name: bytes
    header_offset: int  # Offset of the local header from the archive's start.
    size: int
    crc: int
    placement_index: int | None = None


@dataclass
class _ZipLayout:
    """Builds an uncompressed zip, member by member."""

    start: int
    end: int = 0
    literals: list[LiteralBytes] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    patches: list[CrcPatch] = field(default_factory=list)
    members: list[_ZipMember] = field(default_factory=list)

    def add_member(self, name: str, content: bytes) -> None:
        member = _ZipMember(
            f"{ARCHIVE_FOLDER}/{name}".encode(), self.end, len(content), zlib.crc32(content)
        )
        self._begin_member(member)
        self._append(content)

    def add_tensor(self, name: str, placeholder: TensorPlaceholder) -> None:
        size = math.prod(placeholder.sizes) * placeholder.dtype.itemsize
        placement_index = len(self.placements)
        member = _ZipMember(f"{ARCHIVE_FOLDER}/{name}".encode(), self.end, size, 0, placement_index)
        crc_offset = self.start + member.header_offset + LOCAL_CRC_OFFSET
        self.patches.append(CrcPatch(crc_offset, placement_index))
        self._begin_member(member)
        offset = self.start + self.end
        self.placements.append(
            Placement(placeholder.name, placeholder.part, offset, placeholder.dtype)
        )
        self.end += size

    def _begin_member(self, member: _ZipMember) -> None:
        """Append a local header. Its extra field is padding that aligns the member's content."""
        is_zip64 = member.size >= ZIP32_MAX
        sizes = struct.pack("<HHQQ", 1, 16, member.size, member.size) if is_zip64 else b""
        # 30 bytes of fixed header fields, and 4 bytes of id and length of the padding field.
        unpadded_bytes = 30 + len(member.name) + len(sizes) + 4
        padding = -(self.end + unpadded_bytes) % ALIGNMENT
        # As padding, torch uses an extra field with the id "FB".
        extra = sizes + struct.pack("<HH", 0x4246, padding) + b"\0" * padding
        size = ZIP32_MAX if is_zip64 else member.size
        self.members.append(member)
        self._append(
            struct.pack(
                "<4s5H3I2H",
                b"PK\x03\x04",
                45 if is_zip64 else 20,
                0,
                0,
                0,
                0,
                member.crc,
                size,
                size,
                len(member.name),
                len(extra),
            )
            + member.name
            + extra
        )

    def finish(self) -> ArchiveLayout:
        directory_offset = self.end
        for member in self.members:
            if member.placement_index is not None:
                crc_offset = self.start + self.end + CENTRAL_CRC_OFFSET
                self.patches.append(CrcPatch(crc_offset, member.placement_index))
            self._append(_central_directory_entry(member))
        size, count = self.end - directory_offset, len(self.members)
        # Like torch, always write both end records, zip64 and classic; a reader needs one of them.
        end_offset = self.end
        self._append(
            struct.pack(
                "<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, directory_offset
            )
            + struct.pack("<4sIQI", b"PK\x06\x07", 0, end_offset, 1)
            + struct.pack(
                "<4s4H2IH",
                b"PK\x05\x06",
                0,
                0,
                min(count, 0xFFFF),
                min(count, 0xFFFF),
                min(size, ZIP32_MAX),
                min(directory_offset, ZIP32_MAX),
                0,
            )
        )
        return ArchiveLayout(
            self.start,
            self.end,
            tuple(self.literals),
            tuple(self.placements),
            tuple(self.patches),
        )

    def _append(self, content: bytes) -> None:
        self.literals.append(LiteralBytes(self.start + self.end, content))
        self.end += len(content)


def _central_directory_entry(member: _ZipMember) -> bytes:
    """Encode the central directory entry of a member."""
    zip64_fields = [member.size] * 2 if member.size >= ZIP32_MAX else []
    zip64_fields += [member.header_offset] if member.header_offset >= ZIP32_MAX else []
    extra = (
        struct.pack(f"<HH{len(zip64_fields)}Q", 1, 8 * len(zip64_fields), *zip64_fields)
        if zip64_fields
        else b""
    )
    size, header_offset = min(member.size, ZIP32_MAX), min(member.header_offset, ZIP32_MAX)
    version = 45 if zip64_fields else 20
    return (
        struct.pack(
            "<4s6H3I5H2I",
            b"PK\x01\x02",
            version,
            version,
            0,
            0,
            0,
            0,
            member.crc,
            size,
            size,
            len(member.name),
            len(extra),
            0,
            0,
            0,
            0,
            header_offset,
        )
        + member.name
        + extra
    )
