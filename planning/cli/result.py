"""CommandResult: the result of a plan subcommand, as text, JSON values and an exit code.

Every subcommand returns a CommandResult, and only `planning.__main__` prints to stdout.
`render_plan` renders training and serving plans, and writes them to the --output folder.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planning.plan import Plan

JSON_ROWS_MAX = 100  # Maximum number of rows in printed JSON.


@dataclass(frozen=True)
class CommandResult:
    text: str
    values: Mapping[str, object]  # The content that `--json` prints.
    exit_code: int = 0


def render_plan(plan: Plan, args: argparse.Namespace) -> CommandResult:
    """Render a plan, and write its files if --output is set.

    The exit code is 1 if no candidate fits.
    """
    from planning.output.plan_writer import plan_record, with_settings_path, write_plan
    from planning.output.terminal import render_text

    if not args.output:
        text = render_text(with_settings_path(plan, Path("DIR")))
        if plan.settings_yaml:
            text += "\nto write the settings file, all candidates, a report and plots, give "
            text += "--output DIR"
    else:
        written = write_plan(plan, Path(args.output))
        plan = written.plan
        text = "\n".join([render_text(plan), written.summary(), *written.notes])
    values = plan_record(plan)
    rows = values["rows"]
    assert isinstance(rows, list)
    exit_code = 0 if plan.best is not None else 1
    # The printed JSON has only the best rows; candidates.csv in the --output folder has all rows.
    return CommandResult(text, values | {"rows": rows[:JSON_ROWS_MAX]}, exit_code)
