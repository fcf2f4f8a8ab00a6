"""`preamble adapters log` command: prints the change log of an adapter directory, with filters.

The records are read from the files of the directory one at a time, so the memory does not depend on
the size of the log. The command needs no server. `gpt.adapters.change_log` owns the log.
"""

import argparse
import json
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from checkpoints_tools.flags import positive_int
from gpt.adapters.change_log import (
    OBJECTS_FOLDER,
    AdapterChangeLog,
    ChangeRecord,
    format_time,
    read_changes,
)
from gpt.errors import ConfigError, printable
from gpt.object_store.object_store import ObjectStore, is_object_url
from gpt.object_store.record_log import ObjectRecordLog

STATUSES = ("done", "failed", "refused", "unfinished")
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LAST_MAX = 100_000  # Bounds the memory of --last.


def log_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble adapters log",
        description="Print who uploaded, promoted, rolled back or unloaded which adapter version, "
        "when and from where. Changes that were refused or failed are printed with the reason; "
        "`unfinished` changes were interrupted, for example by a kill of the server.",
    )
    add = parser.add_argument
    add(
        "directory",
        metavar="DIR",
        help="adapter directory of a server, or s3://BUCKET/PREFIX, its object store",
    )
    add("--adapter", metavar="NAME[@VERSION]", help="only changes of this adapter")
    add(
        "--tenant",
        metavar="TENANT",
        help="only changes by this tenant or in its folder; an empty text: only changes by no "
        "tenant and in no tenant's folder",
    )
    add(
        "--since",
        metavar="TIME",
        type=_parse_since,
        help="only changes after this time: a date or time in UTC (2026-01-31, "
        "2026-01-31T08:00), or an age such as 30m, 12h or 7d",
    )
    add("--status", choices=STATUSES, help="only changes with this status")
    add(
        "--last",
        metavar="N",
        type=positive_int,
        help=f"only the last N of these changes (at most {LAST_MAX:,})",
    )
    add("--json", action="store_true", help="print a JSON list with all fields")
    return parser


def log_command(argv: Sequence[str]) -> int:
    """Run `preamble adapters log`; `argv` are the arguments after `log`."""
    flags = log_parser().parse_args(argv)
    if not (is_object_url(flags.directory) or Path(flags.directory).is_dir()):
        raise ConfigError(f"{flags.directory} is not a directory; give an adapter directory")
    records: Iterable[ChangeRecord] = (
        record for record in _read_records(flags.directory) if _is_selected(record, flags)
    )
    if flags.last is not None:
        records = deque(records, maxlen=min(flags.last, LAST_MAX))
    for text in _json_parts(records) if flags.json else map(_line, records):
        sys.stdout.write(text)
    return 0


def _read_records(directory: str) -> Iterator[ChangeRecord]:
    if is_object_url(directory):
        yield from read_changes(ObjectRecordLog(ObjectStore(directory), OBJECTS_FOLDER))
        return
    changes = AdapterChangeLog.find(Path(directory)) or AdapterChangeLog(None)
    try:
        yield from changes.read()
    except OSError as error:
        raise ConfigError(
            f"the change log of {directory} cannot be read ({error.strerror}); run the command as "
            "a user with read permission, such as the server's"
        ) from None


def _parse_since(text: str) -> str:
    """Return the time in the format of the records."""
    if match := re.fullmatch(r"(\d{1,5})([smhd])", text):
        since = datetime.now(UTC) - timedelta(seconds=int(match[1]) * UNIT_SECONDS[match[2]])
    else:
        try:
            since = datetime.fromisoformat(text)
            # A time without a zone is UTC, as in the records.
            since = since.replace(tzinfo=UTC) if since.tzinfo is None else since.astimezone(UTC)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a time; give a date, a time such as 2026-01-31T08:00, or an age "
                "such as 12h"
            ) from None
    return format_time(since)


def _is_selected(record: ChangeRecord, flags: argparse.Namespace) -> bool:
    if flags.since is not None and _text(record, "time") < flags.since:
        return False
    if flags.status is not None and record.get("status") != flags.status:
        return False
    if flags.tenant is not None and not _concerns_tenant(record, flags.tenant):
        return False
    name, separator, version = (flags.adapter or "").partition("@")
    if name and record.get("adapter") != name:
        return False
    return not separator or version == _text(record, "version")


def _concerns_tenant(record: ChangeRecord, tenant: str) -> bool:
    """Return whether the tenant made the change or owns its folder; "": no tenant did or does."""
    names = [name for name in (record.get("tenant"), record.get("owner")) if name]
    return tenant in names if tenant else not names


def _json_parts(records: Iterable[ChangeRecord]) -> Iterator[str]:
    """Yield the parts of a JSON list, so that the whole list is never in memory."""
    separator = "[\n"
    for record in records:
        yield separator + json.dumps(record)
        separator = ",\n"
    yield "[]\n" if separator == "[\n" else "\n]\n"


def _line(record: ChangeRecord) -> str:
    version = _text(record, "version")
    name = _text(record, "adapter") or "?"
    adapter = f"{name}@{version}" if version else _text(record, "requested") or name
    columns = [
        _text(record, "time"),
        f"{_text(record, 'status'):10}",
        f"{_text(record, 'action'):8}",
        f"{adapter:24}",
        _current_change(record),
        *_named_texts(record, "owner", "tenant", "token", "user"),
        f"by {_text(record, 'protocol')} {_text(record, 'method')}".rstrip(),
        f"from {_text(record, 'peer') or _text(record, 'host')}",
        *_named_texts(record, "request_id", "reason"),
        _text(record, "message"),
    ]
    return printable("  ".join(column for column in columns if column)) + "\n"


def _current_change(record: ChangeRecord) -> str:
    """Return how the change moved the current version of the name; empty if that is unknown."""
    before, after = _text(record, "current_before"), _text(record, "current_after")
    if record.get("status") != "done" or before == after:
        return ""
    return f"current {before or 'none'} -> {after or 'none'}"


def _named_texts(record: Mapping[str, Any], *names: str) -> list[str]:
    return [f"{name}={_text(record, name)}" for name in names if _text(record, name)]


def _text(record: Mapping[str, Any], name: str) -> str:
    """Return a field as text. A file that was changed by hand may have a value of any type."""
    value = record.get(name)
    return "" if value is None else str(value)
