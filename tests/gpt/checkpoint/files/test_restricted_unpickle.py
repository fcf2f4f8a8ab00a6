"""Restricted unpickling: stand-ins for foreign classes, and errors that name refused calls."""

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
    """Pickles as a call of a function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that exists when the file is written, and not when it is read."""
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
def test_args_keep_plain_values_and_foreign_classes_become_stubs(
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
    loaded = read_pickle(save(record, tmp_path / "x.pt", zipped))
    fields = loaded["args"].fields
    assert fields["num_layers"] == 3 and fields["params_dtype"] is torch.float16
    assert fields["model_type"].qualified_name == "megatron.core.enums.ModelType"
    assert isinstance(fields["world"], Stub)
    assert torch.equal(loaded["model"]["w"], record["model"]["w"])  # type: ignore[index]


@ZIPPED
def test_enums_that_were_pickled_through_getattr_are_read(
    tmp_path: Path, megatron: None, zipped: bool
) -> None:
    record = {"type": Calls(getattr, ModelType, "encoder_or_decoder")}
    loaded = read_pickle(save(record, tmp_path / "x.pt", zipped))
    assert loaded["type"].arguments == ("encoder_or_decoder",)


@ZIPPED
def test_empty_bytes_of_older_pickle_protocols_are_read(tmp_path: Path, zipped: bool) -> None:
    # As in states of Transformer Engine's layers, or an empty array among the arguments.
    record = {"_extra_state": io.BytesIO(), "empty": b"", "full": b"ab", "array": numpy.zeros(0)}
    loaded = read_pickle(save(record, tmp_path / "x.pt", zipped))
    assert (loaded["empty"], loaded["full"]) == (b"", b"ab")
    assert isinstance(loaded["_extra_state"], Stub) and isinstance(loaded["array"], Stub)


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
def test_error_names_the_function_that_a_pickle_would_call(
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


def test_allowed_globals_apply_to_one_file_only(tmp_path: Path, megatron: None) -> None:
    path = save({"type": ModelType.encoder_or_decoder}, tmp_path / "x.pt", True)
    read_pickle(path)
    with pytest.raises(Exception, match="megatron"):
        torch.load(path, weights_only=True)


@ZIPPED
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_files_are_refused_with_their_size(
    tmp_path: Path, zipped: bool, share: float
) -> None:
    path = save({"model": torch.ones(1000)}, tmp_path / "x.pt", zipped)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"has \d+ bytes and is truncated or broken"):
        read_pickle(path)


def test_compressed_archives_are_refused(tmp_path: Path) -> None:
    source = save({"model": torch.zeros(100)}, tmp_path / "x.pt", True)
    target = tmp_path / "y.pt"
    with (
        zipfile.ZipFile(source) as source_zip,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as target_zip,
    ):
        for member in source_zip.namelist():
            target_zip.writestr(member, source_zip.read(member))
    with pytest.raises(CheckpointError, match="is compressed"):
        read_pickle(target)


def test_missing_file_lfs_pointer_and_folder_are_checkpoint_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_pickle(tmp_path / "absent.pt")
    (tmp_path / "x.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="git-lfs pointer"):
        read_pickle(tmp_path / "x.pt")
