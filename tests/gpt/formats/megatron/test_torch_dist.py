"""Distributed checkpoints: every form of keys and chunks gives the model that was cut."""

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
from tests.support.process_memory import Peak, anonymous_bytes
from tests.support.ranks import ranks

# Two correct fp32 implementations differ by rounding; a wrong layout differs by whole logits.
TOLERANCE = 1e-3

ALIKE = {"moe_layers": (True,) * 4}
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
    "experts": (MIXED.with_fields(**ALIKE), Form(tp=2)),
    "experts, one chunk": (MIXED.with_fields(**ALIKE), Form(lump=True)),
    "experts, norms named as dense ones": (GROUPED.with_fields(**ALIKE), Form(local=True)),
    "experts in some layers": (MIXED, Form(tp=2, stacked=False)),
    "experts under keys of their own": (GROUPED, Form(tp=2, stacked=False, singleton=True)),
}


@pytest.mark.parametrize("case", FORMS)
def test_every_form_gives_the_model_that_was_cut(case: str, tmp_path: Path) -> None:
    config, form = FORMS[case]
    source = saved(config, form, tmp_path)
    checkpoint = open_torch_dist(tmp_path)
    assert checkpoint.config == source.config
    for name in source.tensors:
        assert torch.equal(checkpoint.read(name), source.read(name)), name
    assert checkpoint.notes == ()
    assert base_digest(checkpoint) == base_digest(source)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_keep_their_dtype_wherever_they_lie(dtype: str, tmp_path: Path) -> None:
    source = saved(GATED, Form(tp=2), tmp_path, dtype)
    checkpoint = open_torch_dist(tmp_path)
    assert checkpoint.config.dtype == dtype
    assert base_digest(checkpoint) == base_digest(source)


def test_opening_maps_the_files_and_copies_no_weights(tmp_path: Path) -> None:
    wide = GATED.with_fields(hidden_size=512, ffn_hidden_size=2048)
    saved(wide, Form(tp=2), tmp_path)
    before = anonymous_bytes()
    with Peak() as peak:
        checkpoint = open_torch_dist(tmp_path)
        for logical in checkpoint.tensors.values():
            for piece in logical.pieces:
                piece.source.tensor()
    assert peak.bytes - before < 4 << 20


def _known(config: GPTConfig) -> dict[str, object]:
    """What a user looks up where no args are."""
    fields = {
        *("num_attention_heads", "num_query_groups", "activation", "layernorm_epsilon"),
        *("layernorm_zero_centered_gamma", "position_embedding_type", "rotary_base"),
        *("rotary_percent", "max_position_embeddings", "kv_channels", "vocab_size"),
        *("window_size", "moe_router_topk", "moe_router_pre_softmax", "rope_scaling"),
        *("moe_router_score_function",),
    }
    return {name: value for name, value in config.to_dict().items() if name in fields}


@pytest.mark.parametrize("config", [GATED, GROUPED.with_fields(**ALIKE)], ids=["dense", "experts"])
def test_without_args_shapes_tell_what_they_can_and_the_rest_is_asked_for(
    config: GPTConfig, tmp_path: Path
) -> None:
    source = saved(config, Form(tp=2, args=False, prefix="module."), tmp_path)
    (tmp_path / "iter_0000100").rename(tmp_path / "weights")
    (tmp_path / "context").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(CheckpointError, match=r"num_attention_heads .*rotary_base .*as fields of"):
        open_torch_dist(tmp_path)
    checkpoint = open_torch_dist(tmp_path, _known(source.config))
    ids = torch.arange(12).view(1, 12)
    ours = load_model(checkpoint, Mesh.single()).logits(ids)
    assert torch.equal(ours, load_model(source, Mesh.single()).logits(ids))


def _index(folder: Path, change: Callable[[Metadata], object]) -> None:
    """Change what the index says."""
    path = folder / ".metadata"
    record = pickle.loads(path.read_bytes())
    change(record)
    path.write_bytes(pickle.dumps(record))


def _drop_chunk(record: Metadata) -> None:
    entry: Any = record.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
    entry.chunks.pop()


def _lead_astray(record: Metadata) -> None:
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
    "a chunk is missing": (lambda f: _index(f, _drop_chunk), "linear_fc2.weight .*not covered"),
    "a path leads out": (lambda f: _index(f, _lead_astray), "outside the directory"),
    "compressed": (lambda f: _index(f, _compress), "zstd.*without compression"),
    "an index that runs code": (_bomb, r"asks to run posix\.system, which is not data"),
    "an index cut short": (lambda f: os.truncate(f / ".metadata", 99), "not an index that can be"),
    "no metadata.json": (_unfinished, "written last: the save did not finish"),
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
def test_a_broken_checkpoint_is_refused_in_one_sentence(fault: str, tmp_path: Path) -> None:
    saved(GATED, Form(tp=2), tmp_path)
    change, says = FAULTS[fault]
    change(tmp_path / "iter_0000100")
    with pytest.raises(CheckpointError, match=says):
        open_torch_dist(tmp_path / "iter_0000100")


def test_a_torch_dcp_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    saved(GATED, Form(stacked=False, prefix="model.module."), tmp_path)
    _unfinished(tmp_path / "iter_0000100")
    with pytest.raises(CheckpointError, match="torch_dcp or fsdp_dtensor"):
        open_torch_dist(tmp_path)


def test_a_chunk_that_is_not_what_the_index_promises_is_found_when_it_is_read(
    tmp_path: Path,
) -> None:
    saved(GATED, Form(tp=2), tmp_path)
    for path in tmp_path.glob("*/*.distcp"):
        path.write_bytes(path.read_bytes().replace(b"FloatStorage", b"QloatStorage"))
    checkpoint = open_torch_dist(tmp_path)
    with pytest.raises(CheckpointError, match="is not the tensor that"):
        checkpoint.read("decoder.final_layernorm.weight")


def test_an_index_with_classes_of_megatron_is_read_without_them(tmp_path: Path) -> None:
    """As core 0.11 to 0.15 wrote them; the classes are gone once they are pickled."""
    source = saved(GATED, Form(tp=2), tmp_path)
    path = tmp_path / "iter_0000100" / ".metadata"
    # In this protocol a class is its name, in text: it is renamed where it stands.
    old = pickle.dumps(pickle.loads(path.read_bytes()), protocol=2)
    module = b"megatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"
    new = old.replace(b"torch.distributed.checkpoint.metadata\nMetadata\n", module)
    assert new != old
    path.write_bytes(new)
    assert base_digest(open_torch_dist(tmp_path)) == base_digest(source)


class _Call:
    """Pickled as a call of `getattr`, as some Pythons pickle an enum."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return getattr, self.arguments


def test_an_enum_pickled_by_getattr_is_read_and_getattr_of_else_is_refused(tmp_path: Path) -> None:
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


def test_a_tied_head_that_was_kept_is_held_against_the_embedding(tmp_path: Path) -> None:
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


def test_a_copy_of_the_directory_alone_is_enough(tmp_path: Path) -> None:
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
def test_logits_are_those_of_megatron_core(case: str, tmp_path: Path) -> None:
    sharded = SHARDED[case]
    split = sharded.case.ranks
    answer = ranks(split, save_and_run, sharded, tmp_path, timeout_s=120.0)[-1]
    assert answer is not None
    ids, theirs = answer
    ours = load_model(open_torch_dist(tmp_path), Mesh.single()).logits(ids)
    theirs = theirs[..., : ours.shape[-1]]
    assert ours.std() >= 5
    assert (ours - theirs).abs().max() <= TOLERANCE
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
