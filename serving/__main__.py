"""Command lines of `preamble serve`, `ray`, and `generate` with the model in process.

The flags become a `ServerConfig`, which is passed to the server or to an in-process service.
Modules that take seconds to import are imported only after the flags have been checked.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from clients.cli.generate import (
    FinishedCompletion,
    add_prompt_flags,
    read_guide,
    read_prompt,
    write_completions,
    write_text,
)
from gpt.cpu_threads import limit_openmp_spinning, set_thread_count
from gpt.errors import ConfigError, PreambleError
from gpt.garbage_collection import imports_without_collections
from serving.config import TOOL_CALL_FORMATS, ServerConfig
from serving.logs import log_to_stderr
from serving.profiles import PROFILES

if TYPE_CHECKING:
    from serving.messages import Guide
    from serving.request import Ask

log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Run the command `argv[0]`, and return its exit status."""
    commands = {"serve": _serve, "generate": _generate, "ray": _ray}
    if not argv or argv[0] not in commands:
        print(f"usage: python -m serving {{{','.join(commands)}}} ...", file=sys.stderr)
        return 2
    limit_openmp_spinning()  # Before any import of torch.
    try:
        return commands[argv[0]](argv[1:])
    except PreambleError as error:
        print(f"preamble {argv[0]}: {error}", file=sys.stderr)
        return 1


def serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble serve",
        description="Serve a model over gRPC and HTTP, with metrics and health checks. Flags "
        "override the settings in the configuration file; all limits can be set in the file.",
    )
    parser.add_argument("model", nargs="?", help="path of the checkpoint")
    parser.add_argument("--config", metavar="F", help="YAML file of settings")
    parser.add_argument(
        "--profile",
        choices=PROFILES,
        help="settings for low latency or high throughput; the --config file and the flags "
        "override them",
    )
    _add_model_flags(parser)
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        nargs="+",
        help="names of the model for clients; responses have the first (default: the name of the "
        "checkpoint's folder)",
    )
    parser.add_argument(
        "--chat-template", metavar="F", help="jinja2 file (default: the one beside the tokenizer)"
    )
    parser.add_argument(
        "--tool-call-format",
        metavar="FORMAT",
        help=f"how the model writes calls of tools: {', '.join(TOOL_CALL_FORMATS)} (default: auto, "
        "by the chat template)",
    )
    _add_adapter_flags(parser)
    parser.add_argument("--tp", metavar="N", type=int, help="tensor-parallel ranks (default: 1)")
    parser.add_argument("--pp", metavar="N", type=int, help="pipeline stages (default: 1)")
    parser.add_argument(
        "--ep",
        metavar="N",
        type=int,
        help="expert-parallel ranks: divide the experts into N parts of whole experts (default: 1, "
        "each expert is split over the tensor-parallel ranks)",
    )
    parser.add_argument("--host", help="address to bind (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="gRPC port; 0: any free port (default: 9000)")
    parser.add_argument("--http-port", type=int, help="HTTP port; 0: any free port (default: 9001)")
    parser.add_argument("--device", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", help="compute dtype (default: the checkpoint's)")
    parser.add_argument(
        "--attention-backend",
        metavar="B",
        help="attention backend on a CUDA device: triton, flashinfer or torch (default: auto)",
    )
    parser.add_argument(
        "--kv-dtype",
        metavar="D",
        help="KV cache dtype: fp8 (8 bits), or auto for the compute dtype (default: auto)",
    )
    parser.add_argument(
        "--linear-backend",
        metavar="B",
        help="linear layers on a CUDA device: fp8, te (Transformer Engine) or torch "
        "(default: auto)",
    )
    parser.add_argument(
        "--weights",
        metavar="W",
        help="weight format: int8 (8 bits, on a CPU), or auto for the compute dtype "
        "(default: auto)",
    )
    parser.add_argument(
        "--no-prove",
        dest="prove",
        action="store_false",
        default=None,
        help="start without comparing the model's logits with the checkpoint's proof file",
    )
    parser.add_argument(
        "--strict",
        dest="golden",
        action="store_const",
        const="strict",
        help="refuse requests for an adapter until its golden examples pass on this model",
    )
    parser.add_argument(
        "--no-page",
        dest="page",
        action="store_false",
        default=None,
        help="do not serve the web page at / of the HTTP port",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="allow a non-loopback address without TLS or tokens",
    )
    return parser


# Flags of vLLM that this server does not have, with what to set instead.
_MEMORY_ADVICE = (
    "set adapter_memory_mb in the --config file, the memory of each rank for adapters: an adapter "
    "takes only as much as its own rank needs"
)
_VLLM_FLAGS = {
    "--max-loras": _MEMORY_ADVICE,
    "--max-lora-rank": _MEMORY_ADVICE,
    "--max-cpu-loras": "set adapter_bytes_max in the --config file, the host memory for adapters",
    "--fully-sharded-loras": "adapters are split over the ranks as the weights are; leave it out",
    "--lora-target-modules": "each adapter says which linears it changes; leave it out",
    "--lora-dtype": "adapters have the compute dtype (--dtype); leave it out",
}


class _IgnoredFlag(argparse.Action):
    """A flag that is accepted and sets nothing."""

    def __call__(self, *args: object) -> None:
        pass


def _add_adapter_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--adapters",
        metavar="DIR",
        help="directory of adapters to serve, or s3://BUCKET/PREFIX, an object store of adapters",
    )
    add(
        "--adapter-imports",
        metavar="DIR",
        help="directory of adapters of PEFT, NeMo or TGIS, which requests and callers can load",
    )
    add(
        "--lora-modules",
        metavar="NAME=PATH",
        nargs="+",
        help="adapters of any format to load at start; also JSON objects, as in vLLM",
    )
    add(
        "--enable-lora",
        action=_IgnoredFlag,
        nargs=0,
        default=argparse.SUPPRESS,
        help="accepted for command lines of vLLM: LoRA adapters need no flag",
    )


def _refuse_vllm_flags(argv: list[str], parser: argparse.ArgumentParser) -> None:
    """Refuse flags of vLLM that have another name or no use here, with advice."""
    for argument in argv:
        flag = argument.partition("=")[0]
        if (advice := _VLLM_FLAGS.get(flag)) is not None:
            parser.error(f"{flag} is a flag of vLLM that this server does not have: {advice}")


def generate_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble generate",
        description="Complete one prompt with a model in this process and stream the text to the "
        "terminal; with --server, use a running server instead.",
    )
    parser.add_argument("text", nargs="?", help="the prompt")
    parser.add_argument("--model", required=True, help="path of the checkpoint")
    _add_model_flags(parser)
    parser.add_argument(
        "--adapters", metavar="DIR", help="directory of the adapters that --task names"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", help="compute dtype (default: the checkpoint's)")
    add_prompt_flags(parser)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for settings that a checkpoint may lack; error messages name these flags."""
    add = parser.add_argument
    add("--tokenizer", metavar="PATH", help="file or directory (default: beside the weights)")
    add("--true-vocab-size", metavar="N", type=int, help="vocabulary size without padding rows")
    add("--config-json", metavar="FILE", help="JSON file of model fields to add or correct")


def _serve(argv: list[str]) -> int:
    parser = serve_parser()
    _refuse_vllm_flags(argv, parser)
    flags = vars(parser.parse_args(argv))
    config_path = flags.pop("config")
    profile = flags.pop("profile")
    notes = list[str]()
    config = ServerConfig.read(config_path, flags, profile=profile, on_note=notes.append)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Torchrun started this process, so it becomes a rank. One rank starts the front end.
        # `run_worker` does not return.
        with imports_without_collections():
            from serving.ranks.torchrun_worker import run_worker

        run_worker(config, argv)
    log_to_stderr(config.observability_config.log_format)
    for note in notes:
        log.info("%s", note)
    with imports_without_collections():
        from serving.server import serve

    return asyncio.run(serve(config, lambda line: print(line, flush=True)))


def _ray(argv: list[str]) -> int:
    from serving.ray.command import run

    return run(argv, serve_parser())


def _generate(argv: list[str]) -> int:
    parser = generate_parser()
    args = parser.parse_args(argv)
    prompt = _read_prompt(args, parser)
    config = ServerConfig(
        model=args.model,
        tokenizer=args.tokenizer,
        true_vocab_size=args.true_vocab_size,
        config_json=args.config_json,
        adapters=args.adapters,
        device=args.device,
        dtype=args.dtype,
        prove=False,  # Comparing the logits with the proof would take longer than the completion.
    )
    from serving.request import Ask

    ask = Ask(
        prompt,
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
        guide=_read_guide(args),
    )
    return asyncio.run(_stream(config, ask))


async def _stream(config: ServerConfig, ask: "Ask") -> int:
    from serving.admission.admission import check_ask
    from serving.service.service import ServableCheckpoint, Service, in_process_transport

    servable = ServableCheckpoint.from_config(config)
    # Loading weights takes long, so all checks that do not need weights come first.
    check_ask(ask, config.limits_config, servable.checkpoint.config.vocab_size)
    set_thread_count()
    service = Service(servable)
    service.adapters.scan()
    request = service.admission.admit(ask)
    # There is only one request, so the KV cache is sized for it.
    has_several_answers = len(request.answers) > 1
    lengths = [len(answer.prompt) + answer.sampling.max_new_tokens for answer in request.answers]
    block_tokens = config.cache_config.kv_block_tokens
    blocks = sum(-(-length // block_tokens) for length in lengths)
    sized_config = config.with_fields(
        kv_tokens_max=blocks * block_tokens,
        running_requests_max=len(lengths),
        prefix_cache=has_several_answers,
    )
    with service.open(in_process_transport(replace(servable, config=sized_config))):
        if has_several_answers:
            return write_completions(
                FinishedCompletion(
                    completion.adapter,
                    completion.seed,
                    completion.text,
                    str(completion.error) if completion.error is not None else None,
                )
                for completion in service.engine.generate([request])
            )
        async for piece in service.engine.submit(request):
            write_text(piece.text)
        write_text("\n")
    return 0


def _read_prompt(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> str | Mapping[str, str]:
    try:
        return read_prompt(args, parser)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _read_guide(args: argparse.Namespace) -> "Guide | None":
    from serving.messages import Guide

    try:
        flag = read_guide(args)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Guide(flag.kind, flag.text) if flag is not None else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
