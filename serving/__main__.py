"""`preamble serve`, and `preamble generate` against a model in process.

Flags become a configuration, and one function is called with it. What takes seconds to import is
imported only when the flags are in order.
"""

import argparse
import asyncio
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.errors import ConfigError, PreambleError
from serving.config import ServerConfig
from serving.logs import log_to_stderr
from serving.profiles import PROFILES

if TYPE_CHECKING:
    from serving.request import Ask, Completion

log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """`argv` begins with the command's own word."""
    commands = {"serve": _serve, "generate": _generate}
    if not argv or argv[0] not in commands:
        print(f"usage: python -m serving {{{','.join(commands)}}} ...", file=sys.stderr)
        return 2
    try:
        return commands[argv[0]](argv[1:])
    except PreambleError as error:
        print(f"preamble {argv[0]}: {error}", file=sys.stderr)
        return 1


def serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble serve",
        description="Serve a model over gRPC and HTTP, with metrics and health. A flag "
        "overrides what the configuration file says; the file has every limit besides.",
    )
    parser.add_argument("model", nargs="?", help="the checkpoint's path")
    parser.add_argument("--config", metavar="F", help="a YAML file of settings")
    parser.add_argument(
        "--profile",
        choices=PROFILES,
        help="settings for short waits or for many tokens; the file and flags override them",
    )
    _add_model_flags(parser)
    parser.add_argument(
        "--chat-template", metavar="F", help="a jinja2 file, if none is beside the tokenizer"
    )
    parser.add_argument("--adapters", metavar="DIR", help="a directory of adapters to serve")
    parser.add_argument("--tp", metavar="N", type=int, help="tensor ranks (default: 1)")
    parser.add_argument("--pp", metavar="N", type=int, help="pipeline stages (default: 1)")
    parser.add_argument("--host", help="the address to bind (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="for gRPC; 0: any free one (default: 9000)")
    parser.add_argument("--http-port", type=int, help="0: any free one (default: 9001)")
    parser.add_argument("--device", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", help="what to compute in (default: as stored)")
    parser.add_argument(
        "--attention-backend",
        metavar="B",
        help="on a CUDA device: triton, flashinfer or torch (default: auto)",
    )
    parser.add_argument(
        "--kv-dtype", metavar="D", help="fp8: keys and values in eight bits (default: auto)"
    )
    parser.add_argument(
        "--linear-backend",
        metavar="B",
        help="products on a CUDA device: fp8, te (Transformer Engine) or torch (default: auto)",
    )
    parser.add_argument(
        "--weights", metavar="W", help="int8: of one byte each, on a CPU (default: auto)"
    )
    parser.add_argument(
        "--no-prove",
        dest="prove",
        action="store_false",
        default=None,
        help="start without replaying the checkpoint's proof",
    )
    parser.add_argument(
        "--strict",
        dest="golden",
        action="store_const",
        const="strict",
        help="serve no adapter whose golden examples this model answers otherwise",
    )
    parser.add_argument(
        "--no-page",
        dest="page",
        action="store_false",
        default=None,
        help="serve no page for people at / of the HTTP port",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="allow an address beyond loopback, without encryption or tokens",
    )
    return parser


def generate_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble generate",
        description="Complete one prompt, streamed to the terminal, with a model in process; "
        "with --server, by a running server.",
    )
    parser.add_argument("text", nargs="?", help="the prompt")
    parser.add_argument("--model", required=True, help="the checkpoint's path")
    _add_model_flags(parser)
    parser.add_argument("--adapters", metavar="DIR", help="the directory of the task's adapter")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", help="what to compute in (default: as stored)")
    _add_prompt_flags(parser)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    """What a checkpoint may not say itself; its message asks for them by name."""
    add = parser.add_argument
    add("--tokenizer", metavar="PATH", help="a file or directory, if none is beside the weights")
    add("--true-vocab-size", metavar="N", type=int, help="tokens, without the rows that pad them")
    add("--config-json", metavar="FILE", help="a JSON object of fields that the model lacks")


def _add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """The same as those of the client, which cannot see these; a test compares them."""
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


def _serve(argv: list[str]) -> int:
    flags = vars(serve_parser().parse_args(argv))
    file, profile, notes = flags.pop("config"), flags.pop("profile"), list[str]()
    config = ServerConfig.read(file, flags, profile=profile, note=notes.append)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Started by torchrun: this is one of the ranks, and one of them starts the front end.
        from serving.ranks.torchrun_worker import work

        work(config, argv)
    log_to_stderr(config.log_format)
    for note in notes:
        log.info("%s", note)
    from serving.server import serve

    return asyncio.run(serve(config, lambda line: print(line, flush=True)))


def _generate(argv: list[str]) -> int:
    parser = generate_parser()
    args = parser.parse_args(argv)
    if (args.text is None) == (not args.field):
        parser.error("give either a text or the task's --field NAME=VALUE")
    if args.json_schema and args.regex:
        parser.error("give either --json-schema or --regex")
    fields = dict(_field(word, parser) for word in args.field)
    config = ServerConfig(
        model=args.model,
        tokenizer=args.tokenizer,
        true_vocab_size=args.true_vocab_size,
        config_json=args.config_json,
        adapters=args.adapters,
        device=args.device,
        dtype=args.dtype,
        prove=False,  # It would take longer than the answer; who starts a server has replayed it.
    )
    from serving.messages import Guide
    from serving.request import Ask

    guide = None
    if args.json_schema:
        guide = Guide("json", _text_of(args.json_schema, "--json-schema"))
    elif args.regex:
        guide = Guide("regex", args.regex)
    ask = Ask(
        fields or args.text,
        adapters=tuple(args.task),
        answers=args.answers,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop_strings=tuple(args.stop),
        guide=guide,
    )
    return asyncio.run(_stream(config, ask))


async def _stream(config: ServerConfig, ask: "Ask") -> int:
    from serving.admission.admission import check_ask
    from serving.service.service import Found, Service, inside

    found = Found.at(config)
    # Weights take long to load, so first all that can be wrong without them.
    check_ask(ask, config, found.checkpoint.config.vocab_size)
    service = Service(found)
    service.adapters.scan()
    request = service.admission.admit(ask)
    # One request is all there will be: no more memory than it needs.
    several = len(request.answers) > 1
    lengths = [len(one.prompt) + one.sampling.max_new_tokens for one in request.answers]
    blocks = sum(-(-length // config.kv_block_tokens) for length in lengths)
    small = replace(
        config,
        kv_tokens_max=blocks * config.kv_block_tokens,
        running_requests_max=len(lengths),
        prefix_cache=several,
    )
    with service.open(inside(replace(found, config=small))):
        if several:
            return _tell(service.engine.generate([request]))
        async for piece in service.engine.submit(request):
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        sys.stdout.write("\n")
    return 0


def _tell(completions: "list[Completion]") -> int:
    """Each under a line that says whose it is; 1 if one failed."""
    failed = 0
    for one in completions:
        sys.stdout.write(f"--- {one.adapter or 'no task'}, seed {one.seed}\n")
        if one.error is None:
            sys.stdout.write(f"{one.text}\n")
        else:
            sys.stdout.flush()
            print(f"preamble generate: {one.error}", file=sys.stderr)
            failed = 1
    return failed


def _field(word: str, parser: argparse.ArgumentParser) -> tuple[str, str]:
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
        raise ConfigError(f"{what}: {path} cannot be read ({reason})") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
