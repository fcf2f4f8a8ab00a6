"""User-visible surface, part 4: log events and environment variables, read from source text.

A log event is any string that begins with `event=`; an environment variable is any key of
`os.environ`. The record does not contain the module or function of a text.
"""

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOT_PRODUCT = {"tests", "docs", "build", "dist", "bench", "examples"}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
VARIABLE = re.compile(r"_?[A-Z][A-Z0-9_]+")
FIELD = re.compile(r"""(\w+)=('[^']*'|"[^"]*"|\S+)""")
PLACEHOLDER = re.compile(r"%[-+ #0-9.]*[a-zA-Z]")
PARAMETER = "%s"
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
PARSED = re.compile(r"event=\w|environ|getenv|\[\"[A-Z][A-Z0-9_]+\"\]")


@cache
def _texts() -> tuple[str, ...]:
    """Return the text of every Python module of the product."""
    files = [*ROOT.glob("*.py")]
    for folder in sorted(ROOT.iterdir()):
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in NOT_PRODUCT:
            files += folder.rglob("*.py")
    return tuple(file.read_text() for file in sorted(files) if not GENERATED.search(file.name))


@cache
def _modules() -> tuple[ast.Module, ...]:
    """Return the syntax trees of modules that may log an event or read the environment."""
    return tuple(ast.parse(text) for text in _texts() if PARSED.search(text))


@cache
def _nodes(module: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(module))


def words(pattern: str) -> list[str]:
    """Return the quoted words of the product: candidates for words that an interface accepts."""
    quoted = re.compile(rf"[\"']({pattern})[\"']")
    return sorted({word for text in _texts() for word in quoted.findall(text)})


def log_events() -> dict[str, list[str]]:
    """Return, by event name, a line with level and fields for each distinct log statement."""
    events: dict[str, set[str]] = {}
    for module in _modules():
        for template, level in _templates(module):
            event, *fields = _fields(template)
            line = " ".join([level, *fields]).strip()
            events.setdefault(event.removeprefix("event="), set()).add(line)
    return {event: sorted(lines) for event, lines in sorted(events.items())}


def _templates(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the format strings that begin with `event=`, with their log levels."""
    # The first part of an f-string is also a separate node, which must not be yielded again.
    nested: set[ast.AST] = set()
    scopes = [
        node for node in _nodes(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for scope in (*scopes, module):
        calls = [node for node in ast.walk(scope) if _logs_event(node, nested)]
        local = _local_strings(scope) if calls else {}
        for call in calls:
            assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            level = "error" if call.func.attr == "exception" else call.func.attr
            nested.update(ast.walk(call.args[0]))
            yield _expand(call, local), level
    for node in _nodes(module):
        if node not in nested and _begins_event(node):
            nested.update(ast.walk(node))
            yield _text(node) or "", ""


def _logs_event(node: ast.AST, nested: set[ast.AST]) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return False
    message = node.args[0]
    return node.func.attr in LEVELS and message not in nested and _begins_event(message)


def _local_strings(function: ast.AST) -> dict[str, str]:
    """Return the format strings that are assigned to local variables, by variable name."""
    strings = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = _text(node.value)
            if text is not None:
                strings[node.targets[0].id] = text
    return strings


def _begins_event(node: ast.AST) -> bool:
    text = _text(node)
    return text is not None and re.match(r"event=\w", text) is not None


def _text(node: ast.AST) -> str | None:
    """Return the text of a constant or f-string, with a placeholder for each expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (_text(value) for value in node.values)
        return "".join(PARAMETER if part is None else part for part in parts)
    return None


def _expand(call: ast.Call, local: dict[str, str]) -> str:
    """Return the format string after insertion of the arguments that are format strings."""
    arguments = iter(call.args[1:])

    def insert(match: re.Match[str]) -> str:
        argument = next(arguments, None)
        return local.get(argument.id, PARAMETER) if isinstance(argument, ast.Name) else PARAMETER

    return PLACEHOLDER.sub(insert, _text(call.args[0]) or "")


def _fields(template: str) -> list[str]:
    """Return `key`, or `key=word` if the word is constant; sentences are not recorded."""
    fields = []
    for key, value in FIELD.findall(template):
        fixed = not value.startswith(("'", '"')) and not PLACEHOLDER.search(value)
        fields.append(f"{key}={value}" if fixed else key)
    return fields


def environment_variables(other_keys: Collection[str]) -> list[str]:
    """Return the environment variables that the product reads or sets for its child processes.

    `other_keys` are upper-case keys of other mappings.
    """
    variables: set[str] = set()
    for module in _modules():
        for node in _nodes(module):
            for key in _keys(node):
                variables.update(filter(VARIABLE.fullmatch, _words(key)))
    return sorted(variables - {*other_keys})


def _keys(node: ast.AST) -> Iterator[ast.expr]:
    """Yield keys of `os.environ`, and constant keys of any mapping, which may be a copy of it."""
    if isinstance(node, ast.Subscript):
        if _is_environment(node.value) or isinstance(node.slice, ast.Constant):
            yield node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        method = node.func.attr
        key = node.args[0]
        is_key = _is_environment(node.func.value) or isinstance(key, ast.Constant)
        if method == "getenv" or (method in ("get", "setdefault", "pop") and is_key):
            yield key
    elif isinstance(node, ast.Compare) and _is_environment(node.comparators[0]):
        yield node.left
    elif isinstance(node, ast.BinOp) and isinstance(node.right, ast.Call):
        keys = node.right.func
        if isinstance(keys, ast.Attribute) and _is_environment(keys.value):
            yield node.left


def _is_environment(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def _words(key: ast.expr) -> set[str]:
    """Return the possible texts of an expression: a constant, or a name set to constants."""
    if isinstance(key, ast.Constant):
        return {str(key.value)}
    return _constants().get(key.id, set()) if isinstance(key, ast.Name) else set()


@cache
def _constants() -> dict[str, set[str]]:
    """Return the texts, or collections of texts, that modules assign to names at the top level."""
    texts_by_name: dict[str, set[str]] = {}
    for module in _modules():
        for node in module.body:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    _assign(target, node.value, texts_by_name)
    return texts_by_name


def _assign(target: ast.expr, value: ast.expr, texts_by_name: dict[str, set[str]]) -> None:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for name, element in zip(target.elts, value.elts, strict=True):
            _assign(name, element, texts_by_name)
    elif isinstance(target, ast.Name):
        parts: list[Any] = value.elts if isinstance(value, ast.Set | ast.Tuple) else [value]
        texts = {element.value for element in parts if isinstance(element, ast.Constant)}
        texts_by_name.setdefault(target.id, set()).update(
            text for text in texts if isinstance(text, str)
        )
