"""`preamble plan plot`: a plan's candidates drawn again, from the CSV that it has written.

For who has changed the CSV, or wants other figures on the axes; nothing is predicted here.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from planning.cli.flags import parser_of
from planning.cli.result import Told

EXAMPLES = """
  preamble plan plot plans/175b
  preamble plan plot plans/175b/candidates.csv --x iteration_s --y mfu --output pictures
"""


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of("plot", "Draw a plan's candidates again, from its CSV.", EXAMPLES)
    add = parser.add_argument
    add("source", metavar="CSV", help="candidates.csv, or the folder that holds it")
    add("--x", metavar="FIGURE", default="", help="a column of it (default: as the plan has it)")
    add("--y", metavar="FIGURE", default="", help="likewise")
    add("--output", metavar="DIR", help="where to (default: beside the CSV)")
    add("--json", action="store_true", help="write the paths as JSON")
    return parser


def run(args: argparse.Namespace, say: Callable[[str], None]) -> Told:
    from planning.output.files import redraw

    folder = Path(args.output) if args.output else None
    written = redraw(Path(args.source), folder, x=args.x, y=args.y)
    for note in written.notes:
        say(f"preamble plan plot: {note}")
    paths = [str(path) for path in written.paths]
    return Told("\n".join(paths), {"paths": paths})
