"""Adapter change log: one record for each change, also of interrupted and unwritable ones."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt.adapters.adapter_file import Card, build_adapter, check_publish_directory, publish_adapter
from gpt.adapters.change_log import (
    CHANGES_FILE,
    FOLDER,
    MESSAGE_CHARACTERS_MAX,
    NAME_CHARACTERS_MAX,
    OPEN_RECORDS_MAX,
    REFUSALS_FILE,
    AdapterChangeLog,
    ChangeAuthor,
    LogError,
)
from gpt.errors import AdapterError
from tests.support.privileges import plain_user

AUTHOR = ChangeAuthor("acme", "ci", "", "preamble", "Promote", "10.0.0.1:5", "request-7")


def make_change(log: AdapterChangeLog, version: int, *, ends: bool = True) -> None:
    with log.recording("promote", f"tax@{version}", AUTHOR, "acme") as change:
        change.begin(version, version - 1)
        if ends:
            change.finish(version)


def refuse(log: AdapterChangeLog, name: str, message: str = "no") -> None:
    with pytest.raises(KeyError), log.recording("unload", name, AUTHOR):
        raise KeyError(message)


def fail(log: AdapterChangeLog, name: str) -> None:
    with log.recording("unload", name, AUTHOR) as change:
        change.begin(1, 1)
        raise AdapterError("disk")


def columns(log: AdapterChangeLog, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(record[name] for name in names) for record in log.read()]


def lines(path: Path) -> Sequence[dict[str, Any]]:
    return list(map(json.loads, path.read_text().splitlines()))


def test_a_change_is_on_disk_before_and_after_it_is_made(tmp_path: Path) -> None:
    log = AdapterChangeLog(tmp_path)
    changes_file = tmp_path / FOLDER / CHANGES_FILE
    with log.recording("promote", "tax@3", AUTHOR, "acme") as change:
        assert not changes_file.exists()
        change.begin(3, 2, "d1")
        (begun,) = lines(changes_file)
        change.finish(3)
    _, done = lines(changes_file)
    assert begun["status"] == "begun" and begun["current_after"] is None
    assert {**begun, "status": "done", "time": done["time"], "current_after": 3} == done
    assert done["time"] >= begun["time"] and done["time"].endswith("Z")
    expected_fields = {
        "format": 1,
        "action": "promote",
        "adapter": "tax",
        "requested": "tax@3",
        "version": 3,
        "current_before": 2,
        "digest": "d1",
        "owner": "acme",
        "tenant": "acme",
        "token": "ci",
        "protocol": "preamble",
        "method": "Promote",
        "peer": "10.0.0.1:5",
        "request_id": "request-7",
        "reason": "",
    }
    assert expected_fields.items() <= done.items()
    assert list(log.read()) == [done]


def test_refused_and_failed_changes_have_a_reason(tmp_path: Path) -> None:
    log = AdapterChangeLog(tmp_path, reason_name=lambda error: f"R-{type(error).__name__}")
    refuse(log, "tax@9", "m" * 10_000)
    with pytest.raises(AdapterError):
        fail(log, "tax@1")
    assert columns(log, "status", "reason", "requested") == [
        ("refused", "R-KeyError", "tax@9"),
        ("failed", "R-AdapterError", "tax@1"),
    ]
    (refusal,) = lines(tmp_path / FOLDER / REFUSALS_FILE)
    assert len(refusal["message"]) == MESSAGE_CHARACTERS_MAX


def test_refusals_do_not_displace_changes(tmp_path: Path) -> None:
    log = AdapterChangeLog(tmp_path, bytes_max=2_000, files_max=2)
    make_change(log, 1)
    for number in range(30):
        refuse(log, f"x@{number}")
    statuses = [status for (status,) in columns(log, "status")]
    assert statuses[0] == "done" and 1 < len(statuses) < 31


def test_interrupted_changes_are_unfinished_and_keep_their_place(tmp_path: Path) -> None:
    log = AdapterChangeLog(tmp_path)
    make_change(log, 1)
    make_change(log, 2, ends=False)
    make_change(log, 3)
    assert columns(log, "status", "version") == [("done", 1), ("unfinished", 2), ("done", 3)]

    # A change that another process ends later is in the order of the ends.
    change = log.start_change("promote", "tax@4", AUTHOR)
    change.begin(4, 3)
    make_change(log, 5)
    change.begin(6, 5)  # The version was taken meanwhile: another one is tried.
    change.finish(6)
    assert columns(log, "status", "version")[3:] == [("done", 5), ("done", 6)]


def test_an_interrupted_change_withholds_a_bounded_number_of_records(tmp_path: Path) -> None:
    log = AdapterChangeLog(tmp_path)
    make_change(log, 1, ends=False)
    (begun,) = lines(tmp_path / FOLDER / CHANGES_FILE)
    with (tmp_path / FOLDER / CHANGES_FILE).open("a") as file:
        for version in range(2, OPEN_RECORDS_MAX + 50):
            record = {**begun, "change": str(version), "status": "done", "version": version}
            file.write(json.dumps(record) + "\n")
    records = log.read()
    assert next(records)["status"] == "unfinished"
    assert [record["version"] for record in records] == list(range(2, OPEN_RECORDS_MAX + 50))


@pytest.mark.parametrize(
    "name", ["a\nb", "\x1b[2J\0", "../../etc/passwd", "x" * 100_000, "\udcff", "@@", ""]
)
def test_hostile_names_stay_in_one_bounded_line(tmp_path: Path, name: str) -> None:
    log = AdapterChangeLog(tmp_path)
    author = ChangeAuthor(name, peer=name, request_id=name)
    with pytest.raises(KeyError), log.recording("upload", name, author, name):
        raise KeyError(name)
    (record,) = lines(tmp_path / FOLDER / REFUSALS_FILE)
    assert record["requested"] == record["tenant"] == name[:NAME_CHARACTERS_MAX]
    assert (tmp_path / FOLDER / REFUSALS_FILE).read_bytes().count(b"\n") == 1


def test_a_log_that_cannot_be_written_refuses_changes_and_keeps_refusals(tmp_path: Path) -> None:
    errors: list[LogError] = []
    log = AdapterChangeLog(tmp_path, on_unwritten=errors.append)
    log.create_folder()
    folder = tmp_path / FOLDER
    folder.chmod(0o500)
    with plain_user():
        refuse(log, "a@1")
        with pytest.raises(PermissionError):
            fail(log, "b@1")
        log.write_pending()
    assert len(errors) == 3 and list(folder.iterdir()) == []
    folder.chmod(0o700)

    refuse(log, "c@1")
    log.write_pending()

    assert columns(log, "status", "requested") == [
        ("refused", "a@1"),
        ("refused", "b@1"),
        ("refused", "c@1"),
    ]


def test_commands_record_new_versions_in_an_adapter_directory(tmp_path: Path) -> None:
    adapter = build_adapter(Card("tax"), torch.zeros(1, 8))
    publish_adapter(adapter, tmp_path, "tune")
    assert AdapterChangeLog.find(tmp_path) is None  # The folder is no adapter directory.

    log = AdapterChangeLog(tmp_path)
    log.create_folder()
    (tmp_path / "acme").mkdir()
    publish_adapter(adapter, tmp_path, "tune")
    publish_adapter(adapter, tmp_path / "acme", "adapters import")

    assert columns(log, "status", "action", "adapter", "version", "owner", "method") == [
        ("done", "upload", "tax", 2, "", "tune"),
        ("done", "upload", "tax", 1, "acme", "adapters import"),
    ]
    (record, _) = log.read()
    assert record["user"] and record["protocol"] == "command" and record["digest"] == adapter.digest


def test_commands_refuse_to_publish_without_a_record(tmp_path: Path) -> None:
    adapter = build_adapter(Card("tax"), torch.zeros(1, 8))
    AdapterChangeLog(tmp_path).create_folder()
    (tmp_path / FOLDER).chmod(0o500)
    with plain_user():
        for call in (
            lambda: publish_adapter(adapter, tmp_path, "tune"),
            lambda: check_publish_directory(tmp_path),
        ):
            with pytest.raises(AdapterError, match=r"change log .* cannot be written \(Permission"):
                call()
    (tmp_path / FOLDER).chmod(0o700)
    assert not list(tmp_path.glob("*.safetensors"))
