"""Drills of the demo's server under load: a rank that is killed, and an end that was asked for.

Everybody asks greedily in fp64, where tokens are the same in whatever company they are made, and
what comes is held against the answer that came when nothing was wrong.
"""

import asyncio
import json
import os
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import tritonclient.grpc as triton
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from clients.async_client import AsyncClient
from clients.options import Options, request
from clients.transport import CallError, Retries, call_error
from protos.preamble.v1 import admin_pb2, generation_pb2_grpc
from protos.preamble.v1 import generation_pb2 as pb
from tests.support.client_crowd import APART
from tests.support.servers import ROOT, WAIT_S, Server, serving
from tests.support.tritonclient_calls import streaming, text_of

pytestmark = pytest.mark.slow  # Servers of its own, and minutes.

DEMO = ROOT / "examples/demo/checkpoint"
TRIES = 8  # To have all callers there at once.
LONG_S = 60.0  # For what waits for ranks that are started again.
FLIP_S = 2.0
NEW = 120
STREAMS, LATE, UNARY = 36, 8, 16
RUNNING = 40  # All of the first ones and a few of the others; the rest wait.
SERVING = health_pb2.HealthCheckResponse.SERVING


def options(new: int = NEW) -> Options:
    return Options(max_new_tokens=new, temperature=0.0, ignore_ends=True)


def prompts(count: int) -> list[str]:
    lines = (ROOT / "examples/demo/prompts.jsonl").read_text().splitlines()
    found = dict.fromkeys(str(json.loads(line)["prompt"]) for line in lines)
    numbered = (f"{number}: {text}" for number in range(count) for text in found)
    return [text for text, _ in zip(numbered, range(count), strict=False)]


def run(drill: Coroutine[Any, Any, None]) -> None:
    """With a thread for each caller that blocks."""

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(32))
        await drill

    asyncio.run(main())


@asynccontextmanager
async def apart(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    """A connection that is nobody else's."""
    async with grpc.aio.insecure_channel(server.address, [APART]) as channel:
        yield channel


@dataclass
class Streaming:
    """What one client saw of its stream."""

    prompt: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    errors: list[grpc.aio.AioRpcError] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, server: Server) -> "Streaming":
        message = request(pb.GenerateStreamRequest(), self.prompt, options())
        async with apart(server) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            try:
                async for piece in stub.GenerateStream(message, timeout=LONG_S):
                    assert not self.finished
                    self.token_ids += piece.token_ids
                    self.text += piece.text
                    self.finished = piece.finish_reason != pb.FINISH_REASON_UNSPECIFIED
                    self.begun.set()
            except grpc.aio.AioRpcError as error:
                self.errors.append(error)
        return self


async def whole(server: Server, prompt: str, new: int = NEW) -> list[int]:
    """An answer at once, asked for once."""
    async with AsyncClient(server.address, LONG_S, retries=Retries(attempts_max=1)) as client:
        return (await client.generate(prompt, options(new))).token_ids


async def load_of(server: Server) -> admin_pb2.GetLoadResponse:
    async with AsyncClient(server.address, WAIT_S) as client:
        return await client.load()


class MissedError(Exception):
    """Some were answered before all had come: the machine was busy."""


async def until(
    server: Server, running: int, waiting: int, going: Iterable[asyncio.Task[Any]] = ()
) -> None:
    going = list(going)
    async with asyncio.timeout(WAIT_S):
        while True:
            load = await load_of(server)
            if (load.running_requests, load.waiting_requests) == (running, waiting):
                return
            if any(task.done() for task in going):
                raise MissedError
            await asyncio.sleep(0.005)


async def freed(server: Server) -> None:
    """Nothing runs, nothing waits, and nobody holds keys and values."""
    await until(server, 0, 0)
    async with asyncio.timeout(WAIT_S):
        while (await load_of(server)).kv_blocks_held or server.metric(IN_FLIGHT):
            await asyncio.sleep(0.01)


IN_FLIGHT = "preamble_requests_in_flight"


def told(error: grpc.aio.AioRpcError) -> tuple[str, str, float | None]:
    """Code, reason and RetryInfo's seconds."""
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    status = Status.FromString(trailers.get("grpc-status-details-bin", b""))
    reason, wait_s, info, retry = "", None, ErrorInfo(), RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            reason = info.reason
        if detail.Unpack(retry):
            delay: Duration = retry.retry_delay
            wait_s = delay.ToMilliseconds() / 1000
    return error.code().name, reason, wait_s


# ------------------------------------------------------------------------- a rank that is killed


@dataclass
class Watched:
    """When health said what, on each of its two ways."""

    server: Server
    grpc: list[tuple[float, bool]] = field(default_factory=list)
    http: list[tuple[float, bool]] = field(default_factory=list)
    late_s: float = 0.0  # How long this side was kept from looking, at most.

    async def pulse(self) -> None:
        while True:
            at = time.monotonic()
            await asyncio.sleep(0.02)
            self.late_s = max(self.late_s, time.monotonic() - at - 0.02)

    async def by_grpc(self) -> None:
        async with apart(self.server) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            async for said in watch:
                self.grpc.append((time.monotonic(), said.status == SERVING))

    async def by_http(self) -> None:
        while True:
            status, _ = await asyncio.to_thread(self.server.get, "/health/ready")
            self.http.append((time.monotonic(), status == 200))
            await asyncio.sleep(0.02)

    def flips(self, after: float) -> Iterator[tuple[float, float]]:
        """How long after that each said no, and then yes again."""
        for said in (self.grpc, self.http):
            down = next((at for at, up in said if at > after and not up), float("inf"))
            back = next((at for at, up in said if at > down and up), float("inf"))
            yield down - after, back - after


def test_a_rank_is_killed_while_many_stream(tmp_path: Path) -> None:
    """The last one, then rank 0, beside which the planner is."""
    limits: dict[str, Any] = {"tp": 2, "running_requests_max": RUNNING}
    limits["flight_dir"] = str(tmp_path)
    with serving(DEMO, tmp_path / "s.yaml", tmp_path / "log", **limits) as server:
        run(kill_ranks(server))


async def kill_ranks(server: Server) -> None:
    texts = prompts(STREAMS + LATE + UNARY)
    calm = await asyncio.gather(*(whole(server, text) for text in texts))
    assert all(len(answer) == NEW for answer in calm)
    for times, rank in enumerate((1, 0)):
        assert (await load_of(server)).engine_restarts == times
        await kill_a_rank(server, rank, dict(zip(texts, calm, strict=True)))


async def kill_a_rank(server: Server, rank: int, expected: Mapping[str, list[int]]) -> None:
    texts = list(expected)
    restarts = (await load_of(server)).engine_restarts
    watched = Watched(server)
    looks = (watched.by_grpc(), watched.by_http(), watched.pulse())
    watching = [asyncio.create_task(one) for one in looks]

    crowd = await crowded(server, texts)
    streams, late = crowd.streams, crowd.late
    os.kill(server.ranks[rank], signal.SIGKILL)
    killed = time.monotonic()

    await asyncio.gather(*crowd.reading)
    lost_s = time.monotonic() - killed
    await refused_for_now(server, texts[0])
    patient = asyncio.create_task(insist(server, texts[0]))
    made = await asyncio.gather(*crowd.unary)
    await asyncio.gather(*crowd.reading_late)
    requeued_s = time.monotonic() - killed
    assert await patient == expected[texts[0]]
    assert [await whole(server, text) for text in texts[:4]] == [expected[t] for t in texts[:4]]
    for task in watching:
        task.cancel()

    for one in streams:
        assert not one.finished and 0 < len(one.token_ids) < NEW
        assert one.token_ids == expected[one.prompt][: len(one.token_ids)]
        (error,) = one.errors
        assert told(error) == ("UNAVAILABLE", "ENGINE_LOST", 1.0)
        assert "try again in a moment" in (error.details() or "")
    assert made == [expected[text] for text in texts[STREAMS + LATE :]]
    assert [one.token_ids for one in late] == [expected[one.prompt] for one in late]
    assert all(one.finished and not one.errors for one in late)
    await freed(server)
    assert (await load_of(server)).engine_restarts == restarts + 1
    (grpc_s, grpc_back_s), (http_s, http_back_s) = watched.flips(killed)
    print(
        f"\nrank {rank} killed: {STREAMS} streams told after {lost_s:.3f} s; health no after "
        f"{grpc_s:.3f} s (gRPC), {http_s:.3f} s (HTTP), yes after {grpc_back_s:.2f} s and "
        f"{http_back_s:.2f} s; {UNARY} calls and {LATE} streams that had not begun were answered "
        f"after {requeued_s:.2f} s"
    )
    assert max(grpc_s, http_s) < FLIP_S + watched.late_s
    assert max(grpc_back_s, http_back_s) < LONG_S


@dataclass
class Crowd:
    """Streams that have begun, whole answers, and streams that wait behind all of these."""

    streams: list[Streaming]
    late: list[Streaming]
    reading: list[asyncio.Task[Streaming]] = field(default_factory=list)
    unary: list[asyncio.Task[list[int]]] = field(default_factory=list)
    reading_late: list[asyncio.Task[Streaming]] = field(default_factory=list)

    async def come(self, server: Server, texts: Sequence[str]) -> None:
        self.reading = [asyncio.create_task(one.read(server)) for one in self.streams]
        await asyncio.gather(*(one.begun.wait() for one in self.streams))
        self.unary = [asyncio.create_task(whole(server, text)) for text in texts]
        begun = [*self.reading, *self.unary]
        await until(server, RUNNING, STREAMS + UNARY - RUNNING, begun)
        self.reading_late = [asyncio.create_task(one.read(server)) for one in self.late]
        await until(server, RUNNING, STREAMS + UNARY + LATE - RUNNING, begun)


async def crowded(server: Server, texts: Sequence[str]) -> Crowd:
    """All of them there at once, sooner or later."""
    for _ in range(TRIES):
        early, late = texts[:STREAMS], texts[STREAMS : STREAMS + LATE]
        crowd = Crowd([Streaming(text) for text in early], [Streaming(text) for text in late])
        try:
            await crowd.come(server, texts[STREAMS + LATE :])
        except MissedError:
            await asyncio.gather(*crowd.reading, *crowd.unary, *crowd.reading_late)
            await freed(server)
        else:
            return crowd
    raise AssertionError("never were all of them there at once")


async def refused_for_now(server: Server, text: str) -> None:
    """While there are no ranks, new calls are told when to come back."""
    with pytest.raises(CallError) as refused:
        await whole(server, text)
    error = refused.value
    assert (error.code, error.reason) == ("UNAVAILABLE", "ENGINE_RESTARTING") and error.retry_s


async def insist(server: Server, text: str) -> list[int]:
    """As a program would, with the client that comes along: it comes back when it is told to."""
    async with AsyncClient(server.address, LONG_S, retries=Retries(attempts_max=8)) as client:
        return (await client.generate(text, options())).token_ids


# ------------------------------------------------------------------------------ an end asked for

CALLERS = 6  # Who go on asking for more.
DRAIN_S = 30.0


def test_sigterm_while_many_stream_fails_nothing_that_was_accepted(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"running_requests_max": 32, "drain_s": DRAIN_S}
    with serving(DEMO, tmp_path / "s.yaml", tmp_path / "log", **limits) as server:
        run(stop_under_load(server))
    log = (tmp_path / "log").read_text()
    assert "event=stopped drained=True" in log and "Traceback" not in log


async def stop_under_load(server: Server) -> None:
    texts = prompts(56)
    calm = await asyncio.gather(*(Streaming(text).read(server) for text in texts))
    expected = {one.prompt: one for one in calm}
    assert all(len(one.token_ids) == NEW for one in calm)

    for _ in range(TRIES):
        streams = [Streaming(text) for text in texts[:36]]
        reading = [asyncio.create_task(one.read(server)) for one in streams]
        eventful = (asyncio.to_thread(completed, server, text) for text in texts[36:44])
        events = [asyncio.create_task(one) for one in eventful]
        unary = [asyncio.create_task(whole(server, text)) for text in texts[44:52]]
        triple = asyncio.create_task(asyncio.to_thread(inferred, server, texts[52:]))
        try:
            await until(server, 32, 56 - 32, [*reading, *events, *unary, triple])
            break
        except MissedError:
            await asyncio.gather(*reading, *events, *unary, triple)
    server.process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    ends: Counter[tuple[str, str]] = Counter()
    knocking = [threading.Thread(target=knock, args=(server, ends)) for _ in range(CALLERS)]
    for thread in knocking:
        thread.start()
    await asyncio.gather(*reading)
    by_http, by_call = await asyncio.gather(*events), await asyncio.gather(*unary)
    by_kserve = await triple
    code = await asyncio.to_thread(server.process.wait, DRAIN_S)
    took_s = time.monotonic() - started
    for thread in knocking:
        await asyncio.to_thread(thread.join, WAIT_S)

    assert code == 0 and took_s < DRAIN_S
    assert [(one.errors, one.finished) for one in streams] == [([], True)] * len(streams)
    assert [one.token_ids for one in streams] == [expected[t].token_ids for t in texts[:36]]
    assert by_http == [expected[text].text for text in texts[36:44]]
    assert by_call == [expected[text].token_ids for text in texts[44:52]]
    assert by_kserve == [expected[text].text for text in texts[52:]]
    assert {code for code, _ in ends} == {"UNAVAILABLE"}
    assert ends["UNAVAILABLE", "DRAINING"]
    assert {reason for _, reason in ends} <= {"DRAINING", ""}  # "": its port is closed already.
    print(
        f"\nSIGTERM: 56 answers (36 gRPC streams, 8 by HTTP, 8 calls, 4 by KServe) all right, "
        f"gone after {took_s:.2f} s with {code}; new calls: {dict(ends)}"
    )


def knock(server: Server, ends: "Counter[tuple[str, str]]") -> None:
    """Ask for more, until nobody is there."""
    with grpc.insecure_channel(server.address, [APART]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        while server.process.poll() is None:
            try:
                stub.Generate(pb.GenerateRequest(text="one", max_new_tokens=1), timeout=WAIT_S)
                ends["OK", ""] += 1
            except grpc.RpcError as error:
                failure = call_error(error)
                ends[failure.code, failure.reason] += 1
            time.sleep(0.05)


def completed(server: Server, text: str) -> str:
    """A stream of OpenAI's, whole: its text, if it ends as it should."""
    record = {"prompt": text, "max_tokens": NEW, "stream": True, "temperature": 0}
    asked = urllib.request.Request(
        f"http://{server.http_address}/v1/completions",
        json.dumps({**record, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=LONG_S) as answer:
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(one.removeprefix("data: "))["choices"][0] for one in events[:-2]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(one["text"] for one in choices)


def inferred(server: Server, texts: Sequence[str]) -> list[str]:
    """Requests of one of KServe's streams, by tritonclient."""
    with (
        triton.InferenceServerClient(server.address) as client,
        streaming(client) as streamed,
    ):
        more = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
        for text in texts:
            streamed.send("preamble", text, text=text, exclude_input_in_output=True, **more)
        results, errors = streamed.until(len(texts))
        assert not errors
        return ["".join(text_of(one) for one in results[text]) for text in texts]
