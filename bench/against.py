"""`python -m bench --against CHECKOUT`: speed regressions of our engine between two checkouts.

Each round measures the other checkout, this checkout, and the other checkout again. A row compares
the median of this checkout with the median of all measurements of the other checkout.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness.checkouts import Checkout, CheckoutError, this_checkout
from bench.regression.speed_measurements import (
    SUITES,
    BenchInputs,
    MeasurementGroup,
    select_groups,
)
from bench.regression.speed_verdict import (
    NOISE_MAX,
    TABLE_HEADER,
    TOLERANCE,
    JudgedRow,
    Samples,
    judge,
)

ROUNDS = 7
# malloc uses huge pages, as for every engine that the suite `peers` compares.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def measure_rounds(
    groups: Sequence[MeasurementGroup],
    this: Checkout,
    other: Checkout,
    inputs: BenchInputs,
    count: int,
    log: Callable[[str], None],
) -> dict[str, Samples]:
    """Return the samples by row name. A group that failed once is not measured again."""
    samples = {row.name: Samples() for group in groups for row in group.rows}
    failed_groups: set[int] = set()
    for round_index in range(count):
        for number, group in enumerate(groups):
            for side, checkout in (("before", other), ("this", this), ("after", other)):
                if number in failed_groups:
                    break
                started = time.perf_counter()
                title = f"round {round_index + 1} of {count}, {group.suite} {group.part}".rstrip()
                try:
                    figures = group.measure(checkout, inputs)
                except CheckoutError as error:
                    failed_groups.add(number)
                    log(f"{title}: {error}")
                    for row in group.rows:
                        samples[row.name].failure = str(error)[-200:].splitlines()[-1]
                        samples[row.name].this_failed = checkout is this
                    break
                for row in group.rows:
                    getattr(samples[row.name], side).append(figures[row.name])
                seconds = time.perf_counter() - started
                texts = [f"{row.name} {figures[row.name]:,.4g}" for row in group.rows]
                log(f"{title}, {checkout.name}, {seconds:.0f} s: {', '.join(texts)}")
    return samples


def format_table(rows: Sequence[JudgedRow]) -> Iterator[str]:
    yield TABLE_HEADER
    yield from map(str, rows)
    counts = {row.verdict: 0 for row in rows}
    for row in rows:
        counts[row.verdict] += 1
    yield ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def report(this: Checkout, other: Checkout, rows: Sequence[JudgedRow]) -> dict[str, Any]:
    return {
        "this": {"path": str(this.root), "commit": this.commit},
        "other": {"path": str(other.root), "commit": other.commit},
        "tolerance": TOLERANCE,
        "noise_max": NOISE_MAX,
        "rows": [
            {
                "name": judged.row.name,
                "unit": judged.row.unit,
                "verdict": judged.verdict,
                "worse_by": judged.slowdown,
                "noise": judged.noise,
                "medians": {
                    "before": judged.before,
                    "this": judged.this,
                    "after": judged.after,
                },
                "samples": {
                    "before": judged.samples.before,
                    "this": judged.samples.this,
                    "after": judged.samples.after,
                },
                "failure": judged.samples.failure,
            }
            for judged in rows
        ],
    }


def run_against(flags: argparse.Namespace, log: Callable[[str], None]) -> int:
    """Compare two checkouts and return the exit code.

    The exit code is 1 if a row is slower in this checkout, or fails in this checkout only. It does
    not depend on rows with the verdict "unsettled".
    """
    this = this_checkout(ENVIRONMENT)
    other = Checkout.at("other", Path(flags.against), ENVIRONMENT)
    if this.root == other.root:
        raise CheckoutError(f"{flags.against} is this checkout; give the path of another one")
    groups = select_groups(flags.only, flags.parts)
    if not groups:
        raise CheckoutError(
            f"--against has no measurement of --parts {' '.join(flags.parts)}; omit --parts, or "
            f"select another suite: {', '.join(SUITES)}"
        )
    count = flags.rounds or ROUNDS
    log(f"this {this.root} ({this.commit}), other {other.root} ({other.commit}), {count} rounds")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=flags.disk) as folder:
        samples = measure_rounds(groups, this, other, BenchInputs(Path(folder)), count, log)
    rows = [judge(row, samples[row.name]) for group in groups for row in group.rows]
    for line in format_table(rows):
        log(line)
    if flags.json:
        Path(flags.json).write_text(json.dumps(report(this, other, rows), indent=1) + "\n")
    return 1 if any(row.failed for row in rows) else 0
