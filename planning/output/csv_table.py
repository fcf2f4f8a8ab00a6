"""CSV of candidates: writes every row with its figures, and reads candidates.csv back.

The header identifies the columns, so a file that a user has edited or sorted can be read:

- Columns between `group` and `source` are settings.
- Columns between `note` and `reason` are numbers: measured figures (`measured_*`), entries of the
  memory ledger in bytes (`ledger_*_bytes`), and predicted figures (all other names).
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import get_args

from gpt.errors import ConfigError
from gpt.settings import short_repr, suggest_nearest
from planning.memory_ledger import MemoryLedger
from planning.plan import Confidence, Feasibility, Row, SettingValue, Source

BYTES_MAX = 256 << 20  # Size limit of a file that is read; a plan has a few megabytes.
# A finite number other than 0 must have an absolute value from NUMBER_MIN to 1 / NUMBER_MIN.
NUMBER_MIN = 1e-100
FIRST_COLUMNS = ("name", "standing", "group")
MIDDLE_COLUMNS = ("source", "error", "note")
LAST_COLUMNS = ("reason",)
MEASURED_PREFIX, LEDGER_PREFIX = "measured_", "ledger_"
# A spreadsheet treats text with one of these first characters as a formula.
FORMULA_PREFIXES = ("=", "+", "@", "\t", "\r")


def format_csv(rows: Sequence[Row], column_rows: Sequence[Row] = ()) -> str:
    """Format rows as CSV; `column_rows` (default: `rows`) determine the columns."""
    rows_for_columns = column_rows or rows
    settings = list(dict.fromkeys(name for row in rows_for_columns for name in row.settings))
    figures = list(dict.fromkeys(name for row in rows_for_columns for name in row.figures))
    measured = list(dict.fromkeys(name for row in rows_for_columns for name in row.measured))
    ledger_fields = (
        [ledger_field.name for ledger_field in fields(MemoryLedger)]
        if any(row.memory for row in rows_for_columns)
        else []
    )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            *FIRST_COLUMNS,
            *settings,
            *MIDDLE_COLUMNS,
            *figures,
            *(f"{MEASURED_PREFIX}{name}" for name in measured),
            *(f"{LEDGER_PREFIX}{name}_bytes" for name in ledger_fields),
            *LAST_COLUMNS,
        ]
    )
    for row in rows:
        confidence = row.confidence
        confidence_values: Sequence[SettingValue] = ("", "", "")
        if confidence:
            confidence_values = (confidence.source, confidence.error, confidence.note)
        writer.writerow(
            [
                *map(_format_cell, (row.name, row.feasibility, row.group)),
                *(_format_cell(row.settings.get(name)) for name in settings),
                *map(_format_cell, confidence_values),
                *(_format_cell(row.figures.get(name)) for name in figures),
                *(_format_cell(row.measured.get(name)) for name in measured),
                *(_format_cell(getattr(row.memory, name, None)) for name in ledger_fields),
                _format_cell(row.reason),
            ]
        )
    return text.getvalue()


def _format_cell(value: SettingValue | None) -> str:
    """Format a cell; seven significant digits are more than the precision of any figure."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        is_integer = math.isfinite(value) and value == int(value) and abs(value) < 1e15
        return f"{value:.0f}" if is_integer else f"{value:.7g}"
    return f"'{value}" if str(value).startswith(FORMULA_PREFIXES) else str(value)


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a candidates.csv; an error names the file and the line."""
    try:
        with path.open("rb") as file:
            content = file.read(BYTES_MAX + 1)  # Bounded, since a device file may never end.
        if len(content) > BYTES_MAX:
            raise ConfigError(
                f"{path} is larger than {BYTES_MAX >> 20} MiB; give the candidates.csv of a plan"
            )
        lines = list(csv.reader(io.StringIO(content.decode(), newline="")))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; give a plan's candidates.csv, or its folder"
        ) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not CSV: {error}; give the candidates.csv of a plan"
        ) from None
    header = lines[0] if lines else []
    missing_columns = [
        name for name in (*FIRST_COLUMNS, *MIDDLE_COLUMNS, *LAST_COLUMNS) if name not in header
    ]
    if missing_columns or len(set(header)) < len(header):
        problem = (
            f"has no column {missing_columns[0]!r}" if missing_columns else "has a column twice"
        )
        raise ConfigError(f"{path} {problem}; give the candidates.csv of a plan")
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(header):
            raise ConfigError(
                f"{path}:{number} has {len(line)} cells, and the header has {len(header)}; "
                "write one cell for each column of the header"
            )
        try:
            yield _parse_row(dict(zip(header, line, strict=True)), header)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None


def _parse_row(cells: Mapping[str, str], header: Sequence[str]) -> Row:
    feasibility = cells["standing"]
    if feasibility not in get_args(Feasibility):
        raise ValueError(
            f"standing is {short_repr(feasibility)}; "
            f"{suggest_nearest(feasibility, get_args(Feasibility))}"
        )
    source_index, reason_index = header.index("source"), header.index("reason")
    settings = [name for name in header[:source_index] if name not in FIRST_COLUMNS]
    figures = [
        name
        for name in header[source_index:reason_index]
        if name not in MIDDLE_COLUMNS and cells[name]
    ]
    figure_values = {name: _parse_number(name, cells[name]) for name in figures}
    source = cells["source"]
    if source and source not in get_args(Source):
        raise ValueError(
            f"source is {short_repr(source)}; {suggest_nearest(source, get_args(Source))}"
        )
    error = _parse_number("error", cells["error"] or "0")
    if not 0 <= error < math.inf:
        raise ValueError(f"column error is {error:g}; it must be a finite number, at least 0")
    ledger_bytes = {
        name.removeprefix(LEDGER_PREFIX).removesuffix("_bytes"): _parse_bytes(name, number)
        for name, number in figure_values.items()
        if name.startswith(LEDGER_PREFIX)
    }
    return Row(
        _parse_text(cells["name"]),
        feasibility,  # type: ignore[arg-type]
        {name: _parse_setting(cells[name]) for name in settings if cells[name]},
        {
            name: number
            for name, number in figure_values.items()
            if not name.startswith((MEASURED_PREFIX, LEDGER_PREFIX))
        },
        {
            name.removeprefix(MEASURED_PREFIX): number
            for name, number in figure_values.items()
            if name.startswith(MEASURED_PREFIX)
        },
        _parse_text(cells["reason"]),
        Confidence(source, error, _parse_text(cells["note"])) if source else None,  # type: ignore[arg-type]
        _parse_text(cells["group"]),
        _parse_ledger(ledger_bytes),
    )


def _parse_ledger(ledger_bytes: Mapping[str, int]) -> MemoryLedger | None:
    """Return the memory ledger, or None if the row has no capacity above 0."""
    field_names = {ledger_field.name for ledger_field in fields(MemoryLedger)}
    if ledger_bytes.get("capacity", 0) <= 0:
        return None
    return MemoryLedger(
        **{name: number for name, number in ledger_bytes.items() if name in field_names}
    )


def _parse_number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} is {short_repr(text)}; it must be a number") from None
    if value and math.isfinite(value) and not NUMBER_MIN <= abs(value) <= 1 / NUMBER_MIN:
        raise ValueError(
            f"{name} is {value:g}, too small or too large; write 0 or leave the cell empty"
        )
    return value


def _parse_bytes(name: str, value: float) -> int:
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value:g}; it must be a finite number of bytes")
    return int(value)


def _parse_setting(text: str) -> SettingValue:
    for number_type in (int, float):
        with suppress(ValueError):
            return number_type(text)
    return _parse_text(text)


def _parse_text(text: str) -> str:
    """Remove the quote that `_format_cell` writes before a text that looks like a formula."""
    return text[1:] if text[:1] == "'" and text[1:].startswith(FORMULA_PREFIXES) else text
