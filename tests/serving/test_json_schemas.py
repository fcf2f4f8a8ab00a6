"""JSON schemas of guides: which objects are closed."""

from typing import Any

import pytest

from serving.json_schemas import close_schema

NUMBER = {"type": "integer"}
A, B = {"properties": {"a": NUMBER}}, {"properties": {"b": NUMBER}}
CLOSED: dict[str, Any] = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"type": "object", **A}, {"type": "object", **A, **CLOSED}),
        ({"patternProperties": {"^x": NUMBER}}, {"patternProperties": {"^x": NUMBER}, **CLOSED}),
        # Schemas without listed properties accept any object.
        ({"type": "object"}, {"type": "object"}),
        ({"type": "array"}, {"type": "array"}),
        (True, True),
        ("text", "text"),
        # A schema may decide for itself.
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "additionalProperties": NUMBER}, {**A, "additionalProperties": NUMBER}),
        ({**A, "unevaluatedProperties": True}, {**A, "unevaluatedProperties": True}),
        # Nested objects, definitions and alternatives.
        (
            {"properties": {"x": A, "properties": B}},
            {"properties": {"x": {**A, **CLOSED}, "properties": {**B, **CLOSED}}, **CLOSED},
        ),
        (
            {"$defs": {"A": A}, "$ref": "#/$defs/A"},
            {"$defs": {"A": A | CLOSED}, "$ref": "#/$defs/A"},
        ),
        ({"items": A}, {"items": A | CLOSED}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [A | CLOSED, {"type": "null"}]}),
        ({"allOf": [A]}, {"allOf": [A | CLOSED]}),
        ({"prefixItems": [NUMBER]}, {"prefixItems": [NUMBER], "items": False}),
        (
            {"prefixItems": [NUMBER], "items": NUMBER},
            {"prefixItems": [NUMBER], "items": NUMBER},
        ),
        # Examples and defaults are not schemas.
        ({"const": A, "enum": [A], "default": A}, {"const": A, "enum": [A], "default": A}),
        # The parts of one object stay open, because each would forbid the others' properties.
        ({"allOf": [A, B]}, {"allOf": [A, B]}),
        ({**A, "anyOf": [B, {"required": ["a"]}]}, {**A, "anyOf": [B, {"required": ["a"]}]}),
        ({**A, "anyOf": [{"required": ["a"]}]}, {**A, "anyOf": [{"required": ["a"]}], **CLOSED}),
        ({"allOf": [A, {"anyOf": [B]}]}, {"allOf": [A, {"anyOf": [B]}]}),
        (
            {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]},
            {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]},
        ),
        ({"not": A}, {"not": A}),
    ],
    ids=str,
)
def test_objects_with_listed_properties_are_closed(schema: Any, closed: Any) -> None:
    assert close_schema(schema) == closed


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"type": "object"}, {"type": "object", **CLOSED}),
        ({"type": ["object", "null"]}, {"type": ["object", "null"], **CLOSED}),
        ({**A, "additionalProperties": True}, A | CLOSED),
        ({**A, "additionalProperties": NUMBER}, {**A, "additionalProperties": NUMBER}),
        ({"type": "string"}, {"type": "string"}),
    ],
    ids=str,
)
def test_strict_schemas_are_closed_without_listed_properties(schema: Any, closed: Any) -> None:
    assert close_schema(schema, strict=True) == closed
