"""Replicas behind Envoy and an endpoint picker, as in an inference gateway."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from clients.client import CallError, Client, Options, Retries
from tests.support.endpoint_picker import EndpointPicker, inference_gateway
from tests.support.envoy import envoy_binary
from tests.support.replicas import Replicas
from tests.support.servers import WAIT_S, write_checkpoint

PROMPT = "twelve and thirty?"
NEW_TOKENS = 24
LONG_NEW_TOKENS = 300
STREAMS = 30  # Directly and behind the gateway, in turn.
# A first message may come this much later behind the gateway: five times the value that is seen on
# a machine without other load (docs/scale-out.md).
FIRST_DELAY_MAX_S = 5 * 0.005
IN_TIME_SHARE_MIN = 0.9
ROUNDS = 4  # Other processes delay messages, too: the best round counts.


@dataclass(frozen=True)
class Gateway:
    address: str
    picker: EndpointPicker


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    envoy_binary()
    folder = tmp_path_factory.mktemp("picker")
    with Replicas(write_checkpoint(folder), folder, 2) as replicas:
        yield replicas


@pytest.fixture
def gateway(replicas: Replicas, tmp_path: Path) -> Iterator[Gateway]:
    picker = EndpointPicker(replicas.servers)
    with inference_gateway(picker, tmp_path) as address:
        picker.picked.clear()
        yield Gateway(address, picker)


def _options(seed: int, new_tokens: int = NEW_TOKENS) -> Options:
    return Options(max_new_tokens=new_tokens, temperature=1.0, seed=seed, ignore_ends=True)


def _openai_client(address: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=WAIT_S
    )


def _stream_grpc(client: Client, seed: int, new_tokens: int = NEW_TOKENS) -> Iterator[str]:
    for piece in client.stream(PROMPT, _options(seed, new_tokens)):
        yield piece.text


def _stream_http(client: openai.OpenAI, seed: int, new_tokens: int = NEW_TOKENS) -> Iterator[str]:
    chunks = client.completions.create(
        model="checkpoint",
        prompt=PROMPT,
        max_tokens=new_tokens,
        seed=seed,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for chunk in chunks:
        if chunk.choices:
            yield chunk.choices[0].text


@pytest.mark.slow
def test_answers_and_streams_pass_unchanged(replicas: Replicas, gateway: Gateway) -> None:
    (first, second) = replicas.servers
    with (
        first.client() as direct,
        Client(gateway.address, WAIT_S) as routed,
        _openai_client(first.http_address) as direct_http,
        _openai_client(gateway.address) as routed_http,
    ):
        for seed in range(4):
            answer = direct.generate(PROMPT, _options(seed))
            assert routed.generate(PROMPT, _options(seed)).token_ids == answer.token_ids
            assert "".join(_stream_grpc(routed, seed)) == answer.text
            text = "".join(_stream_http(direct_http, seed))
            assert "".join(_stream_http(routed_http, seed)) == text
        assert [model.id for model in routed_http.models.list()]  # A request without a body.
    assert {first.address, second.address} <= set(gateway.picker.picked)
    assert {first.http_address, second.http_address} <= set(gateway.picker.picked)


@pytest.mark.slow
def test_first_messages_come_long_before_the_last(gateway: Gateway) -> None:
    with Client(gateway.address, WAIT_S) as client, _openai_client(gateway.address) as http_client:
        for seed in range(3):
            streams = {
                "gRPC": _stream_grpc(client, seed, LONG_NEW_TOKENS),
                "SSE": _stream_http(http_client, seed, LONG_NEW_TOKENS),
            }
            for protocol, stream in streams.items():
                first, total = _times(stream)
                print(f"{protocol}: {1000 * first:.1f} of {1000 * total:.1f} ms")
                assert first < 0.5 * total


@pytest.mark.soak  # It needs a machine without other load.
def test_first_messages_are_not_delayed(replicas: Replicas, gateway: Gateway) -> None:
    server = replicas.servers[0]
    with (
        server.client() as direct,
        Client(gateway.address, WAIT_S) as routed,
        _openai_client(server.http_address) as direct_http,
        _openai_client(gateway.address) as routed_http,
    ):
        _check_delays(
            "gRPC", lambda seed: _stream_grpc(direct, seed), lambda seed: _stream_grpc(routed, seed)
        )
        _check_delays(
            "SSE",
            lambda seed: _stream_http(direct_http, seed),
            lambda seed: _stream_http(routed_http, seed),
        )


def _check_delays(
    protocol: str, direct: Callable[[int], Iterator[str]], routed: Callable[[int], Iterator[str]]
) -> None:
    """Check that most first messages come in time in one of a few rounds.

    The fastest first message is compared with the fastest direct one, and so on: other processes
    delay some of both.
    """
    shares = []
    for _ in range(ROUNDS):
        pairs = [(_times(direct(seed)), _times(routed(seed))) for seed in range(STREAMS)]
        delays = _delays([first for (first, _), _ in pairs], [first for _, (first, _) in pairs])
        print(f"{protocol}: {1000 * delays[STREAMS // 2]:.1f} ms at the median, ", end="")
        print(f"{1000 * delays[int(0.9 * STREAMS)]:.1f} ms at the 90th percentile")
        shares.append(sum(delay <= FIRST_DELAY_MAX_S for delay in delays) / STREAMS)
        if shares[-1] > IN_TIME_SHARE_MIN:
            return
    raise AssertionError(f"shares of first messages in time: {shares}")


def _delays(direct: Sequence[float], routed: Sequence[float]) -> list[float]:
    return [b - a for a, b in zip(sorted(direct), sorted(routed), strict=True)]


def _times(stream: Iterator[str]) -> tuple[float, float]:
    """Return the seconds until the first message, and until the end."""
    start = time.perf_counter()
    next(stream)
    first = time.perf_counter() - start
    for _ in stream:
        pass
    return first, time.perf_counter() - start


@pytest.mark.slow
def test_without_a_ready_replica_the_picker_refuses_calls(gateway: Gateway) -> None:
    gateway.picker.remove_all()
    with Client(gateway.address, WAIT_S, retries=Retries(attempts_max=1)) as client:
        with pytest.raises(CallError) as caught:
            client.generate(PROMPT, _options(0))
        assert caught.value.code == "UNAVAILABLE"
    with _openai_client(gateway.address) as http_client:
        with pytest.raises(openai.InternalServerError) as refusal:
            http_client.completions.create(model="checkpoint", prompt=PROMPT)
        assert refusal.value.status_code == 503
