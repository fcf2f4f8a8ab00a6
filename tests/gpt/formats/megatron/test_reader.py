"""Megatron-LM's `torch` checkpoints: every layout gives the original model, bitwise."""

import io
import os
import pickle
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from gpt.checkpoint.digest import base_digest
from gpt.errors import CheckpointError
from gpt.formats.megatron.reader import open_megatron
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from tests.support.checkpoints.mcore_models import CASES, save_and_run
from tests.support.checkpoints.megatron_writer import (
    DENSE,
    GATED,
    GROUPED,
    MIXED,
    ROTARY,
    Layout,
    edit,
    saved,
)
from tests.support.process_memory import PeakMemory, anonymous_bytes
from tests.support.ranks import ranks

# Two correct fp32 implementations differ by rounding, by at most 2e-5 in these models; a wrong
# layout differs by whole logits.
TOLERANCE = 5e-5

LAYOUTS = {
    "one rank, Transformer Engine": (DENSE, Layout()),
    "local names": (DENSE, Layout(tp=2, pp=2, names="local")),
    "data-parallel wrapper": (DENSE, Layout(tp=2, prefix="module.module.")),
    "names of 2023": (DENSE, Layout(tp=2, pp=2, names="2023")),
    "names of 2021": (DENSE, Layout(tp=2, pp=2, names="2021", version=2.0)),
    "names of 2020, rows of version 1": (DENSE, Layout(tp=4, names="2020", version=1.0)),
    "names of 2020, rows of version 0": (DENSE, Layout(tp=2, names="2020", version=None)),
    "file of 2020, a release": (
        DENSE,
        Layout(names="2020", version=None, zipped=False, iteration=None),
    ),
    "wrapper around older names": (DENSE, Layout(tp=2, names="2021", prefix="module.")),
    "layers of Transformer Engine": (DENSE, Layout(tp=2, pp=2, names="full te")),
    "virtual pipeline": (DENSE, Layout(tp=2, pp=2, vpp=2)),
    "gated, grouped queries": (GATED, Layout(tp=2, pp=2)),
    "fewer groups than ranks": (GATED, Layout(tp=4)),
    "uneven stages": (GATED, Layout(pp=3, stages=[[1, 2, 1]])),
    "uneven stages in chunks, one empty": (GATED, Layout(pp=2, vpp=2, stages=[[1, 0], [2, 1]])),
    "older classes, gated, both positions": (ROTARY, Layout(tp=2, pp=2, names="2023")),
    "experts": (MIXED, Layout(tp=2, pp=2, ep=2)),
    "experts of Transformer Engine": (MIXED, Layout(tp=2, ep=4, experts="te grouped")),
    "grouped experts": (GROUPED, Layout(tp=2, pp=2, ep=2, experts="grouped")),
    "grouped experts, local names": (GROUPED, Layout(names="local", experts="grouped")),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout_is_joined_to_the_original_model(case: str, tmp_path: Path) -> None:
    config, layout = LAYOUTS[case]
    source = saved(config, layout, tmp_path)
    checkpoint = open_megatron(tmp_path)
    assert checkpoint.config == source.config
    for name in source.tensors:
        assert torch.equal(checkpoint.read(name), source.read(name)), name
    assert checkpoint.notes == ()
    assert base_digest(checkpoint) == base_digest(source)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_keep_the_dtype_of_the_tensors(dtype: str, tmp_path: Path) -> None:
    source = saved(GATED, Layout(tp=2), tmp_path, dtype)
    checkpoint = open_megatron(tmp_path)
    assert checkpoint.config.dtype == dtype
    assert base_digest(checkpoint) == base_digest(source)


def test_ranks_read_their_shards_from_files_of_another_split(tmp_path: Path) -> None:
    source = saved(GATED, Layout(tp=4, pp=2), tmp_path)
    ids = torch.arange(12).view(1, 12)
    single_rank_logits = load_model(open_megatron(tmp_path), Mesh.single()).logits(ids)
    assert torch.equal(single_rank_logits, load_model(source, Mesh.single()).logits(ids))


@pytest.mark.parametrize(
    ("key", "model"),
    [
        ("language_model.encoder.layers.0.inter_attention.dense.weight", "T5"),
        ("binary_head.weight", "BERT"),
        ("language_model.embedding.tokentype_embeddings.weight", "BERT"),
        ("decoder.layers.0.mixer.in_proj.weight", "Mamba"),
        ("vision_model.class_token", "multimodal"),
    ],
)
def test_other_model_types_are_refused_by_name(key: str, model: str, tmp_path: Path) -> None:
    saved(DENSE, Layout(), tmp_path)
    edit(tmp_path, "mp_rank_00", lambda record: record["model"].update({key: torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=model):
        open_megatron(tmp_path)


def test_fp8_states_are_dropped_without_unpickling(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return pytest.fail, ("unpickled",)

    source = saved(DENSE, Layout(), tmp_path)
    payload = pickle.dumps(Bomb())
    states = {
        "decoder.layers.0.mlp.linear_fc1._extra_state": io.BytesIO(payload),
        "decoder.layers.0.mlp.linear_fc2._extra_state": None,
        "output_layer._extra_state": torch.frombuffer(bytearray(payload), dtype=torch.uint8),
        "rotary_pos_emb.inv_freq": torch.zeros(4),
    }
    edit(tmp_path, "mp_rank_00", lambda record: record["model"].update(states))
    assert base_digest(open_megatron(tmp_path)) == base_digest(source)


def test_megatron_core_names_have_the_current_qkv_order_without_a_version(tmp_path: Path) -> None:
    source = saved(DENSE, Layout(tp=2), tmp_path)
    edit(tmp_path, "mp_rank_*", lambda record: record.pop("checkpoint_version"))
    assert base_digest(open_megatron(tmp_path)) == base_digest(source)


def test_multi_token_prediction_heads_are_dropped_with_a_note(tmp_path: Path) -> None:
    saved(DENSE, Layout(), tmp_path)
    extra = {"mtp.layers.0.enorm.weight": torch.zeros(4)}
    edit(tmp_path, "mp_rank_00", lambda record: record["model"].update(extra))
    assert "multi-token prediction" in open_megatron(tmp_path).notes[0]


def test_tokenizers_beside_the_weights_or_in_the_root_are_found(tmp_path: Path) -> None:
    saved(DENSE, Layout(), tmp_path)
    assert open_megatron(tmp_path).tokenizer is None
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "null.json").write_text('{"vocab_size": 101}')
    assert open_megatron(tmp_path).tokenizer == tmp_path / "tokenizer"


def test_opening_maps_the_files_and_reads_neither_weights_nor_optimizer(tmp_path: Path) -> None:
    saved(DENSE, Layout(tp=2), tmp_path)
    optimizer = {"state": {0: torch.ones(8 << 20)}}
    edit(tmp_path, "mp_rank_*", lambda record: record.update(optimizer=optimizer))
    memory_before = anonymous_bytes()
    with PeakMemory() as peak:
        checkpoint = open_megatron(tmp_path)
    assert checkpoint.config.num_layers == DENSE.num_layers
    assert peak.bytes - memory_before < 4 << 20


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("megatron") is None and not os.environ.get("CI"),
    reason="megatron-core, the oracle, is absent; `make tools` installs it",
)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_megatron_core(case: str, tmp_path: Path) -> None:
    split = CASES[case]
    ids_and_logits = ranks(split.ranks, save_and_run, split, tmp_path, timeout_s=120.0)[-1]
    assert ids_and_logits is not None
    ids, megatron_logits = ids_and_logits
    model = load_model(open_megatron(tmp_path), Mesh.single())
    logits = model.logits(ids)
    megatron_logits = megatron_logits[..., : logits.shape[-1]]
    assert logits.std() >= 5
    assert (logits - megatron_logits).abs().max() <= TOLERANCE
    assert torch.equal(logits.argmax(-1), megatron_logits.argmax(-1))
