"""The client for asyncio against a real server; and what both clients do when calls end badly.

For that there is a server of another make, that ends calls as it is told and notes what it got: a
real one says when to try again, but not twice the same.
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
from serving.frontend.call import Ended
from serving.frontend.grpc_transport import trailers
from serving.service.error_reasons import REASONS
from tests.support.servers import WAIT_S, Server, eventually, serving, write_checkpoint

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


PROMPT = "1 2 3"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("aio"), tokenizer=False)
    with serving(checkpoint) as server:
        yield server


def leaves(value: Any) -> Iterator[Any]:
    if is_dataclass(value) and not isinstance(value, type):
        value = astuple(value)
    if isinstance(value, list | tuple):
        yield len(value)
        for one in value:
            yield from leaves(one)
    else:
        yield value


def test_both_clients_answer_alike(server: Server) -> None:
    options = Options(answers=2, max_new_tokens=5, temperature=1.0, seed=3, logprobs=1)

    # In turn, and when all is cached that will be: a step's shape moves the last digits.
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

    def waiting(client: Client) -> list[object]:
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
        waiting(client)
        told = [list(leaves(one)) for one in (waiting(client), asyncio.run(work()))]
    # The two texts of a score may share a step or not.
    numbers, others = (
        [[leaf for leaf in leaves if isinstance(leaf, float) is number] for leaves in told]
        for number in (True, False)
    )
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    assert others[0] == others[1]


def test_streams_side_by_side_come_to_what_each_is_alone(server: Server) -> None:
    async def text(client: AsyncClient, seed: int) -> str:
        options = Options(max_new_tokens=20, temperature=1.0, seed=seed)
        return "".join([piece.text async for piece in client.stream(PROMPT, options)])

    async def work() -> list[str]:
        async with AsyncClient(server.address, WAIT_S) as client:
            return await asyncio.gather(*(text(client, seed) for seed in range(8)))

    with server.client() as client:
        alone = [
            client.generate(PROMPT, Options(max_new_tokens=20, temperature=1.0, seed=seed)).text
            for seed in range(8)
        ]
    assert asyncio.run(work()) == alone and len(set(alone)) > 1


def test_a_stream_that_is_left_and_a_task_that_is_cancelled_end_their_calls(
    server: Server,
) -> None:
    long = Options(max_new_tokens=4000)

    async def work() -> None:
        async with AsyncClient(server.address, WAIT_S) as client:
            pieces = client.stream(PROMPT, long)
            await anext(pieces)
            await pieces.aclose()
            task = asyncio.create_task(client.generate(PROMPT, long))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.load()).engine_up

    asyncio.run(work())
    eventually(lambda: server.metric("preamble_requests_in_flight") == 0)


def test_what_the_server_refuses_is_the_same_error(server: Server) -> None:
    async def work() -> None:
        async with AsyncClient(server.address, WAIT_S) as client:
            await client.generate(PROMPT, Options(top_p=2.0))

    with pytest.raises(CallError) as refused:
        asyncio.run(work())
    error = refused.value
    assert (error.code, error.reason, error.field, error.retry_s) == (
        *("INVALID_ARGUMENT", "INVALID_FIELD", "sampling.top_p", None),
    )


# ----------------------------------------------------------------------------- calls that end badly

LOADING = Ended(REASONS["LOADING"], "not yet", retry_s=0.02)
DRAINING = Ended(REASONS["DRAINING"], "not any more")
LATER = Ended(REASONS["LOADING"], "not for long", retry_s=3600.0)


class Ending(generation_pb2_grpc.GenerationServiceServicer):
    """Ends the first calls as `script` says, after so many pieces; all others go well."""

    def __init__(self, script: list[tuple[int, Ended]]) -> None:
        self.script, self.calls, self.said = script, 0, list[str]()

    def _next(self, context: Any) -> tuple[int, Ended | None]:
        said = dict(context.invocation_metadata())
        self.said.append(said.get("authorization", ""))
        self.calls += 1
        return self.script[self.calls - 1] if self.calls <= len(self.script) else (0, None)

    def _end(self, context: Any, ended: Ended) -> None:
        context.set_trailing_metadata(trailers(ended))
        context.abort(ended.reason.code, str(ended))

    def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        _, ended = self._next(context)
        if ended is not None:
            self._end(context, ended)
        return pb.GenerateResponse(completions=[pb.Completion(text="well")])

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> Iterator[pb.GenerateStreamResponse]:
        pieces, ended = self._next(context)
        for _ in range(pieces):
            yield pb.GenerateStreamResponse(text="a piece")
        if ended is not None:
            self._end(context, ended)
        yield pb.GenerateStreamResponse(text="well", finish_reason=pb.FINISH_REASON_STOP)


@contextmanager
def ending(
    *script: tuple[int, Ended], credentials: grpc.ServerCredentials | None = None
) -> Iterator[tuple[str, Ending]]:
    service = Ending(list(script))
    server = grpc.server(ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    at = "localhost:0"
    port = server.add_secure_port(at, credentials) if credentials else server.add_insecure_port(at)
    server.start()
    try:
        yield f"localhost:{port}", service
    finally:
        server.stop(None).wait(WAIT_S)


def whole(address: str, **how: Any) -> str:
    with Client(address, WAIT_S, **how) as client:
        return client.generate("a").text


def streamed(address: str, **how: Any) -> str:
    with Client(address, WAIT_S, **how) as client:
        return "".join(piece.text for piece in client.stream("a"))


def whole_async(address: str, **how: Any) -> str:
    async def work() -> str:
        async with AsyncClient(address, WAIT_S, **how) as client:
            return (await client.generate("a")).text

    return asyncio.run(work())


def streamed_async(address: str, **how: Any) -> str:
    async def work() -> str:
        async with AsyncClient(address, WAIT_S, **how) as client:
            return "".join([piece.text async for piece in client.stream("a")])

    return asyncio.run(work())


Way = Callable[..., str]
WAYS = pytest.mark.parametrize("way", [whole, streamed, whole_async, streamed_async])


@WAYS
def test_a_call_is_tried_again_when_the_server_says_so(way: Way) -> None:
    with ending((0, LOADING), (0, LOADING)) as (address, service):
        assert way(address) == "well"
        assert service.calls == 3


@WAYS
def test_attempts_are_bounded_and_waits_are_as_long_as_the_server_says(way: Way) -> None:
    with ending(*[(0, LOADING)] * 9) as (address, service):
        started = time.monotonic()
        with pytest.raises(CallError, match="not yet") as ended:
            way(address, retries=Retries(attempts_max=3))
        assert (service.calls, ended.value.reason) == (3, "LOADING")
        assert ended.value.retry_s == pytest.approx(0.02)
        assert time.monotonic() - started >= 0.02 + 0.04  # Each wait is twice the last.


@WAYS
@pytest.mark.parametrize("ended", [DRAINING, LATER], ids=["never", "too late"])
def test_what_may_not_be_tried_again_in_time_is_not(way: Way, ended: Ended) -> None:
    with ending((0, ended)) as (address, service):
        with pytest.raises(CallError) as raised:
            way(address)
        assert service.calls == 1
        assert raised.value.reason == ended.reason.name
        assert raised.value.retry_s == ended.retry_s


@pytest.mark.parametrize("way", [streamed, streamed_async])
def test_a_stream_that_has_begun_is_not_begun_again(way: Way) -> None:
    with ending((1, LOADING)) as (address, service):
        with pytest.raises(CallError, match="not yet"):
            way(address)
        assert service.calls == 1


@WAYS
def test_a_token_goes_along_with_each_attempt(way: Way) -> None:
    with ending((0, LOADING)) as (address, service):
        way(address, token="secret")
        assert service.said == ["Bearer secret"] * 2


def test_a_deadline_is_for_all_attempts_together() -> None:
    slow = Ended(REASONS["LOADING"], "not yet", retry_s=1.0)
    with ending(*[(0, slow)] * 9) as (address, service), Client(address) as client:
        started = time.monotonic()
        with pytest.raises(CallError, match="not yet"):
            client.generate("a", timeout_s=2.9)
        assert service.calls <= 2
        assert time.monotonic() - started < 5


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl command")
def test_channels_can_be_secure_both_ways(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2"]
    words += ["-subj", "/CN=preamble", "-addext", "subjectAltName=DNS:preamble.test"]
    subprocess.run(words, check=True, capture_output=True)
    pair = [(key.read_bytes(), certificate.read_bytes())]
    credentials = grpc.ssl_server_credentials(pair, certificate.read_bytes(), True)
    tls = Tls.read(str(certificate), str(key), str(certificate))
    named = Tls(tls.root_certificates, tls.private_key, tls.certificate_chain, "preamble.test")
    with ending(credentials=credentials) as (address, _):
        for way in (whole, streamed_async):
            assert way(address, tls=named) == "well"
            for wrong in (None, Tls(tls.root_certificates, server_name="preamble.test"), tls):
                with pytest.raises(CallError) as refused:
                    way(address, tls=wrong)
                assert refused.value.code == "UNAVAILABLE"


def test_a_client_may_be_used_by_many_threads(server: Server) -> None:
    with server.client() as client, ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda _: client.generate(PROMPT, Options(max_new_tokens=3)), range(8))
        )
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
