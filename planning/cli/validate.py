"""The `preamble plan validate` command: compare predictions with every published table.

The exit code is 1 if the error of a table exceeds its target. `planning.published.validate` defines
the tables and their targets.
"""

import argparse
from collections.abc import Callable

from planning.cli.flags import make_command_parser
from planning.cli.result import CommandResult

EXAMPLES = """
  preamble plan validate
  preamble plan validate --rows
  preamble plan validate --json
"""


def make_parser() -> argparse.ArgumentParser:
    parser = make_command_parser(
        "validate",
        "Compare predictions with every published table, and print the errors.",
        EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every row")
    parser.add_argument("--rows", action="store_true", help="print every row of each table")
    return parser


def run(args: argparse.Namespace, log: Callable[[str], None]) -> CommandResult:
    from planning.published.validate import validate_tables

    report = validate_tables()
    return CommandResult(
        report.text(args.rows), report.figures(), 0 if report.is_within_targets else 1
    )
