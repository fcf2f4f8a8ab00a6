"""Command line of the clients: `preamble generate --server`, `adapters` and `bench`.

`generate` converts its flags to `Options` and makes one call; `clients.cli.generate` declares the
flags and writes the output. `clients.cli.adapters` and `clients.cli.bench` implement the other two
commands. The commands need neither torch nor a checkpoint, so they start quickly and run on a
machine without a model.
"""

import argparse
import os
import sys

from clients.cli.adapters import adapters_command
from clients.cli.bench import bench_command
from clients.cli.flags import add_server_flags, open_client
from clients.cli.generate import (
    FinishedCompletion,
    add_prompt_flags,
    read_guide,
    read_prompt,
    write_completions,
    write_text,
)
from clients.client import CallError, Client, Guide, Options, Prompt


def main(argv: list[str]) -> int:
    """Run the command named by `argv[0]`, and return the exit code."""
    if argv and argv[0] == "adapters":
        return adapters_command(argv[1:])
    if argv and argv[0] == "bench":
        return bench_command(argv[1:])
    if not argv or argv[0] != "generate":
        print("usage: python -m clients {generate,adapters,bench} ...", file=sys.stderr)
        return 2
    parser = generate_parser()
    args = parser.parse_args(argv[1:])
    try:
        prompt = read_prompt(args, parser)
        options = _options(args)
        client = open_client(args)
    except ValueError as error:
        print(f"preamble generate: {error}", file=sys.stderr)
        return 1
    try:
        with client:
            return _generate(client, prompt, options)
    except CallError as error:
        print(f"preamble generate: {error.code}: {error}", file=sys.stderr)
        return 1


def generate_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble generate",
        description="Complete one prompt on a running server. One completion is streamed to the "
        "terminal; several are printed when all of them are finished.",
    )
    parser.add_argument("text", nargs="?", help="the prompt")
    add_server_flags(parser)
    add_prompt_flags(parser)
    return parser


def _options(args: argparse.Namespace) -> Options:
    guide = None
    flag = read_guide(args)
    if flag is not None:
        guide = Guide(json_schema=flag.text) if flag.kind == "json" else Guide(regex=flag.text)
    return Options(
        adapters=args.task,
        answers=args.answers,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=args.stop,
        guide=guide,
    )


def _generate(client: Client, prompt: Prompt, options: Options) -> int:
    if len(options.adapters) > 1 or options.answers > 1:
        return write_completions(
            FinishedCompletion(
                completion.adapter,
                completion.seed,
                completion.text,
                completion.failure.message if completion.failure is not None else None,
            )
            for completion in client.completions(prompt, options)
        )
    for piece in client.stream(prompt, options):
        if piece.resumed_at:
            message = f"the server was lost; {piece.resumed_at} continues the completion"
            print(f"preamble generate: {message}", file=sys.stderr, flush=True)
        write_text(piece.text)
    write_text("\n")
    return 0


def _run_command() -> int:
    """Entry point of `python -m clients`; exits like the `preamble` command."""
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The process that reads stdout has exited. Python flushes stdout at exit, which would fail
        # again, so stdout is redirected to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(_run_command())
