"""`preamble adapters`: lists and changes the adapters of a server.

Each action is one call. The result goes to stdout, as text or, with `--json`, as one JSON document;
an error goes to stderr. The command needs no torch and no checkpoint.
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

# By action: the placeholder of the argument (empty: no argument), and the action's help text.
ACTIONS: Mapping[str, tuple[str, str]] = {
    "list": ("", "list all adapters that this caller can use"),
    "show": ("NAME", "show an adapter and its metadata (the card in its file)"),
    "upload": ("NAME", "upload a file as the next version of NAME, or as NAME@VERSION"),
    "load": ("NAME", "rescan the server's adapter directory immediately, and show the adapter"),
    "unload": (
        "NAME@VERSION",
        "unload a version and delete its file on the server; requests that use it still finish",
    ),
    "promote": ("NAME@VERSION", "make this version the current version of NAME"),
    "rollback": ("NAME", "undo the last promotion of NAME"),
}


def adapters_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble adapters",
        description="List and change the adapters of a running server.",
        epilog="Four more actions need no server: `preamble adapters check FILE` checks a file, "
        "`preamble adapters import SOURCE TARGET` converts an adapter of PEFT, TGIS or NeMo to an "
        "adapter file, `preamble adapters export FILE TARGET --to FORMAT` converts an adapter "
        "file to one of these formats, and `preamble adapters log DIR` prints who changed the "
        "adapters of a directory.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action_name, (name, text) in ACTIONS.items():
        action_parser = actions.add_parser(action_name, help=text, description=text)
        if name:
            action_parser.add_argument("name", metavar=name, help="name of the adapter")
        if action_name == "upload":
            action_parser.add_argument(
                "file",
                metavar="FILE",
                type=Path,
                help="an adapter file, as `preamble tune` writes it",
            )
        add_server_flags(action_parser)
        action_parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def adapters_command(argv: Sequence[str]) -> int:
    """Run `preamble adapters`; `argv` are the arguments after `adapters`."""
    flags = adapters_parser().parse_args(argv)
    try:
        with open_client(flags) as client:
            sys.stdout.write(_run_action(client, flags))
    except ValueError as error:
        return _report_error(str(error))
    except CallError as error:
        return _report_error(f"{error.code}: {error}")
    return 0


def _report_error(reason: str) -> int:
    sys.stderr.write(f"preamble adapters: {reason}\n")
    return 1


def _run_action(client: Client, flags: argparse.Namespace) -> str:
    if flags.action == "list":
        adapters = client.adapters()
        if flags.json:
            return _json([_adapter_record(adapter) for adapter in adapters])
        return "".join(f"{_adapter_line(adapter)}\n" for adapter in adapters)
    calls = AdapterCalls(client)
    if flags.action == "unload":
        calls.unload(flags.name)
        return _json({"unloaded": flags.name}) if flags.json else f"{flags.name} is unloaded\n"
    adapter = _call_action(calls, flags)
    if flags.json:
        return _json(_adapter_record(adapter))
    return _adapter_details(adapter) if flags.action == "show" else f"{_adapter_line(adapter)}\n"


def _call_action(calls: AdapterCalls, flags: argparse.Namespace) -> pb.Adapter:
    if flags.action == "upload":
        try:
            return calls.upload(flags.name, flags.file)
        except OSError as error:
            reason = f"{flags.file} cannot be read ({error.strerror}); give an adapter file"
            raise ValueError(reason) from None
    call: Callable[[str], pb.Adapter] = getattr(calls, flags.action)
    return call(flags.name)


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _adapter_record(adapter: pb.Adapter) -> dict[str, Any]:
    """Convert an adapter to JSON. Unset fields are included, so all records have the same keys."""
    record: dict[str, Any] = MessageToDict(
        adapter, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return record


def _adapter_line(adapter: pb.Adapter) -> str:
    current_mark = "*" if adapter.current else " "
    key = f"{adapter.name}@{adapter.version}"
    task = f"  {_printable(adapter.task)}" if adapter.task else ""
    method = _printable(adapter.method) or "-"
    size = " ".join([*_sizes(adapter), f"{adapter.bytes / 1e6:.2f} MB"])
    return f"{current_mark} {key:30}  {method:12}  {size:24}  {adapter.digest[:12]}{task}"


def _sizes(adapter: pb.Adapter) -> list[str]:
    """Return the number of virtual tokens and the rank, as far as the adapter has them."""
    rows = [f"{adapter.virtual_tokens} rows"] if adapter.virtual_tokens else []
    return [*rows, *([f"rank {adapter.rank}"] if adapter.rank else [])]


def _adapter_details(adapter: pb.Adapter) -> str:
    lines = [f"{adapter.name}@{adapter.version}{' (current)' if adapter.current else ''}"]
    record = _adapter_record(adapter)
    for name in ("name", "version", "current"):
        del record[name]
    for name, value in record.items():
        if value in ("", 0, [], {}):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number:g}" for key, number in sorted(value.items()))
        elif isinstance(value, list):
            value = ", ".join(map(json.dumps, value))
        lines.append(f"  {name.replace('_', ' '):16} {_printable(str(value))}")
    return "\n".join(lines) + "\n"


def _printable(text: str) -> str:
    """Escape control characters: adapter metadata is untrusted, and may have terminal codes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
