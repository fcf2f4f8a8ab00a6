"""The `preamble plan calibrate` command: measure engine step times, and write them to a file.

The import of this module must not load torch, so modules that import torch are imported inside
functions.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from gpt.errors import ConfigError
from planning.cli.flags import make_command_parser
from planning.cli.result import CommandResult
from planning.inference.calibration_file import Calibration, write_calibration

EXAMPLES = """
  preamble plan calibrate checkpoints/my-model --output calibration.yaml
  preamble plan calibrate --dtype bfloat16
"""
SHOWN_ROWS = (1, 8, 64, 512)  # Numbers of rows (new tokens) of the steps in the summary.


def make_parser() -> argparse.ArgumentParser:
    parser = make_command_parser(
        "calibrate",
        "Measure the engine's step times on this machine with random models of several widths, and "
        "with MODEL if it is given. This takes one to three minutes.",
        EXAMPLES,
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a checkpoint to measure as well; plans for this model are then most accurate",
    )
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add(
        "--dtype",
        help="dtype of the weights (default: the dtype of MODEL; without MODEL, bfloat16 on a GPU, "
        "bfloat16 and float32 on a CPU)",
    )
    add(
        "--seconds",
        metavar="S",
        type=float,
        default=8.0,
        help="seconds in which the steps of each model are timed (default: 8)",
    )
    add(
        "--output",
        metavar="F",
        default="calibration.yaml",
        help="file to write (default: calibration.yaml)",
    )
    add("--no-server", action="store_true", help="measure steps only, not the server's overhead")
    add("--json", action="store_true", help="print JSON instead of text")
    return parser


def run(args: argparse.Namespace, log: Callable[[str], None]) -> CommandResult:
    if not 0 < args.seconds < float("inf"):
        raise ConfigError(f"--seconds is {args.seconds}; it must be more than 0, and finite")
    path = Path(args.output)
    if path.is_dir():
        raise ConfigError(f"--output is {path}, a directory; name a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--output is {path}, but {path.parent} is not a directory; create it")
    from planning.measurement.calibrate import CalibrationOptions, calibrate

    options = CalibrationOptions(
        model=None if args.model is None else Path(args.model),
        device=args.device,
        dtype=args.dtype,
        seconds=args.seconds,
        measure_server=not args.no_server,
    )
    calibration = calibrate(options, log)
    write_calibration(calibration, path)
    lines = [*summary_lines(calibration), f"written to {path}"]
    return CommandResult("\n".join(lines), asdict(calibration))


def summary_lines(calibration: Calibration) -> list[str]:
    """Return the calibration as lines of text.

    Each step time is that of one sequence with this number of new tokens (rows), no earlier context
    and one sampled token.
    """
    column_names = ["1 row" if rows == 1 else f"{rows} rows" for rows in SHOWN_ROWS]
    heads = "".join(f"{column_name:>10}" for column_name in column_names)
    lines = [
        f"{calibration.device}, {calibration.threads} threads, "
        f"{calibration.memory_bytes / 1e9:.1f} GB: {calibration.flops / 1e9:,.0f} GFLOP/s, "
        f"weights read at {calibration.bandwidth_bytes / 1e9:.1f} GB/s",
        "server overhead of a request, from the call to its first token: "
        f"{1e3 * calibration.request_s:.1f} ms",
        f"{'ms per step':16} {'':9}{heads}",
    ]
    for measured_model in calibration.models:
        times = [1e3 * measured_model.steps.step_seconds(rows, 1, 0, 0, 1) for rows in SHOWN_ROWS]
        cells = "".join(f"{time:10.2f}" for time in times)
        lines.append(f"{measured_model.name[:16]:16} {measured_model.dtype:9}{cells}")
    return lines
