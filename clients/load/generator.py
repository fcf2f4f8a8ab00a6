"""Load: many streamed calls to a running server, begun on a schedule, and what each of them took.

Open loop: calls begin when a Poisson process says, whether or not earlier ones have ended, and all
times count from that moment, so that a server that stalls does not slow down who measures it.
Closed loop: so many are under way at once. Knows nothing of how results are told.
"""

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
import grpc.aio

from clients.transport import Tls, call_error, channel_options, metadata_of
from protos.preamble.v1 import admin_pb2
from protos.preamble.v1 import generation_pb2 as pb

SERVICE_CLASSES: Mapping[str, pb.ServiceClass] = {
    "latency": pb.SERVICE_CLASS_LATENCY,
    "throughput": pb.SERVICE_CLASS_THROUGHPUT,
}
STREAM = "/preamble.v1.GenerationService/GenerateStream"
INFO = "/preamble.v1.AdminService/GetServerInfo"
WARMUP_AT_ONCE = 8


class LoadError(Exception):
    """What a user asked for cannot be; the message says what can."""


@dataclass(frozen=True)
class Length:
    """How many tokens: of a fixed number, evenly from a range, or around a mean, exponentially."""

    kind: Literal["fixed", "range", "mean"]
    low: int
    high: int

    @classmethod
    def of(cls, word: str) -> "Length":
        """`128`, `64-256` or `~128`."""
        low, dash, high = word.removeprefix("~").partition("-")
        try:
            numbers = int(low), int(high or low)
        except ValueError:
            numbers = 0, 0
        if not 0 < numbers[0] <= numbers[1] or (dash and word.startswith("~")):
            raise LoadError(f"{word!r} is no length; give tokens as 128, 64-256 or ~128 (a mean)")
        return cls("mean" if word.startswith("~") else "range" if dash else "fixed", *numbers)

    def draw(self, source: random.Random, most: int) -> int:
        if self.kind == "mean":
            return max(1, min(most, round(source.expovariate(1 / self.low))))
        return min(most, source.randint(self.low, self.high))


@dataclass(frozen=True)
class Prompt:
    """One line of a dataset. Unset fields are drawn like everyone's."""

    prompt: str | list[int] | dict[str, str]
    new_tokens: int | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class Work:
    """What is asked of the server, and when."""

    rate: float | None = None  # Requests a second, in an open loop; None: a closed loop.
    concurrency: int = 1  # Of the closed loop.
    requests_max: int | None = 100  # None: only `duration_s` bounds them.
    duration_s: float | None = None  # No call begins later than this.
    warmup_requests: int = 4  # Before all that is measured.
    prompt: Length = Length("fixed", 128, 128)
    new: Length = Length("fixed", 128, 128)
    dataset: tuple[Prompt, ...] = ()  # In turn, instead of random ids.
    adapters: tuple[str, ...] = ("",)  # In turn.
    service_class: str = "latency"
    timeout_s: float = 120.0  # Of each call.
    seed: int = 0


@dataclass
class Sent:
    """One call. Times are in seconds since the load began; None: it did not get so far."""

    due: float  # When it was to begin: what its times are counted from.
    begun: float = 0.0
    first: float | None = None  # First message with a token.
    last: float | None = None  # Last one.
    end: float = 0.0
    prompt_tokens: int = 0
    messages: list[tuple[float, int]] = field(default_factory=list)  # When, and how many tokens.
    code: str = "OK"
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.code == "OK"

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.messages)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first is None else self.first - self.due

    @property
    def e2e_s(self) -> float:
        return self.end - self.due

    @property
    def tpot_s(self) -> float | None:
        """From the first tokens to the last ones, for each token after the first message's."""
        later = self.tokens - self.messages[0][1] if self.messages else 0
        if self.first is None or self.last is None or later <= 0:
            return None
        return (self.last - self.first) / later

    @property
    def gaps(self) -> list[tuple[float, int]]:
        """Between one message with tokens and the next: seconds, and how many the later one has."""
        pairs = itertools.pairwise(self.messages)
        return [(after - before, count) for (before, _), (after, count) in pairs]


@dataclass(frozen=True)
class Run:
    """What became of a load."""

    sent: list[Sent]
    seconds: float  # From the first call that was due to the last one's end.
    cpu_s: float  # Of this process, meanwhile: the generator's own.
    open_loop: bool

    @property
    def late_s(self) -> list[float]:
        """How much later than due each call began, in an open loop: the generator's fault."""
        return [one.begun - one.due for one in self.sent] if self.open_loop else []


Metadata = tuple[tuple[str, str], ...]
Progress = Callable[[int, int, float], None]  # Under way, ended, seconds so far.


@dataclass(frozen=True)
class Where:
    """The server, and how it is reached."""

    address: str  # HOST:PORT.
    token: str | None = None
    tls: Tls | None = None

    def channel(self) -> grpc.aio.Channel:
        # What is refused counts as refused: nothing here is tried again.
        options = [*channel_options(self.tls), ("grpc.enable_retries", 0)]
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        return grpc.aio.secure_channel(self.address, self.tls.credentials, options=options)


def run(where: Where, work: Work, progress: Progress | None = None) -> Run:
    """The whole load, to its end."""
    return asyncio.run(load(where, work, progress))


async def load(where: Where, work: Work, progress: Progress | None = None) -> Run:
    async with where.channel() as channel:
        metadata = metadata_of(where.token)
        return await _Load(channel, work, await _room(channel, metadata), metadata).run(progress)


async def _room(channel: grpc.aio.Channel, metadata: Metadata) -> tuple[int, int]:
    """The vocabulary's size, and how many tokens a request may have."""
    ask = channel.unary_unary(
        INFO,
        request_serializer=admin_pb2.GetServerInfoRequest.SerializeToString,
        response_deserializer=admin_pb2.GetServerInfoResponse.FromString,
    )
    try:
        said = await ask(admin_pb2.GetServerInfoRequest(), timeout=30.0, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        told = call_error(error)
        raise LoadError(f"the server does not tell what it is ({told.code}: {told})") from None
    return said.model.vocabulary_size, said.model.context_tokens_max


class _Load:
    def __init__(
        self, channel: grpc.aio.Channel, work: Work, room: tuple[int, int], metadata: Metadata
    ) -> None:
        self._work, self._metadata = work, metadata
        self._vocabulary, self._context = room
        self._draw = random.Random(work.seed)
        self._call: Any = channel.unary_stream(
            STREAM,
            request_serializer=pb.GenerateStreamRequest.SerializeToString,
            response_deserializer=pb.GenerateStreamResponse.FromString,
        )
        self._start = 0.0
        self._sent: list[Sent] = []

    async def run(self, progress: Progress | None) -> Run:
        await self._warm_up()
        telling = asyncio.create_task(self._tell(progress)) if progress else None
        cpu_s, self._start = time.process_time(), time.perf_counter()
        try:
            await (self._closed() if self._work.rate is None else self._open(self._work.rate))
        finally:
            if telling is not None:
                telling.cancel()
        seconds = max((one.end for one in self._sent), default=0.0)
        spent_s = time.process_time() - cpu_s
        return Run(self._sent, seconds, spent_s, self._work.rate is not None)

    async def _warm_up(self) -> None:
        room = asyncio.Semaphore(WARMUP_AT_ONCE)

        async def one(message: pb.GenerateStreamRequest) -> None:
            async with room:
                await self._send(message, Sent(0.0))

        asked = itertools.islice(self._messages(), self._work.warmup_requests)
        await asyncio.gather(*(one(message) for message, _ in asked))

    async def _open(self, rate: float) -> None:
        """Arrivals are drawn before anything is sent, so the answers have no say in them."""
        arrivals = random.Random(self._work.seed + 1)
        due, tasks = 0.0, []
        for message, length in self._bounded():
            due += arrivals.expovariate(rate)
            if self._work.duration_s is not None and due > self._work.duration_s:
                break
            wait = due - self._now()
            if wait > 0:
                await asyncio.sleep(wait)
            sent = self._note(Sent(due, prompt_tokens=length))
            tasks.append(asyncio.create_task(self._send(message, sent)))
        await asyncio.gather(*tasks)

    async def _closed(self) -> None:
        messages = self._bounded()

        async def caller() -> None:
            for message, length in messages:
                if self._work.duration_s is not None and self._now() > self._work.duration_s:
                    return
                sent = self._note(Sent(self._now(), prompt_tokens=length))
                await self._send(message, sent)

        await asyncio.gather(*(caller() for _ in range(self._work.concurrency)))

    def _note(self, sent: Sent) -> Sent:
        self._sent.append(sent)
        return sent

    async def _send(self, message: pb.GenerateStreamRequest, sent: Sent) -> None:
        sent.begun = self._now()
        try:
            timeout_s = self._work.timeout_s
            async for response in self._call(message, timeout=timeout_s, metadata=self._metadata):
                if tokens := len(response.token_ids):
                    sent.last = self._now()
                    sent.first = sent.last if sent.first is None else sent.first
                    sent.messages.append((sent.last, tokens))
                if response.HasField("failure"):
                    sent.code, sent.reason = "FAILED", response.failure.reason
        except grpc.aio.AioRpcError as error:
            told = call_error(error)
            sent.code, sent.reason = told.code, told.reason
        sent.end = self._now()

    def _bounded(self) -> Iterator[tuple[pb.GenerateStreamRequest, int]]:
        return itertools.islice(self._messages(), self._work.requests_max)

    def _messages(self) -> Iterator[tuple[pb.GenerateStreamRequest, int]]:
        """What to send, without end, and how many tokens its prompt has (0: not known here)."""
        work = self._work
        for turn in itertools.count():
            new = work.new.draw(self._draw, max(1, self._context - 1))
            line = work.dataset[turn % len(work.dataset)] if work.dataset else None
            if line is None:
                length = work.prompt.draw(self._draw, max(1, self._context - new))
                line = Prompt(self._draw.choices(range(self._vocabulary), k=length))
            new = line.new_tokens or new
            adapter = work.adapters[turn % len(work.adapters)]
            message = pb.GenerateStreamRequest(
                adapter=adapter if line.adapter is None else line.adapter,
                max_new_tokens=new,
                min_new_tokens=new,
                service_class=SERVICE_CLASSES[work.service_class],
            )
            if isinstance(line.prompt, str):
                message.text = line.prompt
            elif isinstance(line.prompt, dict):
                message.inputs.fields.update(line.prompt)
            else:
                message.token_ids.ids.extend(line.prompt)
            yield message, len(line.prompt) if isinstance(line.prompt, list) else 0

    async def _tell(self, progress: Progress) -> None:
        while True:
            await asyncio.sleep(1.0)
            ended = sum(one.end > 0 for one in self._sent)
            progress(len(self._sent) - ended, ended, self._now())

    def _now(self) -> float:
        return time.perf_counter() - self._start


def read_dataset(path: Path) -> tuple[Prompt, ...]:
    """JSON lines: `prompt` (a text or ids) or `inputs` (fields); `new_tokens`, `adapter`."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read ({error})") from None
    found = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise LoadError(f"{path} has no lines; each is one prompt, as JSON")
    return tuple(found)


def _prompt(path: Path, number: int, line: str) -> Prompt:
    need = '{"prompt": TEXT or IDS} or {"inputs": {NAME: TEXT}}, with new_tokens and adapter or not'
    try:
        said = json.loads(line)
        prompt = said["inputs"] if "inputs" in said else said["prompt"]
        new, adapter = said.get("new_tokens"), said.get("adapter")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LoadError(f"{path}:{number} is not {need}") from None
    fits = isinstance(prompt, str | dict) or (
        isinstance(prompt, list) and all(isinstance(one, int) and one >= 0 for one in prompt)
    )
    fits &= new is None or (isinstance(new, int) and new > 0)
    if not fits or not isinstance(adapter, str | None):
        raise LoadError(f"{path}:{number} is not {need}")
    return Prompt(prompt, new, adapter)


def quantile(values: Sequence[float], part: float) -> float:
    """The value that so large a part of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan
