"""`python -m bench.same_results OTHER_CHECKOUT`: regression check for equal results.

The command compares the answers to 200 mixed requests, the files of tuning runs and the files of
converted checkpoints. Both checkouts get the same inputs through interfaces that do not change
between releases. Exit codes: 0: no difference; 1: a difference; 2: the comparison failed.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.checkouts import Checkout, CheckoutError, this_checkout
from bench.regression.checkout_pair import CheckoutPair, ComparedRow
from bench.regression.conversion_results import compare_conversions
from bench.regression.request_results import compare_requests
from bench.regression.tuning_results import compare_tuning
from gpt.errors import PreambleError

# One thread per process: both checkouts run at the same time, and the number of threads changes how
# sums are rounded.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
PARTS = ("requests", "tuning", "conversions")
# Fields and files that are not compared, with the reason.
NOT_COMPARED: Mapping[str, str] = {
    "`id` of an HTTP answer": "random; it identifies the call in the log",
    "`created` of an HTTP answer": "the time of the call",
    "the messages of a stream": "tokens per message depend on timing; the joined text is compared",
    "the text of an error": "its wording may improve; status, code and field are compared",
    "`seconds` in metrics.csv": "a duration",
    "`created` in the card of an adapter": "the time of the run",
    "report.html of a run": "it shows durations; its figures are those of metrics.csv",
    "the order of an adapter's metadata": (
        "safetensors writes the keys in a random order; keys, values, headers and tensors are "
        "compared"
    ),
}


COMPARISONS: Mapping[str, Callable[[CheckoutPair], Iterator[ComparedRow]]] = {
    "requests": compare_requests,
    "tuning": compare_tuning,
    "conversions": compare_conversions,
}


def compare_checkouts(pair: CheckoutPair, parts: Sequence[str] = PARTS) -> list[ComparedRow]:
    rows: list[ComparedRow] = []
    for part in parts:
        rows += COMPARISONS[part](pair)
    return rows


def format_table(rows: Sequence[ComparedRow]) -> Iterator[str]:
    """Yield a line per part and a line per difference."""
    yield f"{'part':14}{'compared':>10}{'equal':>8}{'differing':>11}"
    for part in dict.fromkeys(row.part for row in rows):
        part_rows = [row for row in rows if row.part == part]
        equal = sum(row.equal for row in part_rows)
        yield f"{part:14}{len(part_rows):10}{equal:8}{len(part_rows) - equal:11}"
    for row in rows:
        if not row.equal:
            yield f"DIFFERS {row.part}: {row.name}: {row.difference}"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.same_results", description=str(__doc__).partition("\n\n")[0]
    )
    parser.add_argument(
        "other", metavar="OTHER_CHECKOUT", type=Path, help="root of the other checkout"
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="parts to compare (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    flags = make_parser().parse_args(argv)
    started = time.monotonic()

    def log(line: str) -> None:
        sys.stderr.write(f"{time.monotonic() - started:5.0f} s  {line}\n")

    try:
        this = this_checkout(ENVIRONMENT)
        other = Checkout.at("other", flags.other, ENVIRONMENT)
        if this.root == other.root:
            raise CheckoutError(f"{flags.other} is this checkout; give the path of another one")
        with tempfile.TemporaryDirectory(prefix="same-results-") as folder:
            rows = compare_checkouts(CheckoutPair(this, other, Path(folder), log), flags.only)
    except PreambleError as error:
        sys.stderr.write(f"same_results: {error}\n")
        return 2
    if flags.json:
        lines = [json.dumps(report(this, other, rows), indent=1)]
    else:
        lines = [f"this {this.root} ({this.commit}), other {other.root} ({other.commit})"]
        lines += [*format_table(rows), "not compared:"]
        lines += [f"  {name}: {reason}" for name, reason in NOT_COMPARED.items()]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0 if rows and all(row.equal for row in rows) else 1


def report(this: Checkout, other: Checkout, rows: Sequence[ComparedRow]) -> dict[str, Any]:
    return {
        "this": {"path": str(this.root), "commit": this.commit},
        "other": {"path": str(other.root), "commit": other.commit},
        "equal": all(row.equal for row in rows),
        "not_compared": dict(NOT_COMPARED),
        "rows": [
            {"part": row.part, "name": row.name, "equal": row.equal, "difference": row.difference}
            for row in rows
        ],
    }


def _exit_on_sigterm(number: int, frame: object) -> None:
    """Raise SystemExit on SIGTERM, so that child processes are ended, as after Ctrl-C."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    sys.exit(main())
