"""`torch.save` archives: planned before any weight is read, read back by torch and by zipfile."""

import argparse
import zipfile
import zlib
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_tools.layout.torch_save import ArchiveLayout, TensorPlaceholder, plan_archive
from gpt.parallel.weight_sharding import ShardSpec


def placeholder(
    name: str, value: Tensor, shape: tuple[int, ...] | None = None
) -> TensorPlaceholder:
    part = ShardSpec(0, ((0, value.shape[0]),), value.shape[0])
    return TensorPlaceholder(name, part, tuple(value.shape), value.dtype, shape)


def fill_archive(archive_layout: ArchiveLayout, values: dict[str, Tensor]) -> bytes:
    content = bytearray(archive_layout.start + archive_layout.size)
    for text in archive_layout.literals:
        content[text.offset : text.offset + len(text.content)] = text.content
    raw = [
        values[p.name].view(-1).view(torch.uint8).numpy().tobytes()
        for p in archive_layout.placements
    ]
    for placement, tensor_bytes in zip(archive_layout.placements, raw, strict=True):
        content[placement.offset : placement.offset + len(tensor_bytes)] = tensor_bytes
    for patch in archive_layout.patches:
        crc = zlib.crc32(raw[patch.placement_index]).to_bytes(4, "little")
        content[patch.offset : patch.offset + 4] = crc
    return bytes(content[archive_layout.start :])


def test_torch_reads_the_archive_and_zipfile_accepts_its_crcs(
    tmp_path: Path,
) -> None:
    values = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randn(2, 2).half()}
    record = {
        "args": argparse.Namespace(layers=2),
        "model": {name: placeholder(name, value) for name, value in values.items()},
        "again": [placeholder("a", values["a"], (1, 3, 5))],
    }
    for start in (0, 64, 13):
        (tmp_path / "file.pt").write_bytes(fill_archive(plan_archive(record, start), values))
        with zipfile.ZipFile(tmp_path / "file.pt") as zipped:
            assert zipped.testzip() is None
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(tmp_path / "file.pt", weights_only=True, mmap=True)
        assert loaded["args"] == argparse.Namespace(layers=2)
        assert list(loaded["model"]) == ["a", "b", "c"]
        for name, value in values.items():
            assert loaded["model"][name].dtype == value.dtype
            assert torch.equal(loaded["model"][name], value)
        assert loaded["again"][0].shape == (1, 3, 5)


def test_weights_are_aligned_for_any_dtype() -> None:
    odd = {f"{n}": placeholder(f"{n}", torch.zeros(n, dtype=torch.float16)) for n in range(1, 9)}
    assert {placement.offset % 64 for placement in plan_archive(odd).placements} == {0}


def test_the_same_record_gives_the_same_bytes() -> None:
    value = {"a": torch.ones(3, 3)}
    record = {"model": {"a": placeholder("a", value["a"])}, "iteration": 0}
    assert fill_archive(plan_archive(record), value) == fill_archive(plan_archive(record), value)


def test_members_and_offsets_over_4_gib_are_read(tmp_path: Path) -> None:
    """The file is sparse; only its literal bytes use disk space."""
    rows = 3 << 20
    part = ShardSpec(0, ((0, rows),), rows)
    large = TensorPlaceholder("large", part, (rows, 1024), torch.bfloat16)
    small = TensorPlaceholder("small", ShardSpec(0, ((0, 3),), 3), (3,), torch.bfloat16)
    archive_layout = plan_archive({"large": large, "small": small})
    assert archive_layout.size > 6 << 30
    path = tmp_path / "large.pt"
    with open(path, "wb") as file:
        file.truncate(archive_layout.size)
        for text in archive_layout.literals:
            file.seek(text.offset)
            file.write(text.content)
        file.seek(archive_layout.placements[1].offset)
        file.write(torch.tensor([1.0, 2.0, 3.0]).bfloat16().view(torch.uint8).numpy().tobytes())
    with zipfile.ZipFile(path) as zipped:
        sizes = {member.filename: member.file_size for member in zipped.infolist()}
    assert sizes["archive/data/0"] == rows * 2048 and sizes["archive/data/1"] == 6
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["small"].tolist() == [1.0, 2.0, 3.0]
    assert loaded["large"].shape == (rows, 1024) and float(loaded["large"][-1, -1]) == 0
