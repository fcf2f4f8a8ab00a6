"""Safetensors file: validates the header before mapping, and returns views of the mapped file.

The format is a header length, a JSON header and raw bytes, so a tensor is a view of the mapped file
and a read allocates no memory. Byte ranges that overlap, leave gaps, or do not end at the end of
the file are refused. The module is independent of the model.
"""

import json
import math
import mmap
import resource
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from gpt.errors import CheckpointError
from gpt.files.buffer_pool import BufferPool
from gpt.files.regular_files import open_regular_file, read_regular_file
from gpt.host_limits import available_memory_bytes

# No model has a longer header; a longer one means a broken file or another format.
HEADER_BYTES_MAX = 100 << 20
METADATA_COLONS_MAX = 100_000  # In the metadata of a file whose number of tensors is limited.
TEXT_BYTES_MAX = 64 << 20  # Limit for a config or an index.
CHECKED_BYTES_MIN = 256 << 20  # Smaller files are read without asking for the available memory.
SIZE_MAX = 2**63 - 1  # Limit of torch for a dimension of a tensor.

# Without this flag, Linux refuses a private writable mapping (see `_map`) that is larger than the
# memory. Python's `mmap` module has the flag since version 3.13.
MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

# If fewer file descriptors than this are left, the soft limit of the process is raised.
RESERVED_DESCRIPTORS = 32

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class MappedFile:
    """A file whose bytes after the header (the payload) are mapped at first use.

    All ranks of a node share the pages.
    """

    path: Path
    payload_offset: int  # The length of the header in bytes; 0 for a file without a header.
    lock: threading.Lock = field(default_factory=threading.Lock)
    payload: Tensor | None = None

    def bytes(self) -> Tensor:
        """Return the payload as a uint8 tensor, which must not be written."""
        with self.lock:
            if self.payload is None:
                try:
                    mapped = self._map()
                except OSError as error:
                    raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from None
                # Reads are twice as fast with this advice if the page cache is cold.
                mapped.madvise(mmap.MADV_SEQUENTIAL)
                self.payload = torch.frombuffer(
                    mapped, dtype=torch.uint8, offset=self.payload_offset
                )
            return self.payload

    def read(self, size: int, buffers: BufferPool) -> None:
        """Read the first `size` bytes of the payload into memory instead of mapping the file.

        If another process truncates a mapped file, an access ends this process (SIGBUS).
        """
        try:
            payload = buffers.allocate(size)
            with open_regular_file(self.path) as file:
                file.seek(self.payload_offset)
                length = cast(BufferedReader, file).readinto(payload)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from None
        if length != size:
            raise _broken_file_error(self.path, "was truncated while it was read")
        self.payload = torch.frombuffer(payload, dtype=torch.uint8) if size else None

    def _map(self) -> mmap.mmap:
        # Each mapping keeps a file descriptor open, and a checkpoint can have more files than the
        # soft limit of the process allows, so the soft limit is raised.
        soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        with open_regular_file(self.path) as file:
            if file.fileno() > soft_limit - RESERVED_DESCRIPTORS and soft_limit < hard_limit:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
            # The mapping is private and writable, because torch warns about read-only buffers. No
            # page is written, so no page is copied, and no swap space has to be reserved.
            flags = mmap.MAP_PRIVATE | MAP_NORESERVE
            access = mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(file.fileno(), 0, flags=flags, prot=access)


@dataclass(frozen=True)
class SafetensorsTensor:
    """A tensor in a safetensors file."""

    file: MappedFile
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    byte_range: tuple[int, int]  # Bytes of the payload: [start, stop).

    @property
    def location(self) -> str:
        return f"{self.file.path}: {self.key}"

    def tensor(self) -> Tensor:
        start, stop = self.byte_range
        if start == stop:
            return torch.empty(self.shape, dtype=self.dtype)
        if start % self.dtype.itemsize == 0:
            return self.file.bytes()[start:stop].view(self.dtype).view(self.shape)
        # Some writers do not align tensors. frombuffer, unlike view(dtype), accepts any offset.
        count = (stop - start) // self.dtype.itemsize
        memory = self.file.bytes().numpy().data
        return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=start).view(
            self.shape
        )


def file_error(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file of a checkpoint that the operating system cannot read."""
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{path} does not exist; copy the checkpoint again")
    if isinstance(error, PermissionError):
        return CheckpointError(
            f"cannot read {path}: Permission denied; give this user the permission to read it"
        )
    return CheckpointError(f"cannot read {path}: {error.strerror}; give the path of a file")


def open_safetensors(
    path: Path, *, header_bytes_max: int = HEADER_BYTES_MAX, tensors_max: int | None = None
) -> dict[str, SafetensorsTensor]:
    """Return the file's tensors by key, in the order of the header; only the header is read.

    A header of more than `header_bytes_max` bytes is refused before it is read, and one of more
    than `tensors_max` tensors before it is parsed.
    """
    try:
        size = path.stat().st_size
        with open_regular_file(path) as file:
            length_field = file.read(8)
            length = int.from_bytes(length_field, "little")
            refuse_git_lfs_pointer(path, length_field)
            if len(length_field) < 8 or length > size - 8:
                raise _broken_file_error(
                    path, f"is truncated: it has {size} bytes, which is less than its header"
                )
            if length > header_bytes_max:
                raise _broken_file_error(
                    path,
                    f"states a header of {length} bytes, more than the limit of "
                    f"{header_bytes_max}, so it is broken or not the expected kind of file",
                )
            header_json = file.read(length)
    except OSError as error:
        raise file_error(path, error) from None
    if tensors_max is not None:
        _check_tensor_count(path, header_json, tensors_max)
    entries = _parse_header(path, header_json)
    _check_data_offsets(path, entries, size - 8 - length)
    mapped_file = MappedFile(path, 8 + length)
    return {
        key: SafetensorsTensor(
            mapped_file,
            key,
            tuple(entry["shape"]),
            dtype=DTYPES[entry["dtype"]],
            byte_range=tuple(entry["data_offsets"]),
        )
        for key, entry in entries.items()
    }


def read_safetensors(
    path: Path, *, header_bytes_max: int, tensors_max: int, buffers: BufferPool
) -> dict[str, SafetensorsTensor]:
    """Return what `open_safetensors` returns, with the tensors in memory from `buffers`."""
    tensors = open_safetensors(path, header_bytes_max=header_bytes_max, tensors_max=tensors_max)
    if tensors:
        stop = max(tensor.byte_range[1] for tensor in tensors.values())
        _check_memory(path, stop)
        next(iter(tensors.values())).file.read(stop, buffers)
    return tensors


def _check_memory(path: Path, size: int) -> None:
    """Refuse a file that would take most of the memory; a sparse file may have any size."""
    if size < CHECKED_BYTES_MIN:
        return
    available = available_memory_bytes()
    if size > available // 2:
        raise CheckpointError(
            f"{path} has tensors of {size >> 20} MiB, more than half of the {available >> 20} MiB "
            "of memory that are available; remove the file, or use a machine with more memory"
        )


def refuse_git_lfs_pointer(path: Path, magic: bytes) -> None:
    """Refuse a git-lfs pointer file: a few lines of text in place of the weights."""
    if magic[:8] == b"version ":
        raise CheckpointError(
            f"{path} is a git-lfs pointer, not the weights; run `git lfs pull` in the repository "
            "that it was copied from"
        )


def read_small_file(path: Path) -> bytes:
    """Read a text file, such as a config or an index, of at most `TEXT_BYTES_MAX` bytes."""
    if path.stat().st_size > TEXT_BYTES_MAX:
        raise _broken_file_error(
            path, f"has more than {TEXT_BYTES_MAX} bytes, the limit for a config or an index"
        )
    content = read_regular_file(path)
    refuse_git_lfs_pointer(path, content)
    return content


def _broken_file_error(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path} {problem}; download or copy the file again")


def _check_tensor_count(path: Path, header: bytes, tensors_max: int) -> None:
    """Refuse a header with more values than those of `tensors_max` tensors and of the metadata.

    Parsing takes microseconds for each value, which a hostile header may have in 4 bytes.
    """
    if header.count(b":") > 4 * tensors_max + METADATA_COLONS_MAX:
        raise _broken_file_error(
            path,
            f"has a header of more than {tensors_max} tensors, the limit for this kind of file",
        )


def _parse_header(path: Path, header: bytes) -> dict[str, Any]:
    try:
        record = json.loads(header, object_pairs_hook=_refuse_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise _broken_file_error(path, f"has an unreadable header ({error})") from None
    if not isinstance(record, dict):
        raise _broken_file_error(path, "has a header that is not a JSON object")
    record.pop("__metadata__", None)
    for key, entry in record.items():
        if not (
            isinstance(entry, dict)
            and isinstance(entry.get("dtype"), str)
            and _is_size_list(entry.get("shape"))
            and _is_size_list(entry.get("data_offsets"))
            and len(entry["data_offsets"]) == 2
        ):
            raise _broken_file_error(
                path, f"describes {key!r} without a valid dtype, shape or data_offsets"
            )
    return record


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a name occurs twice")
    return record


def _is_size_list(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= SIZE_MAX for n in value)


def _check_data_offsets(path: Path, entries: dict[str, Any], payload_bytes: int) -> None:
    """Check that the byte ranges cover the payload exactly once and match the shapes."""
    end = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if start == end and stop < start:
            raise _broken_file_error(
                path, f"has invalid data_offsets: {key!r} starts at {start}, but ends at {stop}"
            )
        if start != end:
            problem = "has an overlap at" if start < end else "has a gap before"
            raise _broken_file_error(
                path, f"{problem} {key!r}: its bytes start at {start}, not at {end}"
            )
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(
                f"{path}: {key!r} has dtype {entry['dtype']}, which is not supported; convert it "
                f"to one of {', '.join(DTYPES)}"
            )
        bytes_needed = math.prod(entry["shape"]) * dtype.itemsize
        if bytes_needed != stop - start:
            raise _broken_file_error(
                path,
                f"is inconsistent: {key!r} has dtype {entry['dtype']} and shape "
                f"{tuple(entry['shape'])}, so it needs {bytes_needed} bytes, but its data_offsets "
                f"span {stop - start}",
            )
        end = stop
    if end != payload_bytes:
        problem = (
            "is truncated" if end > payload_bytes else "has bytes that its header does not describe"
        )
        raise _broken_file_error(
            path,
            f"{problem}: the header describes {end} bytes, but the file has {payload_bytes} after "
            "the header",
        )


def encode_header(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the bytes before the tensors: the length and the header.

    `tensors` has (key, dtype, shape) in file order; the tensors follow without gaps.
    """
    record: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for key, dtype, shape in tensors:
        data_offsets = [end, end + math.prod(shape) * dtype.itemsize]
        record[key] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": data_offsets,
        }
        end = data_offsets[1]
    header_json = json.dumps(record, separators=(",", ":")).encode()
    header_json += b" " * (-len(header_json) % 8)
    return len(header_json).to_bytes(8, "little") + header_json
