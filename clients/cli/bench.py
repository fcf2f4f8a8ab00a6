"""`preamble bench`: runs a load against a server and prints its latency and throughput report.

The flags become a `LoadSpec`. The report goes to stdout, progress and warnings to stderr.
docs/bench.md defines the figures of the report.
"""

import argparse
import json
import sys
from pathlib import Path

from clients.cli.flags import add_server_flags, read_credentials
from clients.load.generator import (
    SERVICE_CLASSES,
    LengthSampler,
    LoadError,
    LoadRun,
    LoadSpec,
    ServerEndpoint,
    read_dataset,
    run_load,
)
from clients.load.report import LoadReport, Slo, check_plot, draw_plot


def bench_command(argv: list[str]) -> int:
    """Run `preamble bench`; `argv` are the arguments after `bench`."""
    parser = bench_parser()
    args = parser.parse_args(argv)
    try:
        spec = _load_spec(args)
        slo = Slo.parse(args.slo) if args.slo else None
        if args.plot:
            check_plot()
        token, tls = read_credentials(args)
        load_run = run_load(
            ServerEndpoint(args.server, token, tls, dict(args.metadata)),
            spec,
            None if args.quiet else _print_progress,
        )
        report = LoadReport.from_run(load_run, slo)
        if args.plot:
            draw_plot(load_run, Path(args.plot))
    except (LoadError, ValueError) as error:
        _print_stderr(f"preamble bench: {error}")
        return 1
    for warning in report.warnings:
        _print_stderr(f"preamble bench: warning: {warning}")
    output = json.dumps(report.to_dict(), indent=2) if args.json else "\n".join(report.text_lines())
    sys.stdout.write(output + "\n")
    return _exit_code(load_run)


def bench_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble bench",
        description="Run a load against a server, and report latency and throughput.",
    )
    add_server_flags(parser, several=False)
    add = parser.add_argument
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--rate",
        metavar="X",
        type=float,
        help="open loop: mean number of requests started per second, whatever the server's speed",
    )
    loop.add_argument(
        "--concurrency",
        metavar="N",
        type=int,
        default=8,
        help="closed loop: number of concurrent requests (default: 8)",
    )
    add(
        "--requests",
        metavar="N",
        type=int,
        help="maximum number of requests (default: 100, or no maximum with --duration-s)",
    )
    add(
        "--duration-s",
        metavar="S",
        type=float,
        help="time in seconds after which no request starts (default: no limit)",
    )
    add(
        "--warmup-requests",
        metavar="N",
        type=int,
        default=4,
        help="number of requests that are sent first and not measured (default: 4)",
    )
    add(
        "--prompt-tokens",
        metavar="L",
        default="128",
        help="prompt length in tokens: 128 (fixed), 64-256 (uniform) or ~128 (exponential with "
        "this mean) (default: 128)",
    )
    add(
        "--new-tokens",
        metavar="L",
        default="128",
        help="completion length in tokens, in the format of --prompt-tokens (default: 128)",
    )
    add(
        "--dataset",
        metavar="F",
        help="JSON lines file with prompts, which are used in turn (default: random token ids)",
    )
    add(
        "--adapter",
        metavar="A",
        action="append",
        default=[],
        help="adapter; repeat the flag to use several adapters in turn; '' is the base model "
        "(default: '')",
    )
    add(
        "--service-class",
        choices=list(SERVICE_CLASSES),
        default="latency",
        help="scheduling class of the requests (default: latency)",
    )
    add("--seed", metavar="N", type=int, default=0, help="random seed of the load (default: 0)")
    add("--slo", metavar="T", help="latency limits for goodput, such as ttft:200ms,itl:20ms,e2e:5s")
    add("--json", action="store_true", help="print one JSON object")
    add("--plot", metavar="F", help="write a plot of latencies and tokens/s to this file")
    add("--quiet", action="store_true", help="print no progress on stderr")
    return parser


def _load_spec(args: argparse.Namespace) -> LoadSpec:
    requests = 100 if args.requests is None and args.duration_s is None else args.requests
    positive_flags = (
        ("--rate", args.rate),
        ("--concurrency", args.concurrency),
        ("--requests", requests),
        ("--duration-s", args.duration_s),
        ("--timeout-s", args.timeout_s),
    )
    for flag, value in positive_flags:
        if value is not None and not 0 < value < float("inf"):
            raise LoadError(f"{flag} is {value}; it must be more than 0, and finite")
    if args.warmup_requests < 0:
        raise LoadError(f"--warmup-requests is {args.warmup_requests}; it must be 0 or more")
    return LoadSpec(
        rate=args.rate,
        concurrency=args.concurrency,
        requests_max=requests,
        duration_s=args.duration_s,
        warmup_requests=args.warmup_requests,
        prompt_length=LengthSampler.parse(args.prompt_tokens),
        output_length=LengthSampler.parse(args.new_tokens),
        dataset=read_dataset(Path(args.dataset)) if args.dataset else (),
        adapters=tuple(args.adapter) or ("",),
        service_class=args.service_class,
        timeout_s=args.timeout_s,
        seed=args.seed,
    )


def _print_progress(in_flight: int, finished: int, seconds: float) -> None:
    _print_stderr(f"{seconds:6.0f} s  {in_flight:6,} in flight  {finished:8,} finished")


def _print_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


def _exit_code(load_run: LoadRun) -> int:
    """Return 0 if at least one call succeeded, else 1."""
    return 0 if any(call.ok for call in load_run.calls) else 1
