"""The slow twin of copying: each file of a layout is made whole in memory, then written.

It reads whole tensors and cuts them with plain indexing, so that it shares nothing with the loop
that streams.
"""

import zlib
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_tools.layout.layout import File, Layout, Placement
from gpt.checkpoint.logical_tensor import Checkpoint


def write_plainly(checkpoint: Checkpoint, layout: Layout, folder: Path) -> None:
    """All that a layout has, `last` included; `folder` is made if it is not there."""
    for file in (*layout.files, *layout.last):
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file_bytes(checkpoint, file))


def file_bytes(checkpoint: Checkpoint, file: File) -> bytes:
    """What no text, placement or patch covers is zero; what two of them cover is a mistake."""
    content, taken = bytearray(file.size), bytearray(file.size)
    checksums = []

    def put(offset: int, new: bytes) -> None:
        span = slice(offset, offset + len(new))
        assert span.stop <= file.size, f"{file.path}: byte {span.stop} of {file.size}"
        assert not any(taken[span]), f"{file.path}: two things at byte {offset}"
        content[span], taken[span] = new, b"\1" * len(new)

    for text in file.texts:
        put(text.offset, text.content)
    for placement in file.placements:
        new = placed_bytes(checkpoint, placement)
        put(placement.offset, new)
        checksums.append(zlib.crc32(new))
    for patch in file.patches:  # They lie inside texts.
        crc = checksums[patch.placement].to_bytes(4, "little")
        content[patch.offset : patch.offset + 4] = crc
    return bytes(content)


def placed_bytes(checkpoint: Checkpoint, placement: Placement) -> bytes:
    value = part_of(checkpoint.read(placement.name), placement)
    return bytes(value.to(placement.dtype).contiguous().reshape(-1).view(torch.uint8).numpy())


def part_of(whole: Tensor, placement: Placement) -> Tensor:
    part = placement.part
    runs = [whole.narrow(part.dim, start, stop - start) for start, stop in part.ranges]
    held = sum(stop - start for start, stop in part.ranges)
    shape = list(whole.shape)
    shape[part.dim] = part.size - held
    value = torch.cat([*runs, whole.new_zeros(shape)], dim=part.dim)
    return value.T if placement.transposed else value
