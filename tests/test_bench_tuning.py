"""The bench of learning runs on a model of a moment; both of its sides are the same training."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import tuning
from bench.gpt2 import random_model
from bench.tuning_peer import SIDES

NETWORK: dict[str, float | None] = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 64,
    "n_positions": 64,
}
EVEN = tuning.Case("4 x 12 tokens", 3, 12, 12, 1.5)
MIXED = tuning.Case("4 x 4-16 tokens", 5, 4, 16, 2.5)
SIZES = tuning.Sizes(
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
    model = random_model("float32", **tuning.NO_DROPOUT | NETWORK)
    model.save_pretrained(tmp_path)
    batches = tuning.drawn(random.Random(0), MIXED, SIZES, 4)
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
    batches = tuning.grouped(random.Random(0), MIXED, SIZES, 10)
    assert all(len(batch) == SIZES.batch for batch in batches)
    assert all(max(map(len, batch)) - min(map(len, batch)) <= 1 for batch in batches)
    assert len({len(batch[0]) for batch in batches}) >= 6


@pytest.mark.slow
def test_each_line_of_the_tuning_bench_is_a_figure_and_most_are_a_verdict() -> None:
    pytest.importorskip("peft")
    told = list(tuning.lines((), SIZES, **NETWORK))
    verdicts = [line for line in told if "; at " in line and line.endswith((": met)", ": MISSED)"))]
    assert len(verdicts) == 2, told
    assert sum(line.startswith("peak memory") and "MiB" in line for line in told) == 2
    apart = [float(line.split()[2]) for line in told if line.endswith(" apart")]
    assert len(apart) == 2 and max(apart) < 2e-5
