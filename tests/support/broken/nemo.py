"""Broken NeMo archives: truncated, hostile, or inconsistent.

Each kind has the words of its error message. All are refused before anything is written. A kind
that was seen in practice is added here.
"""

import gzip
import io
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tests.support.broken import checkpoints
from tests.support.broken.checkpoints import Calls, Kind, Plant, cut, kind, pointer, replace_content
from tests.support.checkpoints import nemo_writer


def _config(text: str) -> Plant:
    """Another text for the config of a NeMo archive."""
    return repacked(lambda files: files.update({"model_config.yaml": text.encode()}))


def repacked(change: Callable[[dict[str, bytes]], object]) -> Plant:
    """An archive whose members are changed."""

    def plant(root: Path) -> None:
        path = checkpoints.only_match(root, "gpt.nemo")
        with tarfile.open(path) as archive:
            members = [(member.name[2:], archive.extractfile(member)) for member in archive]
            contents = {name: file.read() for name, file in members if file is not None}
        change(contents)
        with tarfile.open(path, "w") as archive:
            for name, content in contents.items():
                nemo_writer.member(archive, name, content)

    return plant


def _with(name: str, text: bytes = b"", **attributes: object) -> Plant:
    """One more member."""

    def plant(root: Path) -> None:
        with tarfile.open(checkpoints.only_match(root, "gpt.nemo"), "a") as archive:
            nemo_writer.member(archive, name, text, **attributes)

    return plant


def _claims_a_terabyte(root: Path) -> None:
    member = tarfile.TarInfo("model_config.yaml")
    member.size = 1 << 40
    checkpoints.only_match(root, "gpt.nemo").write_bytes(member.tobuf() + b"num_layers: 4\n" * 100)


RANK_0 = "mp_rank_00/model_weights.ckpt"
NEMO: Mapping[str, Kind] = {
    "half an archive": kind("nemo", cut("gpt.nemo", 0.5), "gpt.nemo", "broken or hostile"),
    "an empty archive": kind("nemo", replace_content("gpt.nemo", b""), "gpt.nemo"),
    "a git-lfs pointer for an archive": kind("nemo", pointer("gpt.nemo"), "gpt.nemo", "git-lfs"),
    "a member that claims a terabyte": kind("nemo", _claims_a_terabyte, "gpt.nemo", "ends at"),
    "a member that leads out": kind("nemo", _with("../x"), "gpt.nemo", "outside"),
    "a member with an absolute path": kind("nemo", _with("/etc/x"), "gpt.nemo", "outside"),
    "a member that is a link": kind(
        "nemo", _with("x", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "gpt.nemo", "a link to"
    ),
    "a member that is a device": kind("nemo", _with("x", type=tarfile.CHRTYPE), "gpt.nemo", "x"),
    "a duplicate member": kind("nemo", _with("model_config.yaml"), "gpt.nemo", "twice"),
    "a gzip bomb": kind(
        "nemo",
        lambda root: checkpoints.only_match(root, "gpt.nemo").write_bytes(
            gzip.compress(tarfile.TarInfo("model_config.yaml").tobuf() + bytes(64 << 20))
        ),
        "gpt.nemo",
    ),
    "no config in an archive": kind(
        "nemo", repacked(lambda f: f.pop("model_config.yaml")), "gpt.nemo", "no model_config.yaml"
    ),
    "a rank lost from an archive": kind(
        "nemo", repacked(lambda f: f.pop(RANK_0)), "gpt.nemo", "lacks tensor rank 0"
    ),
    "half a rank in an archive": kind(
        "nemo",
        repacked(lambda f: f.update({RANK_0: f[RANK_0][: len(f[RANK_0]) // 2]})),
        RANK_0,
        "truncated or broken",
    ),
    "hostile weights in an archive": kind(
        "nemo",
        repacked(lambda f: f.update({RANK_0: _pickled(Calls(os.system, "true"))})),
        RANK_0,
        "asks to run",
        "system",
    ),
    "a config that runs code": kind(
        "nemo",
        _config("num_layers: !!python/object/apply:os.system ['true']"),
        "model_config.yaml",
        "num_layers",
    ),
    "a config of exponential references": kind(
        "nemo",
        _config(
            "a0: &a0 [x]\n"
            + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
            + "num_layers: *a9\n"
        ),
        "model_config.yaml",
    ),
    "a config that is a list in an archive": kind("nemo", _config("[1]"), "model_config.yaml"),
    "a config of brackets": kind("nemo", _config("[" * 1_000), "model_config.yaml"),
    "a config of bytes": kind(
        "nemo",
        repacked(lambda f: f.update({"model_config.yaml": b"\xff\x00"})),
        "model_config.yaml",
    ),
}


def _pickled(record: object) -> bytes:
    stream = io.BytesIO()
    torch.save(record, stream)
    return stream.getvalue()
