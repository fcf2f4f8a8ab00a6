"""Load generators of other projects, guidellm and aiperf, unmodified against a real server.

The reports of the generators and the server's metrics must agree on the requests and the tokens.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpt.tokenizers.tokenizer import open_tokenizer
from tests.support.chat_server import BASE, ChatServer, write_byte_level_checkpoint
from tests.support.chat_templates import CHATML
from tests.support.client_environments import environment, run_process
from tests.support.servers import serving

# `make soak` runs these tests: aiperf alone installs 600 MB.
pytestmark = pytest.mark.soak

REQUESTS = 6
NEW_TOKENS = 8
GENERATED = "preamble_generated_tokens_total"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level_checkpoint(tmp_path_factory.mktemp("load"), CHATML)


@pytest.fixture(scope="module")
def deployment(checkpoint: Path) -> Iterator[ChatServer]:
    with serving(checkpoint, checkpoint.parent / "s.yaml") as server:
        yield ChatServer(server, open_tokenizer(checkpoint / "tokenizer"))


def test_aiperf(deployment: ChatServer, checkpoint: Path, tmp_path: Path) -> None:
    aiperf = environment("aiperf") / "bin" / "aiperf"
    before = deployment.server.metric(GENERATED)
    command: list[str | Path] = [aiperf, "profile", "--model", BASE, "--endpoint-type", "chat"]
    command += ["--url", f"http://{deployment.server.http_address}", "--streaming"]
    command += ["--tokenizer", checkpoint / "tokenizer", "--output-artifact-dir", tmp_path]
    command += ["--request-count", str(REQUESTS), "--concurrency", "2", "--ui", "none"]
    command += ["--synthetic-input-tokens-mean", "20", "--output-tokens-mean", str(NEW_TOKENS)]
    command += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{NEW_TOKENS}"]
    run_process(command, HF_HUB_OFFLINE="")  # Offline, aiperf does not accept a local tokenizer.
    report = json.loads(next(tmp_path.rglob("profile_export_aiperf.json")).read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert deployment.server.metric(GENERATED) - before >= REQUESTS * NEW_TOKENS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(deployment: ChatServer, checkpoint: Path, tmp_path: Path, path: str) -> None:
    guidellm = environment("guidellm") / "bin" / "guidellm"
    before = deployment.server.metric(GENERATED)
    target = f"http://{deployment.server.http_address}"
    backend = f"kind=openai_http,target={target},model={BASE},request_format={path}"
    report = tmp_path / "report.json"
    command: list[str | Path] = [guidellm, "run", "--backend", backend, "--disable-console"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={checkpoint / 'tokenizer'}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=20,output_tokens={NEW_TOKENS}"]
    command += ["--profile", "kind=synchronous"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--output", f"kind=json,path={report}"]
    run_process(command)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == REQUESTS
    assert deployment.server.metric(GENERATED) - before >= REQUESTS * NEW_TOKENS
