"""The one command: finds the folder that a word belongs to, and hands the line over to it.

A folder is imported only when its command is asked for, so that help and mistakes cost nothing.
Each folder says itself what went wrong. Exit codes: 0 done, 1 failed, 2 misused, 130 interrupted.
"""

import difflib
import errno
import importlib
import importlib.metadata
import io
import os
import sys
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(frozen=True)
class Command:
    folder: str
    line: str


COMMANDS = {
    "serve": Command("serving", "serve a model and its adapters over gRPC"),
    "generate": Command("serving", "complete one prompt, here or (--server) by a running server"),
    "tune": Command("ptuning", "learn an adapter for a frozen model"),
    "plan": Command("planning", "choose a configuration: what it costs, how fast it is, what fits"),
    "adapters": Command("clients", "look at a server's adapters and change them; files in and out"),
    "bench": Command("clients", "load a running server, and tell what its calls took"),
    "convert": Command("checkpoints_tools", "write a checkpoint in another format, at any split"),
    "inspect": Command("checkpoints_tools", "say what a checkpoint is, and what looks wrong"),
    "verify": Command("checkpoints_tools", "tell whether two checkpoints are the same model"),
}

# Of `adapters`: about a file, which takes no server, but what reads it.
FILE_ACTIONS = ("check", "import", "export")

USAGE = "usage: preamble COMMAND ...   (preamble COMMAND --help says more)"


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"preamble {_version()}")
        return 0
    if words[0] not in COMMANDS:
        close = difflib.get_close_matches(words[0], COMMANDS, n=1)
        way = f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(COMMANDS)}"
        print(f"preamble: no command {words[0]!r}; {way}", file=sys.stderr)
        return 2
    return _run(_folder(words), words)


def _version() -> str:
    try:
        return importlib.metadata.version("preamble")
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"  # Run from a checkout that was never installed.


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {word:{width}}{command.line}" for word, command in COMMANDS.items()]
    return "\n".join([USAGE, "", *lines])


def _folder(words: list[str]) -> str:
    """Where the command lives; asking a running server needs no model, and so no serving."""
    asks_server = any(word == "--server" or word.startswith("--server=") for word in words)
    if words[0] == "generate" and asks_server:
        return "clients"
    if words[0] == "adapters" and words[1:2] and words[1] in FILE_ACTIONS:
        return "checkpoints_tools"
    return COMMANDS[words[0]].folder


def _run(folder: str, words: list[str]) -> int:
    def failed(reason: str) -> int:
        print(f"preamble {words[0]}: stdout {reason}", file=sys.stderr)
        return 1

    if sys.stdout is None:  # So Python has it where descriptor 1 is closed.
        return failed("is closed, and the answer goes there; send it to a file or to /dev/null")
    if sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(sys.__stdout__)
    try:
        code = int(importlib.import_module(f"{folder}.__main__").main(words))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"\npreamble {words[0]}: interrupted", file=sys.stderr)
        return 130
    except _StdoutError as error:
        # Python would try again at its exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return 1  # Whoever read our output has gone, as `head` does.
        return failed(f"cannot be written ({error.strerror}); send it where there is room")


class _StdoutError(OSError):
    """Stdout does not take what it is given. Any other OSError that gets here is a bug."""


class _Stdout(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _StdoutError(error.errno, error.strerror) from None


def _guarded(stdout: TextIO) -> TextIO:
    """The same stdout, whose errors are its own, and that shows ? for what it cannot show."""
    assert isinstance(stdout, io.TextIOWrapper)
    return io.TextIOWrapper(
        io.BufferedWriter(_Stdout(stdout.fileno(), "w", closefd=False)),
        encoding=stdout.encoding,
        errors="replace",
        line_buffering=stdout.line_buffering,
        write_through=stdout.write_through,
    )


if __name__ == "__main__":
    sys.exit(main())
