"""The notes of a conversion, torn and mixed up."""

from pathlib import Path

import pytest

from checkpoints_tools.conversion.journal import Done, Journal
from gpt.errors import CheckpointError

FIRST = Done("a", "1" * 64, "1" * 64, True, True, (1, 2))
SECOND = Done("b", "2" * 64, "3" * 64, False, True, ())


def test_what_was_committed_is_known_again(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", "plan") as journal:
        journal.commit([FIRST])
        journal.commit([SECOND])
    with Journal(tmp_path / "journal", "plan") as journal:
        assert journal.done == {"a": FIRST, "b": SECOND}


def test_a_torn_line_at_any_byte_is_not_believed(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", "plan") as journal:
        journal.commit([FIRST])
        journal.commit([SECOND])
    text = (tmp_path / "journal").read_bytes()
    for size in range(len(text)):
        (tmp_path / "torn").write_bytes(text[:size])
        with Journal(tmp_path / "torn", "plan") as journal:
            known = list(journal.done.values())
            assert known == [FIRST, SECOND][: max(0, text[:size].count(b"\n") - 1)]
            journal.commit([SECOND])
        with Journal(tmp_path / "torn", "plan") as journal:
            assert journal.done["b"] == SECOND


def test_another_plan_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", "plan").close()
    with pytest.raises(CheckpointError, match="is of another source, target or version; remove it"):
        Journal(tmp_path / "journal", "other")


def test_what_is_forgotten_is_not_known_again(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", "plan") as journal:
        journal.commit([FIRST])
        journal.forget()
        assert journal.done == {}
        journal.commit([SECOND])
    with Journal(tmp_path / "journal", "plan") as journal:
        assert journal.done == {"b": SECOND}
