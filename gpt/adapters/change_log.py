"""Adapter change log: the record of changes of adapter versions, with author, time and origin.

This module owns the record of all changes in an adapter directory: uploads, promotions, rollbacks
and removals, by servers and by commands. It is in the folder `.changes` of the directory, so all
servers that share the directory write one log.

- `changes.jsonl`: each change has a record with the status `begun` before the directory changes,
  and a record with the status `done` or `failed` after. If the first record cannot be written, the
  change is refused. A change without a second record was interrupted: `unfinished`.
- `refusals.jsonl`: changes that were refused before they began. They are in a log of their own, so
  that many refusals cannot displace the records of changes.

The changes of an object store are recorded in the store, in the same form. The two files are
rotated (`gpt.files.json_lines_log`). A record contains neither the content of an adapter nor a
token. The module imports neither torch nor a server, and does not decide who may change an adapter.
"""

import getpass
import heapq
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from gpt.files.json_lines_log import JsonLinesLog
from gpt.object_store.object_store import ObjectStoreError

FOLDER = ".changes"
CHANGES_FILE, REFUSALS_FILE = "changes.jsonl", "refusals.jsonl"
OBJECTS_FOLDER = f"{FOLDER}/changes"  # Of the records of changes in an object store.
FORMAT = 1  # Version of the record format.
LOG_BYTES_MAX = 16 << 20  # Default size above which a file is rotated.
LOG_FILES_MAX = 10  # Default number of files of each of the two logs.
# Bounds of a record's texts. A caller chooses some of them.
NAME_CHARACTERS_MAX = 200
MESSAGE_CHARACTERS_MAX = 500
# Maximum number of records that are kept in memory because they could not be written.
UNWRITTEN_RECORDS_MAX = 1000
# Maximum number of records between the beginning and the end of a change that a reader joins. It
# bounds the reader's memory.
OPEN_RECORDS_MAX = 1000

ChangeAction = Literal["upload", "promote", "rollback", "unload"]
ChangeStatus = Literal["begun", "done", "failed", "refused", "unfinished"]
ChangeRecord = Mapping[str, Any]
LogError = OSError | ObjectStoreError  # Why a record cannot be written.


@dataclass(frozen=True)
class ChangeAuthor:
    """The author and the origin of a change. An empty field is unknown or does not apply."""

    tenant: str = ""
    token: str = ""  # Name of the token in the tokens file, never the token.
    user: str = ""  # User of the operating system that runs a command.
    protocol: str = ""  # Protocol of a call, as in the label `wire` of metrics; or "command".
    method: str = ""  # Method or route of a call, or the name of a command.
    peer: str = ""  # Address and port of the client, or of the last proxy before the server.
    request_id: str = ""

    @classmethod
    def of_command(cls, command: str) -> Self:
        """Return the author of a change that a command makes without a server."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # The user has no name.
            user = str(os.getuid())
        return cls(user=user, protocol="command", method=command)


class RecordLog(Protocol):
    """A log of records. An append writes all its records, or raises a LogError."""

    def append(self, records: Iterable[ChangeRecord]) -> object: ...

    def read(self) -> Iterator[dict[str, Any]]: ...


def _class_name(error: BaseException) -> str:
    return type(error).__name__


class AdapterChangeLog:
    """The record of the changes in the adapter directory `directory`; None: nothing is recorded.

    `changes_log`: the log of changes, if it is not in the directory; refusals always are.
    `reason_name` returns the name of an error's reason. `on_unwritten` is called when a record
    cannot be written; the record then stays in memory until `write_pending` succeeds.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        changes_log: RecordLog | None = None,
        bytes_max: int = LOG_BYTES_MAX,
        files_max: int = LOG_FILES_MAX,
        reason_name: Callable[[BaseException], str] = _class_name,
        on_unwritten: Callable[[LogError], object] = lambda error: None,
    ) -> None:
        self.reason_name = reason_name
        self._on_unwritten = on_unwritten
        self._folder = None if directory is None else directory / FOLDER
        self._lock = threading.Lock()
        self._unwritten: dict[RecordLog, deque[ChangeRecord]] = {}
        if self._folder is not None:
            self._changes = changes_log or JsonLinesLog(
                self._folder / CHANGES_FILE, bytes_max, files_max
            )
            self._refusals = JsonLinesLog(self._folder / REFUSALS_FILE, bytes_max, files_max)
            for log in (self._changes, self._refusals):
                self._unwritten[log] = deque(maxlen=UNWRITTEN_RECORDS_MAX)

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the existing log of the adapter directory that is `folder` or its parent.

        The parent of a tenant's folder is the adapter directory. None: `folder` is in no directory
        that has a log.
        """
        for directory in (folder, folder.absolute().parent):
            if (directory / FOLDER).is_dir():
                return cls(directory)
        return None

    def owner_of(self, folder: Path) -> str:
        """Return the tenant that owns a folder, which is the folder's name; "": no tenant owns it.

        `folder`: the adapter directory of this log, which no tenant owns, or a tenant's folder.
        """
        is_directory = (
            self._folder is None or (folder / FOLDER).absolute() == self._folder.absolute()
        )
        return "" if is_directory else folder.absolute().name

    def create_folder(self) -> None:
        """Create the folder of the log, so that commands find the log."""
        if self._folder is not None:
            self._folder.mkdir(exist_ok=True)

    def check_writable(self) -> None:
        """Raise a LogError if no change can be recorded."""
        if self._folder is not None:
            self.create_folder()
            self._changes.append([])

    def start_change(
        self, action: ChangeAction, adapter: str, author: ChangeAuthor, owner: str = ""
    ) -> "AdapterChange":
        """Return a change that is not recorded yet.

        `adapter`: the name as the author wrote it. `owner`: the tenant whose folder the change
        concerns.
        """
        return AdapterChange(self, action, adapter, author, owner)

    @contextmanager
    def recording(
        self, action: ChangeAction, adapter: str, author: ChangeAuthor, owner: str = ""
    ) -> Iterator["AdapterChange"]:
        """Run a change; if the block raises an error, record it. The arguments: `start_change`."""
        change = self.start_change(action, adapter, author, owner)
        try:
            yield change
        except BaseException as error:
            change.fail(error)
            raise

    def append(self, record: ChangeRecord, *, required: bool) -> None:
        """Write a record, after the records that could not be written before.

        If it cannot be written, raise the LogError if it is `required`, else keep the record.
        """
        if self._folder is None:
            return
        log = self._refusals if record["status"] == "refused" else self._changes
        with self._lock:
            self._write(log, record, required=required)

    def write_pending(self) -> None:
        """Write the records that could not be written before."""
        with self._lock:
            for log, records in self._unwritten.items():
                if records:
                    self._write(log, records.pop(), required=False)

    def read(self) -> Iterator[ChangeRecord]:
        """Yield one record for each change, in the order of their ends; the memory is bounded."""
        if self._folder is not None and self._folder.is_dir():
            records = heapq.merge(self._changes.read(), self._refusals.read(), key=_time_of)
            yield from _join_ends(records)

    def _write(self, log: RecordLog, record: ChangeRecord, *, required: bool) -> None:
        unwritten = self._unwritten[log]
        try:
            self.create_folder()
            log.append([*unwritten, record])
        except (OSError, ObjectStoreError) as error:
            if required:
                raise
            unwritten.append(record)
            self._on_unwritten(error)
        else:
            unwritten.clear()


def read_changes(log: RecordLog) -> Iterator[ChangeRecord]:
    """Yield one record for each change of a log of changes, as `AdapterChangeLog.read`."""
    yield from _join_ends(log.read())


class AdapterChange:
    """One change, from its first check to its end. The methods are called in this order."""

    def __init__(
        self,
        log: AdapterChangeLog,
        action: ChangeAction,
        adapter: str,
        author: ChangeAuthor,
        owner: str,
    ) -> None:
        self._log = log
        self._has_begun = False
        self._has_ended = False
        name, _, _ = adapter.partition("@")
        self._fields: dict[str, Any] = {
            "format": FORMAT,
            "change": secrets.token_hex(8),
            "action": action,
            "adapter": name[:NAME_CHARACTERS_MAX],
            "requested": adapter[:NAME_CHARACTERS_MAX],
            "version": None,
            "current_before": None,
            "current_after": None,
            "digest": "",
            "owner": owner[:NAME_CHARACTERS_MAX],
            **{key: text[:NAME_CHARACTERS_MAX] for key, text in asdict(author).items()},
            "host": socket.gethostname()[:NAME_CHARACTERS_MAX],
            "process": os.getpid(),
        }

    def begin(self, version: int, current_before: int | None, digest: str = "") -> None:
        """Record the change before the directory changes; raise a LogError if that is impossible.

        `current_before`: the version that the name selects before the change; None: no version.
        """
        self._fields |= {"version": version, "current_before": current_before, "digest": digest}
        self._log.append(self._record("begun"), required=True)
        self._has_begun = True

    def finish(self, current_after: int | None) -> None:
        """Record that the directory was changed."""
        self._fields["current_after"] = current_after
        self._end(self._record("done"))

    def fail(self, error: BaseException) -> None:
        """Record the error that ended the change; a change that has ended stays as it is."""
        if self._has_ended:
            return
        status: ChangeStatus = "failed" if self._has_begun else "refused"
        message = str(error)[:MESSAGE_CHARACTERS_MAX]
        self._end(self._record(status, reason=self._log.reason_name(error), message=message))

    def _end(self, record: ChangeRecord) -> None:
        self._has_ended = True
        self._log.append(record, required=False)

    def _record(self, status: ChangeStatus, reason: str = "", message: str = "") -> ChangeRecord:
        status_fields = {"time": format_time(datetime.now(UTC)), "status": status}
        return {**status_fields, **self._fields, "reason": reason, "message": message}


def format_time(time: datetime) -> str:
    """Return a time in UTC as the text that records have. The texts sort by time."""
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _time_of(record: ChangeRecord) -> str:
    return str(record.get("time", ""))


def _join_ends(records: Iterable[ChangeRecord]) -> Iterator[ChangeRecord]:
    """Yield the end of each change, or its beginning as `unfinished` if it has no end.

    A beginning is withheld with the records after it until its end is read, so that the order of
    the records does not change, but at most for OPEN_RECORDS_MAX records.
    """
    withheld: deque[ChangeRecord] = deque()
    # The last beginning of each change without an end, keyed by the id of the change.
    open_changes: dict[Any, ChangeRecord] = {}

    def is_open(record: ChangeRecord) -> bool:
        return open_changes.get(str(record.get("change"))) is record

    for record in records:
        change = str(record.get("change"))
        open_changes.pop(change, None)
        if record.get("status") == "begun":
            open_changes[change] = record
        withheld.append(record)
        while withheld and (not is_open(withheld[0]) or len(withheld) > OPEN_RECORDS_MAX):
            yield from _visible(withheld.popleft(), open_changes)
    while withheld:
        yield from _visible(withheld.popleft(), open_changes)


def _visible(record: ChangeRecord, open_changes: dict[Any, ChangeRecord]) -> Iterator[ChangeRecord]:
    """Yield a record as readers see it: no beginning of a change that has an end."""
    if record.get("status") != "begun":
        yield record
    elif open_changes.get(str(record.get("change"))) is record:
        del open_changes[str(record.get("change"))]
        yield {**record, "status": "unfinished"}
