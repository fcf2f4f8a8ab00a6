"""Regression comparison: the pair of checkouts, and a row for each result that is compared.

A result is a named sequence of bytes. Rows state whether both checkouts have the same bytes, and
otherwise the first differing byte.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.harness.checkouts import Checkout

SHOWN_CHARACTERS = 80

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
    position = next((i for i in range(common) if this[i] != other[i]), common)
    lengths = "" if len(this) == len(other) else f", {len(this):,} and {len(other):,} bytes"
    begin = max(0, position - SHOWN_CHARACTERS // 2)
    this_text, other_text = (repr(part[begin : begin + SHOWN_CHARACTERS]) for part in (this, other))
    return f"from byte {position:,} on{lengths}: this {this_text}, other {other_text}"


def read_tree(path: Path) -> Results:
    """Return the content of every file below a folder by relative path, or of a single file."""
    if path.is_file():
        return {path.name: path.read_bytes()}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


class CheckoutPair:
    """The two checkouts with a working folder for each; `log` prints a line of progress."""

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
        """Return the training records, which are written once for both checkouts."""
        if self._records is None:
            arguments = ["examples.demo.tasks", "--task", "mood", "--count", "24"]
            self._records = self.folder / "records.jsonl"
            self._records.write_text(self.this.command(arguments, self.folder))
        return self._records
