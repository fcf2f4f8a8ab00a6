"""Record readers: records of every file format, and an error message for each broken file."""

import json
import os
import sys
from pathlib import Path

import pytest

from gpt.errors import ConfigError
from ptuning.data import records
from ptuning.data.records import PROGRESS_RECORDS, Record, read_records

ROWS = [
    {"prompt": 'one, "two"\nthree', "completion": "4"},
    {"prompt": "", "completion": " пять\t六 "},
]
FIELDS = {"prompt", "completion"}


def read(path: Path, content: bytes | str = b"") -> list[Record]:
    if content:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_records(path, FIELDS))


def quoted(row: dict[str, str], separator: str) -> str:
    return separator.join('"' + value.replace('"', '""') + '"' for value in row.values())


def write_parquet(path: Path, columns: dict[str, list[object]], rows: int = 2) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=rows)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "JSON", "txt", "csv", "TSV", "parquet"])
def test_every_file_format_gives_the_same_records(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"records.{kind}"
    if kind == "parquet":
        write_parquet(path, {name: [row[name] for row in ROWS] for name in ROWS[0]})
    elif kind.lower() in ("csv", "tsv"):
        separator = "," if kind == "csv" else "\t"
        rows = [dict(zip(ROWS[0], ROWS[0], strict=True)), *ROWS]
        path.write_text("\r\n".join(quoted(row, separator) for row in rows), newline="")
    else:
        path.write_text("\n".join(json.dumps(row) for row in ROWS))
    assert [record.values for record in read(path)] == ROWS


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_byte_order_mark_is_ignored(kind: str, tmp_path: Path) -> None:
    text = {"jsonl": '{"a": "ß"}', "csv": '"a"\nß'}[kind]
    records = read(tmp_path / f"x.{kind}", b"\xef\xbb\xbf" + text.encode())
    assert records[0].values == {"a": "ß"}


def test_locations_are_right_after_empty_and_multi_line_rows(tmp_path: Path) -> None:
    lines = read(tmp_path / "x.jsonl", '\n{"a": "1"}\r\n  \n{"a": "2"}')
    assert [record.location for record in lines] == ["line 2", "line 4"]
    rows = read(tmp_path / "x.csv", 'a,b\n"1\n2",3\n\n4,"\n\n5"\n6,7\n')
    assert [record.location for record in rows] == ["line 2", "line 5", "line 8"]
    assert [record.values["a"] for record in rows] == ["1\n2", "4", "6"]
    path = write_parquet(tmp_path / "x.parquet", {"prompt": list("abcde")})
    assert [record.location for record in read(path)] == [f"row {n}" for n in range(1, 6)]


def test_number_is_a_text_in_csv_and_a_number_elsewhere(tmp_path: Path) -> None:
    assert read(tmp_path / "x.csv", "a,b\n1,2.50")[0].values == {"a": "1", "b": "2.50"}
    assert read(tmp_path / "x.jsonl", '{"a": 1}')[0].values == {"a": 1}
    path = write_parquet(tmp_path / "x.parquet", {"prompt": [1], "other": [[1.5]]})
    # The name of an unused column is known, but its values are not read.
    assert read(path)[0].values == {"prompt": 1, "other": None}


BROKEN_RECORDS: dict[str, tuple[str, bytes, str]] = {
    "no JSON": (
        "jsonl",
        b'{"a": "1"}\n{"a": ',
        "x.jsonl line 2: the line is not JSON (Expecting value at chara",
    ),
    "half a JSON": ("jsonl", b'{"a": "1"', "line 1: the line is not JSON"),
    "a number of many digits": (
        "jsonl",
        b'{"a": ' + b"9" * 5000 + b"}",
        "line 1: the line is not JSON (a number has too many digits)",
    ),
    "a field twice": (
        "jsonl",
        b'{"a": "1", "\\u0061": "2"}',
        "line 1: two fields are named 'a'; keep",
    ),
    "a NUL byte": ("csv", b"a,b\n1,2\n3,\x004\n", "line 3: byte 3 is 0x00, which is not UTF-8"),
    "UTF-16 without a BOM": ("jsonl", '{"a": "1"}'.encode("utf-16-be"), "line 1: byte 1 is 0x00"),
    "a list": (
        "jsonl",
        b'[{"a": "1"}]',
        "line 1: the JSON is of the type list; each line must be one JSON object",
    ),
    "a text": (
        "jsonl",
        b'"a"',
        "line 1: the JSON is of the type str; each line must be one JSON object",
    ),
    "deep": ("jsonl", b"[" * 10**5, "line 1: the JSON is nested too deeply"),
    "Latin-1": ("jsonl", b'{"a": "1"}\n{"a": "\xfc"}', "byte 8 is 0xfc, which is not UTF-8"),
    "Latin-1 after a BOM": (
        "jsonl",
        b'\xef\xbb\xbf{"a": "\xfc"}',
        "line 1: byte 11 is 0xfc, which is not UTF-8",
    ),
    "UTF-16": ("csv", "a,b".encode("utf-16"), "line 1: byte 1 is 0xff, which is not UTF-8"),
    "packed": ("jsonl", b"\x1f\x8b\x08\x00", "byte 2 is 0x8b, which is not UTF-8 text; save"),
    "a column too many": (
        "csv",
        b"a,b\n1,2\n1,2,3",
        "line 3: the row has 3 columns, but the header has 2",
    ),
    "a column too few": (
        "tsv",
        b"a\tb\n1\n",
        "line 2: the row has 1 columns, but the header has 2",
    ),
    "an open quote": (
        "csv",
        b'a,b\n1,2\n"3,4\n5,6\n',
        "line 3: the row cannot be parsed (unexpected end of data)",
    ),
    "a quote inside": ("csv", b'a,b\n"1"2,3', "line 2: the row cannot be parsed"),
    "two names": ("csv", b"a,b,a\n", "line 1: two columns are named 'a'; rename one"),
    "no Parquet": ("parquet", b"PAR1", "x.parquet is broken or is not a Parquet file"),
}


@pytest.mark.parametrize("case", BROKEN_RECORDS)
def test_broken_record_is_an_error_with_its_line(case: str, tmp_path: Path) -> None:
    kind, content, message_words = BROKEN_RECORDS[case]
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / f"x.{kind}", content)
    assert message_words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value).replace(str(tmp_path), "")) < 300


def test_overlong_line_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    with path.open("wb") as file:
        file.truncate(1 << 26)
    with pytest.raises(ConfigError, match="the line is over 16 MiB; each record must"):
        read(path)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_unreadable_file_is_an_error(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\); give"):
        read(tmp_path / f"x.{kind}")
    folder = tmp_path / f"y.{kind}"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        read(folder)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_fifo_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"cannot be read \(not a regular file\); give"):
        read(path)


def test_many_columns_are_compared_in_linear_time(tmp_path: Path) -> None:
    names = ",".join(f"c{number}" for number in range(200_000))
    assert len(read(tmp_path / "x.csv", f"{names}\n{names}\n")[0].values) == 200_000


def test_parquet_columns_of_the_same_name_are_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = [pyarrow.array([text]) for text in "abc"]
    table = pyarrow.table(columns, names=["prompt", "prompt", "completion"])
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match=r"x\.parquet: two columns are named 'prompt'; rename"):
        read(tmp_path / "x.parquet")


def test_damaged_parquet_file_is_an_error_at_any_position(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "x.parquet", {"prompt": list("abcdefgh"), "completion": [""] * 8}
    )
    content = path.read_bytes()
    refusals = 0
    for offset in range(0, len(content), 23):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 0xFF]) + content[offset + 1 :])
        try:
            assert len(read(path)) <= 8
        except ConfigError:
            refusals += 1
    assert refusals > 5


def test_missing_pyarrow_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"prompt": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"install it: pip install 'preamble\[parquet\]'"):
        read(path)


def test_files_are_streamed(tmp_path: Path) -> None:
    for kind, begin in (("jsonl", '{"a": "1"}\n'), ("csv", "a\n1\n")):
        path = tmp_path / f"x.{kind}"
        path.write_text(begin + "}\n{" * 10)
        first_record = next(read_records(path, FIELDS))
        assert first_record.values == {"a": "1"}


def test_progress_reports_the_count_and_estimated_total(tmp_path: Path) -> None:
    count = 3 * PROGRESS_RECORDS + 500
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": "1"}\n' * count)
    reports: list[tuple[int, int | None]] = []
    for _ in read_records(path, FIELDS, lambda *numbers: reports.append(numbers)):
        pass
    step = PROGRESS_RECORDS
    assert reports == [(step, count), (2 * step, count), (3 * step, count), (count, count)]
    reports.clear()
    count = 16 * records.PARQUET_BATCH_ROWS + 1
    assert step < count < 2 * step
    parquet = write_parquet(tmp_path / "x.parquet", {"prompt": ["a"] * count}, 500)
    rows = list(read_records(parquet, FIELDS, lambda *numbers: reports.append(numbers)))
    assert [row.location for row in rows[-2:]] == [f"row {count - 1}", f"row {count}"]
    assert reports == [(step, count), (count, count)]
