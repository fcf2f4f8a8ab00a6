"""Valid checkpoints of every format, and faults to plant in them.

A fault takes the root of a copy and changes it, as clusters, copies and attackers do: truncated or
mixed files, false numbers, pickles that run code. The expected error of each fault is listed with
the kinds, not here.
"""

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import preamble
from checkpoints_tools.conversion.convert import write_native
from tests.support.checkpoints import distcp_writer, hf_targets, megatron_writer, nemo_writer
from tests.support.checkpoints.distcp_writer import Form
from tests.support.checkpoints.megatron_writer import DENSE, GATED, MIXED, Layout
from tests.support.models import lively

Plant = Callable[[Path], object]

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
ITERATION = "iter_0000100"
RANK_FILE = "model_optim_rng.pt"
SHARD = "model-00002-of-*.safetensors"
FIRST = "mp_rank_00_000"
LAST = "mp_rank_01_001"
FIRST_FILE = f"{FIRST}/{RANK_FILE}"
LAST_FILE = f"{LAST}/{RANK_FILE}"
SHARD_BYTES = 30_000


@dataclass(frozen=True)
class Kind:
    """A fault. Its error message contains all `words`; the first is the faulty path."""

    good: str
    plant: Plant
    words: tuple[str, ...]


def kind(good: str, plant: Plant, *words: str) -> Kind:
    return Kind(good, plant, words)


def _huggingface(root: Path) -> None:
    write_native(lively(hf_targets.GATED), root.with_name("native"))
    arguments = [str(root.with_name("native")), str(root), "--to", "hf", "--shard-gb", "3e-5"]
    assert preamble.main(["convert", *arguments]) == 0
    (root / "preamble.json").unlink()


def _bin(root: Path) -> None:
    root.mkdir()
    tensors: dict[str, Tensor] = {}
    _huggingface(root / "huggingface")
    for file in (root / "huggingface").glob("*.safetensors"):
        tensors |= safetensors_of(file)
    torch.save(tensors, root / "pytorch_model.bin")
    shutil.copy(root / "huggingface" / "config.json", root)
    shutil.rmtree(root / "huggingface")
    shutil.rmtree(root / "native")


GOOD: Mapping[str, Plant] = {
    "megatron": lambda root: megatron_writer.saved(DENSE, Layout(tp=2, pp=2), root),
    "legacy": lambda root: megatron_writer.saved(
        DENSE, Layout(tp=2, names="2021", zipped=False), root
    ),
    "experts": lambda root: megatron_writer.saved(MIXED, Layout(tp=2, ep=2), root),
    # The second stage begins with an MLP.
    "hybrid": lambda root: megatron_writer.saved(
        DENSE, Layout(pp=2, hybrid=True, stages=[[3, 5]]), root
    ),
    "torch_dist": lambda root: distcp_writer.saved(GATED, Form(tp=2), root),
    "huggingface": _huggingface,
    "bin": _bin,
    "native": lambda root: write_native(lively(DENSE), root, shard_bytes_max=SHARD_BYTES),
    "nemo": lambda root: _nemo(root),
}


def _nemo(root: Path) -> None:
    root.mkdir()
    nemo_writer.saved(DENSE, nemo_writer.Nemo(tp=2), root)
    shutil.rmtree(root / "work")
    shutil.rmtree(root / "plain")


def only_match(root: Path, pattern: str) -> Path:
    (path,) = sorted(root.rglob(pattern))
    return path


# Files.


def cut(pattern: str, share: float) -> Plant:
    """A file keeps a share of its bytes; a negative number of bytes is cut from the end."""

    def plant(root: Path) -> None:
        path = only_match(root, pattern)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share) if share >= 0 else int(share)])

    return plant


def lost(pattern: str) -> Plant:
    def plant(root: Path) -> None:
        path = only_match(root, pattern)
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return plant


def replace_content(pattern: str, content: bytes | str) -> Plant:
    """Other content for an existing file."""
    text = content.encode() if isinstance(content, str) else content
    return lambda root: only_match(root, pattern).write_bytes(text)


def grown(pattern: str) -> Plant:
    """A file of a terabyte; it is sparse and takes no space."""
    return lambda root: os.truncate(only_match(root, pattern), 1 << 40)


def pointer(pattern: str) -> Plant:
    """The pointer that git-lfs leaves where the file was not pulled."""
    return replace_content(
        pattern, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )


def copied(old: str, new: str) -> Plant:
    def plant(root: Path) -> None:
        path = only_match(root, old)
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, path.with_name(new))

    return plant


def swapped(left: str, right: str) -> Plant:
    def plant(root: Path) -> None:
        paths = [only_match(root, left), only_match(root, right)]
        temporary = paths[0].with_name("between")
        for old, new in zip((paths[0], paths[1], temporary), (temporary, *paths), strict=True):
            old.rename(new)

    return plant


def replaced(pattern: str, make: Callable[[Path], object]) -> Plant:
    """A directory, a link or another entry in place of a file."""

    def plant(root: Path) -> None:
        path = only_match(root, pattern)
        path.unlink()
        make(path)

    return plant


def to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("gone"))


def unreadable(path: Path) -> None:
    path.touch(mode=0)


def flipped(pattern: str, value: Callable[[Path], Tensor]) -> Plant:
    """One flipped bit of a weight in a file, which contains `value`."""

    def plant(root: Path) -> None:
        needle = value(root).contiguous().view(torch.uint8).numpy().tobytes()[:64]
        for path in sorted(root.rglob(pattern)):
            content = bytearray(path.read_bytes())
            position = content.find(needle)
            if position >= 0:
                content[position + 1] ^= 1
                path.write_bytes(content)
                return
        raise AssertionError("no file contains the weight")

    return plant


def many(*plants: Plant) -> Plant:
    def plant(root: Path) -> None:
        for plant_fault in plants:
            plant_fault(root)

    return plant


# Files of torch.save.

Change = Callable[[dict[str, Any]], object]


def saved(pattern: str, change: Change) -> Plant:
    """The changed content of a torch.save file; `pattern` may match several."""

    def plant(root: Path) -> None:
        paths = sorted(root.rglob(pattern))
        assert paths, pattern
        for path in paths:
            record = torch.load(path, weights_only=False)
            change(record)
            path.unlink()
            torch.save(record, path)

    return plant


def ranks(folders: str, change: Change) -> Plant:
    return saved(f"{folders}/{RANK_FILE}", change)


def argument(name: str, value: object, folders: str = "mp_rank_*") -> Plant:
    return ranks(folders, lambda record: setattr(record["args"], name, value))


def tensor(folders: str, key: str, change: Callable[[Tensor], object]) -> Plant:
    """A tensor, changed in place, or replaced by the tensor that `change` returns."""

    def apply(record: dict[str, Any]) -> None:
        changed = change(record["model"][key])
        if changed is not None:
            record["model"][key] = changed

    return ranks(folders, apply)


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


def recipe(pattern: str, opcodes: bytes) -> Plant:
    """A torch.save file whose pickle is these bytes."""

    def plant(root: Path) -> None:
        path = only_match(root, pattern)
        with zipfile.ZipFile(path) as archive:
            members = {member: archive.read(member) for member in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, content in members.items():
                archive.writestr(name, opcodes if name.endswith("/data.pkl") else content)

    return plant


def nested(depth: int) -> bytes:
    """A list in a list in a list, as opcodes."""
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def laughs(levels: int = 9) -> list[Any]:
    """Nested references to the same list: small in a file, exponential when printed."""
    nested_list: list[Any] = ["ha"] * 10
    for _ in range(levels):
        nested_list = [nested_list] * 10
    return nested_list


# The index of a distributed checkpoint.


def index(change: Callable[[Any], object]) -> Plant:
    def plant(root: Path) -> None:
        path = only_match(root, ".metadata")
        record = pickle.loads(path.read_bytes())
        change(record)
        path.write_bytes(pickle.dumps(record))

    return plant


def entry(record: Any, key: str) -> Any:
    return record.state_dict_metadata[key]


def storage(record: Any, key: str) -> tuple[Any, Any]:
    """The location of the first chunk, and its span in a file."""
    return next(
        (location, span) for location, span in record.storage_data.items() if location.fqn == key
    )


# safetensors and JSON.


def safetensors_of(path: Path) -> dict[str, Tensor]:
    from gpt.checkpoint.files.safetensors_file import open_safetensors

    return {key: stored.tensor().clone() for key, stored in open_safetensors(path).items()}


def header(pattern: str, change: Callable[[dict[str, Any]], object]) -> Plant:
    """A safetensors header, changed."""

    def plant(root: Path) -> None:
        path = sorted(root.rglob(pattern))[0]
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        record = json.loads(content[8 : 8 + length])
        changed = change(record)
        text = changed if isinstance(changed, bytes) else json.dumps(record).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return plant


def json_of(pattern: str, change: Change) -> Plant:
    def plant(root: Path) -> None:
        path = only_match(root, pattern)
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))

    return plant


def fields(pattern: str, **values: object) -> Plant:
    return json_of(pattern, lambda record: record.update(values))
