"""The bench of learning runs on a model of a moment; both of its sides are the same training."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.harness.model_shapes import GPT2
from bench.harness.targets import Row
from bench.peers import prompt_tuning
from bench.peers.peft_process import SIDES

NETWORK: dict[str, float | None] = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 64,
    "n_positions": 64,
}
EVEN = prompt_tuning.Case("20", "4 x 12 tokens", 3, 12, 12)
MIXED = prompt_tuning.Case("mixed", "4 x 4-16 tokens", 5, 4, 16)
SIZES = prompt_tuning.Sizes(
    cases=(EVEN, MIXED),
    batch=4,
    answer=2,
    rounds=2,
    steps=2,
    mixed_steps=2,
    memory_steps=1,
    losses_steps=3,
    threads=1,
    vocabulary=64,
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_both_sides_learn_the_same_from_the_same_batches(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = GPT2.random("float32", **prompt_tuning.NO_DROPOUT | NETWORK)
    model.save_pretrained(tmp_path)
    batches = prompt_tuning.drawn(random.Random(0), MIXED, SIZES, 4)
    curves = []
    for name in ("ours", "peft"):
        side = SIDES[name](str(tmp_path), "float32")
        # A second start finds nothing of the first.
        for virtual in (2, MIXED.virtual):
            side.begin(virtual)
            curve = [side.step(batch, SIZES.answer) for batch in batches]
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], abs=2e-5)
    assert len(set(curves[0])) == len(batches)


def test_grouped_batches_are_alike_within_and_not_among_each_other() -> None:
    batches = prompt_tuning.grouped(random.Random(0), MIXED, SIZES, 10)
    assert all(len(batch) == SIZES.batch for batch in batches)
    assert all(max(map(len, batch)) - min(map(len, batch)) <= 1 for batch in batches)
    assert len({len(batch[0]) for batch in batches}) >= 6


@pytest.mark.slow
def test_each_case_of_the_tuning_bench_gives_a_row_of_speed_memory_and_losses() -> None:
    pytest.importorskip("peft")
    told = list(prompt_tuning.lines((), SIZES, **NETWORK))
    rows = [item for item in told if isinstance(item, Row)]
    assert [row.promise.name.removeprefix("tuning/") for row in rows] == [
        *("speed-20", "speed-mixed", "memory-20", "memory-mixed", "loss-20", "loss-mixed")
    ]
    assert all(len(row.samples["ours"]) == SIZES.rounds for row in rows[:2])
    assert all("MiB" in row.told for row in rows[2:4])
    assert all(row.value < 2e-5 for row in rows[4:])
