"""The loop that streams, beside its slow twin that makes each file whole in memory."""

import threading
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gpt.checkpoint.logical_tensor
from checkpoints_tools.conversion.copy_engine import Budget, Copied, copy
from checkpoints_tools.conversion.journal import Journal
from checkpoints_tools.layout.layout import Division, Layout
from checkpoints_tools.writers.registry import Wish, lay_out
from gpt.checkpoint.logical_tensor import Checkpoint, Piece, in_memory
from tests.support.checkpoints.plain_writer import write_plainly
from tests.support.models import CLASSIC, EXPERTS, MODERN, lively

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
WAYS = {
    "native": (CLASSIC, Wish()),
    "native in shards": (MODERN, Wish(shard_bytes_max=20000)),
    "native, another dtype": (EXPERTS, Wish(dtype="bfloat16")),
    "megatron, tied, stages": (CLASSIC, Wish("megatron", division=Division(2, 2, 2))),
    "megatron, experts": (MIXTURE, Wish("megatron", division=Division(2, 2, ep=2))),
    "torch_dist": (MIXTURE, Wish("megatron-dist", division=Division(4))),
    "hf, turned": (CLASSIC, Wish("hf")),
    "hf, apart": (PLAIN, Wish("hf", dtype="float16")),
}


def write(
    checkpoint: Checkpoint, layout: Layout, folder: Path, workers: int = 2, memory: int = 1 << 30
) -> Copied:
    folder.mkdir()
    with Journal(folder.with_suffix(".journal"), "plan") as journal:
        return copy(
            *(checkpoint, layout, folder, journal),
            workers=workers,
            memory=memory,
            report=lambda _: None,
            found=lambda _: None,
        )


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors take many."""
    monkeypatch.setattr(gpt.checkpoint.logical_tensor, "BLOCK_BYTES", 600)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("way", WAYS)
def test_every_file_is_what_the_slow_twin_makes(way: str, tmp_path: Path) -> None:
    config, wish = WAYS[way]
    source = lively(config)
    made = source if wish.dtype is None else source.in_dtype(getattr(torch, wish.dtype))
    layout = lay_out(made, wish)
    copied = write(source, layout, tmp_path / "ours", workers=3, memory=4000)
    write_plainly(source, replace(layout, last=()), tmp_path / "plain")
    names = {path.relative_to(tmp_path / "plain") for path in (tmp_path / "plain").rglob("*.*")}
    assert len(names) == len(layout.files)
    for name in names:
        content = (tmp_path / "ours" / name).read_bytes()
        assert content == (tmp_path / "plain" / name).read_bytes(), name
        assert copied.crcs[name.as_posix()] == zlib.crc32(content), name


def test_hashes_do_not_depend_on_the_target(tmp_path: Path) -> None:
    source = lively(CLASSIC)
    wishes = [Wish(), Wish("hf"), Wish("megatron", division=Division(2, 2))]
    hashes = [
        write(source, lay_out(source, wish), tmp_path / str(number)).hashes
        for number, wish in enumerate(wishes)
    ]
    assert hashes[0] == hashes[1] == hashes[2]


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    source = lively(CLASSIC)
    tensors = {name: source.read(name) for name in source.tensors}
    tensors[name][5, 7] = float("-inf")
    spoiled = in_memory(CLASSIC, tensors)
    copied = write(spoiled, lay_out(spoiled, Wish()), tmp_path / "m")
    assert copied.not_finite == (name,)


class Failing:
    """A stored tensor whose disk fails when it is read."""

    shape, dtype, where = (32,), torch.float32, "a bad disk"

    def tensor(self) -> Tensor:
        raise OSError(5, "Input/output error")


def test_one_failure_ends_all_workers(tmp_path: Path) -> None:
    source = lively(CLASSIC)
    name = "decoder.layers.2.self_attention.linear_proj.bias"
    broken = replace(source.tensors[name], pieces=(Piece(Failing(), (0, 32)),))
    before = threading.active_count()
    with pytest.raises(OSError, match="Input/output error"):
        write(
            replace(source, tensors={**source.tensors, name: broken}),
            lay_out(source, Wish()),
            tmp_path / "m",
        )
    assert threading.active_count() <= before


def test_a_budget_lets_one_through_that_is_larger_than_all() -> None:
    budget = Budget(100)
    order: list[str] = []
    with budget.hold(60):
        waiting = threading.Thread(target=lambda: wait_and_note(budget, 1000, order))
        waiting.start()
        with budget.hold(40):
            order.append("small")
        assert order == ["small"]
    waiting.join(5)
    assert order == ["small", "large"] and budget.free == 100


def wait_and_note(budget: Budget, size: int, order: list[str]) -> None:
    with budget.hold(size):
        order.append("large")
