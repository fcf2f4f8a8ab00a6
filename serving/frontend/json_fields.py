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

# Called with a struct, and the name and the value of a field that the struct does not have. Returns
# whether the field can be ignored.
EffectCheck = Callable[[type[msgspec.Struct], str, Any], bool]


def remove_unset_fields(
    data: bytes, request_type: type[msgspec.Struct], has_no_effect: EffectCheck
) -> bytes:
    """Return the body without null fields and without unknown fields that have no effect.

    `has_no_effect` is called for each field of the body, and of the objects in it, that their types
    do not have. Objects that the type does not describe, such as JSON schemas, are returned
    unchanged. Raise msgspec's errors if the body is not a JSON object.
    """
    return msgspec.json.encode(_clean_object(data, request_type, has_no_effect))


def _clean_object(
    data: bytes | msgspec.Raw, struct: type[msgspec.Struct], has_no_effect: EffectCheck
) -> dict[str, Any]:
    """Decode one level of an object, without the fields that `remove_unset_fields` removes.

    They are also removed from the objects in it.
    """
    part_types = _part_types(struct)
    return {
        name: _clean_value(value, part_types.get(name), has_no_effect)
        for name, value in _decode_object(data).items()
        if bytes(value).strip() != b"null"
        and (name in part_types or not has_no_effect(struct, name, msgspec.json.decode(value)))
    }


def _clean_value(
    value: msgspec.Raw, part_type: type[msgspec.Struct] | None, has_no_effect: EffectCheck
) -> Any:
    """Remove the same fields from a value that is a struct or a list of structs."""
    if part_type is None:
        return value
    match bytes(value).lstrip()[:1]:
        case b"{":
            return _clean_object(value, part_type, has_no_effect)
        case b"[":
            return [
                _clean_object(element, part_type, has_no_effect)
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
