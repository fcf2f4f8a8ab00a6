"""TensorBoard events: scalar summaries and session starts, encoded as TFRecord bytes.

A record is a protobuf message in a TFRecord frame: length, checksum of the length, message,
checksum of the message. The messages have only four types of protobuf fields, so this module
encodes them itself and depends neither on TensorBoard nor on protobuf.
"""

import struct
from collections.abc import Mapping

FILE_VERSION = b"brain.Event:2"
# SessionLog.START, the status of a session start event. TensorBoard discards each event that was
# logged before the session start and has the same or a later step.
SESSION_START = 1
CRC32C_POLYNOMIAL = 0x82F63B78  # The Castagnoli polynomial of CRC-32C with reversed bits.


def version_event(time_s: float) -> bytes:
    """Return the record with which every event file starts."""
    return _tfrecord(_double(1, time_s) + _bytes(3, FILE_VERSION))


def session_start_event(time_s: float, step: int) -> bytes:
    """Return a record that tells TensorBoard to discard logged events of `step` and later steps.

    A resumed run logs the events of these steps again.
    """
    status = _field_key(1, 0) + _varint(SESSION_START)
    return _tfrecord(_double(1, time_s) + _int(2, step) + _bytes(7, status))


def scalars_event(time_s: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return the record with the scalars of a step, keyed by tag."""
    summary = b"".join(
        _bytes(1, _bytes(1, tag.encode(errors="replace")) + _field_key(2, 5) + _float(value))
        for tag, value in values.items()
    )
    return _tfrecord(_double(1, time_s) + _int(2, step) + _bytes(5, summary))


def _tfrecord(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    return length + _masked_crc32c(length) + message + _masked_crc32c(message)


def _masked_crc32c(content: bytes) -> bytes:
    """Return the CRC-32C, rotated and offset as TFRecord requires.

    This mask avoids the weakness of a CRC over data that contains CRCs.
    """
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc = CRC32C_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _crc32c_table_entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (CRC32C_POLYNOMIAL if value & 1 else 0)
    return value


CRC32C_TABLE = tuple(_crc32c_table_entry(byte) for byte in range(256))


def _field_key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _int(number: int, value: int) -> bytes:
    return _field_key(number, 0) + _varint(value) if value else b""  # proto3 omits zeros.


def _double(number: int, value: float) -> bytes:
    return _field_key(number, 1) + struct.pack("<d", value)


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _bytes(number: int, value: bytes) -> bytes:
    return _field_key(number, 2) + _varint(len(value)) + value
