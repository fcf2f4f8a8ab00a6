"""`preamble convert` from the command line: plans, refusals, written targets, and resumed runs."""

import json
import os
import re
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
from checkpoints_tools.layout.layout import (
    CrcPatch,
    LiteralBytes,
    ParallelSplit,
    Placement,
    TargetFile,
)
from checkpoints_tools.writers.registry import ConversionOptions
from gpt.checkpoint.digest import base_digest, identify, lookup_identity
from gpt.checkpoint.logical_tensor import checkpoint_from_tensors
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.manifest import MANIFEST
from gpt.formats.registry import open_checkpoint
from gpt.parallel.weight_sharding import ShardSpec
from gpt.reference_logits.proof_file import PROOF_FILE as PROOF
from tests.support.models import CLASSIC, MODERN, lively

LLAMA = MODERN.with_fields(qkv_bias=False, rotary_percent=1.0, window_size=None, qk_layernorm=False)
LLAMA = LLAMA.with_fields(kv_channels=4, ffn_hidden_size=48, vocab_size=64)

CapturedOutput = pytest.CaptureFixture[str]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_native(lively(LLAMA), tmp_path / "source", tokenizer=tokenizer_folder(tmp_path / "words"))
    return tmp_path / "source"


def tokenizer_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "null.json").write_text(json.dumps({"vocab_size": 64, "eos_token_id": 0}))
    return folder


def run(*arguments: object) -> int:
    return preamble.main(["convert", *map(str, arguments)])


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
    original = open_checkpoint(source)
    current = source
    for number, options in enumerate(chain):
        target = tmp_path / str(number)
        assert run(current, target, "--to", *options) == 0
        converted = open_checkpoint(target)
        assert converted.identity is not None and converted.identity == original.identity
        assert base_digest(converted) == converted.identity.digest
        assert converted.tokenizer is not None and list(converted.tokenizer.glob("null.json"))
        current = target
    last_tree = tree(current)
    origin = tree(source)
    # The manifest's config may have other values in fields without an effect.
    del last_tree[MANIFEST], origin[MANIFEST]
    assert last_tree == origin


def test_manifest_of_any_format_is_ignored_once_the_weights_differ(
    source: Path, tmp_path: Path
) -> None:
    assert run(source, tmp_path / "hf", "--to", "hf") == 0
    write_native(lively(LLAMA, seed=1), tmp_path / "other")
    assert run(tmp_path / "other", tmp_path / "hf2", "--to", "hf") == 0
    shutil.copy(tmp_path / "hf2" / "model.safetensors", tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match="do not match the fingerprint in the manifest"):
        lookup_identity(open_checkpoint(tmp_path / "hf"))


def test_dry_run_prints_the_plan_and_writes_nothing(
    source: Path, tmp_path: Path, capsys: CapturedOutput
) -> None:
    tree_before = tree(tmp_path)
    assert run(source, tmp_path / "t", "--to", "megatron", "--tp", 2, "--pp", 5, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "mp_rank_01_004/model_optim_rng.pt" in out and "10 files" not in out
    assert "latest_checkpointed_iteration.txt" in out
    assert tree(tmp_path) == tree_before


def test_dry_run_counts_the_files_that_it_does_not_list(
    source: Path, tmp_path: Path, capsys: CapturedOutput
) -> None:
    assert run(source, tmp_path / "t", "--to", "megatron", "--tp", 8, "--pp", 5, "--dry-run") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    (files,) = re.findall(r"(\d+) files", head)
    listed = [line for line in lines if "bytes" in line]
    assert f"  and {int(files) - len(listed)} more files" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "megatron", "--tp", 3), "tensor parallel 3 does not divide the model"),
        (("--to", "megatron", "--pp", 6), "--pp can be at most 5"),
        (("--to", "native", "--tp", 2), "--to native has no parallel split"),
        (("--to", "hf", "--megatron-spec", "te"), "--to hf has no layer specs"),
        (("--to", "hf", "--family", "gpt2"), "gpt2"),
        (("--to", "megatron", "--ep", 2), "--ep can be 1, since the model has no experts"),
        (("--to", "native", "--tokenizer", "nowhere"), "nowhere"),
    ],
)
def test_impossible_options_give_a_one_line_error(
    arguments: tuple[object, ...],
    message: str,
    source: Path,
    tmp_path: Path,
    capsys: CapturedOutput,
) -> None:
    tree_before = tree(tmp_path)
    assert run(source, tmp_path / "t", *arguments) == 1
    error_lines = capsys.readouterr().err.strip().splitlines()
    assert (
        len(error_lines) == 1
        and error_lines[0].startswith("preamble convert: ")
        and message in error_lines[0]
    )
    assert tree(tmp_path) == tree_before


@pytest.mark.parametrize("arguments", [("--workers", "0"), ("--shard-gb", "0"), ("--to", "zarr")])
def test_flag_out_of_range_is_a_usage_error(arguments: tuple[str, ...], source: Path) -> None:
    with pytest.raises(SystemExit) as exit_error:
        run(source, "t", *(arguments if "--to" in arguments else ("--to", "native", *arguments)))
    assert exit_error.value.code == 2


def test_a_target_in_an_object_store_is_a_usage_error(source: Path, capsys: CapturedOutput) -> None:
    with pytest.raises(SystemExit) as exit_error:
        run(source, "s3://bucket/gpt", "--to", "native")
    assert (
        exit_error.value.code == 2 and "copy the result into the store" in capsys.readouterr().err
    )
    assert not Path("s3:").exists()


def test_existing_target_is_not_overwritten(
    source: Path, tmp_path: Path, capsys: CapturedOutput
) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine").write_text("mine")
    assert run(source, tmp_path / "t", "--to", "hf") == 1
    assert "already exists; remove it or choose another target" in capsys.readouterr().err
    assert run(source, source, "--to", "hf") == 1


def test_full_disk_is_detected_before_any_write(
    source: Path, tmp_path: Path, capsys: CapturedOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    tree_before = tree(tmp_path)
    assert run(source, tmp_path / "t", "--to", "hf") == 1
    assert "1,000 free bytes; free disk space" in capsys.readouterr().err
    assert tree(tmp_path) == tree_before


def test_dtype_conversion_keeps_the_source_digest_with_a_note(source: Path, tmp_path: Path) -> None:
    assert run(source, tmp_path / "t", "--to", "megatron", "--tp", 2, "--dtype", "bfloat16") == 0
    origin = open_checkpoint(source)
    half = open_checkpoint(tmp_path / "t")
    assert half.config.dtype == "bfloat16" and origin.identity is not None
    assert half.notes[-1] == "converted from float32 to bfloat16"
    assert identify(half).digest == origin.identity.digest != base_digest(half)
    for name in origin.tensors:
        assert torch.equal(half.read(name), origin.read(name).bfloat16())


def test_nan_is_copied_with_a_warning_or_refused(tmp_path: Path, capsys: CapturedOutput) -> None:
    source_model = lively(CLASSIC)
    tensors = {name: source_model.read(name) for name in source_model.tensors}
    tensors["decoder.layers.1.mlp.linear_fc1.weight"][3, 3] = float("nan")
    write_native((CLASSIC, tensors), tmp_path / "m")
    assert run(tmp_path / "m", tmp_path / "t", "--to", "megatron") == 0
    assert "warning: decoder.layers.1.mlp.linear_fc1.weight" in capsys.readouterr().err
    assert run(tmp_path / "m", tmp_path / "u", "--to", "megatron", "--refuse-nan") == 1
    assert "--refuse-nan" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "t"]


def test_source_damaged_after_its_manifest_is_refused(
    source: Path, tmp_path: Path, capsys: CapturedOutput
) -> None:
    """The damage is in the middle of a tensor, outside the fingerprint's samples."""
    weights = next(source.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert run(source, tmp_path / "t", "--to", "hf") == 1
    assert "files were changed after they were written" in capsys.readouterr().err
    assert not (tmp_path / "t").exists() and not list(tmp_path.glob(".*"))


def test_proof_is_written_and_holds(source: Path, tmp_path: Path) -> None:
    assert run(source, tmp_path / "t", "--to", "megatron", "--tp", 2, "--prove") == 0
    folder = tmp_path / "t" / "release"
    assert (folder / PROOF).is_file()
    assert PROOF in json.loads((folder / MANIFEST).read_text())["files"]
    assert preamble.main(["verify", str(tmp_path / "t"), "--prove"]) == 0


class Killed(BaseException):
    """Simulates a kill: no write happens after it."""


@contextmanager
def killed_after(writes: int) -> Iterator[None]:
    """Raise Killed after a number of writes."""
    original_write = copy_engine.TargetFiles.write
    writes_left = writes

    def write(
        files: copy_engine.TargetFiles, number: int, offset: int, content: memoryview | bytes
    ) -> None:
        nonlocal writes_left
        writes_left -= 1
        if writes_left < 0:
            raise Killed
        original_write(files, number, offset, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_engine.TargetFiles, "write", write)
        yield


@pytest.mark.parametrize("target_format", ["native", "megatron", "megatron-dist", "hf"])
def test_resumed_run_writes_the_same_target(
    target_format: str,
    source: Path,
    tmp_path: Path,
    capsys: CapturedOutput,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_engine, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(copy_engine, "PROGRESS_SECONDS", 0.001)
    assert run(source, tmp_path / "whole", "--to", target_format) == 0
    conversion_plan = plan(
        open_checkpoint(source), tmp_path / "t", ConversionOptions(target_format)
    )
    with killed_after(30), pytest.raises(Killed):
        convert(conversion_plan)
    assert not (tmp_path / "t").exists()
    assert run(source, tmp_path / "t", "--to", target_format) == 1
    assert (
        "add --resume to continue the conversion, or remove the directory"
        in capsys.readouterr().err
    )
    assert run(source, tmp_path / "t", "--to", target_format, "--resume") == 0
    assert tree(tmp_path / "t") == tree(tmp_path / "whole")
    assert not conversion_plan.partial_dir.exists()
    assert run(source, tmp_path / "t", "--to", target_format, "--resume") == 0
    assert "is already complete" in capsys.readouterr().err


def test_run_of_another_source_is_not_resumed(
    source: Path, tmp_path: Path, capsys: CapturedOutput
) -> None:
    conversion_plan = plan(open_checkpoint(source), tmp_path / "t", ConversionOptions())
    with killed_after(3), pytest.raises(Killed):
        convert(conversion_plan)
    write_native(lively(LLAMA, seed=1), tmp_path / "other")
    assert run(tmp_path / "other", tmp_path / "t", "--to", "native", "--resume") == 1
    assert (
        "of another source or with other options; remove that directory" in capsys.readouterr().err
    )
    assert run(source, tmp_path / "t", "--to", "native", "--resume") == 0


def test_overflow_in_the_new_dtype_is_reported_or_refused(
    tmp_path: Path, capsys: CapturedOutput
) -> None:
    source_model = lively(CLASSIC)
    tensors = {name: source_model.read(name) for name in source_model.tensors}
    tensors["decoder.layers.1.mlp.linear_fc1.weight"][3, 3] = 1e5
    write_native((CLASSIC, tensors), tmp_path / "m")
    arguments = (tmp_path / "m", tmp_path / "t", "--to", "megatron", "--dtype", "float16")
    assert run(*arguments, "--refuse-nan") == 1
    assert "linear_fc1.weight holds values that overflow in float16" in capsys.readouterr().err
    assert run(*arguments) == 0
    assert "overflow in float16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("first_options", "second_options"),
    [
        (("--to", "nemo", "--tp", 2), ("--to", "nemo", "--pp", 2)),
        (("--to", "hf"), ("--to", "hf", "--prove")),
        (
            ("--to", "megatron", "--tp", 2),
            ("--to", "megatron", "--tp", 2, "--megatron-spec", "local"),
        ),
    ],
)
def test_target_of_other_options_does_not_count_as_complete(
    first_options: tuple[object, ...],
    second_options: tuple[object, ...],
    source: Path,
    tmp_path: Path,
    capsys: CapturedOutput,
) -> None:
    target = tmp_path / "t.nemo"
    assert run(source, target, *first_options) == 0
    assert run(source, target, *first_options, "--resume") == 0
    assert "is already complete" in capsys.readouterr().err
    assert run(source, target, *second_options, "--resume") == 1
    assert "already exists" in capsys.readouterr().err


def test_second_run_of_a_target_is_refused_without_harm(source: Path, tmp_path: Path) -> None:
    conversion_plan = plan(open_checkpoint(source), tmp_path / "t", ConversionOptions())

    def run_second(_: int) -> None:
        with pytest.raises(CheckpointError, match="another run is writing to"):
            convert(conversion_plan, resume=True)
        with pytest.raises(
            CheckpointError, match="an earlier conversion was interrupted or is still running"
        ):
            write_native(open_checkpoint(source), tmp_path / "t")

    assert convert(conversion_plan, report_progress=run_second).identity.digest
    assert tree(tmp_path / "t") == tree(source)


def test_removed_target_is_written_again(source: Path, tmp_path: Path) -> None:
    """Even if a kill between the last two steps has left its journal."""
    assert run(source, tmp_path / "t", "--to", "hf") == 0
    conversion_plan = plan(open_checkpoint(source), tmp_path / "t", ConversionOptions("hf"))
    tree_before = tree(tmp_path / "t")
    shutil.rmtree(tmp_path / "t")
    with killed_after(20), pytest.raises(Killed):
        convert(conversion_plan, workers=1)
    shutil.rmtree(conversion_plan.partial_dir / "content")
    assert run(source, tmp_path / "t", "--to", "hf", "--resume") == 0
    assert tree(tmp_path / "t") == tree_before


def test_damage_is_detected_after_dtype_conversion(
    source: Path, tmp_path: Path, capsys: CapturedOutput
) -> None:
    assert run(source, tmp_path / "half", "--to", "native", "--dtype", "bfloat16") == 0
    assert run(tmp_path / "half", tmp_path / "hf", "--to", "hf") == 0
    origin = lookup_identity(open_checkpoint(source))
    identity = lookup_identity(open_checkpoint(tmp_path / "hf"))
    assert identity.digest == origin.digest and identity.stored == base_digest(
        open_checkpoint(tmp_path / "hf")
    )
    weights = next((tmp_path / "half").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert preamble.main(["verify", str(tmp_path / "half")]) == 1
    assert run(tmp_path / "half", tmp_path / "t", "--to", "hf") == 1
    assert "files were changed after they were written" in capsys.readouterr().err


def test_source_changed_during_conversion_gives_no_target(
    source: Path, tmp_path: Path, capsys: CapturedOutput
) -> None:
    conversion_plan = plan(open_checkpoint(source), tmp_path / "t", ConversionOptions())
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        convert(
            conversion_plan,
            report_progress=lambda _: os.utime(next(source.glob("*.safetensors")), ns=(1, 1)),
        )
    assert not (tmp_path / "t").exists() and not conversion_plan.partial_dir.exists()


def test_mixed_dtypes_survive_formats_with_one_dtype_per_key(tmp_path: Path) -> None:
    """A router bias in fp32 among fp16 weights, and one norm in fp32."""
    config = LLAMA.with_fields(dtype="bfloat16")
    source_model = lively(config).in_dtype(torch.bfloat16)
    tensors = {name: source_model.read(name) for name in source_model.tensors}
    name = "decoder.layers.2.mlp.linear_fc1.layer_norm_weight"
    tensors[name] = tensors[name].float()
    write_native((config, tensors), tmp_path / "m")
    for number, target_format in enumerate(["megatron", "megatron-dist", "nemo", "hf"]):
        target = tmp_path / f"{number}.nemo"
        assert run(tmp_path / "m", target, "--to", target_format) == 0
        converted = open_checkpoint(target)
        for name, value in tensors.items():
            assert torch.equal(converted.read(name).float(), value.float())


def test_edited_config_beside_a_manifest_is_used(source: Path, tmp_path: Path) -> None:
    assert run(source, tmp_path / "hf", "--to", "hf") == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps(
            {
                **config,
                "rope_theta": 500000.0,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            }
        )
    )
    converted = open_checkpoint(tmp_path / "hf")
    assert converted.identity is None and converted.config.rotary_base == 500000.0
    assert any("config.json has" in note for note in converted.notes)


def test_weights_changed_while_copied_give_no_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands for any bug of a writer: our own reader reads another model from the target."""
    source = lively(CLASSIC)
    conversion_plan = plan(
        source, tmp_path / "t", ConversionOptions("megatron", split=ParallelSplit(2))
    )

    def open_changed(path: Path) -> object:
        opened = open_checkpoint(path)
        tensors = {name: opened.read(name) for name in opened.tensors}
        tensors["decoder.final_layernorm.weight"] += 1
        return checkpoint_from_tensors(opened.config, tensors)

    monkeypatch.setattr(conversion, "open_checkpoint", open_changed)
    with pytest.raises(RuntimeError, match="written weights differ from the source's"):
        convert(conversion_plan)
    assert not (tmp_path / "t").exists()


def test_memory_does_not_depend_on_the_number_of_layers(tmp_path: Path) -> None:
    """By construction a worker holds two blocks; `make bench` measures a large model."""
    deep = GPTConfig(40, 64, 4, 101, 64)
    assert write_native(lively(deep), tmp_path / "m").digest
    assert run(tmp_path / "m", tmp_path / "t", "--to", "megatron", "--memory-mb", 1) == 0


def test_hashed_text_of_a_file_matches_earlier_releases() -> None:
    """Journals hold the plan's hash; a changed text would prevent resuming earlier conversions."""
    weight = "decoder.layers.0.mlp.linear_fc1.weight"
    part = ShardSpec(0, ((0, 4), (8, 12)), 8)
    file = TargetFile(
        "model/a.pt",
        640,
        (LiteralBytes(0, b"header"), LiteralBytes(600, b"end")),
        (Placement(weight, part, 64, torch.bfloat16, True),),
        (CrcPatch(32, 0), CrcPatch(36, 0)),
    )
    assert conversion._hashed_text(file) == (
        "File(path='model/a.pt', size=640, texts=(Text(offset=0), Text(offset=600)), "
        "placements=(Placement(name='decoder.layers.0.mlp.linear_fc1.weight', "
        "part=Part(dim=0, ranges=((0, 4), (8, 12)), size=8), offset=64, dtype=torch.bfloat16, "
        "transposed=True),), "
        "patches=(Patch(offset=32, placement=0), Patch(offset=36, placement=0)))"
    )
    empty_text = "File(path='empty', size=0, texts=(), placements=(), patches=())"
    assert conversion._hashed_text(TargetFile("empty", 0)) == empty_text
