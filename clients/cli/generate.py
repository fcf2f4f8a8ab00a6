"""Prompt flags and output of `preamble generate`, with a running server and in process.

Both forms of the command use this module, so their flags, messages and output are equal. The module
imports only the standard library, and is independent of the client and the engine.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple


class FinishedCompletion(NamedTuple):
    """One of several completions, with the fields that are printed."""

    adapter: str  # Empty: the model without an adapter.
    seed: int
    text: str
    error: str | None  # Set if the completion failed.


class GuideFlag(NamedTuple):
    """The guide of --json-schema or --regex."""

    kind: Literal["json", "regex"]
    text: str


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--task",
        metavar="T",
        action="append",
        default=[],
        help="adapter, as name or name@version; repeat the flag for several adapters",
    )
    add(
        "--field",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="field of the adapter's prompt template; NAME=@FILE reads a file",
    )
    add("--answers", metavar="N", type=int, default=1, help="completions per adapter (default: 1)")
    add("--max-new-tokens", metavar="N", type=int, help="largest number of new tokens")
    add("--temperature", metavar="X", type=float, help="0: greedy decoding (default: 0)")
    add("--top-k", metavar="N", type=int, default=0, help="0: off (default: 0)")
    add("--top-p", metavar="X", type=float, help="in (0, 1] (default: 1)")
    add("--min-p", metavar="X", type=float, default=0.0, help="from 0 to 1 (default: 0, off)")
    add("--repetition-penalty", metavar="X", type=float, default=1.0, help="(default: 1, off)")
    add("--seed", metavar="N", type=int, help="sampling seed (default: random)")
    add("--stop", metavar="TEXT", action="append", default=[], help="stop string")
    add("--json-schema", metavar="FILE", help="guided decoding: JSON that matches this schema")
    add("--regex", metavar="RE", help="guided decoding: text that matches this regex")


def read_prompt(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> str | Mapping[str, str]:
    """Return the text, or the fields of the template. Raise ValueError if a file cannot be read.

    If the flags contradict each other, the parser prints a usage message and exits.
    """
    if (args.text is None) == (not args.field):
        parser.error(
            "give either a prompt text, or the fields of the adapter's template with --field "
            "NAME=VALUE"
        )
    if args.json_schema and args.regex:
        parser.error("give either --json-schema or --regex")
    fields = dict(_read_field(argument, parser) for argument in args.field)
    return fields or str(args.text)


def _read_field(argument: str, parser: argparse.ArgumentParser) -> tuple[str, str]:
    name, equals, value = argument.partition("=")
    if not equals or not name:
        parser.error(f"--field {argument!r} is not NAME=VALUE")
    if value.startswith("@"):
        value = _read_text(value[1:], f"--field {name}")
    return name, value


def read_guide(args: argparse.Namespace) -> GuideFlag | None:
    """Return the guide that a flag sets, or None. Raise ValueError if its file cannot be read."""
    if args.json_schema:
        return GuideFlag("json", _read_text(args.json_schema, "--json-schema"))
    return GuideFlag("regex", args.regex) if args.regex else None


def _read_text(path: str, flag: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "not UTF-8")
        raise ValueError(f"{flag}: {path} cannot be read ({reason})") from None


def write_text(text: str) -> None:
    """Write a piece of a streamed completion."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_completions(completions: Iterable[FinishedCompletion]) -> int:
    """Write each completion below a header line; return exit status 1 if any completion failed."""
    exit_code = 0
    for completion in completions:
        sys.stdout.write(f"--- {completion.adapter or 'no task'}, seed {completion.seed}\n")
        if completion.error is None:
            sys.stdout.write(f"{completion.text}\n")
        else:
            sys.stdout.flush()
            sys.stderr.write(f"preamble generate: {completion.error}\n")
            exit_code = 1
    return exit_code
