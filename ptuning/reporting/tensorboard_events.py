"""TensorBoard's event records, in bytes: scalars at a step, and where a resumed run begins.

A record is a protobuf message in TFRecord's frame (length, its checksum, message, its checksum).
Four kinds of fields are all that is needed, so neither TensorBoard nor protobuf is. Knows no files.
"""

import struct
from collections.abc import Mapping

VERSION = b"brain.Event:2"
STARTED = 1  # SessionLog.START: whatever was told of this step and later ones is void.
POLYNOMIAL = 0x82F63B78  # Castagnoli's, its bits reversed: CRC-32C.


def opening(time_s: float) -> bytes:
    """The first record of every file."""
    return _record(_double(1, time_s) + _bytes(3, VERSION))


def resumed(time_s: float, step: int) -> bytes:
    """`step` is the first that is told anew."""
    status = _key(1, 0) + _varint(STARTED)
    return _record(_double(1, time_s) + _int(2, step) + _bytes(7, status))


def scalars(time_s: float, step: int, values: Mapping[str, float]) -> bytes:
    summary = b"".join(
        _bytes(1, _bytes(1, tag.encode(errors="replace")) + _key(2, 5) + _float(value))
        for tag, value in values.items()
    )
    return _record(_double(1, time_s) + _int(2, step) + _bytes(5, summary))


def _record(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    return length + _masked(length) + message + _masked(message)


def _masked(text: bytes) -> bytes:
    """A checksum of text that holds checksums would be weak, so TFRecord turns and shifts it."""
    crc = crc32c(text)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(text: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in text:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
    return value


TABLE = tuple(_table_entry(byte) for byte in range(256))


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _varint(value: int) -> bytes:
    said = bytearray()
    while value > 0x7F:
        said.append(value & 0x7F | 0x80)
        value >>= 7
    said.append(value)
    return bytes(said)


def _int(number: int, value: int) -> bytes:
    return _key(number, 0) + _varint(value) if value else b""  # Zero is what is not said.


def _double(number: int, value: float) -> bytes:
    return _key(number, 1) + struct.pack("<d", value)


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _bytes(number: int, value: bytes) -> bytes:
    return _key(number, 2) + _varint(len(value)) + value
