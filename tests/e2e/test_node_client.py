"""A third-party client in another language: Node's own gRPC, with only our protos."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from clients.client import Options
from tests.support.servers import ROOT, serving, write_checkpoint

MODULES = ROOT / "build" / "node" / "node_modules"
NODE = shutil.which("node")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NODE is None, reason="there is no node here"),
    pytest.mark.skipif(not MODULES.is_dir(), reason="grpc-js is not installed: make tools"),
]


def test_node_client_streams_completes_and_reads_errors(tmp_path: Path) -> None:
    example = tmp_path / "generate.mjs"
    example.write_text((ROOT / "examples" / "node" / "generate.mjs").read_text())
    # Node looks for an import from the file's own folder upwards.
    (tmp_path / "node_modules").symlink_to(MODULES)
    assert NODE is not None
    with serving(write_checkpoint(tmp_path)) as server:
        completed = subprocess.run(
            [NODE, str(example), server.address, "hello world"],
            env={**os.environ, "PROTOS": str(ROOT / "protos")},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        with server.client() as client:
            text = client.generate("hello world", Options(max_new_tokens=8)).text
    assert completed.returncode == 0, completed.stderr
    response, refusal = map(json.loads, completed.stdout.splitlines())
    assert response["streamed"] == response["whole"]
    assert response["whole"] == text != ""
    assert response["usage"]["completion_tokens"] == 8
    assert refusal["code"] == "INVALID_ARGUMENT" and "temperature is -1" in refusal["message"]
