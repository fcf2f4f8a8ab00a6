"""`preamble tune` command: trains, sweeps, checks or evaluates an adapter from a YAML file.

The flags select one function: train, sweep, check or evaluate. Messages and progress go to stderr.
Results, such as the paths of written adapters, go to stdout. An interrupted run resumes when the
same command is started again. Without torchrun, rank 0 starts the other ranks on this machine with
the internal command `python -m ptuning rank`.
"""

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gpt.cpu_threads import limit_openmp_spinning
from gpt.errors import PreambleError
from gpt.settings import read_yaml
from ptuning.config import TuneConfig

if TYPE_CHECKING:
    from gpt.parallel.mesh import Mesh
    from ptuning.activity import ActivityCallback
    from ptuning.data.records import ProgressCallback
    from ptuning.run.artifacts import RunOutcome
    from ptuning.run.preparation import PreparedRun
    from ptuning.run.training_loop import RunCallback
    from ptuning.run_facts import RunFacts
    from ptuning.training.trainer import Trainer

INTERRUPTED = 130  # Exit code of an interrupted run, as after SIGINT in a shell.
TORCHRUN_STOP_WAIT_S = 5.0  # After rank 0 fails, torchrun ends the other ranks within this time.


def main(argv: list[str]) -> int:
    """Run the command argv[0], `tune` or the internal `rank`; return the exit code."""
    if argv == ["rank"]:
        _run_rank_process()
    if not argv or argv[0] != "tune":
        print("usage: python -m ptuning tune CONFIG.yaml", file=sys.stderr)
        return 2
    args = tune_parser().parse_args(argv[1:])
    limit_openmp_spinning()  # Before any import of torch; child ranks inherit the environment.
    with _ensure_stderr():
        try:
            if args.sweep and (args.check or args.evaluate):
                tune_parser().error("--sweep cannot be used with --check or --evaluate; remove it")
            if args.evaluate is not None:
                return _evaluate(args)
            if args.config is None:
                tune_parser().error("give a CONFIG.yaml, or --evaluate ADAPTER FILE")
            if args.sweep:
                return _sweep(args)
            config = TuneConfig.from_yaml(args.config)
            return _check(config, args) if args.check else _tune(config, args)
        except PreambleError as error:
            return _report_error(error)
        except KeyboardInterrupt:  # Ctrl-C before the training, or a second signal.
            _print_stderr("preamble tune: interrupted; a saved state is intact")
            return INTERRUPTED


def _report_error(error: PreambleError) -> int:
    """Print the error and return the exit code.

    An error that occurs on every torchrun rank is printed by rank 0 only.
    """
    rank = int(os.environ.get("RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0
    if rank:
        # If rank 0 has the same error, rank 0 prints the error, and torchrun ends this process
        # during the sleep. If the sleep ends, rank 0 does not have the error; this rank prints it.
        time.sleep(TORCHRUN_STOP_WAIT_S)
    _print_stderr(f"preamble tune: {f'rank {rank}: ' if rank else ''}{error}")
    return 1


def _print_stderr(line: str) -> None:
    """Print a line to stderr, and ignore errors of the print.

    A print to a closed stderr raises OSError. A print in a signal handler raises RuntimeError if
    the signal has interrupted another print.
    """
    with suppress(OSError, RuntimeError):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def _ensure_stderr() -> Iterator[None]:
    """Open /dev/null as stderr if stderr is closed.

    If Python starts with a closed stderr, sys.stderr is None. Then print(file=sys.stderr) writes to
    stdout, and the next file that is opened gets descriptor 2.
    """
    if sys.stderr is None:
        _redirect_stderr_to_null()
        sys.stderr = os.fdopen(2, "w", errors="replace", closefd=False)
    try:
        yield
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            # Python flushes stderr again at exit. With /dev/null, that flush succeeds.
            _redirect_stderr_to_null()


def _redirect_stderr_to_null() -> None:
    null_fd = os.open(os.devnull, os.O_WRONLY)
    if null_fd != 2:
        os.dup2(null_fd, 2)
        os.close(null_fd)


def tune_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble tune",
        description="Train an adapter for a frozen model on examples, and write it as NAME@N, "
        "where N is the next free version number. The same command resumes an interrupted run.",
    )
    parser.add_argument(
        "config",
        metavar="CONFIG.yaml",
        nargs="?",
        help="settings of the run: model, records, method",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="show rendered examples, token counts and memory, without training",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start from step 0; ignore the saved state of an unfinished run (with --sweep, also "
        "repeat finished runs)",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        metavar="KEY=VALUE,VALUE",
        help="train once per value (with several --sweep, once per combination) and publish the "
        "best adapter; runs that have already finished are skipped",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--evaluate",
        nargs=2,
        metavar=("ADAPTER", "FILE"),
        help="do not train; score the model with and without ADAPTER on the records in FILE",
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="with --evaluate: the checkpoint (default: `model` in CONFIG.yaml)",
    )
    return parser


def _evaluate(args: argparse.Namespace) -> int:
    from ptuning.evaluation.adapter_evaluation import evaluate_command

    with _activity_display() as report_activity:
        return evaluate_command(args, report_activity)


def _check(config: TuneConfig, args: argparse.Namespace) -> int:
    """Print rendered examples, token counts and memory of the run, or the counts as JSON."""
    from ptuning.data.preflight import preflight_lines, preflight_report
    from ptuning.run.preparation import prepare

    prepared = prepare(config)
    tasks, tokenizer = prepared.tasks, prepared.tokenizer
    if args.json:
        report = preflight_report(tasks, tokenizer, config)
        print(json.dumps(asdict(report)))
    else:
        print("\n".join(preflight_lines(tasks, tokenizer, config, prepared.checkpoint.config)))
    return 0


def _tune(config: TuneConfig, args: argparse.Namespace) -> int:
    from ptuning.launch import is_rank_zero
    from ptuning.run.preparation import prepare
    from ptuning.run.resumed_settings import describe_settings, resumed_settings

    if not args.restart:
        settings = resumed_settings(config, read_yaml(Path(args.config)))
        if settings and is_rank_zero():
            _print_stderr(describe_settings(settings))
        config = config.with_fields(**settings)
    if not is_rank_zero():
        return _tune_on_torchrun_worker(config, args)
    with _activity_display() as report_activity:
        prepared = prepare(config, _record_progress(report_activity))
    outcome, facts = _run_on_rank_zero(prepared, restart=args.restart)
    code = _print_summary(outcome, facts, args)
    _complete_run(outcome)
    return code


def _run_on_rank_zero(prepared: "PreparedRun", restart: bool) -> "tuple[RunOutcome, RunFacts]":
    """Train as rank 0, which reports the run and, without torchrun, starts the other ranks."""
    from ptuning.launch import join_mesh
    from ptuning.reporting.observer import RunObserver
    from ptuning.run.training_loop import run_folder
    from ptuning.run.training_state import lock_folder

    observer, config = RunObserver(prepared, sys.stderr), prepared.config
    folder = run_folder(config.output_config, config.data_config)
    with lock_folder(folder), join_mesh(config, restart) as mesh:
        try:
            outcome = _train(prepared, mesh, observer, restart=restart)
        finally:
            observer.close()
    return outcome, observer.facts


def _complete_run(outcome: "RunOutcome") -> None:
    """Remove the state of a finished run, so that the same command starts a new run.

    This is the last action of a run: if the run is killed before, the command resumes it.
    """
    from ptuning.run.training_state import remove_states

    if outcome.state != "interrupted":
        sys.stdout.flush()
        remove_states(outcome.folder)


def _sweep(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ptuning.run.sweep import read_sweep, render_table, run_sweep, summary

    sweep_result = run_sweep(
        read_sweep(args.config, args.sweep),
        _run_on_rank_zero,
        _print_stderr,
        restart=args.restart,
        complete_run=_complete_run,
    )
    if sweep_result.best is None:
        _print_stderr("the same command resumes the sweep")
        return INTERRUPTED
    with suppress(OSError):
        Console(file=sys.stderr).print(render_table(sweep_result))
    if args.json:
        print(json.dumps(summary(sweep_result)))
    else:
        print("\n".join(str(path) for path in sweep_result.paths))
    return 0


def _tune_on_torchrun_worker(config: TuneConfig, args: argparse.Namespace) -> int:
    """Train as a torchrun rank other than rank 0."""
    from ptuning.launch import EXIT_PEER_LOST, PeerLostError, join_mesh
    from ptuning.reporting.observer import NullObserver
    from ptuning.run.preparation import prepare

    prepared, prepare_error = None, None
    try:
        prepared = prepare(config)
    except PreambleError as error:
        prepare_error = error
    try:
        # Join even if `prepare` has failed, so that rank 0 and this rank do not print one error
        # twice:
        # - If `prepare` fails on rank 0 too, rank 0 prints the error and exits. Then torchrun ends
        #   this rank, which waits for rank 0 here.
        # - If `prepare` succeeds on rank 0, rank 0 joins, and this rank raises its error below.
        with join_mesh(config, args.restart) as mesh:
            if prepared is None:
                assert prepare_error is not None
                raise prepare_error
            outcome = _train(prepared, mesh, NullObserver(), restart=args.restart)
    except PeerLostError:
        return EXIT_PEER_LOST
    return INTERRUPTED if outcome.state == "interrupted" else 0


def _train(
    prepared: "PreparedRun", mesh: "Mesh", callback: "RunCallback", *, restart: bool
) -> "RunOutcome":
    from ptuning.launch import is_rank_zero
    from ptuning.run.training_loop import TrainingLoop, load_trainer

    trainer = load_trainer(prepared, mesh, callback.on_activity)
    loop = TrainingLoop(prepared, trainer, callback, restart=restart, keeps_final_state=True)
    with _stop_on_signals(trainer, quiet=not is_rank_zero()):
        return loop.run()


@contextmanager
def _stop_on_signals(trainer: "Trainer", *, quiet: bool) -> Iterator[None]:
    """Make SIGINT and SIGTERM save the run's state after the current step and end the run."""

    def request_stop(signum: int, frame: object) -> None:
        if trainer.stop_requested:  # The second signal ends the run at once.
            raise KeyboardInterrupt
        trainer.stop_requested = True
        if not quiet:
            _print_stderr("\nsaving the state after this step; repeat the signal to stop at once")

    previous_handlers = {
        signal_number: signal.signal(signal_number, request_stop)
        for signal_number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)


def _print_summary(outcome: "RunOutcome", facts: "RunFacts", args: argparse.Namespace) -> int:
    from ptuning.reporting.run_logs import REPORT_FILE
    from ptuning.reporting.verdict import run_summary

    if outcome.state == "interrupted":
        _print_stderr(f"saved at step {outcome.step}; the same command resumes from there")
        return INTERRUPTED
    examples = sum(task.examples for task in facts.tasks)
    losses = f"loss {outcome.first_loss:.4f} -> {outcome.last_loss:.4f}"
    _print_stderr(f"{losses} on {examples} examples; see {outcome.folder / REPORT_FILE}")
    if args.json:
        print(json.dumps(run_summary(facts)))
    else:
        print("\n".join(str(path) for path in outcome.paths))
    return 0


@contextmanager
def _activity_display() -> "Iterator[ActivityCallback]":
    """Yield a callback that shows the progress of activities on stderr."""
    from ptuning.reporting.progress_bar import ActivityDisplay

    display = ActivityDisplay(sys.stderr)
    try:
        yield display.show
    finally:
        display.close()


def _record_progress(report_activity: "ActivityCallback") -> "ProgressCallback":
    """Return the progress callback of reading records."""

    def report_records(count: int, total: int | None) -> None:
        # The total is an estimate until the last call.
        report_activity("reading records", count, count + 1 if total is None else total)

    return report_records


def _run_rank_process() -> NoReturn:
    """Train as a child rank, and end this process.

    `os._exit` skips the finalization of the interpreter, which can abort the process: a thread of
    gloo that releases its last tensor needs the interpreter's lock, and cannot get it any more.
    """
    try:
        code = _train_as_child_rank()
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _train_as_child_rank() -> int:
    """Train as a child rank; return the exit code."""
    from ptuning.launch import EXIT_PEER_LOST, is_peer_lost, report_rank_error, start_child_rank
    from ptuning.reporting.observer import NullObserver
    from ptuning.run.preparation import prepare
    from ptuning.run.training_loop import TrainingLoop, load_trainer

    spec = start_child_rank(sys.stdin)
    try:
        prepared = prepare(spec.config)
        trainer = load_trainer(prepared, spec.join())
        TrainingLoop(prepared, trainer, NullObserver(), restart=spec.restart).run()
    except PreambleError as error:
        report_rank_error(spec.folder, spec.rank, str(error))
        return 1
    except RuntimeError as error:
        if not is_peer_lost(error):
            raise
        return EXIT_PEER_LOST
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
