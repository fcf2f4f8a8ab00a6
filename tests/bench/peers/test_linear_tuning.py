"""Benchmark of LoRA, activated LoRA, DoRA and IA3 on a tiny model."""

import random
from pathlib import Path

import pytest

from bench.harness.model_shapes import GPT2
from bench.harness.targets import Row
from bench.peers import linear_tuning
from bench.peers.linear_tuning_process import INVOCATION, TRAINERS
from bench.peers.prompt_tuning import NO_DROPOUT
from tests.support.models import TINY_GPT2

NETWORK: dict[str, float | None] = {**TINY_GPT2, "vocab_size": 64, "n_positions": 64}
SIZES = linear_tuning.LinearTuningSizes(
    batch_size=2,
    text_tokens=12,
    activated_text_tokens=20,
    context_tokens=10,
    answer_tokens=2,
    rounds=2,
    steps=2,
    threads=1,
    vocab_size=64,
)


@pytest.mark.slow
@pytest.mark.parametrize("method", linear_tuning.METHODS)
def test_both_trainers_start_with_equal_losses(method: str, tmp_path: Path) -> None:
    """Their matrices A differ, but B is zero at the start, so only the first loss is equal."""
    pytest.importorskip("peft")
    GPT2.build_random("float32", **NO_DROPOUT | NETWORK).save_pretrained(tmp_path)
    batch = linear_tuning.random_batches(random.Random(0), method, SIZES)[0]
    losses = []
    for name in ("ours", "peft"):
        trainer = TRAINERS[name](str(tmp_path), "float32", "gpt2")
        trainer.start_training(method)
        losses.append(trainer.train_step(batch, SIZES.answer_tokens))
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)


def test_examples_of_activated_lora_contain_the_invocation_once() -> None:
    batches = linear_tuning.random_batches(random.Random(0), "alora", SIZES)
    examples = [example for batch in batches for example in batch]
    assert {len(example) for example in examples} == {SIZES.activated_text_tokens}
    start, end = SIZES.context_tokens, SIZES.context_tokens + len(INVOCATION)
    for example in examples:
        assert tuple(example[start:end]) == INVOCATION
        assert not set(INVOCATION) & set(example[:start] + example[end:])


@pytest.mark.soak
def test_each_method_yields_rows_of_speed_and_memory() -> None:
    pytest.importorskip("peft")
    parts = [part for part in linear_tuning.PARTS if part.startswith("gpt2-")]
    outputs = list(linear_tuning.run_suite(parts, SIZES, **NETWORK))
    rows = [output for output in outputs if isinstance(output, Row)]
    assert [row.target.name.removeprefix("linear-tuning/gpt2/") for row in rows] == [
        f"{row}-{method}" for method in linear_tuning.METHODS for row in ("speed", "memory")
    ]
    assert all(row.value > 0 for row in rows)
