"""Checkpoints in a real object store: equal weights, and each rank fetches its own bytes."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoints_tools.conversion.convert import write_native
from gpt.checkpoint.digest import identify
from gpt.checkpoint.files import ranged_tensor
from gpt.checkpoint.files.object_checkpoint import open_object_checkpoint
from gpt.checkpoint.files.ranged_tensor import RangedTensor
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import CheckpointError
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load_model
from gpt.object_store.object_store import ObjectStore
from gpt.parallel.mesh import Mesh
from gpt.parallel.weight_sharding import RankInStage, ShardRule, parameter_specs
from tests.support.checkpoints.hf_models import model_of
from tests.support.checkpoints.quantized_writer import (
    quantize_fp8,
    read_weights,
    write_weights,
)
from tests.support.models import lively
from tests.support.object_store import BUCKET, RunningStore, put_folder, running_store
from tests.support.servers import CONFIG

pytestmark = pytest.mark.slow  # The store starts in seconds.


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    with running_store(tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fetched_bytes(checkpoint: Checkpoint) -> int:
    files = {
        id(piece.source.file): piece.source.file
        for logical in checkpoint.tensors.values()
        for piece in logical.slices
        if isinstance(piece.source, RangedTensor)
    }
    return sum(file.fetched_bytes for file in files.values())


def quantize(folder: Path) -> None:
    """Quantize the linears of a saved checkpoint to FP8, in blocks."""
    tensors: dict[str, torch.Tensor] = {}
    for key, weight in read_weights(folder).items():
        tensors[key] = weight.bfloat16()
        if key.endswith("_proj.weight"):
            tensors[key], scales = quantize_fp8(weight, (32, 20), power_of_two=False)
            tensors[f"{key}_scale_inv"] = scales.float()
    section = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 20],
        "modules_to_not_convert": ["lm_head"],
    }
    write_weights(folder, tensors, section, "bfloat16")


@pytest.mark.parametrize("case", ["native", "gpt2", "mixtral", "gpt_oss", "fp8"])
def test_all_weights_equal_those_of_the_files(
    case: str, tmp_path: Path, running: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    if case == "native":
        write_native(lively(CONFIG), folder, tokenizer=None)
    else:
        model_of("llama, multi-head" if case == "fp8" else case).save_pretrained(
            folder, max_shard_size="60KB"
        )
        if case == "fp8":
            quantize(folder)
    monkeypatch.setattr(ranged_tensor, "READ_BYTES", 4000)  # Many requests for each tensor.
    url = f"s3://{BUCKET}/models/{case}"
    put_folder(folder, url)
    local, remote = open_checkpoint(folder), open_checkpoint(url)
    assert remote.path.name == case
    for name, parameter in parameter_specs(local.config).items():
        assert torch.equal(remote.read(name), local.read(name)), name
        for tp, rank in ((2, 0), (2, 1)):
            shard = RankInStage(rank, tp).shard(parameter, local.config)
            assert torch.equal(remote.read(name, shard), local.read(name, shard)), name
    assert identify(remote).digest == identify(local).digest
    # A second process opens the same local folder.
    assert open_object_checkpoint(url) == remote.path


def test_each_rank_fetches_its_own_bytes(tmp_path: Path, running: RunningStore) -> None:
    folder = tmp_path / "model"
    write_native(lively(CONFIG), folder, tokenizer=None)
    url = f"s3://{BUCKET}/models/shards"
    put_folder(folder, url)
    total = sum(path.stat().st_size for path in folder.glob("model-*.safetensors"))
    weight_bytes = sum(logical.nbytes for logical in open_checkpoint(folder).tensors.values())
    column_bytes = 0  # Of weights whose rows are fetched by both ranks.
    replicated_bytes = 0
    for parameter in parameter_specs(CONFIG).values():
        nbytes = 4 * math.prod(parameter.shape)
        column_bytes += nbytes if parameter.shard_rule == ShardRule.COLUMNS else 0
        replicated_bytes += nbytes if parameter.shard_rule == ShardRule.REPLICATED else 0
    counts: list[int] = []
    for rank in range(2):
        checkpoint = open_checkpoint(url)
        for name, parameter in parameter_specs(CONFIG).items():
            checkpoint.read(name, RankInStage(rank, 2).shard(parameter, CONFIG))
        counts.append(fetched_bytes(checkpoint))
    row_bytes = weight_bytes - column_bytes - replicated_bytes
    assert counts == [weight_bytes - row_bytes // 2] * 2
    assert max(counts) < 0.75 * total
    # The local folder has headers only.
    (cached,) = {path.parent for path in checkpoint.files}
    assert sum(path.stat().st_blocks * 512 for path in cached.rglob("*")) < total / 2


def test_a_replaced_object_ends_a_load(tmp_path: Path, running: RunningStore) -> None:
    folder = tmp_path / "model"
    write_native(lively(CONFIG), folder, tokenizer=None)
    url = f"s3://{BUCKET}/models/replaced"
    store = put_folder(folder, url)
    checkpoint = open_checkpoint(url)
    (name,) = [path.name for path in folder.glob("model-*.safetensors")]
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    store.write(name, bytes(content))
    with pytest.raises(CheckpointError, match="was replaced while it was read"):
        load_model(checkpoint, Mesh.single(torch.device("cpu")))
    # A new process reads the new object.
    assert open_checkpoint(url).path != checkpoint.path


def test_a_prefix_without_safetensors_is_refused(running: RunningStore) -> None:
    ObjectStore(f"s3://{BUCKET}/models/megatron").write("latest_checkpointed_iteration.txt", b"1")
    with pytest.raises(CheckpointError, match=r"has no model\*\.safetensors"):
        open_checkpoint(f"s3://{BUCKET}/models/megatron")
    store = ObjectStore(f"s3://{BUCKET}/models/broken")
    store.write("model.safetensors", b"\xff" * 100)
    store.write("config.json", b'{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(str(store.url))
