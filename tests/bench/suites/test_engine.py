"""Offline engine and adapter benchmarks on tiny models; speeds are not checked."""

from collections.abc import Iterator

import pytest
import torch

from bench.harness import offline_engine
from bench.harness.targets import TARGETS, Row
from bench.suites import adapters
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from serving.config import ServerConfig

TINY = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=320,
    max_position_embeddings=160,
    dtype="bfloat16",
)


@pytest.fixture(autouse=True, scope="module")
def _single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_offline_engine_reports_engine_statistics() -> None:
    config = ServerConfig("", kv_tokens_max=320, step_tokens_max=64)
    workload = offline_engine.OfflineWorkload(
        requests=12, prompt_tokens=48, shared_tokens=32, new_tokens=8
    )
    with offline_engine.running_engine(
        offline_engine.load_for_serving(random_init_checkpoint(TINY, 0), config), config
    ) as engine:
        lines = list(offline_engine.measure_rounds(engine, TINY.vocab_size, workload, 2))
        stats = engine.stats
    figures = {line[:19].strip(): line[19:] for line in lines}
    assert set(figures) == {
        "prompt tokens/s",
        "new tokens/s",
        "requests/s",
        "seconds",
        "steps",
        "between the steps",
        "prefix hits",
        "preemptions",
        "KV memory",
    }
    assert float(figures["new tokens/s"].replace(",", "")) > 0
    # All requests of a round except the first hit the shared prefix.
    assert float(figures["prefix hits"].split("%")[0]) > 100 * 32 / 48 * 10 / 12
    assert "of 1,152 prompt tokens" in figures["prefix hits"]
    assert stats.made_tokens == 3 * 12 * 8
    assert "of 20 blocks" in figures["KV memory"]


def test_offline_engine_reports_draft_acceptance() -> None:
    config = ServerConfig("", kv_tokens_max=320, speculate_tokens_max=3)
    workload = offline_engine.OfflineWorkload(requests=1, prompt_tokens=8, new_tokens=100)
    with offline_engine.running_engine(
        offline_engine.load_for_serving(random_init_checkpoint(TINY, 0), config), config
    ) as engine:
        lines = list(offline_engine.measure_rounds(engine, TINY.vocab_size, workload, 1))
    (line,) = [line for line in lines if line.startswith("draft acceptance")]
    assert float(line.split("; ")[1].split()[0]) > 1.2


@pytest.mark.slow
def test_offline_engine_runs_a_tensor_parallel_model_in_rank_processes() -> None:
    config = ServerConfig("", kv_tokens_max=320, tp=2, dtype="float32")
    lines = list(
        offline_engine.run_suite(
            config, offline_engine.OfflineWorkload(2, 8, new_tokens=4), rounds=1, network=TINY
        )
    )
    assert "tp 2 x pp 1" in lines[0]
    assert len(lines) == 11


def test_every_part_of_the_adapter_suite_yields_its_rows() -> None:
    sizes = adapters.AdapterSizes(
        adapters=4,
        text_tokens=6,
        new_tokens=4,
        rounds=2,
        pairs=6,
        streams=3,
        window_tokens=16,
        runs=2,
        tasks=3,
        document_tokens=40,
        registered=40,
    )
    outputs = list(adapters.run_suite((), sizes, TINY))
    rows = {output.target.name: output for output in outputs if isinstance(output, Row)}
    assert set(rows) == {name for name in TARGETS if name.startswith("adapters/")}, outputs
    assert any("in fp64: equal tokens" in str(output) for output in outputs)
    assert rows["adapters/registered"].value == 40
    assert rows["adapters/registered"].verdict == "MISSED"
    assert len(rows["adapters/mixed"].samples["%"]) == 2
