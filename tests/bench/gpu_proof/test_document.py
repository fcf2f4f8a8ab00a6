"""Documents of a GPU proof agree with the committed proof, and a rehearsal is refused."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_proof import document
from bench.gpu_proof.__main__ import NODE_STAGES, STAGES, StagePlan, main
from bench.gpu_proof.document import NODE, SINGLE_GPU, CommittedProof
from bench.gpu_proof.measurements import MEASUREMENTS
from bench.gpu_proof.proof_file import check_source, format_tables
from bench.harness.record import row_record
from bench.harness.targets import measured_row, not_run_row
from gpt.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def proof(plan: StagePlan = STAGES, **changes: Any) -> dict[str, Any]:
    """A proof from GPUs whose stages have all passed."""
    rows = {
        "gpu/decode": row_record(measured_row("gpu/decode", 70.0, "70 % | 3 ms")),
        "gpu/batch": row_record(not_run_row("gpu/batch", "transformers is not installed")),
    }
    facts = {"device": "cuda: NVIDIA H100", "collectives": "none", "torch": "2.11.0"}
    if plan is NODE_STAGES:
        facts |= {"collectives": "nccl: 2.27.5", "GPUs": "8"}
    table = {"columns": ["layout", "step, ms"], "lines": [["one rank", "4"], ["TP 2", "2"]]}
    stages = [
        {
            "name": name,
            "title": title,
            "status": "passed",
            "reason": "",
            "seconds": 12.3,
            "figures": {"count": 3}
            | ({"rows": rows} if name == "rows" else {})
            | ({"table": table} if name == "node-rows" else {}),
        }
        for name, title, _ in plan
    ]
    return {
        "version": 1,
        "commit": "abc1234",
        "begun": "2026-01-01T00:00:00",
        "facts": facts,
        "stages": stages,
    } | changes


def test_the_sections_and_the_labels_agree_with_the_committed_proofs() -> None:
    text = (ROOT / document.SECTION_PATH).read_text("utf-8")
    for committed in document.COMMITTED_PROOFS:
        assert document.renew_section(text, committed, committed.read(ROOT)) == text
    assert list(document.wrong_labels()) == []


@pytest.mark.parametrize("committed", document.COMMITTED_PROOFS, ids=lambda proof: proof.path)
def test_the_commit_of_a_committed_proof_is_an_ancestor(committed: CommittedProof) -> None:
    document_of_proof = committed.read(ROOT)
    if document_of_proof is None or not (ROOT / ".git").exists():
        pytest.skip("there is no proof yet, or no git history")
    commit = document_of_proof["commit"]
    command = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", commit, "HEAD"]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"facts": {"device": "cpu", "collectives": "none"}}, "rehearsal: its device is cpu"),
        ({"facts": {"device": "cuda: H100", "collectives": "gloo"}}, "its collectives is gloo"),
        ({"facts": {}}, "no fact 'device'"),
        ({"commit": "none"}, "commit"),
        ({"commit": "abc1234+"}, "commit"),
    ],
)
def test_a_proof_without_hardware_or_commit_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    check_source(proof())
    with pytest.raises(ConfigError, match=reason):
        check_source(proof(**changes))


def test_publishing_generates_the_section_and_names_wrong_labels(tmp_path: Path) -> None:
    for name in {label.document for label in document.LABELS} | {document.SECTION_PATH}:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"))
    path = tmp_path / "gpu_proof.json"
    path.write_text(json.dumps(proof()))
    sentences = document.publish(path, tmp_path)
    assert (SINGLE_GPU.read(tmp_path), NODE.read(tmp_path)) == (proof(), None)
    text = (tmp_path / document.SECTION_PATH).read_text("utf-8")
    assert "abc1234" in text and "NVIDIA H100" in text
    # Only the labels that one GPU can prove are wrong now, and the node has no figures yet.
    assert len(sentences) == 2 and text.count(document.NOT_RUN_LABEL) == 1
    path.write_text(json.dumps(proof(NODE_STAGES)))
    assert len(document.publish(path, tmp_path)) == len(document.LABELS) == 4
    assert (SINGLE_GPU.read(tmp_path), NODE.read(tmp_path)) == (proof(), proof(NODE_STAGES))
    text = (tmp_path / document.SECTION_PATH).read_text("utf-8")
    assert "nccl: 2.27.5" in text and document.NOT_RUN_LABEL not in text
    # A label stays if one of its stages did not pass.
    partly = proof(NODE_STAGES)
    partly["stages"][[name for name, *_ in NODE_STAGES].index("all-reduce")]["status"] = "skipped"
    path.write_text(json.dumps(partly))
    assert len(document.publish(path, tmp_path)) == 2


def test_a_rehearsal_is_not_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu_proof.json"
    path.write_text(json.dumps(proof(facts={"device": "cpu", "collectives": "none"})))
    assert main(["--publish", str(path)]) == 1
    assert "rehearsal" in capsys.readouterr().err
    assert not (ROOT / SINGLE_GPU.path).exists() or SINGLE_GPU.read(ROOT)


def test_the_tables_have_a_line_for_each_stage_and_row() -> None:
    lines = format_tables(proof()).splitlines()
    assert len(lines) == 2 + len(STAGES) + 1 + 2 + 2
    assert "70 % \\| 3 ms" in lines[-2] and "MISSED" in lines[-2]
    assert "transformers is not installed" in lines[-1] and "not run" in lines[-1]


def test_the_tables_of_stages_follow_the_stages() -> None:
    lines = format_tables(proof(NODE_STAGES)).splitlines()
    assert lines[-6:] == [
        "decode and prefill by layout:",
        "",
        "| layout | step, ms |",
        "|---|---|",
        "| one rank | 4 |",
        "| TP 2 | 2 |",
    ]


def test_the_section_has_the_table_of_the_mixed_load_if_the_proof_has_the_stage() -> None:
    document_of_proof = proof()
    (stage,) = [x for x in document_of_proof["stages"] if x["name"] == "mixed-load"]
    stage["figures"]["table"] = {"columns": ["chunk", "new tokens/s"], "lines": [["512", "900"]]}
    table = f"{stage['title']}:\n\n| chunk | new tokens/s |\n|---|---|\n| 512 | 900 |\n"
    section = document.render_section(SINGLE_GPU, document_of_proof)
    assert table in section
    # A proof of an earlier commit has no such stage.
    document_of_proof["stages"].remove(stage)
    assert stage["title"] not in document.render_section(SINGLE_GPU, document_of_proof)


def test_every_stage_has_a_measurement() -> None:
    # Both proofs have the same stage for the facts.
    assert [name for name, *_ in STAGES + NODE_STAGES[1:]] == list(MEASUREMENTS)


def test_a_stage_of_another_proof_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", "unused", "--ranks", "0", "--only", "rows"])
    assert "--only rows: the stages are facts, node-tokens" in capsys.readouterr().err
