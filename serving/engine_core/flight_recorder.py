"""Flight recorder: ring buffer of recent steps, dumped on a crash or on SIGUSR2.

The buffer stores steps and outcomes in encoded form, and is limited in steps and in bytes. A dump
has one JSON line per step. Token ids, and other values that reveal a prompt, are written only if
configured. An error while writing is logged and not raised, so it cannot stop the engine loop.
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

from gpt.files.atomic_files import write_atomic
from gpt.sampling_params import SamplingParams
from serving.messages import (
    EngineStats,
    Outcome,
    SlotInit,
    Step,
    decode_outcome,
    decode_to_rank,
    encode,
)

log = logging.getLogger(__name__)

# Steps with long prompts are large, so the ring buffer is also limited in bytes.
RING_BYTES_MAX = 64 << 20

# Only the newest crash dumps are kept, so that ranks that crash repeatedly do not fill the disk.
CRASH_FILES_PATTERN, CRASH_FILES_MAX = "preamble-flight-*.jsonl", 20

# The sampling parameters in a dump. The values of _SAMPLING_SHOWN and the seed are always written.
# The parameters in _SAMPLING_COUNTED contain token ids: without `with_token_ids`, only their
# lengths are written.
_SAMPLING_SHOWN = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "no_repeat_ngram_size",
    "length_decay",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "prompt_logprobs",
)
_SAMPLING_COUNTED = ("logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids")


@dataclass
class RecordedStep:
    """An encoded step, and its outcome if it is known."""

    step_id: int
    step: bytes
    started_at: float  # Wall-clock time, as in the logs.
    # Number of data bytes of each adapter write and of each prefix write. The `step` is stored
    # without these data.
    adapter_write_bytes: list[int]
    prefix_write_bytes: list[int]
    outcome: bytes | None = None
    ended_at: float | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.step) + len(self.outcome or b"")


class FlightRecorder:
    """Ring buffer of recent steps. The engine loop fills it; any thread may write it to a file."""

    def __init__(self, steps_max: int, ring_bytes_max: int = RING_BYTES_MAX) -> None:
        self._steps: deque[RecordedStep] = deque()
        self._steps_max = steps_max
        self._ring_bytes_max = ring_bytes_max
        self._ring_bytes = 0

    def record_step(self, step: Step) -> None:
        """Record a step that is about to be launched."""
        adapter_bytes = [len(adapter_write.data) for adapter_write in step.adapter_writes]
        prefix_bytes = [len(prefix_write.data) for prefix_write in step.prefix_writes]
        if step.linear_writes:
            linear_writes = [
                msgspec.structs.replace(linear_write, linears=[])
                for linear_write in step.linear_writes
            ]
            step = msgspec.structs.replace(step, linear_writes=linear_writes)
        if adapter_bytes or prefix_bytes:
            adapter_writes = [
                msgspec.structs.replace(adapter_write, data=b"")
                for adapter_write in step.adapter_writes
            ]
            prefix_writes = [
                msgspec.structs.replace(prefix_write, data=b"")
                for prefix_write in step.prefix_writes
            ]
            step = msgspec.structs.replace(
                step, adapter_writes=adapter_writes, prefix_writes=prefix_writes
            )
        recorded_step = RecordedStep(
            step.step_id, encode(step), time.time(), adapter_bytes, prefix_bytes
        )
        self._steps.append(recorded_step)
        self._ring_bytes += recorded_step.size_bytes
        while len(self._steps) > self._steps_max or self._ring_bytes > self._ring_bytes_max:
            self._ring_bytes -= self._steps.popleft().size_bytes
            if not self._steps:
                break

    def record_outcome(self, outcome: Outcome) -> None:
        """Record the outcome of a step, if the step is still in the buffer."""
        # The search begins at the end, because steps in flight are the newest ones.
        for recorded_step in reversed(self._steps):
            if recorded_step.step_id == outcome.step_id and recorded_step.outcome is None:
                recorded_step.outcome = encode(outcome)
                recorded_step.ended_at = time.time()
                self._ring_bytes += len(recorded_step.outcome)
                return

    def write(
        self, path: str | Path, reason: str, stats: EngineStats, *, with_token_ids: bool = False
    ) -> bool:
        """Write the ring buffer atomically, with file mode 0600; return whether this succeeded."""
        path = Path(path)
        try:
            header = {"why": reason, "at": time.time(), "pid": os.getpid(), "ids": with_token_ids}
            recorded_steps = list(self._steps)
            lines = [header | {"steps": len(recorded_steps), "load": _struct_record(stats)}]
            lines += [
                _step_record(recorded_step, with_token_ids) for recorded_step in recorded_steps
            ]
            text = "".join(json.dumps(line, allow_nan=True) + "\n" for line in lines)
            write_atomic(path, text.encode(), mode=0o600)
        except Exception as error:  # A failed dump must not stop the engine loop.
            log.warning("event=flight_not_written file=%s reason=%r", path, str(error))
            return False
        log.info("event=flight_written file=%s steps=%d why=%r", path, len(recorded_steps), reason)
        return True


def crash_path(folder: str | None) -> Path:
    """Return a new path for a dump, and remove the oldest dumps.

    At most `CRASH_FILES_MAX` dumps remain, the new one included.
    """
    directory = Path(folder) if folder is not None else Path(tempfile.gettempdir())
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for old_file in sorted(directory.glob(CRASH_FILES_PATTERN))[: 1 - CRASH_FILES_MAX]:
        with suppress(OSError):  # For example, a file of another user.
            old_file.unlink()
    return directory / f"preamble-flight-{stamp}-{os.getpid()}-{secrets.token_hex(8)}.jsonl"


def _step_record(recorded_step: RecordedStep, with_token_ids: bool) -> dict[str, Any]:
    """A step as one JSON record, with token ids only if `with_token_ids`.

    The keys are a file format, and some differ from the names in the code: "begins" are slot inits,
    "tables" block table updates, "rewrites" adapter writes, and "fills" prefix writes.
    """
    step = decode_to_rank(recorded_step.step)
    assert isinstance(step, Step)
    record: dict[str, Any] = {
        "number": step.step_id,
        "began": recorded_step.started_at,
        "ms": None
        if recorded_step.ended_at is None
        else round((recorded_step.ended_at - recorded_step.started_at) * 1e3, 3),
        "tokens": sum(step.lengths),
        "slots": step.slots,
        "past": step.past,
        "lengths": step.lengths,
        "drafts": step.draft_counts,
        "draws": [int(draw) for draw in step.draws],
        "scores": step.prompt_score_counts,
        "begins": [_slot_init_record(slot_init, with_token_ids) for slot_init in step.slot_inits],
        "tables": [_struct_record(table_update) for table_update in step.block_table_updates],
        "copies": step.block_copies,
        "clears": step.block_clears,
        "rewrites": [
            {"start": adapter_write.start, "digest": adapter_write.digest, "bytes": size}
            for adapter_write, size in zip(
                step.adapter_writes, recorded_step.adapter_write_bytes, strict=True
            )
        ],
        "linears": [_struct_record(linear_write) for linear_write in step.linear_writes],
        "adapters": step.adapter_starts,
        "adapted_from": step.adapted_from,
        "fills": [
            {
                "digest": prefix_write.digest,
                "start": prefix_write.start,
                "blocks": prefix_write.blocks,
                "other_group_blocks": prefix_write.other_group_blocks,
                "bytes": size,
            }
            for prefix_write, size in zip(
                step.prefix_writes, recorded_step.prefix_write_bytes, strict=True
            )
        ],
        "outcome": None
        if recorded_step.outcome is None
        else _outcome_record(decode_outcome(recorded_step.outcome), with_token_ids),
    }
    return record | ({"ids": step.token_ids} if with_token_ids else {})


def _slot_init_record(slot_init: SlotInit, with_token_ids: bool) -> dict[str, Any]:
    record = {
        "slot": slot_init.slot,
        "prompt_tokens": len(slot_init.prompt),
        "made_tokens": len(slot_init.output_tokens),
        "sampling": _sampling_record(slot_init.sampling, with_token_ids),
        "guide": slot_init.guide and slot_init.guide.kind,
    }
    if with_token_ids:
        record |= {"prompt": slot_init.prompt, "made": slot_init.output_tokens}
    return record


def _sampling_record(sampling: SamplingParams, with_token_ids: bool) -> dict[str, Any]:
    record = {name: getattr(sampling, name) for name in (*_SAMPLING_SHOWN, "seed")}
    for name in _SAMPLING_COUNTED:
        value = getattr(sampling, name)
        record[name] = value if with_token_ids else len(value)
    return record


def _outcome_record(outcome: Outcome, with_token_ids: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "drawn": len(outcome.tokens),
        "scored": len(outcome.scores) + sum(map(len, outcome.prompt_scores)),
        "faults": outcome.faults,
        "stuck": outcome.stuck,
        "seconds": outcome.seconds,
    }
    return record | ({"drawn_ids": outcome.tokens} if with_token_ids else {})


def _struct_record(struct: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(struct)
