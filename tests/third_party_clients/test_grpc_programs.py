"""gRPC clients of other projects: grpc-js for Node, the stubs of vllm-tgis-adapter, and `buf curl`.

The oracle is this project's own client on the same server.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.client import Options
from tests.support.client_environments import run_node_program, run_process, run_program
from tests.support.servers import ROOT, WAIT_S
from tests.support.tgis_calls import TEXT, TgisServer, tgis_server

pytestmark = pytest.mark.clients

OTHER = "the quick brown fox"
CONTEXT = 4096
BUF = Path(sys.executable).parent / "buf"
SERVICE = "preamble.v1.GenerationService"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TgisServer]:
    with tgis_server(tmp_path_factory.mktemp("grpc")) as deployment:
        yield deployment


def generated_text(deployment: TgisServer, prompt: str) -> str:
    with deployment.server.client() as client:
        text: str = client.generate(prompt, Options(max_new_tokens=8)).text
    assert text
    return text


def test_grpc_js_streams_completes_and_reads_errors(deployment: TgisServer) -> None:
    response, error = run_node_program(
        str(ROOT / "examples" / "node" / "generate.mjs"),
        deployment.server.address,
        TEXT,
        PROTOS=str(ROOT / "protos"),
    )
    assert response["streamed"] == response["whole"] == generated_text(deployment, TEXT)
    assert response["usage"]["completion_tokens"] == 8
    assert error["code"] == "INVALID_ARGUMENT" and "temperature is -1" in error["message"]


def test_stubs_of_vllm_tgis_adapter(deployment: TgisServer) -> None:
    program = "vllm_tgis_adapter_calls.py"
    report = run_program("vllm-tgis-adapter", program, deployment.server.address, TEXT, OTHER)
    sampling = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 11}
    sampling["repetition_penalty"] = 1.1
    for text, response in zip((TEXT, OTHER), report["texts"], strict=True):
        expected = deployment.generate_own(
            text, adapter="sum", sampling=sampling, max_new_tokens=16
        )
        assert response == text + expected.text
    assert report["streamed"] == report["texts"]
    assert report["seeds"] == [11] * 4
    assert report["last"] == report["stops"]
    assert set(report["stops"]) <= {"MAX_TOKENS", "EOS_TOKEN"}
    assert all(report["counts"] + report["inputs"] + report["tokens"])
    assert set(report["details"]) == {2}
    assert (report["context"], report["kind"]) == (CONTEXT, "DECODER_ONLY")
    assert report["code"] == "INVALID_ARGUMENT"


def buf_curl(deployment: TgisServer, path: str, *options: str) -> list[str | Path]:
    address = f"http://{deployment.server.address}{path}"
    return [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *options, address]


def json_messages(text: str) -> list[Any]:
    """The JSON objects of a text, one after the other."""
    decoder = json.JSONDecoder()
    messages = []
    while text := text.strip():
        message, end = decoder.raw_decode(text)
        messages.append(message)
        text = text[end:]
    return messages


@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed: run `make setup`")
def test_buf_curl_calls_by_reflection(deployment: TgisServer) -> None:
    methods = run_process(buf_curl(deployment, "", "--list-methods")).split()
    assert {f"{SERVICE}/Generate", f"{SERVICE}/GenerateStream"} <= set(methods)
    data = json.dumps({"text": TEXT, "max_new_tokens": 8})
    (response,) = json_messages(
        run_process(buf_curl(deployment, f"/{SERVICE}/Generate", "--data", data))
    )
    streamed = json_messages(
        run_process(buf_curl(deployment, f"/{SERVICE}/GenerateStream", "--data", data))
    )
    text = generated_text(deployment, TEXT)
    assert response["text"] == "".join(part.get("text", "") for part in streamed) == text

    invalid = json.dumps({"text": TEXT, "sampling": {"temperature": -1}})
    failed = subprocess.run(
        buf_curl(deployment, f"/{SERVICE}/Generate", "--data", invalid),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert failed.returncode != 0
    assert json.loads(failed.stderr)["code"] == "invalid_argument"
