"""The last steps, kept in memory: what was the engine doing when it ended, or when it was asked?

Steps and outcomes are kept packed, as many as fit in a number and in bytes, and are written as JSON
lines. Token ids, and whatever else would tell what somebody asked, are left out unless wanted. To
write must never hurt what is being written about, so nothing here raises into the loop.
"""

import json
import logging
import os
import secrets
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gpt.sampling_params import Sampling
from serving.messages import Begin, Load, Outcome, Step, encode, outcome, to_rank

log = logging.getLogger(__name__)

# Long prompts make long steps; so the ring is bounded in bytes too.
BYTES_MAX = 64 << 20

# What crashes leave behind: ranks that are started again and again must not fill a disk.
CRASHES, CRASHES_MAX = "preamble-flight-*.jsonl", 20

# What tells no token. All other fields of a request are counted, or left out.
_SHOWN = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("typical_p", "no_repeat_ngram_size", "length_decay"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logprobs", "prompt_logprobs"),
)
_COUNTED = ("logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids")


@dataclass
class _Leg:
    """One step, and its outcome if it has come."""

    number: int
    step: bytes
    began: float  # Of the wall clock, for whoever compares logs.
    rewrites: list[int]  # Bytes of each, which are not kept,
    fills: list[int]  # nor are those of these.
    outcome: bytes | None = None
    ended: float | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.step) + len(self.outcome or b"")


class Flight:
    """A ring of the last steps. The loop notes; any thread may write."""

    def __init__(self, steps_max: int, bytes_max: int = BYTES_MAX) -> None:
        self._legs: deque[_Leg] = deque()
        self._steps_max, self._bytes_max, self._bytes = steps_max, bytes_max, 0

    def begin(self, step: Step) -> None:
        """Note a step that is about to run."""
        sizes = [len(rewrite.data) for rewrite in step.rewrites]
        filled = [len(fill.data) for fill in step.fills]
        if sizes or filled:
            bare = [msgspec.structs.replace(rewrite, data=b"") for rewrite in step.rewrites]
            empty = [msgspec.structs.replace(fill, data=b"") for fill in step.fills]
            step = msgspec.structs.replace(step, rewrites=bare, fills=empty)
        leg = _Leg(step.number, encode(step), time.time(), sizes, filled)
        self._legs.append(leg)
        self._bytes += leg.size_bytes
        while len(self._legs) > self._steps_max or self._bytes > self._bytes_max:
            self._bytes -= self._legs.popleft().size_bytes
            if not self._legs:
                break

    def end(self, outcome: Outcome) -> None:
        """Note what came of a step; the last few have none yet."""
        for leg in reversed(self._legs):
            if leg.number == outcome.number and leg.outcome is None:
                leg.outcome, leg.ended = encode(outcome), time.time()
                self._bytes += len(leg.outcome)
                return

    def write(self, path: str | Path, why: str, load: Load, *, ids: bool = False) -> bool:
        """Write the ring, whole or not at all, for its owner's eyes. False: it could not be."""
        path = Path(path)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            head = {"why": why, "at": time.time(), "pid": os.getpid(), "ids": ids}
            legs = list(self._legs)
            lines = [head | {"steps": len(legs), "load": _plain(load)}]
            lines += [_line(leg, ids) for leg in legs]
            text = "".join(json.dumps(line, allow_nan=True) + "\n" for line in lines)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except Exception as error:  # Whatever it is: the engine has troubles of its own.
            log.warning("event=flight_not_written file=%s reason=%r", path, str(error))
            with suppress(OSError):
                part.unlink()
            return False
        log.info("event=flight_written file=%s steps=%d why=%r", path, len(legs), why)
        return True


def crash_path(folder: str | None) -> Path:
    """Where to write after a crash: a name of its own each time. The oldest of many go."""
    place = Path(folder) if folder is not None else Path(tempfile.gettempdir())
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for old in sorted(place.glob(CRASHES))[: 1 - CRASHES_MAX]:
        with suppress(OSError):  # Another user's, say.
            old.unlink()
    return place / f"preamble-flight-{stamp}-{os.getpid()}-{secrets.token_hex(8)}.jsonl"


def _line(leg: _Leg, ids: bool) -> dict[str, Any]:
    """A step as one record: sizes and numbers, and ids only if they are wanted."""
    step = to_rank(leg.step)
    assert isinstance(step, Step)
    line: dict[str, Any] = {
        "number": step.number,
        "began": leg.began,
        "ms": None if leg.ended is None else round((leg.ended - leg.began) * 1e3, 3),
        "tokens": sum(step.lengths),
        "slots": step.slots,
        "past": step.past,
        "lengths": step.lengths,
        "drafts": step.drafts,
        "draws": [int(draw) for draw in step.draws],
        "scores": step.scores,
        "begins": [_begin(begin, ids) for begin in step.begins],
        "tables": [_plain(table) for table in step.tables],
        "copies": step.copies,
        "clears": step.clears,
        "rewrites": [
            {"start": rewrite.start, "digest": rewrite.digest, "bytes": size}
            for rewrite, size in zip(step.rewrites, leg.rewrites, strict=True)
        ],
        "fills": [
            {"digest": fill.digest, "start": fill.start, "blocks": fill.blocks, "bytes": size}
            for fill, size in zip(step.fills, leg.fills, strict=True)
        ],
        "outcome": None if leg.outcome is None else _outcome(outcome(leg.outcome), ids),
    }
    return line | ({"ids": step.ids} if ids else {})


def _begin(begin: Begin, ids: bool) -> dict[str, Any]:
    made = {
        "slot": begin.slot,
        "prompt_tokens": len(begin.prompt),
        "made_tokens": len(begin.made),
        "sampling": _sampling(begin.sampling, ids),
        "guide": begin.guide and begin.guide.kind,
    }
    if ids:
        made |= {"prompt": begin.prompt, "made": begin.made}
    return made


def _sampling(sampling: Sampling, ids: bool) -> dict[str, Any]:
    shown = {name: getattr(sampling, name) for name in (*_SHOWN, "seed")}
    for name in _COUNTED:
        value = getattr(sampling, name)
        shown[name] = value if ids else len(value)
    return shown


def _outcome(outcome: Outcome, ids: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "drawn": len(outcome.tokens),
        "scored": len(outcome.scores) + sum(map(len, outcome.prompt_scores)),
        "faults": outcome.faults,
        "stuck": outcome.stuck,
        "seconds": outcome.seconds,
    }
    return made | ({"drawn_ids": outcome.tokens} if ids else {})


def _plain(struct: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(struct)
