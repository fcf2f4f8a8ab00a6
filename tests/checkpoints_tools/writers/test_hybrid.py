"""HybridModel checkpoints that we write: our reader and Megatron-Core find the same model."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import preamble
from checkpoints_tools.layout.layout import Layout, ParallelSplit, unplaced_tensors
from checkpoints_tools.writers import megatron, torch_dist
from checkpoints_tools.writers.megatron_args import ModelClass, load_notes
from gpt.checkpoint.digest import base_digest
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig, RopeScaling
from gpt.errors import ConfigError
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from tests.support.checkpoints import mcore_hybrid
from tests.support.checkpoints.distcp_reader import load_with_torch
from tests.support.checkpoints.mcore_hybrid import Loading
from tests.support.checkpoints.mcore_models import Case
from tests.support.checkpoints.megatron_writer import DENSE, GATED, GROUPED, MIXED
from tests.support.checkpoints.plain_writer import write_plainly
from tests.support.inspect_commands import json_command
from tests.support.models import lively
from tests.support.ranks import ranks

TOLERANCE = 5e-5  # As in the tests of the reader.

UNBIASED = {"qkv_bias": False, "proj_bias": False, "mlp_bias": False}
SPARSE = MIXED.with_fields(**UNBIASED, moe_layers=(True,) * 4, moe_shared_expert_gate=False)
SOME_EXPERTS = GROUPED.with_fields(qkv_bias=False)
CASES: dict[str, tuple[GPTConfig, ParallelSplit]] = {
    "biases, tied": (DENSE, ParallelSplit()),
    "biases, tied, every kind of rank": (DENSE, ParallelSplit(2, 2, 2)),
    "gated, untied, uneven stages": (GATED, ParallelSplit(2, 3)),
    "experts on expert ranks": (SPARSE, ParallelSplit(2, 2, 1, 2)),
    "experts in some layers, virtual stages": (SOME_EXPERTS, ParallelSplit(1, 2, 2, 2)),
}
PATTERNS = {
    "biases, tied": "*-*-*-*-",
    "biases, tied, every kind of rank": "*-|*-|*-|*-",
    "gated, untied, uneven stages": "*-|*-*-|*-",
    # Without segments, Megatron divides the layers equally over any number of stages.
    "experts on expert ranks": "*E*E*E*E",
    "experts in some layers, virtual stages": "*E|*-|*E|*-",
}


def write(
    source: Checkpoint, split: ParallelSplit, root: Path, *, distributed: bool, model: ModelClass
) -> Layout:
    plan_layout = torch_dist.plan_layout if distributed else megatron.plan_layout
    layout = plan_layout(source, split, vocabulary_multiple=8, model=model)
    assert unplaced_tensors(source, layout) == []
    write_plainly(source, layout, root)
    return layout


def saved_args(root: Path) -> dict[str, Any]:
    path = next((root / "release").glob("**/model_optim_rng.pt"), root / "release" / "common.pt")
    with torch.serialization.safe_globals([Namespace]):
        args: Namespace = torch.load(path, weights_only=True)["args"]
    return vars(args)


@pytest.mark.parametrize("distributed", [False, True], ids=["torch", "torch_dist"])
@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bit_exact(case: str, distributed: bool, tmp_path: Path) -> None:
    config, split = CASES[case]
    source = lively(config)
    write(source, split, tmp_path, distributed=distributed, model="hybrid")
    reopened = open_checkpoint(tmp_path)
    assert reopened.config == source.config
    assert reopened.hybrid_layers == PATTERNS[case].replace("|", "")
    assert reopened.notes == ()
    assert base_digest(reopened) == base_digest(source)
    args = saved_args(tmp_path)
    assert args["hybrid_layer_pattern"] == PATTERNS[case]
    assert args["num_layers"] == 8
    # Megatron refuses these args beside a pattern with segments.
    for name in (
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
    ):
        assert args[name] is None, name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_layer_has_keys_of_its_own(tmp_path: Path) -> None:
    layout = write(
        lively(SOME_EXPERTS), ParallelSplit(), tmp_path, distributed=True, model="hybrid"
    )
    _, loaded = load_with_torch(tmp_path / layout.folder)
    leaves: dict[str, set[str]] = {}
    for key, value in loaded.items():
        if isinstance(value, torch.Tensor) and key.startswith("decoder.layers."):
            _, _, layer, leaf = key.split(".", 3)
            leaves.setdefault(layer, set()).add(leaf)
    norm = {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.layer_norm_bias",
    }
    attention = {"self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"}
    mlp = {"weight", "layer_norm_weight", "layer_norm_bias"}
    dense = {f"mlp.linear_fc1.{leaf}" for leaf in mlp} | {"mlp.linear_fc2.weight"}
    experts = {f"mlp.experts.experts.linear_fc{number}.weight" for number in (1, 2)} | {
        "mlp.router.weight",
        "mlp.router.expert_bias",
        "pre_mlp_layernorm.weight",
        "pre_mlp_layernorm.bias",
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.linear_fc2.weight",
        "mlp.shared_experts.gate_weight",
    }
    assert [leaves[str(layer)] for layer in range(8)] == [
        *(norm | attention, experts, norm | attention, dense),
        *(norm | attention, experts, norm | attention, dense),
    ]
    assert loaded["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].shape[0] == 4
    assert "decoder.final_norm.weight" in loaded
    assert {
        "output_layer._extra_state/shard_0_1",
        "decoder.final_norm._extra_state/shard_0_1",
        "decoder.layers.0.self_attention.core_attention._extra_state/shard_0_1",
        "decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state/shard_3_4",
    } < set(loaded)


def test_commands_convert_inspect_and_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = lively(SPARSE)
    gpt, hybrid = tmp_path / "gpt", tmp_path / "hybrid"
    write(source, ParallelSplit(2, 2), gpt, distributed=False, model="gpt")

    def convert(first: Path, second: Path, *flags: str) -> int:
        return preamble.main(["convert", str(first), str(second), *flags])

    assert convert(gpt, hybrid, "--to", "megatron-dist", "--model", "hybrid", "--pp", "2") == 0
    assert "--hybrid-layer-pattern '*E*E*E*E'" in capsys.readouterr().err
    code, report = json_command("inspect", capsys)(hybrid)
    assert (code, report["model_class"], report["faults"]) == (0, "HybridModel", [])
    assert report["hybrid_layer_pattern"] == "*E*E*E*E"
    assert preamble.main(["inspect", str(hybrid)]) == 0
    assert "format       torch_dist, HybridModel of layers *E*E*E*E, by" in capsys.readouterr().out
    assert preamble.main(["verify", str(hybrid), str(gpt)]) == 0
    capsys.readouterr()
    for target, flags in (("other", ["--to", "native"]), ("other.nemo", ["--to", "nemo"])):
        assert convert(gpt, tmp_path / target, *flags, "--model", "hybrid") == 1
        assert "has no model classes (--model); remove the flag" in capsys.readouterr().err


ROTARY = GATED.with_fields(position_embedding_type="rope")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ROTARY.with_fields(rotary_interleaved=True), "no rotary_interleaved"),
        (ROTARY.with_fields(rope_scaling=RopeScaling("llama3", 8.0)), "no llama3 rope_scaling"),
    ],
)
def test_settings_that_the_class_ignores_are_refused(config: GPTConfig, words: str) -> None:
    for writer in (megatron, torch_dist):
        with pytest.raises(ConfigError, match=f"HybridModel has {words}.*choose --model gpt"):
            writer.plan_layout(lively(config), ParallelSplit(), model="hybrid")
        assert writer.plan_layout(lively(config), ParallelSplit()).files


def test_a_local_layer_spec_is_refused() -> None:
    for writer in (megatron, torch_dist):
        with pytest.raises(ConfigError, match="has no local layer spec"):
            writer.plan_layout(lively(DENSE), ParallelSplit(), spec="local", model="hybrid")


def test_notes_have_the_pattern_and_no_flags_for_stages() -> None:
    split = ParallelSplit(pp=3)
    assert any("--decoder-" in note for note in load_notes(GATED, split))
    notes = load_notes(GATED, split, model="hybrid")
    assert any("--hybrid-layer-pattern '*-|*-*-|*-'" in note for note in notes)
    assert not any("--decoder-" in note or "layout" in note for note in notes)


needs_megatron = pytest.mark.skipif(
    not mcore_hybrid.FOLDER.is_dir() and not os.environ.get("CI"),
    reason="megatron-core 0.19, the oracle, is absent; `make tools` installs it",
)


def check_logits(config: GPTConfig, run: mcore_hybrid.Run) -> None:
    ids, megatron_logits = map(torch.from_numpy, run)
    logits = load_model(lively(config), Mesh.single()).logits(ids)
    megatron_logits = megatron_logits[..., : logits.shape[-1]]
    assert logits.std() >= 5
    assert (logits - megatron_logits).abs().max() <= TOLERANCE
    assert torch.equal(logits.argmax(-1), megatron_logits.argmax(-1))


@pytest.mark.slow
@needs_megatron
def test_megatron_core_loads_distributed_checkpoints_with_the_same_logits(tmp_path: Path) -> None:
    """A HybridModel as itself, and a GPT through Megatron-Core's bridge into a HybridModel."""
    models = {"dense": DENSE, "gated": GATED, "experts": SPARSE, "some": SOME_EXPERTS}
    loadings: list[tuple[str, Loading]] = []
    for name, config in models.items():
        root = tmp_path / name
        write(lively(config), ParallelSplit(2, 2), root, distributed=True, model="hybrid")
        loadings += [(name, Loading(root / "release", split)) for split in [(1, 2, 1), (2, 1, 1)]]
        if name != "some":  # The bridge refuses experts in some layers.
            root = tmp_path / f"{name} gpt"
            write(lively(config), ParallelSplit(), root, distributed=True, model="gpt")
            pattern = "*E*E|*E*E" if name == "experts" else "*-*-|*-*-"
            loadings.append((name, Loading(root / "release", (1, 2, 1), pattern)))
    arguments = [loading for _, loading in loadings]
    results = ranks(2, mcore_hybrid.load_and_run, arguments, preload=mcore_hybrid.PRELOAD)[-1]
    for (name, loading), (run, absent_keys) in zip(loadings, results, strict=True):
        assert absent_keys == set(), loading
        check_logits(models[name], run)


@pytest.mark.slow
@needs_megatron
def test_megatron_core_loads_rank_files_with_the_same_logits(tmp_path: Path) -> None:
    models = {"dense": DENSE, "gated": GATED, "some": SOME_EXPERTS}
    split = ParallelSplit(2, 2, 2)
    for name, config in models.items():
        write(lively(config), split, tmp_path / name, distributed=False, model="hybrid")
    roots = [tmp_path / name for name in models]
    load = mcore_hybrid.load_rank_files_and_run
    runs = ranks(4, load, Case(2, 2, 2), roots, preload=mcore_hybrid.PRELOAD)[-1]
    for config, run in zip(models.values(), runs, strict=True):
        assert run is not None
        check_logits(config, run)
