"""`python -m bench`: measures the performance targets and prints the table of results.

Each result is printed as soon as it is measured. Each run is recorded in a file in build/bench/;
`python -m bench graph` plots these files. The two sides of a comparison run alternately, so that
noise of the machine affects both sides. A missed target does not change the exit code.
"""

import argparse
import sys

import torch

from bench import against, catalog
from bench.harness import history, offline_engine
from bench.harness.record import RECORD_FOLDER, RunRecord
from bench.regression import speed_measurements
from gpt.errors import PreambleError

ROUNDS = 5


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    flags = parser.parse_args(argv)
    try:
        if flags.command == "graph":
            print(history.plot_history())
            return 0
        return run_bench(parser, flags, sys.argv[1:] if argv is None else argv)
    except PreambleError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["graph"], help="plot past runs and exit")
    parser.add_argument(
        "--device", default="cpu", choices=["cpu", "cuda"], help="device to measure (default: cpu)"
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        help="dtype of the model in the suite `engine` (default: bfloat16)",
    )
    parser.add_argument(
        "--rounds", type=int, help="number of rounds (default: 5, or 7 with --against)"
    )
    parser.add_argument(
        "--only",
        choices=list(catalog.SUITES),
        help="run one suite (default: all suites of the device, except engine, host and planning)",
    )
    parts_help = "; ".join(
        f"{name}: {', '.join(suite.parts)}" for name, suite in catalog.SUITES.items() if suite.parts
    )
    parser.add_argument(
        "--parts",
        nargs="*",
        default=[],
        help=f"with --only: parts of the suite to run (default: all). Parts by suite: {parts_help}",
    )
    parser.add_argument(
        "--disk",
        metavar="FOLDER",
        help="folder for converted checkpoints (default: the system's temporary folder)",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        help="engines that the suite `peers` compares (default: all); `make peers` installs them",
    )
    parser.add_argument(
        "--requests",
        nargs="*",
        type=int,
        help="numbers of concurrent requests: the suite `peers` runs only its workloads with these "
        "numbers (default: all workloads); the suite `engine` uses the first number (default: 32)",
    )
    parser.add_argument(
        "--against",
        metavar="CHECKOUT",
        help="compare the speed of this checkout with another checkout of this repository",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="with --against: write samples and verdicts to this file"
    )
    offline_engine.add_flags(parser)
    return parser


def run_bench(
    parser: argparse.ArgumentParser, flags: argparse.Namespace, arguments: list[str]
) -> int:
    if flags.parts and not flags.only:
        parser.error("--parts requires --only")
    suite_parts = catalog.SUITES[flags.only].parts if flags.only else ()
    unknown_parts = sorted(set(flags.parts) - set(suite_parts))
    if unknown_parts:
        parser.error(
            f"the suite {flags.only} has no part {', '.join(unknown_parts)}; "
            f"its parts are: {', '.join(suite_parts) or 'none'}"
        )
    if flags.rounds is not None and flags.rounds < 1:
        parser.error("--rounds must be at least 1")
    if flags.json and not flags.against:
        parser.error("--json requires --against")
    if flags.against:
        if flags.only and flags.only not in speed_measurements.SUITES:
            parser.error(
                f"--against measures {', '.join(speed_measurements.SUITES)}, not {flags.only}"
            )
        return against.run_against(flags, lambda line: print(line, flush=True))
    flags.rounds = flags.rounds or ROUNDS
    if (flags.device == "cuda" or flags.only == "gpu") and not torch.cuda.is_available():
        print(
            "bench: torch sees no CUDA device; run on a machine with a GPU, or omit --device cuda "
            "and --only gpu to measure the CPU"
        )
        return 1
    suites = [flags.only] if flags.only else catalog.default_suites(flags.device)
    record = RunRecord.create(arguments)
    print(", ".join(f"{name} {text}" for name, text in record.header["machine"].items()))
    failed = catalog.run_suites(suites, flags, record, lambda line: print(line, flush=True))
    for line in ("--- the table", *catalog.format_table(suites, record.rows, flags.device)):
        print(line)
    if record.path.exists():
        print(f"record: {record.path}; `python -m bench graph` plots all runs in {RECORD_FOLDER}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
