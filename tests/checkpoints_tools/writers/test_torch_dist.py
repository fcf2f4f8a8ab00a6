"""torch_dist checkpoints that we write: our reader, torch and Megatron-Core read the same model."""

import os
from argparse import Namespace
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from checkpoints_tools.layout.layout import Layout, ParallelSplit, unplaced_tensors
from checkpoints_tools.writers.megatron_args import LayerSpec
from checkpoints_tools.writers.torch_dist import FILE_BYTES_MIN, plan_layout
from gpt.checkpoint.logical_tensor import Checkpoint, LogicalTensor, SourceSlice
from gpt.config import GPTConfig, RopeScaling
from gpt.errors import ConfigError
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.parallel.weight_sharding import parameter_specs
from tests.support.checkpoints.distcp_reader import load_with_torch
from tests.support.checkpoints.mcore_dist import Loaded, Split, load_and_run
from tests.support.checkpoints.megatron_writer import DENSE, GATED, GROUPED, MIXED
from tests.support.checkpoints.plain_writer import write_plainly
from tests.support.models import ODD, SINKS, lively
from tests.support.ranks import ranks

# Two correct fp32 implementations differ by rounding, by at most 2e-5 in these models; a wrong
# layout differs by whole logits.
TOLERANCE = 5e-5

ALL_MOE = {"moe_layers": (True,) * 4}
ROTARY = ODD.with_fields(
    parallel_residual=False,
    position_embedding_type="rope",
    rope_scaling=RopeScaling("llama3", 8.0),
    untie_embeddings_and_output_weights=True,
)
UNBIASED = {"qkv_bias": False, "proj_bias": False, "mlp_bias": False}
MIXED_WITHOUT_BIAS = MIXED.with_fields(**UNBIASED, moe_shared_expert_gate=False)
CONFIGS = {
    "learned positions, biases, tied": DENSE,
    "one layer": DENSE.with_fields(num_layers=1, moe_layers=()),
    "gated, grouped queries, query norms, untied": GATED,
    "one group, scaled positions": ROTARY,
    "sinks, experts with biases": SINKS.with_fields(rope_scaling=None),
    "experts": MIXED_WITHOUT_BIAS.with_fields(**ALL_MOE),
    "experts in some layers": MIXED_WITHOUT_BIAS,
    "experts with a bias for choosing, a gate": GROUPED.with_fields(**ALL_MOE),
}


def write_layout(
    source: Checkpoint, folder: Path, split: ParallelSplit | None = None, spec: LayerSpec = "te"
) -> Layout:
    layout = plan_layout(source, split or ParallelSplit(tp=2, pp=2), spec=spec)
    write_plainly(source, layout, folder)
    return layout


@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("case", CONFIGS)
def test_our_reader_finds_the_same_model(case: str, spec: LayerSpec, tmp_path: Path) -> None:
    source = lively(CONFIGS[case])
    layout = write_layout(source, tmp_path, ParallelSplit(tp=1), spec)
    assert unplaced_tensors(source, layout) == []
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.format, checkpoint.path) == (layout.format, tmp_path / layout.folder)
    assert checkpoint.config == source.config
    assert checkpoint.notes == ()
    assert set(checkpoint.tensors) == set(source.tensors)
    for name in source.tensors:
        assert torch.equal(checkpoint.read(name), source.read(name)), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_keep_their_dtypes(dtype: str, tmp_path: Path) -> None:
    """The router's expert bias stays in fp32."""
    source = lively(GROUPED.with_fields(**ALL_MOE)).in_dtype(getattr(torch, dtype))
    write_layout(source, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == source.config
    for name, logical in source.tensors.items():
        assert checkpoint.tensors[name].dtype == logical.dtype, name
        assert torch.equal(checkpoint.read(name), source.read(name)), name


def test_layers_of_mixed_dtypes_share_the_widest(tmp_path: Path) -> None:
    source = lively(DENSE).in_dtype(torch.bfloat16)
    first_weight = "decoder.layers.0.mlp.linear_fc2.weight"
    fp32_tensor = replace(source.tensors[first_weight], dtype=torch.float32)
    source = replace(source, tensors={**source.tensors, first_weight: fp32_tensor})
    write_layout(source, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for layer in range(4):
        name = f"decoder.layers.{layer}.mlp.linear_fc2.weight"
        assert checkpoint.tensors[name].dtype == torch.float32
        assert torch.equal(checkpoint.read(name), source.read(name).float())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_reads_unsharded_tensors_and_objects(tmp_path: Path) -> None:
    source = lively(MIXED_WITHOUT_BIAS.with_fields(**ALL_MOE))
    write_layout(source, tmp_path)
    _, loaded = load_with_torch(tmp_path / "release")

    def layers(leaf: str) -> Tensor:
        return torch.stack([source.read(f"decoder.layers.{n}.{leaf}") for n in range(4)])

    def experts(leaf: str) -> Tensor:
        stacked_experts = [layers(f"mlp.experts.local_experts.{n}.{leaf}") for n in range(4)]
        return torch.stack(stacked_experts, dim=1)

    tensors = {key: value for key, value in loaded.items() if isinstance(value, Tensor)}
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
        expert_name = leaf.removeprefix("mlp.experts.experts.")
        assert torch.equal(value, layers(leaf) if expert_name == leaf else experts(expert_name)), (
            key
        )

    objects = {key: value for key, value in loaded.items() if not isinstance(value, Tensor)}
    (common,) = objects.pop("common_state/shard_0_1")
    common_objects = torch.load(tmp_path / "release" / "common.pt", weights_only=False)
    assert common == common_objects
    args: Namespace = common.pop("args")
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert args.padded_vocab_size == 256
    assert common == {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": False},
    }
    assert set(map(repr, objects.values())) == {"[None]"}


def extra_state_keys(layout: Layout, folder: Path) -> set[str]:
    index, _ = load_with_torch(folder / layout.folder)
    return {key for key in index.state_dict_metadata if "_extra_state" in key}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_module_finds_its_extra_state(tmp_path: Path) -> None:
    """Linear modules need one with the local spec; all modules do with Transformer Engine."""
    linears = ("self_attention.linear_qkv", "self_attention.linear_proj")
    two = ("mlp.linear_fc1", "mlp.linear_fc2")
    local = {
        f"decoder.layers.{module}._extra_state/shard_{n}_4"
        for module in linears + two
        for n in range(4)
    }
    source = lively(DENSE)
    assert (
        extra_state_keys(write_layout(source, tmp_path / "local", spec="local"), tmp_path / "local")
        == local
    )
    all_modules = {
        f"decoder.layers.self_attention.core_attention._extra_state/shard_{n}_4" for n in range(4)
    }
    all_modules.add("decoder.final_layernorm._extra_state/shard_0_1")
    assert (
        extra_state_keys(write_layout(source, tmp_path / "te"), tmp_path / "te")
        == local | all_modules
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_mixed_layers_have_keys_per_layer(tmp_path: Path) -> None:
    source = lively(MIXED_WITHOUT_BIAS)
    layout = write_layout(source, tmp_path)
    index, loaded = load_with_torch(tmp_path / "release")
    assert loaded["decoder.layers.1.mlp.linear_fc1.weight"].shape == (256, 32)
    fc1 = "decoder.layers.2.mlp.experts.experts.linear_fc1"
    assert loaded[f"{fc1}.weight"].shape == (4, 48, 32)
    entry = index.state_dict_metadata[f"{fc1}.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    assert [tuple(chunk.sizes) for chunk in entry.chunks] == [(1, 48, 32)] * 4
    assert {f"{fc1}._extra_state/shard_{n}_4" for n in range(4)} < extra_state_keys(
        layout, tmp_path
    )
    (common,) = loaded["common_state/shard_0_1"]
    assert common["content_metadata"]["non_homogeneous_layers"]
    assert "decoder.layers.2.pre_mlp_layernorm.weight" in loaded
    assert "--megatron-spec local" in layout.notes[-1]
    write_layout(source, tmp_path / "local", spec="local")
    _, loaded = load_with_torch(tmp_path / "local" / "release")
    assert "decoder.layers.2.mlp.linear_fc1.layer_norm_weight" in loaded
    assert "decoder.layers.2.pre_mlp_layernorm.weight" not in loaded


@dataclass(frozen=True)
class UnreadableTensor:
    """A stored tensor that fails if it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    location: str = "nowhere"

    def tensor(self) -> Tensor:
        raise AssertionError("a weight was read")


def unreadable_checkpoint(config: GPTConfig) -> Checkpoint:
    table = parameter_specs(config)
    tensors = {
        name: LogicalTensor(
            tensor.shape,
            torch.bfloat16,
            (SourceSlice(UnreadableTensor(tensor.shape), (0, tensor.shape[0])),),
        )
        for name, tensor in table.items()
    }
    return Checkpoint(Path("nowhere"), "memory", config, tensors)


LARGE = GPTConfig(
    num_layers=16,
    hidden_size=2048,
    num_attention_heads=16,
    vocab_size=50257,
    max_position_embeddings=2048,
)


def test_chunks_are_distributed_over_files_without_reading_weights(tmp_path: Path) -> None:
    source = unreadable_checkpoint(LARGE)
    layout = plan_layout(source, ParallelSplit())
    shards = [file for file in layout.files if file.path.endswith(".distcp")]
    assert [file.path for file in shards] == [f"release/__0_{n}.distcp" for n in range(len(shards))]
    largest = 50304 * 2048 * 2
    assert 16 <= len(shards) <= 40
    assert all(file.size < max(FILE_BYTES_MIN, largest) + 4096 for file in shards)
    for file in shards:
        spans = [(text.offset, len(text.content)) for text in file.literals]
        shapes = [
            placement.part.local_shape(source.tensors[placement.name].shape)
            for placement in file.placements
        ]
        assert all(placement.offset % 64 == 0 for placement in file.placements)
        spans += [
            (placement.offset, 2 * torch.Size(shape).numel())
            for placement, shape in zip(file.placements, shapes, strict=True)
        ]
        end = 0
        for offset, size in sorted(spans):  # Each byte is covered once.
            assert offset == end, file.path
            end += size
        assert end == file.size
    single_tensor_files = plan_layout(source, ParallelSplit(), file_bytes_max=1)
    assert (
        len(single_tensor_files.files) == len(source.tensors) + 4
    )  # Objects, the index, common.pt.


def test_small_models_have_one_file() -> None:
    layout = plan_layout(lively(DENSE), ParallelSplit())
    paths = ["release/__0_0.distcp", "release/.metadata", "release/common.pt"]
    assert [file.path for file in layout.files] == paths
    last_files = ["release/metadata.json", "latest_checkpointed_iteration.txt"]
    assert [file.path for file in layout.last_files] == last_files


def test_bytes_do_not_depend_on_the_tensor_order() -> None:
    source = lively(MIXED_WITHOUT_BIAS)
    reversed_source = replace(source, tensors=dict(reversed(list(source.tensors.items()))))
    assert plan_layout(reversed_source, ParallelSplit(tp=2)) == plan_layout(
        source, ParallelSplit(tp=2)
    )


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (ParallelSplit(tp=3), "tensor parallel 3 does not divide the model"),
        (
            ParallelSplit(ep=3),
            "expert parallel 3 is not possible for this model; --ep can be 1, 2, 4",
        ),
        (ParallelSplit(pp=5), "is more than the number of layers"),
    ],
)
def test_impossible_split_is_refused(split: ParallelSplit, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_layout(lively(MIXED_WITHOUT_BIAS), split)


MCORE: dict[str, tuple[GPTConfig, list[Split]]] = {
    "learned positions, biases, tied": (DENSE, [(1, 1, 1), (2, 2, 1), (2, 1, 1)]),
    "gated, grouped queries, query norms, untied": (GATED, [(1, 1, 1), (2, 2, 1), (4, 1, 1)]),
    "experts": (MIXED_WITHOUT_BIAS.with_fields(**ALL_MOE), [(1, 2, 1), (2, 1, 2)]),
    "experts in some layers, with a bias for choosing, a gate": (
        GROUPED,
        [(1, 2, 2)],
    ),
}


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Loaded]]:
    """Megatron-Core's results for all cases in one process, as its import is slow."""
    folders = []
    for config, _ in MCORE.values():
        root = tmp_path_factory.mktemp("written")
        write_layout(lively(config), root, ParallelSplit(tp=2), spec="local")
        folders.append(root / "release")
    splits = [splits for _, splits in MCORE.values()]
    results = ranks(4, load_and_run, folders, splits, timeout_s=120.0)[-1]
    return dict(zip(MCORE, results, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("megatron") is None and not os.environ.get("CI"),
    reason="megatron-core, the oracle, is absent; `make tools` installs it",
)
@pytest.mark.parametrize("case", MCORE)
def test_megatron_core_loads_it_at_any_split_with_the_same_logits(
    case: str, megatron: dict[str, list[Loaded]]
) -> None:
    """Uses Megatron-Core's strict loading into a model built from the saved args alone."""
    config, splits = MCORE[case]
    model = load_model(lively(config), Mesh.single())
    for split, result_ in zip(splits, megatron[case], strict=True):
        assert result_.unexpected == set(), split
        assert result_.missing == {"common_state"}  # Of later versions; this one reads common.pt.
        logits = model.logits(result_.ids)
        megatron_logits = result_.logits[..., : logits.shape[-1]]
        assert logits.std() >= 5
        assert (logits - megatron_logits).abs().max() <= TOLERANCE, split
        assert torch.equal(logits.argmax(-1), megatron_logits.argmax(-1)), split
