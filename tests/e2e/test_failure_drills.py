"""Failure drills of a server under load: killed ranks, and SIGTERM.

All clients ask greedily in fp64, where tokens do not depend on the batch, and answers are compared
with those of an undisturbed server.
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
from clients.options import Options, fill_request
from clients.transport import CallError, Retries, read_call_error
from protos.preamble.v1 import admin_pb2, generation_pb2_grpc
from protos.preamble.v1 import generation_pb2 as pb
from tests.support.client_crowd import OWN_CONNECTION
from tests.support.servers import ROOT, WAIT_S, Server, serving
from tests.support.tritonclient_calls import streaming, text_of

pytestmark = pytest.mark.slow  # Servers of its own, and minutes.

DEMO = ROOT / "examples/demo/checkpoint"
TRIES = 8  # To have all clients connected at once.
LONG_S = 60.0  # For calls that wait until ranks have restarted.
FLIP_S = 2.0
NEW = 120
STREAMS = 36
LATE = 8
UNARY = 16
RUNNING = 40  # All of the first streams and a few others; the rest wait.
SERVING = health_pb2.HealthCheckResponse.SERVING


def options(new: int = NEW) -> Options:
    return Options(max_new_tokens=new, temperature=0.0, ignore_ends=True)


def prompts(count: int) -> list[str]:
    lines = (ROOT / "examples/demo/prompts.jsonl").read_text().splitlines()
    texts = dict.fromkeys(str(json.loads(line)["prompt"]) for line in lines)
    numbered = (f"{number}: {text}" for number in range(count) for text in texts)
    return [text for text, _ in zip(numbered, range(count), strict=False)]


def run(drill: Coroutine[Any, Any, None]) -> None:
    """Run a drill with a thread for each blocking client."""

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(32))
        await drill

    asyncio.run(main())


@asynccontextmanager
async def open_own_channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own."""
    async with grpc.aio.insecure_channel(server.address, [OWN_CONNECTION]) as channel:
        yield channel


@dataclass
class Streaming:
    """What one client receives from its stream."""

    prompt: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    errors: list[grpc.aio.AioRpcError] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, server: Server) -> "Streaming":
        message = fill_request(pb.GenerateStreamRequest(), self.prompt, options())
        async with open_own_channel(server) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            try:
                async for piece in stub.GenerateStream(message, timeout=LONG_S):
                    assert not self.finished
                    self.token_ids += piece.token_ids
                    self.text += piece.text
                    self.finished = piece.finish_reason != pb.FINISH_REASON_UNSPECIFIED
                    self.started.set()
            except grpc.aio.AioRpcError as error:
                self.errors.append(error)
        return self


async def complete(server: Server, prompt: str, new: int = NEW) -> list[int]:
    """A whole completion by a unary call."""
    async with AsyncClient(server.address, LONG_S, retries=Retries(attempts_max=1)) as client:
        return (await client.generate(prompt, options(new))).token_ids


async def load_of(server: Server) -> admin_pb2.GetLoadResponse:
    async with AsyncClient(server.address, WAIT_S) as client:
        return await client.load()


class MissedError(Exception):
    """Some requests ended before all had started: the machine was busy."""


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


async def wait_until_free(server: Server) -> None:
    """Wait until nothing runs or waits, and all KV blocks are free."""
    await until(server, 0, 0)
    async with asyncio.timeout(WAIT_S):
        while (await load_of(server)).kv_blocks_held or server.metric(IN_FLIGHT):
            await asyncio.sleep(0.01)


IN_FLIGHT = "preamble_requests_in_flight"


def describe_error(error: grpc.aio.AioRpcError) -> tuple[str, str, float | None]:
    """Code, reason and RetryInfo's seconds."""
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    status = Status.FromString(trailers.get("grpc-status-details-bin", b""))
    reason = ""
    wait_s = None
    error_info = ErrorInfo()
    retry = RetryInfo()
    for detail in status.details:
        if detail.Unpack(error_info):
            reason = error_info.reason
        if detail.Unpack(retry):
            delay: Duration = retry.retry_delay
            wait_s = delay.ToMilliseconds() / 1000
    return error.code().name, reason, wait_s


# ------------------------------------------------------------------------------- killed ranks


@dataclass
class HealthWatch:
    """Health over time, by both protocols."""

    server: Server
    grpc: list[tuple[float, bool]] = field(default_factory=list)
    http: list[tuple[float, bool]] = field(default_factory=list)
    late_s: float = 0.0  # The longest delay of this process.

    async def measure_delay(self) -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(0.02)
            self.late_s = max(self.late_s, time.monotonic() - start - 0.02)

    async def watch_grpc(self) -> None:
        async with open_own_channel(self.server) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            async for health in watch:
                self.grpc.append((time.monotonic(), health.status == SERVING))

    async def watch_http(self) -> None:
        while True:
            status, _ = await asyncio.to_thread(self.server.get, "/health/ready")
            self.http.append((time.monotonic(), status == 200))
            await asyncio.sleep(0.02)

    def transitions(self, after: float) -> Iterator[tuple[float, float]]:
        """After `after`, the delays until unhealthy and until healthy again."""
        for samples in (self.grpc, self.http):
            down_at = next(
                (time_s for time_s, up in samples if time_s > after and not up), float("inf")
            )
            up_at = next(
                (time_s for time_s, up in samples if time_s > down_at and up), float("inf")
            )
            yield down_at - after, up_at - after


def test_killed_rank_restarts_under_load(tmp_path: Path) -> None:
    """Kill the last rank, then rank 0, which runs the engine loop."""
    limits: dict[str, Any] = {"tp": 2, "running_requests_max": RUNNING}
    limits["flight_dir"] = str(tmp_path)
    with serving(DEMO, tmp_path / "s.yaml", tmp_path / "log", **limits) as server:
        run(kill_ranks(server))


async def kill_ranks(server: Server) -> None:
    texts = prompts(STREAMS + LATE + UNARY)
    baseline = await asyncio.gather(*(complete(server, text) for text in texts))
    assert all(len(answer) == NEW for answer in baseline)
    for times, rank in enumerate((1, 0)):
        assert (await load_of(server)).engine_restarts == times
        await kill_a_rank(server, rank, dict(zip(texts, baseline, strict=True)))


async def kill_a_rank(server: Server, rank: int, expected: Mapping[str, list[int]]) -> None:
    texts = list(expected)
    restarts = (await load_of(server)).engine_restarts
    watched = HealthWatch(server)
    watches = (watched.watch_grpc(), watched.watch_http(), watched.measure_delay())
    watch_tasks = [asyncio.create_task(watch) for watch in watches]

    clients = await start_clients(server, texts)
    streams = clients.streams
    late_streams = clients.late_streams
    os.kill(server.ranks[rank], signal.SIGKILL)
    killed = time.monotonic()

    await asyncio.gather(*clients.reads)
    lost_s = time.monotonic() - killed
    await check_retryable_refusal(server, texts[0])
    retried = asyncio.create_task(complete_with_retries(server, texts[0]))
    completions = await asyncio.gather(*clients.unary)
    await asyncio.gather(*clients.late_reads)
    requeued_s = time.monotonic() - killed
    assert await retried == expected[texts[0]]
    assert [await complete(server, text) for text in texts[:4]] == [expected[t] for t in texts[:4]]
    for task in watch_tasks:
        task.cancel()

    for watch in streams:
        assert not watch.finished and 0 < len(watch.token_ids) < NEW
        assert watch.token_ids == expected[watch.prompt][: len(watch.token_ids)]
        (error,) = watch.errors
        assert describe_error(error) == ("UNAVAILABLE", "ENGINE_LOST", 1.0)
        assert "try again in a moment" in (error.details() or "")
    assert completions == [expected[text] for text in texts[STREAMS + LATE :]]
    assert [watch.token_ids for watch in late_streams] == [
        expected[watch.prompt] for watch in late_streams
    ]
    assert all(watch.finished and not watch.errors for watch in late_streams)
    await wait_until_free(server)
    assert (await load_of(server)).engine_restarts == restarts + 1
    (grpc_s, grpc_back_s), (http_s, http_back_s) = watched.transitions(killed)
    print(
        f"\nrank {rank} killed: {STREAMS} streams told after {lost_s:.3f} s; health no after "
        f"{grpc_s:.3f} s (gRPC), {http_s:.3f} s (HTTP), yes after {grpc_back_s:.2f} s and "
        f"{http_back_s:.2f} s; {UNARY} calls and {LATE} streams that had not begun were answered "
        f"after {requeued_s:.2f} s"
    )
    assert max(grpc_s, http_s) < FLIP_S + watched.late_s
    assert max(grpc_back_s, http_back_s) < LONG_S


@dataclass
class Clients:
    """Running streams, unary calls, and streams that wait in the queue behind them."""

    streams: list[Streaming]
    late_streams: list[Streaming]
    reads: list[asyncio.Task[Streaming]] = field(default_factory=list)
    unary: list[asyncio.Task[list[int]]] = field(default_factory=list)
    late_reads: list[asyncio.Task[Streaming]] = field(default_factory=list)

    async def start(self, server: Server, texts: Sequence[str]) -> None:
        self.reads = [asyncio.create_task(stream.read(server)) for stream in self.streams]
        await asyncio.gather(*(stream.started.wait() for stream in self.streams))
        self.unary = [asyncio.create_task(complete(server, text)) for text in texts]
        started = [*self.reads, *self.unary]
        await until(server, RUNNING, STREAMS + UNARY - RUNNING, started)
        self.late_reads = [
            asyncio.create_task(late_stream.read(server)) for late_stream in self.late_streams
        ]
        await until(server, RUNNING, STREAMS + UNARY + LATE - RUNNING, started)


async def start_clients(server: Server, texts: Sequence[str]) -> Clients:
    """All clients running or queued at once, after some tries."""
    for _ in range(TRIES):
        early_texts = texts[:STREAMS]
        late_texts = texts[STREAMS : STREAMS + LATE]
        clients = Clients(
            [Streaming(text) for text in early_texts], [Streaming(text) for text in late_texts]
        )
        try:
            await clients.start(server, texts[STREAMS + LATE :])
        except MissedError:
            await asyncio.gather(*clients.reads, *clients.unary, *clients.late_reads)
            await wait_until_free(server)
        else:
            return clients
    raise AssertionError("never were all of them there at once")


async def check_retryable_refusal(server: Server, text: str) -> None:
    """Without ranks, new calls are refused with a time to retry."""
    with pytest.raises(CallError) as caught:
        await complete(server, text)
    error = caught.value
    assert (error.code, error.reason) == ("UNAVAILABLE", "ENGINE_RESTARTING") and error.retry_s


async def complete_with_retries(server: Server, text: str) -> list[int]:
    """As a program would, with the client library: it retries when the error says so."""
    async with AsyncClient(server.address, LONG_S, retries=Retries(attempts_max=8)) as client:
        return (await client.generate(text, options())).token_ids


# ------------------------------------------------------------------------------------ SIGTERM

CALLERS = 6  # Clients that keep sending requests.
DRAIN_S = 30.0


def test_sigterm_under_load_completes_accepted_requests(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"running_requests_max": 32, "drain_s": DRAIN_S}
    with serving(DEMO, tmp_path / "s.yaml", tmp_path / "log", **limits) as server:
        run(stop_under_load(server))
    log = (tmp_path / "log").read_text()
    assert "event=stopped drained=True" in log and "Traceback" not in log


async def stop_under_load(server: Server) -> None:
    texts = prompts(56)
    baseline = await asyncio.gather(*(Streaming(text).read(server) for text in texts))
    expected = {stream.prompt: stream for stream in baseline}
    assert all(len(stream.token_ids) == NEW for stream in baseline)

    for _ in range(TRIES):
        streams = [Streaming(text) for text in texts[:36]]
        reading = [asyncio.create_task(stream.read(server)) for stream in streams]
        eventful = (
            asyncio.to_thread(complete_openai_stream, server, text) for text in texts[36:44]
        )
        events = [asyncio.create_task(stream) for stream in eventful]
        unary = [asyncio.create_task(complete(server, text)) for text in texts[44:52]]
        triple = asyncio.create_task(asyncio.to_thread(complete_kserve_stream, server, texts[52:]))
        try:
            await until(server, 32, 56 - 32, [*reading, *events, *unary, triple])
            break
        except MissedError:
            await asyncio.gather(*reading, *events, *unary, triple)
    server.process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    refusals: Counter[tuple[str, str]] = Counter()
    knocking = [
        threading.Thread(target=send_until_refused, args=(server, refusals)) for _ in range(CALLERS)
    ]
    for thread in knocking:
        thread.start()
    await asyncio.gather(*reading)
    http_texts = await asyncio.gather(*events)
    unary_tokens = await asyncio.gather(*unary)
    kserve_texts = await triple
    code = await asyncio.to_thread(server.process.wait, DRAIN_S)
    took_s = time.monotonic() - started
    for thread in knocking:
        await asyncio.to_thread(thread.join, WAIT_S)

    assert code == 0 and took_s < DRAIN_S
    assert [(stream.errors, stream.finished) for stream in streams] == [([], True)] * len(streams)
    assert [stream.token_ids for stream in streams] == [expected[t].token_ids for t in texts[:36]]
    assert http_texts == [expected[text].text for text in texts[36:44]]
    assert unary_tokens == [expected[text].token_ids for text in texts[44:52]]
    assert kserve_texts == [expected[text].text for text in texts[52:]]
    assert {code for code, _ in refusals} == {"UNAVAILABLE"}
    assert refusals["UNAVAILABLE", "DRAINING"]
    assert {reason for _, reason in refusals} <= {"DRAINING", ""}  # "": the port is closed already.
    print(
        f"\nSIGTERM: 56 answers (36 gRPC streams, 8 by HTTP, 8 calls, 4 by KServe) all right, "
        f"gone after {took_s:.2f} s with {code}; new calls: {dict(refusals)}"
    )


def send_until_refused(server: Server, refusals: "Counter[tuple[str, str]]") -> None:
    """Send requests until the server is gone.

    It may accept some before it handles its signal, but none after the first refusal.
    """
    with grpc.insecure_channel(server.address, [OWN_CONNECTION]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        while server.process.poll() is None:
            has_refused = bool(refusals)
            try:
                stub.Generate(pb.GenerateRequest(text="one", max_new_tokens=1), timeout=WAIT_S)
                if has_refused:
                    refusals["OK", ""] += 1
            except grpc.RpcError as error:
                failure = read_call_error(error)
                refusals[failure.code, failure.reason] += 1
            time.sleep(0.05)


def complete_openai_stream(server: Server, text: str) -> str:
    """The text of an OpenAI stream that ends as it should."""
    record = {"prompt": text, "max_tokens": NEW, "stream": True, "temperature": 0}
    http_request = urllib.request.Request(
        f"http://{server.http_address}/v1/completions",
        json.dumps({**record, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(http_request, timeout=LONG_S) as answer:
        events = answer.read().decode().split("\n\n")
    # A server whose first event takes a second sends a comment before it.
    events = [event for event in events if not event.startswith(":")]
    assert events[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(event["text"] for event in choices)


def complete_kserve_stream(server: Server, texts: Sequence[str]) -> list[str]:
    """Texts of requests on one KServe stream, by tritonclient."""
    with (
        triton.InferenceServerClient(server.address) as client,
        streaming(client) as streamed,
    ):
        parameters = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
        for text in texts:
            streamed.send("preamble", text, text=text, exclude_input_in_output=True, **parameters)
        results, errors = streamed.until(len(texts))
        assert not errors
        return ["".join(text_of(response) for response in results[text]) for text in texts]
