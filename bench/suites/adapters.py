"""Adapter benchmark: the cost of soft prompts in batches, first tokens and registry scans.

Each measurement is compared with the same work without adapters. The model is GPT-2 small with
random weights. The adapters are random tables with the standard deviation of embedding rows, saved
as adapter files. The two sides of a comparison run in turn, so that noise of the machine affects
both. Texts are random, so that only the intended prefix hits the prefix cache.
"""

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.harness.offline_engine import (
    GPT2_SMALL,
    KV_TOKENS,
    generate_all,
    load_for_serving,
    random_ids,
    running_engine,
)
from bench.harness.record import SuiteOutput
from bench.harness.targets import measured_row
from bench.suites.conversion import process_memory_kib
from clients.load.percentiles import quantile
from gpt.adapters.adapter_file import (
    Adapter,
    Card,
    build_adapter,
    check_adapter,
    open_adapter,
    save_adapter,
)
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.sampling_params import SamplingParams
from serving.adapters.registry import AdapterRegistry
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.messages import AdapterRef
from serving.request import AnswerSpec, Request

ADAPTER_ROWS = 20  # Rows of an adapter's table, which are its virtual tokens.
EMBEDDING_STD = 0.02  # Standard deviation of randomly initialized embedding rows.
# The maximum context fits a document of 1,000 tokens, an adapter and the new tokens.
NETWORK = GPT2_SMALL.with_fields(max_position_embeddings=1280)
CONFIG = ServerConfig("", kv_tokens_max=KV_TOKENS)


@dataclass(frozen=True)
class AdapterSizes:
    """Sizes of the workloads; tests use smaller ones."""

    adapters: int = 64  # Different adapters in one batch.
    text_tokens: int = 44  # Prompt tokens after the adapter, or after the text prefix.
    new_tokens: int = 32
    rounds: int = 7
    pairs: int = 200  # Pairs of requests: one with an adapter, one with a text prefix.
    streams: int = 32  # Streams that run when another request arrives.
    # Tokens per stream in the measured window: few enough that one slow step changes the p99.
    window_tokens: int = 64
    runs: int = 5  # Runs of each case of `arrival_latency`.
    tasks: int = 8  # Adapters that are applied to one document.
    document_tokens: int = 1000
    registered: int = 10_000  # Adapter files in the scanned directory.


@dataclass
class EngineFixture:
    """A running engine, a folder of adapter files, and a source of new random texts."""

    engine: Engine
    network: GPTConfig
    folder: Path
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    _adapter_count: int = 0

    def new_adapter(self, rows: int = ADAPTER_ROWS) -> AdapterRef:
        """Save a new random adapter and return its reference."""
        self._adapter_count += 1
        table = torch.randn(rows, self.network.hidden_size) * EMBEDDING_STD
        adapter = build_adapter(Card(f"task{self._adapter_count}"), table)
        path = self.folder / f"task{self._adapter_count}.safetensors"
        save_adapter(adapter, path)
        return AdapterRef(adapter.digest, rows, str(path))

    def new_text(self, count: int) -> tuple[int, ...]:
        return random_ids(self.rng, self.network.vocab_size, count)

    def build_answer(self, new_tokens: int, *parts: "tuple[int, ...] | AdapterRef") -> AnswerSpec:
        """Build the specification of an answer whose prompt is the concatenation of `parts`.

        A part is a text or an adapter; at most one part is an adapter.
        """
        vocab_size = self.network.vocab_size
        prompt = list[int]()
        adapter_ref = None
        for part in parts:
            if isinstance(part, AdapterRef):
                adapter_ref = part
                prompt += range(vocab_size, vocab_size + part.row_count)
            else:
                prompt += part
        return AnswerSpec(
            tuple(prompt),
            SamplingParams(new_tokens),
            adapter_ref=adapter_ref,
            virtual_tokens=adapter_ref.row_count if adapter_ref else 0,
        )


PromptPrefix = tuple[int, ...] | AdapterRef


@contextmanager
def engine_fixture(model: GPT) -> Iterator[EngineFixture]:
    # Adapters are saved in memory if possible, so that no time of a disk is measured.
    memory_folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=memory_folder) as folder,
        running_engine(model, CONFIG) as engine,
    ):
        yield EngineFixture(engine, model.config, Path(folder))


def run_suite(
    parts: Sequence[str] = (), sizes: AdapterSizes = AdapterSizes(), network: GPTConfig = NETWORK
) -> Iterator[SuiteOutput]:
    """Run the selected parts, or all parts if none is selected."""
    model = load_for_serving(random_init_checkpoint(network, 0), CONFIG)
    yield f"GPT-2 small, {model.dtype}, {torch.get_num_threads()} threads, load {_load_average()}"
    for name in parts or PARTS:
        if name == "equal":
            yield from compare_answers(sizes)
            continue
        measure, row_counts = MEASUREMENTS[name]
        for rows in row_counts:
            # Each measurement has a new engine, so the prefix cache is empty at its start.
            with engine_fixture(model) as fixture:
                yield from measure(fixture, sizes, rows)
    yield f"load {_load_average()}"


def _load_average() -> str:
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())


# ------------------------------------------------------------------------------------- mixed batch


def mixed_batch(fixture: EngineFixture, sizes: AdapterSizes, rows: int) -> Iterator[SuiteOutput]:
    """Batch requests with a different adapter each; compare with text prefixes of equal length."""
    count = sizes.adapters
    # Kind 0 is an adapter, and kind 1 is a text.
    prefixes_by_kind: tuple[list[PromptPrefix], list[PromptPrefix]] = (
        [fixture.new_adapter(rows) for _ in range(count)],
        [fixture.new_text(rows) for _ in range(count)],
    )
    for prefixes in prefixes_by_kind:
        _warm_cache(fixture, prefixes)
    overheads: list[float] = []
    tokens_per_s: list[float] = []
    cpu_overheads: list[float] = []
    for round_index in range(sizes.rounds + 1):
        texts = [fixture.new_text(sizes.text_tokens) for _ in range(count)]
        seconds, cpu_s = [0.0, 0.0], [0.0, 0.0]
        kinds = (0, 1) if round_index % 2 else (1, 0)
        for kind in kinds:
            requests = [
                Request((fixture.build_answer(sizes.new_tokens, prefix, text),))
                for prefix, text in zip(prefixes_by_kind[kind], texts, strict=True)
            ]
            start = _read_clocks()
            generate_all(fixture.engine, requests)
            seconds[kind], cpu_s[kind] = _clocks_since(start)
        if round_index:
            overheads.append(seconds[0] / seconds[1] - 1)
            cpu_overheads.append(cpu_s[0] / cpu_s[1] - 1)
            tokens_per_s.append(count * sizes.new_tokens / seconds[0])
    overhead = statistics.median(overheads)
    spread = f"{100 * min(overheads):+.1f} to {100 * max(overheads):+.1f}"
    cpu_overhead = 100 * statistics.median(cpu_overheads)
    yield measured_row(
        "adapters/mixed" if rows == ADAPTER_ROWS else "adapters/mixed-32",
        100 * overhead,
        f"{count} warm adapters of {rows} rows, "
        f"{100 * overhead:+.1f} % time compared with cached text "
        f"prefixes ({spread}, {sizes.rounds} rounds, "
        f"{statistics.median(tokens_per_s):,.0f} new tokens/s; "
        f"CPU time {cpu_overhead:+.1f} %)",
        samples={"%": [100 * ratio for ratio in overheads], "tokens/s": tokens_per_s},
    )


def _warm_cache(fixture: EngineFixture, prefixes: Sequence[PromptPrefix]) -> None:
    """Put the keys and values of the prefixes into the prefix cache, partial blocks included."""
    requests = [
        Request((fixture.build_answer(1, prefix, fixture.new_text(2)),)) for prefix in prefixes
    ]
    generate_all(fixture.engine, requests)


# ------------------------------------------------------------------------------------ first tokens


def first_token_latency(
    fixture: EngineFixture, sizes: AdapterSizes, rows: int
) -> Iterator[SuiteOutput]:
    """Compare the TTFT after a warm adapter and after a cached text, one request at a time."""
    adapter, text = fixture.new_adapter(rows), fixture.new_text(rows)
    _warm_cache(fixture, (adapter, text))
    pairs_s: list[tuple[float, float]] = []

    async def measure() -> None:
        for pair_index in range(sizes.pairs + 5):
            suffix = fixture.new_text(sizes.text_tokens)
            seconds = [0.0, 0.0]
            kinds = (0, 1) if pair_index % 2 else (1, 0)
            for kind in kinds:
                seconds[kind] = await first_token_s(
                    fixture.engine, fixture.build_answer(1, (adapter, text)[kind], suffix)
                )
            if pair_index >= 5:  # The first pairs are a warm-up.
                pairs_s.append((seconds[0], seconds[1]))

    asyncio.run(measure())
    differences_ms = [1e3 * (adapter_s - text_s) for adapter_s, text_s in pairs_s]
    median = statistics.median(differences_ms)
    adapter_ms, text_ms = (1e3 * statistics.median(times) for times in zip(*pairs_s, strict=True))
    quartiles = f"{quantile(differences_ms, 0.25):+.2f} to {quantile(differences_ms, 0.75):+.2f}"
    yield measured_row(
        "adapters/first" if rows == ADAPTER_ROWS else "adapters/first-32",
        median,
        f"warm adapter of {rows} rows {median:+.2f} ms vs cached text (quartiles "
        f"{quartiles}, {sizes.pairs} pairs; medians {adapter_ms:.1f} and {text_ms:.1f} ms)",
        samples={"ms": differences_ms},
    )


async def first_token_s(engine: Engine, *answers: AnswerSpec) -> float:
    """Run a request to its end; return the seconds from its submission to its first token."""
    start = time.perf_counter()
    elapsed_s = 0.0
    async for event in engine.submit(Request(answers)):
        if event.error is not None:
            raise event.error
        elapsed_s = elapsed_s or time.perf_counter() - start
    return elapsed_s


# ---------------------------------------------------------------------------------------- arrivals


def arrival_latency(
    fixture: EngineFixture, sizes: AdapterSizes, rows: int
) -> Iterator[SuiteOutput]:
    """Measure the ITL p99 of running streams when another request arrives.

    Three cases are measured: no arrival, a request with a cold adapter, and a request with a text
    of equal length.
    """
    kinds = ("nothing", "adapter", "text")
    wall_p99_ms: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu_p99_ms: dict[str, list[float]] = {kind: [] for kind in kinds}

    async def measure() -> None:
        for run_index in range(sizes.runs):
            for kind in random.Random(run_index).sample(kinds, len(kinds)):
                gaps = await _token_gaps(fixture, sizes, kind, rows)
                wall_p99_ms[kind].append(1e3 * quantile([wall for wall, _ in gaps], 0.99))
                cpu_p99_ms[kind].append(1e3 * quantile([cpu for _, cpu in gaps], 0.99))

    asyncio.run(measure())
    adapter_increases = _increases(wall_p99_ms, "adapter")
    text_increases = _increases(wall_p99_ms, "text")
    median = statistics.median(adapter_increases)
    yield measured_row(
        "adapters/cold",
        median,
        f"ITL p99 of {sizes.streams} running streams {median:+.1f} ms (per run: "
        f"{_format_values(adapter_increases)}; ITL p99 without an arrival: "
        f"{_format_values(wall_p99_ms['nothing'])} ms; "
        f"with a text instead of the adapter: {statistics.median(text_increases):+.1f} ms)",
        samples={"ms": adapter_increases},
    )
    adapter_increases = _increases(cpu_p99_ms, "adapter")
    text_increases = _increases(cpu_p99_ms, "text")
    yield (
        "  the same in CPU time per thread: ITL p99 "
        f"{statistics.median(adapter_increases):+.1f} ms (per run: "
        f"{_format_values(adapter_increases)}; ITL p99 without an arrival: "
        f"{_format_values(cpu_p99_ms['nothing'])} ms; with a text instead of the adapter: "
        f"{statistics.median(text_increases):+.1f} ms)"
    )


def _increases(p99_ms: Mapping[str, Sequence[float]], kind: str) -> list[float]:
    return [
        with_arrival - baseline
        for with_arrival, baseline in zip(p99_ms[kind], p99_ms["nothing"], strict=True)
    ]


def _format_values(values: Sequence[float]) -> str:
    return " ".join(f"{value:.0f}" for value in values)


async def _token_gaps(
    fixture: EngineFixture, sizes: AdapterSizes, kind: str, rows: int
) -> list[tuple[float, float]]:
    """Return the inter-token latencies of all streams in the window, as (wall, CPU) seconds.

    CPU time is per thread; other programs on the machine change it less than the wall time.
    """
    gaps: list[tuple[float, float]] = []
    engine = fixture.engine
    margin = 8  # Tokens of each stream before the measured window, and after it.
    threads = torch.get_num_threads()
    is_steady = asyncio.Event()

    async def consume() -> None:
        last_clocks, tokens_received = (0.0, 0.0), 0
        answer = fixture.build_answer(sizes.window_tokens + 2 * margin, fixture.new_text(32))
        async for event in engine.submit(Request((answer,))):
            now, count = _read_clocks(), len(event.token_ids)
            if margin <= tokens_received < margin + sizes.window_tokens:
                wall, cpu = now[0] - last_clocks[0], now[1] - last_clocks[1]
                gaps.append((wall / count, cpu / count / threads))
            last_clocks, tokens_received = now, tokens_received + count
            if tokens_received >= margin + sizes.window_tokens // 3:
                is_steady.set()

    streams = [asyncio.create_task(consume()) for _ in range(sizes.streams)]
    await is_steady.wait()
    if kind != "nothing":
        prefix = fixture.new_adapter(rows) if kind == "adapter" else fixture.new_text(rows)
        await first_token_s(engine, fixture.build_answer(8, prefix, fixture.new_text(108)))
    await asyncio.gather(*streams)
    return gaps


# ------------------------------------------------------------------------------ tasks on a document


def document_tasks(fixture: EngineFixture, sizes: AdapterSizes, rows: int) -> Iterator[SuiteOutput]:
    """Apply several adapters to one document; compare with one prefill plus the decodes."""
    adapters = [fixture.new_adapter(rows) for _ in range(sizes.tasks)]
    wall_ratios: list[float] = []
    cpu_ratios: list[float] = []
    stage_times: list[tuple[float, float, float]] = []

    def build_answers(text: tuple[int, ...], new_tokens: int, count: int) -> list[AnswerSpec]:
        return [fixture.build_answer(new_tokens, text, adapter) for adapter in adapters[:count]]

    async def measure() -> None:
        cached_text = fixture.new_text(sizes.document_tokens)
        await _request_times(
            fixture.engine, build_answers(cached_text, sizes.new_tokens, sizes.tasks)
        )
        # One round takes seconds and is noisy, so this measurement has more rounds.
        for round_index in range(3 * sizes.rounds + 1):
            prefill_text = fixture.new_text(sizes.document_tokens)
            new_text = fixture.new_text(sizes.document_tokens)
            # The two requests with a long prefill follow decode steps, because a prefill directly
            # after another prefill is slower, by one seventh on some machines.
            prefill = (await _request_times(fixture.engine, build_answers(prefill_text, 1, 1)))[1]
            # This request only decodes, because the prefix cache has its prompts except for their
            # last tokens.
            first_token, end = await _request_times(
                fixture.engine, build_answers(cached_text, sizes.new_tokens, sizes.tasks)
            )
            total = (
                await _request_times(
                    fixture.engine, build_answers(new_text, sizes.new_tokens, sizes.tasks)
                )
            )[1]
            cached_text = new_text
            if round_index:
                # Each triple has the seconds of (all tasks, one prefill, the decodes).
                wall, cpu = (
                    (total[clock], prefill[clock], end[clock] - first_token[clock])
                    for clock in (0, 1)
                )
                wall_ratios.append(wall[0] / sum(wall[1:]))
                cpu_ratios.append(cpu[0] / sum(cpu[1:]))
                stage_times.append(wall)

    asyncio.run(measure())
    ratio = statistics.median(wall_ratios)
    total_ms, prefill_ms, decodes_ms = (
        1e3 * statistics.median(times) for times in zip(*stage_times, strict=True)
    )
    yield measured_row(
        "adapters/tasks-20" if rows == ADAPTER_ROWS else "adapters/tasks-10",
        ratio,
        f"{sizes.tasks} tasks of {rows} rows on {sizes.document_tokens:,} tokens, "
        f"{sizes.new_tokens} new each: "
        f"{ratio:.2f} x one prefill + decodes (from {min(wall_ratios):.2f} to "
        f"{max(wall_ratios):.2f}; "
        f"{total_ms:.0f} vs {prefill_ms:.0f} + {decodes_ms:.0f} ms; CPU time "
        f"{statistics.median(cpu_ratios):.2f} x)",
        samples={"x": wall_ratios},
    )


ClockPair = tuple[float, float]  # Wall-clock seconds and CPU seconds.


async def _request_times(
    engine: Engine, answers: Sequence[AnswerSpec]
) -> tuple[ClockPair, ClockPair]:
    """Return the times until every answer of a request has a token, and until the request ends."""
    start = _read_clocks()
    all_started = (0.0, 0.0)
    started_answers = set[int]()
    async for event in engine.submit(Request(tuple(answers))):
        if event.error is not None:
            raise event.error
        if len(started_answers) < len(answers):
            started_answers.add(event.index)
            all_started = _clocks_since(start)
    return all_started, _clocks_since(start)


def _read_clocks() -> ClockPair:
    return time.perf_counter(), time.process_time()


def _clocks_since(start: ClockPair) -> ClockPair:
    now = _read_clocks()
    return now[0] - start[0], now[1] - start[1]


def compare_answers(sizes: AdapterSizes) -> Iterator[SuiteOutput]:
    """Compare the tokens of batched tasks, sequential tasks and the reference loop.

    The model computes in fp64, so that rounding differences do not change tokens.
    """
    config = GPTConfig(
        num_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=500,
        max_position_embeddings=NETWORK.max_position_embeddings,
        dtype="float64",
    )
    model = load_for_serving(random_init_checkpoint(config, 0, std=0.5), CONFIG)
    with engine_fixture(model) as fixture, running_engine(model, CONFIG) as second_engine:
        adapters = [
            fixture.new_adapter(rows)
            for rows in (10, ADAPTER_ROWS)
            for _ in range(sizes.tasks // 2)
        ]
        text = fixture.new_text(sizes.document_tokens)
        answers = tuple(
            fixture.build_answer(sizes.new_tokens, text, adapter) for adapter in adapters
        )
        batched = [
            list(completion.token_ids)
            for completion in generate_all(fixture.engine, [Request(answers)])
        ]
        sequential, reference = [], []
        for answer in answers:
            sequential += [
                list(completion.token_ids)
                for completion in generate_all(second_engine, [Request((answer,))])
            ]
            assert answer.adapter_ref is not None
            table = open_adapter(Path(answer.adapter_ref.file)).table
            (completion,) = generate(model, [answer.prompt], answer.sampling, adapter_table=table)
            reference.append(completion.token_ids)
    verdict = "equal" if batched == sequential == reference else "DIFFERENT"
    distinct = len({tuple(token_ids) for token_ids in batched})
    yield (
        f"{len(answers)} tasks batched, sequential, and by the reference loop, in fp64: {verdict} "
        f"tokens ({distinct} distinct answers)"
    )


# ---------------------------------------------------------------------------------------- registry


def registry_scan(fixture: EngineFixture, sizes: AdapterSizes, rows: int) -> Iterator[SuiteOutput]:
    """Register many adapter files; time the first scan, a second scan, and requests."""
    count = sizes.registered
    for _ in range(count):
        fixture.new_adapter(rows)
    config = fixture.network

    def check(adapter: Adapter) -> None:
        check_adapter(adapter, config, None)

    adapters = AdapterRegistry(fixture.folder, check, adapters_max=count + 1)
    kib_before, start = process_memory_kib(os.getpid()), time.perf_counter()
    adapters.scan()
    scan_s, kib = time.perf_counter() - start, process_memory_kib(os.getpid()) - kib_before
    start = time.perf_counter()
    adapters.scan()
    rescan_s = time.perf_counter() - start
    fixture.new_adapter(rows)
    start = time.perf_counter()
    adapters.scan()
    new_file_scan_s = time.perf_counter() - start
    assert len(adapters) == count + 1, "the scan did not register all adapters of the folder"
    yield measured_row(
        "adapters/registered",
        len(adapters) - 1,
        f"{count:,} read and checked in {scan_s:.1f} s, {1e3 * scan_s / count:.2f} ms and "
        f"{kib / count:.1f} KiB each; second scan {1e3 * rescan_s:.0f} ms, "
        f"with one new file {1e3 * new_file_scan_s:.0f} ms",
    )
    sampled_keys = fixture.rng.sample([resident.key for resident, _ in adapters.list_visible()], 20)
    latencies: dict[str, list[float]] = {kind: [] for kind in ("warm-up", "cold", "warm", "text")}

    async def measure() -> None:
        for key_index, key in enumerate(sampled_keys):
            start = time.perf_counter()
            adapter = adapters.resolve(key).adapter_ref
            resolve_s = time.perf_counter() - start
            for kind in ("cold", "warm", "text"):
                prefix = fixture.new_text(rows) if kind == "text" else adapter
                seconds = await first_token_s(
                    fixture.engine,
                    fixture.build_answer(1, prefix, fixture.new_text(sizes.text_tokens)),
                )
                # The requests of the first three adapters are a warm-up.
                latencies[kind if key_index >= 3 else "warm-up"].append(seconds + resolve_s)

    asyncio.run(measure())
    median_ms = {kind: 1e3 * statistics.median(latency) for kind, latency in latencies.items()}
    yield (
        f"TTFT with one of these adapters: cold {median_ms['cold']:.1f} ms, "
        f"warm {median_ms['warm']:.1f} ms; "
        f"text of equal length {median_ms['text']:.1f} ms"
    )


# Maps a part to (measurement, numbers of adapter rows); the measurement runs once for each number.
MEASUREMENTS: dict[
    str, tuple[Callable[[EngineFixture, AdapterSizes, int], Iterator[SuiteOutput]], Sequence[int]]
] = {
    "mixed": (mixed_batch, (ADAPTER_ROWS,)),
    "first": (first_token_latency, (ADAPTER_ROWS,)),
    "registry": (registry_scan, (2,)),
    "mixed-32": (mixed_batch, (32,)),
    "first-32": (first_token_latency, (32,)),
    "arrivals": (arrival_latency, (ADAPTER_ROWS,)),
    "tasks": (document_tasks, (10, ADAPTER_ROWS)),
}
PARTS = (*MEASUREMENTS, "equal")
