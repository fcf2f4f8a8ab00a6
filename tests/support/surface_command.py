"""User-visible surface, part 1: command lines, settings files and request bodies.

The recorder patches `ArgumentParser.parse_args` to get the parser of each command, so it does not
depend on the commands' function names. Help sentences are not recorded. The recorded type of a flag
is the list of probe texts that it accepts.
"""

import argparse
import dataclasses
import io
import re
import runpy
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin
from unittest.mock import patch

import msgspec

from tests.support import surface_names as names
from tests.support.surface_source import words as source_words

# Programs of the repository that are started as `python -m MODULE`.
PROGRAMS = (
    "bench",
    "examples.demo.evaluate",
    "examples.demo.tasks",
    "examples.demo.train",
)
PROBES = ("-1", "0", "1", "1.5", "1,2", "1k", "word")
NUMBERS = (-1, 0, 1)
NONSENSE = "nonsense"
# Flags whose default depends on the number of processors.
OF_THE_MACHINE = {"--workers"}
UNITS = {
    "s": "seconds",
    "ms": "milliseconds",
    "bytes": "bytes",
    **{word: word for word in ("tokens", "rows", "requests", "calls", "connections", "steps")},
    **{word: word for word in ("examples", "gpus", "nodes", "layers")},
}
QUALIFIERS = {"max", "min", "default", "p50", "p95", "input", "output"}


@dataclass(frozen=True)
class CommandOutput:
    """The exit code and the output of a command line."""

    code: int
    out: str
    error: str


class _ParserCaught(BaseException):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def run(*arguments: str | Path) -> CommandOutput:
    """Run `preamble ARGUMENTS` in this process."""
    out = io.StringIO()
    error = io.StringIO()
    with redirect_stdout(out), redirect_stderr(error):
        try:
            code = names.command([str(word) for word in arguments])
        except SystemExit as exit:
            code = int(exit.code or 0)
    return CommandOutput(code, out.getvalue(), error.getvalue())


# ------------------------------------------------------------------------------------------- flags


def commands() -> dict[str, Any]:
    """Return the flags of each command line, by the words that select its parser."""
    lines_and_flags: dict[str, Any] = {}
    for words, parser in _parsers():
        lines_and_flags |= dict(_describe(" ".join(words), parser))
    for module in PROGRAMS:
        parser = _parser_of_module(module)
        lines_and_flags |= dict(_describe(f"python -m {module}", parser))
    return lines_and_flags


def _parsers() -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    for word in _listed_commands(run("--help").out):
        parser = _parser(word)
        if parser is None:  # A group of subcommands, each with its own parser.
            for subcommand in _listed_commands(run(word, "--help").out):
                below = _parser(word, subcommand)
                assert below is not None, f"preamble {word} {subcommand} has no flags"
                yield ["preamble", word, subcommand], below
            continue
        yield ["preamble", word], parser
        # Some words of the help text select another parser; try all words.
        openers = {*re.findall(r"\w+", parser.format_help()), "--server=x"}
        for opener in sorted(openers):
            instead = _parser(word, opener)
            if instead is not None and _flags(instead) != _flags(parser):
                yield ["preamble", word, opener.partition("=")[0]], instead


def _listed_commands(help_text: str) -> list[str]:
    """Return the commands that a help text lists at the beginnings of lines."""
    return re.findall(r"^ +([a-z][\w-]*)  +\S", help_text, flags=re.MULTILINE)


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    return {"/".join(action.option_strings) or action.dest for action in parser._actions}


def _parser(*words: str) -> argparse.ArgumentParser | None:
    return _caught(lambda: run(*words))


def _parser_of_module(module: str) -> argparse.ArgumentParser:
    with patch.object(sys, "argv", [module]), warnings.catch_warnings():
        # The package of `examples.demo` has imported the module already.
        warnings.simplefilter("ignore", RuntimeWarning)
        parser = _caught(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))
    assert parser is not None, f"python -m {module} has no flags"
    return parser


def _caught(start: Callable[[], object]) -> argparse.ArgumentParser | None:
    """Return the parser that `start` uses; None if `start` ends before it parses arguments."""

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        raise _ParserCaught(parser)

    with patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            start()
        except _ParserCaught as caught:
            return caught.parser
    return None


def _describe(line: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    """Yield (command line, its arguments) for the parser's subcommands and for the parser."""
    flags: dict[str, Any] = {}
    position = 0
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, subparser in action.choices.items():
                yield from _describe(f"{line} {word}", subparser)
        elif isinstance(action, argparse._HelpAction):
            continue
        elif action.option_strings:
            flags[", ".join(action.option_strings)] = _argument(action)
        else:
            position += 1
            flags[f"argument {position}"] = _argument(action)
    together = [
        sorted(action.option_strings[0] for action in group._group_actions)
        for group in parser._mutually_exclusive_groups
    ]
    yield line, flags | ({"one of": sorted(together)} if together else {})


def _argument(action: argparse.Action) -> dict[str, Any]:
    default = action.default
    if OF_THE_MACHINE.intersection(action.option_strings):
        default = "of the machine"
    facts = {
        "default": default if isinstance(default, str | int | float | list) else None,
        "values": list(action.choices) if action.choices is not None else None,
        "count": action.nargs,
        "required": action.required or None,
        "repeatable": isinstance(action, argparse._AppendAction) or None,
        "takes": None if action.nargs == 0 else _accepted(action.type),
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _accepted(convert: Any) -> str | None:
    """Return the probe texts that a flag accepts; None if it accepts all of them."""
    if convert is None:
        return None
    accepted = []
    for word in PROBES:
        with suppress(ValueError, TypeError, argparse.ArgumentTypeError):
            convert(word)
            accepted.append(word)
    return None if len(accepted) == len(PROBES) else " ".join(accepted)


# -------------------------------------------------------------------------------------- exit codes


def exit_codes(checkpoint: Path, folder: Path) -> dict[str, int]:
    """Return the exit codes of command lines that need no server and no training."""
    missing = folder / "missing"
    lines: list[list[str | Path]] = [
        [],
        ["--help"],
        ["--version"],
        ["--version", "-v"],
        ["nonsense"],
        ["plan"],
    ]
    for word in _listed_commands(run("--help").out):
        lines += [[word, "--help"], [word, "--no-such-flag"]]
    lines += [[word, missing] for word in ("serve", "tune", "inspect", "verify")]
    lines += [["generate", missing, "text"], ["convert", missing, folder / "x", "--to", "native"]]
    lines += [["adapters", "check", missing], ["plan", "estimate", missing]]
    lines += [["generate", "--server", "127.0.0.1:1", "text"], ["plan", "nonsense"]]
    lines += [["adapters", "list", "--server", "127.0.0.1:1"], ["plan", "estimate", "gpt3-5b"]]
    lines += [["inspect", checkpoint], ["verify", checkpoint, checkpoint]]
    shown = {str(missing): "MISSING", str(folder / "x"): "TARGET", str(checkpoint): "CHECKPOINT"}
    codes = {}
    for line in lines:
        shown_line = " ".join(["preamble", *(shown.get(str(word), str(word)) for word in line)])
        codes[shown_line] = run(*line).code

    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    with patch.object(argparse.ArgumentParser, "parse_args", interrupt):
        codes["preamble inspect, interrupted"] = run("inspect").code
    return codes


# ---------------------------------------------------------------------------------- settings files


def settings_keys() -> dict[str, Any]:
    """Return the keys of each settings file with type, default, unit and accepted words."""
    words = source_words(r"[a-z0-9][\w.-]{0,23}")
    return {
        where: {
            names.SPELLED.get((where, field.name), field.name): _key(kind, base, field, hint, words)
            for field, hint in names.settings_with_types(kind)
        }
        for where, (kind, base) in sorted(names.SETTINGS.items())
    }


def _key(
    kind: type[Any],
    base: Mapping[str, Any],
    field: "dataclasses.Field[Any]",
    hint: Any,
    words: Sequence[str],
) -> dict[str, Any]:
    def accepts(value: object) -> bool:
        try:
            kind(**{**base, field.name: value})
        except Exception:
            return False
        return True

    facts: dict[str, Any] = {"kind": _kind(hint)}
    if field.default is not dataclasses.MISSING:
        facts["default"] = list(field.default) if type(field.default) is tuple else field.default
    elif field.default_factory is dataclasses.MISSING:
        facts["required"] = True
    unit = _unit(field.name)
    if unit is not None and "number" in facts["kind"]:
        facts["unit"] = unit
    buildable = accepts(base[field.name]) if field.name in base else _builds(kind, base)
    if not buildable:  # The dataclass needs values of other classes.
        return facts
    if "text" in facts["kind"]:
        wrap = (lambda word: (word,)) if facts["kind"].startswith("list") else (lambda word: word)
        if not accepts(wrap(NONSENSE)) and (accepted := [w for w in words if accepts(wrap(w))]):
            facts["values"] = accepted
    if "number" in facts["kind"] and not facts["kind"].startswith("list"):
        facts["refused"] = [number for number in NUMBERS if not accepts(number)]
    return facts


def _builds(kind: type[Any], base: Mapping[str, Any]) -> bool:
    try:
        kind(**base)
    except Exception:
        return False
    return True


def _kind(hint: Any) -> str:
    """Return the name that users read for a type."""
    parts = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_kind(part) for part in parts)
    if get_origin(hint) is Literal:
        return "text"
    if get_origin(hint) is tuple:
        return f"list of {_kind(parts[0])}"
    plain = {str: "text", int: "whole number", float: "number", bool: "switch", type(None): "null"}
    return plain.get(hint, "mapping")


def _unit(key: str) -> str | None:
    """Return the unit of a key; it is the last word, or the word before the bound."""
    stem, _, per = key.partition("_per_")
    parts = stem.split("_")
    while parts and parts[-1] in QUALIFIERS:
        parts.pop()
    unit = UNITS.get(parts[-1]) if parts else None
    if unit is None or not per:
        return unit
    return f"{unit} per {'second' if per == 's' else per}"


# ------------------------------------------------------------------------------- bodies of requests


def http_bodies() -> dict[str, Any]:
    """Return the fields of the JSON bodies that HTTP routes read."""
    return {path: _fields(kind) for path, kind in names.HTTP_BODIES.items()}


def _fields(kind: Any) -> dict[str, Any]:
    shape = msgspec.inspect.type_info(kind)
    assert isinstance(shape, msgspec.inspect.StructType)
    return {field.encode_name: _shape(field.type) for field in shape.fields}


def _shape(shape: msgspec.inspect.Type) -> Any:
    if isinstance(shape, msgspec.inspect.UnionType):
        parts = [_shape(part) for part in shape.types]
        types = [part for part in parts if part != "null"]
        return types[0] if len(types) == 1 else types
    if isinstance(shape, msgspec.inspect.StructType):
        return _fields(shape.cls)
    if isinstance(shape, msgspec.inspect.ListType):
        return ["list of", _shape(shape.item_type)]
    if isinstance(shape, msgspec.inspect.DictType):
        return ["mapping to", _shape(shape.value_type)]
    if isinstance(shape, msgspec.inspect.LiteralType):
        return f"one of {', '.join(map(str, shape.values))}"
    return type(shape).__name__.removesuffix("Type").lower()
