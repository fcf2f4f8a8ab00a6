"""gRPC messages: decompresses and parses the bytes of a request message within fixed limits.

The gRPC library would decompress a message completely before it checks the size, and before the
server knows the caller. Therefore the library's decompression is off (`grpc_transport`), and this
module decompresses, after authentication. The parts of a large message are counted before they
become Python objects, in one thread, so that the event loop continues to serve other calls. The
module is independent of services and methods.
"""

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from serving.request import RefusedError

MessageT = TypeVar("MessageT", bound=Message)

# Fields, map entries and list elements of a message. No valid request needs more. A part takes at
# least one byte, so a message of up to PARTS_MAX bytes needs no count.
PARTS_MAX = 100_000
# A compressed or larger message is parsed in a thread. One thread is enough: parsing holds the GIL.
INLINE_BYTES_MAX = 32 << 10
_parser_thread = ThreadPoolExecutor(1, "grpc-parser")

# The first bytes of a compressed message. The metadata that names the compression is not visible in
# Python. No protobuf message begins with GZIP_MAGIC, which has an invalid wire type.
GZIP_MAGIC = b"\x1f\x8b"
# First byte of a zlib stream (gRPC's "deflate"), and the divisor of its first two bytes.
ZLIB_METHOD, ZLIB_HEADER_DIVISOR = 0x78, 31
# Values of zlib's `wbits` that select the header of the two formats.
GZIP_WINDOW, ZLIB_WINDOW = zlib.MAX_WBITS | 16, zlib.MAX_WBITS

VARINT_BYTES_MAX = 10
# The bytes of a varint except its last byte have the high bit.
CONTINUATION_BYTES = bytes(range(0x80, 0x100))
NESTING_MAX = 100  # As in protobuf's own parser.
_FIXED_SIZES = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}
_UNPACKED_TYPES = {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES}


async def parse_message(message_type: type[MessageT], data: bytes, bytes_max: int) -> MessageT:
    """Decompress and parse a message; raise RefusedError if it is too large.

    `bytes_max` limits the size after decompression. An invalid encoding raises DecodeError.
    """
    if len(data) <= INLINE_BYTES_MAX and not _may_be_compressed(data):
        return message_type.FromString(data)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_parser_thread, _parse, message_type, data, bytes_max)


def _parse(message_type: type[MessageT], data: bytes, bytes_max: int) -> MessageT:
    data = decompress(data, bytes_max)
    if len(data) > PARTS_MAX and count_parts(message_type.DESCRIPTOR, data) > PARTS_MAX:
        raise RefusedError(
            "BODY_TOO_LARGE",
            f"the message has more than {PARTS_MAX} fields, map entries and list elements; send "
            "several requests",
        )
    return message_type.FromString(data)


def _may_be_compressed(data: bytes) -> bool:
    return data[:2] == GZIP_MAGIC or _has_zlib_header(data)


def _has_zlib_header(data: bytes) -> bool:
    return (
        len(data) > 2
        and data[0] == ZLIB_METHOD
        and int.from_bytes(data[:2], "big") % ZLIB_HEADER_DIVISOR == 0
    )


def decompress(data: bytes, bytes_max: int) -> bytes:
    """Decompress gzip or zlib data; return other data unchanged.

    Raise RefusedError if the result is over `bytes_max`. At most `bytes_max` bytes and one byte are
    decompressed.
    """
    if not _may_be_compressed(data):
        return data
    is_gzip = data[:2] == GZIP_MAGIC
    decompressor = zlib.decompressobj(GZIP_WINDOW if is_gzip else ZLIB_WINDOW)
    try:
        text = decompressor.decompress(data, bytes_max + 1)
    except zlib.error:
        # An uncompressed message can begin with the bytes of a zlib header, but its rest is not a
        # zlib stream with a correct checksum.
        return data
    if len(text) > bytes_max:
        raise RefusedError(
            "BODY_TOO_LARGE",
            f"the decompressed message is over {bytes_max} bytes, the limit of this server "
            "(message_bytes_max)",
        )
    return text if decompressor.eof and not decompressor.unused_data else data


def count_parts(descriptor: Any, data: bytes) -> int:
    """Count the fields, map entries and list elements of an encoded message, also of nested ones.

    Stops after PARTS_MAX parts. Raises DecodeError if the encoding is invalid or has groups, which
    no protocol of this server uses.
    """
    count, position = 0, 0
    # The descriptor and the end of each open message; the innermost is last.
    open_messages: list[tuple[Any, int]] = [(descriptor, len(data))]
    while count <= PARTS_MAX:
        current, end = open_messages[-1]
        if position == end:
            open_messages.pop()
            if not open_messages:
                break
            continue
        tag, position = _read_varint(data, position, end)
        count += 1
        match tag & 7:  # The wire type.
            case 0:  # Varint.
                _, position = _read_varint(data, position, end)
            case 1:  # 64 bits.
                position += 8
            case 5:  # 32 bits.
                position += 4
            case 2:  # Length-delimited.
                size, position = _read_varint(data, position, end)
                if position + size > end:
                    raise DecodeError("a field is longer than its message")
                field = current.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    if len(open_messages) > NESTING_MAX:
                        raise DecodeError("the message is nested too deeply")
                    open_messages.append((field.message_type, position + size))
                    continue
                if field is not None and field.type not in _UNPACKED_TYPES:
                    count += _packed_elements(field, data[position : position + size])
                position += size
            case _:
                raise DecodeError("the message has groups or an unknown wire type")
        if position > end:
            raise DecodeError("a field is longer than its message")
    return count


def _packed_elements(field: Any, data: bytes) -> int:
    """Return the number of elements of a packed list of numbers."""
    size = _FIXED_SIZES.get(field.type)
    if size is not None:
        return len(data) // size
    return len(data.translate(None, CONTINUATION_BYTES))


def _read_varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it."""
    value = 0
    for shift in range(0, 7 * VARINT_BYTES_MAX, 7):
        if position >= end:
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise DecodeError("the message ends within a number, or a number is too long")
