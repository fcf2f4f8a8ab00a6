"""Removal of unset fields from JSON bodies: only nulls of known types and fields without effect."""

import json
from typing import Any

import msgspec
import pytest

from serving.frontend.json_fields import remove_unset_fields


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A nested object."""

    text: str = ""
    schema: msgspec.Raw = msgspec.Raw(b"null")


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """A request body."""

    name: str | None = None
    part: Part | None = None
    parts: str | list[Part] | None = None
    free: dict[str, Any] | None = None


NEUTRAL = [(Body, "mode", "auto"), (Part, "index", 0)]


def clean(body: Any) -> Any:
    data = remove_unset_fields(json.dumps(body).encode(), Body, lambda *field: field in NEUTRAL)
    return json.loads(data)


def is_never_neutral(*field: Any) -> bool:
    return False


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"unknown": None, "name": None, "part": None}, {}),
        ({"mode": "auto", "name": "a"}, {"name": "a"}),
        ({"mode": "other"}, {"mode": "other"}),
        ({"part": {"text": None, "unknown": None}}, {"part": {}}),
        ({"parts": [{"text": "a", "unknown": None}, {}]}, {"parts": [{"text": "a"}, {}]}),
        ({"parts": "[null]"}, {"parts": "[null]"}),
        # The type does not describe these objects, and null is a value in them.
        ({"free": {"a": None}}, {"free": {"a": None}}),
        ({"part": {"schema": {"enum": [None]}}}, {"part": {"schema": {"enum": [None]}}}),
        # The type of an object decides which of its fields have no effect.
        ({"part": {"mode": "auto"}}, {"part": {"mode": "auto"}}),
        ({"index": 0, "part": {"index": 0}}, {"index": 0, "part": {}}),
        ({"parts": [{"index": 0, "text": "a"}]}, {"parts": [{"text": "a"}]}),
        ({"parts": [None, 3]}, {"parts": [None, 3]}),
    ],
)
def test_unset_fields_are_removed(body: Any, expected: Any) -> None:
    assert clean(body) == expected


def test_numbers_and_white_space_of_schemas_are_kept() -> None:
    schema = b'{ "maximum" : 1.000000000000000000001 }'
    data = b'{"part" : {"schema": ' + schema + b' , "x" : null }}'
    assert schema in remove_unset_fields(data, Body, is_never_neutral)


@pytest.mark.parametrize("data", [b"[]", b"null", b'{"part": {"text": 1'])
def test_bodies_that_are_no_objects_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        remove_unset_fields(data, Body, is_never_neutral)
