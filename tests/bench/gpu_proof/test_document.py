"""Documents of a GPU proof agree with the committed proof, and a rehearsal is refused."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_proof import document
from bench.gpu_proof.__main__ import STAGES, main
from bench.gpu_proof.measurements import MEASUREMENTS
from bench.gpu_proof.proof_file import check_source, format_tables
from bench.harness.record import row_record
from bench.harness.targets import measured_row, not_run_row
from gpt.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def proof(**changes: Any) -> dict[str, Any]:
    """A proof from a GPU whose stages have all passed."""
    rows = {
        "gpu/decode": row_record(measured_row("gpu/decode", 70.0, "70 % | 3 ms")),
        "gpu/batch": row_record(not_run_row("gpu/batch", "transformers is not installed")),
    }
    facts = {"device": "cuda: NVIDIA H100", "collectives": "none", "torch": "2.11.0"}
    stages = [
        {
            "name": name,
            "title": title,
            "status": "passed",
            "reason": "",
            "seconds": 12.3,
            "figures": {"count": 3} | ({"rows": rows} if name == "rows" else {}),
        }
        for name, title, _ in STAGES
    ]
    return {
        "version": 1,
        "commit": "abc1234",
        "begun": "2026-01-01T00:00:00",
        "facts": facts,
        "stages": stages,
    } | changes


def test_the_section_and_the_labels_agree_with_the_committed_proof() -> None:
    committed = document.committed_proof()
    text = (ROOT / document.SECTION_PATH).read_text("utf-8")
    assert document.renew_section(text, committed) == text
    assert list(document.wrong_labels(committed)) == []


def test_the_commit_of_the_committed_proof_is_an_ancestor() -> None:
    committed = document.committed_proof()
    if committed is None or not (ROOT / ".git").exists():
        pytest.skip("there is no proof yet, or no git history")
    command = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", committed["commit"], "HEAD"]
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
    assert document.committed_proof(tmp_path) == proof()
    text = (tmp_path / document.SECTION_PATH).read_text("utf-8")
    assert "abc1234" in text and "NVIDIA H100" in text and document.NOT_RUN_LABEL not in text
    # Only the labels that one GPU can prove are wrong now.
    provable = [label for label in document.LABELS if document.SEVERAL_GPUS not in label.stages]
    assert len(sentences) == len(provable) == 2
    partly = proof()
    partly["stages"][[name for name, *_ in STAGES].index("steps")]["status"] = "timed out"
    assert len(list(document.wrong_labels(partly, tmp_path))) == 1


def test_a_rehearsal_is_not_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu_proof.json"
    path.write_text(json.dumps(proof(facts={"device": "cpu", "collectives": "none"})))
    assert main(["--publish", str(path)]) == 1
    assert "rehearsal" in capsys.readouterr().err
    assert not (ROOT / document.PROOF_PATH).exists() or document.committed_proof()


def test_the_tables_have_a_line_for_each_stage_and_row() -> None:
    lines = format_tables(proof()).splitlines()
    assert len(lines) == 2 + len(STAGES) + 1 + 2 + 2
    assert "70 % \\| 3 ms" in lines[-2] and "MISSED" in lines[-2]
    assert "transformers is not installed" in lines[-1] and "not run" in lines[-1]


def test_every_stage_has_a_measurement() -> None:
    assert [name for name, *_ in STAGES] == list(MEASUREMENTS)
