"""candidates.csv: all that is known of each candidate, out and in again.

Settings stand between the first three columns and `source`, figures between `note` and `reason`, so
a file tells by itself what is which, and one that was sorted or cut by hand is read as well.
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
from gpt.settings import nearest, shown
from planning.memory_ledger import Ledger
from planning.plan import Cell, Row, Source, Standing, Trust

BYTES_MAX = 256 << 20  # Of a file that is read; a plan has some megabytes.
LEAST = 1e-100  # Of a number; such as are smaller, or larger than its inverse, are mistakes.
FIRST = ("name", "standing", "group")
MIDDLE = ("source", "error", "note")
LAST = ("reason",)
MEASURED, LEDGER = "measured_", "ledger_"
FORMULAS = ("=", "+", "@", "\t", "\r")  # A text that begins so is a formula to a spreadsheet.


def table(rows: Sequence[Row], columns_of: Sequence[Row] = ()) -> str:
    """As CSV; the columns are those of all candidates, also where few of them are told."""
    known = columns_of or rows
    settings = list(dict.fromkeys(name for row in known for name in row.settings))
    figures = list(dict.fromkeys(name for row in known for name in row.figures))
    measured = list(dict.fromkeys(name for row in known for name in row.measured))
    held = [one.name for one in fields(Ledger)] if any(row.memory for row in known) else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            *(*FIRST, *settings, *MIDDLE, *figures),
            *(f"{MEASURED}{name}" for name in measured),
            *(f"{LEDGER}{name}_bytes" for name in held),
            *LAST,
        ]
    )
    for row in rows:
        trust = row.trust
        writer.writerow(
            [
                *map(_text, (row.name, row.standing, row.group)),
                *(_text(row.settings.get(name)) for name in settings),
                *map(_text, (trust.source, trust.error, trust.note) if trust else ("", "", "")),
                *(_text(row.figures.get(name)) for name in figures),
                *(_text(row.measured.get(name)) for name in measured),
                *(_text(getattr(row.memory, name, None)) for name in held),
                _text(row.reason),
            ]
        )
    return text.getvalue()


def _text(value: Cell | None) -> str:
    """Seven digits of a number are more than any of them is worth."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        whole = math.isfinite(value) and value == int(value) and abs(value) < 1e15
        return f"{value:.0f}" if whole else f"{value:.7g}"
    return f"'{value}" if str(value).startswith(FORMULAS) else str(value)


def read_rows(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:
            content = file.read(BYTES_MAX + 1)  # A device has no size, and no end.
        if len(content) > BYTES_MAX:
            raise ConfigError(f"{path} is over {BYTES_MAX >> 20} MiB; that is no plan's")
        lines = list(csv.reader(io.StringIO(content.decode(), newline="")))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; give a plan's candidates.csv, or its folder"
        ) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not CSV: {error}") from None
    head = lines[0] if lines else []
    lost = [name for name in (*FIRST, *MIDDLE, *LAST) if name not in head]
    if lost or len(set(head)) < len(head):
        what = f"lacks the column {lost[0]!r}" if lost else "has a column twice"
        raise ConfigError(f"{path} {what}; give the candidates.csv of a plan")
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(head):
            raise ConfigError(f"{path}:{number} has {len(line)} cells, its header {len(head)}")
        try:
            yield _row(dict(zip(head, line, strict=True)), head)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None


def _row(cells: Mapping[str, str], head: Sequence[str]) -> Row:
    standing = cells["standing"]
    if standing not in get_args(Standing):
        raise ValueError(f"standing is {shown(standing)}; {nearest(standing, get_args(Standing))}")
    middle, end = head.index(MIDDLE[0]), head.index(LAST[0])
    settings = [name for name in head[: head.index(MIDDLE[0])] if name not in FIRST]
    numbers = [name for name in head[middle:end] if name not in MIDDLE and cells[name]]
    held = {name: _number(name, cells[name]) for name in numbers}
    source = cells["source"]
    if source and source not in get_args(Source):
        raise ValueError(f"source is {shown(source)}; {nearest(source, get_args(Source))}")
    error = _number("error", cells["error"] or "0")
    if not 0 <= error < math.inf:
        raise ValueError(f"error is {error:g}; it must be a share, 0 or more")
    memory = {
        name.removeprefix(LEDGER).removesuffix("_bytes"): _whole(name, value)
        for name, value in held.items()
        if name.startswith(LEDGER)
    }
    return Row(
        _read(cells["name"]),
        standing,  # type: ignore[arg-type]
        {name: _cell(cells[name]) for name in settings if cells[name]},
        {name: v for name, v in held.items() if not name.startswith((MEASURED, LEDGER))},
        {name.removeprefix(MEASURED): v for name, v in held.items() if name.startswith(MEASURED)},
        _read(cells["reason"]),
        Trust(source, error, _read(cells["note"])) if source else None,  # type: ignore[arg-type]
        _read(cells["group"]),
        _ledger(memory),
    )


def _ledger(memory: Mapping[str, int]) -> Ledger | None:
    known = {one.name for one in fields(Ledger)}
    if memory.get("capacity", 0) <= 0:
        return None
    return Ledger(**{name: value for name, value in memory.items() if name in known})


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} is {shown(text)}; it must be a number") from None
    if value and math.isfinite(value) and not LEAST <= abs(value) <= 1 / LEAST:
        raise ValueError(f"{name} is {value:g}, which no picture shows; write 0 or leave it out")
    return value


def _whole(name: str, value: float) -> int:
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value:g}; it must be a number of bytes")
    return int(value)


def _cell(text: str) -> Cell:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return _read(text)


def _read(text: str) -> str:
    """Without the mark that kept a spreadsheet from computing it."""
    return text[1:] if text[:1] == "'" and text[1:].startswith(FORMULAS) else text
