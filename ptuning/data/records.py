"""Record readers: JSON lines, CSV, TSV or Parquet, one record at a time with its line or row.

The file's extension selects the format. A record is a mapping from field names to values; an error
names the line or row of the record. Files are streamed, not loaded as a whole. The readers do not
use the prompt template; `dataset` checks that the required fields exist and are texts.
"""

import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from gpt.errors import ConfigError
from gpt.files.regular_files import open_regular_file
from gpt.settings import short_repr

LINE_BYTES_MAX = 16 << 20
BOM = b"\xef\xbb\xbf"  # Byte order mark that some programs write at the start of UTF-8 files.
PROGRESS_RECORDS = 1000  # Records between two calls of the progress callback.
# Parquet rows that are in memory at once. A small file may have rows of many megabytes.
PARQUET_BATCH_ROWS = 64

# Called with the number of records read so far and the estimated total, if it is known.
ProgressCallback = Callable[[int, int | None], None]


class Record(NamedTuple):
    """The field values of one record and its location in the file."""

    # "line 3" or "row 3", counted from 1. If a record has several lines, this is its first line.
    location: str
    values: Mapping[str, object]


class RecordSource(Protocol):
    """Reader of one file format."""

    def records(self) -> Iterator[Record]: ...

    def total(self, count: int) -> int | None:
        """Return the estimated number of records in the file; None if no estimate is possible.

        `count` is the number of records read so far.
        """
        ...


def read_records(
    path: Path, field_names: Container[str], progress: ProgressCallback | None = None
) -> Iterator[Record]:
    """Yield all records of a file.

    A field that is not in `field_names` may have the value None, because the Parquet reader skips
    the columns of these fields.
    """
    count = 0
    try:
        # A FIFO would block until a program writes to it, perhaps forever.
        with open_regular_file(path) as file:
            source = _open_source(path, file, field_names)
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


def _open_source(path: Path, file: BinaryIO, field_names: Container[str]) -> RecordSource:
    match path.suffix.lower():
        case ".csv":
            return _DelimitedTable(path, file, ",")
        case ".tsv":
            return _DelimitedTable(path, file, "\t")
        case ".parquet":
            return _Parquet(path, file, field_names)
    return _JsonLines(path, file)


class _Lines:
    """Reads a file as lines of text and counts lines and bytes."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self._file_bytes = os.fstat(file.fileno()).st_size
        self._bytes_read = 0
        self.line_number = 0  # Number of the last line that was read.

    def lines(self) -> Iterator[str]:
        for raw in iter(lambda: self._file.readline(LINE_BYTES_MAX + 1), b""):
            self.line_number += 1
            self._bytes_read += len(raw)
            location = f"{self.path} line {self.line_number}"
            if len(raw) > LINE_BYTES_MAX:
                raise ConfigError(
                    f"{location}: the line is over {LINE_BYTES_MAX >> 20} MiB; "
                    "each record must be a separate line below this limit"
                )
            content = raw.removeprefix(BOM) if self.line_number == 1 else raw
            try:
                text = content.decode()
                position = content.find(b"\0")  # UTF-16 without a byte order mark has such bytes.
            except UnicodeDecodeError as error:
                position = error.start
            if position >= 0:
                raise ConfigError(
                    f"{location}: byte {len(raw) - len(content) + position + 1} is "
                    f"0x{content[position]:02x}, which is not UTF-8 text; save the file as "
                    "uncompressed UTF-8 text"
                )
            yield text

    def total(self, count: int) -> int | None:
        return (
            max(count, count * self._file_bytes // self._bytes_read) if self._bytes_read else None
        )


class _JsonLines(_Lines):
    """One JSON object per line; empty lines are ignored."""

    def records(self) -> Iterator[Record]:
        for text in self.lines():
            if text.strip():
                location = f"line {self.line_number}"
                yield Record(location, _parse_object(text, f"{self.path} {location}"))


class _JsonObject(dict[str, object]):
    """A JSON object with the name that occurs twice in it; None: each name occurs once."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        self.repeated_name: str | None = None
        if len(self) < len(pairs):
            self.repeated_name = Counter(name for name, _ in pairs).most_common(1)[0][0]


def _parse_object(text: str, location: str) -> dict[str, object]:
    try:
        record = json.loads(text, object_pairs_hook=_JsonObject)
    except ValueError as error:
        message = "a number has too many digits"
        if isinstance(error, json.JSONDecodeError):
            # str(error) contains a line number, which is always 1 here and would mislead.
            message = f"{error.msg} at character {error.pos + 1}"
        raise ConfigError(
            f"{location}: the line is not JSON ({message}); each line must be one JSON object"
        ) from None
    except RecursionError:
        raise ConfigError(
            f"{location}: the JSON is nested too deeply; each line must be one flat JSON object"
        ) from None
    if not isinstance(record, _JsonObject):
        raise ConfigError(
            f"{location}: the JSON is of the type {type(record).__name__}; each line must be one "
            "JSON object"
        )
    if record.repeated_name is not None:
        raise ConfigError(
            f"{location}: two fields are named {short_repr(record.repeated_name)}; keep one of them"
        )
    return record


def _check_columns(names: list[str], location: str) -> None:
    """Raise ConfigError if two columns have the same name."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(f"{location}: two columns are named {short_repr(name)}; rename one")


class _DelimitedTable(_Lines):
    """CSV or TSV rows under a header line.

    A quoted field may contain separators and line breaks; a quote inside it is doubled.
    """

    def __init__(self, path: Path, file: BinaryIO, separator: str) -> None:
        super().__init__(path, file)
        self._separator = separator

    def records(self) -> Iterator[Record]:
        header: list[str] = []
        for location, row in self._rows():
            file_location = f"{self.path} {location}"
            if not header:
                header = row
                _check_columns(header, file_location)
            elif len(row) != len(header):
                raise ConfigError(
                    f"{file_location}: the row has {len(row)} columns, but the header has "
                    f"{len(header)}; "
                    "quote fields that contain separators"
                )
            else:
                yield Record(location, dict(zip(header, row, strict=True)))

    def _rows(self) -> Iterator[tuple[str, list[str]]]:
        csv.field_size_limit(LINE_BYTES_MAX)  # A process-wide limit; Python's default is 128 KiB.
        rows = csv.reader(self.lines(), delimiter=self._separator, strict=True)
        while True:
            # The CSV reader has read only the lines of earlier rows, so the next line begins a row.
            location = f"line {self.line_number + 1}"
            try:
                row = next(rows, None)
            except csv.Error as error:
                raise ConfigError(
                    f"{self.path} {location}: the row cannot be parsed ({error}); close each "
                    "quoted field, and double the quotes inside it"
                ) from None
            if row is None:
                return
            if row:
                yield location, row


class _Parquet:
    """Parquet rows; only the columns in `field_names` are read."""

    def __init__(self, path: Path, file: BinaryIO, field_names: Container[str]) -> None:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            raise ConfigError(
                f"reading the Parquet file {path} needs pyarrow; install it: "
                "pip install 'preamble[parquet]'"
            ) from None
        self._path = path
        self._field_names = field_names
        # The exceptions that pyarrow raises for broken files.
        self._errors = (ArrowException, OSError, ValueError)
        try:
            self._file = parquet.ParquetFile(file)
        except self._errors as error:
            raise self._broken_file_error(error) from None

    def records(self) -> Iterator[Record]:
        names = self._file.schema_arrow.names
        _check_columns(names, str(self._path))
        # The names of all columns are needed for error messages about missing fields.
        unread_fields: dict[str, object] = {
            name: None for name in names if name not in self._field_names
        }
        columns = [name for name in names if name in self._field_names]
        batches = self._file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=columns)
        row_number = 0
        with closing(self._file):
            while True:
                try:
                    batch = next(batches, None)
                    rows = [] if batch is None else batch.to_pylist()
                except self._errors as error:
                    raise self._broken_file_error(error, f" after row {row_number}") from None
                if batch is None:
                    return
                for row_number, row in enumerate(rows, row_number + 1):  # noqa: B020
                    yield Record(f"row {row_number}", {**unread_fields, **row})

    def total(self, count: int) -> int | None:
        return int(self._file.metadata.num_rows)

    def _broken_file_error(self, error: Exception, position: str = "") -> ConfigError:
        message = " ".join(str(error).split())[:100]
        return ConfigError(
            f"{self._path} is broken{position} or is not a Parquet file ({message}); "
            "write the file again"
        )
