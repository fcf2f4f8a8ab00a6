"""Command-line flags shared by the `preamble plan` subcommands.

A shared flag has the same name and meaning in every subcommand. The destination of a flag is the
name of the specification field that it sets; `FLAG_OF_FIELD` in `planning.cli.specification` lists
the exceptions. A flag that is not set is None, and the specification file sets the field; without a
value in the file, the field has its default. This module defines the flags and parses their values.
"""

import argparse
import textwrap
from collections.abc import Callable

from gpt.costs.linear_adapter import METHODS
from gpt.errors import ConfigError
from planning.cli.specification import parse_count

AddArgument = Callable[..., argparse.Action]


def make_command_parser(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"preamble plan {name}",
        description=textwrap.fill(description, 80),
        epilog=f"examples:\n{examples.rstrip()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_shared_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--spec", metavar="F", help="a YAML specification file; flags override its values")
    add("--json", action="store_true", help="print JSON instead of text")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="path of a checkpoint (only its config is read), or a preset: gpt3-5b, 20b, 22b, 40b, "
        "175b, 530b, 1t, llama2-7b, ...",
    )
    group = parser.add_argument_group("a model without a checkpoint")
    add = group.add_argument
    add("--model", dest="model_flag", metavar="MODEL", help="the same as the argument MODEL")
    add("--layers", metavar="N", type=int, help="number of transformer layers")
    add("--hidden", metavar="N", type=int, help="hidden size")
    add("--heads", metavar="N", type=int, help="number of attention heads")
    add("--kv-heads", metavar="N", type=int, help="number of KV heads (default: --heads)")
    add("--ffn", metavar="N", type=int, help="hidden size of the MLP (default: 4 x hidden)")
    add(
        "--seq",
        metavar="N",
        type=int,
        help="sequence length (default: the model's context length; with --layers, 2048)",
    )
    add("--vocab", metavar="N", type=int, help="vocabulary size (default: 51200)")
    add(
        "--gated",
        action="store_true",
        default=None,
        help="LLaMA architecture: gated MLP, rotary positions, RMSNorm, no biases",
    )
    add(
        "--dtype",
        help="dtype of the weights: bfloat16 or float16; also float32 for inference, fp8 for "
        "training and static batches, int8 and int4 for static batches (default: bfloat16 for "
        "training, float16 for a static batch, the dtype of MODEL for a server)",
    )


def add_hardware_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("hardware").add_argument
    add("--gpu", metavar="NAME", help="a100-40g, a100-80g, h100, h200, l40s or b200")
    add("--gpus", metavar="N", type=int, help="number of GPUs")
    add("--nodes", metavar="N", type=int, help="number of nodes, instead of --gpus")
    add("--gpus-per-node", metavar="N", type=int, help="number of GPUs per node (default: 8)")
    add(
        "--calibration",
        metavar="F",
        help="file that `preamble plan calibrate` wrote on this machine, to plan for this machine",
    )


def add_training_flags(add: AddArgument) -> None:
    add("--global-batch", metavar="N", type=int, help="sequences per step")
    add(
        "--trainable",
        choices=("all", "adapter"),
        help="train all parameters or an adapter (default: all; with `plan train --tune CONFIG`: "
        "as in CONFIG)",
    )
    add(
        "--flash",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="use flash attention (default: on, except on A100)",
    )
    add(
        "--distributed-optimizer",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="shard the optimizer state across data-parallel replicas (default: on; exception: "
        "off on A100 if the unsharded training state fits on a GPU)",
    )


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    for figure, text_kind in (("input", "prompt"), ("output", "completion")):
        add(
            f"--{figure}-tokens", metavar="N", type=float, help=f"mean {text_kind} length in tokens"
        )
        add(
            f"--{figure}-tokens-p95",
            metavar="N",
            type=float,
            help=f"95th percentile of the {text_kind} length (default: the mean)",
        )
    add("--request-rate", metavar="X", type=float, help="requests per second, at random times")
    add(
        "--concurrency",
        metavar="N",
        type=int,
        help="constant number of requests at once, instead of --request-rate",
    )
    add(
        "--adapters",
        metavar="N",
        type=int,
        help="number of adapters that the requests alternate between (default: 0, the model alone)",
    )
    add(
        "--distinct-adapters",
        metavar="N",
        type=int,
        help="maximum number of adapters in use at the same time (default: as many as the running "
        "requests choose at random)",
    )
    add_adapter_flags(add)


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--measure",
        metavar="N",
        type=int,
        help="run the N best candidates for a short time, and choose the best by measured figures",
    )
    add(
        "--output",
        metavar="DIR",
        help="folder for the files of the plan: candidates, settings, report and plots",
    )


def add_adapter_flags(add: AddArgument) -> None:
    add("--virtual-tokens", metavar="N", type=int, help="number of virtual tokens of an adapter")
    add(
        "--method",
        choices=METHODS,
        help="method of an adapter that changes linears (default with the flags --lora-...: lora)",
    )
    add(
        "--lora-rank",
        metavar="N",
        type=int,
        help="rank of an adapter's low-rank products (default with --method: 16)",
    )
    add(
        "--lora-targets",
        metavar="LIST",
        type=_parse_names,
        help="linears that an adapter changes, such as linear_qkv,linear_fc1.up (default: all)",
    )
    add(
        "--lora-layers",
        metavar="LIST",
        type=parse_int_list,
        help="layers that an adapter changes, numbered from 0 (default: all)",
    )


def add_context_tokens(add: AddArgument) -> None:
    add(
        "--context-tokens",
        metavar="N",
        type=int,
        help="tokens of an example before the invocation, for --method alora (default: 0)",
    )


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def parse_int_list(text: str) -> tuple[int, ...]:
    """Parse the values of a search axis, such as 1,2,4."""
    try:
        return tuple(int(number_text) for number_text in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers such as 1,2,4"
        ) from None


def parse_token_count(text: str) -> float:
    try:
        return parse_count(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
