"""Commands `preamble convert`, `inspect`, `verify` and `adapters check|import|export|log`.

`convert` makes a conversion plan from its flags and prints the plan; without `--dry-run` it then
executes the plan. Results are printed to stdout, messages and progress to stderr.
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
    source_overrides,
    verify_parser,
)
from gpt.errors import PreambleError

if TYPE_CHECKING:
    from checkpoints_tools.conversion.convert import ConversionPlan, ConversionResult
    from gpt.adapters.card import Adapter
    from gpt.checkpoint.logical_tensor import Checkpoint

FILES_SHOWN_MAX = 24  # Maximum number of files that a printed plan lists.
PROGRESS_LINE_SECONDS = 5.0  # Interval between progress lines if stderr is not a terminal.


def main(argv: list[str]) -> int:
    """Run the command named by `argv[0]`, and return the exit status."""
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
    if argv[:1] == ["log"]:  # This action, unlike the others, must not wait for torch's import.
        from checkpoints_tools.adapters.changes import log_command

        return log_command(argv[1:])
    from checkpoints_tools.adapters.check import check_command
    from checkpoints_tools.adapters.exchange import export_command, import_command

    actions = {"check": check_command, "import": import_command, "export": export_command}
    if not argv or argv[0] not in actions:
        print(f"usage: preamble adapters {{{','.join(actions)},log}} ...", file=sys.stderr)
        return 2
    return actions[argv[0]](argv[1:])


def _convert(argv: list[str]) -> int:
    parser = convert_parser()
    flags = parser.parse_args(argv)
    if flags.to == "nemo" and flags.target.suffix != ".nemo":
        parser.error(
            f"--to nemo writes one .nemo file, but the target is {flags.target}; give a name that "
            "ends in .nemo"
        )
    overrides = source_overrides(flags)

    from checkpoints_tools.conversion.convert import convert, plan
    from checkpoints_tools.conversion.target_directory import check_target
    from checkpoints_tools.layout.layout import ParallelSplit
    from checkpoints_tools.writers.registry import ConversionOptions
    from gpt.formats.registry import open_checkpoint

    options = ConversionOptions(
        target_format=flags.to,
        dtype=flags.dtype,
        tokenizer=Path(flags.tokenizer).expanduser() if flags.tokenizer else None,
        prove=flags.prove,
        split=ParallelSplit(flags.tp, flags.pp, flags.vpp, flags.ep),
        vocabulary_multiple=flags.make_vocab_size_divisible_by,
        spec=flags.megatron_spec,
        model=flags.model,
        family=flags.family,
        shard_bytes_max=int(flags.shard_gb * 1e9) if flags.shard_gb is not None else None,
    )
    source = open_checkpoint(flags.source, overrides)
    base, adapter = source, None
    if flags.merge is not None:
        from checkpoints_tools.conversion.merge import merge_adapter, open_merge_adapter

        adapter = open_merge_adapter(flags.merge, base)
        source = merge_adapter(base, adapter, flags.merge, flags.dtype)
    conversion = plan(source, flags.target.expanduser(), options)
    for line in _describe_plan(conversion):
        print(line, file=sys.stdout if flags.dry_run else sys.stderr)
    if flags.dry_run:
        check_target(conversion.source, conversion.target, conversion.layout, flags.resume)
        return 0
    started = time.monotonic()
    try:
        with _progress_bar(
            sum(tensor.nbytes for tensor in conversion.source.tensors.values())
        ) as report_progress:
            result = convert(
                conversion,
                resume=flags.resume,
                workers=flags.workers,
                memory_bytes=flags.memory_mb << 20,
                refuse_nan=flags.refuse_nan,
                report_progress=report_progress,
            )
    except KeyboardInterrupt:
        if conversion.partial_dir.exists():
            print(
                f"interrupted; {conversion.partial_dir} has the tensors copied so far; run again "
                "with --resume to continue",
                file=sys.stderr,
            )
        raise
    _print_conversion(conversion, result, time.monotonic() - started)
    if adapter is not None:
        _check_merge(base, conversion, adapter)
    return 0


def _check_merge(base: "Checkpoint", plan: "ConversionPlan", adapter: "Adapter") -> None:
    from checkpoints_tools.conversion.merge import check_merge
    from gpt.formats.registry import open_checkpoint

    check = check_merge(base, open_checkpoint(plan.target), adapter)
    print(
        f"merged {len(adapter.linears)} changes of {adapter.card.name}: in {check.checked_rows:,} "
        f"rows, merged - W equals the change within the rounding of {plan.converted.config.dtype} "
        f"({check.relative_error:.2%} of it, rms)",
        file=sys.stderr,
    )


def _inspect(argv: list[str]) -> int:
    flags = inspect_parser().parse_args(argv)
    from checkpoints_tools.inspection.report import inspect

    return inspect(flags, print, _progress_bar)


def _verify(argv: list[str]) -> int:
    flags = verify_parser().parse_args(argv)
    from checkpoints_tools.inspection.verify import verify

    return verify(flags, print, _progress_bar)


def _describe_plan(plan: "ConversionPlan") -> Iterator[str]:
    config, layout = plan.converted.config, plan.layout
    files = (*layout.files, *layout.last_files)
    weight_bytes = sum(tensor.nbytes for tensor in plan.source.tensors.values())
    yield (
        f"{plan.source.path} ({plan.source.format}, {config.num_layers} layers, {weight_bytes:,} "
        f"bytes of {plan.source.config.dtype}) -> {plan.target} ({layout.format}, {config.dtype}, "
        f"{len(files)} files, {layout.nbytes:,} bytes)"
    )
    for file in files[:FILES_SHOWN_MAX]:
        contents = f"{len(file.placements)} tensors" if file.placements else ""
        yield f"  {file.path}  {file.size:,} bytes  {contents}".rstrip()
    if len(files) > FILES_SHOWN_MAX:
        yield f"  and {len(files) - FILES_SHOWN_MAX} more files"
    if layout.padded_vocab_size not in (None, config.vocab_size):
        yield (
            f"  vocabulary of {config.vocab_size:,} tokens, padded to "
            f"{layout.padded_vocab_size:,} rows"
        )
    for note in (*plan.source.notes, *layout.notes):
        yield f"note: {note}"


def _print_conversion(plan: "ConversionPlan", result: "ConversionResult", seconds: float) -> None:
    if result.already_complete:
        print(f"{plan.target} is already complete", file=sys.stderr)
    else:
        speed = plan.layout.nbytes / max(seconds, 1e-9) / 1e9
        print(f"{plan.layout.nbytes:,} bytes in {seconds:.1f} s, {speed:.2f} GB/s", file=sys.stderr)
    for names, problem in (
        (result.nonfinite_tensors, "contain NaN or infinite values"),
        (
            result.overflowed_tensors,
            f"contain finite values that overflow in {plan.converted.config.dtype}",
        ),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            print(f"warning: {', '.join(names[:3])}{more} {problem}", file=sys.stderr)
    print(f"{plan.target}  digest {result.identity.digest}")


@contextmanager
def _progress_bar(total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr: a bar on a terminal, else a line every PROGRESS_LINE_SECONDS.

    Until the progress display ends, SIGTERM raises KeyboardInterrupt, so that cleanup code runs.
    """
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    started = last_line_at = time.monotonic()
    bar = progress.Progress(*columns, console=console, disable=not console.is_terminal)
    previous_handler = signal.signal(signal.SIGTERM, _raise_keyboard_interrupt)
    with bar:
        task = bar.add_task("", total=total_bytes)

        def update_bar(done_bytes: int) -> None:
            nonlocal last_line_at
            bar.update(task, completed=done_bytes)
            now = time.monotonic()
            if not console.is_terminal and now - last_line_at > PROGRESS_LINE_SECONDS:
                last_line_at = now
                speed = done_bytes / (now - started) / 1e9
                remaining_s = (total_bytes - done_bytes) / max(done_bytes, 1) * (now - started)
                line = (
                    f"{done_bytes:,} of {total_bytes:,} bytes, {speed:.2f} GB/s, {remaining_s:.0f} "
                    "s left"
                )
                print(line, file=sys.stderr, flush=True)

        try:
            yield update_bar
        finally:
            signal.signal(signal.SIGTERM, previous_handler)


def _raise_keyboard_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
