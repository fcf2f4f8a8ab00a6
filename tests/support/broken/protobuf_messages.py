"""Random protobuf messages: extreme fields, malformed bytes."""

import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTS = (0, 1, 2, 7, 63, 64, 255, 640, 641, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1)
FLOATS = (
    0.0,
    -0.0,
    1.0,
    0.5,
    -1.0,
    1e-30,
    -1e-30,
    1e30,
    -1e30,
    3.4e38,
    float("nan"),
    float("inf"),
    -float("inf"),
    0.1,
    2.0,
    100.0,
)
TEXTS = (
    "",
    "a",
    "hello world",
    "\0",
    "\u202e",
    "🦜",
    "é" * 300,
    "x" * 5000,
    "../../etc/passwd",
    "sum@2",
    "name@0",
    "@",
    "{",
    '{"type": "object"}',
    "(a|b)*c",
    "(" * 200,
    "%s%n",
    "-1",
    '{"max_tokens": "NaN"}',
    "[[[[",
    "1e999",
    "text_input",
    "BYTES",
    "INT32",
)
_Kind = FieldDescriptor
SIGNED32 = {_Kind.TYPE_INT32, _Kind.TYPE_SINT32, _Kind.TYPE_SFIXED32}
SIGNED64 = {_Kind.TYPE_INT64, _Kind.TYPE_SINT64, _Kind.TYPE_SFIXED64}
UNSIGNED32 = {_Kind.TYPE_UINT32, _Kind.TYPE_FIXED32}


def scribble(message: Message, draw: random.Random, share: float, depth: int = 0) -> None:
    """Fill about this share of the fields with values that fit their types."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and not _is_map(field) and depth < 4:
            for child in _children(message, field):
                scribble(child, draw, share, depth + 1)
        if draw.random() > share:
            continue
        if _is_map(field):
            _scribble_map(getattr(message, field.name), field, draw, depth)
        elif field.message_type is not None and depth < 4:
            for _ in range(draw.choice((0, 1, 1, 2, 5)) if field.is_repeated else 1):
                child = getattr(message, field.name)
                scribble(
                    child.add() if field.is_repeated else child, draw, max(share, 0.4), depth + 1
                )
                if not field.is_repeated:
                    child.SetInParent()
        elif field.message_type is None and field.is_repeated:
            count = draw.choice((0, 1, 1, 2, 3, 20, 300))
            getattr(message, field.name).extend(_value(field, draw) for _ in range(count))
        elif field.message_type is None:
            setattr(message, field.name, _value(field, draw))


def _children(message: Message, field: Any) -> list[Message]:
    """The existing submessages."""
    if field.is_repeated:
        return list(getattr(message, field.name))
    return [getattr(message, field.name)] if message.HasField(field.name) else []


def damage(payload: bytes, draw: random.Random) -> bytes:
    """The message with a few bytes changed, lost, or doubled; or noise."""
    kind = draw.randrange(5)
    if kind == 0 or not payload:
        return draw.randbytes(draw.choice((0, 1, 5, 60, 2000)))
    position = draw.randrange(len(payload))
    if kind == 1:
        return payload[:position]
    if kind == 2:
        return payload + payload[position:]
    changed = bytearray(payload)
    for _ in range(draw.choice((1, 1, 3, 10))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def messages(kind: type[Message], valid: Message, draw: random.Random) -> Iterator[bytes]:
    """An endless series of changed copies of `valid`, random messages and damaged messages."""
    while True:
        message = kind()
        if draw.random() < 0.7:
            message.CopyFrom(valid)
        scribble(message, draw, draw.choice((0.02, 0.05, 0.1, 0.5)))
        payload = message.SerializeToString()
        yield damage(payload, draw) if draw.random() < 0.3 else payload


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _scribble_map(target: Any, field: Any, draw: random.Random, depth: int) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(draw.choice((0, 1, 3))):
        if value.message_type is None:
            target[_value(key, draw)] = _value(value, draw)
        elif depth < 4:
            scribble(target[_value(key, draw)], draw, 0.4, depth + 1)


def _value(field: Any, draw: random.Random) -> Any:
    if field.type == _Kind.TYPE_STRING:
        return draw.choice(TEXTS)
    if field.type == _Kind.TYPE_BYTES:
        return draw.choice((b"", b"\0", draw.randbytes(40), b"\x05\0\0\0hello", b"\xff" * 9))
    if field.type == _Kind.TYPE_BOOL:
        return draw.random() < 0.5
    if field.type in (_Kind.TYPE_FLOAT, _Kind.TYPE_DOUBLE):
        return draw.choice(FLOATS)
    number = draw.choice(INTS)
    if field.type == _Kind.TYPE_ENUM:
        return number % 9
    if field.type in UNSIGNED32:
        return number % 2**32
    if field.type in SIGNED32:
        return draw.choice((-1, 1)) * (number % 2**31)
    return draw.choice((-1, 1)) * number if field.type in SIGNED64 else number
