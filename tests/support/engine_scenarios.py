"""Scenarios: requests of many callers to one engine, and the ranks that run them.

A scenario is drawn from a seed: prompts with and without a common prefix, virtual tokens at any
position, arrivals and cancellations counted in engine updates, and limits that force chunked
prefill, preemption and eviction. It runs on any split; tests compare each answer with the request
alone.
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
from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.engine_core.engine_loop import EngineLoop
from serving.messages import (
    AdapterRef,
    Cancel,
    Close,
    EngineStats,
    Failed,
    FromEngineLoop,
    Outcome,
    SequenceOutput,
    Step,
    Submission,
    TokenScore,
    Update,
    decode_to_rank,
    encode,
)
from serving.ranks.message_socket import Channel
from serving.scheduler.scheduler import Scheduler
from serving.worker.kv_cache_size import available_kv_blocks
from serving.worker.model_runner import ModelRunner
from tests.support.capturable_attention import CapturableAttention
from tests.support.models import SERVED_CONFIGS, build

WAIT_S = 240.0  # A time-out for hangs: ranks load, and run the scenarios one after another.


@dataclass(frozen=True)
class Scenario:
    """Requests with their arrival times, in engine updates; earlier if the engine is idle."""

    name: str  # Name of the model configuration.
    dtype: str
    settings: dict[str, Any]
    submissions: list[tuple[int, Submission]]
    cancels: list[tuple[int, int]] = field(default_factory=list)
    prefix_write_tokens_max: int = 256  # Limit of prefix tokens that are computed before a step.
    captured: bool = False  # Decode steps are captured, and replayed by running them again.

    @property
    def config(self) -> ServerConfig:
        return ServerConfig("scene", **self.settings)


@dataclass
class Answer:
    """All output of one submission."""

    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore | None] = field(default_factory=list)
    end: str | None = None
    reason: str = ""
    cached: int = 0

    def add(self, output: SequenceOutput) -> None:
        assert self.end is None, "there is output after the end"
        self.tokens += output.tokens
        self.scores += output.scores
        self.prompt_scores += output.prompt_scores
        self.end = output.end
        self.reason = output.reason
        self.cached = max(self.cached, output.cached_tokens)


@dataclass
class ScenarioRun:
    """The outputs and statistics of a scenario."""

    answers: dict[int, Answer]
    load: EngineStats
    in_flight: int  # The most steps in flight, where the last stage is on another rank.
    largest: int  # New tokens of the largest step.


@dataclass(frozen=True)
class AdapterFiles:
    """Adapters of one width, saved as files: their references and their tables."""

    rows: list[AdapterRef]
    broken: AdapterRef  # Overflows in fp32, because a file cannot contain NaN or infinite values.
    tables: dict[str, Tensor]

    @classmethod
    def make(cls, folder: Path, hidden_size: int, sizes: list[int]) -> "AdapterFiles":
        drawn = [
            torch.randn(size, hidden_size, generator=torch.Generator().manual_seed(size))
            for size in sizes
        ]
        drawn.append(torch.full((2, hidden_size), 3e38))
        tables = {}
        rows = []
        for number, table in enumerate(drawn):
            adapter = build_adapter(Card(f"adapter-{number}"), table)
            path = folder / f"{adapter.card.name}.safetensors"
            save_adapter(adapter, path)
            tables[adapter.digest] = adapter.table
            rows.append(AdapterRef(adapter.digest, len(table), str(path)))
        return cls(rows[:-1], rows[-1], tables)

    def table(self, submission: Submission) -> Tensor | None:
        return (
            self.tables[submission.adapter_ref.digest]
            if submission.adapter_ref is not None
            else None
        )


def draw_scenario(
    name: str, seed: int, adapters: AdapterFiles, *, dtype: str = "float64", asks: int = 8
) -> Scenario:
    """A scenario from a seed. Requests in fp32 are greedy: margins show where rounding decides."""
    draw = random.Random(f"{name} {seed}")
    network = SERVED_CONFIGS[name]
    block = draw.choice([1, 2, 3, 4, 8])
    running = draw.randint(2, 6)
    settings = {
        "kv_block_tokens": block,
        "running_requests_max": running,
        "step_tokens_max": max(block, running, draw.choice([4, 7, 16, 40, 200])),
        # At least what the longest sequence needs; most sizes are too small for all running ones.
        "kv_tokens_max": network.max_position_embeddings + draw.choice([0, 0, 10, 40, 400]),
        "prefix_cache": draw.random() < 0.75,
        "adapter_rows_max": draw.choice([6, 12, 64]),
        "adapter_bytes_max": draw.choice([1, 1 << 20]),
        "prefill_stall_ms_max": draw.choice([0.001, 1000.0]),
        "pp": 1,
    }
    documents = [_draw_tokens(draw, network, draw.choice([2, 5, 9, 17, 30])) for _ in range(2)]
    requests: list[tuple[int, Submission]] = []
    for number in range(asks):
        text = draw.choice(documents) + _draw_tokens(draw, network, draw.choice([0, 0, 1, 5]))
        rows = draw.choice([None, None, *adapters.rows])
        prompt = (
            _insert_virtual_tokens(draw, text, rows, network.vocab_size)
            if rows is not None
            else text
        )
        tokens_left = network.max_position_embeddings - len(prompt)
        new = min(tokens_left, draw.choice([0, 1, 5, 12, 25, 40]))
        sampling = SamplingParams(max_new_tokens=new, logprobs=2)
        if dtype == "float64":
            sampling = _draw_sampling(draw, new, network.vocab_size)
        submission = Submission(
            number,
            prompt,
            sampling,
            adapter_ref=rows,
            tenant=draw.choice(["", "", "red"]),
            service=draw.choice(["latency", "throughput"]),
            priority=draw.randint(-1, 2),
        )
        requests.append((draw.choice([0, 0, 0, 2, 5, 9, 20]), submission))
    cancels = [(draw.randint(1, 12), number) for number in range(asks) if draw.random() < 0.12]
    return Scenario(name, dtype, settings, requests, cancels)


def preemption_scenario(name: str, adapters: AdapterFiles) -> Scenario:
    """A scenario that needs preemption, chunked prefill, prefix cache hits, and a cancellation."""
    network = SERVED_CONFIGS[name]
    draw = random.Random(name)
    settings = {
        "kv_block_tokens": 4,
        "running_requests_max": 4,
        "step_tokens_max": 8,
        "kv_tokens_max": 72,
        "adapter_rows_max": 6,
    }
    rows = adapters.rows[1]
    document = _draw_tokens(draw, network, 18)
    virtual = [network.vocab_size + row for row in range(rows.row_count)]
    long = SamplingParams(max_new_tokens=40, logprobs=2)
    short = SamplingParams(max_new_tokens=6, logprobs=2)
    requests = [
        (0, Submission(number, _draw_tokens(draw, network, 6), long)) for number in range(5)
    ]
    requests += [(12, Submission(5, document, short, priority=2))]
    requests += [(60, Submission(6, document + virtual, short, adapter_ref=rows))]
    requests += [(60, Submission(7, document + virtual[:1], short, adapter_ref=rows))]
    return Scenario(name, "float64", settings, requests, [(10, 4)])


def shared_document_scenario(name: str, adapters: AdapterFiles) -> Scenario:
    """Several adapters on one document, whose last block is copied: virtual tokens follow it."""
    network = SERVED_CONFIGS[name]
    settings = {"kv_block_tokens": 8, "step_tokens_max": 8, "running_requests_max": 4}
    rule = SamplingParams(max_new_tokens=6, logprobs=2)
    document = _draw_tokens(random.Random(name), network, 30)
    asks = [(0, Submission(0, document, rule))]
    for number, rows in enumerate([*adapters.rows, adapters.rows[0]], 1):
        virtual = [network.vocab_size + row for row in range(rows.row_count)]
        asks.append((20, Submission(number, document + virtual, rule, adapter_ref=rows)))
    return Scenario(name, "float64", settings | {"kv_tokens_max": 400}, asks)


def overflow_scenario(name: str, adapters: AdapterFiles) -> Scenario:
    """In fp32, requests whose activations overflow among finite ones, with little memory."""
    network = SERVED_CONFIGS[name]
    draw = random.Random(name)
    settings = {
        "kv_block_tokens": 4,
        "running_requests_max": 4,
        "step_tokens_max": 12,
        "kv_tokens_max": 80,
    }
    rows = adapters.broken
    vocabulary = network.vocab_size
    rule = SamplingParams(max_new_tokens=12, logprobs=2)
    asks: list[tuple[int, Submission]] = []
    for number in range(10):
        text = _draw_tokens(draw, network, draw.choice([3, 9, 20]))
        if number % 3 == 1:  # At the start, in the middle, or at the end.
            cut = len(text) * (number // 3) // 2
            prompt = [*text[:cut], vocabulary, vocabulary + 1, *text[cut:]]
            asks.append((0, Submission(number, prompt, rule, adapter_ref=rows)))
        else:
            asks.append((draw.choice([0, 3, 8]), Submission(number, text, rule)))
    return Scenario(name, "float32", settings, asks)


def _draw_tokens(draw: random.Random, network: GPTConfig, count: int) -> list[int]:
    return [draw.randrange(network.vocab_size) for _ in range(count)]


def _insert_virtual_tokens(
    draw: random.Random, text: list[int], rows: AdapterRef, vocabulary: int
) -> list[int]:
    """The text with the adapter's rows at its start, at its end, or in two runs anywhere."""
    virtual = [vocabulary + row for row in range(rows.row_count)]
    cut = draw.randint(0, len(virtual))
    start, end = draw.choice([(0, 0), (len(text), len(text)), (0, len(text)), (1, len(text))])
    return text[:start] + virtual[:cut] + text[start:end] + virtual[cut:] + text[end:]


def _draw_sampling(draw: random.Random, new: int, vocabulary: int) -> SamplingParams:
    """Greedy or drawn sampling, with any of the other parameters."""

    def draw_tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    plain = SamplingParams(max_new_tokens=new)
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
        "logit_bias": tuple((token, 5.0) for token in draw_tokens(3)),
        "allowed_token_ids": draw_tokens(40),
        "bad_words": (draw_tokens(1), draw_tokens(2)),
        "stop_token_ids": draw_tokens(12),
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
    """Submits and cancels at their times, and gathers outputs. Only the engine loop calls it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.scenario_run = ScenarioRun({}, EngineStats(), 0, 0)
        self.planner: EngineLoop | None = None
        self._asks = sorted(scenario.submissions, key=lambda request: request[0])
        self._cancels = sorted(scenario.cancels)
        self._updates = 0

    def feed(self) -> None:
        assert self.planner is not None
        answers = self.scenario_run.answers
        if all(answer.end is not None for answer in answers.values()) and self._asks:
            self._updates = max(self._updates, self._asks[0][0])
        while self._asks and self._asks[0][0] <= self._updates:
            submission = self._asks.pop(0)[1]
            answers[submission.sequence_id] = Answer()
            self.planner.put_message(submission)
        while self._cancels and self._cancels[0][0] <= self._updates:
            number = self._cancels.pop(0)[1]
            if number in answers:
                self.planner.put_message(Cancel([number]))
        if not self._asks and all(answer.end is not None for answer in answers.values()):
            self.planner.put_message(Close())

    def give(self, message: FromEngineLoop) -> None:
        if isinstance(message, Failed):
            raise AssertionError(message.reason)
        assert isinstance(message, Update)
        self._updates += 1
        self.scenario_run.load = message.stats
        step_tokens = [size.tokens for size in message.steps_in_flight]
        self.scenario_run.largest = max(self.scenario_run.largest, *step_tokens, 0)
        for output in message.outputs:
            self.scenario_run.answers[output.sequence_id].add(output)
        self.feed()


class OtherRanks:
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


def run_scenarios(
    rank: int, tp: int, pp: int, scenarios: list[Scenario], folder: str, ep: int = 1
) -> list[ScenarioRun]:
    """Run all scenarios on this rank, one after another. Rank 0 returns their runs."""
    torch.set_num_threads(1)
    mesh = Mesh.create(tp, pp, ep=ep) if max(tp, ep) * pp > 1 else Mesh.single()
    models: dict[tuple[str, str], GPT] = {}
    results = []
    for number, scenario in enumerate(scenarios):
        key = scenario.name, scenario.dtype
        if key not in models:
            models[key] = build(
                SERVED_CONFIGS[scenario.name],
                mesh,
                dtype=getattr(torch, scenario.dtype),
                attention_backend=CapturableAttention(),
            )
        scenario = replace(scenario, settings=scenario.settings | {"tp": tp, "pp": pp, "ep": ep})
        address = f"{folder}/{number}"
        if rank == 0:
            results.append(lead(models[key], scenario, address))
        else:
            follow(models[key], scenario, address)
    return results


def lead(model: GPT, scenario: Scenario, address: str = "") -> ScenarioRun:
    """Rank 0: run the engine loop until every request has ended."""
    config = scenario.config
    mesh = model.mesh
    runner = build_runner(model, config, scenario.captured)
    scheduler = Scheduler(
        vocab_size=model.config.vocab_size,
        blocks=runner.blocks,
        scheduler_config=config.scheduler_config,
        cache_config=config.cache_config,
        context_tokens_max=model.config.max_position_embeddings,
        stages=mesh.pp,
        prefix_write_tokens_max=scenario.prefix_write_tokens_max,
        async_scheduling=config.uses_async_scheduling("cpu"),
        windows=runner.windows,
    )
    feeder = _Feeder(scenario)
    peers = OtherRanks(address, mesh.ranks - 1) if mesh.ranks > 1 else None
    feeder.planner = EngineLoop(
        scheduler,
        runner,
        config.scheduler_config,
        config.cache_config,
        config.observability_config,
        feeder.give,
        send_step=peers.send if peers else None,
        receive_outcome=peers.take if peers else None,
    )
    feeder.feed()
    reason = feeder.planner.run()
    assert reason is None, reason
    scheduler.check()
    feeder.scenario_run.in_flight = peers.in_flight_max if peers else 0
    return feeder.scenario_run


def follow(model: GPT, scenario: Scenario, address: str) -> None:
    """Another rank: execute steps until the end."""
    runner = build_runner(model, scenario.config, scenario.captured)
    mesh = model.mesh
    channel = Channel(_connect(address))
    channel.send(b"last" if model.is_last_stage and mesh.is_first_in_stage else b"other")
    while True:
        frame = channel.receive(WAIT_S)
        assert frame is not None, "rank 0 is gone"
        message = decode_to_rank(frame)
        if not isinstance(message, Step):
            return
        outcome: Outcome | None = runner.run_step(message)
        if outcome is not None:
            channel.send(encode(outcome))


def build_runner(model: GPT, config: ServerConfig, captured: bool = False) -> ModelRunner:
    return ModelRunner(
        model,
        config.scheduler_config,
        config.cache_config,
        async_scheduling=config.uses_async_scheduling("cpu"),
        blocks=available_kv_blocks(model, config.scheduler_config, config.cache_config),
        slots=config.scheduler_config.running_requests_max,
        capturer=(lambda work: work) if captured else None,
    )


def _connect(address: str) -> socket.socket:
    end = time.monotonic() + WAIT_S
    while not Path(address + ".ready").exists():
        assert time.monotonic() < end, "rank 0 does not listen"
        time.sleep(0.005)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    return sock
