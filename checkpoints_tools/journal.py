"""What a conversion has done so far, so that a killed one goes on where it was.

A tensor is noted only once all its bytes are on the disk; a line that a kill tore is not believed.
The first line names the plan, down to samples of the source's weights: another source or another
target cannot be mixed in. A lock keeps two runs from one target.
"""

import fcntl
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
    finite: bool
    crcs: tuple[int, ...]  # Of its placements' bytes, in the order of their files.


class Journal:
    def __init__(self, path: Path, plan: str) -> None:
        """Open it, or begin it; `done` is what it knows of this very plan."""
        self.path = path
        self.done: dict[str, Done] = {}
        self._file = open(path, "a+b")  # noqa: SIM115 (closed by close)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise CheckpointError(
                f"{path.parent} is being written by another run; wait for it, or stop it first"
            ) from None
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        lines = whole.splitlines()
        self.begins = not lines
        if self.begins:
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

    def commit(self, done: Iterable[Done]) -> None:
        """Only after the bytes of these are on the disk."""
        done = list(done)
        self._append([json.dumps(asdict(one)) for one in done])
        self.done |= {one.name: one for one in done}

    def _append(self, lines: list[str]) -> None:
        self._file.write("".join(f"{line}\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def end(self) -> None:
        """All is done, and what the notes are of is about to go elsewhere."""
        self.path.unlink()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
