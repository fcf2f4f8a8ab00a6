"""The KServe v2 service, called by tritonclient, compared with preamble.v1 on the same server.

Malformed messages are sent through the bare stub, because the client would not build them.
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
from protos.foreign.descriptor_pools import load_package
from serving.config import LimitsConfig
from serving.protocols.kserve import service
from serving.protocols.kserve.metadata import INPUT_ALIASES, INPUT_KINDS, OUTPUTS
from tests.support.broken.kserve_requests import (
    FAULTS,
    INVALID,
    UNSERVED,
    input_tensor,
    request,
    texts,
)
from tests.support.servers import ROOT, WAIT_S, eventually, is_idle
from tests.support.tritonclient_calls import (
    STREAM_REQUESTS_MAX,
    TEXT,
    KServeServer,
    infer,
    kserve_server,
    streaming,
    tensors,
    text_of,
)

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


LONG = {"max_tokens": 4000, "ignore_eos": True}
preamble_package = load_package("kserve")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KServeServer]:
    with kserve_server(tmp_path_factory.mktemp("kserve")) as deployment:
        yield deployment


@pytest.fixture
def client(deployment: KServeServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(deployment.server.address) as client:
        yield client
    eventually(lambda: is_idle(deployment.server))


@pytest.fixture
def preamble_client(deployment: KServeServer) -> Iterator[Client]:
    with deployment.server.client() as client:
        yield client


@pytest.fixture
def stub(deployment: KServeServer) -> Iterator[Any]:
    with grpc.insecure_channel(deployment.server.address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


# --------------------------------------------------------------------------------- metadata


def test_metadata_lists_models_inputs_and_parameters(
    deployment: KServeServer, client: triton.InferenceServerClient
) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    for name, version in (("", "1"), ("preamble", ""), ("sum", "1"), ("fox", "2"), ("fox@2", "")):
        assert client.is_model_ready(name or deployment.model, version)
    for name, version in (("nobody", ""), ("preamble", "2"), ("sum", "2"), ("../sum", "")):
        assert not client.is_model_ready(name, version)
    assert client.get_server_metadata().name == "preamble"
    assert "statistics" not in client.get_server_metadata().extensions
    metadata = client.get_model_metadata("fox")
    assert (metadata.name, list(metadata.versions)) == ("fox", ["2"])
    assert {metadata_input.name for metadata_input in metadata.inputs} == {
        *INPUT_KINDS,
        *INPUT_ALIASES,
    }
    assert [metadata_input.name for metadata_input in metadata.outputs] == list(OUTPUTS)
    input_types = {
        metadata_input.name: (metadata_input.datatype, list(metadata_input.shape))
        for metadata_input in metadata.inputs
    }
    assert input_types["text_input"] == ("BYTES", [1])
    assert input_types["stop_words"] == ("BYTES", [-1])
    assert input_types["seed"] == ("UINT64", [1])
    index = client.get_model_repository_index().models
    assert [
        (metadata_input.name, metadata_input.version, metadata_input.state)
        for metadata_input in index
    ] == [
        (deployment.model, "1", "READY"),
        ("preamble", "1", "READY"),
        ("fox", "2", "READY"),
        ("sum", "1", "READY"),
    ]


def test_unsupported_methods_are_refused_by_name(client: triton.InferenceServerClient) -> None:
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
        with pytest.raises(InferenceServerException, match="is not served here") as caught:
            call()
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


# --------------------------------------------------------------------------------------- inference


@pytest.mark.parametrize("model", ["", "preamble", "sum", "fox"])
def test_unary_and_streamed_texts_equal_preamble_v1(
    deployment: KServeServer,
    client: triton.InferenceServerClient,
    preamble_client: Client,
    model: str,
) -> None:
    adapter = model if model in ("sum", "fox") else ""
    name = model or deployment.model
    for options, parameters in (
        (Options(adapter=adapter, max_new_tokens=12), {"max_tokens": 12}),
        (
            Options(adapter=adapter, max_new_tokens=12, temperature=1.0, top_k=50, seed=7),
            {"max_tokens": "12", "temperature": "1.0", "top_k": 50, "seed": "7"},
        ),
    ):
        expected = preamble_client.generate(TEXT, options).text
        unary_result = infer(client, name, sampling_parameters=parameters)
        assert text_of(unary_result) == expected
        assert unary_result.get_response().model_name == name
        assert text_of(infer(client, name, **{k: _typed(k, v) for k, v in parameters.items()})) == (
            expected
        )
        with streaming(client) as stream:
            stream.send(name, "7", sampling_parameters=parameters)
            results, errors = stream.until(1)
        assert errors == []
        assert "".join(map(text_of, results["7"])) == expected
        finals = [
            result.get_response().parameters["triton_final_response"] for result in results["7"]
        ]
        assert [final.bool_param for final in finals] == [False] * (len(finals) - 1) + [True]


def _typed(name: str, value: Any) -> Any:
    return float(value) if name == "temperature" else int(value)


def test_unary_outputs_contain_the_prompt_by_default(
    client: triton.InferenceServerClient, preamble_client: Client
) -> None:
    expected = preamble_client.generate(TEXT, Options(max_new_tokens=4)).text
    plain = client.infer("preamble", tensors(max_tokens=4))
    unary_result = client.infer("preamble", tensors(max_tokens=4, exclude_input_in_output=False))
    assert text_of(plain) == text_of(unary_result) == TEXT + expected
    with streaming(client) as stream:  # A request without streaming, on a stream.
        client.async_stream_infer("preamble", tensors(max_tokens=4), request_id="1")
        results, _ = stream.until(1)
    assert [text_of(result) for result in results["1"]] == [TEXT + expected]


def test_adapters_are_named_as_model_or_as_input(
    deployment: KServeServer, client: triton.InferenceServerClient, preamble_client: Client
) -> None:
    expected = preamble_client.generate(TEXT, Options(adapter="sum", max_new_tokens=8)).text
    for name in ("adapter_id", "prefix_id", "lora_name"):
        assert text_of(infer(client, "preamble", max_tokens=8, **{name: "sum"})) == expected
    parameters = {"lora_name": "sum", "max_tokens": 8}
    assert text_of(infer(client, "preamble", sampling_parameters=parameters)) == expected
    fields = {"numbers": "one and two"}
    rendered = preamble_client.generate(fields, Options(adapter="fox", max_new_tokens=8)).text
    result = infer(client, "fox", text=None, inputs=json.dumps(fields), max_tokens=8)
    assert text_of(result) == rendered
    assert result.get_response().model_version == "2"
    by_ids = infer(client, "preamble", text=None, input_ids=deployment.ids, max_tokens=8)
    assert (
        text_of(by_ids) == preamble_client.generate(deployment.ids, Options(max_new_tokens=8)).text
    )


def test_only_requested_outputs_are_returned(
    deployment: KServeServer, client: triton.InferenceServerClient, preamble_client: Client
) -> None:
    expected = preamble_client.generate(TEXT, Options(adapter="sum", max_new_tokens=5))
    listed = infer(client, "sum", outputs=list(OUTPUTS), sampling_parameters={"max_tokens": 5})
    outputs_by_name = {name: listed.as_numpy(name) for name in OUTPUTS}
    assert outputs_by_name["output_ids"].tolist() == [expected.token_ids]
    assert outputs_by_name["finish_reason"].tolist() == [str(expected.finish_reason).encode()]
    assert outputs_by_name["num_input_tokens"].tolist() == [len(deployment.ids)]
    assert outputs_by_name["num_output_tokens"].tolist() == [5]
    assert outputs_by_name["num_virtual_tokens"].tolist() == [expected.usage.virtual_tokens]
    assert outputs_by_name["adapter"].tolist() == [b"sum@1"]
    assert outputs_by_name["sequence_index"].tolist() == [0]
    scores = json.loads(outputs_by_name["logprobs"][0])
    assert [int(token) for score in scores for token in score] == expected.token_ids
    logprobs_of_outputs = [
        token_logprob["logprob"] for score in scores for token_logprob in score.values()
    ]
    assert outputs_by_name["output_log_probs"][0] == pytest.approx(logprobs_of_outputs)
    assert outputs_by_name["cumulative_logprob"][0] == pytest.approx(sum(logprobs_of_outputs))
    decoded = [
        token_logprob["decoded_token"] for score in scores for token_logprob in score.values()
    ]
    assert all(isinstance(decoded_token, str) for decoded_token in decoded)
    single_output = infer(client, "sum", max_tokens=5, outputs=["num_output_tokens"])
    assert [output.name for output in single_output.get_response().outputs] == ["num_output_tokens"]
    flagged = infer(client, "sum", max_tokens=5, return_finish_reason=True, return_log_probs=True)
    names = ["text_output", "finish_reason", "cum_log_probs", "output_log_probs"]
    assert [output.name for output in flagged.get_response().outputs] == names
    several = infer(
        client,
        "preamble",
        max_tokens=5,
        num_return_sequences=3,
        temperature=1.0,
        seed=3,
        outputs=["text_output", "output_ids", "sequence_index"],
    )
    assert several.as_numpy("text_output").shape == (3,)
    assert several.as_numpy("output_ids").shape == (3, 5)
    assert several.as_numpy("sequence_index").tolist() == [0, 1, 2]


def test_streamed_outputs_add_up_to_the_unary_output(
    client: triton.InferenceServerClient,
) -> None:
    parameters = {"max_tokens": 9, "n": 2, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    unary_result = infer(client, "preamble", outputs=list(OUTPUTS), sampling_parameters=parameters)
    with streaming(client) as stream:
        client.async_stream_infer(
            "preamble",
            tensors(stream=True, sampling_parameters=parameters),
            outputs=[triton.InferRequestedOutput(name) for name in OUTPUTS],
        )
        pieces = stream.until(1)[0][""]
    for index in range(2):
        answer_pieces = [piece for piece in pieces if piece.as_numpy("sequence_index")[0] == index]
        assert (
            "".join(map(text_of, answer_pieces))
            == unary_result.as_numpy("text_output")[index].decode()
        )
        assert (
            sum(
                int(answer_piece.as_numpy("num_output_tokens")[0]) for answer_piece in answer_pieces
            )
            == 9
        )
        ids = [
            token
            for answer_piece in answer_pieces
            for token in answer_piece.as_numpy("output_ids")[0].tolist()
        ]
        assert ids == unary_result.as_numpy("output_ids")[index].tolist()
        assert answer_pieces[-1].as_numpy("cumulative_logprob")[0] == pytest.approx(
            unary_result.as_numpy("cumulative_logprob")[index], rel=1e-5
        )
        assert [
            answer_piece.as_numpy("finish_reason")[0] for answer_piece in answer_pieces[:-1]
        ] == [b""] * (len(answer_pieces) - 1)
        assert answer_pieces[-1].as_numpy("finish_reason")[0] == b"length"


def test_the_example_prints_unary_streamed_and_adapter_texts(
    deployment: KServeServer, preamble_client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    for model, adapter in (("preamble", ""), ("sum", "sum")):
        assert example(deployment.server.address, model) == 0
        text = preamble_client.generate(
            "Once upon a time", Options(adapter=adapter, max_new_tokens=16)
        ).text
        out, _ = capfd.readouterr()
        assert out == f"unary: {text}\nstreamed 0: {text}\nstreamed 1: {text}\n"
    assert example(deployment.server.address, "nobody") == 1
    assert "there is no model 'nobody'" in capfd.readouterr().err


def test_the_document_names_every_input_and_output() -> None:
    text = (ROOT / "docs" / "kserve.md").read_text()
    documented = set(re.findall(r"`([a-z_]+)`", text))
    assert {*INPUT_KINDS, *INPUT_ALIASES, *OUTPUTS} <= documented
    assert set(service.EXTENSIONS) <= documented
    assert "stream_requests_max" in documented and hasattr(LimitsConfig, "stream_requests_max")


# ------------------------------------------------------------------------------------ failures


def test_failed_requests_do_not_end_their_stream(
    client: triton.InferenceServerClient, preamble_client: Client, stub: Any
) -> None:
    expected = preamble_client.generate(TEXT, Options(max_new_tokens=6)).text
    with streaming(client) as stream:
        stream.send("preamble", "bad", max_tokens=6, temperature=-1.0)
        stream.send("preamble", "good", max_tokens=6)
        stream.send("nobody", "lost", max_tokens=6)
        results, errors = stream.until(3)
        assert "".join(map(text_of, results["good"])) == expected
        messages = sorted(str(error) for error in errors)
        assert "temperature is -1.0" in messages[0]
        assert "there is no model 'nobody'" in messages[1]
        stream.send("preamble", "late", max_tokens=6)
        assert "".join(map(text_of, stream.until(1)[0]["late"])) == expected
    # The client does not show the id and the reason of a failure.
    requests = [service_pb2.ModelInferRequest(model_name="preamble", id="9")]
    (messages,) = stub.ModelStreamInfer(iter(requests), timeout=WAIT_S)
    parameters = messages.infer_response.parameters
    assert messages.error_message.startswith("text_input is not set")
    assert messages.infer_response.id == "9"
    assert parameters["triton_final_response"].bool_param
    assert parameters["reason"].string_param == "INVALID_FIELD"
    assert parameters["code"].string_param == "INVALID_ARGUMENT"
    assert parameters["field"].string_param == "text_input"


def test_cancelled_streams_cancel_their_requests(
    deployment: KServeServer, client: triton.InferenceServerClient
) -> None:
    with streaming(client) as stream:
        for number in range(3):
            stream.send("preamble", str(number), sampling_parameters=LONG)
        streaming_ids: set[str] = set()
        while len(streaming_ids) < 3:
            result, error = stream.next()
            assert error is None
            streaming_ids.add(result.get_response().id)
        assert deployment.server.metric("preamble_scheduler_running_requests") == 3
    eventually(lambda: is_idle(deployment.server))
    assert deployment.server.metric("preamble_kv_blocks_held") == 0
    series = 'code="CANCELLED",method="ModelStreamInfer/request",wire="kserve"'
    eventually(lambda: deployment.server.metric(f"preamble_requests_total{{{series}}}") >= 3)


def test_concurrent_requests_of_a_stream_are_limited(
    client: triton.InferenceServerClient,
) -> None:
    with streaming(client) as stream:
        for number in range(STREAM_REQUESTS_MAX + 1):
            stream.send("preamble", str(number), sampling_parameters=LONG)
        error = None
        while error is None:
            _, error = stream.next()
        assert "stream_requests_max" in str(error)


def test_requests_end_by_their_timeout_and_by_the_clients(
    deployment: KServeServer, client: triton.InferenceServerClient, preamble_client: Client
) -> None:
    with streaming(client) as stream:
        infer_inputs = tensors(stream=True, sampling_parameters=LONG)
        client.async_stream_infer("preamble", infer_inputs, request_id="1", timeout=200_000)
        _, errors = stream.until(1)
        assert "deadline passed" in str(errors[0])
        stream.send("preamble", "2", max_tokens=3)  # The stream continues.
        assert stream.until(1)[1] == []
    with pytest.raises(InferenceServerException) as client_timeout:
        client.infer("preamble", tensors(sampling_parameters=LONG), timeout=200_000)
    assert client_timeout.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    with pytest.raises(InferenceServerException) as server_timeout:
        client.infer("preamble", tensors(sampling_parameters=LONG), client_timeout=0.2)
    assert server_timeout.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    eventually(lambda: is_idle(deployment.server))


def test_malformed_bytes_end_their_stream(deployment: KServeServer) -> None:
    with grpc.insecure_channel(deployment.server.address) as channel:
        call: Any = channel.stream_stream(f"/{service.SERVICE}/ModelStreamInfer")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([b"\xff\xff"]), timeout=WAIT_S))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "not a valid request of ModelStreamInfer" in str(caught.value.details())


# ---------------------------------------------------------------------------- malformed messages


@pytest.mark.parametrize("fault", [*FAULTS, *UNSERVED])
def test_invalid_requests_have_code_field_and_message(stub: Any, fault: str) -> None:
    faults = {name: (*fault_case, INVALID) for name, fault_case in FAULTS.items()}
    message, field, message_words, code = {**faults, **UNSERVED}[fault]
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message, timeout=WAIT_S)
    error: Any = caught.value
    assert error.code() == code, error.details()
    assert message_words in error.details()
    trailers = dict(error.trailing_metadata())
    status = Status.FromString(trailers["grpc-status-details-bin"])
    error_info = ErrorInfo()
    assert status.details[0].Unpack(error_info)
    assert error_info.metadata["field"] == field
    assert error_info.reason != "INTERNAL"


def test_invalid_requests_on_a_stream_do_not_end_it(stub: Any) -> None:
    faults = {
        name: (*failed_response, INVALID)
        for name, failed_response in FAULTS.items()
        if name != "stream"
    }
    requests: queue.Queue[Any] = queue.Queue()
    responses = stub.ModelStreamInfer(iter(requests.get, None), timeout=WAIT_S)
    for name, (message, field, message_words, code) in {**faults, **UNSERVED}.items():
        message.id = name
        requests.put(message)
        failed_response = next(responses)
        assert message_words in failed_response.error_message, name
        parameters = {
            key: parameter.string_param
            for key, parameter in failed_response.infer_response.parameters.items()
        }
        assert (parameters["code"], parameters["field"]) == (code.name, field), name
        assert failed_response.infer_response.id == name
    requests.put(request(input_tensor("max_tokens", "INT64", [1], int64_contents=[3])))
    assert next(responses).infer_response.outputs[0].name == "text_output"
    requests.put(None)
    assert not list(responses)


def test_drain_ends_idle_streams_and_completes_busy_ones(
    deployment: KServeServer, stub: Any
) -> None:
    """The last test of this server."""
    requests: queue.Queue[Any] = queue.Queue()
    busy = stub.ModelStreamInfer(iter(requests.get, None), timeout=WAIT_S)
    empty: queue.Queue[Any] = queue.Queue()
    idle_stream = stub.ModelStreamInfer(iter(empty.get, None), timeout=WAIT_S)
    parameters = b'{"max_tokens": 3000, "ignore_eos": true}'
    requests.put(
        request(
            texts("sampling_parameters", parameters),
            input_tensor("stream", "BOOL", [1], bool_contents=[True]),
        )
    )
    first_response = next(busy)
    assert not first_response.infer_response.parameters["triton_final_response"].bool_param
    deployment.server.process.send_signal(signal.SIGTERM)
    responses = [first_response]
    with pytest.raises(grpc.RpcError) as stream_end:
        responses.extend(busy)
    finals = [response.infer_response.parameters["triton_final_response"] for response in responses]
    assert [final.bool_param for final in finals] == [False] * (len(finals) - 1) + [True]
    requests.put(None)
    assert stream_end.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in str(stream_end.value.details())
    with pytest.raises(grpc.RpcError) as caught:
        next(idle_stream)
    empty.put(None)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert deployment.server.process.wait(WAIT_S) == 0
