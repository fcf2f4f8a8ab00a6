"""Pickles are read as data: stand-ins for what trains, a refusal by name for what runs."""

import argparse
import enum
import io
import os
import pathlib
import random
import signal
import sys
import types
import zipfile
from pathlib import Path

import numpy
import pytest
import torch

from gpt.checkpoint.files.restricted_unpickle import Stub, read_pickle
from gpt.errors import CheckpointError

ZIPPED = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])


class ModelType(enum.Enum):
    encoder_or_decoder = 1


class Calls:
    """Pickles as a call of what it is given."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is there when the file is written, and gone when it is read."""
    module = types.ModuleType("megatron.core.enums")
    module.ModelType = ModelType  # type: ignore[attr-defined]
    monkeypatch.setattr(ModelType, "__module__", module.__name__)
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def save(record: object, path: Path, zipped: bool) -> Path:
    torch.save(record, path, _use_new_zipfile_serialization=zipped)
    return path


@ZIPPED
def test_arguments_keep_their_plain_values_and_others_are_stand_ins(
    tmp_path: Path, megatron: None, zipped: bool
) -> None:
    args = argparse.Namespace(
        num_layers=3,
        model_type=ModelType.encoder_or_decoder,
        exit_signal=signal.SIGTERM,
        data_path=pathlib.Path("a"),
        params_dtype=torch.float16,
        world=numpy.int64(3),
    )
    states = [random.getstate(), numpy.random.get_state(), torch.get_rng_state()]
    record = {"args": args, "rng_state": states, "model": {"w": torch.arange(6.0).view(2, 3)}}
    read = read_pickle(save(record, tmp_path / "x.pt", zipped))
    fields = read["args"].fields
    assert fields["num_layers"] == 3 and fields["params_dtype"] is torch.float16
    assert fields["model_type"].path == "megatron.core.enums.ModelType"
    assert isinstance(fields["world"], Stub)
    assert torch.equal(read["model"]["w"], record["model"]["w"])  # type: ignore[index]


@ZIPPED
def test_enums_that_were_pickled_through_getattr_are_read(
    tmp_path: Path, megatron: None, zipped: bool
) -> None:
    record = {"type": Calls(getattr, ModelType, "encoder_or_decoder")}
    read = read_pickle(save(record, tmp_path / "x.pt", zipped))
    assert read["type"].arguments == ("encoder_or_decoder",)


@ZIPPED
def test_empty_bytes_which_older_protocols_make_by_a_call_are_read(
    tmp_path: Path, zipped: bool
) -> None:
    # As the states of Transformer Engine's layers, or an empty array among the arguments.
    record = {"_extra_state": io.BytesIO(), "empty": b"", "full": b"ab", "array": numpy.zeros(0)}
    read = read_pickle(save(record, tmp_path / "x.pt", zipped))
    assert (read["empty"], read["full"]) == (b"", b"ab")
    assert isinstance(read["_extra_state"], Stub) and isinstance(read["array"], Stub)


@ZIPPED
@pytest.mark.parametrize(
    ("hostile", "name"),
    [
        (Calls(os.system, "touch ran"), "posix.system"),
        (Calls(eval, "open('ran', 'w')"), "eval"),
        (Calls(getattr, torch.Tensor, "tolist"), "builtins.getattr"),
        (Calls(getattr, ModelType, "x", "default"), "builtins.getattr"),
        (Calls(bytes, 1 << 40), "builtins.bytes"),
        (Calls(types.SimpleNamespace), None),
        (Calls(os.getcwd), "posix.getcwd"),
        (Calls(io.open, "ran", "w"), "open"),
        (Calls(torch.load, "other.pt"), "torch.serialization.load"),
        (Calls(numpy.fromfile, "x"), "numpy.fromfile"),
    ],
)
def test_what_would_run_is_refused_by_its_name(
    tmp_path: Path,
    megatron: None,
    monkeypatch: pytest.MonkeyPatch,
    zipped: bool,
    hostile: Calls,
    name: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save({"args": hostile}, tmp_path / "x.pt", zipped)
    if name is None:
        read_pickle(path)
        return
    with pytest.raises(CheckpointError, match="asks to run") as refusal:
        read_pickle(path)
    assert name in str(refusal.value)
    assert not (tmp_path / "ran").exists()


def test_a_name_that_was_allowed_for_one_file_is_not_for_the_next(
    tmp_path: Path, megatron: None
) -> None:
    path = save({"type": ModelType.encoder_or_decoder}, tmp_path / "x.pt", True)
    read_pickle(path)
    with pytest.raises(Exception, match="megatron"):
        torch.load(path, weights_only=True)


@ZIPPED
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused_with_its_size(
    tmp_path: Path, zipped: bool, share: float
) -> None:
    path = save({"model": torch.ones(1000)}, tmp_path / "x.pt", zipped)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError, match=r"has \d+ bytes and is truncated or broken"):
        read_pickle(path)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    source = save({"model": torch.zeros(100)}, tmp_path / "x.pt", True)
    target = tmp_path / "y.pt"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.namelist():
            new.writestr(member, old.read(member))
    with pytest.raises(CheckpointError, match="is compressed"):
        read_pickle(target)


def test_no_file_pointer_or_folder_ends_in_a_stack(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_pickle(tmp_path / "absent.pt")
    (tmp_path / "x.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="git-lfs pointer"):
        read_pickle(tmp_path / "x.pt")
