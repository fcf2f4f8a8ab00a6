"""What a command came to, before anyone prints it: text for people, plain values for programs.

Commands return it, and only the command line's own module writes to the terminal. A plan is told
the same way whoever made it, and written to a folder where one is named.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planning.plan import Plan

ROWS_MAX = 100  # In JSON that is printed.


@dataclass(frozen=True)
class Told:
    text: str
    values: Mapping[str, object]  # For `--json`.
    code: int = 0


def told_plan(plan: Plan, args: argparse.Namespace) -> Told:
    """Code 1 where nothing fits, as where anything else fails."""
    from planning.output.files import located, record_of, write_plan
    from planning.output.terminal import tell

    if not args.output:
        text = tell(located(plan, Path("DIR")))
        if plan.settings_yaml:
            text += "\n--output DIR writes that file, all candidates, a report and plots"
    else:
        written = write_plan(plan, Path(args.output))
        plan = written.plan
        text = "\n".join([tell(plan), written.said(), *written.notes])
    values = record_of(plan)
    rows = values["rows"]
    assert isinstance(rows, list)
    # The first ones: all of them are in the folder.
    return Told(text, values | {"rows": rows[:ROWS_MAX]}, 0 if plan.best is not None else 1)
