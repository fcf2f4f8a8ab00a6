"""`preamble convert`, `inspect` and `verify`; and `preamble adapters check`, `import`, `export`.

Flags become a wish, the wish a plan; the plan is printed, and carried out unless it was only asked
for. Results go to stdout, talk and progress to stderr.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_tools.flags import (
    convert_parser,
    inspect_parser,
    source_changes,
    verify_parser,
)
from gpt.errors import PreambleError

if TYPE_CHECKING:
    from checkpoints_tools.conversion.convert import Plan, Result

FILES_SHOWN = 24
LINE_SECONDS = 5.0  # Between lines of progress where there is no terminal.


def main(argv: list[str]) -> int:
    """`argv` begins with the command's own word."""
    commands = {
        "convert": _convert,
        "inspect": _inspect,
        "verify": _verify,
        "adapters": _adapters,
    }
    if not argv or argv[0] not in commands:
        print(f"usage: python -m checkpoints_tools {{{','.join(commands)}}} ...", file=sys.stderr)
        return 2
    try:
        return commands[argv[0]](argv[1:])
    except PreambleError as error:
        print(f"preamble {argv[0]}: {error}", file=sys.stderr)
        return 1


def _adapters(argv: list[str]) -> int:
    from checkpoints_tools.adapters.check import check_command
    from checkpoints_tools.adapters.exchange import export_command, import_command

    actions = {"check": check_command, "import": import_command, "export": export_command}
    if not argv or argv[0] not in actions:
        print(f"usage: preamble adapters {{{','.join(actions)}}} ...", file=sys.stderr)
        return 2
    return actions[argv[0]](argv[1:])


def _convert(argv: list[str]) -> int:
    parser = convert_parser()
    flags = parser.parse_args(argv)
    if flags.to == "nemo" and not flags.target.endswith(".nemo"):
        parser.error(f"{flags.target} does not end in .nemo, by which such a file is known")
    changes = source_changes(flags)

    from checkpoints_tools.conversion.convert import convert, plan
    from checkpoints_tools.conversion.target_directory import check_place
    from checkpoints_tools.layout.layout import Division
    from checkpoints_tools.writers.registry import Wish
    from gpt.formats.registry import open_checkpoint

    wish = Wish(
        to=flags.to,
        dtype=flags.dtype,
        tokenizer=Path(flags.tokenizer).expanduser() if flags.tokenizer else None,
        prove=flags.prove,
        division=Division(flags.tp, flags.pp, flags.vpp, flags.ep),
        vocabulary_multiple=flags.make_vocab_size_divisible_by,
        spec=flags.megatron_spec,
        family=flags.family,
        shard_bytes_max=int(flags.shard_gb * 1e9) if flags.shard_gb is not None else None,
    )
    made = plan(open_checkpoint(flags.source, changes), Path(flags.target).expanduser(), wish)
    for line in _described(made):
        print(line, file=sys.stdout if flags.dry_run else sys.stderr)
    if flags.dry_run:
        check_place(made.source, made.target, made.layout, flags.resume)
        return 0
    started = time.monotonic()
    try:
        with _progress(sum(tensor.nbytes for tensor in made.source.tensors.values())) as report:
            result = convert(
                made,
                resume=flags.resume,
                workers=flags.workers,
                memory=flags.memory_mb << 20,
                refuse_nan=flags.refuse_nan,
                report=report,
            )
    except KeyboardInterrupt:
        if made.partial.exists():
            print(f"what is done lies in {made.partial}; --resume goes on", file=sys.stderr)
        raise
    _tell(made, result, time.monotonic() - started)
    return 0


def _inspect(argv: list[str]) -> int:
    flags = inspect_parser().parse_args(argv)
    from checkpoints_tools.inspection.report import inspect

    return inspect(flags, print, _progress)


def _verify(argv: list[str]) -> int:
    flags = verify_parser().parse_args(argv)
    from checkpoints_tools.inspection.verify import verify

    return verify(flags, print, _progress)


def _described(plan: "Plan") -> Iterator[str]:
    config, layout = plan.made.config, plan.layout
    weights = sum(tensor.nbytes for tensor in plan.source.tensors.values())
    yield (
        f"{plan.source.path} ({plan.source.format}, {config.num_layers} layers, {weights:,} bytes "
        f"of {plan.source.config.dtype}) -> {plan.target} ({layout.format}, {config.dtype}, "
        f"{len(layout.files) + len(layout.last)} files, {layout.nbytes:,} bytes)"
    )
    for file in (*layout.files, *layout.last)[:FILES_SHOWN]:
        held = f"{len(file.placements)} tensors" if file.placements else ""
        yield f"  {file.path}  {file.size:,} bytes  {held}".rstrip()
    if len(layout.files) > FILES_SHOWN:
        yield f"  and {len(layout.files) - FILES_SHOWN} more files"
    if layout.vocabulary_rows not in (None, config.vocab_size):
        yield f"  {config.vocab_size:,} tokens, padded to {layout.vocabulary_rows:,} rows"
    for note in (*plan.source.notes, *layout.notes):
        yield f"note: {note}"


def _tell(plan: "Plan", result: "Result", seconds: float) -> None:
    if result.was_complete:
        print(f"{plan.target} was complete already", file=sys.stderr)
    else:
        speed = plan.layout.nbytes / max(seconds, 1e-9) / 1e9
        print(f"{plan.layout.nbytes:,} bytes in {seconds:.1f} s, {speed:.2f} GB/s", file=sys.stderr)
    for names, what in (
        (result.not_finite, "hold values that are not finite"),
        (result.overflown, f"hold values that became infinite in {plan.made.config.dtype}"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            print(f"warning: {', '.join(names[:3])}{more} {what}", file=sys.stderr)
    print(f"{plan.target}  digest {result.identity.digest}")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line now and then elsewhere."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        *(progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn()),
        progress.TimeRemainingColumn(),
    )
    started = said = time.monotonic()
    bar = progress.Progress(*columns, console=console, disable=not console.is_terminal)
    before = signal.signal(signal.SIGTERM, _interrupted)
    with bar:
        task = bar.add_task("", total=total)

        def report(passed: int) -> None:
            nonlocal said
            bar.update(task, completed=passed)
            now = time.monotonic()
            if not console.is_terminal and now - said > LINE_SECONDS:
                said = now
                speed = passed / (now - started) / 1e9
                left = (total - passed) / max(passed, 1) * (now - started)
                line = f"{passed:,} of {total:,} bytes, {speed:.2f} GB/s, {left:.0f} s left"
                print(line, file=sys.stderr, flush=True)

        try:
            yield report
        finally:
            signal.signal(signal.SIGTERM, before)


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
