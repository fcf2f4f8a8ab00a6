"""`preamble plan validate`: every published table, predicted again, and how far off each row is.

Exit code 1 where a table is outside of its target. The tables and their targets are
`planning.published.validate`'s.
"""

import argparse
from collections.abc import Callable

from planning.cli.flags import parser_of
from planning.cli.result import Told

EXAMPLES = """
  preamble plan validate
  preamble plan validate --rows
  preamble plan validate --json
"""


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "validate",
        "Predict every published table again, and tell the error of each row and table.",
        EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="write it as JSON, with every row")
    parser.add_argument("--rows", action="store_true", help="tell every row, not tables alone")
    return parser


def run(args: argparse.Namespace, say: Callable[[str], None]) -> Told:
    from planning.published.validate import validate

    report = validate()
    return Told(report.text(args.rows), report.figures(), 0 if report.good else 1)
