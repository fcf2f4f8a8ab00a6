"""Checks Kubernetes objects against tables of their types in `kubernetes_schemas`.

A table lists the fields of a custom resource's types, for kinds whose schemas no package has. A
field's type is a scalar, a list of allowed strings, `list of TYPE`, `map of TYPE`, a type of the
same table, or `core.TYPE`, a type of Kubernetes itself; `required` may follow. Values of `core`
types are returned to the caller, which checks them with Kubernetes' own schemas
(tests/scale_out/test_kubernetes_schemas.py).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "kubernetes_schemas"
PICKER_TABLE = "endpointpickerconfig"
# Fields of every object.
OBJECT_FIELDS = {"apiVersion": "string", "kind": "string", "metadata": "core.ObjectMeta"}
DURATION = re.compile(r"(\d+(\.\d+)?(ms|s|m|h))+")
SCALARS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "quantity": lambda value: isinstance(value, str | int) and not isinstance(value, bool),
    "duration": lambda value: isinstance(value, str) and bool(DURATION.fullmatch(value)),
    "any": lambda value: True,
}


@dataclass(frozen=True)
class CoreValue:
    """A value of a type of Kubernetes itself. Its required fields may be in other objects."""

    path: str
    type_name: str
    value: Any
    is_partial: bool = False  # Only some fields of the type: the others are of another type.


@dataclass
class Check:
    """The result of a check: faults, and values that the table does not describe."""

    faults: list[str] = field(default_factory=list)
    core_values: list[CoreValue] = field(default_factory=list)


@cache
def read_table(name: str) -> Any:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


@cache
def kinds() -> dict[str, str]:
    """Return the name of the table of each kind, by `apiVersion kind`."""
    return {kind: path.stem for path in sorted(FOLDER.glob("*.yaml")) for kind in _kinds(path.stem)}


def _kinds(name: str) -> dict[str, str]:
    types: dict[str, str] = read_table(name)["kinds"]
    return types


def check_object(value: Any) -> Check:
    """Check an object whose kind is in one of the tables."""
    kind = f"{value.get('apiVersion')} {value.get('kind')}"
    if kind not in kinds():
        return Check([f"{kind}: no table has this kind"])
    name = kinds()[kind]
    check = Check()
    _TypeChecker(read_table(name)["types"], check).check_fields(
        value["kind"], value, {**OBJECT_FIELDS, **read_table(name)["types"][_kinds(name)[kind]]}
    )
    return check


def check_value(value: Any, table: str, type_name: str, path: str) -> Check:
    """Check a value of a type of a table."""
    check = Check()
    _TypeChecker(read_table(table)["types"], check).check(path, value, type_name)
    return check


def picker_faults(config: Any, flags: list[str]) -> list[str]:
    """Check an EndpointPickerConfig, its plugins and their parameters, and the picker's flags."""
    faults = check_object(config).faults
    table = read_table(PICKER_TABLE)
    names = []
    for plugin in config.get("plugins", ()):
        plugin_type = plugin.get("type")
        names.append(plugin.get("name", plugin_type))
        if plugin_type not in table["parameters"]:
            faults.append(f"plugins: {plugin_type} is no plugin of the table")
            continue
        parameters = plugin.get("parameters", {})
        parameters_type = table["parameters"][plugin_type]
        faults += check_value(parameters, PICKER_TABLE, parameters_type, plugin_type).faults
        if plugin_type in table["experimental"] and "--allow-experimental-plugins" not in flags:
            faults.append(f"plugins: {plugin_type} needs --allow-experimental-plugins")
    faults += [f"pluginRef: {name} is no plugin" for name in _references(config) - {*names}]
    gates = config.get("featureGates", ())
    faults += [f"featureGates: {gate}" for gate in gates if gate not in table["feature_gates"]]
    flag_names = [flag.removeprefix("--").partition("=")[0] for flag in flags]
    return faults + [f"flag --{name}" for name in flag_names if name not in table["flags"]]


def _references(node: Any) -> set[str]:
    """Return all values of `pluginRef`."""
    if isinstance(node, list):
        return {name for value in node for name in _references(value)}
    if not isinstance(node, dict):
        return set()
    own = {node["pluginRef"]} if "pluginRef" in node else set()
    return own | {name for value in node.values() for name in _references(value)}


class _TypeChecker:
    """Compares values with the types of one table."""

    def __init__(self, types: Any, check: Check) -> None:
        self._types = types
        self._check = check

    def check(self, path: str, value: Any, type_text: Any) -> None:
        if isinstance(type_text, list):
            if value not in type_text:
                self._add_fault(path, f"{value!r} is none of {', '.join(type_text)}")
            return
        container, separator, item_type = type_text.partition(" of ")
        if separator:
            self._check_items(path, value, container, item_type)
        elif type_text in SCALARS:
            if not SCALARS[type_text](value):
                self._add_fault(path, f"{value!r} is no {type_text}")
        elif type_text.startswith("core."):
            self._check.core_values.append(CoreValue(path, type_text.removeprefix("core."), value))
        else:
            self.check_fields(path, value, self._types[type_text])

    def check_fields(self, path: str, value: Any, fields: Any) -> None:
        if not isinstance(value, dict):
            self._add_fault(path, f"{value!r} is no object")
            return
        table_fields, core_types = self._all_fields(fields)
        other_fields = {}
        for name, item in value.items():
            if name in table_fields:
                self.check(f"{path}.{name}", item, table_fields[name][0])
            elif core_types:
                other_fields[name] = item
            else:
                self._add_fault(path, f"unknown field {name!r}")
        for name, (_, is_required) in table_fields.items():
            if is_required and name not in value:
                self._add_fault(path, f"{name} is required")
        for core_type in core_types:
            self._check.core_values.append(CoreValue(path, core_type, other_fields, True))

    def _all_fields(self, fields: Any) -> tuple[dict[str, tuple[Any, bool]], list[str]]:
        """Return a type's fields, with whether they are required, and its types of Kubernetes."""
        all_fields: dict[str, tuple[Any, bool]] = {}
        core_types: list[str] = []
        for name in fields.get("+", ()):
            if name.startswith("core."):
                core_types.append(name.removeprefix("core."))
            else:
                inlined_fields, inlined_core_types = self._all_fields(self._types[name])
                all_fields |= inlined_fields
                core_types += inlined_core_types
        for name, type_text in fields.items():
            if name == "+":
                continue
            is_required = isinstance(type_text, str) and type_text.endswith(" required")
            text = type_text.removesuffix(" required") if is_required else type_text
            all_fields[name] = (text, is_required)
        return all_fields, core_types

    def _check_items(self, path: str, value: Any, container: str, item_type: str) -> None:
        if not isinstance(value, {"list": list, "map": dict}[container]):
            self._add_fault(path, f"{value!r} is no {container}")
            return
        items = enumerate(value) if isinstance(value, list) else value.items()
        for key, item in items:
            self.check(f"{path}[{key}]", item, item_type)

    def _add_fault(self, path: str, text: str) -> None:
        self._check.faults.append(f"{path}: {text}")
