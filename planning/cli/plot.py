"""The `preamble plan plot` command: redraw the Pareto plots from a plan's candidates.csv.

The command is useful after an edit of the CSV file, or to put other figures on the axes. It makes
no predictions.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from planning.cli.flags import make_command_parser
from planning.cli.result import CommandResult

EXAMPLES = """
  preamble plan plot plans/175b
  preamble plan plot plans/175b/candidates.csv --x iteration_s --y mfu --output pictures
"""


def make_parser() -> argparse.ArgumentParser:
    parser = make_command_parser("plot", "Redraw a plan's plots from its candidates.csv.", EXAMPLES)
    add = parser.add_argument
    add("source", metavar="CSV", help="candidates.csv, or the folder that contains it")
    add("--x", metavar="FIGURE", default="", help="column of the x axis (default: as in the plan)")
    add("--y", metavar="FIGURE", default="", help="column of the y axis (default: as in the plan)")
    add("--output", metavar="DIR", help="folder of the plots (default: the folder of the CSV file)")
    add("--json", action="store_true", help="print the written paths as JSON")
    return parser


def run(args: argparse.Namespace, log: Callable[[str], None]) -> CommandResult:
    from planning.output.plan_writer import redraw

    folder = Path(args.output) if args.output else None
    written = redraw(Path(args.source), folder, x=args.x, y=args.y)
    for note in written.notes:
        log(f"preamble plan plot: {note}")
    paths = [str(path) for path in written.paths]
    return CommandResult("\n".join(paths), {"paths": paths})
