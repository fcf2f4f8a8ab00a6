"""Distributed checkpoints that we write: our reader, torch and Megatron-Core agree on them."""

import os
from argparse import Namespace
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from checkpoints_tools.layout.layout import Division, Layout, unplaced
from checkpoints_tools.writers.megatron_args import Spec
from checkpoints_tools.writers.torch_dist import SHARED_BYTES, layout
from gpt.checkpoint.logical_tensor import Checkpoint, Logical, Piece
from gpt.config import GPTConfig, RopeScaling
from gpt.errors import ConfigError
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.parallel.sharding import parameters
from tests.support.checkpoints.mcore_dist import Loaded, Split, load_and_run
from tests.support.checkpoints.megatron_writer import DENSE, GATED, GROUPED, MIXED
from tests.support.checkpoints.plain_writer import write_plainly
from tests.support.models import ODD, lively
from tests.support.ranks import ranks

# Two correct fp32 implementations differ by rounding; a wrong layout differs by whole logits.
TOLERANCE = 1e-3

ALIKE = {"moe_layers": (True,) * 4}
ROTARY = ODD.with_fields(
    parallel_residual=False,
    position_embedding_type="rope",
    rope_scaling=RopeScaling("llama3", 8.0),
    untie_embeddings_and_output_weights=True,
)
UNBIASED = {"qkv_bias": False, "proj_bias": False, "mlp_bias": False}
SOME = MIXED.with_fields(**UNBIASED, moe_shared_expert_gate=False)
CONFIGS = {
    "learned positions, biases, tied": DENSE,
    "one layer": DENSE.with_fields(num_layers=1, moe_layers=()),
    "gated, grouped queries, query norms, untied": GATED,
    "one group, scaled positions": ROTARY,
    "experts": SOME.with_fields(**ALIKE),
    "experts in some layers": SOME,
    "experts with a bias for choosing, a gate": GROUPED.with_fields(**ALIKE),
}


def written(
    source: Checkpoint, folder: Path, division: Division | None = None, spec: Spec = "te"
) -> Layout:
    made = layout(source, division or Division(tp=2, pp=2), spec=spec)
    write_plainly(source, made, folder)
    return made


@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("case", CONFIGS)
def test_what_was_written_is_read_as_the_same_model(case: str, spec: Spec, tmp_path: Path) -> None:
    source = lively(CONFIGS[case])
    made = written(source, tmp_path, Division(tp=1), spec)
    assert unplaced(source, made) == []
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.format, checkpoint.path) == (made.format, tmp_path / made.folder)
    assert checkpoint.config == source.config
    assert checkpoint.notes == ()
    assert set(checkpoint.tensors) == set(source.tensors)
    for name in source.tensors:
        assert torch.equal(checkpoint.read(name), source.read(name)), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_keep_the_dtype_of_each(dtype: str, tmp_path: Path) -> None:
    """A bias for choosing experts stays in fp32."""
    source = lively(GROUPED.with_fields(**ALIKE)).in_dtype(getattr(torch, dtype))
    written(source, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == source.config
    for name, logical in source.tensors.items():
        assert checkpoint.tensors[name].dtype == logical.dtype, name
        assert torch.equal(checkpoint.read(name), source.read(name)), name


def test_layers_of_several_dtypes_share_one_that_holds_them_all(tmp_path: Path) -> None:
    source = lively(DENSE).in_dtype(torch.bfloat16)
    first = "decoder.layers.0.mlp.linear_fc2.weight"
    wide = replace(source.tensors[first], dtype=torch.float32)
    source = replace(source, tensors={**source.tensors, first: wide})
    written(source, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for layer in range(4):
        name = f"decoder.layers.{layer}.mlp.linear_fc2.weight"
        assert checkpoint.tensors[name].dtype == torch.float32
        assert torch.equal(checkpoint.read(name), source.read(name).float())


def by_torch(folder: Path) -> tuple[Metadata, dict[str, Any]]:
    """All that torch's own reader finds in a directory; no code of ours, and no ranks."""
    reader = FileSystemReader(folder)
    index = reader.read_metadata()
    record: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else [None]
        for key, entry in index.state_dict_metadata.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(record, storage_reader=reader, planner=planner, no_dist=True)
    return index, record


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_reads_whole_tensors_and_objects(tmp_path: Path) -> None:
    source = lively(SOME.with_fields(**ALIKE))
    written(source, tmp_path)
    _, found = by_torch(tmp_path / "release")

    def layers(leaf: str) -> Tensor:
        return torch.stack([source.read(f"decoder.layers.{n}.{leaf}") for n in range(4)])

    def experts(leaf: str) -> Tensor:
        every = [layers(f"mlp.experts.local_experts.{n}.{leaf}") for n in range(4)]
        return torch.stack(every, dim=1)

    tensors = {key: value for key, value in found.items() if isinstance(value, Tensor)}
    embedding = tensors.pop("embedding.word_embeddings.weight")
    assert torch.equal(embedding[:100], source.read("embedding.word_embeddings.weight"))
    assert embedding.shape == (256, 32)  # Padded for two tensor ranks, with zeros.
    assert not embedding[100:].any()
    norm = "decoder.final_layernorm"
    for name in (f"{norm}.weight", f"{norm}.bias"):
        assert torch.equal(tensors.pop(name), source.read(name))
    assert len(tensors) == 11
    for key, value in tensors.items():
        leaf = key.removeprefix("decoder.layers.")
        one = leaf.removeprefix("mlp.experts.experts.")
        assert torch.equal(value, layers(leaf) if one == leaf else experts(one)), key

    objects = {key: value for key, value in found.items() if not isinstance(value, Tensor)}
    (common,) = objects.pop("common_state/shard_0_1")
    beside = torch.load(tmp_path / "release" / "common.pt", weights_only=False)
    assert common == beside
    args: Namespace = common.pop("args")
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert args.padded_vocab_size == 256
    assert common == {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": False},
    }
    assert set(map(repr, objects.values())) == {"[None]"}


def states(made: Layout, folder: Path) -> set[str]:
    index, _ = by_torch(folder / made.folder)
    return {key for key in index.state_dict_metadata if "_extra_state" in key}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_module_that_asks_for_a_state_finds_one(tmp_path: Path) -> None:
    """Linears do in Megatron-Core's own layers; in Transformer Engine's all modules do."""
    linears = ("self_attention.linear_qkv", "self_attention.linear_proj")
    two = ("mlp.linear_fc1", "mlp.linear_fc2")
    local = {
        f"decoder.layers.{module}._extra_state/shard_{n}_4"
        for module in linears + two
        for n in range(4)
    }
    source = lively(DENSE)
    assert states(written(source, tmp_path / "local", spec="local"), tmp_path / "local") == local
    more = {
        f"decoder.layers.self_attention.core_attention._extra_state/shard_{n}_4" for n in range(4)
    }
    more.add("decoder.final_layernorm._extra_state/shard_0_1")
    assert states(written(source, tmp_path / "te"), tmp_path / "te") == local | more


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_that_are_not_alike_have_keys_of_their_own(tmp_path: Path) -> None:
    source = lively(SOME)
    made = written(source, tmp_path)
    index, found = by_torch(tmp_path / "release")
    assert found["decoder.layers.1.mlp.linear_fc1.weight"].shape == (256, 32)
    fc1 = "decoder.layers.2.mlp.experts.experts.linear_fc1"
    assert found[f"{fc1}.weight"].shape == (4, 48, 32)
    entry = index.state_dict_metadata[f"{fc1}.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    assert [tuple(chunk.sizes) for chunk in entry.chunks] == [(1, 48, 32)] * 4
    assert {f"{fc1}._extra_state/shard_{n}_4" for n in range(4)} < states(made, tmp_path)
    (common,) = found["common_state/shard_0_1"]
    assert common["content_metadata"]["non_homogeneous_layers"]
    assert "decoder.layers.2.pre_mlp_layernorm.weight" in found
    assert "--megatron-spec local" in made.notes[-1]
    written(source, tmp_path / "local", spec="local")
    _, found = by_torch(tmp_path / "local" / "release")
    assert "decoder.layers.2.mlp.linear_fc1.layer_norm_weight" in found
    assert "decoder.layers.2.pre_mlp_layernorm.weight" not in found


@dataclass(frozen=True)
class Unread:
    """A stored tensor that may not be touched."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    where: str = "nowhere"

    def tensor(self) -> Tensor:
        raise AssertionError("a weight was read")


def unread(config: GPTConfig) -> Checkpoint:
    table = parameters(config)
    tensors = {
        name: Logical(
            known.shape, torch.bfloat16, (Piece(Unread(known.shape), (0, known.shape[0])),)
        )
        for name, known in table.items()
    }
    return Checkpoint(Path("nowhere"), "memory", config, tensors)


LARGE = GPTConfig(
    num_layers=16,
    hidden_size=2048,
    num_attention_heads=16,
    vocab_size=50257,
    max_position_embeddings=2048,
)


def test_files_are_planned_without_a_weight_and_shared_out(tmp_path: Path) -> None:
    source = unread(LARGE)
    made = layout(source, Division())
    shards = [file for file in made.files if file.path.endswith(".distcp")]
    assert [file.path for file in shards] == [f"release/__0_{n}.distcp" for n in range(len(shards))]
    largest = 50304 * 2048 * 2
    assert 16 <= len(shards) <= 40
    assert all(file.size < max(SHARED_BYTES, largest) + 4096 for file in shards)
    for file in shards:
        spans = [(text.offset, len(text.content)) for text in file.texts]
        shapes = [place.part.shape(source.tensors[place.name].shape) for place in file.placements]
        assert all(place.offset % 64 == 0 for place in file.placements)
        spans += [
            (place.offset, 2 * torch.Size(shape).numel())
            for place, shape in zip(file.placements, shapes, strict=True)
        ]
        end = 0
        for offset, size in sorted(spans):  # Each byte is said once.
            assert offset == end, file.path
            end += size
        assert end == file.size
    few = layout(source, Division(), file_bytes_max=1)
    assert len(few.files) == len(source.tensors) + 4  # Objects, the index and common.pt.


def test_small_models_have_one_file() -> None:
    made = layout(lively(DENSE), Division())
    paths = ["release/__0_0.distcp", "release/.metadata", "release/common.pt"]
    assert [file.path for file in made.files] == paths
    last = ["release/metadata.json", "latest_checkpointed_iteration.txt"]
    assert [file.path for file in made.last] == last


def test_the_same_model_gives_the_same_bytes_whatever_the_order_of_its_tensors() -> None:
    source = lively(SOME)
    turned = replace(source, tensors=dict(reversed(list(source.tensors.items()))))
    assert layout(turned, Division(tp=2)) == layout(source, Division(tp=2))


@pytest.mark.parametrize(
    ("division", "says"),
    [
        (Division(tp=3), "tensor parallel 3 does not divide the model"),
        (Division(ep=3), "expert parallel 3 does not divide the model; --ep can be 1, 2, 4"),
        (Division(pp=5), "leaves stages without a layer"),
    ],
)
def test_a_split_that_the_model_cannot_have_is_refused(division: Division, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        layout(lively(SOME), division)


MCORE: dict[str, tuple[GPTConfig, list[Split]]] = {
    "learned positions, biases, tied": (DENSE, [(1, 1, 1), (2, 2, 1), (2, 1, 1)]),
    "gated, grouped queries, query norms, untied": (GATED, [(1, 1, 1), (2, 2, 1), (4, 1, 1)]),
    "experts": (SOME.with_fields(**ALIKE), [(1, 2, 1), (2, 1, 2)]),
    "experts in some layers, with a bias for choosing, a gate": (
        GROUPED,
        [(1, 2, 2)],
    ),
}


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Loaded]]:
    """What Megatron-Core makes of each; in one go, as it takes its time to be imported."""
    folders = []
    for config, _ in MCORE.values():
        root = tmp_path_factory.mktemp("written")
        written(lively(config), root, Division(tp=2), spec="local")
        folders.append(root / "release")
    splits = [splits for _, splits in MCORE.values()]
    answers = ranks(4, load_and_run, folders, splits, timeout_s=120.0)[-1]
    return dict(zip(MCORE, answers, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("megatron") is None and not os.environ.get("CI"),
    reason="megatron-core, the oracle, is absent; `make tools` installs it",
)
@pytest.mark.parametrize("case", MCORE)
def test_megatron_core_loads_it_at_any_split_and_computes_the_same(
    case: str, megatron: dict[str, list[Loaded]]
) -> None:
    """Its own strict loading, of a model built from the arguments alone."""
    config, splits = MCORE[case]
    model = load_model(lively(config), Mesh.single())
    for split, answer in zip(splits, megatron[case], strict=True):
        assert answer.unexpected == set(), split
        assert answer.missing == {"common_state"}  # Of later versions; this one reads common.pt.
        ours = model.logits(answer.ids)
        theirs = answer.logits[..., : ours.shape[-1]]
        assert ours.std() >= 5
        assert (ours - theirs).abs().max() <= TOLERANCE, split
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1)), split
