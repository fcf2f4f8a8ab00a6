"""The engine for ten minutes: everything at random, every request ends, and nothing grows.

`SOAK_S` in the environment is how many seconds each soak takes. Arrivals, cancels, deadlines,
several answers, adapters that come and go, memory for a few sequences only; and, with ranks in
processes, ranks that are killed. The oracle is the plain loop, for a sample of what was answered.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt
from gpt.adapters.adapter_file import Card, build_adapter, save_adapter
from gpt.errors import AdapterError
from gpt.generation.generate import generate
from serving.config import ServerConfig
from serving.ranks.supervisor import Supervisor
from serving.request import (
    Answer,
    Ask,
    DeadlinePassedError,
    EngineFaultError,
    OverloadedError,
    UnavailableError,
    UnknownAdapterError,
)
from serving.service.service import Found, Service, inside
from tests.support.process_memory import Held, anonymous_bytes
from tests.support.servers import CONFIG, eventually, write_checkpoint

pytestmark = pytest.mark.soak

SOAK_S = float(os.environ.get("SOAK_S", "600"))
LAPS = 6  # After each all is drained and measured; the first two are to warm up.
WARM_LAPS = 2
USERS = 24
ANSWER_S = 180.0  # No request may take longer, whatever becomes of the ranks.
SAMPLE = 150  # Answers that are compared with the plain loop's.
SHELF = 12  # Adapters that are there at a time.
NOTICED_S = 20.0  # A rank's end is noticed at once; a crowded machine is slow.
# What may grow, from the first lap that counts to the last one. Nothing here keeps more after a
# thousand requests than after a hundred, but what is bounded (the ring of steps, the sample, ended
# sequences that still lie in a line, and what malloc caches for each thread and counts as given) is
# now a little more, now less, and is full only after some minutes: 200 KiB were seen. In ten
# minutes, with a core of its own, 15,000 requests count: this is 50 bytes, and a quarter of a
# Python object, for each.
BYTES_MAX = 768 << 10
BLOCKS_MAX = 4000
OBJECTS_MAX = 1000
# Pages are coarse: Python takes a mebibyte at a time, malloc and each thread's stack a few pages.
PAGES_MAX = 3 << 20
# One object for each token id, whoever says it, so that what the soak keeps does not grow.
IDS = list(range(CONFIG.vocab_size))


@dataclass(frozen=True)
class State:
    """What this process holds when nothing runs."""

    held: Held
    anonymous: int
    threads: int
    files: list[str]  # What each open one is.
    requests: int  # That have ended.

    @classmethod
    def now(cls, requests: int) -> "State":
        held = Held.now()
        files = []
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # The one that lists them is gone.
                files.append(os.readlink(f"/proc/self/fd/{name}"))
        return cls(held, anonymous_bytes(), threading.active_count(), files, requests)

    def __str__(self) -> str:
        return (
            f"{self.anonymous / 2**20:.2f} MiB in pages, {self.held.bytes / 2**20:.3f} MiB of "
            f"malloc, {self.held.blocks:,} blocks, {self.held.objects:,} objects, "
            f"{self.threads} threads, {len(self.files)} files, {self.requests:,} requests"
        )


@dataclass
class Soak:
    """Users, a librarian, and what they saw."""

    service: Service
    folder: Path
    draw: random.Random
    ends: "Counter[str]" = field(default_factory=Counter)
    sample: list[tuple[Answer, list[int]]] = field(default_factory=list)
    answers: int = 0
    states: list[State] = field(default_factory=list)
    shelf: list[str] = field(default_factory=list)
    published: int = 0
    documents: list[tuple[int, ...]] = field(default_factory=list)

    # ------------------------------------------------------------------------------- the librarian

    def publish(self) -> None:
        """Put a new adapter on the shelf, and take the oldest one away."""
        name = f"task{self.published}"
        self.published += 1
        save_adapter(build_adapter(Card(name), self.table(name)), self._file(name))
        self.shelf.append(name)
        if len(self.shelf) > SHELF:
            self._file(self.shelf.pop(0)).unlink()
        self.service.adapters.scan()

    def table(self, name: str) -> torch.Tensor:
        seed = int(name.removeprefix("task"))
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(1 + seed % 7, CONFIG.hidden_size, generator=generator)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    async def tend(self, until: float) -> None:
        while time.monotonic() < until:
            await asyncio.to_thread(self.publish)
            await asyncio.sleep(self.draw.uniform(0.1, 1.0))

    # ----------------------------------------------------------------------------------- the users

    async def use(self, until: float) -> None:
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
        """One request, and how it ended."""
        draw = self.draw
        deadline = time.monotonic() + draw.uniform(0.01, 2) if draw.random() < 0.15 else None
        pieces_max = draw.randint(0, 12) if draw.random() < 0.15 else 10**9
        whole = pieces_max > 12 and draw.random() < 0.5
        try:
            stream = await self.service.start(self.wish(), deadline, whole=whole)
            made: list[list[int]] = [[] for _ in stream.request.answers]
            pieces = 0
            try:
                async for piece in stream:
                    pieces += 1
                    if piece.error is not None:
                        raise piece.error
                    made[piece.index] += piece.token_ids
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
        for answer, tokens in zip(stream.request.answers, made, strict=True):
            self.keep(answer, tokens)
        return "done"

    def wish(self) -> Ask:
        draw = self.draw
        if len(self.documents) < 4 or draw.random() < 0.02:
            self.documents = [*self.documents[-5:], self.ids(draw.randint(20, 120))]
        prompt = self.ids(draw.randint(1, 60))
        if draw.random() < 0.6:
            prompt = draw.choice(self.documents) + prompt[: draw.randint(0, 10)]
        new = draw.choice([1, 4, 20, 60])
        adapters: tuple[str, ...] = ()
        if draw.random() < 0.5:
            adapters = tuple(draw.sample(self.shelf, draw.choice([1, 1, 1, 3])))
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

    def keep(self, answer: Answer, tokens: list[int]) -> None:
        """A sample in which each answer has the same chance to be."""
        self.answers += 1
        tokens = [IDS[token] for token in tokens]
        if len(self.sample) < SAMPLE:
            self.sample.append((answer, tokens))
        elif (place := self.draw.randrange(self.answers)) < SAMPLE:
            self.sample[place] = (answer, tokens)

    # ------------------------------------------------------------------------------------ the whole

    async def run(self, killer: "Killer | None" = None) -> None:
        for _ in range(LAPS):
            until = time.monotonic() + SOAK_S / LAPS
            work: list[Coroutine[Any, Any, None]] = [self.use(until) for _ in range(USERS)]
            work.append(self.tend(until))
            if killer is not None:
                work.append(killer.kill(until))
            await asyncio.gather(*work)
            await asyncio.to_thread(eventually, self.drained, ANSWER_S)
            self.states.append(State.now(self.ends.total()))
            print(f"{self.states[-1]}; {dict(self.ends)}", flush=True)

    def drained(self) -> bool:
        engine, load = self.service.engine, self.service.engine.load
        free = engine.accepted == load.waiting == load.running == load.blocks_held == 0
        return engine.up and load.blocks > 0 and free

    def check(self, checkpoint: Path) -> None:
        """Nothing grew, and what was answered is what the plain loop says."""
        first, last = self.states[WARM_LAPS - 1], self.states[-1]
        requests = last.requests - first.requests
        print(f"a leak of {BYTES_MAX / requests:.0f} bytes for each of {requests:,} would be seen")
        assert last.threads <= first.threads
        assert len(last.files) <= len(first.files), (first.files, last.files)
        assert last.held.objects - first.held.objects <= OBJECTS_MAX
        assert last.held.blocks - first.held.blocks <= BLOCKS_MAX
        assert last.held.bytes - first.held.bytes <= BYTES_MAX
        assert last.anonymous - first.anonymous <= PAGES_MAX
        model = gpt.load(checkpoint, dtype="float64")
        for answer, tokens in self.sample:
            table = self.table(answer.adapter.partition("@")[0]) if answer.adapter else None
            (alone,) = generate(model, [answer.prompt], answer.sampling, table=table)
            assert tokens == alone.token_ids
        print(f"{self.answers:,} answers, {len(self.sample)} compared; {dict(self.ends)}")


@dataclass
class Killer:
    """Ends a rank now and then."""

    service: Service
    supervisor: Supervisor
    draw: random.Random
    kills: int = 0

    async def kill(self, until: float) -> None:
        engine = self.service.engine
        while time.monotonic() < until:
            await asyncio.sleep(self.draw.uniform(2.0, 8.0))
            restarts, pids = engine.restarts, self.supervisor.pids
            if not (engine.up and pids):
                continue
            with suppress(ProcessLookupError):
                os.kill(self.draw.choice(pids), signal.SIGKILL)
                self.kills += 1
            # Until then the engine looks idle, while its ranks are being ended and others started:
            # a lap that was measured in between would count the files that this takes.
            async with asyncio.timeout(NOTICED_S):
                while engine.restarts == restarts:
                    await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """pytest keeps what is logged, and each adapter is worth a warning."""
    caplog.set_level(logging.ERROR)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield write_checkpoint(tmp_path_factory.mktemp("soak"), tokenizer=False)
    torch.set_num_threads(threads)


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> ServerConfig:
    """Everything is scarce: slots, places, blocks, rows on the device and in memory."""
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


def started(config: ServerConfig, service: Service) -> Soak:
    assert config.adapters is not None
    soak = Soak(service, Path(config.adapters), random.Random(0))
    for _ in range(SHELF):
        soak.publish()
    return soak


def test_an_engine_in_this_process_answers_for_long_and_does_not_grow(
    config: ServerConfig, checkpoint: Path
) -> None:
    found = Found.at(config)
    with Service(found).open(inside(found)) as service:
        soak = started(config, service)
        asyncio.run(soak.run())
        load = service.engine.load
    print(load)
    soak.check(checkpoint)
    assert load.preemptions and load.cached_tokens and load.adapter_loads > len(soak.shelf)
    assert not soak.ends["lost"] and not soak.ends["unavailable"]
    assert {"done", "cancelled", "late", "overloaded"} <= soak.ends.keys()


def test_an_engine_whose_ranks_are_killed_answers_for_long_and_does_not_grow(
    config: ServerConfig, checkpoint: Path
) -> None:
    config = replace(config, tp=2)
    supervisor = Supervisor(config)
    with Service(Found.at(config)).open(supervisor) as service:
        soak = started(config, service)
        killer = Killer(service, supervisor, random.Random(1))
        asyncio.run(soak.run(killer))
        restarts = service.engine.restarts
        pids = supervisor.pids
    print(f"{killer.kills} kills, {restarts} restarts")
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    soak.check(checkpoint)
    assert killer.kills and restarts
    assert {"done", "cancelled", "late", "unavailable"} <= soak.ends.keys()
