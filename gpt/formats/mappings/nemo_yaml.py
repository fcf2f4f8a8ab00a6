"""NeMo config files: reads YAML, fiddle JSON and OmegaConf interpolation as plain data.

The config files of NeMo and Megatron-Bridge name classes and functions to call; this module reads
such a name as a string. Unknown YAML tags are dropped. References of the form ${a.b} are resolved
within the file; other references are recorded as unresolved. `nemo_args` interprets the fields.
"""

import json
import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from gpt.checkpoint.files.file_tree import Span
from gpt.checkpoint.files.restricted_unpickle import Stub
from gpt.errors import CheckpointError
from gpt.settings import short_repr

TEXT_BYTES_MAX = 8 << 20
DEPTH_MAX = 12
INTERPOLATION = re.compile(r"\$\{\s*([\w.]+)\s*\}")
# YAML 1.1 requires a dot in a number with an exponent, so PyYAML reads 1e-5 as a string.
EXPONENT_NUMBER = re.compile(r"[+-]?\d+[eE][+-]?\d+")
FIDDLE_ATTRIBUTE = re.compile(r"Attr\(name='(\w+)'\)|(\w+)")


class _Loader(yaml.SafeLoader):
    """Loader of plain values; refuses merge keys (`<<`), which can expand exponentially."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.YAMLError("it has a merge key, <<")


def _construct_untagged(loader: _Loader, suffix: str, node: yaml.Node) -> Any:
    """Drop an unknown tag and return its value; for a `python/name:` tag, return the name."""
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    name = suffix.partition("python/name:")[2]
    return name or node.value


_Loader.add_multi_constructor("", _construct_untagged)


def read_config(span: Span) -> dict[str, Any]:
    """Read the mapping in a YAML file."""
    try:
        record = yaml.load(span.read(TEXT_BYTES_MAX).decode(), _Loader)
    except (CheckpointError, OSError):
        raise
    # PyYAML does not catch Python's exceptions for a bad date, number or key, or deep nesting.
    except Exception as error:
        raise _unreadable_error(span, error) from None
    if not isinstance(record, dict):
        raise CheckpointError(
            f"{span.path} contains a {type(record).__name__}, not a config; copy it again"
        )
    return record


def read_fiddle_graph(span: Span) -> list[dict[str, Any]]:
    """Read the objects of a fiddle JSON graph that have attributes, and resolve references."""
    try:
        objects = json.loads(span.read(TEXT_BYTES_MAX))["objects"]
        built: dict[str, Any] = {}
        for key in objects:
            _build_object(objects, key, built)
        return [record for record in built.values() if isinstance(record, dict)]
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise _unreadable_error(span, error) from None


def _unreadable_error(span: Span, error: Exception) -> CheckpointError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    return CheckpointError(f"{span.path} is not a readable config ({reason}); copy it again")


def _build_object(objects: Mapping[str, Any], key: str, built: dict[str, Any]) -> Any:
    """Build an object of the graph, only once; a cyclic reference becomes None."""
    if key in built:
        return built[key]
    built[key] = None
    record = objects[key]
    class_name = _class_name(objects, record)
    values = [
        (str(name), _build_value(objects, value, built)) for name, value in record.get("items", [])
    ]
    if class_name.rpartition(".")[2] in ("list", "tuple"):
        built[key] = [value for _, value in values]
    else:
        matches = ((FIDDLE_ATTRIBUTE.fullmatch(name), value) for name, value in values)
        attributes = {match[1] or match[2]: value for match, value in matches if match}
        built[key] = {**attributes, "_target_": class_name}
    return built[key]


def _class_name(objects: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Return an object's class; for a fiddle Config object, return the class that it configures."""
    metadata = record.get("metadata")
    if isinstance(metadata, dict) and metadata.get("type") == "ref":
        metadata = objects.get(str(metadata.get("key")))
    if isinstance(metadata, dict):
        for name, value in metadata.get("items", []):
            match = FIDDLE_ATTRIBUTE.fullmatch(str(name))
            if match and (match[1] or match[2]) == "fn_or_cls":
                return _qualified_name(value)
    return _qualified_name(record.get("type"))


def _build_value(objects: Mapping[str, Any], value: Any, built: dict[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    match value.get("type"):
        case "ref" if value.get("key") in objects:
            return _build_object(objects, value["key"], built)
        case "leaf":
            return value.get("value")
        case "pyref" | "enum":
            return _qualified_name(value)
    return None


def _qualified_name(value: Any) -> str:
    """Return the qualified name of the class or function in a record."""
    if isinstance(value, Mapping):
        return f"{value.get('module', '')}.{value.get('name', '')}"
    return str(value)


class NemoConfig:
    """The fields of a config, with references resolved; `location` names the file in messages."""

    def __init__(
        self,
        record: Mapping[str, Any],
        location: str,
        ancestors: tuple[Mapping[str, Any], ...] = (),
    ) -> None:
        self.record = record
        self.location = location
        self.scopes = (*ancestors, record)  # The mappings from the whole config to this section.
        self.unresolved_references: dict[str, str] = {}  # By field name.

    def __contains__(self, name: str) -> bool:
        return name in self.record

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field's value, or the default if it is absent, null or unresolved."""
        value = _resolve(self.record.get(name), self.scopes, 0)
        if isinstance(value, str) and EXPONENT_NUMBER.fullmatch(value):
            return float(value)
        if isinstance(value, str) and "${" in value:
            self.unresolved_references[name] = value
            return default
        return default if value is None else value

    def text(self, name: str, default: str = "") -> str:
        value = self.get(name, default)
        return value if isinstance(value, str) else short_repr(value)

    def section(self, name: str) -> "NemoConfig":
        inner = self.get(name)
        inner = inner if isinstance(inner, Mapping) else {}
        return NemoConfig(inner, f"{self.location}: {name}", self.scopes)


def _resolve(value: Any, scopes: tuple[Mapping[str, Any], ...], depth: int) -> Any:
    """Resolve a reference in the mapping `scopes[-1]`; return it unchanged if impossible."""
    match = INTERPOLATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or depth > DEPTH_MAX:
        return value
    path = match[1].lstrip(".")
    # Leading dots make a path relative: one dot to the mapping of the reference, two to its parent.
    levels_up = len(match[1]) - len(path)
    if levels_up > len(scopes):
        return value
    start_scopes = scopes[: len(scopes) + 1 - levels_up] if levels_up else scopes[:1]
    # If the record is only the model section of a config, references still begin with its name.
    shortened_paths = () if levels_up else (path.removeprefix("model."), path.removeprefix("cfg."))
    for candidate in (path, *shortened_paths):
        visited_scopes, node = start_scopes, start_scopes[-1].get(candidate.split(".")[0])
        for step in candidate.split(".")[1:]:
            mapping = node if isinstance(node, Mapping) else {}
            visited_scopes, node = (*visited_scopes, mapping), mapping.get(step)
        if node is not None:
            return _resolve(node, visited_scopes, depth + 1)
    return value


def unwrap_omegaconf(value: Any, depth: int = 0) -> Any:
    """Convert OmegaConf containers, read from a pickle as stubs, to dicts, lists and values."""
    if depth > 2 * DEPTH_MAX:
        return None
    if isinstance(value, Stub):
        fields = value.fields
        if "_content" in fields:
            return unwrap_omegaconf(fields["_content"], depth + 1)
        if "_val" in fields:
            return unwrap_omegaconf(fields["_val"], depth + 1)
        return unwrap_omegaconf(fields, depth + 1) if fields else None
    if isinstance(value, dict):
        return {
            str(key): unwrap_omegaconf(inner, depth + 1)
            for key, inner in value.items()
            if isinstance(key, Hashable)
        }
    if isinstance(value, list | tuple):
        return [unwrap_omegaconf(inner, depth + 1) for inner in value]
    return value
