"""The `preamble plan` command: runs a subcommand and prints its result as text or JSON.

Each subcommand (estimate, train, serve, calibrate, validate, plot) is a module that parses its
arguments and returns a `CommandResult`, which this module prints. Results go to stdout; progress,
warnings and errors go to stderr.

Exit codes:
- 0: success.
- 1: the command failed, no candidate fits, or a prediction error that `validate` computes exceeds
  its target.
- 2: invalid arguments.
"""

import argparse
import difflib
import importlib
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpt.cpu_threads import limit_openmp_spinning
from gpt.errors import PreambleError
from gpt.json_output import nonfinite_to_none
from planning.cli.result import CommandResult


@dataclass(frozen=True)
class Command:
    module: str
    summary: str


COMMANDS = {
    "estimate": Command("estimate", "estimate memory and speed of one configuration"),
    "train": Command("train", "find the fastest configuration to train a model or an adapter"),
    "serve": Command("serve", "find the best configuration to serve a model within limits"),
    "calibrate": Command("calibrate", "measure step times of this machine, to plan for it"),
    "validate": Command("validate", "compare predictions with every published table"),
    "plot": Command("plot", "redraw a plan's plots from its candidates.csv"),
}
USAGE = "usage: preamble plan COMMAND ...   (for details: preamble plan COMMAND --help)"


def main(argv: list[str]) -> int:
    """Run the command. `argv[0]` is the command name, `plan`."""
    command_args = argv[1:]
    limit_openmp_spinning()  # Before any import of torch.
    if not command_args or command_args[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS)) + 2
        lines = [f"  {name:{width}}{command.summary}" for name, command in COMMANDS.items()]
        print("\n".join([USAGE, "", *lines]), file=sys.stdout if command_args else sys.stderr)
        return 0 if command_args else 2
    if command_args[0] not in COMMANDS:
        matches = difflib.get_close_matches(command_args[0], COMMANDS, n=1)
        hint = f"choose one of: {', '.join(COMMANDS)}"
        if matches:
            hint = f"did you mean {matches[0]!r}?"
        print(f"preamble plan: unknown command {command_args[0]!r}; {hint}", file=sys.stderr)
        return 2
    command: Any = importlib.import_module(f"planning.cli.{COMMANDS[command_args[0]].module}")
    args: argparse.Namespace = command.make_parser().parse_args(command_args[1:])
    try:
        result: CommandResult = command.run(args, _log_to_stderr)
    except PreambleError as error:
        _log_to_stderr(f"preamble plan {command_args[0]}: {error}")
        return 1
    if args.json:
        print(json.dumps(nonfinite_to_none(result.values), indent=2, allow_nan=False))
    else:
        print(result.text.rstrip("\n"))
    return result.exit_code


def _log_to_stderr(line: str) -> None:
    """Print a line to stderr, if stderr is open."""
    if sys.stderr is not None:  # With file=None, `print` would write to stdout.
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
