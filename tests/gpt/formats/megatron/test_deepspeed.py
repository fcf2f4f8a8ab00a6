"""Pipeline saves of Megatron-DeepSpeed give the original model, bitwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints_tools.conversion.convert import convert, plan
from checkpoints_tools.inspection.report import build_report
from checkpoints_tools.writers.registry import ConversionOptions
from gpt.checkpoint.digest import base_digest
from gpt.errors import CheckpointError
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from tests.support.checkpoints.deepspeed_writer import ABSOLUTE, BLOOM, ROTARY, saved

CONFIGS = {"alibi": BLOOM, "absolute": ABSOLUTE, "rotary": ROTARY}
NORM = "input_layernorm.weight"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = torch.load(path, weights_only=True)
    change(record)
    path.unlink()
    torch.save(record, path)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("positions", CONFIGS)
def test_layers_are_joined_to_the_original_model(positions: str, tp: int, tmp_path: Path) -> None:
    source = saved(CONFIGS[positions], tmp_path, tp)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == source.config
    assert checkpoint.format == "megatron_deepspeed"
    assert checkpoint.split["tp"] == tp
    for name in source.tensors:
        assert torch.equal(checkpoint.read(name), source.read(name)), name
    assert base_digest(checkpoint) == base_digest(source)
    assert len(checkpoint.notes) == 1 and "true vocabulary size" in checkpoint.notes[0]


@pytest.mark.slow
def test_bloom_is_inspected_and_converted(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = saved(BLOOM, tmp_path / "source", 2)
    checkpoint = open_checkpoint(tmp_path / "source")
    report = build_report(checkpoint, str(tmp_path / "source"))
    assert report.format == "megatron_deepspeed"
    convert(plan(checkpoint, tmp_path / "hf", ConversionOptions("hf")))
    assert base_digest(open_checkpoint(tmp_path / "hf")) == base_digest(source)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    model.train(False)
    ids = torch.tensor([[5, 6, 7, 40, 3, 90, 11]])
    with torch.no_grad():
        expected = model(ids).logits[0]
    model_of_save = load_model(checkpoint, Mesh.single(), dtype=torch.float32)
    logits = model_of_save.logits(ids)[0]
    assert (logits - expected).abs().max() < 1e-4


def test_the_directory_of_a_step_opens_too(tmp_path: Path) -> None:
    source = saved(BLOOM, tmp_path, 2)
    assert base_digest(open_checkpoint(tmp_path / "global_step100")) == base_digest(source)


def test_norms_that_differ_between_ranks_are_averaged(tmp_path: Path) -> None:
    source = saved(BLOOM, tmp_path, 2)
    path = tmp_path / "global_step100" / "layer_04-model_01-model_states.pt"
    edit(path, lambda record: record.update({NORM: record[NORM] + 0.5}))
    checkpoint = open_checkpoint(tmp_path)
    name = "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    assert torch.allclose(checkpoint.read(name), source.read(name) + 0.25, atol=1e-6)
    assert any("their average is read" in note for note in checkpoint.notes)


BROKEN: dict[str, tuple[str, str]] = {
    "a rank's file": ("layer_04-model_01-model_states.pt", "lacks layer_04-model_01"),
    "a layer": ("layer_04-*", "lacks files of layers between layer_03 and layer_05"),
    "the last layer": ("layer_05-*", "the config has 3 layers, but the weights have 2"),
    "the args": ("mp_rank_00_*", "its args describe the model"),
    "a rank": ("*model_01-*", "files of 1 tensor ranks"),
}


@pytest.mark.parametrize("missing", BROKEN)
def test_missing_files_are_named(missing: str, tmp_path: Path) -> None:
    saved(BLOOM, tmp_path, 2)
    pattern, message = BROKEN[missing]
    for path in (tmp_path / "global_step100").glob(pattern):
        path.unlink()
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("arg", "value"),
    [
        ("position_embedding_type", "relative"),
        ("apply_residual_connection_post_layernorm", True),
        ("glu_activation", "geglu"),
    ],
)
def test_unsupported_args_are_named(arg: str, value: object, tmp_path: Path) -> None:
    saved(BLOOM, tmp_path, 1, {arg: value})
    with pytest.raises(CheckpointError, match=f"args.{arg} is .* does not support"):
        open_checkpoint(tmp_path)


def test_a_tracker_must_name_an_existing_directory(tmp_path: Path) -> None:
    saved(BLOOM, tmp_path, 1)
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="which is no directory global_step<N>"):
        open_checkpoint(tmp_path)
