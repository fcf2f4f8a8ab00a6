"""The benches of the engine run, on models of a moment: what they print is told, not how fast."""

from collections.abc import Iterator

import pytest
import torch

from bench.harness import offline_engine
from bench.harness.targets import PROMISES, Row
from bench.suites import adapters
from gpt.checkpoint.random_init import fresh
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
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_offline_bench_counts_what_the_engine_did() -> None:
    config = ServerConfig("", kv_tokens_max=320, step_tokens_max=64)
    work = offline_engine.Work(requests=12, prompt=48, shared=32, new=8)
    with offline_engine.engine_of(offline_engine.loaded(fresh(TINY, 0), config), config) as engine:
        told = list(offline_engine.report(engine, TINY.vocab_size, work, 2))
        load = engine.load
    said = {line[:19].strip(): line[19:] for line in told}
    assert set(said) == {
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
    assert float(said["new tokens/s"].replace(",", "")) > 0
    # All but the first of a round have what they share from the cache.
    assert float(said["prefix hits"].split("%")[0]) > 100 * 32 / 48 * 10 / 12
    assert "of 1,152 prompt tokens" in said["prefix hits"]
    assert load.made_tokens == 3 * 12 * 8
    assert "of 20 blocks" in said["KV memory"]


def test_the_offline_bench_tells_what_guesses_save() -> None:
    config = ServerConfig("", kv_tokens_max=320, speculate_tokens_max=3)
    work = offline_engine.Work(requests=1, prompt=8, new=100)
    with offline_engine.engine_of(offline_engine.loaded(fresh(TINY, 0), config), config) as engine:
        told = list(offline_engine.report(engine, TINY.vocab_size, work, 1))
    (line,) = [line for line in told if line.startswith("guessed right")]
    assert float(line.split("; ")[1].split()[0]) > 1.2


@pytest.mark.slow
def test_the_offline_bench_serves_a_model_in_processes_of_its_own() -> None:
    config = ServerConfig("", kv_tokens_max=320, tp=2, dtype="float32")
    told = list(
        offline_engine.lines(config, offline_engine.Work(2, 8, new=4), rounds=1, network=TINY)
    )
    assert "tp 2 x pp 1" in told[0]
    assert len(told) == 11


def test_each_part_of_the_adapters_bench_gives_its_rows() -> None:
    sizes = adapters.Sizes(
        adapters=4,
        text=6,
        new=4,
        rounds=2,
        pairs=6,
        streams=3,
        window=16,
        runs=2,
        tasks=3,
        document=40,
        registered=40,
    )
    told = list(adapters.lines((), sizes, TINY))
    rows = {item.promise.name: item for item in told if isinstance(item, Row)}
    assert set(rows) == {name for name in PROMISES if name.startswith("adapters/")}, told
    assert any("in fp64: equal tokens" in str(line) for line in told)
    assert rows["adapters/registered"].value == 40
    assert rows["adapters/registered"].verdict == "MISSED"
    assert len(rows["adapters/mixed"].samples["%"]) == 2
