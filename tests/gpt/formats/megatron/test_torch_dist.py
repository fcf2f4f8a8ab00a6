"""Distributed checkpoints: every form of keys and chunks gives the original model."""

import json
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from gpt.checkpoint.digest import base_digest
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.megatron.torch_dist import open_torch_dist
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from tests.support.checkpoints.distcp_writer import Form, saved
from tests.support.checkpoints.mcore_dist import SHARDED, save_and_run
from tests.support.checkpoints.megatron_writer import DENSE, GATED, GROUPED, MIXED
from tests.support.process_memory import PeakMemory, anonymous_bytes
from tests.support.ranks import ranks

# Two correct fp32 implementations differ by rounding, by at most 2e-5 in these models; a wrong
# layout differs by whole logits.
TOLERANCE = 5e-5

ALL_MOE = {"moe_layers": (True,) * 4}
FORMS = {
    "one key for all layers": (DENSE, Form(tp=2)),
    "a key for each layer": (DENSE, Form(tp=2, stacked=False)),
    "one chunk for each key": (GATED, Form(lump=True)),
    "gated, grouped queries": (GATED, Form(tp=2)),
    "fewer groups than ranks": (GATED, Form(tp=4)),
    "gates and ups apart": (GATED, Form(tp=2, stacked=False, singleton=True)),
    "NeMo 1's prefix, with args": (GATED, Form(tp=2, prefix="model.")),
    "prefixes repeated": (GATED, Form(prefix="module.module.")),
    "arguments inside": (GATED, Form(tp=2, folded=True)),
    "experts": (MIXED.with_fields(**ALL_MOE), Form(tp=2)),
    "experts, one chunk": (MIXED.with_fields(**ALL_MOE), Form(lump=True)),
    "experts, norms named as dense ones": (GROUPED.with_fields(**ALL_MOE), Form(local=True)),
    "experts in some layers": (MIXED, Form(tp=2, stacked=False)),
    "experts under keys of their own": (GROUPED, Form(tp=2, stacked=False, singleton=True)),
}


@pytest.mark.parametrize("case", FORMS)
def test_every_form_is_joined_to_the_original_model(case: str, tmp_path: Path) -> None:
    config, form = FORMS[case]
    source = saved(config, form, tmp_path)
    checkpoint = open_torch_dist(tmp_path)
    assert checkpoint.config == source.config
    for name in source.tensors:
        assert torch.equal(checkpoint.read(name), source.read(name)), name
    assert checkpoint.notes == ()
    assert base_digest(checkpoint) == base_digest(source)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_keep_their_dtype(dtype: str, tmp_path: Path) -> None:
    source = saved(GATED, Form(tp=2), tmp_path, dtype)
    checkpoint = open_torch_dist(tmp_path)
    assert checkpoint.config.dtype == dtype
    assert base_digest(checkpoint) == base_digest(source)


def test_opening_maps_the_files_and_copies_no_weights(tmp_path: Path) -> None:
    wide_config = GATED.with_fields(hidden_size=512, ffn_hidden_size=2048)
    saved(wide_config, Form(tp=2), tmp_path)
    memory_before = anonymous_bytes()
    with PeakMemory() as peak:
        checkpoint = open_torch_dist(tmp_path)
        for logical in checkpoint.tensors.values():
            for piece in logical.slices:
                piece.source.tensor()
    assert peak.bytes - memory_before < 4 << 20


def _required_fields(config: GPTConfig) -> dict[str, object]:
    """The fields that a user must specify without args."""
    fields = {
        *("num_attention_heads", "num_query_groups", "activation", "layernorm_epsilon"),
        *("layernorm_zero_centered_gamma", "position_embedding_type", "rotary_base"),
        *("rotary_percent", "max_position_embeddings", "kv_channels", "vocab_size"),
        *("window_size", "moe_router_topk", "moe_router_pre_softmax", "rope_scaling"),
        *("moe_router_score_function",),
    }
    return {name: value for name, value in config.to_dict().items() if name in fields}


@pytest.mark.parametrize(
    "config", [GATED, GROUPED.with_fields(**ALL_MOE)], ids=["dense", "experts"]
)
def test_without_args_sizes_come_from_shapes_and_other_fields_are_required(
    config: GPTConfig, tmp_path: Path
) -> None:
    source = saved(config, Form(tp=2, args=False, prefix="module."), tmp_path)
    (tmp_path / "iter_0000100").rename(tmp_path / "weights")
    (tmp_path / "context").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(CheckpointError, match=r"num_attention_heads .*rotary_base .*as fields of"):
        open_torch_dist(tmp_path)
    checkpoint = open_torch_dist(tmp_path, _required_fields(source.config))
    ids = torch.arange(12).view(1, 12)
    logits = load_model(checkpoint, Mesh.single()).logits(ids)
    assert torch.equal(logits, load_model(source, Mesh.single()).logits(ids))


def _index(folder: Path, change: Callable[[Metadata], object]) -> None:
    """Change the index."""
    path = folder / ".metadata"
    record = pickle.loads(path.read_bytes())
    change(record)
    path.write_bytes(pickle.dumps(record))


def _drop_chunk(record: Metadata) -> None:
    entry: Any = record.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
    entry.chunks.pop()


def _point_outside(record: Metadata) -> None:
    for span in record.storage_data.values():
        span.relative_path = "../secret.distcp"


def _compress(record: Metadata) -> None:
    for span in record.storage_data.values():
        span.transform_descriptors = ["zstd"]


def _truncate(folder: Path) -> None:
    path = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(path, path.stat().st_size // 2)


def _lose_files(folder: Path) -> None:
    for path in list(folder.glob("*.distcp"))[:1]:
        path.unlink()


def _other_backend(name: str) -> Callable[[Path], object]:
    text = json.dumps({"sharded_backend": name, "sharded_backend_version": 1})
    return lambda folder: (folder / "metadata.json").write_text(text)


def _unfinished(folder: Path) -> None:
    (folder / "metadata.json").unlink()


def _only_common(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "common.pt":
            path.unlink()


def _bomb(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return os.system, ("true",)

    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Bomb()}))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is missing": (_lose_files, r"lacks __0_\d+\.distcp of the \d+ files"),
    "a file is truncated": (_truncate, "is truncated: it has"),
    "a chunk is missing": (
        lambda f: _index(f, _drop_chunk),
        "linear_fc2.weight .*missing or stored twice",
    ),
    "a path leads out": (lambda f: _index(f, _point_outside), "outside the directory"),
    "compressed": (lambda f: _index(f, _compress), "zstd.*without transforms"),
    "an index that runs code": (_bomb, r"asks to run posix\.system, which is not data"),
    "an index cut short": (lambda f: os.truncate(f / ".metadata", 99), "not a readable index"),
    "no metadata.json": (_unfinished, "written last, so the save did not finish"),
    "common.pt alone": (_only_common, r"has no \.metadata, so the save did not finish"),
    "a listed file is missing": (
        lambda f: (f / "integrity.json").write_text('{"files": {"__9_9.distcp": "00"}}'),
        r"lacks __9_9\.distcp of the 1 files that integrity\.json lists",
    ),
    "zarr": (_other_backend("zarr"), "zarr checkpoint.*save it as torch_dist"),
    "fsdp_dtensor": (_other_backend("fsdp_dtensor"), "is a fsdp_dtensor checkpoint"),
    "quantized": (lambda f: (f / "modelopt_state").mkdir(), "quantized or pruned"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_checkpoints_are_refused_in_one_sentence(fault: str, tmp_path: Path) -> None:
    saved(GATED, Form(tp=2), tmp_path)
    change, message = FAULTS[fault]
    change(tmp_path / "iter_0000100")
    with pytest.raises(CheckpointError, match=message):
        open_torch_dist(tmp_path / "iter_0000100")


def test_plain_torch_dcp_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    saved(GATED, Form(stacked=False, prefix="model.module."), tmp_path)
    _unfinished(tmp_path / "iter_0000100")
    with pytest.raises(CheckpointError, match="torch_dcp or fsdp_dtensor"):
        open_torch_dist(tmp_path)


def test_chunk_that_differs_from_the_index_is_refused_when_read(
    tmp_path: Path,
) -> None:
    saved(GATED, Form(tp=2), tmp_path)
    for path in tmp_path.glob("*/*.distcp"):
        path.write_bytes(path.read_bytes().replace(b"FloatStorage", b"QloatStorage"))
    checkpoint = open_torch_dist(tmp_path)
    with pytest.raises(CheckpointError, match="is not the tensor that"):
        checkpoint.read("decoder.final_layernorm.weight")


def test_indexes_with_megatron_classes_are_read_without_megatron(tmp_path: Path) -> None:
    """As core 0.11 to 0.15 wrote them, with classes that no longer exist when they are read."""
    source = saved(GATED, Form(tp=2), tmp_path)
    path = tmp_path / "iter_0000100" / ".metadata"
    # In this protocol a class is its name, as text, so the name can be replaced.
    old_pickle = pickle.dumps(pickle.loads(path.read_bytes()), protocol=2)
    module = b"megatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"
    new_pickle = old_pickle.replace(b"torch.distributed.checkpoint.metadata\nMetadata\n", module)
    assert new_pickle != old_pickle
    path.write_bytes(new_pickle)
    assert base_digest(open_torch_dist(tmp_path)) == base_digest(source)


class _Call:
    """Pickled as a call of `getattr`, as some Pythons pickle an enum."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return getattr, self.arguments


def test_only_enums_may_be_pickled_through_getattr(tmp_path: Path) -> None:
    source = saved(DENSE, Form(), tmp_path)
    enum = _Call(WriteItemType, "SHARD")
    _index(
        tmp_path / "iter_0000100",
        lambda record: setattr(record, "planner_data", enum),
    )
    assert base_digest(open_torch_dist(tmp_path)) == base_digest(source)
    saved(DENSE, Form(), tmp_path / "again")
    _index(
        tmp_path / "again" / "iter_0000100",
        lambda record: setattr(record, "planner_data", _Call("text", "join")),
    )
    with pytest.raises(CheckpointError, match=r"asks to run builtins\.getattr"):
        open_torch_dist(tmp_path / "again")


def test_stored_head_of_a_tied_model_is_compared_with_the_embedding(tmp_path: Path) -> None:
    untied = {"untie_embeddings_and_output_weights": True}
    saved(DENSE.with_fields(**untied), Form(), tmp_path)
    path = tmp_path / "iter_0000100" / "common.pt"
    common = torch.load(path, weights_only=False)
    args: Namespace = common["args"]
    args.untie_embeddings_and_output_weights = False
    path.unlink()
    torch.save(common, path)
    with pytest.raises(CheckpointError, match="ties the head to the embedding"):
        open_torch_dist(tmp_path)
    assert open_torch_dist(tmp_path, untied).config.untie_embeddings_and_output_weights


def test_iteration_directories_can_be_copied_alone(tmp_path: Path) -> None:
    source = saved(DENSE, Form(tp=2), tmp_path / "there")
    shutil.copytree(tmp_path / "there" / "iter_0000100", tmp_path / "here")
    shutil.rmtree(tmp_path / "there")
    assert base_digest(open_torch_dist(tmp_path / "here" / ".metadata")) == base_digest(source)


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("megatron") is None and not os.environ.get("CI"),
    reason="megatron-core, the oracle, is absent; `make tools` installs it",
)
@pytest.mark.parametrize("case", SHARDED)
def test_logits_equal_those_of_megatron_core(case: str, tmp_path: Path) -> None:
    sharded = SHARDED[case]
    split = sharded.case.ranks
    ids_and_logits = ranks(split, save_and_run, sharded, tmp_path, timeout_s=120.0)[-1]
    assert ids_and_logits is not None
    ids, megatron_logits = ids_and_logits
    logits = load_model(open_torch_dist(tmp_path), Mesh.single()).logits(ids)
    megatron_logits = megatron_logits[..., : logits.shape[-1]]
    assert logits.std() >= 5
    assert (logits - megatron_logits).abs().max() <= TOLERANCE
    assert torch.equal(logits.argmax(-1), megatron_logits.argmax(-1))
