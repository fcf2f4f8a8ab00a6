"""Conversion journal: records every finished tensor, so that a killed run can resume.

A tensor is recorded only after all its bytes are on disk. If a run is killed, the last line can be
incomplete; that line is ignored. The first line has the hash of the conversion plan. This hash
covers the target's layout and samples of the source's weights. A journal with another hash is
refused, except a journal of another release of Preamble: releases may plan other files for the same
command, so such a journal is discarded, and the conversion starts over.
"""

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from gpt.errors import CheckpointError
from gpt.software_versions import preamble_version

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedTensor:
    """A logical tensor that is completely written; the field names are keys of the journal."""

    name: str
    sha256: str  # Hash of the bytes in the source's dtype.
    stored: str  # SHA-256 of the bytes in the target's dtype.
    finite: bool  # Whether all values of the source are finite.
    # Whether the values stay finite in the target's dtype. Blocks of rows that have a non-finite
    # value in the source are not checked.
    fits: bool
    crcs: tuple[int, ...]  # CRC-32 of each placement's bytes, in the order of the files.


class Journal:
    def __init__(self, path: Path, plan_hash: str) -> None:
        """Open or create the journal; read the tensors of an earlier run into `finished`."""
        self.path = path
        self.finished: dict[str, FinishedTensor] = {}
        self._file = open(path, "a+b")  # noqa: SIM115 (closed by close)
        self._file.seek(0)
        text = self._file.read()
        complete_lines = text[: text.rfind(b"\n") + 1]
        self._file.truncate(len(complete_lines))
        lines = complete_lines.splitlines()
        release = preamble_version()
        header = json.dumps({"plan": plan_hash, "release": release})
        if not lines:
            self._append([header])
            return
        try:
            old_header = dict(json.loads(lines[0]))
            is_same_plan = old_header["plan"] == plan_hash
            # A journal without a release is of a release before 0.2.
            is_other_release = old_header.get("release") != release
            if is_same_plan:
                for line in lines[1:]:
                    record = json.loads(line)
                    tensor = FinishedTensor(**{**record, "crcs": tuple(record["crcs"])})
                    self.finished[tensor.name] = tensor
        except (ValueError, KeyError, TypeError):
            # The file is not a journal of this plan.
            is_same_plan = False
            is_other_release = False
        if is_same_plan:
            return
        if is_other_release:
            log.warning(
                "another release of Preamble began the conversion in %s and planned other files; "
                "the conversion starts over",
                path.parent,
            )
            self._file.truncate(0)
            self._append([header])
            return
        self.close()
        raise CheckpointError(
            f"{path.parent} has the files of a different conversion: of another source or with "
            "other options; remove that directory, and run again"
        )

    def reset(self) -> None:
        """Remove the records of all tensors; the first line remains.

        The removal is not flushed to disk, so the old records can reappear after a power failure.
        If all files of the layout then have their full sizes, a resumed run skips the tensors in
        these records, although their bytes may be missing. Only the check of the finished target
        (`_check_written` in `convert`) can find missing bytes.
        """
        self._file.seek(0)
        self._file.truncate(len(self._file.readline()))
        self.finished = {}

    def commit(self, tensors: Iterable[FinishedTensor]) -> None:
        """Record tensors as finished; call it only after their bytes are on disk."""
        tensors = list(tensors)
        self._append([json.dumps(asdict(tensor)) for tensor in tensors])
        self.finished |= {tensor.name: tensor for tensor in tensors}

    def _append(self, lines: list[str]) -> None:
        self._file.write("".join(f"{line}\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
