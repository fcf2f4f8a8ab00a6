"""Benchmark catalog: the suites, the order in which they run, and the table of results.

A suite yields rows (the figures of its targets) and lines of text while it runs. If a suite fails,
its missing rows give the reason, and the next suite runs. The final table has a line for each row.
It also has a line for each default target (see `Target.on_request`) that has no row.
"""

import argparse
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from bench.harness.record import RunRecord, SuiteOutput
from bench.harness.targets import TARGETS, Row, format_figure, not_run_row


@dataclass(frozen=True)
class Suite:
    """A group of measurements; `run` takes the command-line flags and yields the output."""

    run: Callable[[argparse.Namespace], Iterator[SuiteOutput]]
    parts: Sequence[str] = ()  # Parts that can be selected individually.
    default_parts: Sequence[str] = ()  # Parts that run if several suites run; empty: all.
    on_request: bool = False  # Runs only if --only selects it.


# Each suite imports its modules when it runs: imports take seconds, and some dependencies are
# optional.


def _startup_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.suites import startup

    # A round takes half a minute, so at most three rounds run.
    return startup.run_suite(startup.StartupSizes(min(flags.rounds, 3)))


def _plan_validation_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.suites import plan_validation

    return plan_validation.run_suite()


def _peers_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.peers import compare

    tables = [table for table in compare.TABLES if not flags.parts or table.name in flags.parts]
    engine_names = compare.ENGINE_NAMES if flags.peers is None else flags.peers
    return compare.run_suite(
        compare.PeerSelection(flags.rounds, tables, engine_names, flags.requests or ())
    )


def _conversion_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.suites import conversion

    return conversion.run_suite(flags.rounds, disk=flags.disk)


def _frontend_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.suites import frontend

    return frontend.run_suite(flags.parts)


def _proxy_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.suites import proxy

    return proxy.run_suite(flags.parts, proxy.ProxySizes(rounds=flags.rounds))


def _adapters_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.suites import adapters

    return adapters.run_suite(flags.parts)


def _lora_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.suites import lora

    return lora.run_suite(flags.parts, lora.LoraSizes(rounds=flags.rounds))


def _prompt_tuning_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.peers import prompt_tuning

    return prompt_tuning.run_suite(flags.parts, prompt_tuning.TuningSizes(rounds=flags.rounds))


def _linear_tuning_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.peers import linear_tuning

    sizes = linear_tuning.LinearTuningSizes(rounds=flags.rounds)
    return linear_tuning.run_suite(flags.parts, sizes)


def _contention_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.peers import contention

    return contention.run_suite(flags.parts, contention.ContentionSizes(flags.rounds))


def _gpu_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    outputs: Iterator[SuiteOutput] = import_module("bench.suites.gpu").run_suite(flags.rounds)
    return outputs


def _gpu_adapters_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.suites import gpu_adapters

    return gpu_adapters.run_suite(flags.parts)


def _offline_engine_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.harness import offline_engine

    yield from offline_engine.run_from_flags(flags)


def _host_time_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.suites import host_time

    return host_time.run_suite(flags.rounds)


def _plan_accuracy_suite(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
    from bench.suites import plan_accuracy

    yield from plan_accuracy.run_suite(
        tuple(flags.parts), plan_accuracy.PlanAccuracySizes(flags.rounds)
    )


# The suites in the order in which they run, roughly from short to long. `parts` repeats the
# constant `PARTS` of the suite's module, because the module is imported only when the suite runs.
SUITES: Mapping[str, Suite] = {
    "planner": Suite(_plan_validation_suite),
    "start": Suite(_startup_suite),
    "peers": Suite(_peers_suite, ("gpt2", "int8", "llama", "qwen3-moe", "lora")),
    "convert": Suite(_conversion_suite),
    "front": Suite(
        _frontend_suite,
        ("tokens", "first", "share", "profiles", "overload"),
        ("tokens", "share", "profiles"),
    ),
    "adapters": Suite(
        _adapters_suite,
        ("mixed", "first", "registry", "mixed-32", "first-32", "arrivals", "tasks", "equal"),
        ("mixed", "first", "registry"),
    ),
    "lora": Suite(
        _lora_suite, ("batches", "unused", "prefill", "activated", "turns"), ("batches", "prefill")
    ),
    "tuning": Suite(_prompt_tuning_suite, ("speed", "memory", "losses")),
    "linear-tuning": Suite(
        _linear_tuning_suite,
        tuple(
            f"{family}-{method}"
            for family in ("gpt2", "llama")
            for method in ("lora", "dora", "ia3", "alora")
        ),
        on_request=True,
    ),
    "contention": Suite(_contention_suite, ("serving", "tuning")),
    "proxy": Suite(_proxy_suite, ("gpt2", "demo", "ray"), on_request=True),
    "gpu": Suite(_gpu_suite),
    "gpu-adapters": Suite(_gpu_adapters_suite, ("gpt2", "8b"), on_request=True),
    "engine": Suite(_offline_engine_suite, on_request=True),
    "host": Suite(_host_time_suite, on_request=True),
    "planning": Suite(_plan_accuracy_suite, ("gpt2-small", "modern", "choice"), on_request=True),
}
# Suites that need a CUDA device; all others run on the CPU.
CUDA_SUITES = ("gpu",)
CUDA_HINT = "needs a CUDA device; run: make bench-gpu"


def default_suites(device: str) -> list[str]:
    """Return the suites that run if none is selected."""
    if device == "cuda":
        return list(CUDA_SUITES)
    return [
        name for name, suite in SUITES.items() if not suite.on_request and name not in CUDA_SUITES
    ]


def run_suites(
    names: Sequence[str],
    flags: argparse.Namespace,
    record: RunRecord,
    print_line: Callable[[str], None],
) -> int:
    """Run the suites, print and record their output; return the number of suites that failed."""
    failed = 0
    for name in names:
        suite = SUITES[name]
        suite_flags = argparse.Namespace(**vars(flags))
        suite_flags.parts = tuple(flags.parts or (suite.default_parts if len(names) > 1 else ()))
        print_line(f"--- {name} {' '.join(suite_flags.parts)}".rstrip())
        try:
            for output in suite.run(suite_flags):
                record.add(output)
                print_line(str(output))
        except Exception as error:
            failed += 1
            print_line(traceback.format_exc().rstrip())
            reason = f"suite {name} failed: {type(error).__name__}: {error}"
            for row in _missing_rows(name, record.rows, reason.splitlines()[0][:200]):
                record.add(row)
    return failed


def _missing_rows(suite: str, rows: Mapping[str, Row], reason: str) -> list[Row]:
    """Return a row with the verdict "not run" for each default target that has no row yet."""
    return [
        not_run_row(target.name, reason)
        for target in TARGETS.values()
        if target.suite == suite and not target.on_request and target.name not in rows
    ]


def format_table(names: Sequence[str], rows: Mapping[str, Row], device: str) -> Iterator[str]:
    """Yield the lines of the final table; the last line counts the verdicts."""
    row_by_target = dict(rows)
    for suite in names:
        row_by_target |= {
            row.target.name: row for row in _missing_rows(suite, rows, "it was not selected")
        }
    if device != "cuda" and len(names) > 1:
        row_by_target |= {row.target.name: row for row in _missing_rows("gpu", rows, CUDA_HINT)}
    target_names = [name for name in TARGETS if name in row_by_target]
    width = max((len(TARGETS[name].title) for name in target_names), default=0)
    counts: dict[str, int] = {}
    for name in target_names:
        row, target = row_by_target[name], TARGETS[name]
        counts[row.verdict] = counts.get(row.verdict, 0) + 1
        figure_text = "" if row.not_run_reason else format_figure(row.value, target.unit)
        share_text = (
            "" if row.bound_share is None else f"{100 * row.bound_share:.0f} % of the bound"
        )
        reason = f": {row.not_run_reason}" if row.not_run_reason else ""
        yield (
            f"{target.title:{width}}  {figure_text:>15}  {target.criterion:>18}  {share_text:>19}  "
            f"{row.verdict}{reason}"
        )
    yield ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "no rows"
