"""Triton's client, unmodified, over KServe's gRPC and HTTP protocols.

The calls are those of Triton's own tools and of the clients of its text backends. The oracle is
preamble.v1 on the same server.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from clients.client import Client, Options
from tests.support.servers import write_adapter
from tests.support.tritonclient_calls import (
    NUMPY,
    TEXT,
    KServeServer,
    infer,
    kserve_server,
    streaming,
    tensor,
    tensors,
    text_of,
)

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KServeServer]:
    with kserve_server(tmp_path_factory.mktemp("kserve")) as deployment:
        yield deployment


@pytest.fixture
def client(deployment: KServeServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(deployment.server.address) as client:
        yield client


@pytest.fixture
def http_client(deployment: KServeServer) -> Iterator[triton_http.InferenceServerClient]:
    address = deployment.server.http_address
    with triton_http.InferenceServerClient(address, concurrency=4) as client:
        yield client


@pytest.fixture
def preamble_client(deployment: KServeServer) -> Iterator[Client]:
    with deployment.server.client() as client:
        yield client


def test_all_parameters_of_tensorrt_llm_clients_are_accepted(
    client: triton.InferenceServerClient, preamble_client: Client
) -> None:
    options = Options(max_new_tokens=8, temperature=1.0, top_k=3, seed=9)
    parameters: dict[str, Any] = {
        "max_tokens": 8,
        "temperature": 1.0,
        "top_k": 3,
        "seed": 9,
        "beam_width": 1,
    }
    parameters |= {"bad_words": "", "stop_words": "", "repetition_penalty": 1.0, "pad_id": 2}
    parameters |= {
        "return_context_logits": False,
        "return_generation_logits": False,
        "min_length": 1,
    }
    parameters |= {"exclude_input_in_output": True, "stream": False}
    infer_inputs = [
        tensor(name, value, [1, 1]) for name, value in {"text_input": TEXT, **parameters}.items()
    ]
    infer_result = client.infer("preamble", infer_inputs)
    assert text_of(infer_result) == preamble_client.generate(TEXT, options).text
    names: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "top_k": 3, "seed": 9}
    prefixed = {f"sampling_param_{name}": value for name, value in names.items()}
    prefixed["sampling_param_seed"] = "9"
    infer_result = infer(client, "preamble", **prefixed)
    assert text_of(infer_result) == preamble_client.generate(TEXT, options).text
    greedy: list[Any] = [{"top_p": 0.0}, {"top_p": 0.0, "temperature": 1.0, "top_k": 0}]
    for greedy_parameters in greedy:  # As in TensorRT-LLM.
        infer_result = infer(client, "preamble", max_tokens=8, **greedy_parameters)
        assert (
            text_of(infer_result) == preamble_client.generate(TEXT, Options(max_new_tokens=8)).text
        )
    beams = infer(client, "preamble", max_tokens=8, beam_width=3)
    assert len(set(beams.as_numpy("text_output"))) == 3
    vllms = {"skip_special_tokens": True, "detokenize": True, "max_tokens": 8}
    infer_result = infer(client, "preamble", sampling_parameters=vllms)
    assert text_of(infer_result) == preamble_client.generate(TEXT, Options(max_new_tokens=8)).text
    two = client.infer("preamble", tensors(exclude_input_in_output=True), parameters=names)
    assert text_of(two) == preamble_client.generate(TEXT, options).text


def test_load_generator_calls_succeed_in_order(
    client: triton.InferenceServerClient, preamble_client: Client
) -> None:
    expected = preamble_client.generate(TEXT, Options(max_new_tokens=6)).text
    assert "statistics" not in client.get_server_metadata().extensions
    outputs = [output.name for output in client.get_model_metadata("preamble").outputs]
    config = client.get_model_config("preamble").config
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 0
    assert [tensor_config.name for tensor_config in config.input if not tensor_config.optional] == [
        "text_input"
    ]
    assert client.is_model_ready("preamble")
    with streaming(client) as stream:
        for number in range(4):
            client.async_stream_infer(
                "preamble",
                tensors(
                    stream=True,
                    sampling_parameters={"max_tokens": "6", "ignore_eos": "true"},
                    exclude_input_in_output=True,
                ),
                outputs=[triton.InferRequestedOutput(name) for name in outputs],
                request_id=str(number),
                enable_empty_final_response=True,
            )
        results, errors = stream.until(4)
    assert errors == []
    assert {
        id: "".join(map(text_of, results_of_id)) for id, results_of_id in results.items()
    } == dict.fromkeys("0123", expected)


def test_new_adapters_can_be_loaded_and_invalid_ones_are_reported(
    deployment: KServeServer, client: triton.InferenceServerClient
) -> None:
    for name in (deployment.model, "preamble", "sum", "fox@2"):
        client.load_model(name)
    write_adapter(deployment.adapters / "new.safetensors", deployment.checkpoint, [5, 6])
    (deployment.adapters / "broken.safetensors").write_bytes(b"no adapter")
    client.load_model("new")
    assert client.is_model_ready("new")
    for name, parameters, code, message_words in (
        ("nobody", None, "NOT_FOUND", "adapter 'nobody' does not exist"),
        ("../sum", None, "NOT_FOUND", "not an adapter name"),
        ("broken", None, "FAILED_PRECONDITION", "broken"),
        ("sum", "{}", "UNIMPLEMENTED", "loaded unchanged from the server"),
    ):
        with pytest.raises(InferenceServerException, match=message_words) as caught:
            client.load_model(name, config=parameters)
        assert caught.value.status() == f"StatusCode.{code}"
    for name in ("new", "broken"):
        (deployment.adapters / f"{name}.safetensors").unlink()


def test_http_clients_read_health_metadata_and_errors(
    deployment: KServeServer, http_client: triton_http.InferenceServerClient
) -> None:
    assert http_client.is_server_live() and http_client.is_server_ready()
    assert http_client.is_model_ready("preamble") and http_client.is_model_ready("fox", "2")
    assert not http_client.is_model_ready("dog")
    assert http_client.get_server_metadata()["name"] == "preamble"
    assert http_client.get_model_metadata(deployment.model)["platform"] == "preamble"
    assert http_client.get_model_config("preamble")["backend"] == "preamble"
    index = http_client.get_model_repository_index()
    assert {"preamble", "sum"} <= {model["name"] for model in index}
    http_client.load_model("sum")
    with pytest.raises(InferenceServerException, match="no model 'dog'"):
        http_client.get_model_metadata("dog")
    with pytest.raises(InferenceServerException, match="not served here"):
        http_client.get_inference_statistics()


def http_inputs(*, binary: bool, **inputs: Any) -> list[triton_http.InferInput]:
    """Input tensors of the HTTP client, as binary data or as JSON."""
    infer_inputs = []
    for name, value in {"text_input": TEXT, **inputs}.items():
        kind = {bool: "BOOL", int: "INT32", str: "BYTES"}[type(value)]
        infer_input = triton_http.InferInput(name, [1], kind)
        values = [value.encode()] if kind == "BYTES" else [value]
        array: Any = np.array(values, dtype=NUMPY.get(kind, np.object_))
        infer_input.set_data_from_numpy(array, binary_data=binary)
        infer_inputs.append(infer_input)
    return infer_inputs


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_http_texts_equal_those_of_preamble_v1(
    http_client: triton_http.InferenceServerClient, preamble_client: Client, binary: bool
) -> None:
    expected = preamble_client.generate(TEXT, Options(max_new_tokens=12, adapter="sum")).text
    options: dict[str, Any] = {"max_tokens": 12, "exclude_input_in_output": True}
    inputs = http_inputs(binary=binary, **options)
    names = ("text_output", "output_ids", "cumulative_logprob")
    outputs = [triton_http.InferRequestedOutput(name, binary_data=binary) for name in names]

    default = http_client.infer("sum", inputs, request_id="7")
    listed = http_client.infer(
        "sum", inputs, outputs=outputs, request_compression_algorithm="gzip", priority=3
    )
    pending = http_client.async_infer("sum", inputs, outputs=outputs)

    assert text_of(default) == expected
    for response in (listed, pending.get_result()):
        text = response.as_numpy("text_output")[0]
        assert (text.decode() if binary else text) == expected
    assert default.get_response()["id"] == "7"
    assert listed.as_numpy("output_ids").shape == (1, 12)
    assert listed.as_numpy("cumulative_logprob").shape == (1,)
    with pytest.raises(InferenceServerException, match="max_tokens is 0"):
        http_client.infer("sum", http_inputs(binary=binary, max_tokens=0))
