"""KServe's v2 wire, by tritonclient, against our own wire on the same server.

Broken messages are sent through the client's bare stub, as the client itself would not make them.
"""

import json
import queue
import re
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from clients.client import Client, Options
from examples.tritonclient.generate import main as example
from protos.foreign import package
from serving.config import ServerConfig
from serving.protocols.kserve import service
from serving.protocols.kserve.metadata import ALIASES, KINDS, OUTPUTS
from tests.support.broken.kserve_requests import FAULTS, INVALID, UNSERVED, one, request, texts
from tests.support.servers import ROOT, WAIT_S, Server, eventually
from tests.support.tritonclient_calls import (
    MOST,
    TEXT,
    World,
    infer,
    kserving,
    streaming,
    tensors,
    text_of,
)

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


LONG = {"max_tokens": 4000, "ignore_eos": True}
ours = package("kserve")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with kserving(tmp_path_factory.mktemp("kserve")) as world:
        yield world


@pytest.fixture
def client(world: World) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(world.server.address) as client:
        yield client
    eventually(lambda: idle(world.server))


@pytest.fixture
def own(world: World) -> Iterator[Client]:
    with world.server.client() as client:
        yield client


@pytest.fixture
def stub(world: World) -> Iterator[Any]:
    with grpc.insecure_channel(world.server.address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def idle(server: Server) -> bool:
    states = ("scheduler_running_requests", "scheduler_waiting_requests", "requests_in_flight")
    return all(server.metric(f"preamble_{state}") == 0 for state in states)


# ----------------------------------------------------------------------------- what is told of it


def test_metadata_names_the_models_and_the_wishes_that_they_take(
    world: World, client: triton.InferenceServerClient
) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    for name, version in (("", "1"), ("preamble", ""), ("sum", "1"), ("fox", "2"), ("fox@2", "")):
        assert client.is_model_ready(name or world.model, version)
    for name, version in (("nobody", ""), ("preamble", "2"), ("sum", "2"), ("../sum", "")):
        assert not client.is_model_ready(name, version)
    assert client.get_server_metadata().name == "preamble"
    assert "statistics" not in client.get_server_metadata().extensions
    metadata = client.get_model_metadata("fox")
    assert (metadata.name, list(metadata.versions)) == ("fox", ["2"])
    assert {one.name for one in metadata.inputs} == {*KINDS, *ALIASES}
    assert [one.name for one in metadata.outputs] == list(OUTPUTS)
    told = {one.name: (one.datatype, list(one.shape)) for one in metadata.inputs}
    assert told["text_input"] == ("BYTES", [1])
    assert told["stop_words"] == ("BYTES", [-1])
    assert told["seed"] == ("UINT64", [1])
    index = client.get_model_repository_index().models
    assert [(one.name, one.version, one.state) for one in index] == [
        (world.model, "1", "READY"),
        ("fox", "2", "READY"),
        ("sum", "1", "READY"),
    ]


def test_what_is_not_served_is_refused_by_its_name(client: triton.InferenceServerClient) -> None:
    for call in (
        client.get_inference_statistics,
        client.get_trace_settings,
        lambda: client.unload_model("sum"),
        client.get_log_settings,
        lambda: client.update_log_settings({"log_verbose_level": 1}),
        client.get_system_shared_memory_status,
        client.get_cuda_shared_memory_status,
        client.unregister_system_shared_memory,
        lambda: client.register_system_shared_memory("a", "/a", 1),
    ):
        with pytest.raises(InferenceServerException, match="is not served here") as refused:
            call()
        assert refused.value.status() == "StatusCode.UNIMPLEMENTED"


# --------------------------------------------------------------------------------------- inference


@pytest.mark.parametrize("model", ["", "preamble", "sum", "fox"])
def test_whole_and_streamed_texts_are_those_of_our_own_wire(
    world: World, client: triton.InferenceServerClient, own: Client, model: str
) -> None:
    adapter = model if model in ("sum", "fox") else ""
    name = model or world.model
    for options, asked in (
        (Options(adapter=adapter, max_new_tokens=12), {"max_tokens": 12}),
        (
            Options(adapter=adapter, max_new_tokens=12, temperature=1.0, top_k=50, seed=7),
            {"max_tokens": "12", "temperature": "1.0", "top_k": 50, "seed": "7"},
        ),
    ):
        expected = own.generate(TEXT, options).text
        whole = infer(client, name, sampling_parameters=asked)
        assert text_of(whole) == expected
        assert whole.get_response().model_name == name
        assert text_of(infer(client, name, **{k: _typed(k, v) for k, v in asked.items()})) == (
            expected
        )
        with streaming(client) as stream:
            stream.send(name, "7", sampling_parameters=asked)
            results, errors = stream.until(1)
        assert errors == []
        assert "".join(map(text_of, results["7"])) == expected
        finals = [one.get_response().parameters["triton_final_response"] for one in results["7"]]
        assert [one.bool_param for one in finals] == [False] * (len(finals) - 1) + [True]


def _typed(name: str, value: Any) -> Any:
    return float(value) if name == "temperature" else int(value)


def test_a_whole_answer_has_its_prompt_before_it_as_long_as_nobody_says_otherwise(
    client: triton.InferenceServerClient, own: Client
) -> None:
    answer = own.generate(TEXT, Options(max_new_tokens=4)).text
    plain = client.infer("preamble", tensors(max_tokens=4))
    asked = client.infer("preamble", tensors(max_tokens=4, exclude_input_in_output=False))
    assert text_of(plain) == text_of(asked) == TEXT + answer
    with streaming(client) as stream:  # One that is not streamed, on a stream.
        client.async_stream_infer("preamble", tensors(max_tokens=4), request_id="1")
        results, _ = stream.until(1)
    assert [text_of(one) for one in results["1"]] == [TEXT + answer]


def test_an_adapter_is_named_as_the_model_or_beside_the_prompt(
    world: World, client: triton.InferenceServerClient, own: Client
) -> None:
    told = own.generate(TEXT, Options(adapter="sum", max_new_tokens=8)).text
    for name in ("adapter_id", "prefix_id", "lora_name"):
        assert text_of(infer(client, "preamble", max_tokens=8, **{name: "sum"})) == told
    asked = {"lora_name": "sum", "max_tokens": 8}
    assert text_of(infer(client, "preamble", sampling_parameters=asked)) == told
    fields = {"numbers": "one and two"}
    rendered = own.generate(fields, Options(adapter="fox", max_new_tokens=8)).text
    result = infer(client, "fox", text=None, inputs=json.dumps(fields), max_tokens=8)
    assert text_of(result) == rendered
    assert result.get_response().model_version == "2"
    by_ids = infer(client, "preamble", text=None, input_ids=world.ids, max_tokens=8)
    assert text_of(by_ids) == own.generate(world.ids, Options(max_new_tokens=8)).text


def test_outputs_are_those_that_were_asked_for(
    world: World, client: triton.InferenceServerClient, own: Client
) -> None:
    expected = own.generate(TEXT, Options(adapter="sum", max_new_tokens=5))
    listed = infer(client, "sum", outputs=list(OUTPUTS), sampling_parameters={"max_tokens": 5})
    told = {name: listed.as_numpy(name) for name in OUTPUTS}
    assert told["output_ids"].tolist() == [expected.token_ids]
    assert told["finish_reason"].tolist() == [str(expected.finish_reason).encode()]
    assert told["num_input_tokens"].tolist() == [len(world.ids)]
    assert told["num_output_tokens"].tolist() == [5]
    assert told["num_virtual_tokens"].tolist() == [expected.usage.virtual_tokens]
    assert told["adapter"].tolist() == [b"sum@1"]
    assert told["sequence_index"].tolist() == [0]
    scores = json.loads(told["logprobs"][0])
    assert [int(token) for one in scores for token in one] == expected.token_ids
    of_each = [one["logprob"] for score in scores for one in score.values()]
    assert told["output_log_probs"][0] == pytest.approx(of_each)
    assert told["cumulative_logprob"][0] == pytest.approx(sum(of_each))
    words = [one["decoded_token"] for score in scores for one in score.values()]
    assert all(isinstance(word, str) for word in words)
    few = infer(client, "sum", max_tokens=5, outputs=["num_output_tokens"])
    assert [one.name for one in few.get_response().outputs] == ["num_output_tokens"]
    flagged = infer(client, "sum", max_tokens=5, return_finish_reason=True, return_log_probs=True)
    names = ["text_output", "finish_reason", "cum_log_probs", "output_log_probs"]
    assert [one.name for one in flagged.get_response().outputs] == names
    many = infer(
        client,
        "preamble",
        max_tokens=5,
        num_return_sequences=3,
        temperature=1.0,
        seed=3,
        outputs=["text_output", "output_ids", "sequence_index"],
    )
    assert many.as_numpy("text_output").shape == (3,)
    assert many.as_numpy("output_ids").shape == (3, 5)
    assert many.as_numpy("sequence_index").tolist() == [0, 1, 2]


def test_streamed_pieces_add_up_to_what_a_whole_answer_tells(
    client: triton.InferenceServerClient,
) -> None:
    asked = {"max_tokens": 9, "n": 2, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    whole = infer(client, "preamble", outputs=list(OUTPUTS), sampling_parameters=asked)
    with streaming(client) as stream:
        client.async_stream_infer(
            "preamble",
            tensors(stream=True, sampling_parameters=asked),
            outputs=[triton.InferRequestedOutput(name) for name in OUTPUTS],
        )
        pieces = stream.until(1)[0][""]
    for index in range(2):
        mine = [one for one in pieces if one.as_numpy("sequence_index")[0] == index]
        assert "".join(map(text_of, mine)) == whole.as_numpy("text_output")[index].decode()
        assert sum(int(one.as_numpy("num_output_tokens")[0]) for one in mine) == 9
        ids = [token for one in mine for token in one.as_numpy("output_ids")[0].tolist()]
        assert ids == whole.as_numpy("output_ids")[index].tolist()
        assert mine[-1].as_numpy("cumulative_logprob")[0] == pytest.approx(
            whole.as_numpy("cumulative_logprob")[index], rel=1e-5
        )
        assert [one.as_numpy("finish_reason")[0] for one in mine[:-1]] == [b""] * (len(mine) - 1)
        assert mine[-1].as_numpy("finish_reason")[0] == b"length"


def test_the_example_shows_the_same_whole_and_streamed_and_an_adapters(
    world: World, own: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    for model, adapter in (("preamble", ""), ("sum", "sum")):
        assert example(world.server.address, model) == 0
        text = own.generate("Once upon a time", Options(adapter=adapter, max_new_tokens=16)).text
        out, _ = capfd.readouterr()
        assert out == f"whole: {text}\nstreamed 0: {text}\nstreamed 1: {text}\n"
    assert example(world.server.address, "nobody") == 1
    assert "there is no model 'nobody'" in capfd.readouterr().err


def test_the_document_names_every_input_and_output() -> None:
    text = (ROOT / "docs" / "kserve.md").read_text()
    named = set(re.findall(r"`([a-z_]+)`", text))
    assert {*KINDS, *ALIASES, *OUTPUTS} <= named
    assert set(service.EXTENSIONS) <= named
    assert "stream_requests_max" in named and hasattr(ServerConfig, "stream_requests_max")


# ----------------------------------------------------------------------------------- bad ends


def test_one_bad_request_of_a_stream_ends_by_itself_and_the_stream_goes_on(
    client: triton.InferenceServerClient, own: Client, stub: Any
) -> None:
    expected = own.generate(TEXT, Options(max_new_tokens=6)).text
    with streaming(client) as stream:
        stream.send("preamble", "bad", max_tokens=6, temperature=-1.0)
        stream.send("preamble", "good", max_tokens=6)
        stream.send("nobody", "lost", max_tokens=6)
        results, errors = stream.until(3)
        assert "".join(map(text_of, results["good"])) == expected
        told = sorted(str(error) for error in errors)
        assert "temperature is -1.0" in told[0]
        assert "there is no model 'nobody'" in told[1]
        stream.send("preamble", "late", max_tokens=6)
        assert "".join(map(text_of, stream.until(1)[0]["late"])) == expected
    # What the client does not show: whose end it is, and why.
    sent = [service_pb2.ModelInferRequest(model_name="preamble", id="9")]
    (told,) = stub.ModelStreamInfer(iter(sent), timeout=WAIT_S)
    parameters = told.infer_response.parameters
    assert told.error_message.startswith("text_input is not there")
    assert told.infer_response.id == "9"
    assert parameters["triton_final_response"].bool_param
    assert parameters["reason"].string_param == "INVALID_FIELD"
    assert parameters["code"].string_param == "INVALID_ARGUMENT"
    assert parameters["field"].string_param == "text_input"


def test_a_stream_that_is_cancelled_takes_all_its_requests_along(
    world: World, client: triton.InferenceServerClient
) -> None:
    with streaming(client) as stream:
        for place in range(3):
            stream.send("preamble", str(place), sampling_parameters=LONG)
        seen: set[str] = set()
        while len(seen) < 3:
            result, error = stream.next()
            assert error is None
            seen.add(result.get_response().id)
        assert world.server.metric("preamble_scheduler_running_requests") == 3
    eventually(lambda: idle(world.server))
    assert world.server.metric("preamble_kv_blocks_held") == 0
    series = 'code="CANCELLED",method="ModelStreamInfer/request",wire="kserve"'
    eventually(lambda: world.server.metric(f"preamble_requests_total{{{series}}}") >= 3)


def test_a_stream_takes_so_many_requests_at_once_and_refuses_one_more(
    client: triton.InferenceServerClient,
) -> None:
    with streaming(client) as stream:
        for place in range(MOST + 1):
            stream.send("preamble", str(place), sampling_parameters=LONG)
        error = None
        while error is None:
            _, error = stream.next()
        assert "stream_requests_max" in str(error)


def test_a_request_ends_by_its_own_time_and_by_its_clients(
    world: World, client: triton.InferenceServerClient, own: Client
) -> None:
    with streaming(client) as stream:
        sent = tensors(stream=True, sampling_parameters=LONG)
        client.async_stream_infer("preamble", sent, request_id="1", timeout=200_000)
        _, errors = stream.until(1)
        assert "deadline passed" in str(errors[0])
        stream.send("preamble", "2", max_tokens=3)  # The stream goes on.
        assert stream.until(1)[1] == []
    with pytest.raises(InferenceServerException) as late:
        client.infer("preamble", tensors(sampling_parameters=LONG), timeout=200_000)
    assert late.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    with pytest.raises(InferenceServerException) as hasty:
        client.infer("preamble", tensors(sampling_parameters=LONG), client_timeout=0.2)
    assert hasty.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    eventually(lambda: idle(world.server))


def test_bytes_that_are_no_request_end_the_stream_that_they_come_on(world: World) -> None:
    with grpc.insecure_channel(world.server.address) as channel:
        call: Any = channel.stream_stream(f"/{service.SERVICE}/ModelStreamInfer")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(iter([b"\xff\xff"]), timeout=WAIT_S))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "no request of ModelStreamInfer" in str(refused.value.details())


# ------------------------------------------------------------------------------------ bad messages


@pytest.mark.parametrize("fault", [*FAULTS, *UNSERVED])
def test_each_fault_has_its_code_its_field_and_a_sentence(stub: Any, fault: str) -> None:
    bad = {name: (*told, INVALID) for name, told in FAULTS.items()}
    sent, field, words, code = {**bad, **UNSERVED}[fault]
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(sent, timeout=WAIT_S)
    error: Any = refused.value
    assert error.code() == code, error.details()
    assert words in error.details()
    trailers = dict(error.trailing_metadata())
    status = Status.FromString(trailers["grpc-status-details-bin"])
    info = ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.metadata["field"] == field
    assert info.reason != "INTERNAL"


def test_each_fault_on_a_stream_is_told_in_a_message_and_the_stream_goes_on(stub: Any) -> None:
    faults = {name: (*told, INVALID) for name, told in FAULTS.items() if name != "stream"}
    sent: queue.Queue[Any] = queue.Queue()
    answers = stub.ModelStreamInfer(iter(sent.get, None), timeout=WAIT_S)
    for name, (message, field, words, code) in {**faults, **UNSERVED}.items():
        message.id = name
        sent.put(message)
        told = next(answers)
        assert words in told.error_message, name
        parameters = {key: one.string_param for key, one in told.infer_response.parameters.items()}
        assert (parameters["code"], parameters["field"]) == (code.name, field), name
        assert told.infer_response.id == name
    sent.put(request(one("max_tokens", "INT64", [1], int64_contents=[3])))
    assert next(answers).infer_response.outputs[0].name == "text_output"
    sent.put(None)
    assert not list(answers)


def test_a_drain_ends_an_idle_stream_and_lets_a_busy_one_finish(world: World, stub: Any) -> None:
    """The last of the tests of this server."""
    sent: queue.Queue[Any] = queue.Queue()
    busy = stub.ModelStreamInfer(iter(sent.get, None), timeout=WAIT_S)
    empty: queue.Queue[Any] = queue.Queue()
    still = stub.ModelStreamInfer(iter(empty.get, None), timeout=WAIT_S)
    long = b'{"max_tokens": 3000, "ignore_eos": true}'
    sent.put(
        request(
            texts("sampling_parameters", long), one("stream", "BOOL", [1], bool_contents=[True])
        )
    )
    first = next(busy)
    assert not first.infer_response.parameters["triton_final_response"].bool_param
    world.server.process.send_signal(signal.SIGTERM)
    came = [first]
    with pytest.raises(grpc.RpcError) as ended:
        came.extend(busy)
    finals = [one.infer_response.parameters["triton_final_response"] for one in came]
    assert [one.bool_param for one in finals] == [False] * (len(finals) - 1) + [True]
    sent.put(None)
    assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in str(ended.value.details())
    with pytest.raises(grpc.RpcError) as refused:
        next(still)
    empty.put(None)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert world.server.process.wait(WAIT_S) == 0
