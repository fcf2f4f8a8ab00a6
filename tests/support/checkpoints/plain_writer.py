"""The slow reference of the copy engine: builds each file of a layout in memory, then writes it.

It reads whole tensors and cuts them with plain indexing, so that it shares nothing with the
streaming copy loop.
"""

import zlib
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_tools.layout.layout import Layout, Placement, TargetFile
from gpt.checkpoint.logical_tensor import Checkpoint


def write_plainly(checkpoint: Checkpoint, layout: Layout, folder: Path) -> None:
    """Write all files of a layout, `last` included; `folder` is created if needed."""
    for file in (*layout.files, *layout.last_files):
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file_bytes(checkpoint, file))


def file_bytes(checkpoint: Checkpoint, file: TargetFile) -> bytes:
    """Bytes that no text, placement or patch covers are zero; two that overlap are a mistake."""
    content = bytearray(file.size)
    covered = bytearray(file.size)
    checksums = []

    def put(offset: int, content_part: bytes) -> None:
        span = slice(offset, offset + len(content_part))
        assert span.stop <= file.size, f"{file.path}: byte {span.stop} of {file.size}"
        assert not any(covered[span]), f"{file.path}: two things at byte {offset}"
        content[span] = content_part
        covered[span] = b"\1" * len(content_part)

    for text in file.literals:
        put(text.offset, text.content)
    for placement in file.placements:
        content_part = placed_bytes(checkpoint, placement)
        put(placement.offset, content_part)
        checksums.append(zlib.crc32(content_part))
    for patch in file.patches:  # They lie inside texts.
        crc = checksums[patch.placement_index].to_bytes(4, "little")
        content[patch.offset : patch.offset + 4] = crc
    return bytes(content)


def placed_bytes(checkpoint: Checkpoint, placement: Placement) -> bytes:
    value = part_of(checkpoint.read(placement.name), placement)
    return bytes(value.to(placement.dtype).contiguous().reshape(-1).view(torch.uint8).numpy())


def part_of(tensor: Tensor, placement: Placement) -> Tensor:
    part = placement.part
    runs = [tensor.narrow(part.dim, start, stop - start) for start, stop in part.ranges]
    covered = sum(stop - start for start, stop in part.ranges)
    shape = list(tensor.shape)
    shape[part.dim] = part.size - covered
    value = torch.cat([*runs, tensor.new_zeros(shape)], dim=part.dim)
    return value.T if placement.transposed else value
