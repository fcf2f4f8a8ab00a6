"""Layout of safetensors files: plans headers, shards and tensor offsets without reading weights.

Tensors are distributed over files (shards) of a bounded size, in the order in which the writer
lists them. Within a file, the tensors are ordered by dtype, widest first. This order keeps tensors
aligned without gaps: readers need aligned tensors, and the format allows no gaps. The module is
independent of the model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from checkpoints_tools.layout.layout import LiteralBytes, Placement, TargetFile
from gpt.checkpoint.files.safetensors_file import encode_header
from gpt.parallel.weight_sharding import ShardSpec


@dataclass(frozen=True)
class SafetensorsEntry:
    """A tensor of a file: a part of a logical tensor, possibly transposed, or a stack of them."""

    key: str  # The tensor's name in the file.
    names: tuple[str, ...]  # The names of the logical tensors; one name unless `stacked`.
    part: ShardSpec
    full_shape: tuple[int, ...]  # The shape of each logical tensor.
    dtype: torch.dtype
    transposed: bool = False
    zero_rows: int = 0  # Rows of zeros in front of the part.
    stacked: bool = False  # The parts are stacked in a new first dimension.
    scalar: bool = False  # The part is a vector of one element, and is stored without dimensions.

    @property
    def shape(self) -> tuple[int, ...]:
        if self.scalar:
            return ()
        return (len(self.names), *self.part_shape) if self.stacked else self.part_shape

    @property
    def part_shape(self) -> tuple[int, ...]:
        rows, *columns = self.part.local_shape(self.full_shape)
        shape = (self.zero_rows + rows, *columns)
        return shape[::-1] if self.transposed else shape

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def split_into_shards(
    entries: Iterable[SafetensorsEntry], bytes_max: int
) -> list[list[SafetensorsEntry]]:
    """Distribute the entries over files in order; a tensor over `bytes_max` gets its own file."""
    shards: list[list[SafetensorsEntry]] = []
    bytes_left = 0
    for entry in entries:
        if not shards or entry.nbytes > bytes_left:
            shards.append([])
            bytes_left = bytes_max
        shards[-1].append(entry)
        bytes_left -= entry.nbytes
    return shards


def plan_safetensors_file(
    path: str, entries: Sequence[SafetensorsEntry], metadata: Mapping[str, str] | None = None
) -> TargetFile:
    """Plan one file: its header, then the tensors, widest dtype first."""
    ordered_entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header = encode_header(
        [(entry.key, entry.dtype, entry.shape) for entry in ordered_entries], metadata or {}
    )
    placements, literals = [], [LiteralBytes(0, header)]
    end = len(header)
    for entry in ordered_entries:
        zero_bytes = entry.nbytes // entry.part_shape[0] * entry.zero_rows
        if zero_bytes:
            literals.append(LiteralBytes(end, bytes(zero_bytes)))
        for name in entry.names:
            offset = end + zero_bytes
            placements.append(Placement(name, entry.part, offset, entry.dtype, entry.transposed))
            end += entry.nbytes // len(entry.names)
    return TargetFile(path, end, tuple(literals), tuple(placements))


def shard_file_name(stem: str, index: int, count: int) -> str:
    """Return a shard's name in Hugging Face's style; `index` counts from 0, the name from 1."""
    return f"{stem}-{index + 1:05}-of-{count:05}.safetensors"
