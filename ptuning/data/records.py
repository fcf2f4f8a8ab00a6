"""Records of any file: JSON lines, CSV, TSV or Parquet, one at a time, each with its place.

The file's ending says what it is. A record is values by names; what is wrong with one is a sentence
with its line, or its row. Nothing but one record is held. Knows no template: whether a value is a
text, and which are needed, is for others to say.
"""

import csv
import json
import os
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from gpt.errors import ConfigError
from gpt.settings import shown

LINE_BYTES_MAX = 16 << 20
BOM = b"\xef\xbb\xbf"  # Some programs begin UTF-8 with it.
PROGRESS_RECORDS = 1000  # Between two reports.
ROWS = 1024  # Of Parquet that become objects at once.

# Records that were read and used, and about how many there are, if that can be told.
Reading = Callable[[int, int | None], None]


class Record(NamedTuple):
    place: str  # In its file: "line 3" or "row 3", from 1. It is the first of several lines.
    values: Mapping[str, object]


class Source(Protocol):
    def records(self) -> Iterator[Record]: ...

    def total(self, count: int) -> int | None:
        """How many there are, when `count` were read."""
        ...


def read_records(
    path: Path, wanted: Container[str], progress: Reading | None = None
) -> Iterator[Record]:
    """All of a file; of what is not wanted, the values may be None."""
    count = 0
    try:
        with path.open("rb") as file:
            source = _source(path, file, wanted)
            for count, record in enumerate(source.records(), 1):
                yield record
                if progress is not None and count % PROGRESS_RECORDS == 0:
                    progress(count, source.total(count))
    except OSError as error:
        raise ConfigError(
            f"the records in {path} cannot be read ({error.strerror or error}); give the path of a "
            "jsonl, CSV, TSV or Parquet file"
        ) from None
    if progress is not None:
        progress(count, count)


def _source(path: Path, file: BinaryIO, wanted: Container[str]) -> Source:
    match path.suffix.lower():
        case ".csv":
            return _Table(path, file, ",")
        case ".tsv":
            return _Table(path, file, "\t")
        case ".parquet":
            return _Parquet(path, file, wanted)
    return _JsonLines(path, file)


class _Lines:
    """A file's lines as text, and how far they were read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self._bytes, self._read = os.fstat(file.fileno()).st_size, 0
        self.number = 0  # Of the last one.

    def lines(self) -> Iterator[str]:
        for raw in iter(lambda: self._file.readline(LINE_BYTES_MAX + 1), b""):
            self.number += 1
            self._read += len(raw)
            where = f"{self.path} line {self.number}"
            if len(raw) > LINE_BYTES_MAX:
                raise ConfigError(
                    f"{where}: over {LINE_BYTES_MAX >> 20} MiB; each record must be a line of its "
                    "own, and shorter"
                )
            try:
                text = (raw.removeprefix(BOM) if self.number == 1 else raw).decode()
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{where}: byte {error.start + 1} is 0x{raw[error.start]:02x}, which is no "
                    "UTF-8; save the file as UTF-8 text, unpacked"
                ) from None
            yield text

    def total(self, count: int) -> int | None:
        return max(count, count * self._bytes // self._read) if self._read else None


class _JsonLines(_Lines):
    """An object on each line; empty lines are none."""

    def records(self) -> Iterator[Record]:
        for text in self.lines():
            if text.strip():
                place = f"line {self.number}"
                yield Record(place, _object(text, f"{self.path} {place}"))


def _object(text: str, where: str) -> dict[str, object]:
    try:
        record = json.loads(text)
    except ValueError as error:
        said = str(error)
        if isinstance(error, json.JSONDecodeError):  # Its own line is always the first.
            said = f"{error.msg} at character {error.pos + 1}"
        raise ConfigError(f"{where}: not JSON ({said}); each line must be one object") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply; each line must be one object") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a {type(record).__name__}; each line must be one object")
    return record


class _Table(_Lines):
    """Rows under a header; quotes hold separators and ends of lines, and a quote is two."""

    def __init__(self, path: Path, file: BinaryIO, separator: str) -> None:
        super().__init__(path, file)
        self._separator = separator

    def records(self) -> Iterator[Record]:
        header: list[str] = []
        for place, row in self._rows():
            where = f"{self.path} {place}"
            if not header:
                header = row
                twice = next((name for name in header if header.count(name) > 1), None)
                if twice is not None:
                    raise ConfigError(f"{where}: two columns are named {shown(twice)}; rename one")
            elif len(row) != len(header):
                raise ConfigError(
                    f"{where}: {len(row)} columns, and the header has {len(header)}; put quotes "
                    "around a field that has separators in it"
                )
            else:
                yield Record(place, dict(zip(header, row, strict=True)))

    def _rows(self) -> Iterator[tuple[str, list[str]]]:
        csv.field_size_limit(LINE_BYTES_MAX)  # Python's own is 128 KiB, for the whole process.
        rows = csv.reader(self.lines(), delimiter=self._separator, strict=True)
        while True:
            # A row may be several lines, and no line is read before its row.
            place = f"line {self.number + 1}"
            try:
                row = next(rows, None)
            except csv.Error as error:
                raise ConfigError(
                    f"{self.path} {place}: not a row ({error}); end each quoted field with a "
                    "quote, and write a quote inside it twice"
                ) from None
            if row is None:
                return
            if row:
                yield place, row


class _Parquet:
    """Rows of columns; only the wanted ones become objects."""

    def __init__(self, path: Path, file: BinaryIO, wanted: Container[str]) -> None:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            raise ConfigError(
                f"{path} is Parquet, which takes pyarrow to read; install it: "
                "pip install 'preamble[parquet]'"
            ) from None
        self._path, self._wanted = path, wanted
        # What it raises of a broken file is any of these.
        self._errors = (ArrowException, OSError, ValueError)
        try:
            self._file = parquet.ParquetFile(file)
        except self._errors as error:
            raise self._broken(error) from None

    def records(self) -> Iterator[Record]:
        names = self._file.schema_arrow.names
        others: dict[str, object] = {name: None for name in names if name not in self._wanted}
        columns = [name for name in names if name in self._wanted]
        batches = self._file.iter_batches(batch_size=ROWS, columns=columns)
        number = 0
        with closing(self._file):
            while True:
                try:
                    batch = next(batches, None)
                    rows = [] if batch is None else batch.to_pylist()
                except self._errors as error:
                    raise self._broken(error, f" after row {number}") from None
                if batch is None:
                    return
                for number, row in enumerate(rows, number + 1):  # noqa: B020
                    yield Record(f"row {number}", {**others, **row})

    def total(self, count: int) -> int | None:
        return int(self._file.metadata.num_rows)

    def _broken(self, error: Exception, where: str = "") -> ConfigError:
        said = " ".join(str(error).split())[:100]
        return ConfigError(f"{self._path} is broken{where}, or no Parquet ({said}); write it again")
