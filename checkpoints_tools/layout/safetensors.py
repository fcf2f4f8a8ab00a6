"""safetensors files whose weights are still to come: a header, and a place for each tensor.

The format allows no hole between tensors, and readers want them aligned, so the widest dtypes come
first. Tensors go to files of a bounded size, in the order of the forward pass.
It knows no models.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from checkpoints_tools.layout.layout import File, Placement, Text
from gpt.checkpoint.files.safetensors_file import header
from gpt.parallel.sharding import Part


@dataclass(frozen=True)
class Entry:
    """A tensor under its key in a file: a part of a logical one, perhaps turned."""

    key: str
    name: str
    part: Part
    full: tuple[int, ...]  # The logical tensor's shape.
    dtype: torch.dtype
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.part.shape(self.full)
        return shape[::-1] if self.transposed else shape

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def shards(entries: Iterable[Entry], bytes_max: int) -> list[list[Entry]]:
    """Runs of tensors for one file each; a tensor larger than `bytes_max` is alone in its file."""
    runs: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not runs or entry.nbytes > room:
            runs.append([])
            room = bytes_max
        runs[-1].append(entry)
        room -= entry.nbytes
    return runs


def safetensors_file(
    path: str, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None
) -> File:
    order = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    text = header([(entry.key, entry.dtype, entry.shape) for entry in order], metadata or {})
    end, placements = len(text), []
    for entry in order:
        part = (entry.name, entry.part, end, entry.dtype, entry.transposed)
        placements.append(Placement(*part))
        end += entry.nbytes
    return File(path, end, (Text(0, text),), tuple(placements))


def shard_name(stem: str, number: int, count: int) -> str:
    """`number` counts from 0, the file's name from 1."""
    return f"{stem}-{number + 1:05}-of-{count:05}.safetensors"
