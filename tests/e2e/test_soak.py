"""Soak test of the engine: ten minutes of random load, every request ends, and nothing grows.

`SOAK_S` in the environment is the duration of each soak in seconds. The load has arrivals,
cancellations, deadlines, several answers, adapters that come and go, memory for a few sequences
only, and killed ranks. The oracle is the reference loop, for a sample of the answers.
"""

import asyncio
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt
from gpt.adapters.adapter_file import Card, build_adapter, save_adapter
from gpt.errors import AdapterError
from gpt.generation.generate import generate
from serving.config import ServerConfig
from serving.ranks.supervisor import LocalSupervisor
from serving.request import (
    AnswerSpec,
    Ask,
    DeadlinePassedError,
    EngineFaultError,
    OverloadedError,
    UnavailableError,
    UnknownAdapterError,
)
from serving.service.service import ServableCheckpoint, Service, in_process_transport
from tests.support.process_memory import HeapUsage, anonymous_bytes
from tests.support.servers import CONFIG, eventually, write_checkpoint

pytestmark = pytest.mark.soak

SOAK_S = float(os.environ.get("SOAK_S", "600"))
LAPS = 6  # The engine is drained and measured after each; the first two are warm-up.
WARM_LAPS = 2
USERS = 24
ANSWER_S = 180.0  # The limit of every request, with rank losses.
SAMPLED_ANSWERS = 150  # Answers that are compared with the reference loop's.
ADAPTERS = 12  # Adapters that exist at a time.
NOTICED_S = 20.0  # A rank's end is noticed at once; a busy machine is slow.
# Allowed growth from the first measured lap to the last. Nothing keeps more after a thousand
# requests than after a hundred, but bounded buffers (the flight recorder, the sample, ended
# sequences still in a queue, malloc's cache for each thread, which counts as allocated) vary, and
# are full only after some minutes: 200 KiB were seen. In ten minutes, with a core of its own,
# 15,000 requests count: this is 50 bytes, and a quarter of a Python object, for each.
BYTES_MAX = 768 << 10
BLOCKS_MAX = 4000
OBJECTS_MAX = 1000
# Pages are coarse: Python takes a mebibyte at a time, malloc and each thread's stack a few pages.
PAGES_MAX = 3 << 20
# One object for each token id, so that the soak's own records do not grow.
IDS = list(range(CONFIG.vocab_size))


@dataclass(frozen=True)
class ProcessState:
    """The resources of this process while the engine is idle."""

    heap: HeapUsage
    anonymous: int
    threads: int
    files: list[str]  # The target of each open file descriptor.
    requests: int  # That have ended.

    @classmethod
    def now(cls, requests: int) -> "ProcessState":
        heap = HeapUsage.now()
        files = []
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # The descriptor of the listing is closed.
                files.append(os.readlink(f"/proc/self/fd/{name}"))
        return cls(heap, anonymous_bytes(), threading.active_count(), files, requests)

    def __str__(self) -> str:
        return (
            f"{self.anonymous / 2**20:.2f} MiB in pages, {self.heap.bytes / 2**20:.3f} MiB of "
            f"malloc, {self.heap.blocks:,} blocks, {self.heap.objects:,} objects, "
            f"{self.threads} threads, {len(self.files)} files, {self.requests:,} requests"
        )


@dataclass
class Soak:
    """Users, a publisher of adapters, and the collected answers."""

    service: Service
    folder: Path
    draw: random.Random
    ends: "Counter[str]" = field(default_factory=Counter)
    sample: list[tuple[AnswerSpec, list[int]]] = field(default_factory=list)
    answers: int = 0
    states: list[ProcessState] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    published: int = 0
    documents: list[tuple[int, ...]] = field(default_factory=list)

    # ------------------------------------------------------------------------------- the publisher

    def publish(self) -> None:
        """Add a new adapter to the directory, and remove the oldest."""
        name = f"task{self.published}"
        self.published += 1
        save_adapter(build_adapter(Card(name), self.table(name)), self._file(name))
        self.adapters.append(name)
        if len(self.adapters) > ADAPTERS:
            self._file(self.adapters.pop(0)).unlink()
        self.service.adapters.scan()

    def table(self, name: str) -> torch.Tensor:
        seed = int(name.removeprefix("task"))
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(1 + seed % 7, CONFIG.hidden_size, generator=generator)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    async def publish_until(self, until: float) -> None:
        while time.monotonic() < until:
            await asyncio.to_thread(self.publish)
            await asyncio.sleep(self.draw.uniform(0.1, 1.0))

    # ----------------------------------------------------------------------------------- the users

    async def run_user(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(ANSWER_S):
                    end = await self.ask()
            except TimeoutError:
                raise AssertionError(f"a request has not ended within {ANSWER_S} s") from None
            self.ends[end] += 1
            wait_s = self.draw.expovariate(50.0)
            await asyncio.sleep(0.2 if end in ("unavailable", "lost") else wait_s)

    async def ask(self) -> str:
        """Run one request; return how it ended."""
        draw = self.draw
        deadline = time.monotonic() + draw.uniform(0.01, 2) if draw.random() < 0.15 else None
        pieces_max = draw.randint(0, 12) if draw.random() < 0.15 else 10**9
        reads_all = pieces_max > 12 and draw.random() < 0.5
        try:
            stream = await self.service.start(self.draw_request(), deadline, final_only=reads_all)
            token_lists: list[list[int]] = [[] for _ in stream.request.answers]
            pieces = 0
            try:
                async for piece in stream:
                    pieces += 1
                    if piece.error is not None:
                        raise piece.error
                    token_lists[piece.index] += piece.token_ids
                    if pieces > pieces_max:
                        return "cancelled"
            finally:
                stream.close()
        except (UnavailableError, EngineFaultError) as error:
            return "lost" if isinstance(error, EngineFaultError) else "unavailable"
        except UnknownAdapterError:
            return "unknown adapter"
        except AdapterError:
            return "adapter gone"
        except DeadlinePassedError:
            return "late"
        except OverloadedError:
            return "overloaded"
        for answer, tokens in zip(stream.request.answers, token_lists, strict=True):
            self.sample_answer(answer, tokens)
        return "done"

    def draw_request(self) -> Ask:
        draw = self.draw
        if len(self.documents) < 4 or draw.random() < 0.02:
            self.documents = [*self.documents[-5:], self.ids(draw.randint(20, 120))]
        prompt = self.ids(draw.randint(1, 60))
        if draw.random() < 0.6:
            prompt = draw.choice(self.documents) + prompt[: draw.randint(0, 10)]
        new = draw.choice([1, 4, 20, 60])
        adapters: tuple[str, ...] = ()
        if draw.random() < 0.5:
            adapters = tuple(draw.sample(self.adapters, draw.choice([1, 1, 1, 3])))
        return Ask(
            prompt,
            adapters,
            answers=draw.choice([1, 1, 1, 2, 4]),
            max_new_tokens=new,
            temperature=draw.choice([0.0, 0.0, 1.0]),
            top_p=draw.choice([None, 0.9]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
            stop_token_ids=self.ids(draw.choice([0, 0, 12])),
            logprobs=draw.choice([None, None, 2]),
            prompt_logprobs=draw.choice([None, None, None, 1]),
            seed=draw.randrange(2**32),
            service=draw.choice(["latency", "throughput"]),
            priority=draw.randint(-1, 2),
            tenant=draw.choice(["", "red", "blue"]),
        )

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self.draw.choices(IDS, k=count))

    def sample_answer(self, answer: AnswerSpec, tokens: list[int]) -> None:
        """Reservoir sampling: each answer has the same probability to be in the sample."""
        self.answers += 1
        tokens = [IDS[token] for token in tokens]
        if len(self.sample) < SAMPLED_ANSWERS:
            self.sample.append((answer, tokens))
        elif (position := self.draw.randrange(self.answers)) < SAMPLED_ANSWERS:
            self.sample[position] = (answer, tokens)

    # ------------------------------------------------------------------------------------- the soak

    async def run(self, killer: "Killer | None" = None) -> None:
        for _ in range(LAPS):
            until = time.monotonic() + SOAK_S / LAPS
            work: list[Coroutine[Any, Any, None]] = [self.run_user(until) for _ in range(USERS)]
            work.append(self.publish_until(until))
            if killer is not None:
                work.append(killer.kill(until))
            await asyncio.gather(*work)
            await asyncio.to_thread(eventually, self.is_drained, ANSWER_S)
            self.states.append(ProcessState.now(self.ends.total()))
            print(f"{self.states[-1]}; {dict(self.ends)}", flush=True)

    def is_drained(self) -> bool:
        engine = self.service.engine
        load = self.service.engine.stats
        free = engine.unfinished_sequences == load.waiting == load.running == load.blocks_held == 0
        return engine.up and load.blocks > 0 and free

    def check(self, checkpoint: Path) -> None:
        """Nothing grew, and the sampled answers equal the reference loop's."""
        first_state = self.states[WARM_LAPS - 1]
        last_state = self.states[-1]
        requests = last_state.requests - first_state.requests
        print(f"a leak of {BYTES_MAX / requests:.0f} bytes for each of {requests:,} would be seen")
        assert last_state.threads <= first_state.threads
        assert len(last_state.files) <= len(first_state.files), (
            first_state.files,
            last_state.files,
        )
        assert last_state.heap.objects - first_state.heap.objects <= OBJECTS_MAX
        assert last_state.heap.blocks - first_state.heap.blocks <= BLOCKS_MAX
        assert last_state.heap.bytes - first_state.heap.bytes <= BYTES_MAX
        assert last_state.anonymous - first_state.anonymous <= PAGES_MAX
        model = gpt.load(checkpoint, dtype="float64")
        for answer, tokens in self.sample:
            table = self.table(answer.adapter.partition("@")[0]) if answer.adapter else None
            (reference,) = generate(model, [answer.prompt], answer.sampling, adapter_table=table)
            assert tokens == reference.token_ids
        print(f"{self.answers:,} answers, {len(self.sample)} compared; {dict(self.ends)}")


@dataclass
class Killer:
    """Kills a rank now and then."""

    service: Service
    supervisor: LocalSupervisor
    draw: random.Random
    kills: int = 0

    async def kill(self, until: float) -> None:
        engine = self.service.engine
        while time.monotonic() < until:
            await asyncio.sleep(self.draw.uniform(2.0, 8.0))
            restarts = engine.restarts
            pids = self.supervisor.pids
            if not (engine.up and pids):
                continue
            with suppress(ProcessLookupError):
                os.kill(self.draw.choice(pids), signal.SIGKILL)
                self.kills += 1
            # Until the restart the engine looks idle while ranks end and start: a lap measured in
            # between would count their files.
            async with asyncio.timeout(NOTICED_S):
                while engine.restarts == restarts:
                    await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def disable_logging(caplog: pytest.LogCaptureFixture) -> None:
    """Disable logging: pytest keeps log records, and each adapter logs a warning."""
    caplog.set_level(logging.ERROR)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield write_checkpoint(tmp_path_factory.mktemp("soak"), tokenizer=False)
    torch.set_num_threads(threads)


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> ServerConfig:
    """Everything is scarce: slots, queue, blocks, adapter rows on the device and in memory."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    return ServerConfig(
        str(checkpoint),
        adapters=str(folder),
        dtype="float64",
        running_requests_max=8,
        queue_requests_max=40,
        step_tokens_max=48,
        kv_tokens_max=640,
        adapter_rows_max=12,
        adapter_bytes_max=20 * CONFIG.hidden_size * 4,
        priority_age_s=1.0,
        flight_dir=str(tmp_path),
        flight_steps_max=200,
    )


def start_soak(config: ServerConfig, service: Service) -> Soak:
    assert config.adapter_config.adapters is not None
    soak = Soak(service, Path(config.adapter_config.adapters), random.Random(0))
    for _ in range(ADAPTERS):
        soak.publish()
    return soak


def test_in_process_engine_does_not_grow(config: ServerConfig, checkpoint: Path) -> None:
    servable = ServableCheckpoint.from_config(config)
    with Service(servable).open(in_process_transport(servable)) as service:
        soak = start_soak(config, service)
        asyncio.run(soak.run())
        load = service.engine.stats
    print(load)
    soak.check(checkpoint)
    assert load.preemptions and load.cached_tokens and load.adapter_loads > len(soak.adapters)
    assert not soak.ends["lost"] and not soak.ends["unavailable"]
    assert {"done", "cancelled", "late", "overloaded"} <= soak.ends.keys()


def test_engine_with_killed_ranks_does_not_grow(config: ServerConfig, checkpoint: Path) -> None:
    config = config.with_fields(tp=2)
    supervisor = LocalSupervisor(config)
    with Service(ServableCheckpoint.from_config(config)).open(supervisor) as service:
        soak = start_soak(config, service)
        killer = Killer(service, supervisor, random.Random(1))
        asyncio.run(soak.run(killer))
        restarts = service.engine.restarts
        pids = supervisor.pids
    print(f"{killer.kills} kills, {restarts} restarts")
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    soak.check(checkpoint)
    assert killer.kills and restarts
    assert {"done", "cancelled", "late", "unavailable"} <= soak.ends.keys()
