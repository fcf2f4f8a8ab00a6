"""Ranged tensor: a tensor of a safetensors file in an object store, read by ranges of bytes.

A read requests the rows of a box, and nothing else of the tensor, so each rank fetches its own
shard. Rows are contiguous; if a shard has a part of the columns, its rows are requested with all
columns. A large read consists of several requests at once. All reads are of the object with the
ETag that the file had when it was opened.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gpt.checkpoint.logical_tensor import ComputedTensor
from gpt.errors import CheckpointError
from gpt.object_store.object_store import READ_BYTES, ObjectStore, ObjectStoreError

REQUESTS_MAX = 8  # Concurrent requests of one read.
ATTEMPTS_MAX = 5  # Of a request, if the store does not answer.
ATTEMPT_DELAY_S = 1.0  # Before the second attempt; it doubles with each attempt.
READ_BLOCK_BYTES = 128 << 20  # Of a shard that a read has in memory beside the weights.


@dataclass
class RangedFile:
    """A file of a checkpoint in an object store."""

    store: ObjectStore
    key: str
    etag: str
    payload_offset: int  # The length of the header in bytes.
    fetched_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the bytes of the payload from `start` to `stop`."""
        content = torch.empty(stop - start, dtype=torch.uint8)
        starts = range(0, stop - start, READ_BYTES)

        def read_piece(first: int) -> None:
            last = min(first + READ_BYTES, stop - start)
            piece = self._request(start + first, start + last)
            content[first:last] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)

        if len(starts) <= 1:
            for first in starts:
                read_piece(first)
        else:
            with ThreadPoolExecutor(min(REQUESTS_MAX, len(starts))) as pool:
                list(pool.map(read_piece, starts))
        with self.lock:
            self.fetched_bytes += stop - start
        return content

    def _request(self, start: int, stop: int) -> bytes:
        first, last = self.payload_offset + start, self.payload_offset + stop
        for attempt in range(ATTEMPTS_MAX):
            try:
                return self.store.read_range(self.key, first, last, etag=self.etag)
            except ObjectStoreError as error:
                if error.problem == "changed":
                    raise CheckpointError(
                        f"{self.store.url}/{self.key} was replaced while it was read; start again, "
                        "and write other weights under another prefix"
                    ) from None
                if error.problem != "unavailable" or attempt == ATTEMPTS_MAX - 1:
                    raise CheckpointError(f"{error}; start again") from None
            time.sleep(ATTEMPT_DELAY_S * 2**attempt)
        raise AssertionError("the last attempt raises")


@dataclass(frozen=True)
class RangedTensor(ComputedTensor):
    """A tensor of a ranged file. Each read requests the bytes again."""

    file: RangedFile
    path: Path  # Of the local copy of the header.
    key: str
    tensor_shape: tuple[int, ...]
    dtype: torch.dtype
    byte_range: tuple[int, int]  # Bytes of the payload: [start, stop).

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor_shape

    @property
    def location(self) -> str:
        return f"{self.path}: {self.key}"

    @property
    def stored_dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def block_bytes(self) -> int:
        return READ_BLOCK_BYTES

    def compute_box(self, *box: slice) -> Tensor:
        shape = self.tensor_shape
        ranges = [range(size)[part] for size, part in zip(shape, box, strict=True)]
        if any(len(part) == 0 for part in ranges):
            return torch.empty(tuple(len(part) for part in ranges), dtype=self.dtype)
        # The bytes from the first to the last element of the first dimensions are contiguous as
        # long as each dimension before has one index.
        offset, strides = 0, _strides(shape)
        dimension = 0
        while dimension < len(shape) - 1 and len(ranges[dimension]) == 1:
            offset += ranges[dimension][0] * strides[dimension]
            dimension += 1
        start, stop = offset, offset + 1
        remaining_shape: tuple[int, ...] = ()
        if shape:
            low, high = ranges[dimension][0], ranges[dimension][-1]
            assert low <= high, "a box has no negative step"
            start = offset + low * strides[dimension]
            stop = offset + (high + 1) * strides[dimension]
            remaining_shape = (high + 1 - low, *shape[dimension + 1 :])
            ranges[dimension] = range(
                ranges[dimension].start - low, ranges[dimension].stop - low, ranges[dimension].step
            )
        itemsize, first_byte = self.dtype.itemsize, self.byte_range[0]
        content = self.file.read(first_byte + start * itemsize, first_byte + stop * itemsize)
        read = content.view(self.dtype).view(remaining_shape)
        read = read[tuple(_as_slice(part) for part in ranges[dimension:])]
        return read[(None,) * dimension]


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for dimension in range(len(shape) - 2, -1, -1):
        strides[dimension] = strides[dimension + 1] * shape[dimension + 1]
    return strides


def _as_slice(part: range) -> slice:
    return slice(part.start, part.stop, part.step)
