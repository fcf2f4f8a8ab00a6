"""Rank files for Megatron-LM: read back they are the model, and Megatron-Core loads them."""

import os
import zipfile
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints_tools.layout.layout import Division, unplaced
from checkpoints_tools.writers.megatron import layout
from checkpoints_tools.writers.megatron_args import Spec
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig, RopeScaling
from gpt.errors import ConfigError
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from tests.support.checkpoints.mcore_models import Case, load_and_run
from tests.support.checkpoints.plain_writer import write_plainly
from tests.support.models import CLASSIC, EXPERTS, MODERN, SIGMOID_EXPERTS, lively
from tests.support.ranks import ranks

TOLERANCE = 1e-3  # Between two correct fp32 implementations; a wrong layout is off by whole logits.

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
CASES: dict[str, tuple[GPTConfig, Division, Spec]] = {
    "one rank": (CLASSIC, Division(), "te"),
    "one rank, local names": (CLASSIC, Division(), "local"),
    "tied, every kind of rank": (CLASSIC, Division(2, 2, 2), "te"),
    "tied, three stages": (CLASSIC, Division(pp=3), "te"),
    "tied, tensor ranks": (CLASSIC.with_fields(activation="gelu"), Division(4), "local"),
    "untied, gated, fewer groups than ranks": (MODERN, Division(4, 2), "te"),
    "untied, gated, virtual stages": (MODERN, Division(2, 2, 2), "local"),
    "zero-centred": (ZERO_CENTRED, Division(2, 3), "te"),
    "no positions": (
        CLASSIC.with_fields(position_embedding_type="none"),
        Division(2),
        "te",
    ),
    "experts on expert ranks": (SPARSE, Division(2, 2, 1, 2), "te"),
    "experts, local names, virtual stages": (SPARSE, Division(1, 2, 2, 2), "local"),
    "experts chosen by sigmoid": (SIGMOID, Division(2, 1, 1, 3), "te"),
    "experts, one on each rank": (SPARSE, Division(pp=2, ep=4), "te"),
}


def written(source: Checkpoint, division: Division, root: Path, spec: Spec = "te") -> Checkpoint:
    planned = layout(source, division, vocabulary_multiple=8, spec=spec)
    assert unplaced(source, planned) == []
    write_plainly(source, planned, root)
    return open_checkpoint(root)


def record(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([Namespace]):
        found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_was_written_is_read_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    config, division, spec = CASES[case]
    source = lively(config)
    back = written(source, division, tmp_path, spec)
    assert back.format == "megatron" and back.path == tmp_path / "release"
    assert back.config == source.config
    assert back.tensors.keys() == source.tensors.keys()
    for name in source.tensors:
        assert torch.equal(back.read(name), source.read(name)), name
    assert len(back.files) == division.tp * division.pp * division.ep


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_stay_narrow_but_for_the_choice_among_experts(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    source = lively(SIGMOID).in_dtype(dtype)
    back = written(source, Division(2, 1, 1, 2), tmp_path)
    assert back.config == source.config
    for name in source.tensors:
        assert torch.equal(back.read(name), source.read(name)), name
        assert (back.tensors[name].dtype is dtype) != name.endswith("expert_bias"), name


def test_every_file_is_a_sound_archive_of_plain_values(tmp_path: Path) -> None:
    written(lively(CLASSIC), Division(2, 2, 2), tmp_path)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    paths = sorted((tmp_path / "release").glob("*/*"))
    folders = ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    assert [str(path.relative_to(tmp_path / "release")) for path in paths] == [
        f"{folder}/model_optim_rng.pt" for folder in folders
    ]
    for path in paths:
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        found = record(path)
        assert (found["checkpoint_version"], found["iteration"]) == (3.0, 0)
        assert found["args"].num_layers == 5
        assert found.keys() == {"args", "checkpoint_version", "iteration", "model0", "model1"}


def names(root: Path, folder: str, key: str = "model") -> set[str]:
    return set(record(root / "release" / folder / "model_optim_rng.pt")[key])


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
def test_names_are_those_of_the_classes_and_count_from_each_chunk(
    spec: Spec, layer: set[str], tmp_path: Path
) -> None:
    written(
        lively(CLASSIC.with_fields(num_layers=4, moe_layers=())), Division(1, 2, 2), tmp_path, spec
    )
    layers = {f"decoder.layers.0.{name}" for name in layer}
    embedding = {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight"}
    last = {"decoder.final_layernorm.weight", "decoder.final_layernorm.bias"}
    assert names(tmp_path, "mp_rank_00_000", "model0") == layers | embedding
    assert names(tmp_path, "mp_rank_00_001", "model0") == layers
    assert names(tmp_path, "mp_rank_00_000", "model1") == layers
    # Tied, yet the last stage is another rank's, which has to have its own copy.
    head = {"output_layer.weight"}
    assert names(tmp_path, "mp_rank_00_001", "model1") == layers | last | head


def test_experts_count_from_each_rank_and_all_else_is_repeated(tmp_path: Path) -> None:
    source = lively(SPARSE)
    written(source, Division(ep=2), tmp_path)
    first, second = (
        record(tmp_path / "release" / f"mp_rank_00_00{rank}" / "model_optim_rng.pt")["model"]
        for rank in range(2)
    )
    assert first.keys() == second.keys()
    weight = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1.weight"
    assert weight.format(1) in first and weight.format(2) not in first
    assert torch.equal(second[weight.format(1)], source.read(weight.format(3)))
    assert torch.equal(
        first["decoder.layers.0.mlp.router.weight"], second["decoder.layers.0.mlp.router.weight"]
    )
    state = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1._extra_state"
    assert state in first and first[state] is None


def test_the_vocabulary_is_padded_with_zeros_to_a_multiple_for_all_tensor_ranks(
    tmp_path: Path,
) -> None:
    source = lively(CLASSIC)
    write_plainly(source, layout(source, Division(2)), tmp_path)
    found = [record(path) for path in sorted(tmp_path.glob("release/*/*"))]
    table = torch.cat([rank["model"]["embedding.word_embeddings.weight"] for rank in found])
    assert table.shape[0] == 256 == found[0]["args"].padded_vocab_size
    assert not table[101:].any() and table[:101].any(1).all()
    assert found[0]["args"].vocab_size == 101


def test_each_rank_has_its_gates_over_its_own_ups(tmp_path: Path) -> None:
    source = lively(MODERN)
    written(source, Division(2), tmp_path)
    name = "decoder.layers.3.mlp.linear_fc1.weight"
    whole = source.read(name)
    found = record(tmp_path / "release" / "mp_rank_01" / "model_optim_rng.pt")["model"][name]
    assert torch.equal(found, torch.cat([whole[22:44], whole[66:88]]))


def test_a_division_that_the_model_cannot_have_is_refused_before_anything_is_planned() -> None:
    source = lively(SPARSE)
    for division, message in (
        (Division(3), "tensor parallel 3 .*--tp can be 1, 2, 4"),
        (Division(pp=5), "--pp can be at most 4"),
        (Division(ep=3), "--ep can be 1, 2, 4"),
        (Division(vpp=2), "from two pipeline ranks on; --vpp can be 1"),
        (Division(pp=2, vpp=0), "--vpp can be 1"),
        (Division(pp=2, vpp=3), "--vpp can be at most 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            layout(source, division)
    with pytest.raises(ConfigError, match="it has no experts"):
        layout(lively(CLASSIC), Division(ep=2))


MEGATRON: dict[str, tuple[GPTConfig, Division]] = {
    "gated, untied, TP 2 x PP 2": (MODERN.with_fields(num_layers=4, moe_layers=()), Division(2, 2)),
    "gated, fewer groups than ranks": (MODERN, Division(4)),
    "learned positions, tied, drawn stages": (CLASSIC, Division(1, 2, 2)),
    "learned positions, tied, uneven stages": (CLASSIC, Division(pp=2)),
    "experts, EP 2": (
        SPARSE.with_fields(max_position_embeddings=64, rope_scaling=RopeScaling("llama3", 8.0)),
        Division(2, 1, 1, 2),
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("megatron") is None and not os.environ.get("CI"),
    reason="megatron-core, the oracle, is absent; `make tools` installs it",
)
@pytest.mark.parametrize("case", MEGATRON)
def test_megatron_core_loads_the_files_strictly_and_computes_our_logits(
    case: str, tmp_path: Path
) -> None:
    config, division = MEGATRON[case]
    source = lively(config)
    write_plainly(source, layout(source, division, spec="local"), tmp_path)
    split = Case(division.tp, division.pp, division.vpp if division.vpp > 1 else None, division.ep)
    answer = ranks(split.ranks, load_and_run, split, tmp_path, timeout_s=120.0)[-1]
    assert answer is not None
    ids, theirs = answer
    ours = load_model(source, Mesh.single()).logits(ids)
    theirs = theirs[..., : ours.shape[-1]]
    assert ours.std() >= 5
    assert (ours - theirs).abs().max() <= TOLERANCE
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
