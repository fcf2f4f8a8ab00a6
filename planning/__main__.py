"""`preamble plan ...`: estimate, train, serve, calibrate, validate, plot.

Each subcommand is a module that parses and returns what it came to; here it is printed, as text or
as JSON. Results go to stdout, talk to stderr. Exit codes: 0 done, 1 failed or nothing fits, 2
misused.
"""

import argparse
import difflib
import importlib
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpt.errors import PreambleError
from planning.cli.result import Told
from planning.figures import finite


@dataclass(frozen=True)
class Command:
    module: str
    line: str


COMMANDS = {
    "estimate": Command("estimate", "what one configuration costs, and how fast it is"),
    "train": Command("train", "the fastest way to train a model, or an adapter for it"),
    "serve": Command("serve", "the best way to serve a model, within limits"),
    "calibrate": Command("calibrate", "measure this machine, so that plans for it are near"),
    "validate": Command("validate", "predict every published table again, and tell errors"),
    "plot": Command("plot", "draw a plan's candidates again, from its CSV"),
}
USAGE = "usage: preamble plan COMMAND ...   (preamble plan COMMAND --help says more)"


def main(argv: list[str]) -> int:
    """`argv` begins with the command's own word, `plan`."""
    words = argv[1:]
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS)) + 2
        lines = [f"  {word:{width}}{command.line}" for word, command in COMMANDS.items()]
        print("\n".join([USAGE, "", *lines]), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] not in COMMANDS:
        close = difflib.get_close_matches(words[0], COMMANDS, n=1)
        way = f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(COMMANDS)}"
        print(f"preamble plan: no command {words[0]!r}; {way}", file=sys.stderr)
        return 2
    command: Any = importlib.import_module(f"planning.cli.{COMMANDS[words[0]].module}")
    args: argparse.Namespace = command.make_parser().parse_args(words[1:])
    try:
        told: Told = command.run(args, _say)
    except PreambleError as error:
        _say(f"preamble plan {words[0]}: {error}")
        return 1
    if args.json:
        print(json.dumps(finite(told.values), indent=2, allow_nan=False))
    else:
        print(told.text.rstrip("\n"))
    return told.code


def _say(line: str) -> None:
    """On stderr, if anybody listens."""
    if sys.stderr is not None:  # Else `print` takes stdout, where results go.
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
