"""Plan validation benchmark: the error of `preamble plan` on published runs.

Each row is the error of one table of `preamble plan validate`. Nothing is measured, so the figures
are the same on every machine; the computation takes one or two seconds.
`bench/suites/plan_accuracy.py` compares predictions with measurements of our own server.
"""

from collections.abc import Iterator

from bench.harness.record import SuiteOutput
from bench.harness.targets import measured_row
from planning.published.validate import validate_tables

# Maps a row name to the name of a table of `validate_tables`.
MEAN_TABLES = {"training": "training, all runs", "inference": "inference, all rows"}
ACTIVATIONS_TABLE = "activations of the first stage"


def run_suite() -> Iterator[SuiteOutput]:
    tables = {table.name: table for table in validate_tables().tables}
    for name, title in MEAN_TABLES.items():
        table = tables[title]
        summary = (
            f"mean {100 * table.mean:.1f} % and worst {100 * table.worst:.1f} % of "
            f"{len(table.rows)} rows"
        )
        yield measured_row(f"planner/{name}", 100 * table.mean, summary)
    activations = tables[ACTIVATIONS_TABLE]
    summary = f"worst {100 * activations.worst:.2f} % of {len(activations.rows)} figures"
    yield measured_row("planner/activations", 100 * activations.worst, summary)
