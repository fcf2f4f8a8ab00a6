"""JSON lines log: an append-only file with one record per line, and its rotated predecessors.

Several processes and threads may append to one log. Each append holds the log's lock, so lines do
not mix. An append writes all its records and flushes them to disk, or it raises an OSError and
leaves the log unchanged, for example on a full disk. Only a line with a line break is a record: a
half line that a killed writer left is skipped by readers, and removed by the next writer.

The log `x.jsonl` consists of the files `x.jsonl` (the newest records), `x.jsonl.1`, `x.jsonl.2` and
so on. `x.jsonl.lock` is the lock file. The module imports only the standard library, and knows
nothing about the content of records.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gpt.files.atomic_files import fsync_folder
from gpt.files.file_locks import FILE_MODE, lock_file
from gpt.files.regular_files import open_regular_descriptor, open_regular_file

# Bytes of a line. Readers skip longer lines, which no writer of this module has written.
LINE_BYTES_MAX = 64 << 10
BLOCK_BYTES = 64 << 10


@dataclass(frozen=True)
class JsonLinesLog:
    """A log in the files `path`, `path.1`, ..., of which `path.1` is the newest rotated file."""

    path: Path
    bytes_max: int  # Size above which the file is rotated. One append may be larger.
    files_max: int  # Number of files, the newest one included.

    def append(self, records: Iterable[Mapping[str, Any]]) -> int:
        """Append the records and flush them to disk; return the number of deleted old files."""
        lines = b"".join(map(_encode, records))
        with self._locked():
            deleted_files = self._rotate(len(lines))
            self._append_lines(lines)
        return deleted_files

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield all records, the oldest first; damaged lines are skipped.

        The memory does not depend on the size of the files. Records that are appended, and files
        that are rotated during the iteration, do not change its order.
        """
        with ExitStack() as stack:
            for file in self._open_all(stack):
                yield from _read_records(file)

    def _open_all(self, stack: ExitStack) -> list[BinaryIO]:
        """Open all files under the lock, so that no rotation moves a file meanwhile."""
        files: list[BinaryIO] = []
        with ExitStack() as lock:
            # Without the lock, a concurrent rotation may hide or repeat the records of a file.
            # That is better than no records: a reader may have no permission for the lock file.
            with suppress(OSError):
                lock.enter_context(self._locked(is_shared=True))
            rotated_paths = [path for _, path in sorted(self._rotated_files(), reverse=True)]
            for path in (*rotated_paths, self.path):
                with suppress(FileNotFoundError):
                    files.append(stack.enter_context(open_regular_file(path)))
        return files

    def _locked(self, *, is_shared: bool = False) -> AbstractContextManager[None]:
        """Hold the lock, which readers share."""
        return lock_file(self.path.with_name(f"{self.path.name}.lock"), is_shared=is_shared)

    def _rotate(self, new_bytes: int) -> int:
        """Rename the files if the newest one has no space left; return the number of deleted files.

        If the process is killed between two renames, one number is free. The next rotation then
        fills this number, so no file is lost.
        """
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return 0
        if size == 0 or size + new_bytes <= self.bytes_max:
            return 0
        deleted_files = self._delete_surplus_files()  # After a change of `files_max`.
        rotated_files = dict(self._rotated_files())
        free = 1
        while free in rotated_files:
            free += 1
        for number in range(free, 0, -1):
            os.replace(self._rotated_path(number - 1), self._rotated_path(number))
        deleted_files += self._delete_surplus_files()
        fsync_folder(self.path.parent)
        return deleted_files

    def _delete_surplus_files(self) -> int:
        surplus_paths = [path for number, path in self._rotated_files() if number >= self.files_max]
        for path in surplus_paths:
            path.unlink()
        return len(surplus_paths)

    def _rotated_path(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _rotated_files(self) -> Iterator[tuple[int, Path]]:
        """Yield the number and the path of each rotated file."""
        pattern = re.compile(rf"{re.escape(self.path.name)}\.([1-9][0-9]{{0,5}})")
        with os.scandir(self.path.parent) as entries:
            for entry in entries:
                if match := pattern.fullmatch(entry.name):
                    yield int(match[1]), Path(entry.path)

    def _append_lines(self, lines: bytes) -> None:
        is_new = not self.path.exists()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        descriptor = open_regular_descriptor(self.path, flags, FILE_MODE)
        with open(descriptor, "r+b", buffering=0) as file:
            size = _size_without_half_line(file)
            if size < file.seek(0, os.SEEK_END):
                file.truncate(size)
            try:
                _write_all(file, lines)
                os.fsync(file.fileno())
            except BaseException:
                with suppress(OSError):
                    file.truncate(size)
                raise
        if is_new:
            fsync_folder(self.path.parent)


def _encode(record: Mapping[str, Any]) -> bytes:
    """Return the line of a record. It is ASCII text: JSON escapes all control characters."""
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    assert len(line) <= LINE_BYTES_MAX, "the creator of a record bounds its texts"
    return line


def _write_all(file: BinaryIO, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def _size_without_half_line(file: BinaryIO) -> int:
    """Return the size of the file up to its last line break."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        line_break = file.read(end - start).rfind(b"\n")
        if line_break >= 0:
            return start + line_break + 1
        end = start
    return 0


def _read_records(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; skip half lines, long lines, and lines without an object."""
    is_continued = False  # Whether the present part continues a line that is too long.
    while part := file.readline(LINE_BYTES_MAX + 1):
        is_complete = part.endswith(b"\n")
        if is_complete and not is_continued:
            with suppress(ValueError, RecursionError):
                record = json.loads(part)
                if isinstance(record, dict):
                    yield record
        is_continued = not is_complete
