"""`preamble tune`: a YAML file in, an adapter out.

Settings become a TuneConfig, and one function is called with it. Talk and progress go to stderr; on
stdout stands the path of what was written. A run that was interrupted goes on when it is started
again. `python -m ptuning rank` is what this starts for its other ranks.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from gpt.errors import PreambleError
from ptuning.config import TuneConfig

if TYPE_CHECKING:
    from gpt.parallel.mesh import Mesh
    from ptuning.data.records import Reading
    from ptuning.run.artifacts import Outcome
    from ptuning.run.preparation import Prepared
    from ptuning.run.training_loop import Listener
    from ptuning.run_facts import RunFacts
    from ptuning.training.trainer import Trainer

INTERRUPTED = 130
ALONE_S = 5.0  # In which torchrun ends a rank, if rank 0 has failed.
RECORDS_SHOWN = 100_000  # Between two lines, while records are read.


def main(argv: list[str]) -> int:
    """`argv` begins with the command's own word."""
    if argv == ["rank"]:
        return _rank()
    if not argv or argv[0] != "tune":
        print("usage: python -m ptuning tune CONFIG.yaml", file=sys.stderr)
        return 2
    args = tune_parser().parse_args(argv[1:])
    with _some_stderr():
        try:
            if args.sweep and (args.check or args.evaluate):
                tune_parser().error("--check and --evaluate are of one run; leave --sweep out")
            if args.evaluate is not None:
                from ptuning.evaluation.evaluate import evaluate_command

                return evaluate_command(args)
            if args.config is None:
                tune_parser().error("give a CONFIG.yaml, or --evaluate ADAPTER FILE")
            if args.sweep:
                return _sweep(args)
            config = TuneConfig.read(args.config)
            return _check(config, args) if args.check else _tune(config, args)
        except PreambleError as error:
            return _failed(error)


def _failed(error: PreambleError) -> int:
    """Tell it once: what one rank of torchrun's has found, mostly all have."""
    rank = int(os.environ.get("RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0
    if rank:
        # Rank 0 has told it, and torchrun ends this process now; else it is this rank's alone.
        time.sleep(ALONE_S)
    _say(f"preamble tune: {f'rank {rank}: ' if rank else ''}{error}")
    return 1


def _say(line: str) -> None:
    """On stderr, if anybody listens, and if a signal's handler has not come into a write there."""
    with suppress(OSError, RuntimeError):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def _some_stderr() -> Iterator[None]:
    """Where it is closed, print would take stdout instead, and the next file its place."""
    if sys.stderr is None:
        _drop_stderr()
        sys.stderr = os.fdopen(2, "w", errors="replace", closefd=False)
    try:
        yield
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            _drop_stderr()  # Else Python tries again at its end, and says that this has failed.


def _drop_stderr() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != 2:
        os.dup2(nowhere, 2)
        os.close(nowhere)


def tune_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble tune",
        description="Learn an adapter for a frozen model from examples, and write it as the next "
        "version of its name. Started again after an interruption, a run goes on.",
    )
    parser.add_argument(
        "config", metavar="CONFIG.yaml", nargs="?", help="what to learn, and from what"
    )
    parser.add_argument(
        "--check", action="store_true", help="show rendered examples; train and write nothing"
    )
    parser.add_argument(
        "--restart", action="store_true", help="begin anew, whatever an unfinished run has saved"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        metavar="KEY=VALUE,VALUE",
        help="a run for each value, or for each combination if given several times; the best is "
        "published. Those that have ended are not run again",
    )
    parser.add_argument("--json", action="store_true", help="write what came of it as JSON")
    parser.add_argument(
        "--evaluate",
        nargs=2,
        metavar=("ADAPTER", "FILE"),
        help="score an adapter by the records of a file instead",
    )
    parser.add_argument(
        "--model", metavar="PATH", help="with --evaluate: the checkpoint, if no CONFIG.yaml says it"
    )
    return parser


def _check(config: TuneConfig, args: argparse.Namespace) -> int:
    """What the model would be shown, before anything is spent."""
    from ptuning.data.preflight import check_facts, check_lines
    from ptuning.run.preparation import prepare

    prepared = prepare(config)
    told = prepared.tasks, prepared.tokenizer, config
    if args.json:
        print(json.dumps(asdict(check_facts(*told))))
    else:
        print("\n".join(check_lines(*told, prepared.checkpoint.config)))
    return 0


def _tune(config: TuneConfig, args: argparse.Namespace) -> int:
    from ptuning.launch import is_first
    from ptuning.run.preparation import prepare

    if not is_first():
        return _tune_silently(config, args)
    outcome, facts = _run(prepare(config, _reading()), restart=args.restart)
    return _told(outcome, facts, args)


def _run(prepared: "Prepared", restart: bool) -> "tuple[Outcome, RunFacts]":
    """Be the first rank of a run, and its people's."""
    from ptuning.launch import joined
    from ptuning.reporting.observer import Audience
    from ptuning.run.training_loop import run_folder
    from ptuning.run.training_state import hold

    audience, config = Audience(prepared, sys.stderr), prepared.config
    with hold(run_folder(config)), joined(config, restart) as mesh:
        try:
            outcome = _learn(prepared, mesh, audience, restart=restart)
        finally:
            audience.close()
    return outcome, audience.facts


def _sweep(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ptuning.run.sweep import read_sweep, run_sweep, summary, table

    swept = run_sweep(read_sweep(args.config, args.sweep), _run, _say, restart=args.restart)
    if swept.best is None:
        _say("the same command goes on from there")
        return INTERRUPTED
    with suppress(OSError):
        Console(file=sys.stderr).print(table(swept))
    if args.json:
        print(json.dumps(summary(swept)))
    else:
        print("\n".join(str(path) for path in swept.paths))
    return 0


def _tune_silently(config: TuneConfig, args: argparse.Namespace) -> int:
    """Be another rank than the first one of torchrun's."""
    from ptuning.launch import LOST, LostError, joined
    from ptuning.reporting.observer import Nobody
    from ptuning.run.preparation import prepare

    prepared, trouble = None, None
    try:
        prepared = prepare(config)
    except PreambleError as error:
        trouble = error
    try:
        # Where rank 0 has found the same, it has told it, and does not come.
        with joined(config, args.restart) as mesh:
            if prepared is None:
                assert trouble is not None
                raise trouble
            outcome = _learn(prepared, mesh, Nobody(), restart=args.restart)
    except LostError:
        return LOST
    return INTERRUPTED if outcome.state == "interrupted" else 0


def _learn(prepared: "Prepared", mesh: "Mesh", listener: "Listener", *, restart: bool) -> "Outcome":
    from ptuning.launch import is_first
    from ptuning.run.training_loop import Learning, load_trainer

    trainer = load_trainer(prepared, mesh)
    learning = Learning(prepared, trainer, listener, restart=restart)
    with _stopping(trainer, silently=not is_first()):
        return learning.run()


@contextmanager
def _stopping(trainer: "Trainer", *, silently: bool) -> Iterator[None]:
    """Ctrl-C, or a kind kill, ends a run after the step that it is in, with its state saved."""

    def ask(number: int, frame: object) -> None:
        if trainer.stop_asked:  # A second time: at once.
            raise KeyboardInterrupt
        trainer.stop_asked = True
        if not silently:
            _say("\nsaving, after this step (again: ends at once)")

    before = {one: signal.signal(one, ask) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _told(outcome: "Outcome", facts: "RunFacts", args: argparse.Namespace) -> int:
    from ptuning.reporting.run_logs import REPORT
    from ptuning.reporting.verdict import summary

    if outcome.state == "interrupted":
        _say(f"saved at step {outcome.step}; the same command goes on from there")
        return INTERRUPTED
    examples = sum(task.examples for task in facts.tasks)
    losses = f"loss {outcome.first_loss:.4f} -> {outcome.last_loss:.4f}"
    _say(f"{losses} on {examples} examples; see {outcome.folder / REPORT}")
    if args.json:
        print(json.dumps(summary(facts)))
    else:
        print("\n".join(str(path) for path in outcome.paths))
    return 0


def _reading() -> "Reading":
    """Lines on stderr while a large file is read."""
    last = 0

    def report(count: int, total: int | None) -> None:
        nonlocal last
        if count - last >= RECORDS_SHOWN:
            last = count
            share = f" of about {total:,}" if total else ""
            _say(f"read {count:,}{share} records")

    return report


def _rank() -> int:
    from ptuning.launch import LOST, follow, lost, report_trouble
    from ptuning.reporting.observer import Nobody
    from ptuning.run.preparation import prepare
    from ptuning.run.training_loop import Learning, load_trainer

    charge = follow(sys.stdin)
    try:
        prepared = prepare(charge.config)
        trainer = load_trainer(prepared, charge.join())
        Learning(prepared, trainer, Nobody(), restart=charge.restart).run()
    except PreambleError as error:
        report_trouble(charge.folder, charge.rank, str(error))
        return 1
    except RuntimeError as error:
        if not lost(error):
            raise
        return LOST
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
