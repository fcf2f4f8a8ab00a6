"""`preamble convert`, from the command line: what it plans, refuses, writes, and goes on with."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import preamble
from checkpoints_tools.conversion import convert as conversion
from checkpoints_tools.conversion import copy_engine
from checkpoints_tools.conversion.convert import convert, plan, write_native
from checkpoints_tools.layout.layout import Division
from checkpoints_tools.writers.registry import Wish
from gpt.checkpoint.digest import base_digest, glance, identify
from gpt.checkpoint.logical_tensor import in_memory
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.manifest import MANIFEST
from gpt.formats.registry import open_checkpoint
from gpt.model.reference_logits import FILE as PROOF
from tests.support.models import CLASSIC, MODERN, lively

LLAMA = MODERN.with_fields(qkv_bias=False, rotary_percent=1.0, window_size=None, qk_layernorm=False)
LLAMA = LLAMA.with_fields(kv_channels=4, ffn_hidden_size=48, vocab_size=64)

Told = pytest.CaptureFixture[str]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_native(lively(LLAMA), tmp_path / "source", tokenizer=words(tmp_path / "words"))
    return tmp_path / "source"


def words(folder: Path) -> Path:
    folder.mkdir()
    (folder / "null.json").write_text(json.dumps({"vocab_size": 64, "eos_token_id": 0}))
    return folder


def run(*words: object) -> int:
    return preamble.main(["convert", *map(str, words)])


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_one_model_keeps_its_digest_through_every_format(source: Path, tmp_path: Path) -> None:
    chain = [
        ("megatron", "--tp", 2, "--pp", 2, "--vpp", 2),
        ("hf",),
        ("megatron-dist", "--tp", 4),
        ("megatron", "--tp", 8),
        ("native",),
    ]
    first, here = open_checkpoint(source), source
    for number, way in enumerate(chain):
        target = tmp_path / str(number)
        assert run(here, target, "--to", *way) == 0
        found = open_checkpoint(target)
        assert found.identity is not None and found.identity == first.identity
        assert base_digest(found) == found.identity.digest
        assert found.tokenizer is not None and list(found.tokenizer.glob("null.json"))
        here = target
    last, origin = tree(here), tree(source)
    del last[MANIFEST], origin[MANIFEST]  # Its config may have other values where none is used.
    assert last == origin


def test_a_manifest_in_any_format_is_believed_only_as_long_as_it_fits(
    source: Path, tmp_path: Path
) -> None:
    assert run(source, tmp_path / "hf", "--to", "hf") == 0
    write_native(lively(LLAMA, seed=1), tmp_path / "other")
    assert run(tmp_path / "other", tmp_path / "hf2", "--to", "hf") == 0
    shutil.copy(tmp_path / "hf2" / "model.safetensors", tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match="not those that its manifest describes"):
        glance(open_checkpoint(tmp_path / "hf"))


def test_the_plan_is_printed_and_nothing_is_written(
    source: Path, tmp_path: Path, capsys: Told
) -> None:
    before = tree(tmp_path)
    assert run(source, tmp_path / "t", "--to", "megatron", "--tp", 2, "--pp", 5, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "mp_rank_01_004/model_optim_rng.pt" in out and "10 files" not in out
    assert "latest_checkpointed_iteration.txt" in out
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--to", "megatron", "--tp", 3), "tensor parallel 3 does not divide the model"),
        (("--to", "megatron", "--pp", 6), "--pp can be at most 5"),
        (("--to", "native", "--tp", 2), "--to native has no split"),
        (("--to", "hf", "--megatron-spec", "te"), "--to hf has no specs"),
        (("--to", "hf", "--family", "gpt2"), "gpt2"),
        (("--to", "megatron", "--ep", 2), "--ep can be 1: it has no experts"),
        (("--to", "native", "--tokenizer", "nowhere"), "nowhere"),
    ],
)
def test_a_wish_that_cannot_be_is_one_sentence(
    words: tuple[object, ...], says: str, source: Path, tmp_path: Path, capsys: Told
) -> None:
    before = tree(tmp_path)
    assert run(source, tmp_path / "t", *words) == 1
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1 and told[0].startswith("preamble convert: ") and says in told[0]
    assert tree(tmp_path) == before


@pytest.mark.parametrize("words", [("--workers", "0"), ("--shard-gb", "0"), ("--to", "zarr")])
def test_a_flag_out_of_range_is_a_misuse(words: tuple[str, ...], source: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run(source, "t", *(words if "--to" in words else ("--to", "native", *words)))
    assert ended.value.code == 2


def test_nothing_that_is_there_is_overwritten(source: Path, tmp_path: Path, capsys: Told) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine").write_text("mine")
    assert run(source, tmp_path / "t", "--to", "hf") == 1
    assert "exists already; remove it or choose another target" in capsys.readouterr().err
    assert run(source, source, "--to", "hf") == 1


def test_a_disk_without_room_is_seen_before_a_byte_is_written(
    source: Path, tmp_path: Path, capsys: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    before = tree(tmp_path)
    assert run(source, tmp_path / "t", "--to", "hf") == 1
    assert "1,000 free; make room" in capsys.readouterr().err
    assert tree(tmp_path) == before


def test_another_dtype_keeps_the_origin_with_a_note(source: Path, tmp_path: Path) -> None:
    assert run(source, tmp_path / "t", "--to", "megatron", "--tp", 2, "--dtype", "bfloat16") == 0
    origin, half = open_checkpoint(source), open_checkpoint(tmp_path / "t")
    assert half.config.dtype == "bfloat16" and origin.identity is not None
    assert half.notes[-1] == "converted from float32 to bfloat16"
    assert identify(half).digest == origin.identity.digest != base_digest(half)
    for name in origin.tensors:
        assert torch.equal(half.read(name), origin.read(name).bfloat16())


def test_nan_is_warned_of_and_copied_or_refused(tmp_path: Path, capsys: Told) -> None:
    good = lively(CLASSIC)
    tensors = {name: good.read(name) for name in good.tensors}
    tensors["decoder.layers.1.mlp.linear_fc1.weight"][3, 3] = float("nan")
    write_native((CLASSIC, tensors), tmp_path / "m")
    assert run(tmp_path / "m", tmp_path / "t", "--to", "megatron") == 0
    assert "warning: decoder.layers.1.mlp.linear_fc1.weight" in capsys.readouterr().err
    assert run(tmp_path / "m", tmp_path / "u", "--to", "megatron", "--refuse-nan") == 1
    assert "--refuse-nan" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "t"]


def test_a_source_that_was_damaged_after_its_manifest_is_refused(
    source: Path, tmp_path: Path, capsys: Told
) -> None:
    """In the middle of a tensor, where no sample falls."""
    weights = next(source.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert run(source, tmp_path / "t", "--to", "hf") == 1
    assert "files were damaged after it was written" in capsys.readouterr().err
    assert not (tmp_path / "t").exists() and not list(tmp_path.glob(".*"))


def test_a_proof_is_written_and_fits(source: Path, tmp_path: Path) -> None:
    assert run(source, tmp_path / "t", "--to", "megatron", "--tp", 2, "--prove") == 0
    folder = tmp_path / "t" / "release"
    assert (folder / PROOF).is_file()
    assert PROOF in json.loads((folder / MANIFEST).read_text())["files"]
    assert preamble.main(["verify", str(tmp_path / "t"), "--prove"]) == 0


class Killed(BaseException):
    """A kill, as far as the files can tell: nothing after it is done."""


@contextmanager
def killed_after(writes: int) -> Iterator[None]:
    """Files take so many writes, and then the process is gone."""
    real, left = copy_engine.Files.write, writes

    def write(
        files: copy_engine.Files, number: int, offset: int, content: memoryview | bytes
    ) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        real(files, number, offset, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_engine.Files, "write", write)
        yield


@pytest.mark.parametrize("to", ["native", "megatron", "megatron-dist", "hf"])
def test_a_killed_run_goes_on_and_ends_the_same(
    to: str, source: Path, tmp_path: Path, capsys: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_engine, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(copy_engine, "PROGRESS_SECONDS", 0.001)
    assert run(source, tmp_path / "whole", "--to", to) == 0
    made = plan(open_checkpoint(source), tmp_path / "t", Wish(to))
    with killed_after(30), pytest.raises(Killed):
        convert(made)
    assert not (tmp_path / "t").exists()
    assert run(source, tmp_path / "t", "--to", to) == 1
    assert "add --resume to go on with it, or remove it" in capsys.readouterr().err
    assert run(source, tmp_path / "t", "--to", to, "--resume") == 0
    assert tree(tmp_path / "t") == tree(tmp_path / "whole")
    assert not made.partial.exists()
    assert run(source, tmp_path / "t", "--to", to, "--resume") == 0
    assert "was complete already" in capsys.readouterr().err


def test_what_was_begun_for_another_source_is_not_continued(
    source: Path, tmp_path: Path, capsys: Told
) -> None:
    made = plan(open_checkpoint(source), tmp_path / "t", Wish())
    with killed_after(3), pytest.raises(Killed):
        convert(made)
    write_native(lively(LLAMA, seed=1), tmp_path / "other")
    assert run(tmp_path / "other", tmp_path / "t", "--to", "native", "--resume") == 1
    assert "is of another source, target or version; remove it" in capsys.readouterr().err
    assert run(source, tmp_path / "t", "--to", "native", "--resume") == 0


def test_what_overflows_the_new_dtype_is_named_or_refused(tmp_path: Path, capsys: Told) -> None:
    good = lively(CLASSIC)
    tensors = {name: good.read(name) for name in good.tensors}
    tensors["decoder.layers.1.mlp.linear_fc1.weight"][3, 3] = 1e5
    write_native((CLASSIC, tensors), tmp_path / "m")
    words = (tmp_path / "m", tmp_path / "t", "--to", "megatron", "--dtype", "float16")
    assert run(*words, "--refuse-nan") == 1
    assert "linear_fc1.weight holds values that float16 cannot hold" in capsys.readouterr().err
    assert run(*words) == 0
    assert "became infinite in float16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("--to", "nemo", "--tp", 2), ("--to", "nemo", "--pp", 2)),
        (("--to", "hf"), ("--to", "hf", "--prove")),
        (
            ("--to", "megatron", "--tp", 2),
            ("--to", "megatron", "--tp", 2, "--megatron-spec", "local"),
        ),
    ],
)
def test_a_target_of_another_wish_is_not_taken_for_complete(
    first: tuple[object, ...], then: tuple[object, ...], source: Path, tmp_path: Path, capsys: Told
) -> None:
    target = tmp_path / "t.nemo"
    assert run(source, target, *first) == 0
    assert run(source, target, *first, "--resume") == 0
    assert "was complete already" in capsys.readouterr().err
    assert run(source, target, *then, "--resume") == 1
    assert "exists already" in capsys.readouterr().err


def test_only_one_run_has_a_target_and_the_other_harms_nothing(
    source: Path, tmp_path: Path
) -> None:
    made = plan(open_checkpoint(source), tmp_path / "t", Wish())

    def meanwhile(_: int) -> None:
        with pytest.raises(CheckpointError, match="being written by another run"):
            convert(made, resume=True)
        with pytest.raises(CheckpointError, match="what an earlier run left, or one that is run"):
            write_native(open_checkpoint(source), tmp_path / "t")

    assert convert(made, report=meanwhile).identity.digest
    assert tree(tmp_path / "t") == tree(source)


def test_a_target_that_was_removed_is_made_again(source: Path, tmp_path: Path) -> None:
    """Even if a kill between the last two steps has left the notes of it."""
    assert run(source, tmp_path / "t", "--to", "hf") == 0
    made = plan(open_checkpoint(source), tmp_path / "t", Wish("hf"))
    whole = tree(tmp_path / "t")
    shutil.rmtree(tmp_path / "t")
    with killed_after(20), pytest.raises(Killed):
        convert(made, workers=1)
    shutil.rmtree(made.partial / "content")
    assert run(source, tmp_path / "t", "--to", "hf", "--resume") == 0
    assert tree(tmp_path / "t") == whole


def test_damage_shows_after_a_change_of_dtype_too(
    source: Path, tmp_path: Path, capsys: Told
) -> None:
    assert run(source, tmp_path / "half", "--to", "native", "--dtype", "bfloat16") == 0
    assert run(tmp_path / "half", tmp_path / "hf", "--to", "hf") == 0
    origin, last = glance(open_checkpoint(source)), glance(open_checkpoint(tmp_path / "hf"))
    assert last.digest == origin.digest and last.stored == base_digest(
        open_checkpoint(tmp_path / "hf")
    )
    weights = next((tmp_path / "half").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert preamble.main(["verify", str(tmp_path / "half")]) == 1
    assert run(tmp_path / "half", tmp_path / "t", "--to", "hf") == 1
    assert "files were damaged after it was written" in capsys.readouterr().err


def test_a_source_that_changes_meanwhile_makes_no_target(
    source: Path, tmp_path: Path, capsys: Told
) -> None:
    made = plan(open_checkpoint(source), tmp_path / "t", Wish())
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        convert(made, report=lambda _: os.utime(next(source.glob("*.safetensors"))))
    assert not (tmp_path / "t").exists() and not made.partial.exists()


def test_weights_of_several_dtypes_go_through_forms_that_have_one(tmp_path: Path) -> None:
    """A router's bias among halves, one norm in fp32."""
    config = LLAMA.with_fields(dtype="bfloat16")
    good = lively(config).in_dtype(torch.bfloat16)
    tensors = {name: good.read(name) for name in good.tensors}
    name = "decoder.layers.2.mlp.linear_fc1.layer_norm_weight"
    tensors[name] = tensors[name].float()
    write_native((config, tensors), tmp_path / "m")
    for number, to in enumerate(["megatron", "megatron-dist", "nemo", "hf"]):
        target = tmp_path / f"{number}.nemo"
        assert run(tmp_path / "m", target, "--to", to) == 0
        found = open_checkpoint(target)
        for name, value in tensors.items():
            assert torch.equal(found.read(name).float(), value.float())


def test_an_edited_config_beside_a_manifest_is_read_as_it_is(source: Path, tmp_path: Path) -> None:
    assert run(source, tmp_path / "hf", "--to", "hf") == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "rope_theta": 500000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}))  # fmt: skip
    found = open_checkpoint(tmp_path / "hf")
    assert found.identity is None and found.config.rotary_base == 500000.0
    assert any("config.json has" in note for note in found.notes)


def test_weights_that_change_while_they_are_copied_never_make_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands for any mistake of a writer: our own reader finds another model there."""
    source = lively(CLASSIC)
    made = plan(source, tmp_path / "t", Wish("megatron", division=Division(2)))

    def other(path: Path) -> object:
        found = open_checkpoint(path)
        tensors = {name: found.read(name) for name in found.tensors}
        tensors["decoder.final_layernorm.weight"] += 1
        return in_memory(found.config, tensors)

    monkeypatch.setattr(conversion, "open_checkpoint", other)
    with pytest.raises(RuntimeError, match="is not the source's model"):
        convert(made)
    assert not (tmp_path / "t").exists()


def test_memory_does_not_depend_on_the_number_of_layers(tmp_path: Path) -> None:
    """By construction: what a worker holds is two blocks; see `make bench` for a large model."""
    deep = GPTConfig(40, 64, 4, 101, 64)
    assert write_native(lively(deep), tmp_path / "m").digest
    assert run(tmp_path / "m", tmp_path / "t", "--to", "megatron", "--memory-mb", 1) == 0
