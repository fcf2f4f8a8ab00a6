"""The `preamble` command: passes the command line to the package that implements the subcommand.

A package is imported only when its subcommand runs, so that help and usage errors are fast. Each
package reports its own errors. Exit codes: 0 success, 1 failure, 2 usage error, 130 interrupted.
"""

import difflib
import errno
import importlib
import io
import os
import sys
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(frozen=True)
class Command:
    package: str
    summary: str


COMMANDS = {
    "serve": Command("serving", "serve a model and its adapters over gRPC"),
    "generate": Command(
        "serving", "complete one prompt, in this process or (--server) on a running server"
    ),
    "ray": Command("serving", "serve a model with Ray Serve, on several nodes"),
    "tune": Command("ptuning", "train an adapter for a frozen model"),
    "plan": Command("planning", "find a configuration that fits, and estimate its speed and cost"),
    "adapters": Command("clients", "manage a server's adapters; check, import and export files"),
    "bench": Command("clients", "run a load against a server, and report latency and throughput"),
    "convert": Command("checkpoints_tools", "write a checkpoint in another format or split"),
    "inspect": Command("checkpoints_tools", "describe a checkpoint and report problems"),
    "verify": Command("checkpoints_tools", "compare two checkpoints: are they the same model?"),
}

# Actions of `adapters` that work on files and need no server.
ADAPTER_FILE_ACTIONS = ("check", "import", "export", "log")

USAGE = """\
usage: preamble COMMAND ...   (preamble COMMAND --help describes a command)
       preamble --version [-v]"""


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help_text(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        return _run_command("gpt", arguments)
    if arguments[0] not in COMMANDS:
        matches = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        choices = f"choose one of {', '.join(COMMANDS)}"
        hint = f"did you mean {matches[0]!r}?" if matches else choices
        print(f"preamble: no command {arguments[0]!r}; {hint}", file=sys.stderr)
        return 2
    return _run_command(_command_package(arguments), arguments)


def _help_text() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([USAGE, "", *lines])


def _command_package(arguments: list[str]) -> str:
    """Return the package that implements the command.

    `generate --server` is in `clients`, so that a client does not import `serving`.
    """
    uses_server = any(
        argument == "--server" or argument.startswith("--server=") for argument in arguments
    )
    if arguments[0] == "generate" and uses_server:
        return "clients"
    if arguments[0] == "adapters" and arguments[1:2] and arguments[1] in ADAPTER_FILE_ACTIONS:
        return "checkpoints_tools"
    return COMMANDS[arguments[0]].package


def _run_command(package: str, arguments: list[str]) -> int:
    def fail(reason: str) -> int:
        print(f"preamble {arguments[0]}: stdout {reason}", file=sys.stderr)
        return 1

    if sys.stdout is None:  # File descriptor 1 is closed.
        return fail("is closed, but the command writes to it; redirect it to a file or /dev/null")
    if sys.stdout is sys.__stdout__:
        sys.stdout = _guard_stdout(sys.__stdout__)
    try:
        exit_code = int(importlib.import_module(f"{package}.__main__").main(arguments))
        sys.stdout.flush()
        return exit_code
    except KeyboardInterrupt:
        print(f"\npreamble {arguments[0]}: interrupted", file=sys.stderr)
        return 130
    except _StdoutError as error:
        # Python flushes stdout at exit, which would fail again: redirect stdout to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return 1  # The process that reads the pipe has exited, as `head` does.
        return fail(f"cannot be written ({error.strerror}); redirect it to a disk with space")


class _StdoutError(OSError):
    """Writing to stdout failed. Any other OSError that reaches `_run_command` is a bug."""


class _StdoutFile(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _StdoutError(error.errno, error.strerror) from None


def _guard_stdout(stdout: TextIO) -> TextIO:
    """Wrap `stdout`: errors raise `_StdoutError`, and unencodable characters become `?`."""
    assert isinstance(stdout, io.TextIOWrapper)
    return io.TextIOWrapper(
        io.BufferedWriter(_StdoutFile(stdout.fileno(), "w", closefd=False)),
        encoding=stdout.encoding,
        errors="replace",
        line_buffering=stdout.line_buffering,
        write_through=stdout.write_through,
    )


if __name__ == "__main__":
    sys.exit(main())
