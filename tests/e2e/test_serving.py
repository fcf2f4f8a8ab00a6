"""The server through its public interface: real sockets, a real process, a tiny real model.

The oracle is `gpt.generation.generate` on the same checkpoint in this process; in fp64 its tokens
are equal.
"""

import dataclasses
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
from gpt.adapters.prompt_template import PromptTemplate
from gpt.generation.generate import Completion as Expected
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.sampling_params import SamplingParams
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer
from protos.foreign.descriptor_pools import load_package
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


class ServedModel:
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
        rule = SamplingParams(
            max_new_tokens=options.max_new_tokens or 128,
            temperature=options.temperature or 0.0,
            top_k=options.top_k,
            top_p=1.0 if options.top_p is None else options.top_p,
            seed=options.seed or 0,
            stop_token_ids=self.tokenizer.stop_ids,
        )
        return generate(self.model, [prompt], rule)[0]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    folder = tmp_path_factory.mktemp("serving")
    deployment = ServedModel(folder)
    write_adapter(
        deployment.adapters / "sum.safetensors", deployment.checkpoint, deployment.ids(INSTRUCTION)
    )
    template = PromptTemplate(
        "<|VIRTUAL_PROMPT_0|>{numbers}? answer:{result}", (3,), answer_field="result"
    )
    prompt_ids = deployment.ids("the quick brown")[:3]
    write_adapter(
        deployment.adapters / "fox@2.safetensors",
        deployment.checkpoint,
        prompt_ids,
        template=template,
    )
    with serving(
        deployment.checkpoint, folder / "s.yaml", adapters=str(deployment.adapters)
    ) as server:
        deployment.server = server
        yield deployment


@pytest.fixture
def client(deployment: ServedModel) -> Iterator[Client]:
    with deployment.server.client() as client:
        yield client


def without_cache_statistics(answer: Completion) -> Completion:
    """The completion without its cache statistics, which depend on earlier requests."""
    return replace(answer, usage=replace(answer.usage, cached_tokens=0))


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_unary_and_streamed_answers_equal_the_oracle(
    deployment: ServedModel, client: Client, options: Options
) -> None:
    expected = deployment.oracle(deployment.ids(TEXT), options)

    answer = client.generate(TEXT, options)
    pieces = list(client.stream(TEXT, options))

    assert answer.token_ids == expected.token_ids
    assert answer.finish_reason == expected.finish_reason
    assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids
    assert "".join(piece.text for piece in pieces) == answer.text
    assert answer.text == deployment.tokenizer.decode(expected.token_ids, continues_text=True)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == expected.finish_reason
    assert pieces[-1].usage is not None
    assert replace(pieces[-1].usage, cached_tokens=0) == replace(answer.usage, cached_tokens=0)
    assert answer.usage.prompt_tokens == len(deployment.ids(TEXT))
    assert answer.usage.completion_tokens == len(expected.token_ids)


def test_concurrent_requests_get_the_answers_of_separate_ones(
    deployment: ServedModel, client: Client
) -> None:
    texts = [
        f"{number_word} {TEXT}"[: 6 + 5 * n]
        for n, number_word in enumerate(("one", "two", "three", "four"))
    ]
    calls = [
        (text, Options(adapter=adapter, temperature=temperature, seed=n, max_new_tokens=4 + 3 * n))
        for n, text in enumerate(texts)
        for adapter in ("", "sum", "fox")
        for temperature in (0.0, 1.0)
    ]
    separate_answers = [client.generate(*ask) for ask in calls]

    with ThreadPoolExecutor(len(calls)) as pool:
        concurrent_answers = list(pool.map(lambda ask: client.generate(*ask), calls))

    assert [*map(without_cache_statistics, concurrent_answers)] == [
        *map(without_cache_statistics, separate_answers)
    ]


def test_adapter_of_an_instructions_embeddings_equals_the_instruction(
    deployment: ServedModel, client: Client
) -> None:
    text_ids = deployment.ids(TEXT)
    expected = deployment.oracle(deployment.ids(INSTRUCTION) + text_ids, GREEDY)

    answer = client.generate(TEXT, Options(adapter="sum", max_new_tokens=24))

    assert answer.token_ids == expected.token_ids
    assert answer.adapter == "sum@1"
    assert answer.usage.prompt_tokens == len(text_ids)
    assert answer.usage.virtual_tokens == len(deployment.ids(INSTRUCTION))
    repeated = Options(adapter="sum@1", max_new_tokens=24, seed=answer.seed)
    assert without_cache_statistics(
        client.generate(text_ids, repeated)
    ) == without_cache_statistics(answer)
    with_spaces = client.generate(f"  {TEXT} ", Options(adapter="sum", max_new_tokens=1))
    assert with_spaces.usage.prompt_tokens == len(deployment.ids(f"  {TEXT} "))


def test_inputs_are_rendered_by_the_adapter_template(
    deployment: ServedModel, client: Client
) -> None:
    rows = deployment.ids("the quick brown")[:3]
    expected = deployment.oracle([*rows, *deployment.ids("one and two? answer:")], GREEDY)

    answer = client.generate({"numbers": "one and two"}, Options(adapter="fox", max_new_tokens=24))

    assert answer.token_ids == expected.token_ids
    assert answer.adapter == "fox@2"


def test_drawn_seeds_are_returned_and_reproduce_the_answer(client: Client) -> None:
    answer = client.generate(TEXT, Options(temperature=1.0, max_new_tokens=24))
    repeated = client.generate(TEXT, Options(temperature=1.0, max_new_tokens=24, seed=answer.seed))
    # Only the first of two equal prompts may have to be computed.
    assert dataclasses.replace(repeated, usage=answer.usage) == answer


def test_stop_strings_across_tokens_end_the_text_before_them(
    deployment: ServedModel, client: Client
) -> None:
    full_text = client.generate(TEXT, GREEDY).text
    stop = full_text[len(full_text) // 2 : len(full_text) // 2 + 3]

    answer = client.generate(TEXT, Options(max_new_tokens=24, stop=[stop]))
    pieces = list(client.stream(TEXT, Options(max_new_tokens=24, stop=[stop])))

    assert answer.text == full_text[: full_text.index(stop)]
    assert answer.finish_reason == "stop"
    assert "".join(piece.text for piece in pieces) == answer.text


def test_stop_tokens_end_the_answer_and_are_not_in_the_text(
    deployment: ServedModel, client: Client
) -> None:
    expected = deployment.oracle(deployment.ids(TEXT), GREEDY).token_ids
    first_index = expected.index(expected[5])

    options = Options(max_new_tokens=24, stop_token_ids=[expected[5]])
    answer = client.generate(TEXT, options)

    assert answer.token_ids == expected[: first_index + 1]
    assert answer.text == deployment.tokenizer.decode(expected[:first_index], continues_text=True)
    assert answer.finish_reason == "stop"


def test_tokenize_and_detokenize(deployment: ServedModel, client: Client) -> None:
    assert client.tokenize(TEXT) == deployment.ids(TEXT)
    assert client.detokenize(deployment.ids(TEXT)) == TEXT


VOCABULARY = 640
INVALID_REQUESTS: Mapping[str, tuple[Any, dict[str, Any], str, str]] = {
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


@pytest.mark.parametrize("case", INVALID_REQUESTS)
def test_invalid_requests_name_the_field_and_affect_no_other(client: Client, case: str) -> None:
    prompt, options, code, message_word = INVALID_REQUESTS[case]

    with pytest.raises(CallError, match=message_word.replace(".", r"\.")) as unary:
        client.generate(prompt, Options(**options))
    with pytest.raises(CallError) as streamed:
        list(client.stream(prompt, Options(**options)))

    assert unary.value.code == streamed.value.code == code
    assert str(unary.value) == str(streamed.value)
    assert client.generate("a", Options(max_new_tokens=1)).usage.completion_tokens == 1


def test_a_request_without_a_prompt_is_refused(deployment: ServedModel) -> None:
    with grpc.insecure_channel(deployment.server.address) as channel:
        call = channel.unary_unary(
            "/preamble.v1.GenerationService/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        with pytest.raises(grpc.RpcError, match="prompt is not set"):
            call(pb.GenerateRequest(), timeout=WAIT_S)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_malformed_messages_are_refused_and_counted(deployment: ServedModel, method: str) -> None:
    series = f'preamble_requests_total{{code="INVALID_ARGUMENT",method="{method}",wire="preamble"}}'
    count_before = deployment.server.metric(series)
    with grpc.insecure_channel(deployment.server.address) as channel:
        # Read as a stream; a unary response can be read as a stream too.
        call: Any = channel.unary_stream(f"/preamble.v1.GenerationService/{method}")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(b"\xff\xff\xff", timeout=WAIT_S))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"the 3 bytes sent are not a valid request of {method}" in str(caught.value)
    eventually(lambda: deployment.server.metric(series) == count_before + 1)


def test_new_adapters_are_loaded_and_invalid_ones_skipped(
    deployment: ServedModel, client: Client
) -> None:
    failures = deployment.server.metric("preamble_adapter_load_failures_total")
    (deployment.adapters / ".broken").write_bytes(b"not an adapter")
    (deployment.adapters / ".broken").rename(
        deployment.adapters / "broken.safetensors"
    )  # Complete at once.
    foreign = deployment.adapters / "foreign.safetensors"
    write_adapter(foreign, deployment.checkpoint, deployment.ids("one"), base="0" * 64)
    write_adapter(
        deployment.adapters / "late.safetensors", deployment.checkpoint, deployment.ids("one")
    )

    answer = client.generate(TEXT, Options(adapter="late", max_new_tokens=4))

    assert answer.adapter == "late@1"
    assert deployment.server.metric("preamble_adapter_load_failures_total") == failures + 2
    for name in ("broken", "foreign"):
        with pytest.raises(CallError, match=name):
            client.generate(TEXT, Options(adapter=name))
    write_adapter(
        deployment.adapters / "late@2.safetensors", deployment.checkpoint, deployment.ids("two")
    )
    eventually(lambda: client.generate(TEXT, Options(adapter="late")).adapter == "late@2")
    adapters = [(adapter.name, adapter.version, adapter.current) for adapter in client.adapters()]
    assert adapters == [("fox", 2, True), ("late", 1, False), ("late", 2, True), ("sum", 1, True)]
    for file in ("broken", "foreign", "late", "late@2"):
        (deployment.adapters / f"{file}.safetensors").unlink()
    eventually(lambda: client.info().adapters == 2)
    with pytest.raises(CallError, match="late"):
        client.generate(TEXT, Options(adapter="late"))


def test_adapter_list_is_paginated(deployment: ServedModel) -> None:
    with grpc.insecure_channel(deployment.server.address) as channel:
        stub = adapters_pb2_grpc.AdapterServiceStub(channel)

        def page(token: str) -> adapters_pb2.ListAdaptersResponse:
            request = adapters_pb2.ListAdaptersRequest(page_size=1, page_token=token)
            answer: adapters_pb2.ListAdaptersResponse = stub.ListAdapters(request, timeout=WAIT_S)
            return answer

        first_page = page("")
        second_page = page(first_page.next_page_token)
        assert [adapter.name for adapter in (*first_page.adapters, *second_page.adapters)] == [
            "fox",
            "sum",
        ]
        assert list(first_page.adapters[0].input_fields) == ["numbers"]
        assert first_page.adapters[0].virtual_tokens == 3
        assert second_page.next_page_token == ""
        with pytest.raises(grpc.RpcError, match="page_token"):
            page("/etc")


def test_health_reflection_and_pages_report_serving(deployment: ServedModel) -> None:
    with grpc.insecure_channel(deployment.server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "preamble.v1.GenerationService"):
            request = health_pb2.HealthCheckRequest(service=service)
            status = health.Check(request, timeout=WAIT_S).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        described = ProtoReflectionDescriptorDatabase(channel)
        assert "preamble.v1.AdapterService" in described.get_services()
        file = described.FindFileContainingSymbol("preamble.v1.GenerationService")
        assert file.name == "preamble/v1/generation.proto"
    assert deployment.server.get("/health/live")[0] == 200
    assert deployment.server.get("/health/ready")[0] == 200
    assert deployment.server.get("/nowhere")[0] == 404


def test_health_lists_services_and_reflection_has_both_versions(deployment: ServedModel) -> None:
    pb = load_package("reflection")
    health = load_package("health")
    with grpc.insecure_channel(deployment.server.address) as channel:
        call: Any = channel.unary_unary("/grpc.health.v1.Health/List")
        listed = health.HealthListResponse.FromString(call(b"", timeout=WAIT_S)).statuses
        assert {"", "liveness", "readiness", *SERVICES} == set(listed)
        assert {status.status for status in listed.values()} == {1}
        for version in ("v1", "v1alpha"):
            call = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=pb.ServerReflectionRequest.SerializeToString,
                response_deserializer=pb.ServerReflectionResponse.FromString,
            )
            response = _reflect(call, list_services="").list_services_response
            names = [status.name for status in response.service]
            own_services = ("grpc.health.v1.Health", f"grpc.reflection.{version}.ServerReflection")
            assert {*SERVICES, *own_services} <= set(names)
            # Every listed service is described with its methods, as tools request them.
            methods = ["preamble.v1.GenerationService.Generate", "grpc.health.v1.Health.List"]
            for symbol in (*names, *methods):
                response = _reflect(call, file_containing_symbol=symbol)
                assert response.file_descriptor_response.file_descriptor_proto, symbol
            for symbol in ("", "nobody", "preamble.v1.GenerationService.Nothing"):
                response = _reflect(call, file_containing_symbol=symbol)
                assert response.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def _reflect(call: Any, **query: str) -> Any:
    request = load_package("reflection").ServerReflectionRequest(**query)
    (response,) = call(iter([request]), timeout=WAIT_S)
    return response


def test_scrape_counts_requests_and_tokens(deployment: ServedModel, client: Client) -> None:
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
        return {name: deployment.server.metric(name) for name in names}

    counts_before = read()
    answer = client.generate(TEXT, Options(adapter="sum", max_new_tokens=9))
    with pytest.raises(CallError):
        client.generate(TEXT, Options(adapter="nobody"))

    token_count = len(answer.token_ids)
    usage = answer.usage
    increments = [
        1,
        1,
        token_count,
        usage.prompt_tokens,
        usage.virtual_tokens,
        1,
        token_count - 1,
        1,
    ]
    # A call is counted when it has ended, which may be after its response.
    eventually(lambda: deployment.server.metric("preamble_requests_in_flight") == 0)
    counts_after = read()
    assert [counts_after[name] - counts_before[name] for name in counts_before] == increments
    eventually(lambda: deployment.server.metric("preamble_adapters_loaded") == 2)


def test_generate_and_stream_requests_have_the_same_fields() -> None:
    def fields(message: Any) -> list[tuple[str, int, int]]:
        return [(field.name, field.number, field.type) for field in message.DESCRIPTOR.fields]

    assert fields(pb.GenerateRequest) == fields(pb.GenerateStreamRequest)
