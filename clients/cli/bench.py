"""`preamble bench`: load against a running server, and what its calls took.

Flags become a `Work`; figures go to stdout, progress and warnings to stderr. What they mean is
in docs/bench.md.
"""

import argparse
import json
import sys
from pathlib import Path

from clients.cli.flags import add_server_flags, way_of
from clients.load.generator import (
    SERVICE_CLASSES,
    Length,
    LoadError,
    Run,
    Where,
    Work,
    read_dataset,
    run,
)
from clients.load.report import Report, Slo, check_plot, plot


def bench_command(argv: list[str]) -> int:
    """`argv` has no command word."""
    parser = bench_parser()
    args = parser.parse_args(argv)
    try:
        work = _work(args)
        slo = Slo.of(args.slo) if args.slo else None
        if args.plot:
            check_plot()
        token, tls = way_of(args)
        done = run(Where(args.server, token, tls), work, None if args.quiet else _progress)
        report = Report.of(done, slo)
        if args.plot:
            plot(done, Path(args.plot))
    except (LoadError, ValueError) as error:
        _talk(f"preamble bench: {error}")
        return 1
    for warning in report.warnings:
        _talk(f"preamble bench: warning: {warning}")
    told = json.dumps(report.json(), indent=2) if args.json else "\n".join(report.lines())
    sys.stdout.write(told + "\n")
    return _code(done)


def bench_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble bench",
        description="Load a running server, and tell what its calls took.",
    )
    add_server_flags(parser)
    add = parser.add_argument
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--rate", metavar="X", type=float,
        help="open loop: so many requests a second, whatever the server does")  # fmt: skip
    loop.add_argument("--concurrency", metavar="N", type=int, default=8,
        help="closed loop: so many at once (default: 8)")  # fmt: skip
    add("--requests", metavar="N", type=int, help="at most (default: 100, if no --duration-s)")
    add("--duration-s", metavar="S", type=float, help="no call begins later than this")
    add("--warmup-requests", metavar="N", type=int, default=4, help="not counted (default: 4)")
    add("--prompt-tokens", metavar="L", default="128",
        help="128, 64-256 or ~128, a mean (default: 128)")  # fmt: skip
    add("--new-tokens", metavar="L", default="128", help="likewise (default: 128)")
    add("--dataset", metavar="F", help="JSON lines of prompts, in turn, instead of random ids")
    add("--adapter", metavar="A", action="append", default=[],
        help="may be given often: in turn; '' is none")  # fmt: skip
    add("--service-class", choices=list(SERVICE_CLASSES), default="latency")
    add("--seed", metavar="N", type=int, default=0, help="of arrivals, lengths, ids (default: 0)")
    add("--slo", metavar="T", help="what good requests keep, as ttft:200ms,itl:20ms,e2e:5s")
    add("--json", action="store_true", help="print one JSON object")
    add("--plot", metavar="F", help="draw the spread of times and tokens/s into this file")
    add("--quiet", action="store_true", help="no progress on stderr")
    return parser


def _work(args: argparse.Namespace) -> Work:
    requests = 100 if args.requests is None and args.duration_s is None else args.requests
    least = (
        ("--rate", args.rate),
        ("--concurrency", args.concurrency),
        ("--requests", requests),
        ("--duration-s", args.duration_s),
        ("--timeout-s", args.timeout_s),
    )
    for flag, value in least:
        if value is not None and not 0 < value < float("inf"):
            raise LoadError(f"{flag} is {value}; it must be more than 0")
    if args.warmup_requests < 0:
        raise LoadError(f"--warmup-requests is {args.warmup_requests}; it must be 0 or more")
    return Work(
        rate=args.rate,
        concurrency=args.concurrency,
        requests_max=requests,
        duration_s=args.duration_s,
        warmup_requests=args.warmup_requests,
        prompt=Length.of(args.prompt_tokens),
        new=Length.of(args.new_tokens),
        dataset=read_dataset(Path(args.dataset)) if args.dataset else (),
        adapters=tuple(args.adapter) or ("",),
        service_class=args.service_class,
        timeout_s=args.timeout_s,
        seed=args.seed,
    )


def _progress(under_way: int, ended: int, seconds: float) -> None:
    _talk(f"{seconds:6.0f} s  {under_way:6,} under way  {ended:8,} ended")


def _talk(line: str) -> None:
    sys.stderr.write(line + "\n")


def _code(done: Run) -> int:
    """A load that is refused in part is a measurement; one of which nothing ended well is none."""
    return 0 if any(one.ok for one in done.sent) else 1
