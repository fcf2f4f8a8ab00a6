"""A program's settings: one frozen dataclass, filled from one YAML file.

The dataclass is the schema: its fields are the keys, their types are checked, their defaults hold.
An unknown key is an error that names the nearest known one. What a value means, and whether it is
in range, is the dataclass's own business.
"""

import difflib
import reprlib
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from gpt.errors import ConfigError

S = TypeVar("S")

YAML_BYTES_MAX = 1 << 20
SHOWN_CHARACTERS_MAX = 80

# What a file says can be of any size and depth, and aliases can make it grow as it is printed.
_repr = reprlib.Repr()
_repr.maxlevel = 2
_repr.maxstring = _repr.maxother = SHOWN_CHARACTERS_MAX


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence: what was perhaps meant, else all that is known."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else "known are: " + ", ".join(names)


def shown(value: object) -> str:
    """A value as a message can hold it: on one line, and short whatever it is."""
    try:
        text = _repr.repr(value)
    except ValueError:  # Python does not write numbers of thousands of digits.
        text = "a value with too many digits"
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[:SHOWN_CHARACTERS_MAX] + "..."


def read_yaml(path: Path) -> dict[str, object]:
    """The mapping that a YAML file holds; an empty file is an empty mapping."""
    try:
        with path.open("rb") as file:
            raw = file.read(YAML_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; give the path of a YAML file"
        ) from None
    if len(raw) > YAML_BYTES_MAX:
        raise ConfigError(f"{path} is over {YAML_BYTES_MAX} bytes; that is no settings file")
    try:
        record = yaml.safe_load(raw.decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; each line must be `key: value`") from None
    except Exception as error:
        # PyYAML lets through whatever Python says to a bad date or number, by any name.
        raise ConfigError(
            f"{path} has a value that YAML cannot hold ({' '.join(str(error).split())[:100]}); "
            "put quotes around it if it is a text"
        ) from None
    if record is None:
        return {}
    if not isinstance(record, dict) or not all(isinstance(key, str) for key in record):
        raise ConfigError(f"{path} holds no settings; each line of it must be `key: value`")
    return record


def settings(kind: type[S], values: Mapping[str, object], where: str) -> S:
    """Build the dataclass `kind`; `where` says in messages where the values come from."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {shown(key)}; {nearest(key, known)}")
    for name, field in known.items():
        required = field.default is MISSING and field.default_factory is MISSING
        if required and name not in values:
            raise ConfigError(f"{where}: {name!r} is missing; it has no default")
    hints = get_type_hints(kind)
    return kind(**{key: _checked(value, hints[key], key, where) for key, value in values.items()})


def _checked(value: object, hint: Any, key: str, where: str) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = get_args(hint)
        if value is None and type(None) in kinds:
            return None
        (hint,) = (kind for kind in kinds if kind is not type(None))
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        # YAML 1.1 reads `1e-3`, which has no dot, as a text.
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    if get_origin(hint) is tuple and isinstance(value, list):
        element = get_args(hint)[0]
        return tuple(_checked(item, element, key, where) for item in value)
    kind = get_origin(hint) or hint
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        if kind is int and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{where}: {key} is {shown(value)}; it must fit into 64 bits")
        return value
    words = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}
    wanted = words.get(kind.__name__, f"a list, as is {hint}")
    raise ConfigError(f"{where}: {key} is {shown(value)}; it must be {wanted}")
