"""Scenes: what many callers ask of one engine, and the engine's ranks that play them.

A scene is drawn from a seed: prompts that begin alike or not, virtual tokens anywhere, arrivals and
cancels by the engine's own steps, and limits that force chunks, preemption and eviction. It runs on
any split; what a caller would have got alone is for the tests to compare.
"""

import random
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.adapters.adapter_file import Card, build_adapter, save_adapter
from gpt.config import GPTConfig
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import Sampling
from serving.config import ServerConfig
from serving.messages import (
    Cancel,
    Close,
    Failed,
    FromPlanner,
    Load,
    Made,
    Outcome,
    Rows,
    Scored,
    Step,
    Submission,
    Update,
    encode,
    to_rank,
)
from serving.ranks.message_socket import Channel
from serving.scheduler.scheduler import Scheduler
from serving.worker.engine_loop import Planner
from serving.worker.model_runner import Runner, blocks_that_fit
from tests.support.capturable_attention import recordable
from tests.support.models import CONFIGS, build

WAIT_S = 30.0


@dataclass(frozen=True)
class Scene:
    """Who asks what and when: after how many updates, or earlier if nothing else is left to do."""

    name: str  # Of the network.
    dtype: str
    settings: dict[str, Any]
    asks: list[tuple[int, Submission]]
    cancels: list[tuple[int, int]] = field(default_factory=list)
    fill_tokens_max: int = 256  # Of prefixes, before a step.
    recorded: bool = False  # Decoding steps are recorded, and replayed by doing them again.

    @property
    def config(self) -> ServerConfig:
        return ServerConfig("scene", **self.settings)


@dataclass
class Answer:
    """All that was made for one submission."""

    tokens: list[int] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)
    prompt_scores: list[Scored | None] = field(default_factory=list)
    end: str | None = None
    reason: str = ""
    cached: int = 0

    def add(self, made: Made) -> None:
        assert self.end is None, "something was made after the end"
        self.tokens += made.tokens
        self.scores += made.scores
        self.prompt_scores += made.prompt_scores
        self.end, self.reason = made.end, made.reason
        self.cached = max(self.cached, made.cached_tokens)


@dataclass
class Played:
    """What came of a scene."""

    answers: dict[int, Answer]
    load: Load
    in_flight: int  # The most steps at once, where the last stage is elsewhere.
    largest: int  # New tokens of the largest step.


@dataclass(frozen=True)
class Shelf:
    """Adapters of one width, saved as files: their rows, and their tables."""

    rows: list[Rows]
    broken: Rows  # A file cannot hold what is not finite, but what overflows in fp32.
    tables: dict[str, Tensor]

    @classmethod
    def make(cls, folder: Path, hidden_size: int, sizes: list[int]) -> "Shelf":
        tables = [
            torch.randn(size, hidden_size, generator=torch.Generator().manual_seed(size))
            for size in sizes
        ]
        tables.append(torch.full((2, hidden_size), 3e38))
        kept, rows = {}, []
        for number, table in enumerate(tables):
            adapter = build_adapter(Card(f"adapter-{number}"), table)
            path = folder / f"{adapter.card.name}.safetensors"
            save_adapter(adapter, path)
            kept[adapter.digest] = adapter.table
            rows.append(Rows(adapter.digest, len(table), str(path)))
        return cls(rows[:-1], rows[-1], kept)

    def table(self, submission: Submission) -> Tensor | None:
        return self.tables[submission.rows.digest] if submission.rows is not None else None


def drawn(name: str, seed: int, shelf: Shelf, *, dtype: str = "float64", asks: int = 8) -> Scene:
    """A scene from a seed. In fp32 all is greedy, so that margins tell where rounding decides."""
    draw = random.Random(f"{name} {seed}")
    network = CONFIGS[name]
    block = draw.choice([1, 2, 3, 4, 8])
    running = draw.randint(2, 6)
    settings = {
        "kv_block_tokens": block,
        "running_requests_max": running,
        "step_tokens_max": max(block, running, draw.choice([4, 7, 16, 40, 200])),
        # From what one sequence needs at its longest: most are too small for all that run.
        "kv_tokens_max": network.max_position_embeddings + draw.choice([0, 0, 10, 40, 400]),
        "prefix_cache": draw.random() < 0.75,
        "adapter_rows_max": draw.choice([6, 12, 64]),
        "adapter_bytes_max": draw.choice([1, 1 << 20]),
        "prefill_stall_ms_max": draw.choice([0.001, 1000.0]),
        "pp": 1,
    }
    documents = [_ids(draw, network, draw.choice([2, 5, 9, 17, 30])) for _ in range(2)]
    made: list[tuple[int, Submission]] = []
    for number in range(asks):
        text = draw.choice(documents) + _ids(draw, network, draw.choice([0, 0, 1, 5]))
        rows = draw.choice([None, None, *shelf.rows])
        prompt = _mixed(draw, text, rows, network.vocab_size) if rows is not None else text
        room = network.max_position_embeddings - len(prompt)
        new = min(room, draw.choice([0, 1, 5, 12, 25, 40]))
        sampling = Sampling(max_new_tokens=new, logprobs=2)
        if dtype == "float64":
            sampling = _sampling(draw, new, network.vocab_size)
        one = Submission(
            number,
            prompt,
            sampling,
            rows=rows,
            tenant=draw.choice(["", "", "red"]),
            service=draw.choice(["latency", "throughput"]),
            priority=draw.randint(-1, 2),
        )
        made.append((draw.choice([0, 0, 0, 2, 5, 9, 20]), one))
    cancels = [(draw.randint(1, 12), number) for number in range(asks) if draw.random() < 0.12]
    return Scene(name, dtype, settings, made, cancels)


def squeezed(name: str, shelf: Shelf) -> Scene:
    """A scene that cannot go without preemption, chunks, copies from the cache, and a cancel."""
    network = CONFIGS[name]
    draw = random.Random(name)
    settings = {
        "kv_block_tokens": 4,
        "running_requests_max": 4,
        "step_tokens_max": 8,
        "kv_tokens_max": 72,
        "adapter_rows_max": 6,
    }
    rows = shelf.rows[1]
    document = _ids(draw, network, 18)
    virtual = [network.vocab_size + row for row in range(rows.count)]
    long, short = Sampling(max_new_tokens=40, logprobs=2), Sampling(max_new_tokens=6, logprobs=2)
    made = [(0, Submission(number, _ids(draw, network, 6), long)) for number in range(5)]
    made += [(12, Submission(5, document, short, priority=2))]
    made += [(60, Submission(6, document + virtual, short, rows=rows))]
    made += [(60, Submission(7, document + virtual[:1], short, rows=rows))]
    return Scene(name, "float64", settings, made, [(10, 4)])


def studied(name: str, shelf: Shelf) -> Scene:
    """Several tasks on one document, whose last block they copy: virtual tokens stand behind it."""
    network = CONFIGS[name]
    settings = {"kv_block_tokens": 8, "step_tokens_max": 8, "running_requests_max": 4}
    rule = Sampling(max_new_tokens=6, logprobs=2)
    document = _ids(random.Random(name), network, 30)
    asks = [(0, Submission(0, document, rule))]
    for number, rows in enumerate([*shelf.rows, shelf.rows[0]], 1):
        virtual = [network.vocab_size + row for row in range(rows.count)]
        asks.append((20, Submission(number, document + virtual, rule, rows=rows)))
    return Scene(name, "float64", settings | {"kv_tokens_max": 400}, asks)


def poisoned(name: str, shelf: Shelf) -> Scene:
    """In fp32, some whose numbers overflow among some whose do not, with little memory for all."""
    network = CONFIGS[name]
    draw = random.Random(name)
    settings = {
        "kv_block_tokens": 4,
        "running_requests_max": 4,
        "step_tokens_max": 12,
        "kv_tokens_max": 80,
    }
    rows, vocabulary = shelf.broken, network.vocab_size
    rule = Sampling(max_new_tokens=12, logprobs=2)
    asks: list[tuple[int, Submission]] = []
    for number in range(10):
        text = _ids(draw, network, draw.choice([3, 9, 20]))
        if number % 3 == 1:  # At its start, in its middle, or at its end.
            cut = len(text) * (number // 3) // 2
            prompt = [*text[:cut], vocabulary, vocabulary + 1, *text[cut:]]
            asks.append((0, Submission(number, prompt, rule, rows=rows)))
        else:
            asks.append((draw.choice([0, 3, 8]), Submission(number, text, rule)))
    return Scene(name, "float32", settings, asks)


def _ids(draw: random.Random, network: GPTConfig, count: int) -> list[int]:
    return [draw.randrange(network.vocab_size) for _ in range(count)]


def _mixed(draw: random.Random, text: list[int], rows: Rows, vocabulary: int) -> list[int]:
    """The text with the adapter's rows at its start, at its end, or in two runs anywhere."""
    virtual = [vocabulary + row for row in range(rows.count)]
    cut = draw.randint(0, len(virtual))
    first, second = draw.choice([(0, 0), (len(text), len(text)), (0, len(text)), (1, len(text))])
    return text[:first] + virtual[:cut] + text[first:second] + virtual[cut:] + text[second:]


def _sampling(draw: random.Random, new: int, vocabulary: int) -> Sampling:
    """Greedy or drawn, and any of the other rules."""

    def some(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    plain = Sampling(max_new_tokens=new)
    if draw.random() < 0.4:
        return plain
    maybe: dict[str, Any] = {
        "temperature": draw.choice([0.3, 1.0, 1.7]),
        "top_k": draw.choice([1, 5, 50]),
        "top_p": draw.choice([0.2, 0.9]),
        "min_p": draw.choice([0.01, 0.2]),
        "repetition_penalty": draw.choice([0.8, 1.3]),
        "presence_penalty": draw.choice([-1.0, 1.5]),
        "frequency_penalty": draw.choice([-0.5, 1.0]),
        "logit_bias": tuple((token, 5.0) for token in some(3)),
        "allowed_token_ids": some(40),
        "bad_words": (some(1), some(2)),
        "stop_token_ids": some(12),
        "min_new_tokens": new // 2,
        "logprobs": draw.choice([0, 3]),
        "prompt_logprobs": draw.choice([0, 2]),
        "typical_p": draw.choice([0.2, 0.9]),
        "no_repeat_ngram_size": draw.choice([1, 2, 4]),
        "length_decay": draw.choice([(0, 1.05), (new // 2, 1.5)]),
    }
    chosen = {name: value for name, value in maybe.items() if draw.random() < 0.4}
    return replace(plain, seed=draw.randrange(2**64), **chosen)


class _Feeder:
    """Asks and cancels at their times, and gathers what is made. Called by the planner alone."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.played = scene, Played({}, Load(), 0, 0)
        self.planner: Planner | None = None
        self._asks = sorted(scene.asks, key=lambda one: one[0])
        self._cancels = sorted(scene.cancels)
        self._updates = 0

    def feed(self) -> None:
        assert self.planner is not None
        answers = self.played.answers
        if all(one.end is not None for one in answers.values()) and self._asks:
            self._updates = max(self._updates, self._asks[0][0])
        while self._asks and self._asks[0][0] <= self._updates:
            submission = self._asks.pop(0)[1]
            answers[submission.number] = Answer()
            self.planner.put(submission)
        while self._cancels and self._cancels[0][0] <= self._updates:
            number = self._cancels.pop(0)[1]
            if number in answers:
                self.planner.put(Cancel([number]))
        if not self._asks and all(one.end is not None for one in answers.values()):
            self.planner.put(Close())

    def give(self, message: FromPlanner) -> None:
        if isinstance(message, Failed):
            raise AssertionError(message.reason)
        assert isinstance(message, Update)
        self._updates += 1
        self.played.load = message.load
        self.played.largest = max(self.played.largest, message.step_tokens)
        for made in message.made:
            self.played.answers[made.number].add(made)
        self.feed()


class Peers:
    """The other ranks, as rank 0 sees them."""

    def __init__(self, address: str, count: int) -> None:
        self._last: Channel | None = None
        self._channels: list[Channel] = []
        self.in_flight = self.in_flight_max = 0
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen()
            server.settimeout(WAIT_S)
            Path(address + ".ready").touch()
            for _ in range(count):
                channel = Channel(server.accept()[0])
                name = channel.receive(WAIT_S)
                self._last = channel if name == b"last" else self._last
                self._channels.append(channel)

    def send(self, frame: bytes) -> None:
        if self._last is not None:
            self.in_flight += 1
            self.in_flight_max = max(self.in_flight_max, self.in_flight)
        for channel in self._channels:
            assert channel.send(frame)

    def take(self) -> bytes:
        assert self._last is not None
        frame = self._last.receive(WAIT_S)
        assert frame is not None, "the last stage is gone"
        self.in_flight -= 1
        return frame


def play(rank: int, tp: int, pp: int, scenes: list[Scene], folder: str) -> list[Played]:
    """All scenes on this rank, one after another. Rank 0 has what came of them."""
    torch.set_num_threads(1)
    mesh = Mesh.create(tp, pp) if tp * pp > 1 else Mesh.single()
    models: dict[tuple[str, str], GPT] = {}
    results = []
    for number, scene in enumerate(scenes):
        key = scene.name, scene.dtype
        if key not in models:
            model = build(CONFIGS[scene.name], mesh, dtype=getattr(torch, scene.dtype))
            models[key] = recordable(model)
        scene = replace(scene, settings=scene.settings | {"tp": tp, "pp": pp})
        address = f"{folder}/{number}"
        if rank == 0:
            results.append(lead(models[key], scene, address))
        else:
            follow(models[key], scene, address)
    return results


def lead(model: GPT, scene: Scene, address: str = "") -> Played:
    """Rank 0: the planner's loop until every ask has ended."""
    config, mesh = scene.config, model.mesh
    runner = made_runner(model, config, scene.recorded)
    scheduler = Scheduler(
        vocab_size=model.config.vocab_size,
        blocks=runner.blocks,
        config=config,
        context_tokens_max=model.config.max_position_embeddings,
        stages=mesh.pp,
        fill_tokens_max=scene.fill_tokens_max,
        ahead=config.steps_ahead("cpu"),
    )
    feeder = _Feeder(scene)
    peers = Peers(address, mesh.tp * mesh.pp - 1) if mesh.tp * mesh.pp > 1 else None
    feeder.planner = Planner(
        scheduler,
        runner,
        config,
        feeder.give,
        send_step=peers.send if peers else None,
        take_outcome=peers.take if peers else None,
    )
    feeder.feed()
    reason = feeder.planner.run()
    assert reason is None, reason
    scheduler.check()
    feeder.played.in_flight = peers.in_flight_max if peers else 0
    return feeder.played


def follow(model: GPT, scene: Scene, address: str) -> None:
    """Another rank: do what steps say until the end."""
    runner = made_runner(model, scene.config, scene.recorded)
    mesh = model.mesh
    channel = Channel(_connected(address))
    channel.send(b"last" if model.last and mesh.tp_rank == 0 else b"other")
    while True:
        frame = channel.receive(WAIT_S)
        assert frame is not None, "rank 0 is gone"
        message = to_rank(frame)
        if not isinstance(message, Step):
            return
        outcome: Outcome | None = runner.run(message)
        if outcome is not None:
            channel.send(encode(outcome))


def made_runner(model: GPT, config: ServerConfig, recorded: bool = False) -> Runner:
    return Runner(
        model,
        config,
        blocks=blocks_that_fit(model, config),
        slots=config.running_requests_max,
        record=(lambda work: work) if recorded else None,
    )


def _connected(address: str) -> socket.socket:
    end = time.monotonic() + WAIT_S
    while not Path(address + ".ready").exists():
        assert time.monotonic() < end, "rank 0 does not listen"
        time.sleep(0.005)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    return sock
