"""`preamble generate --server`: one prompt, completed by a running server, streamed to stdout.

Flags become `Options`, and one call is made. It needs neither torch nor a checkpoint, so that it
starts quickly and can be installed where no model is.
"""

import argparse
import sys
from pathlib import Path

from clients.generation import CallError, Client, Options


def main(argv: list[str]) -> int:
    """`argv` begins with the command's own word."""
    if not argv or argv[0] != "generate":
        print("usage: python -m clients generate ...", file=sys.stderr)
        return 2
    parser = generate_parser()
    args = parser.parse_args(argv[1:])
    if (args.text is None) == (not args.field):
        parser.error("give either a text or the task's --field NAME=VALUE")
    try:
        fields = dict(_field(word, parser) for word in args.field)
    except ValueError as error:
        print(f"preamble generate: {error}", file=sys.stderr)
        return 1
    options = Options(
        adapter=args.task,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
    )
    try:
        with Client(args.server, args.timeout_s) as client:
            for piece in client.stream(fields or args.text, options):
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        sys.stdout.write("\n")
    except CallError as error:
        print(f"preamble generate: {error.code}: {error}", file=sys.stderr)
        return 1
    return 0


def generate_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble generate",
        description="Complete one prompt, streamed to the terminal, by a running server.",
    )
    parser.add_argument("text", nargs="?", help="the prompt")
    parser.add_argument("--server", metavar="HOST:PORT", required=True, help="where it listens")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="seconds (default: 60)")
    _add_prompt_flags(parser)
    return parser


def _add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """The same as those of the command in process, which cannot see these; a test compares them."""
    add = parser.add_argument
    add("--task", metavar="T", default="", help="an adapter, as name or name@version")
    add("--field", metavar="NAME=VALUE", action="append", default=[],
        help="a field of the task's template; NAME=@FILE reads a file")  # fmt: skip
    add("--max-new-tokens", metavar="N", type=int, help="tokens to make at most")
    add("--temperature", metavar="X", type=float, help="0: the most likely tokens (default: 0)")
    add("--top-k", metavar="N", type=int, default=0, help="0: all (default: 0)")
    add("--top-p", metavar="X", type=float, help="in (0, 1] (default: 1)")
    add("--seed", metavar="N", type=int, help="the same seed, the same tokens (default: drawn)")
    add("--stop", metavar="TEXT", action="append", default=[], help="end at this text")


def _field(word: str, parser: argparse.ArgumentParser) -> tuple[str, str]:
    """Of NAME=VALUE or NAME=@FILE; a ValueError says which file cannot be read."""
    name, equals, value = word.partition("=")
    if not equals or not name:
        parser.error(f"--field {word!r} is not NAME=VALUE")
    if value.startswith("@"):
        try:
            value = Path(value[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", "it is not UTF-8")
            raise ValueError(f"--field {name}: {value[1:]} cannot be read ({reason})") from None
    return name, value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
