"""The server, entered by the public door: real sockets, a real process, a tiny real model.

The oracle is `gpt.generation.generate`, on the same checkpoint in this process; fp64 makes tokens
equal.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

import gpt
from clients.client import CallError, Client, Options
from clients.responses import Completion
from gpt.adapters.prompt_template import Template
from gpt.generation.generate import Completion as Expected
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.sampling_params import Sampling
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer
from protos.foreign import package
from protos.preamble.v1 import adapters_pb2, adapters_pb2_grpc
from protos.preamble.v1 import generation_pb2 as pb
from serving.server import SERVICES
from tests.support.servers import (
    WAIT_S,
    Server,
    eventually,
    serving,
    write_adapter,
    write_checkpoint,
)

INSTRUCTION = "what is the sum of"
TEXT = "twelve and thirty? answer:"
SAMPLED = Options(temperature=1.0, top_k=50, top_p=0.95, seed=7, max_new_tokens=24)
GREEDY = Options(max_new_tokens=24)


class World:
    """A checkpoint, its oracle, and a server with adapters."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = write_checkpoint(folder)
        self.model: GPT = gpt.load(self.checkpoint, dtype="float64")
        self.tokenizer: Tokenizer = open_tokenizer(self.checkpoint / "tokenizer")
        self.adapters = folder / "adapters"
        self.adapters.mkdir()
        self.server: Server

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def oracle(self, prompt: list[int], options: Options) -> Expected:
        rule = Sampling(
            max_new_tokens=options.max_new_tokens or 128,
            temperature=options.temperature or 0.0,
            top_k=options.top_k,
            top_p=1.0 if options.top_p is None else options.top_p,
            seed=options.seed or 0,
            stop_token_ids=self.tokenizer.stop_ids,
        )
        return generate(self.model, [prompt], rule)[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("serving")
    world = World(folder)
    write_adapter(world.adapters / "sum.safetensors", world.checkpoint, world.ids(INSTRUCTION))
    template = Template(
        "<|VIRTUAL_PROMPT_0|>{numbers}? answer:{result}", (3,), answer_field="result"
    )
    other = world.ids("the quick brown")[:3]
    write_adapter(world.adapters / "fox@2.safetensors", world.checkpoint, other, template=template)
    with serving(world.checkpoint, folder / "s.yaml", adapters=str(world.adapters)) as server:
        world.server = server
        yield world


@pytest.fixture
def client(world: World) -> Iterator[Client]:
    with world.server.client() as client:
        yield client


def uncached(answer: Completion) -> Completion:
    """The same, whatever of its prompt was in the cache."""
    return replace(answer, usage=replace(answer.usage, cached_tokens=0))


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_unary_and_streamed_answers_are_the_oracles(
    world: World, client: Client, options: Options
) -> None:
    expected = world.oracle(world.ids(TEXT), options)

    answer = client.generate(TEXT, options)
    pieces = list(client.stream(TEXT, options))

    assert answer.token_ids == expected.token_ids
    assert answer.finish_reason == expected.finish_reason
    assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids
    assert "".join(piece.text for piece in pieces) == answer.text
    assert answer.text == world.tokenizer.decode(expected.token_ids, started=True)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == expected.finish_reason
    assert pieces[-1].usage is not None
    assert replace(pieces[-1].usage, cached_tokens=0) == replace(answer.usage, cached_tokens=0)
    assert answer.usage.prompt_tokens == len(world.ids(TEXT))
    assert answer.usage.completion_tokens == len(expected.token_ids)


def test_many_at_once_get_what_each_would_get_alone(world: World, client: Client) -> None:
    texts = [
        f"{word} {TEXT}"[: 6 + 5 * n] for n, word in enumerate(("one", "two", "three", "four"))
    ]
    asks = [
        (text, Options(adapter=adapter, temperature=temperature, seed=n, max_new_tokens=4 + 3 * n))
        for n, text in enumerate(texts)
        for adapter in ("", "sum", "fox")
        for temperature in (0.0, 1.0)
    ]
    alone = [client.generate(*ask) for ask in asks]

    with ThreadPoolExecutor(len(asks)) as pool:
        together = list(pool.map(lambda ask: client.generate(*ask), asks))

    assert [*map(uncached, together)] == [*map(uncached, alone)]


def test_an_adapter_made_of_an_instructions_rows_is_the_instruction(
    world: World, client: Client
) -> None:
    text_ids = world.ids(TEXT)
    expected = world.oracle(world.ids(INSTRUCTION) + text_ids, GREEDY)

    answer = client.generate(TEXT, Options(adapter="sum", max_new_tokens=24))

    assert answer.token_ids == expected.token_ids
    assert answer.adapter == "sum@1"
    assert answer.usage.prompt_tokens == len(text_ids)
    assert answer.usage.virtual_tokens == len(world.ids(INSTRUCTION))
    again = Options(adapter="sum@1", max_new_tokens=24, seed=answer.seed)
    assert uncached(client.generate(text_ids, again)) == uncached(answer)
    spaced = client.generate(f"  {TEXT} ", Options(adapter="sum", max_new_tokens=1))
    assert spaced.usage.prompt_tokens == len(world.ids(f"  {TEXT} "))


def test_inputs_are_rendered_by_the_adapters_own_template(world: World, client: Client) -> None:
    rows = world.ids("the quick brown")[:3]
    expected = world.oracle([*rows, *world.ids("one and two? answer:")], GREEDY)

    answer = client.generate({"numbers": "one and two"}, Options(adapter="fox", max_new_tokens=24))

    assert answer.token_ids == expected.token_ids
    assert answer.adapter == "fox@2"


def test_a_seed_that_was_drawn_is_told_and_gives_the_same_again(client: Client) -> None:
    first = client.generate(TEXT, Options(temperature=1.0, max_new_tokens=24))
    again = client.generate(TEXT, Options(temperature=1.0, max_new_tokens=24, seed=first.seed))
    assert again == first


def test_a_stop_string_ends_the_text_before_it_however_tokens_cut_it(
    world: World, client: Client
) -> None:
    whole = client.generate(TEXT, GREEDY).text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]

    answer = client.generate(TEXT, Options(max_new_tokens=24, stop=[stop]))
    pieces = list(client.stream(TEXT, Options(max_new_tokens=24, stop=[stop])))

    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
    assert "".join(piece.text for piece in pieces) == answer.text


def test_a_stop_token_ends_the_answer_and_is_no_text(world: World, client: Client) -> None:
    expected = world.oracle(world.ids(TEXT), GREEDY).token_ids
    last = expected.index(expected[5])

    options = Options(max_new_tokens=24, stop_token_ids=[expected[5]])
    answer = client.generate(TEXT, options)

    assert answer.token_ids == expected[: last + 1]
    assert answer.text == world.tokenizer.decode(expected[:last], started=True)
    assert answer.finish_reason == "stop"


def test_tokenizing_and_back(world: World, client: Client) -> None:
    assert client.tokenize(TEXT) == world.ids(TEXT)
    assert client.detokenize(world.ids(TEXT)) == TEXT


VOCABULARY = 640
BAD: Mapping[str, tuple[Any, dict[str, Any], str, str]] = {
    "no prompt": ([], {}, "INVALID_ARGUMENT", "token_ids"),
    "empty text": ("", {}, "INVALID_ARGUMENT", "text"),
    "a virtual id": ([5, VOCABULARY], {"adapter": "sum"}, "INVALID_ARGUMENT", "token_ids has 640"),
    "a large id": ([2**32 - 1], {}, "INVALID_ARGUMENT", "token_ids"),
    "no new tokens": ("a", {"max_new_tokens": 0}, "INVALID_ARGUMENT", "max_new_tokens is 0"),
    "too many": ("a", {"max_new_tokens": 2**31}, "INVALID_ARGUMENT", "ask for at most"),
    "a long prompt": ("a " * 5000, {}, "INVALID_ARGUMENT", "shorten the prompt"),
    "a huge prompt": ("a" * (2 << 20), {}, "INVALID_ARGUMENT", "text_bytes_max"),
    "temperature": ("a", {"temperature": -1.0}, "INVALID_ARGUMENT", "temperature"),
    "infinite": ("a", {"temperature": float("inf")}, "INVALID_ARGUMENT", "temperature"),
    "not a number": ("a", {"top_p": float("nan")}, "INVALID_ARGUMENT", "top_p"),
    "top_p": ("a", {"top_p": 0.0}, "INVALID_ARGUMENT", "top_p"),
    "an empty stop": ("a", {"stop": [""]}, "INVALID_ARGUMENT", "stops.strings"),
    "many stops": ("a", {"stop": ["x"] * 100}, "INVALID_ARGUMENT", "stops.strings"),
    "a long stop": ("a", {"stop": ["x" * 1000]}, "INVALID_ARGUMENT", "stops.strings"),
    "a stop id": ("a", {"stop_token_ids": [9999]}, "INVALID_ARGUMENT", "stops.token_ids"),
    "inputs alone": ({"numbers": "1"}, {}, "INVALID_ARGUMENT", "inputs"),
    "no template": ({"numbers": "1"}, {"adapter": "sum"}, "INVALID_ARGUMENT", "template"),
    "a missing field": ({}, {"adapter": "fox"}, "INVALID_ARGUMENT", "'numbers' is missing"),
    "a wrong field": ({"number": "1"}, {"adapter": "fox"}, "INVALID_ARGUMENT", "'numbers'"),
    "unknown adapter": ("a", {"adapter": "nobody"}, "NOT_FOUND", "nobody"),
    "unknown version": ("a", {"adapter": "sum@7"}, "NOT_FOUND", "sum@7"),
    "a path": ("a", {"adapter": "../sum"}, "INVALID_ARGUMENT", "../sum"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_told_its_field_and_harms_nobody(client: Client, case: str) -> None:
    prompt, options, code, word = BAD[case]

    with pytest.raises(CallError, match=word.replace(".", r"\.")) as unary:
        client.generate(prompt, Options(**options))
    with pytest.raises(CallError) as streamed:
        list(client.stream(prompt, Options(**options)))

    assert unary.value.code == streamed.value.code == code
    assert str(unary.value) == str(streamed.value)
    assert client.generate("a", Options(max_new_tokens=1)).usage.completion_tokens == 1


def test_a_request_without_a_prompt_is_refused(world: World) -> None:
    with grpc.insecure_channel(world.server.address) as channel:
        call = channel.unary_unary(
            "/preamble.v1.GenerationService/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        with pytest.raises(grpc.RpcError, match="prompt is not set"):
            call(pb.GenerateRequest(), timeout=WAIT_S)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_bytes_that_are_no_request_are_refused_with_a_code_and_counted(
    world: World, method: str
) -> None:
    series = f'preamble_requests_total{{code="INVALID_ARGUMENT",method="{method}",wire="preamble"}}'
    before = world.server.metric(series)
    with grpc.insecure_channel(world.server.address) as channel:
        # Read as a stream, for which one answer is a stream too.
        call: Any = channel.unary_stream(f"/preamble.v1.GenerationService/{method}")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(b"\xff\xff\xff", timeout=WAIT_S))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"the 3 bytes sent are no request of {method}" in str(refused.value)
    eventually(lambda: world.server.metric(series) == before + 1)


def test_an_adapter_that_was_just_written_is_found_and_one_that_is_wrong_is_passed_over(
    world: World, client: Client
) -> None:
    failures = world.server.metric("preamble_adapter_load_failures_total")
    (world.adapters / "broken.safetensors").write_bytes(b"not an adapter")
    foreign = world.adapters / "foreign.safetensors"
    write_adapter(foreign, world.checkpoint, world.ids("one"), base="0" * 64)
    write_adapter(world.adapters / "late.safetensors", world.checkpoint, world.ids("one"))

    answer = client.generate(TEXT, Options(adapter="late", max_new_tokens=4))

    assert answer.adapter == "late@1"
    assert world.server.metric("preamble_adapter_load_failures_total") == failures + 2
    for name in ("broken", "foreign"):
        with pytest.raises(CallError, match=name):
            client.generate(TEXT, Options(adapter=name))
    write_adapter(world.adapters / "late@2.safetensors", world.checkpoint, world.ids("two"))
    eventually(lambda: client.generate(TEXT, Options(adapter="late")).adapter == "late@2")
    listed = [(one.name, one.version, one.current) for one in client.adapters()]
    assert listed == [("fox", 2, True), ("late", 1, False), ("late", 2, True), ("sum", 1, True)]
    for file in ("broken", "foreign", "late", "late@2"):
        (world.adapters / f"{file}.safetensors").unlink()
    eventually(lambda: client.info().adapters == 2)
    with pytest.raises(CallError, match="late"):
        client.generate(TEXT, Options(adapter="late"))


def test_adapters_are_listed_in_pages(world: World) -> None:
    with grpc.insecure_channel(world.server.address) as channel:
        stub = adapters_pb2_grpc.AdapterServiceStub(channel)

        def page(token: str) -> adapters_pb2.ListAdaptersResponse:
            request = adapters_pb2.ListAdaptersRequest(page_size=1, page_token=token)
            answer: adapters_pb2.ListAdaptersResponse = stub.ListAdapters(request, timeout=WAIT_S)
            return answer

        first = page("")
        second = page(first.next_page_token)
        assert [one.name for one in (*first.adapters, *second.adapters)] == ["fox", "sum"]
        assert list(first.adapters[0].input_fields) == ["numbers"]
        assert first.adapters[0].virtual_tokens == 3
        assert second.next_page_token == ""
        with pytest.raises(grpc.RpcError, match="page_token"):
            page("/etc")


def test_health_reflection_and_pages_say_that_it_serves(world: World) -> None:
    with grpc.insecure_channel(world.server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "preamble.v1.GenerationService"):
            request = health_pb2.HealthCheckRequest(service=service)
            status = health.Check(request, timeout=WAIT_S).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        described = ProtoReflectionDescriptorDatabase(channel)
        assert "preamble.v1.AdapterService" in described.get_services()
        file = described.FindFileContainingSymbol("preamble.v1.GenerationService")
        assert file.name == "preamble/v1/generation.proto"
    assert world.server.get("/health/live")[0] == 200
    assert world.server.get("/health/ready")[0] == 200
    assert world.server.get("/nowhere")[0] == 404


def test_health_is_listed_and_reflection_has_two_names(world: World) -> None:
    pb, health = package("reflection"), package("health")
    with grpc.insecure_channel(world.server.address) as channel:
        ask: Any = channel.unary_unary("/grpc.health.v1.Health/List")
        listed = health.HealthListResponse.FromString(ask(b"", timeout=WAIT_S)).statuses
        assert {"", "liveness", "readiness", *SERVICES} == set(listed)
        assert {one.status for one in listed.values()} == {1}
        for version in ("v1", "v1alpha"):
            ask = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=pb.ServerReflectionRequest.SerializeToString,
                response_deserializer=pb.ServerReflectionResponse.FromString,
            )
            told = _reflected(ask, list_services="").list_services_response
            names = [one.name for one in told.service]
            own = ("grpc.health.v1.Health", f"grpc.reflection.{version}.ServerReflection")
            assert {*SERVICES, *own} <= set(names)
            # All that is listed is described, methods too, as a tool asks for them.
            methods = ["preamble.v1.GenerationService.Generate", "grpc.health.v1.Health.List"]
            for symbol in (*names, *methods):
                told = _reflected(ask, file_containing_symbol=symbol)
                assert told.file_descriptor_response.file_descriptor_proto, symbol
            for symbol in ("", "nobody", "preamble.v1.GenerationService.Nothing"):
                told = _reflected(ask, file_containing_symbol=symbol)
                assert told.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def _reflected(ask: Any, **what: str) -> Any:
    request = package("reflection").ServerReflectionRequest(**what)
    (response,) = ask(iter([request]), timeout=WAIT_S)
    return response


def test_the_scrape_counts_what_happened(world: World, client: Client) -> None:
    def read() -> dict[str, float]:
        ok = '{code="OK",method="Generate",wire="preamble"}'
        names = [
            f"preamble_requests_total{ok}",
            'preamble_requests_total{code="NOT_FOUND",method="Generate",wire="preamble"}',
            "preamble_generated_tokens_total",
            "preamble_prompt_tokens_total",
            "preamble_virtual_tokens_total",
            'preamble_time_to_first_token_seconds_count{wire="preamble"}',
            "preamble_inter_token_latency_seconds_count",
            f"preamble_request_duration_seconds_count{ok}",
        ]
        return {name: world.server.metric(name) for name in names}

    before = read()
    answer = client.generate(TEXT, Options(adapter="sum", max_new_tokens=9))
    with pytest.raises(CallError):
        client.generate(TEXT, Options(adapter="nobody"))
    grown = [after - was for after, was in zip(read().values(), before.values(), strict=True)]

    made, usage = len(answer.token_ids), answer.usage
    assert grown == [1, 1, made, usage.prompt_tokens, usage.virtual_tokens, 1, made - 1, 1]
    assert world.server.metric("preamble_requests_in_flight") == 0
    assert world.server.metric("preamble_adapters_loaded") == 2


def test_the_two_requests_have_the_same_fields() -> None:
    def fields(message: Any) -> list[tuple[str, int, int]]:
        return [(field.name, field.number, field.type) for field in message.DESCRIPTOR.fields]

    assert fields(pb.GenerateRequest) == fields(pb.GenerateStreamRequest)
