"""Rehearsal of a GPU proof on the CPU: all stages run, and a kill leaves valid results."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_proof.__main__ import NODE_STAGES, STAGES
from bench.gpu_proof.proof_file import TABLE_NAME, check_source, read_proof
from gpt.child_processes import ChildProcess, module_command
from gpt.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


# Starts the loopback interface, which is down in a new network namespace, and then a command.
WITH_LOOPBACK = """
import fcntl, os, socket, struct, sys
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
with socket.socket() as control:
    fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
os.execvp(sys.argv[1], sys.argv[1:])
"""


def rehearse(target: str, folder: Path, *, without_network: bool) -> dict[str, Any]:
    """Run a target of make on the CPU, with only a loopback interface if asked and possible."""
    command = ["make", target, f"PYTHON={sys.executable}", "DEVICE=cpu", f"OUT={folder}"]
    unshare = ["unshare", "--net", "--map-root-user"]
    if without_network and shutil.which("unshare"):
        can_unshare = not subprocess.run([*unshare, "true"], check=False).returncode
        if can_unshare:
            command = [*unshare, sys.executable, "-c", WITH_LOOPBACK, *command]
    run = subprocess.run(
        [*command, "COMMIT=abc1234"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return read_proof(folder / "gpu_proof.json")


@pytest.mark.slow
def test_all_stages_run_without_a_network(tmp_path: Path) -> None:
    proof = rehearse("gpu-proof", tmp_path, without_network=True)
    statuses = {stage["name"]: stage["status"] for stage in proof["stages"]}
    # Only the compilation of kernels has nothing that runs on a CPU.
    assert statuses == {name: "passed" for name, *_ in STAGES} | {"compile": "skipped"}
    assert all(stage["figures"] for stage in proof["stages"] if stage["status"] == "passed")
    assert (proof["facts"]["device"], proof["commit"]) == ("cpu", "abc1234")
    assert "gpu/decode" in str(proof["stages"]) and (tmp_path / TABLE_NAME).exists()
    with pytest.raises(ConfigError, match="rehearsal"):
        check_source(proof)


@pytest.mark.soak
def test_all_stages_of_a_node_run_with_two_ranks(tmp_path: Path) -> None:
    # The ranks need the loopback interface.
    proof = rehearse("gpu-proof-node", tmp_path, without_network=False)
    stages = {stage["name"]: stage for stage in proof["stages"]}
    assert {name: stage["status"] for name, stage in stages.items()} == {
        name: "passed" for name, *_ in NODE_STAGES
    }
    tables = {
        name: stages[name]["figures"]["table"]["lines"] for name in ("node-tokens", "node-rows")
    }
    assert [line[:3] for line in tables["node-tokens"]] == [
        ["float32", layout, "4 of 4"] for layout in ("one rank", "TP 2", "PP 2")
    ]
    assert [layout for layout, *_ in tables["node-rows"]] == ["one rank", "PP 2"]
    loss = stages["rank-loss"]["figures"]
    assert "rank 1 was ended by SIGKILL" in loss["error"] and loss["restarts"] == 1
    assert (proof["facts"]["collectives"], proof["facts"]["ranks"]) == ("gloo", 2)
    with pytest.raises(ConfigError, match="rehearsal"):
        check_source(proof)


@pytest.mark.slow
def test_a_kill_at_any_time_leaves_valid_results(tmp_path: Path) -> None:
    path = tmp_path / "gpu_proof.json"
    arguments = ["bench.gpu_proof", "--out", str(tmp_path), "--device", "cpu"]
    arguments += ["--only", "facts", "rows", "--commit", "abc1234"]
    proof_run = ChildProcess(module_command(arguments), folder=ROOT)
    try:
        while not path.exists() or read_proof(path)["stages"][0]["status"] != "passed":
            assert proof_run.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(proof_run.pid, signal.SIGKILL)
        proof_run.wait()
    proof = read_proof(path)
    facts, rows = proof["stages"]
    assert facts["status"] == "passed" and proof["facts"]["device"] == "cpu"
    assert rows["status"] in ("failed", "skipped") and "the run ended" in rows["reason"]
