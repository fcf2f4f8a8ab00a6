"""How far `preamble plan` is off published runs: `preamble plan validate`, as rows of the table.

It computes for a second or two and measures nothing, so its figures are the same on any machine.
What is predicted of our own server is another matter, and `bench/suites/plan_accuracy.py`'s.
"""

from collections.abc import Iterator

from bench.harness.record import Item
from bench.harness.targets import judged
from planning.published.validate import validate

# Of each row: the table's name as validate has it.
MEANS = {"training": "training, all runs", "inference": "inference, all rows"}
CLOSED = "activations of the first stage"


def lines() -> Iterator[Item]:
    tables = {table.name: table for table in validate().tables}
    for name, title in MEANS.items():
        table = tables[title]
        told = (
            f"{100 * table.mean:.1f} % of {len(table.rows)} rows, worst {100 * table.worst:.1f} %"
        )
        yield judged(f"planner/{name}", 100 * table.mean, told)
    kept = tables[CLOSED]
    told = f"{100 * kept.worst:.2f} % of {len(kept.rows)} figures"
    yield judged("planner/activations", 100 * kept.worst, told)
