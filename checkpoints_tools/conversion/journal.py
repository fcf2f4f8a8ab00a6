"""What a conversion has done so far, so that a killed one goes on where it was.

A tensor is noted only once all its bytes are on the disk; a line that a kill tore is not believed.
The first line names the plan, down to samples of the source's weights: another source or another
target cannot be mixed in.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from gpt.errors import CheckpointError


@dataclass(frozen=True)
class Done:
    """One logical tensor, wholly written."""

    name: str
    sha256: str  # Of its bytes in the source's dtype.
    stored: str  # The same in the target's dtype.
    finite: bool  # As the source has it.
    fits: bool  # Whether what is finite in the source is so in the target.
    crcs: tuple[int, ...]  # Of its placements' bytes, in the order of their files.


class Journal:
    def __init__(self, path: Path, plan: str) -> None:
        """Open it, or begin it; `done` is what it knows of this very plan."""
        self.path = path
        self.done: dict[str, Done] = {}
        self._file = open(path, "a+b")  # noqa: SIM115 (closed by close)
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        lines = whole.splitlines()
        if not lines:
            self._append([json.dumps({"plan": plan})])
            return
        try:
            known = json.loads(lines[0]) == {"plan": plan}
            for line in lines[1:] if known else ():
                record = json.loads(line)
                done = Done(**{**record, "crcs": tuple(record["crcs"])})
                self.done[done.name] = done
        except (ValueError, KeyError, TypeError):
            known = False  # Whatever wrote here, it was not a run of this plan.
        if not known:
            self.close()
            raise CheckpointError(
                f"{path.parent} is of another source, target or version; remove it, and run again"
            )

    def forget(self) -> None:
        """What it was of is gone: the first line stays, and nothing is done."""
        self._file.seek(0)
        self._file.truncate(len(self._file.readline()))
        self.done = {}

    def commit(self, done: Iterable[Done]) -> None:
        """Only after the bytes of these are on the disk."""
        done = list(done)
        self._append([json.dumps(asdict(one)) for one in done])
        self.done |= {one.name: one for one in done}

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
