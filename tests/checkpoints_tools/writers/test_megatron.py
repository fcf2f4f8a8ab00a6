"""Megatron-LM rank files: our reader finds the same model, and Megatron-Core loads them."""

import os
import zipfile
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints_tools.layout.layout import ParallelSplit, unplaced_tensors
from checkpoints_tools.writers.megatron import plan_layout
from checkpoints_tools.writers.megatron_args import LayerSpec
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig, RopeScaling
from gpt.errors import ConfigError
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from tests.support.checkpoints.mcore_models import Case, load_and_run
from tests.support.checkpoints.plain_writer import write_plainly
from tests.support.models import CLASSIC, EXPERTS, MODERN, SIGMOID_EXPERTS, SINKS, lively
from tests.support.ranks import ranks

TOLERANCE = 5e-5  # As in the tests of the reader.

ZERO_CENTRED = MODERN.with_fields(
    normalization="LayerNorm",
    layernorm_zero_centered_gamma=True,
    activation="relu2",
    gated=False,
    rope_scaling=RopeScaling("llama3", 4.0),
    rotary_interleaved=True,
)
SPARSE = EXPERTS.with_fields(
    num_experts=4, activation="silu", proj_bias=False, mlp_bias=False, qkv_bias=True
)
SIGMOID = SIGMOID_EXPERTS.with_fields(
    num_experts=6, activation="gelu", gated=False, proj_bias=False, moe_shared_expert_gate=False
)
BY_LAYER = MODERN.with_fields(
    window_layers=(True, False, True, True, False),
    rope_layers=(True, True, False, True, True),
    softmax_scale=0.3,
)
GPT_OSS = SINKS.with_fields(rope_scaling=None, qkv_bias=True)
CASES: dict[str, tuple[GPTConfig, ParallelSplit, LayerSpec]] = {
    "windows and rotary positions by layer": (BY_LAYER, ParallelSplit(2, 2), "te"),
    "sinks, experts with biases": (GPT_OSS, ParallelSplit(pp=2, ep=5), "te"),
    "one rank": (CLASSIC, ParallelSplit(), "te"),
    "one rank, local names": (CLASSIC, ParallelSplit(), "local"),
    "tied, every kind of rank": (CLASSIC, ParallelSplit(2, 2, 2), "te"),
    "tied, three stages": (CLASSIC, ParallelSplit(pp=3), "te"),
    "tied, tensor ranks": (CLASSIC.with_fields(activation="gelu"), ParallelSplit(4), "local"),
    "untied, gated, fewer groups than ranks": (MODERN, ParallelSplit(4, 2), "te"),
    "untied, gated, virtual stages": (MODERN, ParallelSplit(2, 2, 2), "local"),
    "zero-centred": (ZERO_CENTRED, ParallelSplit(2, 3), "te"),
    "no positions": (
        CLASSIC.with_fields(position_embedding_type="none"),
        ParallelSplit(2),
        "te",
    ),
    "experts on expert ranks": (SPARSE, ParallelSplit(2, 2, 1, 2), "te"),
    "experts, local names, virtual stages": (SPARSE, ParallelSplit(1, 2, 2, 2), "local"),
    "experts chosen by sigmoid": (SIGMOID, ParallelSplit(2, 1, 1, 3), "te"),
    "experts, one on each rank": (SPARSE, ParallelSplit(pp=2, ep=4), "te"),
}


def write_and_reopen(
    source: Checkpoint, split: ParallelSplit, root: Path, spec: LayerSpec = "te"
) -> Checkpoint:
    layout = plan_layout(source, split, vocabulary_multiple=8, spec=spec)
    assert unplaced_tensors(source, layout) == []
    write_plainly(source, layout, root)
    return open_checkpoint(root)


def load_record(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([Namespace]):
        loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bit_exact(case: str, tmp_path: Path) -> None:
    config, split, spec = CASES[case]
    source = lively(config)
    reopened = write_and_reopen(source, split, tmp_path, spec)
    assert reopened.format == "megatron" and reopened.path == tmp_path / "release"
    assert reopened.config == source.config
    assert reopened.tensors.keys() == source.tensors.keys()
    for name in source.tensors:
        assert torch.equal(reopened.read(name), source.read(name)), name
    assert len(reopened.files) == split.tp * split.pp * split.ep


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_keep_their_dtype_except_the_expert_bias(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    source = lively(SIGMOID).in_dtype(dtype)
    reopened = write_and_reopen(source, ParallelSplit(2, 1, 1, 2), tmp_path)
    assert reopened.config == source.config
    for name in source.tensors:
        assert torch.equal(reopened.read(name), source.read(name)), name
        assert (reopened.tensors[name].dtype is dtype) != name.endswith("expert_bias"), name


def test_every_file_is_a_valid_archive_of_plain_values(tmp_path: Path) -> None:
    write_and_reopen(lively(CLASSIC), ParallelSplit(2, 2, 2), tmp_path)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    paths = sorted((tmp_path / "release").glob("*/*"))
    folders = ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    assert [str(path.relative_to(tmp_path / "release")) for path in paths] == [
        f"{folder}/model_optim_rng.pt" for folder in folders
    ]
    for path in paths:
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        loaded = load_record(path)
        assert (loaded["checkpoint_version"], loaded["iteration"]) == (3.0, 0)
        assert loaded["args"].num_layers == 5
        assert loaded.keys() == {"args", "checkpoint_version", "iteration", "model0", "model1"}


def names(root: Path, folder: str, key: str = "model") -> set[str]:
    return set(load_record(root / "release" / folder / "model_optim_rng.pt")[key])


DENSE_LAYER = {
    *("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"),
    *("self_attention.linear_proj.weight", "self_attention.linear_proj.bias"),
    *("mlp.linear_fc1.weight", "mlp.linear_fc1.bias"),
    *("mlp.linear_fc2.weight", "mlp.linear_fc2.bias"),
}
LOCAL_NORMS = {
    *("input_layernorm.weight", "input_layernorm.bias"),
    *("pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias"),
}
FUSED_NORMS = {
    *("self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.layer_norm_bias"),
    *("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.layer_norm_bias"),
}
STATES = {
    *("self_attention.linear_qkv._extra_state", "self_attention.linear_proj._extra_state"),
    *("self_attention.core_attention._extra_state",),
    *("mlp.linear_fc1._extra_state", "mlp.linear_fc2._extra_state"),
}


@pytest.mark.parametrize(
    ("spec", "layer"),
    [("te", DENSE_LAYER | FUSED_NORMS | STATES), ("local", DENSE_LAYER | LOCAL_NORMS)],
)
def test_names_follow_the_layer_spec_and_number_layers_per_chunk(
    spec: LayerSpec, layer: set[str], tmp_path: Path
) -> None:
    write_and_reopen(
        lively(CLASSIC.with_fields(num_layers=4, moe_layers=())),
        ParallelSplit(1, 2, 2),
        tmp_path,
        spec,
    )
    layers = {f"decoder.layers.0.{name}" for name in layer}
    embedding = {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight"}
    last_norm = {"decoder.final_layernorm.weight", "decoder.final_layernorm.bias"}
    assert names(tmp_path, "mp_rank_00_000", "model0") == layers | embedding
    assert names(tmp_path, "mp_rank_00_001", "model0") == layers
    assert names(tmp_path, "mp_rank_00_000", "model1") == layers
    # The head is tied, but the last stage is another rank, which needs its own copy.
    head = {"output_layer.weight"}
    assert names(tmp_path, "mp_rank_00_001", "model1") == layers | last_norm | head


def test_experts_are_numbered_per_rank_and_other_tensors_are_replicated(tmp_path: Path) -> None:
    source = lively(SPARSE)
    write_and_reopen(source, ParallelSplit(ep=2), tmp_path)
    first_rank, second_rank = (
        load_record(tmp_path / "release" / f"mp_rank_00_00{rank}" / "model_optim_rng.pt")["model"]
        for rank in range(2)
    )
    assert first_rank.keys() == second_rank.keys()
    weight = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1.weight"
    assert weight.format(1) in first_rank and weight.format(2) not in first_rank
    assert torch.equal(second_rank[weight.format(1)], source.read(weight.format(3)))
    assert torch.equal(
        first_rank["decoder.layers.0.mlp.router.weight"],
        second_rank["decoder.layers.0.mlp.router.weight"],
    )
    state = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1._extra_state"
    assert state in first_rank and first_rank[state] is None


def test_vocabulary_is_padded_with_zeros_to_the_multiple(
    tmp_path: Path,
) -> None:
    source = lively(CLASSIC)
    write_plainly(source, plan_layout(source, ParallelSplit(2)), tmp_path)
    records = [load_record(path) for path in sorted(tmp_path.glob("release/*/*"))]
    table = torch.cat([rank["model"]["embedding.word_embeddings.weight"] for rank in records])
    assert table.shape[0] == 256 == records[0]["args"].padded_vocab_size
    assert not table[101:].any() and table[:101].any(1).all()
    assert records[0]["args"].vocab_size == 101


def test_each_rank_stores_its_gate_rows_before_its_up_rows(tmp_path: Path) -> None:
    source = lively(MODERN)
    write_and_reopen(source, ParallelSplit(2), tmp_path)
    name = "decoder.layers.3.mlp.linear_fc1.weight"
    full_tensor = source.read(name)
    shard = load_record(tmp_path / "release" / "mp_rank_01" / "model_optim_rng.pt")["model"][name]
    assert torch.equal(shard, torch.cat([full_tensor[22:44], full_tensor[66:88]]))


def test_impossible_split_is_refused_before_planning() -> None:
    source = lively(SPARSE)
    for split, message in (
        (ParallelSplit(3), "tensor parallel 3 .*--tp can be 1, 2, 4"),
        (ParallelSplit(pp=5), "--pp can be at most 4"),
        (ParallelSplit(ep=3), "--ep can be 1, 2, 4"),
        (ParallelSplit(vpp=2), "two or more pipeline ranks; give --vpp 1"),
        (ParallelSplit(pp=2, vpp=0), "--vpp 0: .* at least 1; give --vpp 1"),
        (ParallelSplit(pp=2, vpp=3), "--vpp can be at most 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_layout(source, split)
    with pytest.raises(ConfigError, match="the model has no experts"):
        plan_layout(lively(CLASSIC), ParallelSplit(ep=2))


MEGATRON: dict[str, tuple[GPTConfig, ParallelSplit]] = {
    "windows and rotary positions by layer": (BY_LAYER, ParallelSplit(2, 2)),
    "sinks, experts with biases": (GPT_OSS, ParallelSplit(pp=2)),
    "gated, untied, TP 2 x PP 2": (
        MODERN.with_fields(num_layers=4, moe_layers=()),
        ParallelSplit(2, 2),
    ),
    "gated, fewer groups than ranks": (MODERN, ParallelSplit(4)),
    "learned positions, tied, drawn stages": (CLASSIC, ParallelSplit(1, 2, 2)),
    "learned positions, tied, uneven stages": (CLASSIC, ParallelSplit(pp=2)),
    "experts, EP 2": (
        SPARSE.with_fields(max_position_embeddings=64, rope_scaling=RopeScaling("llama3", 8.0)),
        ParallelSplit(2, 1, 1, 2),
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("megatron") is None and not os.environ.get("CI"),
    reason="megatron-core, the oracle, is absent; `make tools` installs it",
)
@pytest.mark.parametrize("case", MEGATRON)
def test_megatron_core_loads_strictly_and_computes_our_logits(case: str, tmp_path: Path) -> None:
    config, split = MEGATRON[case]
    source = lively(config)
    write_plainly(source, plan_layout(source, split, spec="local"), tmp_path)
    megatron_case = Case(split.tp, split.pp, split.vpp if split.vpp > 1 else None, split.ep)
    ids_and_logits = ranks(
        megatron_case.ranks, load_and_run, megatron_case, tmp_path, timeout_s=120.0
    )[-1]
    assert ids_and_logits is not None
    ids, megatron_logits = ids_and_logits
    logits = load_model(source, Mesh.single()).logits(ids)
    megatron_logits = megatron_logits[..., : logits.shape[-1]]
    assert logits.std() >= 5
    assert (logits - megatron_logits).abs().max() <= TOLERANCE
    assert torch.equal(logits.argmax(-1), megatron_logits.argmax(-1))
