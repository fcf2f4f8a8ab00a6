"""One safetensors file, against the library that defined the format, and every way to lie."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt.checkpoint.files.safetensors_file import header, open_safetensors
from gpt.errors import CheckpointError
from tests.support.process_memory import anonymous_bytes


def raw(header: object, payload: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    floats = {
        str(dtype): torch.randn(5, 3).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    whole = {str(dtype): torch.arange(7).to(dtype) for dtype in (torch.int64, torch.uint8)}
    return {**floats, **whole, "flags": torch.tensor([True, False, True])}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "a.safetensors")
    ours = open_safetensors(tmp_path / "a.safetensors")
    assert set(ours) == set(tensors())
    for key, value in tensors().items():
        assert ours[key].dtype == value.dtype and ours[key].shape == tuple(value.shape)
        assert torch.equal(ours[key].tensor(), value)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    known = sorted(tensors().items(), key=lambda item: -item[1].dtype.itemsize)
    text = header([(key, value.dtype, tuple(value.shape)) for key, value in known], {})
    payload = b"".join(value.view(-1).view(torch.uint8).numpy().tobytes() for _, value in known)
    (tmp_path / "a.safetensors").write_bytes(text + payload)
    theirs = load_file(tmp_path / "a.safetensors")
    assert len(text) % 8 == 0
    assert all(torch.equal(theirs[key], value) for key, value in tensors().items())


def test_tensors_that_are_not_aligned_are_read_all_the_same(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0])
    record = {
        "one": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "two": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    (tmp_path / "a").write_bytes(raw(record, b"\7" + values.numpy().tobytes()))
    assert torch.equal(open_safetensors(tmp_path / "a")["two"].tensor(), values)


def test_reading_a_mapped_tensor_allocates_nothing(tmp_path: Path) -> None:
    save_file({"large": torch.ones(64 << 20, dtype=torch.uint8)}, tmp_path / "a.safetensors")
    before = anonymous_bytes()
    large = open_safetensors(tmp_path / "a.safetensors")["large"].tensor()
    assert int(large.max()) == 1
    assert anonymous_bytes() - before < 8 << 20


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated: it has 0 bytes"),
    "cut in the header": (raw({"a": F32}, b"")[:20], "truncated"),
    "cut in the tensors": (raw({"a": F32}, bytes(4)), "8 bytes of tensors are announced, 4 are"),
    "bytes too many": (raw({"a": F32}, bytes(12)), "has bytes that its header does not name"),
    "a git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "lfs pull",
    ),
    "not JSON": (raw(b"{not json", b""), "unreadable header"),
    "JSON nested without end": (raw(b"[" * 100000, b""), "unreadable header"),
    "not an object": (raw([1], b""), "not a JSON object"),
    "a name twice": (raw(b'{"a": 1, "a": 2}', b""), "a name occurs twice"),
    "no dtype": (raw({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "without a dtype"),
    "a negative shape": (raw({"a": {**F32, "shape": [-2]}}, bytes(8)), "without a dtype, shape"),
    "an unknown dtype": (raw({"a": {**F32, "dtype": "F4"}}, bytes(8)), "dtype F4, which is not"),
    "a shape too large": (raw({"a": {**F32, "shape": [3]}}, bytes(8)), "needs 12 bytes"),
    "a hole": (raw({"a": {**F32, "data_offsets": [4, 12]}}, bytes(12)), "leaves a hole before 'a'"),
    "an overlap": (
        raw({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
        "overlaps 'b'",
    ),
    "an end before the start": (raw({"a": {**F32, "data_offsets": [0, -8]}}, bytes(8)), "without"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_one_sentence(lie: str, tmp_path: Path) -> None:
    content, message = LIES[lie]
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_safetensors(tmp_path / "a")
    assert str(tmp_path / "a") in str(caught.value) and "\n" not in str(caught.value)


def test_no_file_is_one_sentence_too(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; fetch"):
        open_safetensors(tmp_path / "a")
    with pytest.raises(CheckpointError, match="cannot read"):
        open_safetensors(tmp_path)
