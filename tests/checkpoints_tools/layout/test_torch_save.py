"""Archives that are laid out before their weights are there, read back by torch and by zipfile."""

import argparse
import zipfile
import zlib
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_tools.layout.torch_save import Archive, Promise, archive
from gpt.parallel.sharding import Part


def whole(name: str, value: Tensor, shape: tuple[int, ...] | None = None) -> Promise:
    part = Part(0, ((0, value.shape[0]),), value.shape[0])
    return Promise(name, part, tuple(value.shape), value.dtype, shape)


def filled(laid: Archive, values: dict[str, Tensor]) -> bytes:
    content = bytearray(laid.start + laid.size)
    for text in laid.texts:
        content[text.offset : text.offset + len(text.content)] = text.content
    raw = [values[p.name].view(-1).view(torch.uint8).numpy().tobytes() for p in laid.placements]
    for placement, new in zip(laid.placements, raw, strict=True):
        content[placement.offset : placement.offset + len(new)] = new
    for patch in laid.patches:
        crc = zlib.crc32(raw[patch.placement]).to_bytes(4, "little")
        content[patch.offset : patch.offset + 4] = crc
    return bytes(content[laid.start :])


def test_torch_reads_what_was_laid_out_and_zipfile_finds_every_checksum_right(
    tmp_path: Path,
) -> None:
    values = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randn(2, 2).half()}
    record = {
        "args": argparse.Namespace(layers=2),
        "model": {name: whole(name, value) for name, value in values.items()},
        "again": [whole("a", values["a"], (1, 3, 5))],
    }
    for start in (0, 64, 13):
        (tmp_path / "file.pt").write_bytes(filled(archive(record, start), values))
        with zipfile.ZipFile(tmp_path / "file.pt") as zipped:
            assert zipped.testzip() is None
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(tmp_path / "file.pt", weights_only=True, mmap=True)
        assert found["args"] == argparse.Namespace(layers=2)
        assert list(found["model"]) == ["a", "b", "c"]
        for name, value in values.items():
            assert found["model"][name].dtype == value.dtype
            assert torch.equal(found["model"][name], value)
        assert found["again"][0].shape == (1, 3, 5)


def test_weights_are_aligned_for_any_dtype() -> None:
    odd = {f"{n}": whole(f"{n}", torch.zeros(n, dtype=torch.float16)) for n in range(1, 9)}
    assert {placement.offset % 64 for placement in archive(odd).placements} == {0}


def test_the_same_record_gives_the_same_bytes() -> None:
    value = {"a": torch.ones(3, 3)}
    record = {"model": {"a": whole("a", value["a"])}, "iteration": 0}
    assert filled(archive(record), value) == filled(archive(record), value)


def test_members_and_offsets_beyond_four_gigabytes_are_found(tmp_path: Path) -> None:
    """The file is sparse; only its few texts are on the disk."""
    rows = 3 << 20
    part = Part(0, ((0, rows),), rows)
    large = Promise("large", part, (rows, 1024), torch.bfloat16)
    small = Promise("small", Part(0, ((0, 3),), 3), (3,), torch.bfloat16)
    laid = archive({"large": large, "small": small})
    assert laid.size > 6 << 30
    path = tmp_path / "large.pt"
    with open(path, "wb") as file:
        file.truncate(laid.size)
        for text in laid.texts:
            file.seek(text.offset)
            file.write(text.content)
        file.seek(laid.placements[1].offset)
        file.write(torch.tensor([1.0, 2.0, 3.0]).bfloat16().view(torch.uint8).numpy().tobytes())
    with zipfile.ZipFile(path) as zipped:
        sizes = {member.filename: member.file_size for member in zipped.infolist()}
    assert sizes["archive/data/0"] == rows * 2048 and sizes["archive/data/1"] == 6
    found = torch.load(path, weights_only=True, mmap=True)
    assert found["small"].tolist() == [1.0, 2.0, 3.0]
    assert found["large"].shape == (rows, 1024) and float(found["large"][-1, -1]) == 0
