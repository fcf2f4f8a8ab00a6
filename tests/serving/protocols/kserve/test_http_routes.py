"""KServe v2 over HTTP, by bare requests, compared with gRPC."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
import tritonclient.grpc as triton_grpc

from serving.protocols.kserve.http_routes import UNSUPPORTED_PATHS
from tests.support.servers import WAIT_S, eventually
from tests.support.tritonclient_calls import TEXT, KServeServer, infer, kserve_server, text_of

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KServeServer]:
    with kserve_server(tmp_path_factory.mktemp("kserve_http")) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def http(deployment: KServeServer) -> Iterator[httpx.Client]:
    url = f"http://{deployment.server.http_address}"
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        yield client


@pytest.fixture
def grpc_client(deployment: KServeServer) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(deployment.server.address) as client:
        yield client


def tensors(text: str = TEXT, **inputs: Any) -> list[dict[str, Any]]:
    """JSON tensors, as a program without a client library builds them."""
    types = {bool: "BOOL", int: "INT32", float: "FP32", str: "BYTES"}
    return [
        {"name": name, "datatype": types[type(value)], "shape": [1], "data": [value]}
        for name, value in {"text_input": text, **inputs}.items()
    ]


def test_health_and_metadata_equal_those_of_grpc(
    http: httpx.Client, grpc_client: triton_grpc.InferenceServerClient, deployment: KServeServer
) -> None:
    assert http.get("/v2/health/live").json() == {"live": True}
    assert http.get("/v2/health/ready").json() == {"ready": True}
    assert http.head("/v2/health/ready/").status_code == 200
    assert http.get("/v2").json() == grpc_client.get_server_metadata(as_json=True)
    for path, name in (("preamble", "preamble"), ("fox/versions/2", "fox"), ("fox%402", "fox@2")):
        metadata = http.get(f"/v2/models/{path}").json()
        expected = grpc_client.get_model_metadata(name, as_json=True)
        for specs in (*expected["inputs"], *expected["outputs"]):
            specs["shape"] = [int(size) for size in specs["shape"]]
        assert metadata == expected, path
        assert http.get(f"/v2/models/{path}/ready").json() == {
            "name": metadata["name"],
            "ready": True,
        }
        config = http.get(f"/v2/models/{path}/config").json()
        assert config["name"] == name and config["max_batch_size"] == 0
        assert config["input"][0]["dims"] == [1] and config["model_transaction_policy"] == {
            "decoupled": True
        }
    index = http.post("/v2/repository/index").json()
    expected_index = grpc_client.get_model_repository_index(as_json=True)["models"]
    assert [{**model, "reason": ""} for model in expected_index] == index
    assert {model["name"] for model in index} >= {deployment.model, "preamble", "fox", "sum"}
    assert http.post("/v2/repository/models/fox/load", json={}).status_code == 200


@pytest.mark.parametrize("model", ["preamble", "sum", "fox/versions/2"])
def test_texts_equal_those_of_grpc(
    http: httpx.Client, grpc_client: triton_grpc.InferenceServerClient, model: str
) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "seed": 5, "temperature": 0.75}
    expected = text_of(infer(grpc_client, model.partition("/")[0], **options))
    unary = {"exclude_input_in_output": True, **options}

    inferred = http.post(f"/v2/models/{model}/infer", json={"inputs": tensors(**unary)})
    generated = http.post(f"/v2/models/{model}/generate", json={"text_input": TEXT, **unary})
    streamed = http.post(
        f"/v2/models/{model}/generate_stream", json={"text_input": TEXT, "parameters": options}
    )

    assert inferred.json()["outputs"][0]["data"] == [expected]
    assert generated.json()["text_output"] == expected
    assert streamed.headers["content-type"].startswith("text/event-stream")
    lines = streamed.text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert len(chunks) > 1 and "".join(chunk["text_output"] for chunk in chunks) == expected
    assert chunks[0]["model_name"] == model.partition("/")[0]


def test_generate_repeats_the_prompt_by_default_as_grpc_does(http: httpx.Client) -> None:
    curl = {"Content-Type": "application/x-www-form-urlencoded"}  # As curl sends by default.
    body = json.dumps({"text_input": TEXT, "max_tokens": 3, "return_num_output_tokens": True})
    response = http.post("/v2/models/preamble/generate", content=body, headers=curl).json()
    assert response["text_output"].startswith(TEXT) and response["num_output_tokens"] == 3


def test_errors_have_kserves_format(http: httpx.Client) -> None:
    generate = "/v2/models/preamble/generate"
    infer_body = {"inputs": tensors(max_tokens=3, stream=True)}
    surfeit = {"text_input": "a", "max_tokens": 10**6}
    browser = {"Sec-Fetch-Site": "cross-site"}
    responses = {
        404: [
            http.get("/v2/models/dog"),
            http.get("/v2/models/dog/ready"),
            http.get("/v2/models/preamble/versions/7"),
            http.post("/v2/models/dog/generate", json={"text_input": "a"}),
            http.get("/v2/health"),
            http.get("/v2/models/"),
        ],
        405: [http.get(generate), http.post("/v2"), http.post("/v2/models/preamble")],
        400: [
            http.post(generate, json={"text_input": "a", "max_tokns": 3}),
            http.post(generate, json=surfeit),
            http.post(generate, json={"text_input": "a", "stream": True}),
            http.post(generate.replace("generate", "generate_stream"), json=surfeit),
            http.post(generate.replace("generate", "infer"), json=infer_body),
            http.post(generate, content="{}", headers=browser),
        ],
        501: [
            *(http.get(path) for path in UNSUPPORTED_PATHS),
            http.get("/v2/models/preamble/stats"),
            http.post("/v2/repository/models/fox/unload"),
            http.post("/v2/repository/models/fox/load", json={"parameters": {"config": "{}"}}),
        ],
    }
    for status, failed in responses.items():
        for response in failed:
            assert response.status_code == status, (response.url, response.text)
            assert response.json().keys() == {"error"} and response.json()["error"]
    assert "max_tokens" in responses[400][1].json()["error"]
    assert "call generate_stream" in responses[400][2].json()["error"]


def test_unknown_paths_are_refused_briefly(http: httpx.Client) -> None:
    message = http.get("/v1/embeddings").json()["error"]["message"]
    assert message.startswith("path '/v1/embeddings' does not exist; ") and len(message) < 250
    assert "/v1/chat/completions" in message and "gRPC has another port" in message
    grpc_path = "/inference.GRPCInferenceService/ServerLive"
    assert "gRPC port" in http.post(grpc_path).json()["error"]["message"]


def test_disconnected_clients_cancel_their_streams(
    http: httpx.Client, deployment: KServeServer
) -> None:
    body = {"text_input": TEXT, "max_tokens": 4000, "ignore_eos": True}
    with http.stream("POST", "/v2/models/preamble/generate_stream", json=body) as response:
        next(response.iter_lines())
    server = deployment.server
    eventually(lambda: server.metric("preamble_scheduler_running_requests") == 0)
