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
    """Return the value of a node without its unknown tag; for a `python/name:` tag, the name."""
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    name = suffix.partition("python/name:")[2]
    return name or node.value


_Loader.add_multi_constructor("", _construct_untagged)


def read_config(span: Span) -> dict[str, Any]:
    """Return the mapping in a YAML file."""
    try:
        record = yaml.load(span.read(TEXT_BYTES_MAX).decode(), _Loader)
    except (CheckpointError, OSError):
        raise
    # PyYAML raises YAMLError for wrong syntax, and other exceptions for a bad date, number or key
    # and for deep nesting.
    except Exception as error:
        raise _unreadable_error(span, error) from None
    if not isinstance(record, dict):
        raise CheckpointError(
            f"{span.path} contains a {type(record).__name__}, not a config; copy it again"
        )
    return record


def read_fiddle_graph(span: Span) -> list[dict[str, Any]]:
    """Return a dict for each object with attributes in a fiddle JSON graph.

    In the dicts, a reference to an object is replaced by the object.
    """
    try:
        objects = json.loads(span.read(TEXT_BYTES_MAX))["objects"]
        object_cache: dict[str, Any] = {}
        for key in objects:
            _build_object(objects, key, object_cache)
        return [record for record in object_cache.values() if isinstance(record, dict)]
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise _unreadable_error(span, error) from None


def _unreadable_error(span: Span, error: Exception) -> CheckpointError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    return CheckpointError(f"{span.path} is not a readable config ({reason}); copy it again")


def _build_object(objects: Mapping[str, Any], key: str, object_cache: dict[str, Any]) -> Any:
    """Return an object of the graph as a list or dict; a cyclic reference becomes None."""
    if key in object_cache:
        return object_cache[key]
    object_cache[key] = None
    record = objects[key]
    class_name = _class_name(objects, record)
    values = [
        (str(name), _build_value(objects, value, object_cache))
        for name, value in record.get("items", [])
    ]
    if class_name.rpartition(".")[2] in ("list", "tuple"):
        object_cache[key] = [value for _, value in values]
    else:
        attributes = {}
        for name, value in values:
            match = FIDDLE_ATTRIBUTE.fullmatch(name)
            if match:
                attributes[match[1] or match[2]] = value
        object_cache[key] = {**attributes, "_target_": class_name}
    return object_cache[key]


def _class_name(objects: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Return the name of an object's class; for a fiddle Config, the class that it configures."""
    metadata = record.get("metadata")
    if isinstance(metadata, dict) and metadata.get("type") == "ref":
        metadata = objects.get(str(metadata.get("key")))
    if isinstance(metadata, dict):
        for name, value in metadata.get("items", []):
            match = FIDDLE_ATTRIBUTE.fullmatch(str(name))
            if match and (match[1] or match[2]) == "fn_or_cls":
                return _qualified_name(value)
    return _qualified_name(record.get("type"))


def _build_value(objects: Mapping[str, Any], value: Any, object_cache: dict[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    match value.get("type"):
        case "ref" if value.get("key") in objects:
            return _build_object(objects, value["key"], object_cache)
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
        self.scopes = (*ancestors, record)  # The whole config first, this section last.
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
        """Return the fields of a nested mapping; the section is empty if the mapping is absent."""
        record = self.get(name)
        record = record if isinstance(record, Mapping) else {}
        return NemoConfig(record, f"{self.location}: {name}", self.scopes)


def _resolve(value: Any, scopes: tuple[Mapping[str, Any], ...], depth: int) -> Any:
    """Return the value that `value` refers to, if `value` is a reference `${...}`.

    `scopes` are the mappings that contain the reference: the whole config first, the innermost
    mapping last. Other values, and references that cannot be resolved, are returned unchanged.
    """
    match = INTERPOLATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or depth > DEPTH_MAX:
        return value
    path = match[1].lstrip(".")
    # Leading dots make a path relative. One dot: to the mapping that contains the reference. Two
    # dots: to the parent of this mapping.
    leading_dots = len(match[1]) - len(path)
    if leading_dots > len(scopes):
        return value
    start_scopes = scopes[: len(scopes) + 1 - leading_dots] if leading_dots else scopes[:1]
    candidates = [path]
    if not leading_dots:
        # The record may be only the section `model` or `cfg` of a config; its references still
        # begin with the name of the section.
        candidates += [path.removeprefix("model."), path.removeprefix("cfg.")]
    for candidate in candidates:
        first_key, *inner_keys = candidate.split(".")
        node_scopes = start_scopes
        node = start_scopes[-1].get(first_key)
        for key in inner_keys:
            mapping = node if isinstance(node, Mapping) else {}
            node_scopes = (*node_scopes, mapping)
            node = mapping.get(key)
        if node is not None:
            return _resolve(node, node_scopes, depth + 1)
    return value


def unwrap_omegaconf(value: Any, depth: int = 0) -> Any:
    """Convert OmegaConf containers, which are unpickled as stubs, to dicts, lists and scalars.

    Values that are nested too deeply become None.
    """
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
