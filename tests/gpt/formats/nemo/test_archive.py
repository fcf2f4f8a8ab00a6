"""NeMo archives: false headers, paths outside, duplicates and bombs are refused in one sentence."""

import gzip
import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from gpt.checkpoint.digest import base_digest
from gpt.errors import CheckpointError
from gpt.formats.nemo import archive as nemo_archive
from gpt.formats.nemo.reader import open_nemo
from gpt.formats.registry import open_checkpoint
from tests.support.checkpoints.distcp_writer import Form
from tests.support.checkpoints.megatron_writer import DENSE, GATED
from tests.support.checkpoints.nemo_writer import Nemo, member, saved, write_archive

Lay = Callable[[tarfile.TarFile], object]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "preamble"


def special(name: str, kind: bytes, target: str = "") -> Lay:
    return lambda archive: member(archive, name, type=kind, linkname=target)


def duplicate_member(archive: tarfile.TarFile) -> None:
    member(archive, "model_config.yaml", b"num_layers: 1")
    member(archive, "./model_config.yaml", b"num_layers: 2")


def long_header(archive: tarfile.TarFile) -> None:
    member(archive, "a", b"x", pax_headers={"comment": "x" * (2 << 20)})


def longname_chain(archive: tarfile.TarFile) -> None:
    """Each header announces a longer name for the next one."""
    tar_info = tarfile.TarInfo("././@LongLink")
    tar_info.type = tarfile.GNUTYPE_LONGNAME
    tar_info.size = 4
    assert archive.fileobj
    for _ in range(3000):
        archive.fileobj.write(tar_info.tobuf(tarfile.GNU_FORMAT) + b"abc\0".ljust(512, b"\0"))


def many_members(archive: tarfile.TarFile) -> None:
    for number in range(12):
        member(archive, f"d{number}", type=tarfile.DIRTYPE)


HOSTILE_ARCHIVES: dict[str, tuple[Lay, str]] = {
    "an absolute path": (lambda a: member(a, "/etc/passwd", b"x"), "'/etc/passwd', a path outside"),
    "a way out": (lambda a: member(a, "./a/../../b", b"x"), "a path outside the archive"),
    "a link": (special("w", tarfile.SYMTYPE, "/etc/passwd"), "w, which is a link to '/etc/passwd'"),
    "a hard link": (special("w", tarfile.LNKTYPE, "model_config.yaml"), "which is a link to"),
    "a pipe": (special("model_config.yaml", tarfile.FIFOTYPE), "which is a device or a pipe"),
    "a device": (special("w", tarfile.CHRTYPE), "which is a device or a pipe"),
    "a name twice": (duplicate_member, "has model_config.yaml twice"),
    "a header without end": (long_header, "cannot be read"),
    "headers of headers": (longname_chain, "cannot be read"),
    "too many members": (many_members, "has more than 8 members"),
}


@pytest.mark.parametrize("mode", ["w", "w:gz"], ids=["plain", "compressed"])
@pytest.mark.parametrize("case", HOSTILE_ARCHIVES)
def test_hostile_archives_are_refused(
    case: str, mode: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nemo_archive, "FILES_MAX", 8)
    lay, message = HOSTILE_ARCHIVES[case]
    path = write_archive(tmp_path / "x.nemo", lay, mode)
    with pytest.raises(CheckpointError, match=message) as refusal:
        open_nemo(path)
    assert "\n" not in str(refusal.value) and str(path) in str(refusal.value)
    assert not list(cache.rglob("*.yaml")) and not list((cache / "unpacked").glob("*"))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9, 0.995])
@pytest.mark.parametrize("pack", ["tar", "gz"])
def test_truncated_archives_are_refused(pack: str, share: float, tmp_path: Path) -> None:
    saved(DENSE, Nemo(tp=2, pack=pack), tmp_path)
    path = tmp_path / "gpt.nemo"
    content = path.read_bytes().rstrip(b"\0")
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError) as refusal:
        open_nemo(path)
    assert "\n" not in str(refusal.value)


def test_expansion_of_a_compressed_archive_is_limited(tmp_path: Path, cache: Path) -> None:
    def bomb(archive: tarfile.TarFile) -> None:
        member(archive, "model_config.yaml", b"num_layers: 1")
        tar_info = tarfile.TarInfo("model_weights.ckpt")
        tar_info.size = 32 << 20
        archive.addfile(tar_info, io.BytesIO(bytes(tar_info.size)))

    path = write_archive(tmp_path / "x.nemo", bomb, "w:gz")
    assert path.stat().st_size < 1 << 17
    with pytest.raises(CheckpointError, match="grows by more than 100 times when model_w"):
        open_nemo(path)
    assert not list((cache / "unpacked").iterdir())


def test_trailing_zeros_end_an_archive(tmp_path: Path) -> None:
    (tmp_path / "x.nemo").write_bytes(gzip.compress(bytes(8 << 20)))
    with pytest.raises(CheckpointError, match=r"cannot be read|no model_config\.yaml"):
        open_nemo(tmp_path / "x.nemo")


@pytest.mark.parametrize("text", [b"", b"PK\x03\x04", b"version https://git-lfs", b"\x1f\x8bxx"])
def test_other_files_are_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.nemo").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"cannot be read|git-lfs|has no model_config"):
        open_nemo(tmp_path / "x.nemo")


def test_links_out_of_an_unpacked_archive_are_refused(tmp_path: Path) -> None:
    source = saved(DENSE, Nemo(pack="dir"), tmp_path)
    root = tmp_path / "gpt.nemo"
    (root / "model_weights.ckpt").rename(root / "other")
    (root / "model_weights.ckpt").symlink_to("other")
    assert base_digest(open_nemo(root)) == base_digest(source)
    (root / "other").rename(tmp_path / "other")
    (root / "model_weights.ckpt").unlink()
    (root / "model_weights.ckpt").symlink_to("../other")
    with pytest.raises(CheckpointError, match=r"is a link to .*other, outside the checkpoint"):
        open_nemo(root)


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    source = saved(DENSE, Nemo(pack="dir"), tmp_path)
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    (tmp_path / "models--x" / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "gpt.nemo").iterdir():
        blob = tmp_path / "models--x" / "blobs" / file.name[::-1]
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    assert base_digest(open_checkpoint(snapshot)) == base_digest(source)


def with_weights(path: Path, weights: bytes) -> Path:
    def lay(archive: tarfile.TarFile) -> None:
        member(archive, "model_config.yaml", b"num_layers: 1")
        member(archive, "model_weights.ckpt", weights)

    return write_archive(path, lay)


def torch_file(record: object) -> bytes:
    stream = io.BytesIO()
    torch.save(record, stream)
    return stream.getvalue()


def edited(name: str, change: Callable[[bytes], bytes], compress: bool = False) -> bytes:
    """A torch.save file with one member changed."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(torch_file({"w": torch.ones(64)}))) as source,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED if compress else 0) as output,
    ):
        for member_name in source.namelist():
            text = source.read(member_name)
            output.writestr(member_name, change(text) if member_name.endswith(name) else text)
    return stream.getvalue()


class Calls:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


def nested() -> object:
    value: object = 1
    for _ in range(400):
        value = [value, value]
    return value


WEIGHTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "code": (lambda: torch_file({"w": Calls(os.system, "true")}), "asks to run posix.system"),
    "getattr": (
        lambda: torch_file({"w": Calls(getattr, "x", "join")}),
        "asks to run builtins.getattr",
    ),
    "a bare pickle": (
        lambda: pickle.dumps({"w": 1}),
        "does not begin with the magic number of torch.save",
    ),
    "a list": (lambda: torch_file([1]), "is a list, not the state dict of a NeMo model"),
    "a compressed storage": (lambda: edited("x", bytes, True), "is compressed"),
    "a short storage": (lambda: edited("data/0", lambda t: t[:8]), "is shorter than its storage"),
    "big-endian bytes": (lambda: edited("byteorder", lambda t: b"big"), "big-endian order"),
    "a pickle cut short": (lambda: edited("data.pkl", lambda t: t[:40]), "truncated or broken"),
    "a zip cut short": (lambda: torch_file({"w": torch.ones(64)})[:-30], "truncated or broken"),
    "lists of lists": (lambda: torch_file({"w": nested()}), "is a list, not a dense tensor"),
    "whole numbers": (lambda: torch_file({"model.x": torch.ones(2).long()}), "is torch.int64"),
    "a sparse tensor": (
        lambda: torch_file({"model.x": torch.eye(3).to_sparse()}),
        "not a dense tensor",
    ),
    "a state of nothing": (lambda: torch_file({}), "no rank has embedding"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_hostile_weights_are_refused(case: str, tmp_path: Path) -> None:
    make, message = WEIGHTS[case]
    path = with_weights(tmp_path / "x.nemo", make())
    with pytest.raises(CheckpointError, match=message) as refusal:
        open_nemo(path)
    assert "\n" not in str(refusal.value)


def both_layouts(archive: tarfile.TarFile) -> None:
    for folder in ("mp_rank_00", "tp_rank_00_pp_rank_000"):
        member(archive, f"{folder}/model_weights.ckpt", b"x")


FAULTS: dict[str, tuple[Lay, str]] = {
    "no config": (
        lambda a: member(a, "model_weights.ckpt", b"x"),
        "has no model_config.yaml; it contains",
    ),
    "no weights": (lambda a: None, "no weights: looked for model_weights.ckpt"),
    "zarr": (lambda a: member(a, "model_weights/x/.zarray", b"{}"), "has its weights in zarr"),
    "zarr by name": (
        lambda a: member(a, "model_weights/metadata.json", b'{"sharded_backend": "zarr"}'),
        "is a zarr checkpoint",
    ),
    "fsdp": (lambda a: member(a, "fsdp_shard_00000/x.ckpt", b"x"), "FSDP shards"),
    "a lost rank": (
        lambda a: member(a, "mp_rank_01/model_weights.ckpt", b"x"),
        "lacks tensor rank 0 of stage 0 of the 2 ranks",
    ),
    "a surplus stage": (
        lambda a: member(a, "tp_rank_00_pp_rank_003/model_weights.ckpt", b"x"),
        "lacks tensor rank 0 of stage 0, tensor rank 1 of stage 0",
    ),
    "two layouts": (
        both_layouts,
        "are both of tensor rank 0, stage 0",
    ),
    "no rank": (lambda a: member(a, "old/model_weights.ckpt", b"x"), "not in a rank directory"),
    "an unfinished save": (
        lambda a: member(a, "model_weights/common.pt", b"x"),
        r"has no \.metadata, so the save did not finish",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_error_names_the_missing_files_of_an_archive(fault: str, tmp_path: Path) -> None:
    lay, message = FAULTS[fault]

    def all_of(archive: tarfile.TarFile) -> None:
        if fault != "no config":
            member(archive, "./model_config.yaml", b"tensor_model_parallel_size: 2\nnum_layers: 1")
        lay(archive)

    with pytest.raises(CheckpointError, match=message) as refusal:
        open_nemo(write_archive(tmp_path / "x.nemo", all_of))
    assert "\n" not in str(refusal.value)


def test_ambiguous_virtual_pipeline_chunks_are_refused(tmp_path: Path) -> None:
    virtual = {"virtual_pipeline_model_parallel_size": 2}
    saved(DENSE, Nemo(pp=2, changes=virtual), tmp_path)
    with pytest.raises(
        CheckpointError, match="but the largest number of chunks in a rank's file is 1"
    ):
        open_nemo(tmp_path / "gpt.nemo")


@pytest.mark.parametrize("form", [None, Form(tp=2, prefix="model.")], ids=["ranks", "distributed"])
def test_changed_byte_of_an_archive_opens_or_raises_a_checkpoint_error(
    form: Form | None, tmp_path: Path
) -> None:
    """A flipped byte gives a model of the right shapes, or one sentence."""
    saved(
        GATED.with_fields(num_layers=1, moe_layers=()),
        Nemo(tp=1 if form else 2, form=form),
        tmp_path,
    )
    path = tmp_path / "gpt.nemo"
    content = path.read_bytes()
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(3):
            offset = int(torch.randint(len(content), (1,), generator=generator))
            damaged[offset] = int(torch.randint(256, (1,), generator=generator))
        path.write_bytes(damaged)
        with suppress(CheckpointError):
            assert open_nemo(path).config.num_layers == 1
