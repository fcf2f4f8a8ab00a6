"""File tree: byte spans of a checkpoint's files by relative name, in a folder or an archive.

A span is a contiguous byte range of a file on disk: a whole file, or an uncompressed member of an
archive. Files inside an archive are therefore memory-mapped in place, like files of a folder. The
module is independent of the checkpoint formats.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpt.checkpoint.files.safetensors_file import MappedFile
from gpt.errors import CheckpointError

# A recursive scan ignores folders below this depth; the scanned folder has depth 1. The weights of
# an unpacked archive are at most two folders below it.
DEPTH_MAX = 4
# A scan refuses a folder with more files, or more subfolders.
FILES_MAX = 100_000
FOLDERS_MAX = 10_000


@dataclass(frozen=True)
class Span:
    """A byte range of a file: `length` bytes that start at byte `offset`."""

    file: MappedFile
    offset: int
    length: int
    path: Path  # For messages; for a member of an archive, it ends with the member's name.

    def memory(self) -> memoryview:
        """Return the mapped bytes without a copy."""
        mapped: memoryview = self.file.bytes().numpy().data
        return mapped[self.offset : self.offset + self.length]

    def peek(self, count: int) -> bytes:
        """Read the first `count` bytes of the span, or the whole span if it is shorter."""
        with open(self.file.path, "rb") as file:
            file.seek(self.offset)
            return file.read(min(count, self.length))

    def read(self, bytes_max: int) -> bytes:
        """Read the whole span; refuse a span of more than `bytes_max` bytes."""
        if self.length > bytes_max:
            raise CheckpointError(
                f"{self.path} has {self.length} bytes, but the limit for a file of this name is "
                f"{bytes_max}; copy the checkpoint again from the training run"
            )
        return self.peek(self.length)


@dataclass(frozen=True)
class FileTree:
    """The files below `path`, by relative name with forward slashes."""

    path: Path
    spans: Mapping[str, Span] = field(default_factory=dict)

    def subtree(self, folder: str) -> "FileTree":
        prefix = f"{folder}/"
        spans = {
            name.removeprefix(prefix): span
            for name, span in self.spans.items()
            if name.startswith(prefix)
        }
        return FileTree(self.path / folder, spans)


def file_span(path: Path) -> Span:
    return Span(MappedFile(path, 0), 0, path.stat().st_size, path)


def scan_folder(folder: Path) -> FileTree:
    """Return the files of a folder, without those of its subfolders."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    return FileTree(folder, {name: file_span(folder / name) for name in names})


def scan_folder_recursive(folder: Path) -> FileTree:
    """Return the files of a folder and of its subfolders, down to `DEPTH_MAX` levels.

    A symbolic link to a target outside the folder is refused. One exception is allowed: the files
    of a snapshot in the Hugging Face Hub cache are links to the `blobs` folder of the cache.

    Links can form loops. Therefore a link to a folder that contains the link is not followed, and
    the number of folders is limited.
    """
    root = folder.resolve()
    allowed_roots = [root]
    if root.parent.name == "snapshots":
        allowed_roots.append(root.parent.parent / "blobs")
    spans: dict[str, Span] = {}
    folder_count = 0
    pending = [(folder, 1)]
    while pending:
        directory, depth = pending.pop()
        with os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = Path(entry.path)
                if entry.is_symlink():
                    target = _resolve_link(path, allowed_roots)
                    if directory.resolve().is_relative_to(target):
                        continue
                if entry.is_dir() and depth < DEPTH_MAX:
                    pending.append((path, depth + 1))
                elif entry.is_file():
                    spans[path.relative_to(folder).as_posix()] = file_span(path)
        folder_count += 1
        if len(spans) > FILES_MAX or folder_count > FOLDERS_MAX:
            raise CheckpointError(
                f"{folder} has more than {FILES_MAX} files or {FOLDERS_MAX} folders, so it is not "
                "a checkpoint; give the directory of a checkpoint"
            )
    return FileTree(folder, spans)


def _resolve_link(link: Path, allowed_roots: list[Path]) -> Path:
    """Return the target of a link; raise CheckpointError if it is outside the allowed roots."""
    target = Path(os.path.realpath(link))  # `Path.resolve` raises a RuntimeError for a loop.
    if not any(target.is_relative_to(root) for root in allowed_roots):
        raise CheckpointError(
            f"{link} is a link to {target}, outside the checkpoint, and is not followed; if the "
            "target belongs to the checkpoint, replace the link with a copy of it"
        )
    return target
