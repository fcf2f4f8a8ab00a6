"""`torch.save` zip archives of torch 1.6 and newer: tensors as views of the mapped file.

The archive is a zip file, or a byte range of a larger file. One member is a pickle, and the other
members are the storages of the tensors. No member is compressed. `view_archive` may raise any
exception for a broken archive. The module is independent of the model.
"""

import io
import zipfile
from typing import Any

from gpt.checkpoint.files.file_tree import Span
from gpt.checkpoint.files.torch_unpickle import (
    PICKLE_BYTES_MAX,
    PickleReader,
    Storage,
    TensorUnpickler,
    build_tensors,
)

# Size of a zip member's local header, without the name and the extra field that follow it.
LOCAL_HEADER_BYTES = 30
# The local header states the length of the name at byte 26 and the length of the extra field at
# byte 28, each as a two-byte integer.
LENGTH_OFFSETS = (26, 28)


def view_archive(span: Span) -> Any:
    """Load the object of an archive; its tensors are views of the mapped file.

    The CRC of a member is not checked here, because torch can save files without CRCs.
    """
    memory = span.memory()
    if len(memory) < span.length:
        raise ValueError("the file ends before the archive does")
    members = _read_members(memory)

    def member_content(name: str) -> memoryview:
        start = _content_offset(memory, members[name])
        return memory[start : start + members[name].file_size]

    def storage_offset(storage: Storage) -> int:
        member = members[f"data/{storage.key}"]
        if storage.element_count * storage.dtype.itemsize > member.file_size:
            raise ValueError(f"{member.filename} is shorter than its storage")
        return _content_offset(memory, member)

    if "byteorder" in members and bytes(member_content("byteorder")) != b"little":
        raise ValueError("its bytes are in big-endian order")
    if members["data.pkl"].file_size > PICKLE_BYTES_MAX:
        raise ValueError(f"its pickle has more than {PICKLE_BYTES_MAX} bytes")
    unpickled_object = TensorUnpickler(PickleReader(member_content("data.pkl"))).load()
    return build_tensors(unpickled_object, memory, storage_offset)


def _read_members(memory: memoryview) -> dict[str, zipfile.ZipInfo]:
    """Return the members by name, without the folder that contains them all."""
    members: dict[str, zipfile.ZipInfo] = {}
    with zipfile.ZipFile(MemoryFile(memory)) as archive:
        for member in archive.infolist():
            name = member.filename.partition("/")[2]
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                raise ValueError(f"{member.filename} is compressed; torch.save does not compress")
            if name in members:
                raise ValueError(f"it contains {member.filename} twice")
            members[name] = member
    return members


def _content_offset(memory: memoryview, member: zipfile.ZipInfo) -> int:
    """Return the offset of a member's first byte; raise if the member exceeds the archive."""
    header = member.header_offset
    lengths = [
        int.from_bytes(memory[header + field_offset : header + field_offset + 2], "little")
        for field_offset in LENGTH_OFFSETS
    ]
    start = header + LOCAL_HEADER_BYTES + sum(lengths)
    if start + member.file_size > len(memory):
        raise ValueError(f"{member.filename} is outside the archive")
    return start


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
