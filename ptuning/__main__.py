"""`preamble tune`: a YAML file in, an adapter out.

Settings become a TuneConfig, and one function is called with it. Talk and progress go to stderr; on
stdout stands the path of what was written. A run that was interrupted has written nothing.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from gpt.errors import PreambleError
from ptuning.config import TuneConfig

if TYPE_CHECKING:
    from ptuning.run import Prepared
    from ptuning.train import Progress

SHOWN = 3  # Examples, and reasons, that are printed.
LINES = 10  # Progress lines of a run whose stderr is no terminal.


def main(argv: list[str]) -> int:
    """`argv` begins with the command's own word."""
    if not argv or argv[0] != "tune":
        print("usage: python -m ptuning tune CONFIG.yaml", file=sys.stderr)
        return 2
    args = tune_parser().parse_args(argv[1:])
    try:
        config = TuneConfig.read(args.config)
        from ptuning.run import prepare

        prepared = prepare(config)
        return _check(prepared) if args.check else _tune(prepared)
    except PreambleError as error:
        print(f"preamble tune: {error}", file=sys.stderr)
        return 1


def tune_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble tune",
        description="Learn an adapter for a frozen model from examples, and write it as the next "
        "version of its name.",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="what to learn, and from what")
    parser.add_argument(
        "--check", action="store_true", help="show rendered examples; train and write nothing"
    )
    return parser


def _tune(prepared: "Prepared") -> int:
    from ptuning.run import run

    _say_dropped(prepared, sys.stderr)
    with _progress(prepared.config.steps) as report:
        result = run(prepared, report)
    count = len(prepared.examples.examples)
    losses = f"loss {result.first_loss:.4f} -> {result.last_loss:.4f}"
    print(f"{losses} on {count} examples", file=sys.stderr)
    print(result.path)
    return 0


@contextmanager
def _progress(steps: int) -> "Iterator[Callable[[Progress], None]]":
    """A bar on a terminal, a few lines elsewhere."""
    import time

    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        *("tuning", progress.BarColumn(), progress.MofNCompleteColumn()),
        *("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} tokens/s",),
        progress.TimeRemainingColumn(),
    )
    if not console.is_terminal:
        print(f"tuning, {steps} steps", file=sys.stderr, flush=True)
    started, tokens, interrupted = time.monotonic(), 0, False

    def interrupt(number: int, frame: object) -> None:
        # Raised in a destructor or a callback it would be lost; so the next step asks again.
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    bar = progress.Progress(*columns, console=console, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("", total=steps, loss=0.0, speed=0.0)

        def report(made: "Progress") -> None:
            nonlocal tokens
            if interrupted:
                raise KeyboardInterrupt
            tokens += made.tokens
            speed = tokens / max(1e-9, time.monotonic() - started)
            bar.update(task, advance=1, loss=made.loss, speed=speed)
            if not console.is_terminal and made.step % max(1, steps // LINES) == 0:
                line = f"step {made.step}/{steps}  loss {made.loss:.4f}  {speed:,.0f} tokens/s"
                print(line, file=sys.stderr, flush=True)

        try:
            yield report
        finally:
            signal.signal(signal.SIGINT, before)


def _check(prepared: "Prepared") -> int:
    """What the model would be shown, before anything is spent."""
    examples, tokenizer = prepared.examples, prepared.tokenizer
    vocabulary = prepared.checkpoint.config.vocab_size
    for example in examples.examples[:SHOWN]:
        prompt, answer = example.ids[: example.answer_start], example.ids[example.answer_start :]
        shown = ""
        for virtual, ids in groupby(prompt, lambda token: token >= vocabulary):
            run = list(ids)
            shown += f"<{len(run)} virtual>" if virtual else tokenizer.decode(run)
        print(f"prompt ({len(prompt)} tokens): {shown!r}")
        print(f"answer ({len(answer)} tokens): {tokenizer.decode(answer, started=True)!r}")
    lengths = sorted(len(example.ids) for example in examples.examples)
    print(
        f"{len(lengths)} examples of {lengths[0]} to {lengths[-1]} tokens, half of them up to "
        f"{lengths[len(lengths) // 2]}; {examples.truncated} were cut, "
        f"{len(examples.dropped)} left out"
    )
    _say_dropped(prepared, sys.stdout)
    return 0


def _say_dropped(prepared: "Prepared", where: TextIO) -> None:
    dropped = prepared.examples.dropped
    for reason in dropped[:SHOWN]:
        print(f"left out: {reason}", file=where)
    if len(dropped) > SHOWN:
        print(f"left out: {len(dropped) - SHOWN} more", file=where)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
