"""Regression comparison: the pair of checkouts, and a row for each result that is compared.

A result is a named sequence of bytes. A row states whether both checkouts have the same bytes; if
not, it describes the first difference.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.harness.checkouts import Checkout

SHOWN_BYTES = 80  # Bytes of each result in the description of a difference.

# Results of one checkout by name.
Results = Mapping[str, bytes]


@dataclass(frozen=True)
class ComparedRow:
    """One result of both checkouts."""

    part: str
    name: str
    difference: str = ""  # Empty: equal.

    @property
    def equal(self) -> bool:
        return not self.difference


def compare(part: str, this: Results, other: Results) -> list[ComparedRow]:
    """Return a row for each result that at least one checkout has."""
    rows = []
    for name in sorted(this.keys() | other.keys()):
        if name not in other:
            rows.append(ComparedRow(part, name, "only in this checkout"))
        elif name not in this:
            rows.append(ComparedRow(part, name, "only in the other checkout"))
        else:
            rows.append(ComparedRow(part, name, first_difference(this[name], other[name])))
    return rows


def first_difference(this: bytes, other: bytes) -> str:
    """Describe the first difference of two results in one line; empty if they are equal."""
    if this == other:
        return ""
    common = min(len(this), len(other))
    position = next((index for index in range(common) if this[index] != other[index]), common)
    lengths = "" if len(this) == len(other) else f", {len(this):,} and {len(other):,} bytes"
    begin = max(0, position - SHOWN_BYTES // 2)
    this_text = repr(this[begin : begin + SHOWN_BYTES])
    other_text = repr(other[begin : begin + SHOWN_BYTES])
    return f"from byte {position:,} on{lengths}: this {this_text}, other {other_text}"


def read_tree(path: Path) -> Results:
    """Return the content of a file by its name, or of all files in a folder by relative path."""
    if path.is_file():
        return {path.name: path.read_bytes()}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


class CheckoutPair:
    """Two checkouts, each with a working folder; `log` prints a line of progress."""

    def __init__(
        self, this: Checkout, other: Checkout, folder: Path, log: Callable[[str], None]
    ) -> None:
        self.this = this
        self.other = other
        self.folder = folder
        self.log = log
        self.model = this.root / "examples" / "demo" / "checkpoint"
        self._records: Path | None = None

    def folder_of(self, checkout: Checkout) -> Path:
        folder = self.folder / checkout.name
        folder.mkdir(exist_ok=True)
        return folder

    def run(self, measure: Callable[[Checkout], Results]) -> tuple[Results, Results]:
        """Run `measure` for both checkouts in parallel; return the results (this, other)."""
        with ThreadPoolExecutor(2) as pool:
            this, other = pool.map(measure, (self.this, self.other))
        return this, other

    def records(self) -> Path:
        """Return the file of training records, which is written once for both checkouts."""
        if self._records is None:
            arguments = ["examples.demo.tasks", "--task", "mood", "--count", "24"]
            self._records = self.folder / "records.jsonl"
            self._records.write_text(self.this.command(arguments, self.folder))
        return self._records
