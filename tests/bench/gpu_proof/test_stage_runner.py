"""Stages of a GPU proof: a stage that crashes, hangs or runs out of memory ends alone."""

import json
import sys
from pathlib import Path

import pytest

from bench.gpu_proof import stage_runner
from bench.gpu_proof.proof_file import ProofFile, StageResult, read_proof
from bench.gpu_proof.stage_runner import LIMIT_S_MIN, Stage, run_stages
from gpt.errors import ConfigError

WRITE_FIGURE = """
import json, sys
with open(sys.argv[-1], "a") as file:
    file.write(json.dumps({"figure": "count", "value": 7}) + "\\n")
"""
OUT_OF_MEMORY = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
bytearray(4 << 30)
"""
WRITE_ENDLESSLY = """
import time
with open(sys.argv[-1], "a") as file:
    file.write('{"figure": "part')
time.sleep(600)
"""


def stage(name: str, code: str, limit_s: float = 60.0) -> Stage:
    return Stage(name, f"the stage {name}", [sys.executable, "-c", code], limit_s)


def run(folder: Path, stages: list[Stage], budget_s: float = 600.0) -> dict[str, StageResult]:
    proof = ProofFile(folder, "abc", "2026-01-01T00:00:00")
    run_stages(stages, proof, budget_s, lambda line: None)
    assert read_proof(proof.path) == json.loads(json.dumps(proof.document))
    return {result.name: result for result in proof.stages}


def test_a_stage_that_fails_ends_alone(tmp_path: Path) -> None:
    results = run(
        tmp_path,
        [
            stage("crash", f"{WRITE_FIGURE}\nimport os; os.abort()"),
            stage("memory", f"{WRITE_FIGURE}\n{OUT_OF_MEMORY}"),
            stage("hang", f"{WRITE_FIGURE}\n{WRITE_ENDLESSLY}", limit_s=3.0),
            stage("error", f"{WRITE_FIGURE}\nraise ValueError('the last line')"),
            stage("good", WRITE_FIGURE),
        ],
    )
    statuses = {name: result.status for name, result in results.items()}
    assert statuses == {
        "crash": "failed",
        "memory": "failed",
        "hang": "timed out",
        "error": "failed",
        "good": "passed",
    }
    assert "SIGABRT" in results["crash"].reason and "MemoryError" in results["memory"].reason
    assert "the last line" in results["error"].reason and not results["good"].reason
    assert 3.0 <= results["hang"].seconds < 30.0
    # What a stage recorded before it failed is in the file.
    assert all(result.figures == {"count": 7} for result in results.values())


def test_processes_of_a_stage_that_hangs_are_killed(tmp_path: Path) -> None:
    marker = tmp_path / "child"
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(marker)!r}, "w").write(str(child.pid))
child.wait()
"""
    assert run(tmp_path, [stage("hang", code, limit_s=3.0)])["hang"].status == "timed out"
    status = Path(f"/proc/{marker.read_text()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_stages_after_the_budget_are_skipped(tmp_path: Path) -> None:
    stages = [stage("first", WRITE_FIGURE), stage("second", WRITE_FIGURE)]
    results = run(tmp_path, stages, budget_s=LIMIT_S_MIN - 1)
    assert {result.status for result in results.values()} == {"skipped"}
    assert all("budget" in result.reason for result in results.values())


def test_the_budget_shortens_the_limit_of_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_runner, "LIMIT_S_MIN", 0.0)
    hang = stage("hang", "import time; time.sleep(600)", limit_s=500)
    assert run(tmp_path, [hang], budget_s=0.5)["hang"].status == "timed out"


@pytest.mark.parametrize(("exit_code", "key"), [(0, "skipped"), (3, "failed")])
def test_a_stage_gives_its_own_reason(tmp_path: Path, exit_code: int, key: str) -> None:
    code = f"""
import sys
open(sys.argv[-1], "a").write('{{"{key}": "no such device"}}\\n')
sys.exit({exit_code})
"""
    (result,) = run(tmp_path, [stage("first", code)]).values()
    assert (result.status, result.reason) == (key, "no such device")


def facts(device: str) -> str:
    line = json.dumps({"figure": "device", "value": device})
    return f"import sys; open(sys.argv[-1], 'a').write({line + chr(10)!r})"


def continue_run(folder: Path, commit: str, device: str, stages: list[Stage]) -> ProofFile:
    proof = ProofFile.continued(folder, commit, device, "2026-01-02T00:00:00")
    run_stages(stages, proof, 600.0, lambda line: None)
    return proof


def test_a_further_run_of_the_same_commit_and_device_replaces_only_its_own_stages(
    tmp_path: Path,
) -> None:
    run(tmp_path, [stage("facts", facts("cuda: H100")), stage("first", "exit(3)")])
    proof = continue_run(tmp_path, "abc", "cuda", [stage("second", WRITE_FIGURE)])
    assert [(result.name, result.status) for result in proof.stages] == [
        ("facts", "passed"),
        ("first", "failed"),
        ("second", "passed"),
    ]
    assert proof.begun == "2026-01-01T00:00:00"
    proof = continue_run(tmp_path, "abc", "cuda", [stage("first", WRITE_FIGURE)])
    assert {result.name: result.status for result in proof.stages} == {
        "facts": "passed",
        "first": "passed",
        "second": "passed",
    }
    assert read_proof(proof.path)["facts"] == {"device": "cuda: H100"}


@pytest.mark.parametrize(("commit", "device"), [("def", "cuda"), ("abc", "cpu"), ("abc+", "cuda")])
def test_a_run_of_another_commit_or_device_begins_a_new_proof(
    tmp_path: Path, commit: str, device: str
) -> None:
    run(tmp_path, [stage("facts", facts("cuda: H100"))])
    proof = continue_run(tmp_path, commit, device, [stage("second", WRITE_FIGURE)])
    assert [result.name for result in proof.stages] == ["second"]
    assert proof.begun == "2026-01-02T00:00:00"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 1, "stages": []}',
        '{"version": 1, "commit": "abc", "begun": "x", "facts": [], "stages": []}',
        '{"version": 1, "commit": "abc", "begun": "x", "facts": {}, "stages": [{"name": "facts"}]}',
    ],
)
def test_a_damaged_proof_is_refused_and_replaced_by_the_next_run(text: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu_proof.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not a proof file"):
        read_proof(path)
    proof = continue_run(tmp_path, "abc", "cuda", [stage("second", WRITE_FIGURE)])
    assert [result.name for result in proof.stages] == ["second"]
    assert read_proof(path)["commit"] == "abc"
