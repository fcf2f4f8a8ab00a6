"""Benchmark of LoRA serving with a small model: all parts run, and give a row for each target."""

import math

import pytest

from bench.harness.targets import TARGETS, Row
from bench.suites.lora import LoraSizes, run_suite
from tests.support.models import CLASSIC

NETWORK = CLASSIC.with_fields(max_position_embeddings=128, dtype="bfloat16")
SIZES = LoraSizes(
    prompt_tokens=4,
    new_tokens=3,
    prefill_tokens=20,
    rounds=1,
    document_tokens=32,
    tasks=2,
    registered=26,
    turns=24,
    resident=2,
    streams=1,
    stream_tokens=80,
    alone_s=0.5,
)


@pytest.mark.slow
def test_all_parts_run() -> None:
    rows = [line for line in run_suite((), SIZES, NETWORK) if isinstance(line, Row)]
    names = {row.target.name for row in rows}
    assert names == {name for name in TARGETS if name.startswith("lora/")}
    assert all(math.isfinite(row.value) for row in rows)
