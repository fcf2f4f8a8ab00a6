"""Files by the names that a checkpoint gives them, whether they lie in a folder or in an archive.

A span is a run of bytes of a file on the disk: all of it, or a member that an archive keeps as it
is. Whoever reads a span does not ask where it lies, so what is inside an archive is mapped in
place. It knows no formats.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpt.checkpoint.files.safetensors_file import MappedFile
from gpt.errors import CheckpointError

# Of an unpacked archive: its weights lie at most two folders down.
DEPTH_MAX = 4
FILES_MAX = 100_000


@dataclass(frozen=True)
class Span:
    """Bytes of a file; `path` is what messages call it, and goes on inside an archive."""

    file: MappedFile
    offset: int
    length: int
    path: Path

    def memory(self) -> memoryview:
        """The mapped bytes."""
        mapped: memoryview = self.file.bytes().numpy().data
        return mapped[self.offset : self.offset + self.length]

    def head(self, count: int) -> bytes:
        with open(self.file.path, "rb") as file:
            file.seek(self.offset)
            return file.read(min(count, self.length))

    def read(self, most: int) -> bytes:
        """All of a small file."""
        if self.length > most:
            raise CheckpointError(
                f"{self.path} has {self.length} bytes, where at most {most} are expected; it is "
                "not what its name says: take the checkpoint from the training run again"
            )
        return self.head(self.length)


@dataclass(frozen=True)
class FileTree:
    """The files below `path`, by their relative names with slashes."""

    path: Path
    spans: Mapping[str, Span] = field(default_factory=dict)

    def under(self, folder: str) -> "FileTree":
        pairs = ((name.partition(f"{folder}/"), span) for name, span in self.spans.items())
        return FileTree(self.path / folder, {n: s for (before, _, n), s in pairs if not before})


def whole_file(path: Path) -> Span:
    return Span(MappedFile(path, 0), 0, path.stat().st_size, path)


def files_in(folder: Path) -> FileTree:
    """The files that lie directly in a folder."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    return FileTree(folder, {name: whole_file(folder / name) for name in names})


def files_below(folder: Path) -> FileTree:
    """The files in a folder and its folders. A link that leads out of it is refused.

    Except to where the hub's cache keeps the files of a snapshot.
    """
    real = folder.resolve()
    homes = [real]
    if real.parent.name == "snapshots":
        homes.append(real.parent.parent / "blobs")
    found: dict[str, Span] = {}
    waiting = [(folder, 1)]
    while waiting:
        place, depth = waiting.pop()
        with os.scandir(place) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = Path(entry.path)
                if entry.is_symlink():
                    _refuse_way_out(path, homes)
                if entry.is_dir() and depth < DEPTH_MAX:
                    waiting.append((path, depth + 1))
                elif entry.is_file():
                    found[path.relative_to(folder).as_posix()] = whole_file(path)
        if len(found) > FILES_MAX:
            raise CheckpointError(f"{folder} has more than {FILES_MAX} files; it is no checkpoint")
    return FileTree(folder, found)


def _refuse_way_out(link: Path, homes: list[Path]) -> None:
    target = link.resolve()
    if not any(target.is_relative_to(home) for home in homes):
        raise CheckpointError(
            f"{link} is a link to {target}, outside the checkpoint; what lies there is not read: "
            "put the file itself in its place if it belongs here"
        )
