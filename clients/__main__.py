"""`preamble generate --server`: one prompt, completed by a running server, streamed to stdout;
and `preamble adapters` and `bench`, which are their own modules' business.

Flags become `Options`, and one call is made. It needs neither torch nor a checkpoint, so that it
starts quickly and can be installed where no model is.
"""

import argparse
import os
import sys
from pathlib import Path

from clients.cli.adapters import adapters_command
from clients.cli.bench import bench_command
from clients.cli.flags import add_server_flags, open_client
from clients.client import CallError, Client, Completion, Guide, Options, Prompt


def main(argv: list[str]) -> int:
    """`argv` begins with the command's own word."""
    if argv and argv[0] == "adapters":
        return adapters_command(argv[1:])
    if argv and argv[0] == "bench":
        return bench_command(argv[1:])
    if not argv or argv[0] != "generate":
        print("usage: python -m clients {generate,adapters,bench} ...", file=sys.stderr)
        return 2
    parser = generate_parser()
    args = parser.parse_args(argv[1:])
    if (args.text is None) == (not args.field):
        parser.error("give either a text or the task's --field NAME=VALUE")
    if args.json_schema and args.regex:
        parser.error("give either --json-schema or --regex")
    try:
        fields = dict(_field(word, parser) for word in args.field)
        options = _options(args)
        client = open_client(args)
    except ValueError as error:
        print(f"preamble generate: {error}", file=sys.stderr)
        return 1
    try:
        with client:
            return _generate(client, fields or args.text, options)
    except CallError as error:
        print(f"preamble generate: {error.code}: {error}", file=sys.stderr)
        return 1


def generate_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble generate",
        description="Complete one prompt by a running server: streamed to the terminal, or, if it "
        "is to have several answers, each of them when all are done.",
    )
    parser.add_argument("text", nargs="?", help="the prompt")
    add_server_flags(parser)
    _add_prompt_flags(parser)
    return parser


def _add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """The same as those of the command in process, which cannot see these; a test compares them."""
    add = parser.add_argument
    add("--task", metavar="T", action="append", default=[],
        help="an adapter, as name or name@version; several answer each by itself")  # fmt: skip
    add("--field", metavar="NAME=VALUE", action="append", default=[],
        help="a field of the task's template; NAME=@FILE reads a file")  # fmt: skip
    add("--answers", metavar="N", type=int, default=1, help="to each task (default: 1)")
    add("--max-new-tokens", metavar="N", type=int, help="tokens to make at most")
    add("--temperature", metavar="X", type=float, help="0: the most likely tokens (default: 0)")
    add("--top-k", metavar="N", type=int, default=0, help="0: all (default: 0)")
    add("--top-p", metavar="X", type=float, help="in (0, 1] (default: 1)")
    add("--min-p", metavar="X", type=float, default=0.0, help="from 0 to 1 (default: 0, all)")
    add("--repetition-penalty", metavar="X", type=float, default=1.0, help="(default: 1, none)")
    add("--seed", metavar="N", type=int, help="the same seed, the same tokens (default: drawn)")
    add("--stop", metavar="TEXT", action="append", default=[], help="end at this text")
    add("--json-schema", metavar="FILE", help="make JSON that this schema allows")
    add("--regex", metavar="RE", help="make what this regular expression matches")


def _options(args: argparse.Namespace) -> Options:
    guide = None
    if args.json_schema:
        guide = Guide(json_schema=_text_of(args.json_schema, "--json-schema"))
    elif args.regex:
        guide = Guide(regex=args.regex)
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
        return _tell(client.completions(prompt, options))
    for piece in client.stream(prompt, options):
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _tell(completions: list[Completion]) -> int:
    """Each under a line that says whose it is; 1 if one failed."""
    failed = 0
    for one in completions:
        sys.stdout.write(f"--- {one.adapter or 'no task'}, seed {one.seed}\n")
        if one.failure is None:
            sys.stdout.write(f"{one.text}\n")
        else:
            sys.stdout.flush()
            print(f"preamble generate: {one.failure.message}", file=sys.stderr)
            failed = 1
    return failed


def _field(word: str, parser: argparse.ArgumentParser) -> tuple[str, str]:
    """Of NAME=VALUE or NAME=@FILE; a ValueError says which file cannot be read."""
    name, equals, value = word.partition("=")
    if not equals or not name:
        parser.error(f"--field {word!r} is not NAME=VALUE")
    if value.startswith("@"):
        value = _text_of(value[1:], f"--field {name}")
    return name, value


def _text_of(path: str, what: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is not UTF-8")
        raise ValueError(f"{what}: {path} cannot be read ({reason})") from None


def _run() -> int:
    """As the one command does it, for who has only this folder."""
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; Python would try again at its exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(_run())
