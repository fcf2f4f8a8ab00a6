"""The safetensors reader and writer, compared with the library, and invalid headers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt.checkpoint.files.safetensors_file import encode_header, open_safetensors
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
    integers = {str(dtype): torch.arange(7).to(dtype) for dtype in (torch.int64, torch.uint8)}
    return {**floats, **integers, "flags": torch.tensor([True, False, True])}


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "a.safetensors")
    opened = open_safetensors(tmp_path / "a.safetensors")
    assert set(opened) == set(tensors())
    for key, value in tensors().items():
        assert opened[key].dtype == value.dtype and opened[key].shape == tuple(value.shape)
        assert torch.equal(opened[key].tensor(), value)


def test_the_library_reads_our_files(tmp_path: Path) -> None:
    sorted_tensors = sorted(tensors().items(), key=lambda entry: -entry[1].dtype.itemsize)
    text = encode_header(
        [(key, value.dtype, tuple(value.shape)) for key, value in sorted_tensors], {}
    )
    payload = b"".join(
        value.view(-1).view(torch.uint8).numpy().tobytes() for _, value in sorted_tensors
    )
    (tmp_path / "a.safetensors").write_bytes(text + payload)
    loaded = load_file(tmp_path / "a.safetensors")
    assert len(text) % 8 == 0
    assert all(torch.equal(loaded[key], value) for key, value in tensors().items())


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0])
    record = {
        "one": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "two": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    (tmp_path / "a").write_bytes(raw(record, b"\7" + values.numpy().tobytes()))
    assert torch.equal(open_safetensors(tmp_path / "a")["two"].tensor(), values)


def test_reading_a_mapped_tensor_allocates_no_memory(tmp_path: Path) -> None:
    save_file({"large": torch.ones(64 << 20, dtype=torch.uint8)}, tmp_path / "a.safetensors")
    memory_before = anonymous_bytes()
    large = open_safetensors(tmp_path / "a.safetensors")["large"].tensor()
    assert int(large.max()) == 1
    assert anonymous_bytes() - memory_before < 8 << 20


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated: it has 0 bytes"),
    "cut in the header": (raw({"a": F32}, b"")[:20], "truncated"),
    "cut in the tensors": (
        raw({"a": F32}, bytes(4)),
        "the header describes 8 bytes, but the file has 4",
    ),
    "bytes too many": (raw({"a": F32}, bytes(12)), "has bytes that its header does not describe"),
    "a git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "lfs pull",
    ),
    "not JSON": (raw(b"{not json", b""), "unreadable header"),
    "JSON nested without end": (raw(b"[" * 100000, b""), "unreadable header"),
    "not an object": (raw([1], b""), "not a JSON object"),
    "a name twice": (raw(b'{"a": 1, "a": 2}', b""), "a name occurs twice"),
    "no dtype": (raw({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "a valid dtype"),
    "a size over 64 bits": (raw({"a": {**F32, "shape": [10**30, 0]}}, b""), "a valid dtype, shape"),
    "a negative shape": (raw({"a": {**F32, "shape": [-2]}}, bytes(8)), "a valid dtype, shape"),
    "an unknown dtype": (raw({"a": {**F32, "dtype": "F4"}}, bytes(8)), "dtype F4, which is not"),
    "a shape too large": (raw({"a": {**F32, "shape": [3]}}, bytes(8)), "needs 12 bytes"),
    "a hole": (raw({"a": {**F32, "data_offsets": [4, 12]}}, bytes(12)), "has a gap before 'a'"),
    "an end before the start": (
        raw({"a": {**F32, "data_offsets": [0, 8]}, "b": {**F32, "data_offsets": [8, 4]}}, bytes(8)),
        "'b' starts at 8, but ends at 4",
    ),
    "an overlap": (
        raw({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
        "has an overlap at 'b'",
    ),
    "a negative offset": (raw({"a": {**F32, "data_offsets": [0, -8]}}, bytes(8)), "without"),
}


@pytest.mark.parametrize("fault", LIES)
def test_inconsistent_header_is_refused(fault: str, tmp_path: Path) -> None:
    content, message = LIES[fault]
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_safetensors(tmp_path / "a")
    assert str(tmp_path / "a") in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; copy"):
        open_safetensors(tmp_path / "a")
    with pytest.raises(CheckpointError, match="cannot read"):
        open_safetensors(tmp_path)
