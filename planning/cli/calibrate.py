"""`preamble plan calibrate`: what this machine's steps take, into a file that predictions read.

The only part of planning, besides `--measure`, that computes with a model; so what imports torch is
imported when it is called.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from gpt.errors import ConfigError
from planning.cli.flags import parser_of
from planning.cli.result import Told
from planning.inference.calibration_file import StepCosts, write_calibration

EXAMPLES = """
  preamble plan calibrate checkpoints/my-model --output calibration.yaml
  preamble plan calibrate --dtype bfloat16
"""
SHOWN_ROWS = (1, 8, 64, 512)


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "calibrate",
        "Time the steps of our engine on this machine, in one to three minutes: of plain models of "
        "a few widths, and of MODEL.",
        EXAMPLES,
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a checkpoint, which is then predicted best")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add("--dtype", help="what to compute in (default: as MODEL is stored; else those of the plain "
        "models)")  # fmt: skip
    add("--seconds", metavar="S", type=float, default=8.0,
        help="for the steps of each model (default: 8)")  # fmt: skip
    add("--output", metavar="F", default="calibration.yaml", help="(default: calibration.yaml)")
    add("--no-server", action="store_true", help="steps alone, without what a server adds to them")
    add("--json", action="store_true", help="write it as JSON too")
    return parser


def run(args: argparse.Namespace, say: Callable[[str], None]) -> Told:
    if not 0 < args.seconds < float("inf"):
        raise ConfigError(f"--seconds is {args.seconds}; it must be more than 0")
    path = Path(args.output)
    if path.is_dir():
        raise ConfigError(f"--output is {path}, a directory; name a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--output is {path}, and {path.parent} is no directory; make it first")
    from planning.measurement.calibrate import Aims, calibrate

    aims = Aims(
        model=None if args.model is None else Path(args.model),
        device=args.device,
        dtype=args.dtype,
        seconds=args.seconds,
        server=not args.no_server,
    )
    costs = calibrate(aims, say)
    write_calibration(costs, path)
    lines = [*lines_of(costs), f"written to {path}"]
    return Told("\n".join(lines), asdict(costs))


def lines_of(costs: StepCosts) -> list[str]:
    """What was found."""
    heads = "".join(f"{f'{rows} rows' if rows > 1 else '1 row':>10}" for rows in SHOWN_ROWS)
    made = [
        f"{costs.device}, {costs.threads} threads, {costs.memory_bytes / 1e9:.1f} GB: "
        f"{costs.flops / 1e9:,.0f} GFLOP/s, weights read at {costs.bandwidth_bytes / 1e9:.1f} GB/s",
        f"a call's way to its first step, and of a token back: {1e3 * costs.request_s:.1f} ms",
        f"{'ms of a step':16} {'':9}{heads}",
    ]
    for one in costs.models:
        times = [1e3 * one.steps.seconds(rows, 1, 0, 0, 1) for rows in SHOWN_ROWS]
        cells = "".join(f"{time:10.2f}" for time in times)
        made.append(f"{one.name[:16]:16} {one.dtype:9}{cells}")
    return made
