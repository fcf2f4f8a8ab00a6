"""JSON lines logs: whole records in order, with several writers, rotation, kills and full disks."""

import errno
import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from gpt.files import file_locks
from gpt.files.json_lines_log import LINE_BYTES_MAX, JsonLinesLog
from tests.support.full_disk import full_disk
from tests.support.ready_programs import ready_program
from tests.support.servers import WAIT_S, eventually, suspended

HOSTILE_TEXTS = ["a\nb", "\r\n", "\0\x1b[2J", "\u2028\x85", '"}', "\ud800", "é" * 300, ""]
# Arguments: path, name of the writer, records of an append, appends (0: until it is killed).
WRITER = """
import sys
from pathlib import Path
from gpt.files.json_lines_log import JsonLinesLog
path, name, records, appends = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
log = JsonLinesLog(path, 2_000, 1_000)
print("ready", flush=True)
sys.stdin.readline()
number = 0
while number < appends or not appends:
    log.append([{"writer": name, "number": number, "pad": "x" * 50}] * records)
    number += 1
    if not appends:
        print(number, flush=True)
"""


def numbered(log: JsonLinesLog) -> list[int]:
    return [record["number"] for record in log.read()]


def test_records_are_lines_of_ascii_text_and_are_read_in_order(tmp_path: Path) -> None:
    log = JsonLinesLog(tmp_path / "x.jsonl", 1 << 20, 3)
    assert list(log.read()) == []

    log.append([{"text": text} for text in HOSTILE_TEXTS[:4]])
    log.append([])
    log.append([{"text": text} for text in HOSTILE_TEXTS[4:]])

    assert [record["text"] for record in log.read()] == HOSTILE_TEXTS
    content = log.path.read_bytes()
    assert len(content.splitlines()) == content.count(b"\n") == len(HOSTILE_TEXTS)
    assert all(byte == 10 or 32 <= byte < 127 for byte in content)
    assert log.path.stat().st_mode & 0o007 == 0


def test_rotation_keeps_the_newest_files_in_order(tmp_path: Path) -> None:
    log = JsonLinesLog(tmp_path / "x.jsonl", 30, 4)  # Two records in each file.
    (tmp_path / "x.jsonl.old").touch()
    deleted = [log.append([{"number": number}]) for number in range(20)]

    assert numbered(log) == list(range(12, 20))
    assert sum(deleted) == 6
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"x.jsonl", *(f"x.jsonl.{n}" for n in (1, 2, 3)), "x.jsonl.lock", "x.jsonl.old"}
    # With a smaller setting, the surplus files are deleted.
    smaller_log = JsonLinesLog(log.path, 30, 1)
    assert smaller_log.append([{"number": 20}]) == 4
    assert numbered(log) == [20]


def test_an_append_larger_than_a_file_is_written_whole(tmp_path: Path) -> None:
    log = JsonLinesLog(tmp_path / "x.jsonl", 30, 2)
    log.append([{"number": 0}])
    log.append([{"number": number} for number in range(1, 50)])
    assert numbered(log) == list(range(50))


def test_a_rotation_that_was_killed_loses_no_file(tmp_path: Path) -> None:
    log = JsonLinesLog(tmp_path / "x.jsonl", 12, 5)  # One record in each file.
    for number in range(4):
        log.append([{"number": number}])
    os.replace(tmp_path / "x.jsonl.1", tmp_path / "free")  # As between two renames.
    os.replace(tmp_path / "x.jsonl", tmp_path / "x.jsonl.1")
    os.replace(tmp_path / "x.jsonl.3", tmp_path / "x.jsonl.4")
    assert numbered(log) == [0, 1, 3]
    for number in range(4, 7):
        log.append([{"number": number}])
    assert numbered(log) == [1, 3, 4, 5, 6][-5:]


@pytest.mark.parametrize("rest", [b'{"number": 7', b'{"number": 7}', b"x" * 200_000, b"\0\0"])
def test_incomplete_lines_are_skipped_and_then_removed(tmp_path: Path, rest: bytes) -> None:
    log = JsonLinesLog(tmp_path / "x.jsonl", 1 << 20, 2)
    for lines in (b"", b'{"number":0}\n'):
        log.path.write_bytes(lines + rest)
        assert numbered(log) == [0] * bool(lines)
        log.append([{"number": 1}])
        assert log.path.read_bytes() == lines + b'{"number":1}\n'


def test_damaged_lines_do_not_hide_the_others(tmp_path: Path) -> None:
    log = JsonLinesLog(tmp_path / "x.jsonl", 1 << 30, 2)
    log.append([{"number": 0}])
    damaged = [b"", b"[1]", b"7", b"\xff\xfe", b"[" * 50_000, b"x" * (3 * LINE_BYTES_MAX)]
    damaged += [b'{"number": 9, "pad": "' + b"x" * LINE_BYTES_MAX + b'"}']
    with log.path.open("ab") as file:
        file.write(b"\n".join(damaged) + b"\n")
    log.append([{"number": 1}])
    assert numbered(log) == [0, 1]


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    log = JsonLinesLog(tmp_path / "x.jsonl", 1 << 20, 2)
    log.append([{"number": 0}])
    content = log.path.read_bytes()
    with full_disk(len(content) + 5), pytest.raises(OSError, match="File too large"):
        log.append([{"number": 1}])
    assert log.path.read_bytes() == content
    log.append([{"number": 2}])
    assert numbered(log) == [0, 2]


def test_other_kinds_of_files_are_refused_at_once(tmp_path: Path) -> None:
    log = JsonLinesLog(tmp_path / "x.jsonl", 1 << 20, 2)
    os.mkfifo(log.path)
    with pytest.raises(OSError, match="not a regular file"):
        log.append([{"number": 0}])
    with pytest.raises(OSError, match="not a regular file"):
        list(log.read())
    log.path.unlink()
    log.path.mkdir()
    with pytest.raises(IsADirectoryError):
        log.append([{"number": 0}])


@pytest.mark.parametrize("error_number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_systems_without_locks_have_logs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(error_number, os.strerror(error_number))

    monkeypatch.setattr(fcntl, "flock", fail)
    log = JsonLinesLog(tmp_path / "x.jsonl", 30, 3)
    for number in range(5):
        log.append([{"number": number}])
    assert numbered(log) == list(range(5))


def test_a_reader_sees_the_files_as_they_were(tmp_path: Path) -> None:
    log = JsonLinesLog(tmp_path / "x.jsonl", 30, 3)
    for number in range(5):
        log.append([{"number": number}])
    records = log.read()
    assert next(records)["number"] == 0
    for number in range(5, 30):
        log.append([{"number": number}])
    assert [record["number"] for record in records][:4] == [1, 2, 3, 4]


def test_writers_of_several_processes_do_not_mix_lines(tmp_path: Path) -> None:
    log = JsonLinesLog(tmp_path / "x.jsonl", 2_000, 1_000)
    with (
        ready_program(WRITER, log.path, "a", 3, 40) as first,
        ready_program(WRITER, log.path, "b", 3, 40) as second,
    ):
        for process in (first, second):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in (first, second):
            assert process.wait(WAIT_S) == 0
    records = list(log.read())
    for name in "ab":
        numbers = [record["number"] for record in records if record["writer"] == name]
        assert numbers == [number for number in range(40) for _ in range(3)]
    # The records of an append are adjacent.
    assert all(
        len({(record["writer"], record["number"]) for record in records[start : start + 3]}) == 1
        for start in range(0, len(records), 3)
    )


@pytest.mark.slow
def test_a_killed_writer_loses_at_most_its_last_append(tmp_path: Path) -> None:
    log = JsonLinesLog(tmp_path / "x.jsonl", 2_000, 1_000)
    for delay_s in (0.0, 0.001, 0.003, 0.01, 0.03):
        appended_before = len(list(log.read()))
        with ready_program(WRITER, log.path, "a", 5, 0) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()
            time.sleep(delay_s)
            process.kill()
            reported = 1 + len(process.stdout.read().split())
        records = len(list(log.read())) - appended_before
        assert 5 * reported <= records <= 5 * (reported + 1)
        log.append([])
        lines = b"".join(path.read_bytes() for path in tmp_path.glob("x.jsonl*")).splitlines()
        assert all(isinstance(json.loads(line), dict) for line in lines)


@pytest.mark.slow
def test_a_stopped_writer_delays_others_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = JsonLinesLog(tmp_path / "x.jsonl", 1 << 20, 2)
    log.append([{"number": 0}])
    monkeypatch.setattr(file_locks, "LOCK_S", 0.2)
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('ready', flush=True); time.sleep(600)"
    )
    with (
        ready_program(code, tmp_path / "x.jsonl.lock") as process,
        suspended(process.pid),
    ):
        with pytest.raises(TimeoutError, match="another process holds the lock"):
            log.append([{"number": 1}])
        assert numbered(log) == [0]
    eventually(lambda: log.append([{"number": 2}]) == 0)
    assert numbered(log) == [0, 2]
