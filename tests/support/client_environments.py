"""Environments of third-party clients, and client processes in them.

`make clients-tools` installs each client into its own folder of build/clients. A test whose client
is not installed is skipped, with the reason that the installation wrote. No client process can use
the internet: models, price lists and usage reports stay on the machine.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.support.servers import ROOT

CLIENTS = ROOT / "build" / "clients"
PROGRAMS = ROOT / "tests" / "third_party_clients" / "programs"
PROCESS_S = 600.0  # Against hangs. On a busy machine, importing a large client takes a minute.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "DO_NOT_TRACK": "1",
    "OPENAI_API_KEY": "none",
    "NO_PROXY": "127.0.0.1,localhost",
}


def environment(client: str) -> Path:
    """The folder of a client; skips the test if the client is not installed."""
    folder = CLIENTS / client
    if not (folder / "installed").exists():
        notice = folder / "unavailable"
        reason = notice.read_text().strip() if notice.exists() else "run `make clients-tools`"
        pytest.skip(f"{client} is not installed: {reason}")
    return folder


def interpreter(client: str) -> Path:
    """Python in the environment of a client."""
    return environment(client) / "bin" / "python"


def run_process(command: Sequence[str | Path], **variables: str) -> str:
    """Standard output of a client process, which has an empty home directory."""
    with TemporaryDirectory() as home:
        completed = subprocess.run(
            [str(word) for word in command],
            cwd=home,
            env={"PATH": os.environ["PATH"], "HOME": home, **OFFLINE, **variables},
            capture_output=True,
            text=True,
            timeout=PROCESS_S,
            check=False,
        )
    output = completed.stdout[-2000:] + completed.stderr[-4000:]
    assert completed.returncode == 0, f"{command} failed:\n{output}"
    return completed.stdout


def run_program(client: str | None, program: str, *arguments: str, **variables: str) -> Any:
    """Run a program of `third_party_clients/programs` and parse its last line, which is JSON.

    `client` names the environment; None is the environment of the tests.
    """
    python = Path(sys.executable) if client is None else interpreter(client)
    lines = run_process([python, PROGRAMS / program, *arguments], **variables).splitlines()
    return json.loads(lines[-1])


def run_node_program(
    program: str, *arguments: str, client: str = "node", **variables: str
) -> list[Any]:
    """Run a program with the packages of requirements/CLIENT.json; each line of output is JSON."""
    modules = environment(client) / "node_modules"
    with TemporaryDirectory() as folder:
        # Node looks for the packages of an import from the file's own folder upwards.
        (Path(folder) / "node_modules").symlink_to(modules)
        copy = Path(folder) / Path(program).name
        copy.write_bytes(Path(program).read_bytes())
        output = run_process(["node", copy, *arguments], **variables)
    return [json.loads(line) for line in output.splitlines()]
