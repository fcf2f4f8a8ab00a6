"""What adapters cost in the engine: six measurements, each beside the same work without them.

The model is GPT-2 small with random weights, the tables are random and as large as embedding rows,
read from adapter files. Both sides of a comparison are taken in turn, since a machine is never
quiet. Every text is new, so that what is cached of a prompt is what is meant to be.
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
    answered,
    engine_of,
    ids,
    loaded,
    quantile,
)
from bench.harness.record import Item
from bench.harness.targets import judged
from bench.suites.conversion import own_memory
from gpt.adapters.adapter_file import (
    Adapter,
    Card,
    build_adapter,
    check_adapter,
    open_adapter,
    save_adapter,
)
from gpt.checkpoint.random_init import fresh
from gpt.config import GPTConfig
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.sampling_params import Sampling
from serving.adapters.registry import Adapters
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.messages import Rows
from serving.request import Answer, Request

ROWS = 20
SCALE = 0.02  # Of an embedding's rows, as they are drawn.
# Long enough for a text of 1,000 tokens, a task behind it and its answer.
NETWORK = GPT2_SMALL.with_fields(max_position_embeddings=1280)
CONFIG = ServerConfig("", kv_tokens_max=KV_TOKENS)


@dataclass(frozen=True)
class Sizes:
    """How much is done; a test does less."""

    adapters: int = 64  # Mixed in one batch.
    text: int = 44  # Tokens behind a prefix.
    new: int = 32
    rounds: int = 7
    pairs: int = 200
    streams: int = 32
    window: int = 64  # Tokens of each stream: one arrival in so many steps is what p99 sees.
    runs: int = 5
    tasks: int = 8
    document: int = 1000
    registered: int = 10_000


@dataclass
class World:
    """An engine, a folder of adapters, and texts that nobody has seen."""

    engine: Engine
    network: GPTConfig
    folder: Path
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    _made: int = 0

    def adapter(self, rows: int = ROWS) -> Rows:
        """A new one, in a file."""
        self._made += 1
        table = torch.randn(rows, self.network.hidden_size) * SCALE
        built = build_adapter(Card(f"task{self._made}"), table)
        path = self.folder / f"task{self._made}.safetensors"
        save_adapter(built, path)
        return Rows(built.digest, rows, str(path))

    def text(self, count: int) -> tuple[int, ...]:
        return ids(self.draw, self.network.vocab_size, count)

    def answer(self, new: int, *parts: "tuple[int, ...] | Rows") -> Answer:
        """To a prompt of texts and of one adapter's rows, in this order."""
        vocab_size, prompt, rows = self.network.vocab_size, list[int](), None
        for part in parts:
            if isinstance(part, Rows):
                rows = part
                prompt += range(vocab_size, vocab_size + part.count)
            else:
                prompt += part
        return Answer(
            tuple(prompt),
            Sampling(new),
            rows=rows,
            virtual_tokens=rows.count if rows else 0,
        )


Prefix = tuple[int, ...] | Rows


@contextmanager
def world_of(model: GPT) -> Iterator[World]:
    # In memory where that is to be had: saving waits for a disk, and that is not what is measured.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=memory) as folder,
        engine_of(model, CONFIG) as engine,
    ):
        yield World(engine, model.config, Path(folder))


def lines(
    parts: Sequence[str] = (), sizes: Sizes = Sizes(), network: GPTConfig = NETWORK
) -> Iterator[Item]:
    """The parts that are asked for; none: all."""
    model = loaded(fresh(network, 0), CONFIG)
    yield f"GPT-2 small, {model.dtype}, {torch.get_num_threads()} threads, load {_busy()}"
    for name in parts or PARTS:
        if name == "equal":
            yield from same_answers(sizes)
            continue
        measure, rows = PARTED[name]
        for count in rows:
            # Each in an engine of its own, whose cache is empty.
            with world_of(model) as world:
                yield from measure(world, sizes, count)
    yield f"load {_busy()}"


def _busy() -> str:
    return ", ".join(f"{one:.1f}" for one in os.getloadavg())


# --------------------------------------------------------------------------------- many in a batch


def mixed(world: World, sizes: Sizes, rows: int) -> Iterator[Item]:
    """As many requests as adapters, each with its own; against texts in their place."""
    count = sizes.adapters
    kinds: tuple[list[Prefix], list[Prefix]] = (
        [world.adapter(rows) for _ in range(count)],
        [world.text(rows) for _ in range(count)],
    )
    for prefixes in kinds:
        _warm(world, prefixes)
    costs: list[float] = []
    speeds: list[float] = []
    cycles: list[float] = []
    for turn in range(sizes.rounds + 1):
        texts = [world.text(sizes.text) for _ in range(count)]
        seconds, processor = [0.0, 0.0], [0.0, 0.0]
        for kind in (0, 1) if turn % 2 else (1, 0):
            requests = [
                Request((world.answer(sizes.new, prefix, text),))
                for prefix, text in zip(kinds[kind], texts, strict=True)
            ]
            start = _now()
            answered(world.engine, requests)
            seconds[kind], processor[kind] = _since(start)
        if turn:
            costs.append(seconds[0] / seconds[1] - 1)
            cycles.append(processor[0] / processor[1] - 1)
            speeds.append(count * sizes.new / seconds[0])
    cost = statistics.median(costs)
    spread = f"{100 * min(costs):+.1f} to {100 * max(costs):+.1f}"
    processor_cost = 100 * statistics.median(cycles)
    yield judged(
        "adapters/mixed" if rows == ROWS else "adapters/mixed-32",
        100 * cost,
        f"{count} warm adapters of {rows} rows, {100 * cost:+.1f} % of the time of as many cached "
        f"texts ({spread}, {sizes.rounds} rounds, {statistics.median(speeds):,.0f} new tokens/s; "
        f"of processor time {processor_cost:+.1f} %)",
        samples={"%": [100 * one for one in costs], "tokens/s": speeds},
    )


def _warm(world: World, prefixes: Sequence[Prefix]) -> None:
    """Have their keys and values in the cache, whole blocks and what is left over."""
    requests = [Request((world.answer(1, prefix, world.text(2)),)) for prefix in prefixes]
    answered(world.engine, requests)


# ------------------------------------------------------------------------------------ first tokens


def first_tokens(world: World, sizes: Sizes, rows: int) -> Iterator[Item]:
    """One request at a time, behind a warm adapter and behind a cached text."""
    adapter, text = world.adapter(rows), world.text(rows)
    _warm(world, (adapter, text))
    firsts: list[tuple[float, float]] = []

    async def work() -> None:
        for turn in range(sizes.pairs + 5):
            behind = world.text(sizes.text)
            took = [0.0, 0.0]
            for kind in (0, 1) if turn % 2 else (1, 0):
                took[kind] = await first_s(
                    world.engine, world.answer(1, (adapter, text)[kind], behind)
                )
            if turn >= 5:
                firsts.append((took[0], took[1]))

    asyncio.run(work())
    differences = [1e3 * (mine - other) for mine, other in firsts]
    median = statistics.median(differences)
    mine, other = (1e3 * statistics.median(one) for one in zip(*firsts, strict=True))
    quarters = f"{quantile(differences, 0.25):+.2f} to {quantile(differences, 0.75):+.2f}"
    yield judged(
        "adapters/first" if rows == ROWS else "adapters/first-32",
        median,
        f"behind a warm adapter of {rows} rows {median:+.2f} ms to a cached text's (quarters "
        f"{quarters}, {sizes.pairs} pairs; medians {mine:.1f} and {other:.1f} ms)",
        samples={"ms": differences},
    )


async def first_s(engine: Engine, *answers: Answer) -> float:
    """Seconds until the first token of a request; the rest of it is waited for."""
    start = time.perf_counter()
    first = 0.0
    async for piece in engine.submit(Request(answers)):
        if piece.error is not None:
            raise piece.error
        first = first or time.perf_counter() - start
    return first


# ---------------------------------------------------------------------------------------- arrivals


def arrivals(world: World, sizes: Sizes, rows: int) -> Iterator[Item]:
    """One that arrives while others stream: nothing, a cold adapter, a text of the same length."""
    kinds = ("nothing", "adapter", "text")
    walls: dict[str, list[float]] = {kind: [] for kind in kinds}
    works: dict[str, list[float]] = {kind: [] for kind in kinds}

    async def work() -> None:
        for run in range(sizes.runs):
            for kind in random.Random(run).sample(kinds, len(kinds)):
                gaps = await _window(world, sizes, kind, rows)
                walls[kind].append(1e3 * quantile([wall for wall, _ in gaps], 0.99))
                works[kind].append(1e3 * quantile([spent for _, spent in gaps], 0.99))

    asyncio.run(work())
    raises, others = _raises(walls, "adapter"), _raises(walls, "text")
    median = statistics.median(raises)
    yield judged(
        "adapters/cold",
        median,
        f"while {sizes.streams} streams run {median:+.1f} ms (runs {_listed(raises)}; without "
        f"{_listed(walls['nothing'])}; a text instead {statistics.median(others):+.1f})",
        samples={"ms": raises},
    )
    raises, others = _raises(works, "adapter"), _raises(works, "text")
    yield (
        f"the same in processor time of a thread: {statistics.median(raises):+.1f} ms (runs "
        f"{_listed(raises)}; without {_listed(works['nothing'])}; a text instead "
        f"{statistics.median(others):+.1f})"
    )


def _raises(tails: Mapping[str, Sequence[float]], kind: str) -> list[float]:
    return [mine - other for mine, other in zip(tails[kind], tails["nothing"], strict=True)]


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.0f}" for value in values)


async def _window(world: World, sizes: Sizes, kind: str, rows: int) -> list[tuple[float, float]]:
    """Seconds between tokens of all streams, while they make one window of them.

    And of processor time, which neighbours on this machine stretch less.
    """
    gaps: list[tuple[float, float]] = []
    engine, margin, threads = world.engine, 8, torch.get_num_threads()
    going = asyncio.Event()

    async def stream() -> None:
        last, seen = (0.0, 0.0), 0
        answer = world.answer(sizes.window + 2 * margin, world.text(32))
        async for piece in engine.submit(Request((answer,))):
            now, count = _now(), len(piece.token_ids)
            if margin <= seen < margin + sizes.window:
                wall, spent = now[0] - last[0], now[1] - last[1]
                gaps.append((wall / count, spent / count / threads))
            last, seen = now, seen + count
            if seen >= margin + sizes.window // 3:
                going.set()

    streams = [asyncio.create_task(stream()) for _ in range(sizes.streams)]
    await going.wait()
    if kind != "nothing":
        prefix = world.adapter(rows) if kind == "adapter" else world.text(rows)
        await first_s(engine, world.answer(8, prefix, world.text(108)))
    await asyncio.gather(*streams)
    return gaps


# ------------------------------------------------------------------------------ tasks on a document


def tasks(world: World, sizes: Sizes, rows: int) -> Iterator[Item]:
    """Several tasks on one text, against reading it once and then answering them all."""
    adapters = [world.adapter(rows) for _ in range(sizes.tasks)]
    walls: list[float] = []
    processors: list[float] = []
    parts: list[tuple[float, float, float]] = []

    def answers(text: tuple[int, ...], new: int, count: int) -> list[Answer]:
        return [world.answer(new, text, one) for one in adapters[:count]]

    async def work() -> None:
        known = world.text(sizes.document)
        await _stages(world.engine, answers(known, sizes.new, sizes.tasks))
        for turn in range(3 * sizes.rounds + 1):  # Seconds each, so noise needs more of them.
            one, other = world.text(sizes.document), world.text(sizes.document)
            # Each of the three comes after decodes: a prompt right behind another finds the
            # processor slower, by a seventh on some machines.
            prefill = (await _stages(world.engine, answers(one, 1, 1)))[1]
            # All of this one is cached, but for each task's last token.
            first, end = await _stages(world.engine, answers(known, sizes.new, sizes.tasks))
            whole = (await _stages(world.engine, answers(other, sizes.new, sizes.tasks)))[1]
            known = other
            if turn:
                spent = [(whole[i], prefill[i], end[i] - first[i]) for i in (0, 1)]
                walls.append(spent[0][0] / sum(spent[0][1:]))
                processors.append(spent[1][0] / sum(spent[1][1:]))
                parts.append(spent[0])

    asyncio.run(work())
    ratio = statistics.median(walls)
    whole, prefill, decodes = (1e3 * statistics.median(one) for one in zip(*parts, strict=True))
    yield judged(
        "adapters/tasks-20" if rows == ROWS else "adapters/tasks-10",
        ratio,
        f"{sizes.tasks} tasks of {rows} rows on {sizes.document:,} tokens, {sizes.new} new each: "
        f"{ratio:.2f} x one prefill + the decodes (from {min(walls):.2f} to {max(walls):.2f}; "
        f"{whole:.0f} to {prefill:.0f} + {decodes:.0f} ms; of processor time "
        f"{statistics.median(processors):.2f} x)",
        samples={"x": walls},
    )


Spent = tuple[float, float]  # Seconds on the clock, and of processor time.


async def _stages(engine: Engine, answers: Sequence[Answer]) -> tuple[Spent, Spent]:
    """What it took until every answer of one request had a token, and until its end."""
    start, first, seen = _now(), (0.0, 0.0), set[int]()
    async for piece in engine.submit(Request(tuple(answers))):
        if piece.error is not None:
            raise piece.error
        if len(seen) < len(answers):
            seen.add(piece.index)
            first = _since(start)
    return first, _since(start)


def _now() -> Spent:
    return time.perf_counter(), time.process_time()


def _since(start: Spent) -> Spent:
    now = _now()
    return now[0] - start[0], now[1] - start[1]


def same_answers(sizes: Sizes) -> Iterator[Item]:
    """In fp64, where no rounding decides: many tasks together, one by one, and the plain loop."""
    small = GPTConfig(
        num_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=500,
        max_position_embeddings=NETWORK.max_position_embeddings,
        dtype="float64",
    )
    model = loaded(fresh(small, 0, std=0.5), CONFIG)
    with world_of(model) as world, engine_of(model, CONFIG) as other:
        adapters = [world.adapter(rows) for rows in (10, ROWS) for _ in range(sizes.tasks // 2)]
        text = world.text(sizes.document)
        answers = tuple(world.answer(sizes.new, text, one) for one in adapters)
        together = [list(one.token_ids) for one in answered(world.engine, [Request(answers)])]
        singly, plain = [], []
        for answer in answers:
            singly += [list(one.token_ids) for one in answered(other, [Request((answer,))])]
            assert answer.rows is not None
            table = open_adapter(Path(answer.rows.file)).table
            (alone,) = generate(model, [answer.prompt], answer.sampling, table=table)
            plain.append(alone.token_ids)
    equal = "equal" if together == singly == plain else "DIFFERENT"
    different = len({tuple(one) for one in together})
    yield (
        f"{len(answers)} tasks together, one by one, and by the plain loop, in fp64: {equal} "
        f"tokens ({different} different answers)"
    )


# ---------------------------------------------------------------------------------------- registry


def registry(world: World, sizes: Sizes, rows: int) -> Iterator[Item]:
    """Very many adapters in a folder: to read them all, to look again, to ask one of them."""
    count = sizes.registered
    for _ in range(count):
        world.adapter(rows)
    config = world.network

    def check(adapter: Adapter) -> None:
        check_adapter(adapter, config, None)

    adapters = Adapters(world.folder, check, adapters_max=count + 1)
    before, start = own_memory(os.getpid()), time.perf_counter()
    adapters.scan()
    took, kib = time.perf_counter() - start, own_memory(os.getpid()) - before
    start = time.perf_counter()
    adapters.scan()
    again = time.perf_counter() - start
    world.adapter(rows)
    start = time.perf_counter()
    adapters.scan()
    one_more = time.perf_counter() - start
    assert len(adapters) == count + 1, "the folder was not read"
    yield judged(
        "adapters/registered",
        len(adapters) - 1,
        f"{count:,} read and checked in {took:.1f} s, {1e3 * took / count:.2f} ms and "
        f"{kib / count:.1f} KiB each; looked at again in {1e3 * again:.0f} ms, with one more file "
        f"in {1e3 * one_more:.0f} ms",
    )
    keys = world.draw.sample([resident.key for resident, _ in adapters.list()], 20)
    firsts: dict[str, list[float]] = {kind: [] for kind in ("warm-up", "cold", "warm", "text")}

    async def work() -> None:
        for turn, key in enumerate(keys):
            start = time.perf_counter()
            adapter = adapters.resolve(key).rows
            found = time.perf_counter() - start
            for kind in ("cold", "warm", "text"):
                prefix = world.text(rows) if kind == "text" else adapter
                took = await first_s(world.engine, world.answer(1, prefix, world.text(sizes.text)))
                firsts[kind if turn >= 3 else "warm-up"].append(took + found)

    asyncio.run(work())
    ms = {kind: 1e3 * statistics.median(took) for kind, took in firsts.items()}
    yield (
        f"first token of one of them: cold {ms['cold']:.1f} ms, warm {ms['warm']:.1f} ms; of a "
        f"text as long {ms['text']:.1f} ms"
    )


# Each measurement, and of how many rows an adapter is then.
PARTED: dict[str, tuple[Callable[[World, Sizes, int], Iterator[Item]], Sequence[int]]] = {
    "mixed": (mixed, (ROWS,)),
    "first": (first_tokens, (ROWS,)),
    "registry": (registry, (2,)),
    "mixed-32": (mixed, (2 * 16,)),
    "first-32": (first_tokens, (2 * 16,)),
    "arrivals": (arrivals, (ROWS,)),
    "tasks": (tasks, (10, ROWS)),
}
PARTS = (*PARTED, "equal")
