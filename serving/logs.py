"""Logs: one line for each event, as text or as JSON, from the front end and from every rank.

A message is `event=NAME key=value ...`, and a JSON line has the same words as fields, so that what
is written is written once. No prompt and no answer is ever in one. What may happen a thousand times
a second is said once a second, with how often it was not said.
"""

import json
import logging
import re
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TextIO

FORMATS = ("text", "json")

_WORD = re.compile(r"""(\w+)=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\S+)""")


class _Json(logging.Formatter):
    """A line as one object; the time is UTC, as logs of many machines are compared."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        words = {key: _bare(value) for key, value in _WORD.findall(message)}
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
        }
        if self._rank is not None:
            line["rank"] = self._rank
        if "event" in words:
            line |= {"event": words.pop("event"), "fields": words}
        else:  # Another library's.
            line["message"] = message
        if record.exc_info:
            line["stack"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Stderr(logging.StreamHandler[TextIO]):
    """Ours, and nobody else's."""


def log_to_stderr(form: str, rank: int | None = None) -> None:
    """Have this process log from now on, each line with its rank if it is one.

    A program that runs us inside it, and logs already, goes on as it does.
    """
    root = logging.getLogger()
    if any(not isinstance(handler, _Stderr) for handler in root.handlers):
        return
    handler = _Stderr(sys.stderr)
    if form == "json":
        handler.setFormatter(_Json(rank))
    else:
        who = "" if rank is None else f"rank={rank} "
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {who}%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


@dataclass
class Sparing:
    """Says when a line is due: of each kind one in so many seconds."""

    period_s: float = 1.0
    _said: dict[str, float] = field(default_factory=dict)  # When each kind was said last.
    _unsaid: dict[str, int] = field(default_factory=dict)

    def due(self, kind: str) -> int | None:
        """How many were not said since the last one; None: this is one of them."""
        now = time.monotonic()
        if now - self._said.get(kind, -self.period_s) < self.period_s:
            self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
            return None
        self._said[kind] = now
        return self._unsaid.pop(kind, 0)


def _bare(word: str) -> str:
    return word[1:-1] if word[0] in "'\"" and word[-1] == word[0] and len(word) > 1 else word
