"""The conversion journal: committed tensors, torn lines, and journals of another plan."""

import json
from pathlib import Path

import pytest

from checkpoints_tools.conversion.journal import FinishedTensor, Journal
from gpt.errors import CheckpointError

FIRST = FinishedTensor("a", "1" * 64, "1" * 64, True, True, (1, 2))
SECOND = FinishedTensor("b", "2" * 64, "3" * 64, False, True, ())


def test_committed_tensors_are_read_back(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", "plan") as journal:
        journal.commit([FIRST])
        journal.commit([SECOND])
    with Journal(tmp_path / "journal", "plan") as journal:
        assert journal.finished == {"a": FIRST, "b": SECOND}


def test_line_torn_at_any_byte_is_ignored(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", "plan") as journal:
        journal.commit([FIRST])
        journal.commit([SECOND])
    text = (tmp_path / "journal").read_bytes()
    for size in range(len(text)):
        (tmp_path / "torn").write_bytes(text[:size])
        with Journal(tmp_path / "torn", "plan") as journal:
            recovered = list(journal.finished.values())
            assert recovered == [FIRST, SECOND][: max(0, text[:size].count(b"\n") - 1)]
            journal.commit([SECOND])
        with Journal(tmp_path / "torn", "plan") as journal:
            assert journal.finished["b"] == SECOND


def test_another_plan_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", "plan").close()
    with pytest.raises(CheckpointError, match="of another source or with other options; remove"):
        Journal(tmp_path / "journal", "other")


@pytest.mark.parametrize("release", [{}, {"release": "0.0.1"}])
def test_another_plan_of_another_release_starts_over(
    release: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    with Journal(path, "plan") as journal:
        journal.commit([FIRST])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({"plan": "plan", **release}), *lines[1:], ""]))

    with Journal(path, "other") as journal:
        assert journal.finished == {}
        journal.commit([SECOND])

    assert "the conversion starts over" in caplog.text
    with Journal(path, "other") as journal:
        assert journal.finished == {"b": SECOND}


def test_the_same_plan_of_another_release_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, "plan") as journal:
        journal.commit([FIRST])
    path.write_text("\n".join([json.dumps({"plan": "plan"}), *path.read_text().split("\n")[1:]]))
    with Journal(path, "plan") as journal:
        assert journal.finished == {"a": FIRST}


def test_reset_tensors_are_not_read_back(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", "plan") as journal:
        journal.commit([FIRST])
        journal.reset()
        assert journal.finished == {}
        journal.commit([SECOND])
    with Journal(tmp_path / "journal", "plan") as journal:
        assert journal.finished == {"b": SECOND}
