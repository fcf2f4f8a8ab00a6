"""What the bench consists of: its parts in the order in which they run, and the run of them.

A part gives rows and talk as it goes. One that ends badly costs only its own rows, and these say
why; the next one runs. At the end every promise has a line, whatever became of it.
"""

import argparse
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from bench.harness.record import Item, Record
from bench.harness.targets import PROMISES, Row, not_run, said


@dataclass(frozen=True)
class Part:
    """`lines` gives it; the flags say how much of it."""

    lines: Callable[[argparse.Namespace], Iterator[Item]]
    pieces: Sequence[str] = ()  # Any of which can be asked for alone.
    usual: Sequence[str] = ()  # Those that have rows in the table; none: all.
    extra: bool = False  # Runs only if it is asked for.


# Modules are imported when their part runs: each takes seconds, and some need what may be absent.


def _start(flags: argparse.Namespace) -> Iterator[Item]:
    from bench.suites import startup

    return startup.lines(startup.Sizes(min(flags.rounds, 3)))  # Each takes half a minute.


def _planner(flags: argparse.Namespace) -> Iterator[Item]:
    from bench.suites import plan_validation

    return plan_validation.lines()


def _peers(flags: argparse.Namespace) -> Iterator[Item]:
    from bench.peers import compare

    tables = [one for one in compare.TABLES if not flags.parts or one.name in flags.parts]
    named = compare.NAMES if flags.peers is None else flags.peers
    return compare.lines(compare.Asked(flags.rounds, tables, named, flags.requests or ()))


def _convert(flags: argparse.Namespace) -> Iterator[Item]:
    from bench.suites import conversion

    return conversion.lines(flags.rounds, disk=flags.disk)


def _front(flags: argparse.Namespace) -> Iterator[Item]:
    from bench.suites import frontend

    return frontend.lines(flags.parts)


def _adapters(flags: argparse.Namespace) -> Iterator[Item]:
    from bench.suites import adapters

    return adapters.lines(flags.parts)


def _tuning(flags: argparse.Namespace) -> Iterator[Item]:
    from bench.peers import prompt_tuning

    return prompt_tuning.lines(flags.parts, prompt_tuning.Sizes(rounds=flags.rounds))


def _gpu(flags: argparse.Namespace) -> Iterator[Item]:
    """Rows of promises that begin with `gpu/`; so many rounds of each."""
    lines: Iterator[Item] = import_module("bench.suites.gpu").lines(flags.rounds)
    return lines


def _engine(flags: argparse.Namespace) -> Iterator[Item]:
    from bench.harness import offline_engine

    yield from offline_engine.asked(flags)


def _planning(flags: argparse.Namespace) -> Iterator[Item]:
    from bench.suites import plan_accuracy

    yield from plan_accuracy.lines(tuple(flags.parts), plan_accuracy.Sizes(flags.rounds))


# Every row of the table, what takes least first; the pieces are those of bench/suites/frontend.py
# and so on.
PARTS: Mapping[str, Part] = {
    "planner": Part(_planner),
    "start": Part(_start),
    "peers": Part(_peers, ("gpt2", "int8", "llama")),
    "convert": Part(_convert),
    "front": Part(
        _front,
        ("tokens", "first", "share", "profiles", "overload"),
        ("tokens", "share", "profiles"),
    ),
    "adapters": Part(
        _adapters,
        ("mixed", "first", "registry", "mixed-32", "first-32", "arrivals", "tasks", "equal"),
        ("mixed", "first", "registry"),
    ),
    "tuning": Part(_tuning, ("speed", "memory", "losses")),
    "gpu": Part(_gpu),
    "engine": Part(_engine, extra=True),
    "planning": Part(_planning, ("gpt2-small", "modern", "choice"), extra=True),
}
# Where a CUDA device is benched: all others are of the CPU.
ON_CUDA = ("gpu",)
NO_CUDA = "it needs a CUDA device: make bench-gpu"


def usual(device: str) -> list[str]:
    """What runs if nothing is asked for."""
    if device == "cuda":
        return list(ON_CUDA)
    return [name for name, part in PARTS.items() if not part.extra and name not in ON_CUDA]


def run(
    names: Sequence[str], flags: argparse.Namespace, record: Record, say: Callable[[str], None]
) -> int:
    """Says what each part gives, and notes it; returns how many ended badly."""
    bad = 0
    for name in names:
        part = PARTS[name]
        asked = argparse.Namespace(**vars(flags))
        asked.parts = tuple(flags.parts or (part.usual if len(names) > 1 else ()))
        say(f"--- {name} {' '.join(asked.parts)}".rstrip())
        try:
            for item in part.lines(asked):
                record.note(item)
                say(str(item))
        except Exception as error:
            bad += 1
            say(traceback.format_exc().rstrip())
            why = f"{name} ended: {type(error).__name__}: {error}"
            for row in _absent(name, record.rows, why.splitlines()[0][:200]):
                record.note(row)
    return bad


def _absent(part: str, rows: Mapping[str, Row], why: str) -> list[Row]:
    """What this part has promised for the table, and not given."""
    return [
        not_run(one.name, why)
        for one in PROMISES.values()
        if one.part == part and not one.extra and one.name not in rows
    ]


def table(names: Sequence[str], rows: Mapping[str, Row], device: str) -> Iterator[str]:
    """Every promise of these parts, with its figure and verdict; and how many of each verdict."""
    shown = dict(rows)
    for part in names:
        shown |= {row.promise.name: row for row in _absent(part, rows, "it was not asked for")}
    if device != "cuda" and len(names) > 1:
        shown |= {row.promise.name: row for row in _absent("gpu", rows, NO_CUDA)}
    order = [name for name in PROMISES if name in shown]
    wide = max((len(PROMISES[name].what) for name in order), default=0)
    counts: dict[str, int] = {}
    for name in order:
        row, promise = shown[name], PROMISES[name]
        counts[row.verdict] = counts.get(row.verdict, 0) + 1
        value = "" if row.missing else said(row.value, promise.unit)
        bound = "" if row.share is None else f"{100 * row.share:.0f} % of the bound"
        why = f": {row.missing}" if row.missing else ""
        yield (
            f"{promise.what:{wide}}  {value:>15}  {promise.wanted:>18}  {bound:>19}  "
            f"{row.verdict}{why}"
        )
    yield ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "no row"
