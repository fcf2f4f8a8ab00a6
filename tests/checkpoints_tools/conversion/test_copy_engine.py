"""The copy engine, compared with a slow reference that builds each file in memory."""

import threading
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gpt.checkpoint.logical_tensor
from checkpoints_tools.conversion.copy_engine import CopyResult, MemoryBudget, copy_tensors
from checkpoints_tools.conversion.journal import Journal
from checkpoints_tools.layout.layout import Layout, ParallelSplit
from checkpoints_tools.writers.registry import ConversionOptions, plan_target
from gpt.checkpoint.logical_tensor import Checkpoint, SourceSlice, checkpoint_from_tensors
from tests.support.checkpoints.plain_writer import write_plainly
from tests.support.models import CLASSIC, EXPERTS, MODERN, lively
from tests.support.servers import WAIT_S, eventually

MIXTURE = EXPERTS.with_fields(
    num_experts=4,
    gated=True,
    activation="silu",
    moe_layers=(True,) * 4,
    proj_bias=False,
    mlp_bias=False,
    moe_shared_expert_gate=False,
    moe_shared_expert_intermediate_size=0,
    normalization="RMSNorm",
)
PLAIN = MODERN.with_fields(qkv_bias=False, window_size=None, rotary_percent=1.0)
CASES = {
    "native": (CLASSIC, ConversionOptions()),
    "native in shards": (MODERN, ConversionOptions(shard_bytes_max=20000)),
    "native, another dtype": (EXPERTS, ConversionOptions(dtype="bfloat16")),
    "megatron, tied, stages": (
        CLASSIC,
        ConversionOptions("megatron", split=ParallelSplit(2, 2, 2)),
    ),
    "megatron, experts": (
        MIXTURE,
        ConversionOptions("megatron", split=ParallelSplit(2, 2, ep=2)),
    ),
    "torch_dist": (MIXTURE, ConversionOptions("megatron-dist", split=ParallelSplit(4))),
    "hf, turned": (CLASSIC, ConversionOptions("hf")),
    "hf, apart": (PLAIN, ConversionOptions("hf", dtype="float16")),
}


def write(
    checkpoint: Checkpoint, layout: Layout, folder: Path, workers: int = 2, memory: int = 1 << 30
) -> CopyResult:
    folder.mkdir()
    with Journal(folder.with_suffix(".journal"), "plan") as journal:
        return copy_tensors(
            checkpoint,
            layout,
            folder,
            journal,
            workers=workers,
            memory_bytes=memory,
            report_progress=lambda _: None,
            check_tensor=lambda _: None,
        )


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that small tensors need several."""
    monkeypatch.setattr(gpt.checkpoint.logical_tensor, "BLOCK_BYTES", 600)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("case", CASES)
def test_files_match_the_slow_reference(case: str, tmp_path: Path) -> None:
    config, options = CASES[case]
    source = lively(config)
    converted = source if options.dtype is None else source.in_dtype(getattr(torch, options.dtype))
    layout = plan_target(converted, options)
    copied = write(source, layout, tmp_path / "ours", workers=3, memory=4000)
    write_plainly(source, replace(layout, last_files=()), tmp_path / "plain")
    names = {path.relative_to(tmp_path / "plain") for path in (tmp_path / "plain").rglob("*.*")}
    assert len(names) == len(layout.files)
    for name in names:
        content = (tmp_path / "ours" / name).read_bytes()
        assert content == (tmp_path / "plain" / name).read_bytes(), name
        assert copied.file_crcs[name.as_posix()] == zlib.crc32(content), name


def test_hashes_do_not_depend_on_the_target(tmp_path: Path) -> None:
    source = lively(CLASSIC)
    option_sets = [
        ConversionOptions(),
        ConversionOptions("hf"),
        ConversionOptions("megatron", split=ParallelSplit(2, 2)),
    ]
    hashes = [
        write(source, plan_target(source, options), tmp_path / str(number)).source_hashes
        for number, options in enumerate(option_sets)
    ]
    assert hashes[0] == hashes[1] == hashes[2]


def test_nan_and_infinity_are_reported(tmp_path: Path) -> None:
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    source = lively(CLASSIC)
    tensors = {name: source.read(name) for name in source.tensors}
    tensors[name][5, 7] = float("-inf")
    damaged = checkpoint_from_tensors(CLASSIC, tensors)
    copied = write(damaged, plan_target(damaged, ConversionOptions()), tmp_path / "m")
    assert copied.nonfinite_tensors == (name,)


class FailingTensor:
    """A stored tensor that raises an I/O error when it is read."""

    shape = (32,)
    dtype = torch.float32
    location = "a bad disk"

    def tensor(self) -> Tensor:
        raise OSError(5, "Input/output error")


def test_one_failure_stops_all_workers(tmp_path: Path) -> None:
    source = lively(CLASSIC)
    name = "decoder.layers.2.self_attention.linear_proj.bias"
    failing_tensor = replace(source.tensors[name], slices=(SourceSlice(FailingTensor(), (0, 32)),))
    threads_before = threading.active_count()
    with pytest.raises(OSError, match="Input/output error"):
        write(
            replace(source, tensors={**source.tensors, name: failing_tensor}),
            plan_target(source, ConversionOptions()),
            tmp_path / "m",
        )
    eventually(lambda: threading.active_count() <= threads_before)


def test_memory_budget_admits_one_reservation_larger_than_the_limit() -> None:
    budget = MemoryBudget(100)
    order: list[str] = []
    with budget.reserve(60):
        waiting = threading.Thread(target=lambda: wait_and_record(budget, 1000, order))
        waiting.start()
        with budget.reserve(40):
            order.append("small")
        assert order == ["small"]
    waiting.join(WAIT_S)
    assert order == ["small", "large"] and budget.free_bytes == 100


def wait_and_record(budget: MemoryBudget, size: int, order: list[str]) -> None:
    with budget.reserve(size):
        order.append("large")
