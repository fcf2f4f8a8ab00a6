"""Archives that lie, climb out, repeat themselves or swell are refused, each in one sentence."""

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
from tests.support.checkpoints.nemo_writer import Nemo, hand_laid, member, saved

Lay = Callable[[tarfile.TarFile], object]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "preamble"


def special(name: str, kind: bytes, target: str = "") -> Lay:
    return lambda archive: member(archive, name, type=kind, linkname=target)


def twice(archive: tarfile.TarFile) -> None:
    member(archive, "model_config.yaml", b"num_layers: 1")
    member(archive, "./model_config.yaml", b"num_layers: 2")


def long_header(archive: tarfile.TarFile) -> None:
    member(archive, "a", b"x", pax_headers={"comment": "x" * (2 << 20)})


def chain(archive: tarfile.TarFile) -> None:
    """Each header says that the next one has a longer name."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 4
    assert archive.fileobj
    for _ in range(3000):
        archive.fileobj.write(info.tobuf(tarfile.GNU_FORMAT) + b"abc\0".ljust(512, b"\0"))


def many(archive: tarfile.TarFile) -> None:
    for number in range(12):
        member(archive, f"d{number}", type=tarfile.DIRTYPE)


HOSTILE: dict[str, tuple[Lay, str]] = {
    "an absolute path": (lambda a: member(a, "/etc/passwd", b"x"), "'/etc/passwd', which would"),
    "a way out": (lambda a: member(a, "./a/../../b", b"x"), "which would lie outside it"),
    "a link": (special("w", tarfile.SYMTYPE, "/etc/passwd"), "w, which is a link to '/etc/passwd'"),
    "a hard link": (special("w", tarfile.LNKTYPE, "model_config.yaml"), "which is a link to"),
    "a pipe": (special("model_config.yaml", tarfile.FIFOTYPE), "which is a device or a pipe"),
    "a device": (special("w", tarfile.CHRTYPE), "which is a device or a pipe"),
    "a name twice": (twice, "holds model_config.yaml twice"),
    "a header without end": (long_header, "cannot be read"),
    "headers of headers": (chain, "cannot be read"),
    "too many members": (many, "has more than 8 members"),
}


@pytest.mark.parametrize("mode", ["w", "w:gz"], ids=["plain", "compressed"])
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_archive_is_refused(
    case: str, mode: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nemo_archive, "FILES_MAX", 8)
    lay, says = HOSTILE[case]
    path = hand_laid(tmp_path / "x.nemo", lay, mode)
    with pytest.raises(CheckpointError, match=says) as refusal:
        open_nemo(path)
    assert "\n" not in str(refusal.value) and str(path) in str(refusal.value)
    assert not list(cache.rglob("*.yaml")) and not list((cache / "unpacked").glob("*"))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9, 0.995])
@pytest.mark.parametrize("pack", ["tar", "gz"])
def test_an_archive_cut_short_is_refused(pack: str, share: float, tmp_path: Path) -> None:
    saved(DENSE, Nemo(tp=2, pack=pack), tmp_path)
    path = tmp_path / "gpt.nemo"
    whole = path.read_bytes().rstrip(b"\0")
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError) as refusal:
        open_nemo(path)
    assert "\n" not in str(refusal.value)


def test_a_compressed_archive_that_swells_is_refused_before_it_is_written(
    tmp_path: Path, cache: Path
) -> None:
    def bomb(archive: tarfile.TarFile) -> None:
        member(archive, "model_config.yaml", b"num_layers: 1")
        info = tarfile.TarInfo("model_weights.ckpt")
        info.size = 32 << 20
        archive.addfile(info, io.BytesIO(bytes(info.size)))

    path = hand_laid(tmp_path / "x.nemo", bomb, "w:gz")
    assert path.stat().st_size < 1 << 17
    with pytest.raises(CheckpointError, match="grows more than 100 times with its member model_w"):
        open_nemo(path)
    assert not list((cache / "unpacked").iterdir())


def test_zeros_after_zeros_end_an_archive(tmp_path: Path) -> None:
    (tmp_path / "x.nemo").write_bytes(gzip.compress(bytes(8 << 20)))
    with pytest.raises(CheckpointError, match=r"cannot be read|no model_config\.yaml"):
        open_nemo(tmp_path / "x.nemo")


@pytest.mark.parametrize("text", [b"", b"PK\x03\x04", b"version https://git-lfs", b"\x1f\x8bxx"])
def test_what_is_no_archive_is_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.nemo").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"cannot be read|git-lfs|has no model_config"):
        open_nemo(tmp_path / "x.nemo")


def test_a_link_in_an_unpacked_archive_that_leads_out_is_refused(tmp_path: Path) -> None:
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


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
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

    return hand_laid(path, lay)


def torch_file(record: object) -> bytes:
    stream = io.BytesIO()
    torch.save(record, stream)
    return stream.getvalue()


def edited(name: str, change: Callable[[bytes], bytes], compress: bool = False) -> bytes:
    """A file of torch with one member changed."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(torch_file({"w": torch.ones(64)}))) as old,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED if compress else 0) as new,
    ):
        for one in old.namelist():
            text = old.read(one)
            new.writestr(one, change(text) if one.endswith(name) else text)
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
    "a bare pickle": (lambda: pickle.dumps({"w": 1}), "no archive of torch 1.6 or newer"),
    "a list": (lambda: torch_file([1]), "is a list, not a NeMo model's state"),
    "a compressed storage": (lambda: edited("x", bytes, True), "is compressed"),
    "a short storage": (lambda: edited("data/0", lambda t: t[:8]), "lies beyond the archive"),
    "big-endian bytes": (lambda: edited("byteorder", lambda t: b"big"), "big-endian order"),
    "a pickle cut short": (lambda: edited("data.pkl", lambda t: t[:40]), "truncated or broken"),
    "a zip cut short": (lambda: torch_file({"w": torch.ones(64)})[:-30], "truncated or broken"),
    "lists of lists": (lambda: torch_file({"w": nested()}), "is a list, not a plain tensor"),
    "whole numbers": (lambda: torch_file({"model.x": torch.ones(2).long()}), "is torch.int64"),
    "a sparse tensor": (
        lambda: torch_file({"model.x": torch.eye(3).to_sparse()}),
        "not a plain tensor",
    ),
    "a state of nothing": (lambda: torch_file({}), "no rank holds embedding"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_hostile_weights_are_refused(case: str, tmp_path: Path) -> None:
    make, says = WEIGHTS[case]
    path = with_weights(tmp_path / "x.nemo", make())
    with pytest.raises(CheckpointError, match=says) as refusal:
        open_nemo(path)
    assert "\n" not in str(refusal.value)


def both_layouts(archive: tarfile.TarFile) -> None:
    for folder in ("mp_rank_00", "tp_rank_00_pp_rank_000"):
        member(archive, f"{folder}/model_weights.ckpt", b"x")


FAULTS: dict[str, tuple[Lay, str]] = {
    "no config": (lambda a: member(a, "model_weights.ckpt", b"x"), "has no model_config.yaml, but"),
    "no weights": (lambda a: None, "no weights: looked for model_weights.ckpt"),
    "zarr": (lambda a: member(a, "model_weights/x/.zarray", b"{}"), "keeps its weights in zarr"),
    "zarr by name": (
        lambda a: member(a, "model_weights/metadata.json", b'{"sharded_backend": "zarr"}'),
        "is a zarr checkpoint",
    ),
    "fsdp": (lambda a: member(a, "fsdp_shard_00000/x.ckpt", b"x"), "shards of FSDP"),
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
    "no rank": (lambda a: member(a, "old/model_weights.ckpt", b"x"), "in no directory of a rank"),
    "an unfinished save": (
        lambda a: member(a, "model_weights/common.pt", b"x"),
        r"has no \.metadata, so the save did not finish",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_archive_without_what_a_model_needs_is_refused_by_what_it_lacks(
    fault: str, tmp_path: Path
) -> None:
    lay, says = FAULTS[fault]

    def all_of(archive: tarfile.TarFile) -> None:
        if fault != "no config":
            member(archive, "./model_config.yaml", b"tensor_model_parallel_size: 2\nnum_layers: 1")
        lay(archive)

    with pytest.raises(CheckpointError, match=says) as refusal:
        open_nemo(hand_laid(tmp_path / "x.nemo", all_of))
    assert "\n" not in str(refusal.value)


def test_chunks_of_a_virtual_pipeline_that_are_not_told_apart_are_refused(tmp_path: Path) -> None:
    virtual = {"virtual_pipeline_model_parallel_size": 2}
    saved(DENSE, Nemo(pp=2, changes=virtual), tmp_path)
    with pytest.raises(CheckpointError, match="but the ranks' files hold 1 chunk each"):
        open_nemo(tmp_path / "gpt.nemo")


@pytest.mark.parametrize("form", [None, Form(tp=2, prefix="model.")], ids=["ranks", "distributed"])
def test_no_byte_of_an_archive_crashes_its_reader(form: Form | None, tmp_path: Path) -> None:
    """A flipped byte gives a model of the right shapes, or one sentence."""
    saved(
        GATED.with_fields(num_layers=1, moe_layers=()),
        Nemo(tp=1 if form else 2, form=form),
        tmp_path,
    )
    path = tmp_path / "gpt.nemo"
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        broken = bytearray(whole)
        for _ in range(3):
            place = int(torch.randint(len(whole), (1,), generator=generator))
            broken[place] = int(torch.randint(256, (1,), generator=generator))
        path.write_bytes(broken)
        with suppress(CheckpointError):
            assert open_nemo(path).config.num_layers == 1
