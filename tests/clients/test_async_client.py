"""The asyncio client against a real server, and retries of both clients.

For retries there is a scripted server that fails calls as configured and records their metadata: a
real server's failures cannot be repeated exactly.
"""

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, is_dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from clients.async_client import AsyncClient
from clients.client import CallError, Client, Options, Retries, Tls
from protos.preamble.v1 import generation_pb2 as pb
from protos.preamble.v1 import generation_pb2_grpc
from serving.frontend.call import CallFailure
from serving.frontend.grpc_transport import error_trailers
from serving.service.error_reasons import REASONS
from tests.support.servers import WAIT_S, Server, eventually, serving, write_checkpoint

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


PROMPT = "1 2 3"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("aio"), tokenizer=False)
    with serving(checkpoint) as server:
        yield server


def flatten(value: Any) -> Iterator[Any]:
    if is_dataclass(value) and not isinstance(value, type):
        value = astuple(value)
    if isinstance(value, list | tuple):
        yield len(value)
        for element in value:
            yield from flatten(element)
    else:
        yield value


def test_sync_and_async_clients_return_equal_answers(server: Server) -> None:
    options = Options(answers=2, max_new_tokens=5, temperature=1.0, seed=3, logprobs=1)

    # Sequentially, with a full prefix cache: the shape of a step changes the last digits.
    async def work() -> list[object]:
        async with AsyncClient(server.address, WAIT_S) as client:
            ids = await client.tokenize(PROMPT)
            return [
                await client.generate(PROMPT, options),
                await client.completions(PROMPT, options),
                await client.score(PROMPT, [" 4", " 5 6"], logprobs=2),
                ids,
                await client.detokenize(ids),
                (await client.info()).model,
                await client.adapters(),
            ]

    def collect_sync(client: Client) -> list[object]:
        ids = client.tokenize(PROMPT)
        return [
            client.generate(PROMPT, options),
            client.completions(PROMPT, options),
            client.score(PROMPT, [" 4", " 5 6"], logprobs=2),
            ids,
            client.detokenize(ids),
            client.info().model,
            client.adapters(),
        ]

    with server.client() as client:
        collect_sync(client)
        flattened = [
            list(flatten(answer)) for answer in (collect_sync(client), asyncio.run(work()))
        ]
    # The two texts of a score may share a step or not.
    numbers, others_ = (
        [[leaf for leaf in leaves if isinstance(leaf, float) is number] for leaves in flattened]
        for number in (True, False)
    )
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    assert others_[0] == others_[1]


def test_concurrent_streams_equal_separate_ones(server: Server) -> None:
    async def text(client: AsyncClient, seed: int) -> str:
        options = Options(max_new_tokens=20, temperature=1.0, seed=seed)
        return "".join([piece.text async for piece in client.stream(PROMPT, options)])

    async def work() -> list[str]:
        async with AsyncClient(server.address, WAIT_S) as client:
            return await asyncio.gather(*(text(client, seed) for seed in range(8)))

    with server.client() as client:
        separate = [
            client.generate(PROMPT, Options(max_new_tokens=20, temperature=1.0, seed=seed)).text
            for seed in range(8)
        ]
    assert asyncio.run(work()) == separate and len(set(separate)) > 1


def test_abandoned_streams_and_cancelled_tasks_cancel_their_calls(
    server: Server,
) -> None:
    long_options = Options(max_new_tokens=4000)

    async def work() -> None:
        async with AsyncClient(server.address, WAIT_S) as client:
            pieces = client.stream(PROMPT, long_options)
            await anext(pieces)
            await pieces.aclose()
            task = asyncio.create_task(client.generate(PROMPT, long_options))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.load()).engine_up

    asyncio.run(work())
    eventually(lambda: server.metric("preamble_requests_in_flight") == 0)


def test_refusals_raise_the_same_error(server: Server) -> None:
    async def work() -> None:
        async with AsyncClient(server.address, WAIT_S) as client:
            await client.generate(PROMPT, Options(top_p=2.0))

    with pytest.raises(CallError) as caught:
        asyncio.run(work())
    error = caught.value
    assert (error.code, error.reason, error.field, error.retry_s) == (
        *("INVALID_ARGUMENT", "INVALID_FIELD", "sampling.top_p", None),
    )


# ----------------------------------------------------------------------------------------- retries

LOADING = CallFailure(REASONS["LOADING"], "not yet", retry_s=0.02)
STOPPED = CallFailure(REASONS["STOPPED"], "not any more")
RETRY_IN_AN_HOUR = CallFailure(REASONS["LOADING"], "not for long", retry_s=3600.0)


class ScriptedServer(generation_pb2_grpc.GenerationServiceServicer):
    """Fails the first calls as `script` says, after so many pieces; all others succeed."""

    def __init__(self, script: list[tuple[int, CallFailure]]) -> None:
        self.script = script
        self.calls = 0
        self.tokens = list[str]()

    def _next(self, context: Any) -> tuple[int, CallFailure | None]:
        call_metadata = dict(context.invocation_metadata())
        self.tokens.append(call_metadata.get("authorization", ""))
        self.calls += 1
        return self.script[self.calls - 1] if self.calls <= len(self.script) else (0, None)

    def _end(self, context: Any, failure: CallFailure) -> None:
        context.set_trailing_metadata(error_trailers(failure))
        context.abort(failure.reason.code, str(failure))

    def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        _, failure = self._next(context)
        if failure is not None:
            self._end(context, failure)
        return pb.GenerateResponse(completions=[pb.Completion(text="well")])

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> Iterator[pb.GenerateStreamResponse]:
        pieces, failure = self._next(context)
        for _ in range(pieces):
            yield pb.GenerateStreamResponse(text="a piece")
        if failure is not None:
            self._end(context, failure)
        yield pb.GenerateStreamResponse(text="well", finish_reason=pb.FINISH_REASON_STOP)


@contextmanager
def serve_script(
    *script: tuple[int, CallFailure], credentials: grpc.ServerCredentials | None = None
) -> Iterator[tuple[str, ScriptedServer]]:
    service = ScriptedServer(list(script))
    server = grpc.server(ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    address = "127.0.0.1:0"  # With localhost, another program may have the port at ::1.
    port = (
        server.add_secure_port(address, credentials)
        if credentials
        else server.add_insecure_port(address)
    )
    server.start()
    try:
        # The certificate of the tests is for localhost.
        yield f"{'localhost' if credentials else '127.0.0.1'}:{port}", service
    finally:
        server.stop(None).wait(WAIT_S)


def complete(address: str, **options: Any) -> str:
    with Client(address, WAIT_S, **options) as client:
        return client.generate("a").text


def stream(address: str, **options: Any) -> str:
    with Client(address, WAIT_S, **options) as client:
        return "".join(piece.text for piece in client.stream("a"))


def complete_async(address: str, **options: Any) -> str:
    async def work() -> str:
        async with AsyncClient(address, WAIT_S, **options) as client:
            return (await client.generate("a")).text

    return asyncio.run(work())


def stream_async(address: str, **options: Any) -> str:
    async def work() -> str:
        async with AsyncClient(address, WAIT_S, **options) as client:
            return "".join([piece.text async for piece in client.stream("a")])

    return asyncio.run(work())


CallMethod = Callable[..., str]
CALL_METHODS = pytest.mark.parametrize("way", [complete, stream, complete_async, stream_async])


@CALL_METHODS
def test_calls_are_retried_if_the_server_allows(way: CallMethod) -> None:
    with serve_script((0, LOADING), (0, LOADING)) as (address, service):
        assert way(address) == "well"
        assert service.calls == 3


@CALL_METHODS
def test_attempts_are_limited_and_wait_as_told(way: CallMethod) -> None:
    with serve_script(*[(0, LOADING)] * 9) as (address, service):
        started = time.monotonic()
        with pytest.raises(CallError, match="not yet") as caught:
            way(address, retries=Retries(attempts_max=3))
        assert (service.calls, caught.value.reason) == (3, "LOADING")
        assert caught.value.retry_s == pytest.approx(0.02)
        assert time.monotonic() - started >= 0.02 + 0.04  # Each wait doubles the last one.


@CALL_METHODS
@pytest.mark.parametrize("failure", [STOPPED, RETRY_IN_AN_HOUR], ids=["never", "too late"])
def test_calls_are_not_retried_beyond_the_deadline(way: CallMethod, failure: CallFailure) -> None:
    with serve_script((0, failure)) as (address, service):
        with pytest.raises(CallError) as raised:
            way(address)
        assert service.calls == 1
        assert raised.value.reason == failure.reason.name
        assert raised.value.retry_s == failure.retry_s


@pytest.mark.parametrize("way", [stream, stream_async])
def test_started_streams_are_not_retried(way: CallMethod) -> None:
    with serve_script((1, LOADING)) as (address, service):
        with pytest.raises(CallError, match="not yet"):
            way(address)
        assert service.calls == 1


@CALL_METHODS
def test_tokens_are_sent_with_each_attempt(way: CallMethod) -> None:
    with serve_script((0, LOADING)) as (address, service):
        way(address, token="secret")
        assert service.tokens == ["Bearer secret"] * 2


def test_deadlines_cover_all_attempts() -> None:
    slow = CallFailure(REASONS["LOADING"], "not yet", retry_s=1.0)
    with serve_script(*[(0, slow)] * 9) as (address, service), Client(address) as client:
        started = time.monotonic()
        with pytest.raises(CallError, match="not yet"):
            client.generate("a", timeout_s=2.9)
        assert service.calls <= 2
        assert time.monotonic() - started < 30


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl command")
def test_clients_support_mutual_tls(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    certificate = tmp_path / "certificate.pem"
    openssl_arguments = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
    ]
    openssl_arguments += ["-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2"]
    openssl_arguments += ["-subj", "/CN=preamble", "-addext", "subjectAltName=DNS:preamble.test"]
    subprocess.run(openssl_arguments, check=True, capture_output=True)
    pair = [(key.read_bytes(), certificate.read_bytes())]
    credentials = grpc.ssl_server_credentials(pair, certificate.read_bytes(), True)
    tls = Tls.read(str(certificate), str(key), str(certificate))
    named_tls = Tls(tls.root_certificates, tls.private_key, tls.certificate_chain, "preamble.test")
    with serve_script(credentials=credentials) as (address, _):
        for way in (complete, stream_async):
            assert way(address, tls=named_tls) == "well"
            for wrong_tls in (None, Tls(tls.root_certificates, server_name="preamble.test"), tls):
                with pytest.raises(CallError) as caught:
                    way(address, tls=wrong_tls)
                assert caught.value.code == "UNAVAILABLE"


def test_clients_are_thread_safe(server: Server) -> None:
    with server.client() as client, ThreadPoolExecutor(4) as pool:
        completions = list(
            pool.map(lambda _: client.generate(PROMPT, Options(max_new_tokens=3)), range(8))
        )
    assert len({tuple(completion.token_ids) for completion in completions}) == 1
