"""Prompt flags and output of `preamble generate`, on a running server or in its own process.

In both cases the command uses this module, so prompt flags, messages and output are the same. The
module imports only the standard library, and is independent of the client and the engine.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple


class FinishedCompletion(NamedTuple):
    """A completion to print, when a command has requested several completions."""

    adapter: str  # Empty: the model without an adapter.
    seed: int
    text: str
    error: str | None  # Set if the completion failed.


class GuideFlag(NamedTuple):
    """The value of --json-schema (kind "json") or --regex: the pattern of guided decoding."""

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
        help="field of the adapter's prompt template; NAME=@FILE reads its value from a file",
    )
    add("--answers", metavar="N", type=int, default=1, help="completions per adapter (default: 1)")
    add("--max-new-tokens", metavar="N", type=int, help="maximum number of new tokens")
    add(
        "--temperature",
        metavar="X",
        type=float,
        help="softmax temperature; 0 selects greedy decoding (default: 0)",
    )
    add(
        "--top-k",
        metavar="N",
        type=int,
        default=0,
        help="sample from the N most likely tokens (default: 0, off)",
    )
    add(
        "--top-p",
        metavar="X",
        type=float,
        help="nucleus sampling: probability mass in (0, 1] (default: 1, off)",
    )
    add(
        "--min-p",
        metavar="X",
        type=float,
        default=0.0,
        help="minimum probability of a token, relative to the most likely token, from 0 to 1 "
        "(default: 0, off)",
    )
    add(
        "--repetition-penalty",
        metavar="X",
        type=float,
        default=1.0,
        help="penalty on tokens of prompt and completion, from 0.01 to 10 (default: 1, off)",
    )
    add("--seed", metavar="N", type=int, help="sampling seed (default: random)")
    add(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="stop string; repeat the flag for several",
    )
    add("--json-schema", metavar="FILE", help="guided decoding: JSON that matches this schema")
    add("--regex", metavar="RE", help="guided decoding: text that matches this regex")


def read_prompt(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> str | Mapping[str, str]:
    """Return the prompt text, or the fields of the adapter's template, by name.

    Raises ValueError if a file cannot be read. If the flags contradict each other, the parser
    prints a usage message and exits.
    """
    if (args.text is None) == (not args.field):
        parser.error(
            "give either a prompt text, or the fields of the adapter's template with --field "
            "NAME=VALUE"
        )
    if args.json_schema and args.regex:
        parser.error("both --json-schema and --regex are given; remove one of them")
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
    """Return the guide of the flags, or None. Raise ValueError if the schema file is unreadable."""
    if args.json_schema:
        return GuideFlag("json", _read_text(args.json_schema, "--json-schema"))
    return GuideFlag("regex", args.regex) if args.regex else None


def _read_text(path: str, flag: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "not UTF-8")
        raise ValueError(
            f"{flag}: {path} cannot be read ({reason}); give a readable file"
        ) from None


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
