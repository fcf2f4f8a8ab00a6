"""Megatron-FSDP's checkpoints (`fsdp_dtensor`): keys of a wrapped module, gates and ups apart."""

import json
import os
import re
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from checkpoints_tools.inspection.report import build_report
from gpt.checkpoint.digest import base_digest
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from tests.support.checkpoints import mcore_fsdp, mcore_hybrid
from tests.support.checkpoints.megatron_writer import DENSE, GATED, MIXED, Layout, args_of
from tests.support.models import lively
from tests.support.ranks import ranks

# Both compute in fp32, in another order; the largest logits are about 30.
TOLERANCE = 5e-5
PREFIX = "model.module."
ITERATION = "iter_0000007"


def write(config: GPTConfig, root: Path, *, grouped: bool = False, **changes: Any) -> Checkpoint:
    """Write a random model as Megatron-FSDP does, with plain tensors; return the tensors.

    `grouped`: the keys of Transformer Engine's grouped experts. `changes` are changes of the args.
    """
    source = lively(config)
    tensors = {name: source.read(name) for name in source.tensors}
    args = Namespace(**{**args_of(config, tensors, Layout()), **changes})
    record: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    for name, tensor in tensors.items():
        if grouped:
            name = re.sub(
                r"experts\.local_experts\.(\d+)\.(linear_fc\d\.weight)", r"experts.\2\1", name
            )
        key = f"{PREFIX}{name}"
        if config.gated and re.search(r"linear_fc1\.(weight|bias)\d*$", name):
            gate, up = tensor.chunk(2)
            record |= {f"{key}_w": gate.clone(), f"{key}_v": up.clone()}
        else:
            record[key] = tensor
    record["optimizer.state.module.decoder.final_layernorm.weight.exp_avg"] = torch.ones(3)
    record["opt_param_scheduler.max_lr"] = 1e-4
    with warnings.catch_warnings(action="ignore"):  # Torch warns that one process writes alone.
        save(record, storage_writer=FileSystemWriter(root / ITERATION), no_dist=True)
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return source


@pytest.mark.parametrize(
    ("config", "grouped"),
    [(DENSE, False), (GATED, False), (MIXED, False), (MIXED, True)],
    ids=["dense", "gated", "experts", "grouped experts"],
)
def test_weights_and_config_are_those_of_the_args(
    config: GPTConfig, grouped: bool, tmp_path: Path
) -> None:
    source = write(config, tmp_path, grouped=grouped, ckpt_format="fsdp_dtensor")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.format, checkpoint.config) == ("fsdp_dtensor", source.config)
    assert base_digest(checkpoint) == base_digest(source)
    assert checkpoint.notes == ()


def test_separate_gates_identify_the_format_without_its_name(tmp_path: Path) -> None:
    source = write(GATED, tmp_path)
    assert base_digest(open_checkpoint(tmp_path)) == base_digest(source)


def test_metadata_json_of_megatrons_conversion_tool_is_accepted(tmp_path: Path) -> None:
    source = write(DENSE, tmp_path, tensor_model_parallel_size=2)
    record = {"sharded_backend": "fsdp_dtensor", "sharded_backend_version": 1}
    (tmp_path / ITERATION / "metadata.json").write_text(json.dumps(record))
    checkpoint = open_checkpoint(tmp_path)
    assert base_digest(checkpoint) == base_digest(source)
    report = build_report(checkpoint, str(tmp_path))
    assert report.format == "fsdp_dtensor"
    assert report.evidence[-2:] == ["metadata.json", ".metadata"]
    assert report.split["tp"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ckpt_format": "torch_dcp"}, "is a torch_dcp checkpoint.*--ckpt-format torch_dist"),
        ({}, "is a torch_dcp or fsdp_dtensor checkpoint.*--ckpt-format torch_dist"),
        # With pipeline stages, the stages' keys have the same numbers, and one stage remains.
        ({"ckpt_format": "fsdp_dtensor", "num_layers": 8}, "8 layers, but the weights have 4"),
    ],
)
def test_other_formats_and_missing_layers_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(DENSE, tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


class Bomb:
    """An object that would run a command if it were unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.system, ("true",)


def test_args_that_run_code_are_refused(tmp_path: Path) -> None:
    write(GATED, tmp_path, ckpt_format=Bomb())
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        open_checkpoint(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    not mcore_fsdp.EINOPS.is_dir() and not os.environ.get("CI"),
    reason="megatron-core 0.19 or einops, the oracle, is absent; `make tools` installs it",
)
def test_a_save_of_megatron_fsdp_equals_an_ordinary_one(tmp_path: Path) -> None:
    save_and_run, preload = mcore_fsdp.save_and_run, mcore_hybrid.PRELOAD
    runs = ranks(mcore_fsdp.RANKS, save_and_run, tmp_path, preload=preload)[-1]
    assert set(runs) == set(mcore_fsdp.CASES)
    for name, (ids, megatron_logits) in runs.items():
        ordinary = open_checkpoint(tmp_path / name / "ordinary")
        checkpoint = open_checkpoint(tmp_path / name / "fsdp")
        assert (ordinary.format, checkpoint.format) == ("torch_dist", "fsdp_dtensor")
        assert checkpoint.config == ordinary.config, name
        assert checkpoint.hybrid_layers == ordinary.hybrid_layers, name
        assert checkpoint.tensors.keys() == ordinary.tensors.keys(), name
        for tensor_name in ordinary.tensors:
            actual, expected = checkpoint.read(tensor_name), ordinary.read(tensor_name)
            assert torch.equal(actual, expected), (name, tensor_name)
        # The shares of the data-parallel ranks: some tensors have several chunks, of unequal rows.
        assert any(len({piece.rows for piece in t.slices}) > 1 for t in checkpoint.tensors.values())
        logits, ordinary_logits = (
            load_model(opened, Mesh.single()).logits(torch.from_numpy(ids))
            for opened in (checkpoint, ordinary)
        )
        assert torch.equal(logits, ordinary_logits), name
        expected_logits = torch.from_numpy(megatron_logits)[..., : logits.shape[-1]]
        assert logits.std() >= 5, name
        assert (logits - expected_logits).abs().max() <= TOLERANCE, name
        assert torch.equal(logits.argmax(-1), expected_logits.argmax(-1)), name
