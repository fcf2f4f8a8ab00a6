"""Prompt-tuning benchmark on a tiny model; both trainers perform the same training."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.harness.model_shapes import GPT2
from bench.harness.targets import Row
from bench.peers import prompt_tuning
from bench.peers.peft_process import TRAINERS
from tests.support.models import TINY_GPT2

NETWORK: dict[str, float | None] = {
    **TINY_GPT2,
    "vocab_size": 64,
    "n_positions": 64,
}
EVEN = prompt_tuning.TuningCase("20", "4 x 12 tokens", 3, 12, 12)
MIXED = prompt_tuning.TuningCase("mixed", "4 x 4-16 tokens", 5, 4, 16)
SIZES = prompt_tuning.TuningSizes(
    cases=(EVEN, MIXED),
    batch_size=4,
    answer_tokens=2,
    rounds=2,
    steps=2,
    mixed_steps=2,
    memory_steps=1,
    losses_steps=3,
    threads=1,
    vocab_size=64,
)


@pytest.fixture(autouse=True, scope="module")
def _single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_both_trainers_have_equal_losses(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = GPT2.build_random("float32", **prompt_tuning.NO_DROPOUT | NETWORK)
    model.save_pretrained(tmp_path)
    batches = prompt_tuning.random_batches(random.Random(0), MIXED, SIZES, 4)
    curves = []
    for name in ("ours", "peft"):
        trainer = TRAINERS[name](str(tmp_path), "float32")
        # A second start must not depend on the first.
        for virtual_tokens in (2, MIXED.virtual_tokens):
            trainer.start_training(virtual_tokens)
            curve = [trainer.train_step(batch, SIZES.answer_tokens) for batch in batches]
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], abs=2e-5)
    assert len(set(curves[0])) == len(batches)


def test_prompts_of_a_length_sorted_batch_have_similar_lengths() -> None:
    batches = prompt_tuning.length_sorted_batches(random.Random(0), MIXED, SIZES, 10)
    assert all(len(batch) == SIZES.batch_size for batch in batches)
    assert all(max(map(len, batch)) - min(map(len, batch)) <= 1 for batch in batches)
    assert len({len(batch[0]) for batch in batches}) >= 6


@pytest.mark.soak
def test_each_case_yields_rows_of_speed_memory_and_loss() -> None:
    pytest.importorskip("peft")
    outputs = list(prompt_tuning.run_suite((), SIZES, **NETWORK))
    rows = [output for output in outputs if isinstance(output, Row)]
    assert [row.target.name.removeprefix("tuning/") for row in rows] == [
        "speed-20",
        "speed-mixed",
        "memory-20",
        "memory-mixed",
        "loss-20",
        "loss-mixed",
    ]
    assert all(len(row.samples["ours"]) == SIZES.rounds for row in rows[:2])
    assert all("MiB" in row.summary for row in rows[2:4])
    assert all(row.value < 2e-5 for row in rows[4:])
