"""The conversion journal: committed tensors, torn lines, and journals of another plan."""

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
    with pytest.raises(CheckpointError, match="by another version of Preamble; remove"):
        Journal(tmp_path / "journal", "other")


def test_reset_tensors_are_not_read_back(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", "plan") as journal:
        journal.commit([FIRST])
        journal.reset()
        assert journal.finished == {}
        journal.commit([SECOND])
    with Journal(tmp_path / "journal", "plan") as journal:
        assert journal.finished == {"b": SECOND}
