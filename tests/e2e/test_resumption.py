"""Streams whose server is lost: another server continues them with the very same tokens."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import grpc
import pytest

from clients.adapter_client import AdapterCalls
from clients.async_client import AsyncClient
from clients.client import CallError, Client, Guide, Options, Piece, Retries
from clients.options import fill_request
from gpt.tokenizers.tokenizer import open_tokenizer
from protos.preamble.v1 import generation_pb2 as pb
from protos.preamble.v1 import generation_pb2_grpc
from tests.support.servers import (
    WAIT_S,
    Server,
    command,
    eventually,
    serving,
    write_adapter,
    write_checkpoint,
)

pytestmark = pytest.mark.slow  # Servers of its own.

PROMPT = "twelve new tokens"
LONG = Options(max_new_tokens=600, temperature=1.0, seed=7, ignore_ends=True)
CASES = {
    "greedy": Options(max_new_tokens=40, temperature=0.0, ignore_ends=True),
    "sampled": Options(max_new_tokens=40, temperature=1.0, top_p=0.9, ignore_ends=True),
    "an adapter": Options(max_new_tokens=40, temperature=1.0, adapter="read"),
    "penalties": Options(
        max_new_tokens=40,
        temperature=0.7,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        no_repeat_ngram_size=3,
        min_new_tokens=20,
    ),
    "a guide": Options(
        max_new_tokens=40, temperature=1.0, guide=Guide(regex="[a-z]{3,8}( [a-z]{3,8}){1,6}")
    ),
    "stop strings": Options(max_new_tokens=40, temperature=1.0, stop=["zz", "e t", "qu"]),
    "log-probabilities": Options(max_new_tokens=20, temperature=0.5, logprobs=2),
}


@dataclass
class Deployment:
    """Two servers of one model, with one adapter directory."""

    folder: Path
    servers: list[Server]

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    def client(self, timeout_s: float = WAIT_S) -> Client:
        return Client(self.addresses, timeout_s)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("resumption")
    checkpoint = write_checkpoint(folder)
    adapters = folder / "adapters"
    adapters.mkdir()
    ids = open_tokenizer(checkpoint / "tokenizer").encode("the answer is")
    write_adapter(adapters / "read.safetensors", checkpoint, ids)
    with ExitStack() as stack:
        servers = [stack.enter_context(_server(folder, index)) for index in range(2)]
        yield Deployment(folder, servers)


def _server(folder: Path, index: int) -> AbstractContextManager[Server]:
    return serving(
        folder / "checkpoint",
        folder / f"{index}.yaml",
        folder / f"{index}.log",
        adapters=str(folder / "adapters"),
    )


@pytest.mark.parametrize("case", CASES)
def test_a_stream_is_continued_behind_any_token(deployment: Deployment, case: str) -> None:
    options = replace(CASES[case], seed=11)
    first, second = deployment.servers
    pieces = _several_pieces(first, options)
    tokens = [token for piece in pieces for token in piece.token_ids]
    counts = list(accumulate(len(piece.token_ids) for piece in pieces))
    with _fingerprint_channel(second) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        fingerprint = _fingerprint(stub)
        for index in range(len(pieces) - 1):
            message = fill_request(pb.GenerateStreamRequest(), PROMPT, options)
            message.adapter = pieces[0].adapter
            message.resume.seed = pieces[0].seed
            message.resume.token_ids.extend(tokens[: counts[index]])
            message.resume.base_fingerprint = fingerprint
            responses = list(stub.GenerateStream(message, timeout=WAIT_S))
            rest = pieces[index + 1 :]
            assert [t for r in responses for t in r.token_ids] == tokens[counts[index] :]
            assert "".join(r.text for r in responses) == "".join(piece.text for piece in rest)
            assert responses[-1].usage.completion_tokens == len(tokens)
            last = pieces[-1]
            assert responses[-1].WhichOneof("stop") is None or last.stop is not None
            scores = [score.logprob for r in responses for score in r.scores]
            expected = [score.logprob for piece in rest for score in piece.scores]
            assert scores == pytest.approx(expected, abs=1e-9)


def _several_pieces(server: Server, options: Options) -> list[Piece]:
    """Stream the prompt's answer until it comes in more than five pieces.

    On a busy machine, one piece may have several tokens.
    """
    pieces: list[Piece] = []

    def comes_in_several_pieces() -> bool:
        pieces[:] = client.stream(PROMPT, options)
        return len(pieces) > 5

    with server.client() as client:
        eventually(comes_in_several_pieces)
    return pieces


def _fingerprint_channel(server: Server) -> grpc.Channel:
    return grpc.insecure_channel(server.address)


def _fingerprint(stub: generation_pb2_grpc.GenerationServiceStub) -> str:
    message = pb.GenerateStreamRequest(text=PROMPT, max_new_tokens=1)
    return str(next(iter(stub.GenerateStream(message, timeout=WAIT_S))).base_fingerprint)


def test_a_completion_of_openai_is_continued_behind_any_token(deployment: Deployment) -> None:
    first, second = deployment.servers
    request = {
        "model": "read",
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 1,
        "logprobs": 1,
        "return_token_ids": True,
        "stop": ["zz", "qu"],
    }
    complete = _post(first, "/v1/completions", request)
    choice = complete["choices"][0]
    assert complete["model"] == "read@1" and len(choice["token_ids"]) > 5
    for count in range(len(choice["token_ids"])):
        resume = {
            "seed": choice["seed"],
            "token_ids": choice["token_ids"][:count],
            "base_fingerprint": complete["system_fingerprint"],
        }
        changes = {"model": complete["model"], "resume": resume}
        rest = _post(second, "/v1/completions", request | changes)
        rest_choice = rest["choices"][0]
        assert rest_choice["token_ids"] == choice["token_ids"][count:]
        assert choice["text"].endswith(rest_choice["text"])
        assert rest_choice["finish_reason"] == choice["finish_reason"]
        offsets = choice["logprobs"]["text_offset"][count:]
        assert rest_choice["logprobs"]["text_offset"] == offsets
        assert rest["usage"]["completion_tokens"] == complete["usage"]["completion_tokens"]
    refusals = {"n": 2, "echo": True, "use_beam_search": True, "prompt": ["one", "two"]}
    for field, value in refusals.items():
        status, body = second.request("/v1/completions", request | changes | {field: value})
        assert status == 400, (field, body)


def _post(server: Server, path: str, request: dict[str, Any]) -> dict[str, Any]:
    status, body = server.request(path, request)
    assert status == 200, body
    response: dict[str, Any] = json.loads(body)
    return response


def test_what_cannot_be_resumed_is_refused(deployment: Deployment) -> None:
    with _fingerprint_channel(deployment.servers[0]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        good = pb.Resume(seed=1, token_ids=[5, 6], base_fingerprint=_fingerprint(stub))

        def refusal(**changes: object) -> str:
            message = pb.GenerateStreamRequest(text=PROMPT, max_new_tokens=8, resume=good)
            for name, value in changes.items():
                field = getattr(message, name)
                if hasattr(field, "MergeFrom"):
                    field.MergeFrom(value)
                else:
                    setattr(message, name, value)
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.GenerateStream(message, timeout=WAIT_S))
            return str(caught.value.details())

        assert "several answers" in refusal(answers=2)
        assert "beam search" in refusal(beams=pb.Beams(width=2))
        assert "version" in refusal(adapter="read")
        assert "does not exist" in refusal(adapter="read@9")
        assert "base_fingerprint" in refusal(resume=pb.Resume(base_fingerprint="0" * 64))
        assert "640" in refusal(resume=pb.Resume(token_ids=[640]))
        assert "max_new_tokens is 2" in refusal(max_new_tokens=2)
        assert "stop token" in refusal(stops=pb.Stops(token_ids=[6]))
        begun = pb.Resume(token_ids=[0])  # An id that is false in Python.
        assert "token 0 is a stop token" in refusal(resume=begun, stops=pb.Stops(token_ids=[0]))
        assert "the seed 3" in refusal(sampling=pb.Sampling(seed=3))


def test_a_client_continues_a_stream_after_kill_9(deployment: Deployment) -> None:
    """The client is told of it, and the result equals that of a server that was not disturbed."""
    survivor = deployment.servers[1]
    with survivor.client(timeout_s=300) as client:
        expected = list(client.stream(PROMPT, LONG))
    with (
        _server(deployment.folder, 2) as victim,
        Client([victim.address, survivor.address], 300.0) as client,
    ):
        stream = client.stream(PROMPT, LONG)
        pieces = [next(stream)]
        victim.stop(signal.SIGKILL)
        pieces += stream
        # The victim is avoided for some seconds.
        assert client.generate(PROMPT, Options(max_new_tokens=2)).token_ids
    assert [piece.resumed_at for piece in pieces if piece.resumed_at] == [survivor.address]
    assert _tokens(pieces) == _tokens(expected)
    assert "".join(p.text for p in pieces) == "".join(p.text for p in expected)
    assert [piece.seed for piece in pieces if piece.seed] == [7]
    usage, expected_usage = pieces[-1].usage, expected[-1].usage
    assert usage is not None and expected_usage is not None
    assert usage == replace(expected_usage, cached_tokens=usage.cached_tokens)
    assert survivor.metric("preamble_generation_resumed_total") >= 1


def test_an_async_client_continues_a_stream_after_kill_9(deployment: Deployment) -> None:
    survivor = deployment.servers[1]

    async def read_stream(victim: Server) -> list[Piece]:
        pieces: list[Piece] = []
        async with AsyncClient([victim.address, survivor.address], 300.0) as client:
            async for piece in client.stream(PROMPT, LONG):
                if not pieces:
                    victim.stop(signal.SIGKILL)
                pieces.append(piece)
        return pieces

    with _server(deployment.folder, 3) as victim:
        pieces = asyncio.run(read_stream(victim))
    with survivor.client(timeout_s=300) as other:
        assert _tokens(pieces) == _tokens(list(other.stream(PROMPT, LONG)))


def test_the_command_says_that_it_has_resumed(deployment: Deployment) -> None:
    survivor = deployment.servers[1]
    flags = ["--max-new-tokens", "600", "--temperature", "1", "--seed", "7"]
    with _server(deployment.folder, 4) as victim:
        addresses = f"{victim.address},{survivor.address}"
        arguments = command("generate", PROMPT, "--server", addresses, *flags)
        pipe = subprocess.PIPE
        with subprocess.Popen(arguments, bufsize=0, stdout=pipe, stderr=pipe) as process:
            assert process.stdout is not None
            first = process.stdout.read(1)
            victim.stop(signal.SIGKILL)
            text, errors = process.communicate(timeout=WAIT_S)
    options = replace(LONG, ignore_ends=False)
    with survivor.client(timeout_s=300) as client:
        expected = "".join(piece.text for piece in client.stream(PROMPT, options))
    assert process.returncode == 0 and (first + text).decode() == f"{expected}\n"
    assert f"{survivor.address} continues the completion" in errors.decode()


def test_a_stream_is_continued_at_most_three_times(deployment: Deployment) -> None:
    """Without other servers the client waits for its server, and then raises the error."""
    with (
        _server(deployment.folder, 5) as victim,
        Client(victim.address, WAIT_S, retries=Retries(wait_s_max=2.0)) as client,
    ):
        stream = client.stream(PROMPT, LONG)
        next(stream)
        victim.stop(signal.SIGKILL)
        with pytest.raises(CallError) as caught:
            list(stream)
    assert caught.value.code == "UNAVAILABLE"


def test_calls_for_an_adapter_go_to_one_server(deployment: Deployment) -> None:
    for server in deployment.servers:
        with server.client() as client:
            AdapterCalls(client).load("read")
    series = 'preamble_adapter_requests_total{adapter="read"}'
    before = [server.metric(series) for server in deployment.servers]
    options = Options(max_new_tokens=1, adapter="read")
    with Client(deployment.addresses, WAIT_S, balance="adapter") as client:
        for _ in range(6):
            client.generate(PROMPT, options)
    after = [server.metric(series) for server in deployment.servers]
    assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 6]
    with deployment.client() as client:
        for _ in range(6):
            client.generate(PROMPT, options)
    last = [server.metric(series) for server in deployment.servers]
    assert [b - a for a, b in zip(after, last, strict=True)] == [3, 3]


def _tokens(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]
