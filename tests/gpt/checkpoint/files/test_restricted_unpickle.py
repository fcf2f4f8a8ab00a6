"""Restricted unpickling: stand-ins for foreign classes, and errors that name refused calls."""

import _codecs
import argparse
import collections
import datetime
import enum
import io
import os
import pathlib
import pickle
import random
import signal
import sys
import types
import zipfile
from pathlib import Path

import numpy
import pytest
import torch

from gpt.checkpoint.files.restricted_unpickle import Stub
from gpt.checkpoint.files.torch_file import read_torch_file
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


def save(record: object, path: Path, zipped: bool, protocol: int = 2) -> Path:
    torch.save(record, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
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
    loaded = read_torch_file(save(record, tmp_path / "x.pt", zipped))
    fields = loaded["args"].fields
    assert fields["num_layers"] == 3 and fields["params_dtype"] is torch.float16
    assert fields["model_type"].qualified_name == "megatron.core.enums.ModelType"
    assert isinstance(fields["world"], Stub)
    assert torch.equal(loaded["model"]["w"], record["model"]["w"])  # type: ignore[index]


class Keywords:
    """Pickles as a class that is created with keyword arguments."""

    def __getnewargs_ex__(self) -> tuple[tuple[object, ...], dict[str, object]]:
        return (1,), {"size": 2}

    def __new__(cls, *_arguments: object, **_keywords: object) -> "Keywords":
        return super().__new__(cls)


class Mapping(dict[str, int]):
    """A mapping class of a training framework."""


class Sequence(list[int]):
    """A list class of a training framework."""


class Slots:
    """An object without a dict."""

    __slots__ = ("size",)
    size: int


@ZIPPED
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(
    tmp_path: Path, megatron: None, monkeypatch: pytest.MonkeyPatch, zipped: bool, protocol: int
) -> None:
    module = sys.modules["megatron.core.enums"]
    for framework_class in (Keywords, Mapping, Sequence, Slots):
        monkeypatch.setattr(framework_class, "__module__", module.__name__)
        monkeypatch.setattr(module, framework_class.__name__, framework_class, raising=False)
    slots = Slots()
    slots.size = 4
    state = torch.arange(6.0).view(2, 3)
    transformer_engine_state = io.BytesIO()
    torch.save({"scale": state}, transformer_engine_state)
    record = {
        "args": argparse.Namespace(num_layers=3, exit_signal=signal.SIGTERM),
        "namespace": types.SimpleNamespace(size=5),
        "_extra_state": transformer_engine_state,
        "bytes": b"a\xff",
        "empty": b"",
        "bytearray": bytearray(b"b\xfe"),
        "date": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "duration": datetime.timedelta(seconds=3),
        "path": pathlib.PurePosixPath("a/b"),
        "number": numpy.float32(2),
        "array": numpy.arange(3, dtype=numpy.int64),
        "states": [random.getstate(), numpy.random.get_state(), numpy.random.RandomState(1)],
        "generator": numpy.random.default_rng(1),
        "model_type": ModelType.encoder_or_decoder,
        "keywords": Keywords(),
        "mapping": Mapping(a=1),
        "sequence": Sequence([1, 2]),
        "slots": slots,
        "counter": collections.Counter("aab"),
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, a=[1]),
        "sets": ({1, 2}, frozenset([3])),
        "complex": 1 + 2j,
        "size": torch.Size((2, 3)),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "parameter": torch.nn.Parameter(state),
        "rows": state[1:],
        "turned": state.t(),
        "unsigned": torch.arange(3).to(torch.uint16),
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "sparse": torch.eye(2).to_sparse(),
    }
    loaded = read_torch_file(save(record, tmp_path / "x.pt", zipped, protocol))

    assert loaded["args"].fields["num_layers"] == 3
    assert loaded["_extra_state"].state[0] == transformer_engine_state.getvalue()
    assert (loaded["bytes"], loaded["empty"], loaded["bytearray"]) == (b"a\xff", b"", b"b\xfe")
    assert loaded["keywords"].arguments == (1,)
    assert loaded["keywords"].keyword_arguments == {"size": 2}
    assert loaded["mapping"].entries == {"a": 1} and loaded["sequence"].elements == [1, 2]
    assert loaded["slots"].state == (None, {"size": 4})
    assert (loaded["ordered"], loaded["default"]) == ({"b": 1, "a": 2}, {"a": [1]})
    assert loaded["sets"] == ({1, 2}, {3})
    assert (loaded["size"], loaded["dtype"]) == ((2, 3), torch.bfloat16)
    stub_names = ("namespace", "date", "duration", "path", "number", "array", "generator")
    for name in (*stub_names, "model_type", "counter", "complex", "device", "sparse"):
        assert isinstance(loaded[name], Stub), name
    for name in ("parameter", "rows", "turned", "unsigned", "float8"):
        assert torch.equal(loaded[name].float(), record[name].float()), name  # type: ignore[attr-defined]
        assert loaded[name].dtype == record[name].dtype, name  # type: ignore[attr-defined]


def doubled(depth: int) -> object:
    """A tuple whose hash and text take 2 ** depth steps."""
    key: object = "a"
    for _ in range(depth):
        key = (key, key)
    return key


class AsKeys:
    """Pickles as a container of keys that take too long to hash."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __reduce__(self) -> tuple[object, ...]:
        if self.kind == "ordered dict":
            return collections.OrderedDict, ([[doubled(64), 1]],)
        if self.kind == "set":
            return set, ([doubled(64)],)
        return dict, (), None, None, iter([(doubled(64), 1)])


@ZIPPED
@pytest.mark.parametrize("kind", ["ordered dict", "set", "entries"])
def test_keys_that_take_too_long_to_hash_are_refused(
    tmp_path: Path, zipped: bool, kind: str
) -> None:
    path = save({"model": AsKeys(kind)}, tmp_path / "x.pt", zipped)
    with pytest.raises(CheckpointError, match="is not a key of a checkpoint's dict") as refusal:
        read_torch_file(path)
    assert len(str(refusal.value)) < 1000


def write_build_of(name: str, path: Path) -> Path:
    """A file whose pickle sets attributes of a global name."""
    pickle_bytes = b"\x80\x02c" + name.replace(".", "\n").encode() + b"\n"
    pickle_bytes += b"N}X\x0c\x00\x00\x00__defaults__K\x01\x85s\x86b."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle_bytes)
    return path


@pytest.mark.parametrize("name", ["_codecs.encode", "collections.OrderedDict", "builtins.set"])
def test_functions_of_the_unpickler_cannot_be_changed(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="asks to change"):
        read_torch_file(write_build_of(name, tmp_path / "x.pt"))


TEXT = "a" * (1 << 20)
NUMBERS = tuple(range(1 << 15))
NAMES = {f"name{index}": 0 for index in NUMBERS}
CONSTRUCTORS: dict[str, tuple[object, tuple[object, ...]]] = {
    "bytes": (_codecs.encode, (TEXT, "latin1")),
    "sets": (set, (NUMBERS,)),
    "sizes": (torch.Size, (NUMBERS,)),
    "dicts": (collections.OrderedDict, (tuple((number, 0) for number in NUMBERS),)),
    "stubs": (types.SimpleNamespace, NUMBERS),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_calls_that_copy_too_much_are_refused(tmp_path: Path, name: str) -> None:
    calls = [Calls(lambda: None) for _ in range(1100)]
    for call in calls:
        call.call = CONSTRUCTORS[name]  # All calls refer to the same tuple of arguments.
    path = save({"model": calls}, tmp_path / "x.pt", True)
    assert path.stat().st_size < 4 << 20
    with pytest.raises(CheckpointError, match="its calls copy more than"):
        read_torch_file(path)


def test_states_that_take_too_long_to_check_are_refused(tmp_path: Path, megatron: None) -> None:
    states = [argparse.Namespace() for _ in range(1100)]
    for namespace in states:
        namespace.__dict__ = NAMES
    path = save({"args": states}, tmp_path / "x.pt", True)
    with pytest.raises(CheckpointError, match="its calls copy more than"):
        read_torch_file(path)


def test_stated_lengths_are_not_allocated(tmp_path: Path) -> None:
    for opcode in (pickle.BYTEARRAY8, pickle.BINBYTES8, pickle.BINUNICODE8):
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
            archive.writestr("archive/data.pkl", b"\x80\x05" + opcode + b"\xff" * 5 + b"\0" * 3)
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_torch_file(tmp_path / "x.pt")


@ZIPPED
def test_enums_that_were_pickled_through_getattr_are_read(
    tmp_path: Path, megatron: None, zipped: bool
) -> None:
    record = {"type": Calls(getattr, ModelType, "encoder_or_decoder")}
    loaded = read_torch_file(save(record, tmp_path / "x.pt", zipped))
    assert loaded["type"].arguments == ("encoder_or_decoder",)


@ZIPPED
def test_empty_bytes_of_older_pickle_protocols_are_read(tmp_path: Path, zipped: bool) -> None:
    # As in states of Transformer Engine's layers, or an empty array among the arguments.
    record = {"_extra_state": io.BytesIO(), "empty": b"", "full": b"ab", "array": numpy.zeros(0)}
    loaded = read_torch_file(save(record, tmp_path / "x.pt", zipped))
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
        read_torch_file(path)
        return
    with pytest.raises(CheckpointError, match="asks to run") as refusal:
        read_torch_file(path)
    assert name in str(refusal.value)
    assert not (tmp_path / "ran").exists()


@ZIPPED
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_files_are_refused_with_their_size(
    tmp_path: Path, zipped: bool, share: float
) -> None:
    path = save({"model": torch.ones(1000)}, tmp_path / "x.pt", zipped)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"has \d+ bytes and is truncated or broken"):
        read_torch_file(path)


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
        read_torch_file(target)


def test_missing_file_lfs_pointer_and_folder_are_checkpoint_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_torch_file(tmp_path / "absent.pt")
    (tmp_path / "x.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="git-lfs pointer"):
        read_torch_file(tmp_path / "x.pt")
