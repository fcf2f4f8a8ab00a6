"""JSON request fields: removes fields of a body that have the same effect as absent fields.

A field with the value null is absent, also if the request type has no field of this name. Clients
and routers send such fields, because they send each field of another server's API. The module only
reads the names of fields and finds nulls; msgspec checks the types of all values afterwards. It is
independent of the protocols.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, get_args

import msgspec

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def remove_unset_fields(
    data: bytes,
    request_type: type[msgspec.Struct],
    has_no_effect: Callable[[str, Any], bool],
) -> bytes:
    """Return the body without null fields and without unknown fields that have no effect.

    `has_no_effect(name, value)` is called for each field of the body that the type does not have.
    Objects that the type does not describe, such as JSON schemas, are returned unchanged. Raise
    msgspec's errors if the body is not a JSON object.
    """
    fields = _without_nulls(data, request_type)
    struct_fields = request_type.__struct_fields__
    return msgspec.json.encode(
        {
            name: value
            for name, value in fields.items()
            if name in struct_fields or not has_no_effect(name, msgspec.json.decode(value))
        }
    )


def _without_nulls(data: bytes | msgspec.Raw, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Decode one level of an object, without its null fields and those of the structs in it."""
    part_types = _part_types(struct)
    return {
        name: _clean_value(value, part_types.get(name))
        for name, value in _decode_object(data).items()
        if bytes(value).strip() != b"null"
    }


def _clean_value(value: msgspec.Raw, part_type: type[msgspec.Struct] | None) -> Any:
    """Remove null fields from a value that is a struct or a list of structs."""
    if part_type is None:
        return value
    match bytes(value).lstrip()[:1]:
        case b"{":
            return _without_nulls(value, part_type)
        case b"[":
            return [
                _without_nulls(element, part_type)
                if bytes(element).lstrip().startswith(b"{")
                else element
                for element in _decode_list(value)
            ]
    return value


@cache
def _part_types(struct: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """Return the struct type in the type of each field; None: the field contains no struct."""
    return {field.name: _find_struct(field.type) for field in msgspec.structs.fields(struct)}


def _find_struct(annotation: Any) -> type[msgspec.Struct] | None:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    parts = map(_find_struct, get_args(annotation))
    return next((part for part in parts if part is not None), None)
