"""`python -m bench`: every promise on speed and size beside what is measured, in one run.

Parts print what they have when they have it, and a file keeps it: build/bench/, one for each run,
from which `python -m bench graph` draws how figures went. Both sides of a comparison take turns, so
a noisy machine is noisy for both. A timing never fails anything.
"""

import argparse
import sys

import torch

from bench import catalog
from bench.harness import history, offline_engine
from bench.harness.record import FOLDER, Record
from gpt.errors import PreambleError


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    flags = parser.parse_args(argv)
    try:
        if flags.command == "graph":
            print(history.draw())
            return 0
        return bench(parser, flags, sys.argv[1:] if argv is None else argv)
    except PreambleError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["graph"], help="draw past runs, and leave")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", help="of --only engine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(catalog.PARTS), help="one")
    known = "; ".join(
        f"{name}: {', '.join(part.pieces)}" for name, part in catalog.PARTS.items() if part.pieces
    )
    parser.add_argument("--parts", nargs="*", default=[], help=f"of --only, some. {known}")
    parser.add_argument("--disk", metavar="FOLDER", help="where checkpoints are converted")
    parser.add_argument("--peers", nargs="*", help="which engines; see bench/peers_install.sh")
    parser.add_argument("--requests", nargs="*", type=int, help="rows of peers, or of engine")
    offline_engine.add_flags(parser)
    return parser


def bench(parser: argparse.ArgumentParser, flags: argparse.Namespace, words: list[str]) -> int:
    pieces = catalog.PARTS[flags.only].pieces if flags.only else ()
    if set(flags.parts) - set(pieces):
        parser.error(f"--parts goes with --only, and is of: {', '.join(pieces) or 'nothing'}")
    if (flags.device == "cuda" or flags.only == "gpu") and not torch.cuda.is_available():
        print("bench: no CUDA device is visible to torch; without --device cuda the CPU is timed")
        return 1
    names = [flags.only] if flags.only else catalog.usual(flags.device)
    record = Record.begun(words)
    print(", ".join(f"{name} {what}" for name, what in record.facts["machine"].items()))
    bad = catalog.run(names, flags, record, lambda line: print(line, flush=True))
    for line in ("--- the table", *catalog.table(names, record.rows, flags.device)):
        print(line)
    if record.path.exists():
        print(f"{record.path}; python -m bench graph draws what stands in {FOLDER}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
