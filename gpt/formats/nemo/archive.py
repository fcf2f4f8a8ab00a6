"""`.nemo` tar archives as file trees: memory-mapped, or unpacked once if compressed.

A tar is untrusted. Each file in the tar must be a regular file with a unique path inside the
archive, and must end before the archive ends. The expansion of a compressed archive is limited. A
compressed archive is unpacked to the user's cache, without files that do not belong to the model;
the unpacked folder appears atomically. The module does not interpret the files.
"""

import gzip
import io
import logging
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from gpt.checkpoint.cached_folders import cached_folder
from gpt.checkpoint.files.file_tree import FILES_MAX, FileTree, Span, scan_folder_recursive
from gpt.checkpoint.files.safetensors_file import MappedFile, refuse_git_lfs_pointer
from gpt.errors import CheckpointError
from gpt.files.regular_files import open_regular_file

GZIP_MAGIC = b"\x1f\x8b"
# `tarfile` reads a member's header, including a long name and extended attributes, into memory.
# This is the limit of one such read.
HEADER_BYTES_MAX = 1 << 20
# Limit of the ratio unpacked size / compressed size. The ratio is near 1 for weights; it can
# exceed 10 for texts.
EXPANSION_MAX = 100
COPY_BYTES = 4 << 20
CONFIG_FILE = "model_config.yaml"
# The files of a model: its config, its weights, and its registered artifacts.
MODEL_FILES = re.compile(
    rf"{re.escape(CONFIG_FILE)}|(\w+/)?model_weights\.ckpt|model_weights/.+|[0-9a-f]{{32}}_[^/]+"
)


def open_nemo_archive(path: Path) -> tuple[FileTree, str]:
    """Return the files of an archive, and a note if they were unpacked (else an empty text)."""
    with open_regular_file(path) as file:
        magic = file.read(8)
    refuse_git_lfs_pointer(path, magic)
    if not magic.startswith(GZIP_MAGIC):
        return _map_members(path), ""
    status = path.stat()
    key_parts = (str(path.resolve()), status.st_size, status.st_mtime_ns)
    unpacked_folder = cached_folder("unpacked", key_parts, lambda folder: _unpack(path, folder))
    tree = scan_folder_recursive(unpacked_folder)
    spans = {
        name: Span(span.file, span.offset, span.length, path / name)
        for name, span in tree.spans.items()
    }
    note = (
        f"the archive is compressed, so it was unpacked to {unpacked_folder}; later starts use the "
        "unpacked files"
    )
    return FileTree(path, spans), note


def _map_members(path: Path) -> FileTree:
    """Return the members of an uncompressed archive as spans of the mapped file."""
    size = path.stat().st_size
    mapped_file = MappedFile(path, 0)
    spans = {}
    with open(path, "rb") as file:
        for name, member in _iter_members(path, _BoundedReader(file, size)):
            if member.offset_data + member.size > size:
                raise _broken_archive_error(
                    path, f"ends at byte {size}, before the end of its member {name}"
                )
            spans[name] = Span(mapped_file, member.offset_data, member.size, path / name)
    return FileTree(path, spans)


def _unpack(path: Path, target: Path) -> None:
    """Write the model's files of a compressed archive to the folder `target`."""
    size = path.stat().st_size
    _refuse_full_disk(path, target, size)
    unpacked_bytes = 0
    with open(path, "rb") as compressed_file, gzip.GzipFile(fileobj=compressed_file) as file:
        bounded_reader = _BoundedReader(cast(Any, file), EXPANSION_MAX * size + HEADER_BYTES_MAX)
        for name, member in _iter_members(path, bounded_reader):
            if not MODEL_FILES.fullmatch(name):
                continue
            if member.offset_data + member.size > bounded_reader.offset_max:
                raise _broken_archive_error(
                    path, f"grows by more than {EXPANSION_MAX} times when {name} is unpacked"
                )
            _refuse_full_disk(path, target, member.size)
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with open(target / name, "xb") as out:
                for block in _read_blocks(path, file, member):
                    out.write(block)
            unpacked_bytes += member.size
    logging.getLogger(__name__).info("event=nemo_unpacked path=%s bytes=%d", path, unpacked_bytes)


def _read_blocks(path: Path, file: gzip.GzipFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    """Yield the bytes of a member, which begin at the current position of `file`."""
    remaining_bytes = member.size
    while remaining_bytes:
        try:
            block = file.read(min(COPY_BYTES, remaining_bytes))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _broken_archive_error(path, f"cannot be unpacked ({str(error)[:120]})") from None
        if not block:
            raise _broken_archive_error(path, f"ends within its member {member.name[:80]}")
        remaining_bytes -= len(block)
        yield block


def _refuse_full_disk(path: Path, target: Path, bytes_needed: int) -> None:
    free_bytes = shutil.disk_usage(target).free
    if bytes_needed > free_bytes:
        raise CheckpointError(
            f"{path} is compressed and must be unpacked: {bytes_needed} bytes are needed in "
            f"{target.parent}, but {free_bytes} are free; free disk space, set XDG_CACHE_HOME to a "
            "folder on a larger disk, or unpack the archive with tar and give the directory"
        )


def _iter_members(path: Path, file: "_BoundedReader") -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Yield the path and the header of each regular file; skip folders, refuse other members."""
    names: set[str] = set()
    try:
        with tarfile.TarFile(fileobj=cast(Any, file), mode="r") as archive:
            count = 0
            while (member := archive.next()) is not None:
                count += 1
                if count > FILES_MAX or member.size < 0:
                    raise _broken_archive_error(
                        path, f"has more than {FILES_MAX} members, or a member of negative size"
                    )
                name = _member_path(path, member)
                # TarFile keeps a list of all members, which would grow without limit.
                archive.members.clear()  # type: ignore[attr-defined]
                if member.isdir() or not name:
                    continue
                if not member.isreg() or member.issparse():
                    raise _broken_archive_error(
                        path, f"has {name}, which is {_member_kind(member)}, not a regular file"
                    )
                if name in names:
                    raise _broken_archive_error(path, f"has {name} twice")
                names.add(name)
                yield name, member
    except CheckpointError:
        raise
    # Errors of a broken tar, a broken gzip stream, or invalid numbers.
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, ValueError, OverflowError) as error:
        raise _broken_archive_error(path, f"cannot be read ({str(error)[:120]})") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _broken_archive_error(path, f"cannot be read ({str(error)[:120]})") from None


def _member_path(path: Path, member: tarfile.TarInfo) -> str:
    """Return a member's path without `./`; the path of the archive's root folder is empty."""
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts or "\0" in member.name or not member.name:
        raise _broken_archive_error(path, f"has {member.name[:80]!r}, a path outside the archive")
    return "/".join(part for part in parts if part not in ("", "."))


def _member_kind(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return f"a link to {member.linkname[:80]!r}"
    return "a sparse file" if member.issparse() else "a device or a pipe"


def _broken_archive_error(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {problem}; it is broken or hostile: copy it again from the training run"
    )


class _BoundedReader(io.RawIOBase):
    """A file that limits a read to `HEADER_BYTES_MAX` and a seek to `offset_max`."""

    def __init__(self, file: io.BufferedReader, offset_max: int) -> None:
        self.file = file
        self.offset_max = offset_max

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= HEADER_BYTES_MAX:
            raise tarfile.ReadError(f"a header has {size} bytes; the limit is {HEADER_BYTES_MAX}")
        return self.file.read(size)

    def tell(self) -> int:
        return self.file.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence or not 0 <= offset <= self.offset_max:
            raise tarfile.ReadError("unexpected end of data")
        return self.file.seek(offset)
