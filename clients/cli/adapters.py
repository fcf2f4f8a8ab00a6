"""`preamble adapters`: list, show, upload, load, unload, promote and roll back, on a server.

One action is one call. What came of it goes to stdout, as lines for a person or, with `--json`, as
one JSON document; what went wrong goes to stderr. Needs no torch and no checkpoint.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from clients.adapter_client import AdapterCalls
from clients.cli.flags import add_server_flags, open_client
from clients.client import Client
from clients.transport import CallError
from protos.preamble.v1 import adapters_pb2 as pb

# What each action needs, and what it does.
ACTIONS: Mapping[str, tuple[str, str]] = {
    "list": ("", "all adapters of the server that this caller may use"),
    "show": ("NAME", "one of them, as its card says"),
    "upload": ("NAME", "send a file: the next version of NAME, or NAME@VERSION"),
    "load": ("NAME", "have the server look at its directory now"),
    "unload": ("NAME@VERSION", "take a version away; who uses it finishes"),
    "promote": ("NAME@VERSION", "from now on NAME alone means this version"),
    "rollback": ("NAME", "take the last promotion back"),
}


def adapters_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble adapters",
        description="Look at the adapters of a running server, and change them.",
        epilog="Without a server: `preamble adapters check FILE` looks at a file, `preamble "
        "adapters import SOURCE TARGET` makes one of PEFT's, TGIS's or NeMo's, `preamble adapters "
        "export FILE TARGET` one of theirs.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for word, (name, text) in ACTIONS.items():
        action = actions.add_parser(word, help=text, description=text)
        if name:
            action.add_argument("name", metavar=name, help="the adapter")
        if word == "upload":
            action.add_argument("file", metavar="FILE", type=Path, help="as `preamble tune` writes")
        add_server_flags(action)
        action.add_argument("--json", action="store_true", help="print JSON")
    return parser


def adapters_command(argv: Sequence[str]) -> int:
    """`argv` begins after the command's own word."""
    flags = adapters_parser().parse_args(argv)
    try:
        with open_client(flags) as client:
            sys.stdout.write(_answer(client, flags))
    except ValueError as error:
        return _failed(str(error))
    except CallError as error:
        return _failed(f"{error.code}: {error}")
    return 0


def _failed(reason: str) -> int:
    sys.stderr.write(f"preamble adapters: {reason}\n")
    return 1


def _answer(client: Client, flags: argparse.Namespace) -> str:
    if flags.action == "list":
        adapters = client.adapters()
        if flags.json:
            return _json([_record(adapter) for adapter in adapters])
        return "".join(f"{_line(adapter)}\n" for adapter in adapters)
    calls = AdapterCalls(client)
    if flags.action == "unload":
        calls.unload(flags.name)
        return _json({"unloaded": flags.name}) if flags.json else f"{flags.name} is unloaded\n"
    adapter = _changed(calls, flags)
    if flags.json:
        return _json(_record(adapter))
    return _sheet(adapter) if flags.action == "show" else f"{_line(adapter)}\n"


def _changed(calls: AdapterCalls, flags: argparse.Namespace) -> pb.Adapter:
    if flags.action == "upload":
        try:
            return calls.upload(flags.name, flags.file)
        except OSError as error:
            reason = f"{flags.file} cannot be read ({error.strerror}); give an adapter's file"
            raise ValueError(reason) from None
    call: Callable[[str], pb.Adapter] = getattr(calls, flags.action)
    return call(flags.name)


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _record(adapter: pb.Adapter) -> dict[str, Any]:
    """Every field, set or not, so that a program need not ask."""
    record: dict[str, Any] = MessageToDict(
        adapter, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return record


def _line(adapter: pb.Adapter) -> str:
    mark = "*" if adapter.current else " "
    key = f"{adapter.name}@{adapter.version}"
    task = f"  {_shown(adapter.task)}" if adapter.task else ""
    return f"{mark} {key:30}  {adapter.virtual_tokens:5} rows  {adapter.digest[:12]}{task}"


def _sheet(adapter: pb.Adapter) -> str:
    lines = [f"{adapter.name}@{adapter.version}{' (current)' if adapter.current else ''}"]
    facts = _record(adapter)
    for name in ("name", "version", "current"):
        del facts[name]
    for name, value in facts.items():
        if value in ("", 0, [], {}):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number:g}" for key, number in sorted(value.items()))
        elif isinstance(value, list):
            value = ", ".join(map(json.dumps, value))
        lines.append(f"  {name.replace('_', ' '):16} {_shown(str(value))}")
    return "\n".join(lines) + "\n"


def _shown(text: str) -> str:
    """A card is anybody's text, and a terminal obeys what it is shown."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
