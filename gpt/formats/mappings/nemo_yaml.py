"""The configs that NeMo and Megatron-Bridge write, as plain data: YAML, fiddle's JSON, OmegaConf.

They name classes to be made and functions to be called; here such a name stays a text. Unknown tags
are left out, references of the form ${a.b} are followed within the file, and a reference that needs
more than that is kept as one that nothing answers. It knows no fields by name.
"""

import json
import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from gpt.checkpoint.files.file_tree import Span
from gpt.checkpoint.files.restricted_unpickle import Stub
from gpt.errors import CheckpointError
from gpt.settings import shown

TEXT_BYTES_MAX = 8 << 20
DEPTH_MAX = 12
REFERENCE = re.compile(r"\$\{\s*([\w.]+)\s*\}")
# YAML 1.1 wants a dot in a number with an exponent; whoever writes by hand does not.
EXPONENT = re.compile(r"[+-]?\d+[eE][+-]?\d+")
ATTRIBUTE = re.compile(r"Attr\(name='(\w+)'\)|(\w+)")


class _Loader(yaml.SafeLoader):
    """Plain values only; `<<` is refused, since merges of merges grow without bound."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.YAMLError("it has a merge key, <<")


def _plain(loader: _Loader, suffix: str, node: yaml.Node) -> Any:
    """What an unknown tag stands before, without the tag; a function's name where that is all."""
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    name = suffix.partition("python/name:")[2]
    return name or node.value


_Loader.add_multi_constructor("", _plain)


def read_config(span: Span) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        record = yaml.load(span.read(TEXT_BYTES_MAX).decode(), _Loader)
    except (CheckpointError, OSError):
        raise
    # PyYAML lets through whatever Python says to a bad date, number, key or depth.
    except Exception as error:
        raise _unreadable(span, error) from None
    if not isinstance(record, dict):
        raise CheckpointError(f"{span.path} holds no config, but a {type(record).__name__}")
    return record


def read_graph(span: Span) -> list[dict[str, Any]]:
    """The objects of fiddle's JSON that have attributes, each with what it refers to inside."""
    try:
        objects = json.loads(span.read(TEXT_BYTES_MAX))["objects"]
        made: dict[str, Any] = {}
        for key in objects:
            _object(objects, key, made)
        return [one for one in made.values() if isinstance(one, dict)]
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise _unreadable(span, error) from None


def _unreadable(span: Span, error: Exception) -> CheckpointError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    return CheckpointError(
        f"{span.path} is not a config that can be read ({reason}); copy it again"
    )


def _object(objects: Mapping[str, Any], key: str, made: dict[str, Any]) -> Any:
    """Each is made once, whoever refers to it; what refers to itself finds nothing there."""
    if key in made:
        return made[key]
    made[key] = None
    record = objects[key]
    kind = _kind(objects, record)
    values = [(str(name), _value(objects, value, made)) for name, value in record.get("items", [])]
    if kind.rpartition(".")[2] in ("list", "tuple"):
        made[key] = [value for _, value in values]
    else:
        found = ((ATTRIBUTE.fullmatch(name), value) for name, value in values)
        named = {match[1] or match[2]: value for match, value in found if match}
        made[key] = {**named, "_target_": kind}
    return made[key]


def _kind(objects: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """The class that an object is of; fiddle's own hold the one that they would make."""
    about = record.get("metadata")
    if isinstance(about, dict) and about.get("type") == "ref":
        about = objects.get(str(about.get("key")))
    if isinstance(about, dict):
        for name, value in about.get("items", []):
            match = ATTRIBUTE.fullmatch(str(name))
            if match and (match[1] or match[2]) == "fn_or_cls":
                return _name(value)
    return _name(record.get("type"))


def _value(objects: Mapping[str, Any], value: Any, made: dict[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    match value.get("type"):
        case "ref" if value.get("key") in objects:
            return _object(objects, value["key"], made)
        case "leaf":
            return value.get("value")
        case "pyref" | "enum":
            return _name(value)
    return None


def _name(value: Any) -> str:
    """The class or the function that a record stands for."""
    if isinstance(value, Mapping):
        return f"{value.get('module', '')}.{value.get('name', '')}"
    return str(value)


class Fields:
    """A config's fields, references among them followed; `where` is its file."""

    def __init__(
        self, record: Mapping[str, Any], where: str, around: tuple[Mapping[str, Any], ...] = ()
    ) -> None:
        self.record, self.where = record, where
        self.places = (*around, record)  # From the whole config to this part of it.
        self.unanswered: dict[str, str] = {}  # Fields whose reference leads nowhere.

    def __contains__(self, name: str) -> bool:
        return name in self.record

    def get(self, name: str, absent: Any = None) -> Any:
        """A field; None, as OmegaConf's null, counts as absent."""
        value = _resolved(self.record.get(name), self.places, 0)
        if isinstance(value, str) and EXPONENT.fullmatch(value):
            return float(value)
        if isinstance(value, str) and "${" in value:
            self.unanswered[name] = value
            return absent
        return absent if value is None else value

    def text(self, name: str, absent: str = "") -> str:
        value = self.get(name, absent)
        return value if isinstance(value, str) else shown(value)

    def under(self, name: str) -> "Fields":
        inner = self.get(name)
        inner = inner if isinstance(inner, Mapping) else {}
        return Fields(inner, f"{self.where}: {name}", self.places)


def _resolved(value: Any, places: tuple[Mapping[str, Any], ...], depth: int) -> Any:
    """What a reference in the last of `places` leads to; itself if to nothing."""
    found = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if found is None or depth > DEPTH_MAX:
        return value
    path = found[1].lstrip(".")
    up = len(found[1]) - len(path)  # One dot is the part that it stands in, two the one around.
    if up > len(places):
        return value
    start = places[: len(places) + 1 - up] if up else places[:1]
    # The model's section was cut from a whole config, whose references name it.
    cut = () if up else (path.removeprefix("model."), path.removeprefix("cfg."))
    for way in (path, *cut):
        seen, place = start, start[-1].get(way.split(".")[0])
        for step in way.split(".")[1:]:
            inner = place if isinstance(place, Mapping) else {}
            seen, place = (*seen, inner), inner.get(step)
        if place is not None:
            return _resolved(place, seen, depth + 1)
    return value


def unwrapped(value: Any, depth: int = 0) -> Any:
    """OmegaConf's containers, as a pickle holds them, as dicts, lists and values."""
    if depth > 2 * DEPTH_MAX:
        return None
    if isinstance(value, Stub):
        fields = value.fields
        if "_content" in fields:
            return unwrapped(fields["_content"], depth + 1)
        if "_val" in fields:
            return unwrapped(fields["_val"], depth + 1)
        return unwrapped(fields, depth + 1) if fields else None
    if isinstance(value, dict):
        return {
            str(key): unwrapped(inner, depth + 1)
            for key, inner in value.items()
            if isinstance(key, Hashable)
        }
    if isinstance(value, list | tuple):
        return [unwrapped(inner, depth + 1) for inner in value]
    return value
