"""Logging: writes one line per event, as text or JSON, in the front end and the ranks.

A message is `event=NAME key=value ...`. The JSON formatter parses this text into fields, so that
one log call serves both formats. No line contains a prompt or a completion. An event that can occur
a thousand times a second is logged at most once a second, with the number of suppressed lines. If
stderr is a pipe or a socket whose reader stops reading, lines are dropped, because a write that
blocks would stop the event loop.
"""

import json
import logging
import os
import re
import select
import stat
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TextIO

LOG_FORMATS = ("text", "json")

# A pipe to which `poll` reports free space accepts this number of bytes at once (PIPE_BUF).
PIPE_WRITE_BYTES_MAX = 4096
# Time that a line waits for free space in the pipe. After a dropped line, lines do not wait until
# one is written.
READER_WAIT_MS = 200

_FIELD_PATTERN = re.compile(r"""(\w+)=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\S+)""")


class _JsonFormatter(logging.Formatter):
    """One JSON object per line. Times are UTC, because logs of several machines are compared."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        fields = {key: _unquote(value) for key, value in _FIELD_PATTERN.findall(message)}
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
        }
        if self._rank is not None:
            line["rank"] = self._rank
        if "event" in fields:
            line |= {"event": fields.pop("event"), "fields": fields}
        else:  # Logged by another library.
            line["message"] = message
        if record.exc_info:
            line["stack"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """The handler that `log_to_stderr` installs; the type distinguishes it from other handlers.

    Lines to a pipe or a socket are dropped while it has no space. Before the next line that can be
    written, a line has the number of dropped lines.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._descriptor = _pipe_descriptor(stream)
        self._dropped_lines = 0
        self._is_cut = False  # Whether only a part of the last line was written.

    def emit(self, record: logging.LogRecord) -> None:
        if self._descriptor is None:
            super().emit(record)
            return
        try:
            line = self.format(record) + self.terminator
        except Exception:  # For example, arguments that do not fit the message.
            self.handleError(record)
            return
        if self._dropped_lines:
            note = logging.LogRecord(
                __name__,
                logging.WARNING,
                __file__,
                0,
                "event=log_lines_dropped suppressed=%d",
                (self._dropped_lines,),
                None,
            )
            line = self.format(note) + self.terminator + line
        if self._write(self._descriptor, line.encode("utf-8", "backslashreplace")):
            self._dropped_lines = 0
        else:
            self._dropped_lines += 1

    def _write(self, descriptor: int, line: bytes) -> bool:
        """Write a line in parts that cannot block; return False if not all of it was written."""
        line = b"\n" + line if self._is_cut else line
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        for start in range(0, len(line), PIPE_WRITE_BYTES_MAX):
            wait_ms = 0 if self._dropped_lines else READER_WAIT_MS
            try:
                if not poll.poll(wait_ms):
                    self._is_cut |= start > 0
                    return False
                os.write(descriptor, line[start : start + PIPE_WRITE_BYTES_MAX])
            except OSError:  # The reader has closed the pipe.
                return False
        self._is_cut = False
        return True


def _pipe_descriptor(stream: TextIO) -> int | None:
    """Return the file descriptor of a stream to a pipe or a socket; None for other streams."""
    try:
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError, AttributeError):  # Closed, or not a file, as in tests.
        return None
    return descriptor if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None


def log_to_stderr(log_format: str, rank: int | None = None) -> None:
    """Configure logging of this process to stderr; `rank` is added to each line.

    Does nothing if the application that embeds Preamble has configured logging already.
    """
    root = logging.getLogger()
    if any(not isinstance(handler, _StderrHandler) for handler in root.handlers):
        return
    handler = _StderrHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter(rank))
    else:
        rank_prefix = "" if rank is None else f"rank={rank} "
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)s {rank_prefix}%(message)s")
        )
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


@dataclass
class LogThrottle:
    """Rate limit for log lines: at most one line of each kind in `period_s` seconds."""

    period_s: float = 1.0
    # By kind: the time of the last logged line, on the monotonic clock.
    _last_logged_at: dict[str, float] = field(default_factory=dict)
    _suppressed_counts: dict[str, int] = field(default_factory=dict)

    def claim_line(self, kind: str) -> int | None:
        """Return the number of lines suppressed since the last logged line of this kind.

        None: the caller must suppress this line too.
        """
        now = time.monotonic()
        if now - self._last_logged_at.get(kind, -self.period_s) < self.period_s:
            self._suppressed_counts[kind] = self._suppressed_counts.get(kind, 0) + 1
            return None
        self._last_logged_at[kind] = now
        return self._suppressed_counts.pop(kind, 0)


def _unquote(text: str) -> str:
    return text[1:-1] if text[0] in "'\"" and text[-1] == text[0] and len(text) > 1 else text
