"""A `.nemo` archive as files: mapped in place where it is a plain tar, else unpacked once.

A tar is made by anyone: its members must lie inside it, be plain files, each once; what they claim
must fit the archive, and a compressed one may not grow without bound. Nothing is extracted but
what a model needs, and that to the user's cache, all of it at once or nothing.
It knows no models.
"""

import gzip
import hashlib
import io
import json
import logging
import os
import re
import secrets
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from gpt.checkpoint.digest import cache_folder
from gpt.checkpoint.files.file_tree import FILES_MAX, FileTree, Span, files_below
from gpt.checkpoint.files.safetensors_file import MappedFile, refuse_pointer
from gpt.errors import CheckpointError

GZIP = b"\x1f\x8b"
# A member's long name and attributes are read whole; more than this is no name.
HEADER_BYTES_MAX = 1 << 20
# Trained weights hardly shrink; text does, some tens of times.
GROWTH_MAX = 100
COPY_BYTES = 4 << 20
CONFIG = "model_config.yaml"
# What a model is made of: its config, its weights, and the files that were registered with it.
WANTED = re.compile(
    rf"{re.escape(CONFIG)}|(\w+/)?model_weights\.ckpt|model_weights/.+|[0-9a-f]{{32}}_[^/]+"
)


def open_archive(path: Path) -> tuple[FileTree, str]:
    """The files of an archive, and a note if they had to be unpacked."""
    with open(path, "rb") as file:
        head = file.read(8)
    refuse_pointer(path, head)
    if not head.startswith(GZIP):
        return _members_in_place(path), ""
    status = path.stat()
    facts = (str(path.resolve()), status.st_size, status.st_mtime_ns)
    place = kept("unpacked", facts, lambda folder: _unpack(path, folder))
    tree = files_below(place)
    spans = {
        name: Span(span.file, span.offset, span.length, path / name)
        for name, span in tree.spans.items()
    }
    note = f"it is compressed, so it was unpacked to {place}, where the next start finds it"
    return FileTree(path, spans), note


def kept(kind: str, facts: Sequence[object], fill: Callable[[Path], None]) -> Path:
    """A folder of the user's cache that `fill` makes, once for these facts."""
    root = cache_folder().parent / kind
    place = root / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    if place.is_dir():
        return place
    part = root / f".{place.name}.{secrets.token_hex(4)}.partial"
    try:
        part.mkdir(parents=True)
        fill(part)
        try:
            part.rename(place)
        except OSError:
            if not place.is_dir():  # Else another process was quicker.
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return place


def _members_in_place(path: Path) -> FileTree:
    size = path.stat().st_size
    mapped = MappedFile(path, 0)
    spans = {}
    with open(path, "rb") as file:
        for name, member in _members(path, _Careful(file, size)):
            if member.offset_data + member.size > size:
                raise _broken(path, f"ends at byte {size}, before its member {name} does")
            spans[name] = Span(mapped, member.offset_data, member.size, path / name)
    return FileTree(path, spans)


def _unpack(path: Path, target: Path) -> None:
    size = path.stat().st_size
    _refuse_full(path, target, size)
    total = 0
    with open(path, "rb") as raw, gzip.GzipFile(fileobj=raw) as file:
        careful = _Careful(cast(Any, file), GROWTH_MAX * size + HEADER_BYTES_MAX)
        for name, member in _members(path, careful):
            if not WANTED.fullmatch(name):
                continue
            if member.offset_data + member.size > careful.most:
                raise _broken(path, f"grows more than {GROWTH_MAX} times with its member {name}")
            _refuse_full(path, target, member.size)
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with open(target / name, "xb") as out:
                for block in _blocks(path, file, member):
                    out.write(block)
                out.flush()
                os.fsync(out.fileno())
            total += member.size
    logging.getLogger(__name__).info("event=nemo_unpacked path=%s bytes=%d", path, total)


def _blocks(path: Path, file: gzip.GzipFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    left = member.size
    while left:
        try:
            block = file.read(min(COPY_BYTES, left))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _broken(path, f"cannot be unpacked ({str(error)[:120]})") from None
        if not block:
            raise _broken(path, f"ends within its member {member.name[:80]}")
        left -= len(block)
        yield block


def _refuse_full(path: Path, target: Path, need: int) -> None:
    free = shutil.disk_usage(target).free
    if need > free:
        raise CheckpointError(
            f"{path} is compressed and must be unpacked: {need} bytes are needed in "
            f"{target.parent}, {free} are free; make room, set XDG_CACHE_HOME to a folder on a "
            "larger disk, or unpack it yourself with tar and give the directory"
        )


def _members(path: Path, file: "_Careful") -> Iterator[tuple[str, tarfile.TarInfo]]:
    """The archive's plain files, by names inside it. Any other kind of member is refused."""
    seen: set[str] = set()
    try:
        with tarfile.TarFile(fileobj=cast(Any, file), mode="r") as archive:
            count = 0
            while (member := archive.next()) is not None:
                count += 1
                if count > FILES_MAX or member.size < 0:
                    raise _broken(path, f"has more than {FILES_MAX} members, or one of no size")
                name = _inside(path, member)
                archive.members.clear()  # type: ignore[attr-defined] # It would remember each.
                if member.isdir() or not name:
                    continue
                if not member.isreg() or member.issparse():
                    raise _broken(path, f"holds {name}, which is {_kind(member)}, not a plain file")
                if name in seen:
                    raise _broken(path, f"holds {name} twice")
                seen.add(name)
                yield name, member
    except CheckpointError:
        raise
    # A broken tar, a broken gzip stream, and numbers that are none.
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, ValueError, OverflowError) as error:
        raise _broken(path, f"cannot be read ({str(error)[:120]})") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _broken(path, f"cannot be read ({str(error)[:120]})") from None


def _inside(path: Path, member: tarfile.TarInfo) -> str:
    """A member's name without a leading `./`; empty for the archive's own folder."""
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts or "\0" in member.name or not member.name:
        raise _broken(path, f"holds {member.name[:80]!r}, which would lie outside it")
    return "/".join(part for part in parts if part not in ("", "."))


def _kind(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return f"a link to {member.linkname[:80]!r}"
    return "a sparse file" if member.issparse() else "a device or a pipe"


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {what}; it is broken or hostile: copy it again from where it was trained"
    )


class _Careful(io.RawIOBase):
    """A file that is read forward, in small pieces, and not beyond `most` bytes."""

    def __init__(self, file: io.BufferedReader, most: int) -> None:
        self.file, self.most = file, most

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= HEADER_BYTES_MAX:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self.file.read(size)

    def tell(self) -> int:
        return self.file.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence or not 0 <= offset <= self.most:
            raise tarfile.ReadError("unexpected end of data")
        return self.file.seek(offset)
