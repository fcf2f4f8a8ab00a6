"""LoRA serving benchmark: the cost of linear adapters in batches, prefills and first tokens.

Each measurement is compared with the same requests of the base model, in the same engine and in
turn. The model is GPT-2 small with random weights in bf16; the adapters have random matrices on all
linears. `registered` adapters are files in a folder, and requests go through a memory that is too
small for all of them.
"""

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from bench.harness.offline_engine import (
    GPT2_SMALL,
    KV_TOKENS,
    bf16_bytes,
    generate_all,
    linear_adapter_ref,
    load_for_serving,
    random_ids,
    running_engine,
)
from bench.harness.record import SuiteOutput
from bench.harness.targets import measured_row
from clients.load.percentiles import quantile
from gpt.adapters.adapter_file import Card, build_adapter, open_adapter, save_adapter
from gpt.adapters.linear_check import check_linears
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from gpt.files.file_identity import TIME_RESOLUTION_NS
from gpt.garbage_collection import freeze_startup_objects, make_full_collections_rare
from gpt.linear_adapter import LinearAdapter
from gpt.model.gpt_model import GPT
from gpt.parallel.adaptable_linears import adaptable_linears
from gpt.sampling_params import SamplingParams
from serving.adapters.directory_scan import AdapterDirectory
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.messages import AdapterRef
from serving.request import AnswerSpec, Request

RANK = 16
INVOCATION = (11, 12, 13)
# (requests in a batch, distinct adapters): the rows "lora/REQUESTS-ADAPTERS".
BATCHES = ((1, 1), (8, 1), (32, 1), (8, 8), (32, 32))
TURNS_BLOCK = 50  # Adapters that are loaded between two blocks of requests of a resident adapter.
NETWORK = GPT2_SMALL.with_fields(max_position_embeddings=1280)


@dataclass(frozen=True)
class LoraSizes:
    """Sizes of the workloads; tests use smaller ones."""

    prompt_tokens: int = 16
    new_tokens: int = 64
    prefill_tokens: int = 960
    rounds: int = 7
    document_tokens: int = 960
    tasks: int = 8
    registered: int = 10_000  # Adapters in the folder.
    turns: int = 1000  # Those that take turns in the memory.
    resident: int = 32  # Adapters that the memory has space for.
    streams: int = 8  # Streams of the base model that run beside them.
    stream_tokens: int = 400  # New tokens of each request of a stream.
    alone_s: float = 10.0  # Seconds in which the streams are measured alone.


@dataclass
class LoraFixture:
    """A running engine, a folder of adapter files, and a source of new random texts."""

    engine: Engine
    model: GPT
    folder: Path
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    _adapter_count: int = 0

    @property
    def network(self) -> GPTConfig:
        return self.model.config

    def new_adapter(
        self, invocation: tuple[int, ...] = (), rank: int = RANK, target: str = ""
    ) -> AdapterRef:
        """Save a new random adapter; return its reference.

        `target`: the last part of the names of its linears; by default it has all linears.
        """
        self._adapter_count += 1
        draws = torch.Generator().manual_seed(self._adapter_count)
        linears = {
            linear.name: LinearAdapter(
                torch.randn(rank, linear.in_features, generator=draws) / linear.in_features**0.5,
                0.02 * torch.randn(linear.out_features, rank, generator=draws),
            )
            for linear in adaptable_linears(self.network).values()
            if linear.name.endswith(target)
        }
        name = f"task{self._adapter_count}"
        adapter = build_adapter(Card(name, invocation=invocation), None, linears)
        path = self.folder / f"{name}.safetensors"
        save_adapter(adapter, path)
        return linear_adapter_ref(adapter, path, self.network)

    def new_text(self, count: int) -> tuple[int, ...]:
        return random_ids(self.rng, self.network.vocab_size, count)

    def answer(
        self, prompt: tuple[int, ...], new_tokens: int, ref: AdapterRef | None, acts_from: int = 0
    ) -> AnswerSpec:
        return AnswerSpec(
            prompt, SamplingParams(new_tokens), adapter_ref=ref, adapted_from=acts_from
        )


@contextmanager
def lora_fixture(model: GPT, config: ServerConfig) -> Iterator[LoraFixture]:
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        running_engine(model, config.with_fields(adapters=folder)) as engine,
    ):
        yield LoraFixture(engine, model, Path(folder))


def run_suite(
    parts: Sequence[str] = (), sizes: LoraSizes = LoraSizes(), network: GPTConfig = NETWORK
) -> Iterator[SuiteOutput]:
    """Run the selected parts, or all parts if none is selected."""
    config = ServerConfig("", kv_tokens_max=KV_TOKENS)
    model = load_for_serving(random_init_checkpoint(network, 0), config)
    yield f"GPT-2 small, {model.dtype}, {torch.get_num_threads()} threads, rank {RANK}"
    for name in parts or PARTS:
        measure = MEASUREMENTS[name]
        part_config = config
        if name == "turns":
            memory_bytes = sizes.resident * _adapter_bytes(network)
            part_config = config.with_fields(adapter_memory_mb=-(-memory_bytes // 1_000_000))
        with lora_fixture(model, part_config) as fixture:
            yield from measure(fixture, sizes)


def _adapter_bytes(network: GPTConfig) -> int:
    linears = {
        linear.name: LinearAdapter(
            torch.empty(RANK, linear.in_features), torch.empty(linear.out_features, RANK)
        )
        for linear in adaptable_linears(network).values()
    }
    return bf16_bytes(linears, network)


# ------------------------------------------------------------------------------------------ batches


def batches(fixture: LoraFixture, sizes: LoraSizes) -> Iterator[SuiteOutput]:
    """Compare the decode speed of batches with adapters and of the base model."""
    adapters = [fixture.new_adapter() for _ in range(max(count for _, count in BATCHES))]
    for requests, distinct in BATCHES:
        references = [adapters[index % distinct] for index in range(requests)]
        yield _compare_batch(fixture, sizes, f"lora/{requests}-{distinct}", references)


def _compare_batch(
    fixture: LoraFixture, sizes: LoraSizes, row: str, references: Sequence[AdapterRef]
) -> SuiteOutput:
    ratios, speeds = [], []
    # Small batches are short, and a shared machine's speed varies by more than the cost of LoRA.
    rounds = sizes.rounds * (3 if len(references) <= 8 else 1)
    for round_index in range(rounds + 1):
        seconds = {}
        kinds = ("base", "lora") if round_index % 2 else ("lora", "base")
        for kind in kinds:
            seconds[kind] = _decode_s(fixture, sizes, references, uses_adapters=kind == "lora")
        if round_index:
            ratios.append(seconds["base"] / seconds["lora"])
            speeds.append(len(references) * (sizes.new_tokens - 1) / seconds["lora"])
    distinct = len(set(references))
    return measured_row(
        row,
        statistics.median(ratios),
        f"{len(references)} requests, {distinct} distinct adapters: "
        f"{statistics.median(ratios):.3f} x the base model's decode speed "
        f"({min(ratios):.3f} to {max(ratios):.3f}; {statistics.median(speeds):,.0f} tokens/s)",
        samples={"x": ratios},
    )


def _decode_s(
    fixture: LoraFixture,
    sizes: LoraSizes,
    references: Sequence[AdapterRef | None],
    *,
    uses_adapters: bool,
) -> float:
    """Return the seconds from the last request's first token to the end of all requests."""
    answers = [
        fixture.answer(
            fixture.new_text(sizes.prompt_tokens), sizes.new_tokens, ref if uses_adapters else None
        )
        for ref in references
    ]

    async def measure() -> float:
        started = set[int]()
        start = 0.0
        async for event in fixture.engine.submit(Request(tuple(answers))):
            if event.error is not None:
                raise event.error
            started.add(event.index)
            if not start and len(started) == len(answers):
                start = time.perf_counter()
        return time.perf_counter() - start

    return asyncio.run(measure())


def unused(fixture: LoraFixture, sizes: LoraSizes) -> Iterator[SuiteOutput]:
    """Compare the base model's decode speed with memory for adapters and without.

    The engine with the memory has adapters in it, which no request uses.
    """
    _decode_s(fixture, sizes, [fixture.new_adapter() for _ in range(8)], uses_adapters=True)
    config = ServerConfig("", kv_tokens_max=KV_TOKENS, adapter_memory_mb=0)
    ratios = []
    with running_engine(fixture.model, config) as engine:
        other = replace(fixture, engine=engine)
        for round_index in range(3 * sizes.rounds + 1):
            seconds = {}
            for side in (fixture, other) if round_index % 2 else (other, fixture):
                seconds[side is fixture] = _decode_s(side, sizes, [None] * 8, uses_adapters=False)
            if round_index:
                ratios.append(seconds[False] / seconds[True])
    yield measured_row(
        "lora/unused",
        statistics.median(ratios),
        f"8 requests without adapters: {statistics.median(ratios):.3f} x the decode speed of an "
        f"engine without memory for adapters ({min(ratios):.3f} to {max(ratios):.3f})",
        samples={"x": ratios},
    )


def prefill(fixture: LoraFixture, sizes: LoraSizes) -> Iterator[SuiteOutput]:
    """Compare the prefill of a long prompt with an adapter and without."""
    ref = fixture.new_adapter()
    ratios = []
    for round_index in range(sizes.rounds + 1):
        seconds = {}
        for uses_adapter in (False, True) if round_index % 2 else (True, False):
            text = fixture.new_text(sizes.prefill_tokens)
            answer = fixture.answer(text, 1, ref if uses_adapter else None)
            start = time.perf_counter()
            generate_all(fixture.engine, [Request((answer,))])
            seconds[uses_adapter] = time.perf_counter() - start
        if round_index:
            ratios.append(seconds[False] / seconds[True])
    yield measured_row(
        "lora/prefill",
        statistics.median(ratios),
        f"prompt of {sizes.prefill_tokens} tokens: {statistics.median(ratios):.3f} x the base "
        f"model's speed ({min(ratios):.3f} to {max(ratios):.3f})",
        samples={"x": ratios},
    )


# ---------------------------------------------------------------------------------- activated LoRA


def activated(fixture: LoraFixture, sizes: LoraSizes) -> Iterator[SuiteOutput]:
    """Compare activated LoRAs with LoRAs: the first tokens after a cached document."""
    loras = [fixture.new_adapter() for _ in range(sizes.tasks)]
    activated_loras = [fixture.new_adapter(INVOCATION) for _ in range(sizes.tasks)]
    ratios, cached_shares = [], []
    for round_index in range(sizes.rounds + 1):
        seconds = []
        for references in (activated_loras, loras):
            document = fixture.new_text(sizes.document_tokens)
            generate_all(fixture.engine, [Request((fixture.answer(document, 1, None),))])
            prompt = (*document, *INVOCATION, 5)
            acts_from = len(document) if references is activated_loras else 0
            answers = [fixture.answer(prompt, 1, ref, acts_from) for ref in references]
            before = fixture.engine.stats
            start = time.perf_counter()
            generate_all(fixture.engine, [Request(tuple(answers))])
            seconds.append(time.perf_counter() - start)
            if references is activated_loras:
                after = fixture.engine.stats
                cached_shares.append(
                    (after.cached_tokens - before.cached_tokens) / (sizes.tasks * len(document))
                )
        if round_index:
            ratios.append(seconds[1] / seconds[0])
    ratio = statistics.median(ratios)
    yield measured_row(
        "lora/activated",
        ratio,
        f"{sizes.tasks} tasks on a cached document of {sizes.document_tokens} tokens: all first "
        f"tokens {ratio:.1f} x as fast as with LoRA ({min(ratios):.1f} to {max(ratios):.1f}); "
        f"{100 * min(cached_shares):.0f} % of the documents' tokens came from the cache",
        samples={"x": ratios},
    )


# -------------------------------------------------------------------------------------------- turns


@dataclass
class _Latencies:
    """Latencies of requests that ran at the same time, in seconds."""

    itl_s: list[float] = field(default_factory=list)  # Of the streams of the base model.
    ttft_s: list[float] = field(default_factory=list)  # Of the other requests.


@dataclass
class _TurnsLatencies:
    """Latencies by what runs beside the streams of the base model."""

    alone: _Latencies = field(default_factory=_Latencies)  # Nothing.
    loading: _Latencies = field(default_factory=_Latencies)  # Requests that load adapters.
    resident: _Latencies = field(default_factory=_Latencies)  # Requests of a resident adapter.


def turns(fixture: LoraFixture, sizes: LoraSizes) -> Iterator[SuiteOutput]:
    """Send many adapters in turn through a memory for a few, beside streams of the base model.

    A first token may take 1.5 times the sum of two times: that of a resident adapter, and that of
    reading an adapter's file. The streams' inter-token latencies are compared with those beside
    requests of a resident adapter: the difference is what loading adapters costs.
    """
    digests = {fixture.new_adapter().digest for _ in range(sizes.turns)}
    for _ in range(sizes.registered - sizes.turns):
        fixture.new_adapter(rank=1, target="linear_qkv")
    time.sleep(TIME_RESOLUTION_NS / 1e9)  # The scan does not record identities of newer files.
    registered, seconds, memory_bytes = _scan(fixture)
    yield (
        f"{len(registered)} adapters registered in {seconds:.1f} s, with "
        f"{memory_bytes / len(registered) / 1000:.1f} kB of memory each"
    )
    references = [ref for ref in registered if ref.digest in digests]
    # As a rank of a server does at its start: full collections interrupt the steps.
    freeze_startup_objects()
    make_full_collections_rare()
    disk_bytes = _disk_bytes_read()
    times = asyncio.run(_measure_turns(fixture, sizes, references))
    disk_bytes = _disk_bytes_read() - disk_bytes
    read_s = _read_s(references[: sizes.resident])
    limit_s = quantile(times.resident.ttft_s, 0.95) + read_s
    p95_s = quantile(times.loading.ttft_s, 0.95)
    yield measured_row(
        "lora/turns-first",
        p95_s / limit_s,
        f"{sizes.turns} adapters in turn through memory for {sizes.resident}: first token "
        f"p95 {1e3 * p95_s:.0f} ms; resident {1e3 * (limit_s - read_s):.0f} ms, reading "
        f"{1e3 * read_s:.0f} ms; {disk_bytes / 1e6:.0f} MB were not in the page cache",
        samples={"ms": [1e3 * seconds for seconds in times.loading.ttft_s]},
    )
    loading_ms, resident_ms, alone_ms = (
        1e3 * quantile(each.itl_s, 0.99) for each in (times.loading, times.resident, times.alone)
    )
    yield measured_row(
        "lora/turns-itl",
        loading_ms - resident_ms,
        f"ITL p99 of {sizes.streams} streams of the base model {loading_ms - resident_ms:+.1f} ms "
        f"beside requests that load adapters ({resident_ms:.1f} ms beside requests of a resident "
        f"adapter, {alone_ms:.1f} ms alone)",
        samples={"ms": [1e3 * seconds for seconds in times.loading.itl_s]},
    )


def _resident_bytes() -> int:
    """Return the bytes of memory that this process uses."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _disk_bytes_read() -> int:
    """Return the bytes that this process has read from the disk, not from the page cache."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def _scan(fixture: LoraFixture) -> tuple[list[AdapterRef], float, int]:
    """Register the adapters of the folder; return their references, the seconds and the memory."""

    def reserve(directory: AdapterDirectory, count: int) -> None:
        directory.reserved = count

    directory = AdapterDirectory(
        fixture.folder,
        lambda adapter: check_linears(adapter.card.name, adapter.linears, fixture.network),
        reserve,
        lambda adapter: bf16_bytes(adapter.linears, fixture.network),
    )
    memory_bytes, start = _resident_bytes(), time.perf_counter()
    directory.scan()
    seconds = time.perf_counter() - start
    references = [adapter.adapter_ref for adapter, _ in directory.listing]
    return references, seconds, _resident_bytes() - memory_bytes


def _read_s(references: Sequence[AdapterRef]) -> float:
    """Return the median seconds to open an adapter file, with its checks."""
    seconds = []
    for ref in references:
        start = time.perf_counter()
        open_adapter(Path(ref.file))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


async def _measure_turns(
    fixture: LoraFixture, sizes: LoraSizes, references: Sequence[AdapterRef]
) -> _TurnsLatencies:
    """Run streams of the base model, and a request of each adapter, one after another.

    After each block of requests, half as many use a resident adapter, so that changes of the
    machine's speed do not count as the cost of loading.
    """
    times = _TurnsLatencies()
    measured = _Latencies()  # Of the requests that run now.
    has_ended = asyncio.Event()

    async def stream() -> None:
        while not has_ended.is_set():
            answer = fixture.answer(fixture.new_text(8), sizes.stream_tokens, None)
            last = None
            async for _ in fixture.engine.submit(Request((answer,))):
                now = time.perf_counter()
                if last is not None:
                    measured.itl_s.append(now - last)
                last = now
                if has_ended.is_set():
                    return

    async def send(ref: AdapterRef) -> None:
        answer = fixture.answer(fixture.new_text(16), 2, ref)
        start, first = time.perf_counter(), 0.0
        async for event in fixture.engine.submit(Request((answer,))):
            if event.error is not None:
                raise event.error
            first = first or time.perf_counter() - start
        measured.ttft_s.append(first)

    tasks = [asyncio.create_task(stream()) for _ in range(sizes.streams)]
    await asyncio.sleep(1.0)
    measured = times.alone
    await asyncio.sleep(sizes.alone_s)
    for first_index in range(0, len(references), TURNS_BLOCK):
        block = references[first_index : first_index + TURNS_BLOCK]
        measured = times.loading
        for ref in block:
            await send(ref)
        measured = _Latencies()
        await send(references[0])  # It was evicted.
        measured = times.resident
        for _ in range(len(block) // 2):
            await send(references[0])
    has_ended.set()
    await asyncio.gather(*tasks)
    return times


MEASUREMENTS: dict[str, Callable[[LoraFixture, LoraSizes], Iterator[SuiteOutput]]] = {
    "batches": batches,
    "unused": unused,
    "prefill": prefill,
    "activated": activated,
    "turns": turns,
}
PARTS = tuple(MEASUREMENTS)
