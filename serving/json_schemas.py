"""JSON schemas of guides: closes the objects and the tuples that a schema describes.

JSON Schema allows an object to have properties that its schema does not list. A model that must
match such a schema can add properties until the length limit. `close_schema` therefore forbids
unlisted properties, as the default backend of vLLM (xgrammar in strict mode) does. A schema that
sets `additionalProperties` decides for itself. This module is independent of the library that
matches schemas.
"""

from collections.abc import Iterator
from typing import Any

# Keywords whose content is a schema or a list of schemas, and keywords with schemas by name.
_SCHEMA_KEYWORDS = (
    "additionalProperties",
    "unevaluatedProperties",
    "additionalItems",
    "unevaluatedItems",
    "items",
    "prefixItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "allOf",
    "anyOf",
    "oneOf",
)
_SCHEMA_MAP_KEYWORDS = (
    "properties",
    "patternProperties",
    "dependentSchemas",
    "$defs",
    "definitions",
)
_COMPOSITION_KEYWORDS = ("allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas")
_PROPERTY_KEYWORDS = ("properties", "patternProperties")


def nested_objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every JSON object in a schema, the schema itself included."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            pending += node.values()
            yield node


def close_schema(schema: Any, *, strict: bool = False) -> Any:
    """Return a copy of a schema whose objects and tuples allow no unlisted members.

    An object is closed if the schema lists properties and does not set `additionalProperties`. With
    `strict`, objects that list no properties, or set `additionalProperties` to true, are closed
    too. Members of a composition that together describe one object, such as the parts of an
    `allOf`, stay open, because each of them would forbid the properties of the others.
    """
    merged_refs: set[str] = set()
    _collect_merged_refs(schema, merged_refs)
    return _close(schema, merged_refs, "#", strict, is_part=False)


def _collect_merged_refs(schema: Any, merged_refs: set[str]) -> None:
    """Collect the `$ref`s of schemas that are merged with other properties."""
    for node in nested_objects(schema):
        if _merges_properties(node):
            merged_refs.update(
                part["$ref"]
                for part in (node, *_parts(node))
                if isinstance(part, dict) and isinstance(part.get("$ref"), str)
            )


def _parts(schema: dict[str, Any]) -> list[Any]:
    """Return the subschemas that describe the same object as `schema` itself."""
    parts: list[Any] = []
    for keyword in _COMPOSITION_KEYWORDS:
        content = schema.get(keyword)
        if isinstance(content, list):
            parts += content
        elif isinstance(content, dict):
            parts += content.values() if keyword == "dependentSchemas" else [content]
    return parts


def _lists_properties(schema: dict[str, Any]) -> bool:
    return any(isinstance(schema.get(keyword), dict) for keyword in _PROPERTY_KEYWORDS)


def _merges_properties(schema: dict[str, Any]) -> bool:
    """Whether several subschemas together list the properties of the object `schema`."""

    def may_list_properties(part: Any) -> bool:
        return isinstance(part, dict) and (
            _lists_properties(part) or "$ref" in part or bool(_parts(part))
        )

    if _lists_properties(schema) and (
        "$ref" in schema or any(map(may_list_properties, _parts(schema)))
    ):
        return True
    all_of = schema.get("allOf")
    count = sum(map(may_list_properties, all_of)) if isinstance(all_of, list) else 0
    # An object of one `allOf` part and one of the alternatives is merged as well.
    return count > 1 or (count == 1 and ("anyOf" in schema or "oneOf" in schema))


def _close(schema: Any, merged_refs: set[str], path: str, strict: bool, *, is_part: bool) -> Any:
    """Close a schema and its subschemas. `is_part`: the schema itself stays open."""
    if isinstance(schema, list):
        return [_close(part, merged_refs, "", strict, is_part=is_part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    merges = _merges_properties(schema)
    closed: dict[str, Any] = {}
    for keyword, content in schema.items():
        if keyword in _SCHEMA_MAP_KEYWORDS and isinstance(content, dict):
            closed[keyword] = {
                name: _close(
                    subschema,
                    merged_refs,
                    f"{path}/{keyword}/{name}",
                    strict,
                    is_part=keyword == "dependentSchemas" and (merges or is_part),
                )
                for name, subschema in content.items()
            }
        elif keyword in _SCHEMA_KEYWORDS:
            # A part of a part, such as `anyOf` in `allOf`, describes the same object too.
            same_object = keyword in _COMPOSITION_KEYWORDS and (merges or is_part)
            # A closed schema under `not` or `if` would match other texts than the open one.
            same_object = same_object or keyword in ("not", "if")
            closed[keyword] = _close(content, merged_refs, "", strict, is_part=same_object)
        else:
            closed[keyword] = content
    if not (is_part or merges or path in merged_refs):
        closed |= _closing_keywords(schema, strict)
    return closed


def _closing_keywords(schema: dict[str, Any], strict: bool) -> dict[str, Any]:
    keywords = {}
    is_object = _lists_properties(schema) or (strict and _has_type(schema, "object"))
    additional = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    if is_object and (additional is None or (strict and additional is True)):
        keywords["additionalProperties"] = False
    if "prefixItems" in schema and not schema.keys() & {"items", "unevaluatedItems"}:
        keywords["items"] = False
    return keywords


def _has_type(schema: dict[str, Any], name: str) -> bool:
    types = schema.get("type")
    return types == name or (isinstance(types, list) and name in types)
