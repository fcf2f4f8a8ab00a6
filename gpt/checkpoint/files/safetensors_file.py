"""One safetensors file: its header checked before anything is mapped, its tensors as views.

The format is a length, a JSON header and raw bytes, so a slice is a view of the mapped file and
nothing is allocated to read it. Headers must tell the truth: spans that overlap, leave holes or
end elsewhere than the file does are refused here, each in one sentence.
It knows no models.
"""

import json
import math
import mmap
import resource
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.errors import CheckpointError

# Larger than the header of any model; a length beyond it is a lie or another kind of file.
HEADER_BYTES_MAX = 100 << 20
TEXT_BYTES_MAX = 64 << 20

# Without it, Linux refuses to map a file larger than its memory. Python names it from 3.12 on.
NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

# Descriptors that are left to others before more are asked for.
SPARE_DESCRIPTORS = 32

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
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
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class MappedFile:
    """A file's bytes after the header, mapped at first use; all ranks of a node share the pages."""

    path: Path
    start: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    payload: Tensor | None = None

    def bytes(self) -> Tensor:
        with self.lock:
            if self.payload is None:
                try:
                    mapped = self._mapped()
                except OSError as error:
                    raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from None
                mapped.madvise(mmap.MADV_SEQUENTIAL)  # Twice as fast from a cold disk.
                self.payload = torch.frombuffer(mapped, dtype=torch.uint8, offset=self.start)
            return self.payload

    def _mapped(self) -> mmap.mmap:
        # Each mapping keeps a descriptor, and a checkpoint can have a thousand files.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with open(self.path, "rb") as file:
            if file.fileno() > soft - SPARE_DESCRIPTORS and soft < hard:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            # Writable, since torch warns of tensors that are not; but nobody writes, so no page
            # is ever copied, and none need be promised.
            flags, access = mmap.MAP_PRIVATE | NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(file.fileno(), 0, flags=flags, prot=access)


@dataclass(frozen=True)
class Mapped:
    """A tensor in a safetensors file."""

    file: MappedFile
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    span: tuple[int, int]

    @property
    def where(self) -> str:
        return f"{self.file.path}: {self.key}"

    def tensor(self) -> Tensor:
        start, stop = self.span
        if start == stop:
            return torch.empty(self.shape, dtype=self.dtype)
        if start % self.dtype.itemsize == 0:
            return self.file.bytes()[start:stop].view(self.dtype).view(self.shape)
        # A foreign writer did not align it; a buffer, unlike a tensor's view, may start anywhere.
        count = (stop - start) // self.dtype.itemsize
        memory = self.file.bytes().numpy().data
        return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=start).view(
            self.shape
        )


def open_safetensors(path: Path) -> dict[str, Mapped]:
    """The file's tensors, in its own order. Only the header is read."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            refuse_pointer(path, head)
            if len(head) < 8 or length > size - 8:
                raise _broken(
                    path, f"is truncated: it has {size} bytes, its header alone needs more"
                )
            if length > HEADER_BYTES_MAX:
                raise _broken(path, f"announces a header of {length} bytes; it is not safetensors")
            header = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; fetch the checkpoint again") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    entries = _entries(path, header)
    _check_spans(path, entries, size - 8 - length)
    mapped = MappedFile(path, 8 + length)
    return {
        key: Mapped(
            *(mapped, key, tuple(entry["shape"])),
            dtype=DTYPES[entry["dtype"]],
            span=tuple(entry["data_offsets"]),
        )
        for key, entry in entries.items()
    }


def refuse_pointer(path: Path, head: bytes) -> None:
    """Git-lfs leaves a few lines of text where the weights should be."""
    if head[:8] == b"version ":
        raise CheckpointError(
            f"{path} is a git-lfs pointer, not the weights; run `git lfs pull` where it came from"
        )


def read_text(path: Path) -> bytes:
    """A small file that describes others; one as large as weights is none."""
    if path.stat().st_size > TEXT_BYTES_MAX:
        raise _broken(path, f"has more than {TEXT_BYTES_MAX} bytes, which no text of its name has")
    text = path.read_bytes()
    refuse_pointer(path, text)
    return text


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}; fetch or copy it again")


def _entries(path: Path, header: bytes) -> dict[str, Any]:
    try:
        record = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"has an unreadable header ({error})") from None
    if not isinstance(record, dict):
        raise _broken(path, "has a header that is not a JSON object")
    record.pop("__metadata__", None)
    for key, entry in record.items():
        if not (
            isinstance(entry, dict)
            and isinstance(entry.get("dtype"), str)
            and _whole_numbers(entry.get("shape"))
            and _whole_numbers(entry.get("data_offsets"))
            and len(entry["data_offsets"]) == 2
        ):
            raise _broken(path, f"describes {key!r} without a dtype, shape or data_offsets")
    return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a name occurs twice")
    return record


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_spans(path: Path, entries: dict[str, Any], payload: int) -> None:
    """The spans must tile the payload exactly, and fit their shapes."""
    end = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if start != end or stop < start:
            what = "overlaps" if start < end else "leaves a hole before"
            raise _broken(path, f"{what} {key!r}: its bytes start at {start}, not at {end}")
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(
                f"{path}: {key!r} has dtype {entry['dtype']}, which is not read; known are "
                f"{', '.join(DTYPES)}: convert it to one of them"
            )
        need = math.prod(entry["shape"]) * dtype.itemsize
        if need != stop - start:
            what = f"{entry['dtype']} of shape {tuple(entry['shape'])} needs {need} bytes"
            raise _broken(path, f"is inconsistent: {key!r}, {what}, has {stop - start}")
        end = stop
    if end != payload:
        what = "is truncated" if end > payload else "has bytes that its header does not name"
        raise _broken(path, f"{what}: {end} bytes of tensors are announced, {payload} are there")


def header(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """What stands before tensors that follow one another: (key, dtype, shape), in their order."""
    record: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for key, dtype, shape in tensors:
        span = [end, end + math.prod(shape) * dtype.itemsize]
        record[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": span}
        end = span[1]
    text = json.dumps(record, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
