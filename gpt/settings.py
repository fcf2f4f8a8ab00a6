"""Settings files: one YAML mapping, type-checked and converted into a frozen dataclass.

The dataclass is the schema: its field names are the keys, its field types are the types of the
values, and a missing key gets the field's default. The error for an unknown key names the most
similar valid key. The dataclass itself checks the ranges of values.
"""

import difflib
import reprlib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from gpt.errors import ConfigError

S = TypeVar("S")

YAML_BYTES_MAX = 1 << 20
MERGED_KEYS_MAX = 10_000
REPR_CHARACTERS_MAX = 80
# Names that are at least as similar as this differ by a misspelling. Names that only have a word in
# common, such as `service_tier` and `service_class`, are less similar.
MISSPELLING_SIMILARITY_MIN = 0.8

# Limits the printed size and depth of a value from a file. With YAML aliases, a short file can have
# a value that is huge when it is printed.
_repr = reprlib.Repr()
_repr.maxlevel = 2
_repr.maxstring = _repr.maxother = REPR_CHARACTERS_MAX


def suggest_nearest(name: str, choices: Iterable[str], similarity_min: float = 0.6) -> str:
    """Return the end of an error message: the choice most similar to `name`, or all choices."""
    names = sorted(choices)
    match = nearest_name(name, names, similarity_min)
    return "choose one of: " + ", ".join(names) if match is None else f"did you mean {match!r}?"


def nearest_name(name: str, choices: Iterable[str], similarity_min: float) -> str | None:
    """Return the choice most similar to `name`; None if no choice is similar enough.

    `similarity_min`: from 0 (any choice) to 1 (equal texts).
    """
    matches = difflib.get_close_matches(name, choices, n=1, cutoff=similarity_min)
    return matches[0] if matches else None


def short_repr(value: object) -> str:
    """Format a value for an error message, as one line of limited length."""
    try:
        text = _repr.repr(value)
    except ValueError:  # Python refuses to print an integer with thousands of digits.
        text = "a value with too many digits"
    return text if len(text) <= REPR_CHARACTERS_MAX else text[:REPR_CHARACTERS_MAX] + "..."


class BoundedYamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader with a limit on the keys that merge keys (`<<`) copy into a mapping.

    Without the limit, a file of 500 bytes can multiply its keys at each level of merge keys.
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        written_keys = len(node.value)
        super().flatten_mapping(node)  # It calls this method for the mappings that are merged.
        if len(node.value) > max(written_keys, MERGED_KEYS_MAX):
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"merge keys (<<) give a mapping more than {MERGED_KEYS_MAX} keys",
                node.start_mark,
            )


def read_yaml(path: Path) -> dict[str, object]:
    """Read the mapping in a YAML file; an empty file is an empty mapping."""
    try:
        with path.open("rb") as file:
            raw = file.read(YAML_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; give the path of a YAML file"
        ) from None
    if len(raw) > YAML_BYTES_MAX:
        raise ConfigError(
            f"{path} is over {YAML_BYTES_MAX} bytes, the limit for a settings file; give the path "
            "of a settings file"
        )
    try:
        mapping = yaml.load(raw.decode(), BoundedYamlLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; each line must be `key: value`") from None
    except Exception as error:
        # Python raises such errors for invalid dates and numbers; PyYAML does not convert them.
        raise ConfigError(
            f"{path} has an invalid value ({' '.join(str(error).split())[:100]}); "
            "put quotes around the value if it is text"
        ) from None
    if mapping is None:
        return {}
    if not isinstance(mapping, dict) or not all(isinstance(key, str) for key in mapping):
        raise ConfigError(f"{path} contains no settings; each line must be `key: value`")
    for key, value in mapping.items():
        if not all(map(_is_plain_text, _texts_in(value))):
            raise ConfigError(
                f"{path}: {short_repr(key)} has a text with a NUL character or a lone surrogate; "
                "remove this character"
            )
    return mapping


def _texts_in(value: object) -> Iterator[str]:
    """Yield the texts in a value of a YAML file, each alias once."""
    seen_ids: set[int] = set()
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict | list) and id(node) not in seen_ids:
            seen_ids.add(id(node))
            pending += node if isinstance(node, list) else [*node, *node.values()]


def _is_plain_text(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


class ComposedSettings:
    """Base class of settings whose keys are divided over several dataclasses, the parts.

    A subclass declares one field per part; the type of the field is a frozen dataclass. All parts
    are in one settings file: the constructor takes the keys of all parts. Each key is the name of a
    field of exactly one part.
    """

    def __init__(self, **settings: Any) -> None:
        for key in settings:
            if key not in setting_fields(type(self)):
                name = type(self).__name__
                raise TypeError(f"{name}.__init__() got an unexpected keyword argument {key!r}")
        for part_name, part_type in _part_types(type(self)).items():
            keys = [key for key in setting_fields(part_type) if key in settings]
            part = part_type(**{key: _as_tuple(settings[key]) for key in keys})
            object.__setattr__(self, part_name, part)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings by key, in the order of the parts and their fields."""
        parts = [getattr(self, part_name) for part_name in _part_types(type(self))]
        return {key: getattr(part, key) for part in parts for key in setting_fields(type(part))}

    def with_fields(self, **settings: Any) -> Self:
        """Return a copy with changed settings; the constructors check all values again."""
        return type(self)(**{**self.to_dict(), **settings})


def _as_tuple(value: Any) -> Any:
    """Return a list as a tuple: the settings are JSON, which has only lists, between processes."""
    return tuple(value) if isinstance(value, list) else value


def setting_fields(settings_type: type[Any]) -> dict[str, "Field[Any]"]:
    """Return the dataclass field of each key. `ComposedSettings` has the keys of all its parts."""
    if issubclass(settings_type, ComposedSettings):
        return {
            key: field
            for part_type in _part_types(settings_type).values()
            for key, field in setting_fields(part_type).items()
        }
    return {field.name: field for field in fields(settings_type)}


def setting_types(settings_type: type[Any]) -> Mapping[str, Any]:
    """Return the type of each key's value. `ComposedSettings` has the keys of all its parts."""
    if issubclass(settings_type, ComposedSettings):
        return {
            key: key_type
            for part_type in _part_types(settings_type).values()
            for key, key_type in setting_types(part_type).items()
        }
    return type_hints(settings_type)


def _part_types(settings_type: type[ComposedSettings]) -> Mapping[str, type[Any]]:
    return type_hints(settings_type)


# The results of `type_hints`. mypy rejects a class as an argument of a `functools.cache`.
_TYPE_HINTS: dict[type[Any], Mapping[str, Any]] = {}


def type_hints(settings_type: type[Any]) -> Mapping[str, Any]:
    """Return the types of the fields of a dataclass.

    `get_type_hints` takes as long as the rest of reading a card, and a server reads ten thousand
    cards when it starts.
    """
    hints = _TYPE_HINTS.get(settings_type)
    if hints is None:
        hints = _TYPE_HINTS[settings_type] = get_type_hints(settings_type)
    return hints


def parse_settings(settings_type: type[S], values: Mapping[str, object], source: str) -> S:
    """Build an instance of `settings_type` from `values`.

    `source`, for example the path of the file, is the beginning of each error message.
    """
    fields_by_name = setting_fields(settings_type)
    for key in values:
        if key not in fields_by_name:
            raise ConfigError(
                f"{source}: unknown key {short_repr(key)}; {suggest_nearest(key, fields_by_name)}"
            )
    for name, field in fields_by_name.items():
        required = field.default is MISSING and field.default_factory is MISSING
        if required and name not in values:
            raise ConfigError(f"{source}: {name!r} is missing; add it, since it has no default")
    hints = setting_types(settings_type)
    return settings_type(
        **{key: _convert_setting(value, hints[key], key, source) for key, value in values.items()}
    )


def _convert_setting(value: object, hint: Any, key: str, source: str) -> Any:
    """Convert `value`, as parsed from the file, to the type `hint`.

    Raise ConfigError if the value cannot have this type.
    """
    if get_origin(hint) in (Union, types.UnionType):
        union_types = get_args(hint)
        if value is None and type(None) in union_types:
            return None
        (hint,) = (member for member in union_types if member is not type(None))
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        # YAML 1.1 parses `1e-3`, which has no dot, as a string.
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    if get_origin(hint) is Literal:
        # YAML 1.1 parses `on` and `off`, which some settings have as values, as booleans.
        if isinstance(value, bool) and (word := "on" if value else "off") in get_args(hint):
            value = word
        hint = str
    if get_origin(hint) is tuple and isinstance(value, list):
        element_type = get_args(hint)[0]
        return tuple(_convert_setting(item, element_type, key, source) for item in value)
    expected_type = get_origin(hint) or hint
    if isinstance(value, expected_type) and not (
        isinstance(value, bool) and expected_type is not bool
    ):
        if expected_type is int and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{source}: {key} is {short_repr(value)}; it must fit into 64 bits")
        return value
    type_descriptions = {
        "str": "a text",
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
    }
    requirement = type_descriptions.get(expected_type.__name__, f"a list ({hint} in Python)")
    raise ConfigError(f"{source}: {key} is {short_repr(value)}; it must be {requirement}")
