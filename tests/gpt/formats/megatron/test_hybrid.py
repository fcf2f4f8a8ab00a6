"""HybridModel checkpoints: strict alternation gives the GPT, and other layers are refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gpt.checkpoint.digest import base_digest
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.megatron.reader import open_megatron
from gpt.formats.megatron.torch_dist import open_torch_dist
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from tests.support.checkpoints import distcp_writer, mcore_hybrid, megatron_writer, nemo_writer
from tests.support.checkpoints.distcp_writer import Form
from tests.support.checkpoints.megatron_writer import (
    DENSE,
    GATED,
    GROUPED,
    MIXED,
    Layout,
    edit,
    hybrid_pattern,
)
from tests.support.models import lively
from tests.support.ranks import ranks

# Two correct fp32 implementations differ by rounding, by at most 2e-5 in these models; a wrong
# layout differs by whole logits.
TOLERANCE = 5e-5

FORMS = {
    "learned positions, biases, tied": (DENSE, Form(tp=2, hybrid=True)),
    "gated, grouped queries, untied": (GATED, Form(tp=4, hybrid=True)),
    "args inside": (GATED, Form(tp=2, folded=True, hybrid=True)),
    "experts in some layers, one chunk": (MIXED, Form(lump=True, hybrid=True)),
    "experts, norms named as dense ones": (GROUPED, Form(local=True, hybrid=True)),
    "experts under keys of their own": (GROUPED, Form(singleton=True, hybrid=True)),
}
LAYOUTS = {
    "every kind of rank": (DENSE, Layout(2, 2, 2, hybrid=True)),
    "local names": (GATED, Layout(2, names="local", hybrid=True)),
    "experts on expert ranks": (MIXED, Layout(2, 2, 1, 2, hybrid=True)),
    "grouped experts": (GROUPED, Layout(1, 2, 2, 2, experts="te grouped", hybrid=True)),
    # The second stage begins with an MLP, and has no attention.
    "cuts between attention and MLP": (GATED, Layout(pp=3, hybrid=True, stages=[[3, 1, 4]])),
    "a stage without layers": (DENSE, Layout(pp=3, hybrid=True, stages=[[5, 0, 3]])),
    "virtual stages cut anywhere": (MIXED, Layout(1, 2, 2, hybrid=True, stages=[[1, 2], [4, 1]])),
}


@pytest.mark.parametrize("case", FORMS)
def test_distributed_checkpoints_give_the_gpt(case: str, tmp_path: Path) -> None:
    config, form = FORMS[case]
    source = distcp_writer.saved(config, form, tmp_path)
    checkpoint = open_torch_dist(tmp_path)
    assert checkpoint.config == source.config
    for name in source.tensors:
        assert torch.equal(checkpoint.read(name), source.read(name)), name
    assert checkpoint.hybrid_layers == hybrid_pattern(config)
    assert checkpoint.notes == ()
    assert base_digest(checkpoint) == base_digest(source)


@pytest.mark.parametrize("case", LAYOUTS)
def test_rank_files_give_the_gpt(case: str, tmp_path: Path) -> None:
    config, layout = LAYOUTS[case]
    source = megatron_writer.saved(config, layout, tmp_path)
    checkpoint = open_megatron(tmp_path)
    assert checkpoint.config == source.config
    for name in source.tensors:
        assert torch.equal(checkpoint.read(name), source.read(name)), name
    assert checkpoint.hybrid_layers == hybrid_pattern(config)
    head_copies = {"output_layer.weight"}  # Replicas on expert ranks, also if the head is tied.
    assert {pair.name for pair in checkpoint.copies} <= set(source.tensors) | head_copies
    assert base_digest(checkpoint) == base_digest(source)


def test_without_args_the_layers_are_those_of_the_tensors(tmp_path: Path) -> None:
    source = megatron_writer.saved(DENSE, Layout(pp=2, args=False, hybrid=True), tmp_path)
    fields = {
        name: getattr(DENSE, name) for name in ("num_attention_heads", "vocab_size", "activation")
    }
    assert base_digest(open_megatron(tmp_path, fields)) == base_digest(source)
    assert open_megatron(tmp_path, fields).config.num_layers == DENSE.num_layers
    full_source = distcp_writer.saved(GROUPED, Form(args=False, hybrid=True), tmp_path / "dist")
    checkpoint = open_torch_dist(tmp_path / "dist", full_source.config)
    assert base_digest(checkpoint) == base_digest(full_source)


PATTERN = hybrid_pattern(DENSE)


def test_args_of_a_hybrid_model_do_not_fit_the_weights_of_a_gpt(tmp_path: Path) -> None:
    changes = {"hybrid_layer_pattern": PATTERN, "num_layers": 8}
    megatron_writer.saved(DENSE, Layout(changes=changes), tmp_path)
    with pytest.raises(CheckpointError, match="the weights have 4 layers with both attention and"):
        open_megatron(tmp_path)


def _rename(change: Callable[[str], str | None]) -> Callable[[dict[str, Any]], None]:
    """Change the names of a rank file's tensors; None drops a tensor."""

    def edit_record(record: dict[str, Any]) -> None:
        renamed = {change(name): value for name, value in record["model"].items()}
        renamed.pop(None, None)
        record["model"] = renamed

    return edit_record


def _swapped(name: str) -> str:
    """Layers 1 and 2 in the other order: `**--`."""
    numbers = {"1": "2", "2": "1"}
    return ".".join(numbers.get(part, part) for part in name.split("."))


BROKEN_TENSORS: dict[str, tuple[Callable[[str], str | None], str]] = {
    "other order": (
        _swapped,
        r"the pattern of its layers is '[*][*]--[*]-[*]-': layer 1 is [*] instead of - or E",
    ),
    "a missing layer": (
        lambda name: None if ".layers.7." in name else name,
        "layer 6 has no MLP after it",
    ),
    "a missing layer in the middle": (
        lambda name: None if ".layers.3." in name else name,
        "must have all layers from 0 on, without gaps",
    ),
    "Mamba": (
        lambda name: name.replace("layers.0.self_attention.linear_qkv", "layers.0.mixer.in_proj"),
        "mixer.in_proj.*Mamba layers",
    ),
    "gated delta net": (
        lambda name: name.replace("self_attention.linear_qkv", "self_attention.in_proj"),
        "Gated Delta Net",
    ),
    "a layer of both kinds": (
        lambda name: name.replace("layers.1.mlp.linear_fc2", "layers.0.mlp.linear_fc2"),
        "hybrid_layer_pattern is .*, but the weights have 8 layers with both",
    ),
}


@pytest.mark.parametrize("case", BROKEN_TENSORS)
def test_other_layers_in_the_weights_are_refused(case: str, tmp_path: Path) -> None:
    change, words = BROKEN_TENSORS[case]
    megatron_writer.saved(DENSE, Layout(hybrid=True), tmp_path)
    edit(tmp_path, "mp_rank_00", _rename(change))
    with pytest.raises(CheckpointError, match=words):
        open_megatron(tmp_path)


def test_ranks_with_different_patterns_are_refused(tmp_path: Path) -> None:
    megatron_writer.saved(DENSE, Layout(tp=2, hybrid=True), tmp_path)

    def change(record: dict[str, Any]) -> None:
        record["args"].hybrid_layer_pattern = "*-*-*-*E"

    edit(tmp_path, "mp_rank_01", change)
    with pytest.raises(
        CheckpointError, match=r"args\.hybrid_layer_pattern .*checkpoints are mixed"
    ):
        open_megatron(tmp_path)


def test_keys_of_prediction_heads_are_skipped_with_one_note(tmp_path: Path) -> None:
    changes = {"hybrid_layer_pattern": f"{PATTERN}/*-"}
    source = megatron_writer.saved(DENSE, Layout(pp=2, hybrid=True, changes=changes), tmp_path)

    def add(record: dict[str, Any]) -> None:
        # The last stage of such a model also has the embedding.
        embedding = source.read("embedding.word_embeddings.weight")
        rows = record["model"]["output_layer.weight"].shape[0]
        padded = torch.cat([embedding, torch.full((rows - len(embedding), 32), 7.0)])
        record["model"]["embedding.word_embeddings.weight"] = padded
        record["model"]["mtp.layers.0.mtp_model_layer.layers.0.mlp.x"] = torch.zeros(4)

    edit(tmp_path, "mp_rank_00_001", add)
    checkpoint = open_megatron(tmp_path)
    (note,) = checkpoint.notes
    assert "multi-token prediction are ignored" in note
    assert base_digest(checkpoint) == base_digest(source)


def _hybrid_record(config: GPTConfig, **fields: object) -> dict[str, Any]:
    record = {
        **nemo_writer.transformer_of(config),
        "_target_": "megatron.bridge.models.hybrid.hybrid_provider.HybridModelProvider",
        "num_layers": 2 * config.num_layers,
        "hybrid_layer_pattern": hybrid_pattern(config),
        "hybrid_attention_ratio": 0.0,
        "hybrid_mlp_ratio": 0.0,
        "hybrid_override_pattern": None,
        "hybrid_stack_spec": {
            "_target_": "megatron.bridge.models.hybrid.hybrid_provider."
            "get_default_hybrid_stack_spec",
            "_call_": False,
        },
        **fields,
    }
    return {name: value for name, value in record.items() if value != "absent"}


def _nest(record: dict[str, Any]) -> dict[str, Any]:
    """The newer form of the Bridge: nested fields, and the activation by name."""
    own = ("_target_", "vocab_size", "position_embedding_type", "hybrid_layer_pattern")
    inner = {name: value for name, value in record.items() if name not in own}
    activation = inner.pop("activation_func")["_target_"].rpartition(".")[2]
    return {
        **{name: record[name] for name in own},
        "extra_checkpoint_metadata": {"megatron_bridge.activation_func": activation},
        "transformer": inner,
    }


BRIDGE = {
    "HybridModelProvider": _hybrid_record(GATED),
    "no number of layers": _hybrid_record(GATED, num_layers=None),
    "MambaModelProvider": _hybrid_record(
        GATED,
        _target_="megatron.bridge.models.mamba.mamba_provider.MambaModelProvider",
        hybrid_layer_pattern="absent",
        hybrid_override_pattern=hybrid_pattern(GATED),
        hybrid_stack_spec="absent",
    ),
    "HybridModelConfig": _nest(
        _hybrid_record(GATED, _target_="megatron.training.models.hybrid.HybridModelConfig")
    ),
}


@pytest.fixture(scope="module")
def bridge_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of Megatron-Bridge; each test writes its own config."""
    root = tmp_path_factory.mktemp("bridge")
    nemo_writer.bridge(GATED, root, Form(tp=2, hybrid=True), 100)
    return root


def _open_bridge(root: Path, model_fields: dict[str, Any]) -> Checkpoint:
    run_config = root / "iter_0000100" / "run_config.yaml"
    run_config.write_text(yaml.safe_dump({"model": model_fields}))
    return open_checkpoint(root)


@pytest.mark.parametrize("case", BRIDGE)
def test_directories_of_megatron_bridge_give_the_gpt(case: str, bridge_root: Path) -> None:
    checkpoint = _open_bridge(bridge_root, BRIDGE[case])
    assert checkpoint.config == GATED
    assert checkpoint.hybrid_layers == hybrid_pattern(GATED)
    assert base_digest(checkpoint) == base_digest(lively(GATED))


@pytest.mark.parametrize("graph", [False, True], ids=["model.yaml", "io.json"])
def test_nemo_2_directories_give_the_gpt(graph: bool, tmp_path: Path) -> None:
    source = nemo_writer.nemo_2(MIXED, tmp_path, Form(hybrid=True))
    record = _hybrid_record(
        MIXED,
        _target_="nemo.collections.llm.gpt.model.ssm.SSMConfig",
        hybrid_layer_pattern="absent",
        hybrid_override_pattern=hybrid_pattern(MIXED),
        hybrid_stack_spec="absent",
    )
    context = tmp_path / "context"
    (context / "model.yaml").unlink()
    if graph:
        (context / "io.json").write_text(nemo_writer.graph_of(record))
    else:
        (context / "model.yaml").write_text(yaml.safe_dump({"_target_": "x.M", "config": record}))
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.format, checkpoint.config) == ("nemo", source.config)
    assert base_digest(checkpoint) == base_digest(source)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"_target_": "nemo.ssm.SSMConfig", "hybrid_layer_pattern": None},
            "_target_ is nemo.ssm.SSMConfig",
        ),
        ({"_target_": "nemo.gemma.GemmaConfig2B"}, "_target_ is nemo.gemma.GemmaConfig2B"),
        ({"hybrid_layer_pattern": "*-M-*-*-"}, "hybrid_layer_pattern is .*; M is Mamba"),
        ({"hybrid_stack_spec": {"_target_": "custom.stack"}}, "hybrid_stack_spec is 'stack'"),
        ({"hybrid_layer_pattern": "${other.pattern}"}, "hybrid_layer_pattern is"),
    ],
)
def test_other_configs_of_megatron_bridge_are_refused(
    fields: dict[str, object], words: str, bridge_root: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        _open_bridge(bridge_root, _hybrid_record(GATED, **fields))


@pytest.mark.slow
@pytest.mark.skipif(
    not mcore_hybrid.FOLDER.is_dir() and not os.environ.get("CI"),
    reason="megatron-core 0.19, the oracle, is absent; `make tools` installs it",
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_equal_those_of_megatron_core(size: int, tmp_path: Path) -> None:
    names = [name for name, hybrid in mcore_hybrid.SAVED.items() if hybrid.case.ranks == size]
    runs = ranks(size, mcore_hybrid.save_and_run, names, tmp_path, preload=mcore_hybrid.PRELOAD)[-1]
    assert set(runs) == set(names)
    for name, (ids, megatron_logits) in runs.items():
        checkpoint = open_checkpoint(tmp_path / name)
        assert checkpoint.hybrid_layers, name
        logits = load_model(checkpoint, Mesh.single()).logits(torch.from_numpy(ids))
        expected = torch.from_numpy(megatron_logits)[..., : logits.shape[-1]]
        assert logits.std() >= 5, name
        assert (logits - expected).abs().max() <= TOLERANCE, name
        assert torch.equal(logits.argmax(-1), expected.argmax(-1)), name
