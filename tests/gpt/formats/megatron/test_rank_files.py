"""Megatron rank files: files of one checkpoint are collected, inconsistent ones are refused."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt.checkpoint.digest import base_digest
from gpt.errors import CheckpointError
from gpt.formats.megatron.reader import open_megatron
from tests.support.checkpoints.megatron_writer import DENSE, MIXED, Layout, edit, saved


def test_root_iteration_rank_and_file_paths_open_the_same_checkpoint(tmp_path: Path) -> None:
    saved(DENSE, Layout(tp=2, pp=2), tmp_path)
    iteration = tmp_path / "iter_0000100"
    rank = iteration / "mp_rank_00_001"
    for path in (tmp_path, iteration, rank, rank / "model_optim_rng.pt"):
        assert open_megatron(path).path == iteration


def test_suffixes_are_stages_or_expert_ranks_by_the_arguments(tmp_path: Path) -> None:
    saved(MIXED, Layout(pp=2), tmp_path / "stages")
    saved(MIXED, Layout(ep=2), tmp_path / "experts")
    names = [path.name for path in (tmp_path / "stages" / "iter_0000100").iterdir()]
    assert sorted(names) == ["mp_rank_00_000", "mp_rank_00_001"]
    digests = [base_digest(open_megatron(tmp_path / kind)) for kind in ("stages", "experts")]
    assert digests[0] == digests[1]


def test_distributed_optimizer_files_are_ignored(tmp_path: Path) -> None:
    source = saved(DENSE, Layout(tp=2), tmp_path)
    for rank in (tmp_path / "iter_0000100").iterdir():
        (rank / "model_optim_rng.pt").rename(rank / "model_rng.pt")
        optimizer = rank.with_name(f"{rank.name}_003")
        optimizer.mkdir()
        (optimizer / "optim.pt").touch()
        (rank / "distrib_optim.pt").touch()
    assert base_digest(open_megatron(tmp_path)) == base_digest(source)


def test_saves_newer_than_the_tracker_are_mentioned_and_not_used(tmp_path: Path) -> None:
    saved(DENSE, Layout(), tmp_path)
    shutil.copytree(tmp_path / "iter_0000100", tmp_path / "iter_0000200")
    checkpoint = open_megatron(tmp_path)
    assert checkpoint.path.name == "iter_0000100" and "iter_0000200 is newer" in checkpoint.notes[0]


def remove(root: Path, folder: str) -> None:
    (path,) = root.glob(f"*/{folder}")
    shutil.rmtree(path)


def truncate(root: Path) -> None:
    (path,) = root.glob("*/mp_rank_01_001/model_optim_rng.pt")
    path.write_bytes(path.read_bytes()[:5000])


def swap_stages(root: Path) -> None:
    (iteration,) = root.glob("iter_*")
    for name, target in (("000", "x"), ("001", "000"), ("x", "001")):
        (iteration / f"mp_rank_00_{name}").rename(iteration / f"mp_rank_00_{target}")


LAST = "mp_rank_00_001"
EMBEDDING = "embedding.word_embeddings.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing rank": (lambda root: remove(root, LAST), "lacks mp_rank_00_001 of the 4 ranks"),
    "a surplus rank": (
        lambda root: shutil.copytree(
            root / "iter_0000100" / LAST, root / "iter_0000100" / "mp_rank_02_001"
        ),
        "has mp_rank_02_001 beyond the 4 ranks",
    ),
    "a truncated file": (truncate, "mp_rank_01_001.* has 5000 bytes and is truncated"),
    "an empty file": (
        lambda root: (root / "iter_0000100" / LAST / "model_optim_rng.pt").write_bytes(b""),
        "has 0 bytes",
    ),
    "two iterations": (
        lambda root: edit(root, LAST, lambda record: record.update(iteration=99)),
        "iteration 100, .* has 99",
    ),
    "two architectures": (
        lambda root: edit(root, LAST, lambda record: setattr(record["args"], "rotary_base", 7)),
        "args.rotary_base",
    ),
    "two versions": (
        lambda root: edit(root, LAST, lambda record: record.update(checkpoint_version=1.0)),
        "checkpoint_version",
    ),
    "no model": (lambda root: edit(root, LAST, lambda record: record.pop("model")), "has no model"),
    "a lost tensor on one rank": (
        lambda root: edit(root, LAST, lambda record: record["model"].pop(FC2)),
        f"only one of them has {FC2}",
    ),
    "an unknown tensor": (
        lambda root: edit(
            root, "mp_rank_*_001", lambda record: record["model"].update(x=torch.ones(1))
        ),
        "no parameter for 1 of the weights: .*x",
    ),
    "a narrow tensor": (
        lambda root: edit(
            root, LAST, lambda record: record["model"].update({FC2: torch.ones(4, 4)})
        ),
        "found \\(4, 4\\), need \\(32, 64\\)",
    ),
    "a whole number tensor": (
        lambda root: edit(
            root, LAST, lambda record: record["model"].update({FC2: torch.ones(32, 64).long()})
        ),
        "is torch.int64",
    ),
    "no tensor": (
        lambda root: edit(root, LAST, lambda record: record["model"].update({FC2: "weights"})),
        "is a str, not a dense tensor",
    ),
    "a layer lost": (
        lambda root: edit(root, "mp_rank_*_001", lambda record: drop_layer(record["model"], 1)),
        "has 4 layers, but the weights have 3",
    ),
    "the first layer lost": (
        lambda root: edit(root, "mp_rank_*_001", lambda record: drop_layer(record["model"], 0)),
        "has layers 1, but each rank's file must have all layers",
    ),
    "stages swapped on one tensor rank": (swap_stages, "of the same stage, but only one"),
    "a tied copy of another model": (
        lambda root: edit(
            root, LAST, lambda record: record["model"]["output_layer.weight"].zero_()
        ),
        "the config ties the head to the embedding",
    ),
    "an embedding of another model on the last stage": (
        lambda root: edit(
            root,
            "mp_rank_*_001",
            lambda record: record["model"].update({EMBEDDING: torch.ones(56, 32)}),
        ),
        "is not equal to .*, although both store embedding.word_embeddings.weight",
    ),
    "a quantized model": (
        lambda root: edit(root, LAST, lambda record: record.update(modelopt_state={})),
        "quantized or pruned",
    ),
    "an iteration that is none": (
        lambda root: edit(root, LAST, lambda record: record.update(iteration=torch.ones(2))),
        "has an iteration that is not an integer",
    ),
    "an impossible split": (
        lambda root: edit(
            root,
            "mp_rank_00_000",
            lambda record: setattr(record["args"], "tensor_model_parallel_size", 1 << 30),
        ),
        "impossible parallel sizes",
    ),
    "arguments that are none": (
        lambda root: edit(root, "mp_rank_00_000", lambda record: record.update(args=[1])),
        "args that are not a dict, or an invalid checkpoint_version",
    ),
    "a tracker that names nothing": (
        lambda root: (root / "latest_checkpointed_iteration.txt").write_text("200"),
        "names iter_0000200, which does not exist; found: iter_0000100",
    ),
    "a tracker that leaves the root": (
        lambda root: (root / "latest_checkpointed_iteration.txt").write_text("../x"),
        "neither a number nor 'release'",
    ),
    "another padding": (
        lambda root: edit(
            root, "mp_rank_*", lambda record: setattr(record["args"], "padded_vocab_size", 128)
        ),
        "padded_vocab_size is 128, but the embedding has 112 rows",
    ),
}


def drop_layer(model: dict[str, Any], layer: int) -> None:
    for key in [key for key in model if f".layers.{layer}." in key]:
        del model[key]


@pytest.mark.parametrize("fault", FAULTS)
def test_structural_fault_is_a_checkpoint_error(fault: str, tmp_path: Path) -> None:
    breach, sentence = FAULTS[fault]
    saved(DENSE, Layout(tp=2, pp=2), tmp_path)
    breach(tmp_path)
    with pytest.raises(CheckpointError, match=sentence) as refusal:
        open_megatron(tmp_path)
    assert "\n" not in str(refusal.value)


def test_hostile_pickles_in_any_rank_are_refused_by_name(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return pytest.fail, ("ran",)

    saved(DENSE, Layout(tp=2), tmp_path)
    (path,) = tmp_path.glob("*/mp_rank_01/*")
    torch.save({"args": argparse.Namespace(x=Hostile()), "model": {}}, path)
    with pytest.raises(CheckpointError, match=r"mp_rank_01.* asks to run"):
        open_megatron(tmp_path)


def test_experts_on_their_own_tensor_ranks_are_refused(tmp_path: Path) -> None:
    saved(MIXED, Layout(tp=2, changes={"expert_tensor_parallel_size": 1}), tmp_path)
    with pytest.raises(CheckpointError, match="expert_tensor_parallel_size is 1"):
        open_megatron(tmp_path)


def test_error_for_another_directory_names_the_expected_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no rank directories"):
        open_megatron(tmp_path)
