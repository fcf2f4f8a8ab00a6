"""Flags that subcommands of `preamble plan` share, alike in name and meaning in all of them.

A flag that nobody gave is None: then the specification's file decides, and after it the default. A
destination is the name of the field that it fills, so nothing here knows what a value is for.
"""

import argparse
import textwrap
from collections.abc import Callable

from gpt.errors import ConfigError
from planning.cli.specification import count_of

Adder = Callable[..., argparse.Action]


def parser_of(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"preamble plan {name}",
        description=textwrap.fill(description, 80),
        epilog=f"examples:\n{examples.rstrip()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_shared_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--spec", metavar="F", help="a YAML file of all that flags can say; flags override it")
    add("--json", action="store_true", help="write it as JSON")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL",
        help="a checkpoint's path (only its config is read), or a preset: gpt3-5b, 20b, 22b, 40b, "
        "175b, 530b, 1t, llama2-7b, ...")  # fmt: skip
    group = parser.add_argument_group("a model without a checkpoint")
    add = group.add_argument
    add("--model", dest="model_flag", metavar="MODEL", help="the same as the first argument")
    add("--layers", metavar="N", type=int)
    add("--hidden", metavar="N", type=int, help="width of a hidden state")
    add("--heads", metavar="N", type=int, help="attention heads")
    add("--kv-heads", metavar="N", type=int, help="of keys and values (default: as many)")
    add("--ffn", metavar="N", type=int, help="width within the MLP (default: 4 x hidden)")
    add("--seq", metavar="N", type=int, help="tokens of a sequence (default: the context, or 2048)")
    add("--vocab", metavar="N", type=int, help="tokens of the vocabulary (default: 51200)")
    add("--gated", action="store_true", default=None,
        help="LLaMA's kind: gated MLP, rotary positions, RMSNorm, no biases")  # fmt: skip
    add("--dtype", help="float32, bfloat16, float16; fp8 to train in, int8 to serve "
        "(default: bfloat16, of a static batch float16)")  # fmt: skip


def add_hardware_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("hardware").add_argument
    add("--gpu", metavar="NAME", help="a100-40g, a100-80g, h100, h200, l40s or b200")
    add("--gpus", metavar="N", type=int, help="how many there are")
    add("--nodes", metavar="N", type=int, help="the same, in nodes")
    add("--gpus-per-node", metavar="N", type=int, help="(default: 8)")
    add("--calibration", metavar="F", help="for this machine instead: what `preamble plan "
        "calibrate` has written here")  # fmt: skip


def add_training_flags(add: Adder) -> None:
    add("--global-batch", metavar="N", type=int, help="sequences of a step")
    add("--trainable", choices=("all", "adapter"), help="what learns (default: all; with "
        "--tune, what its method trains)")  # fmt: skip
    add("--flash", action=argparse.BooleanOptionalAction, default=None,
        help="attention that keeps no scores (default: as was usual on that GPU)")  # fmt: skip
    add("--distributed-optimizer", action=argparse.BooleanOptionalAction, default=None,
        help="whether copies share the optimizer's values (default: likewise)")  # fmt: skip


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what clients ask").add_argument
    for what, of in (("input", "a prompt"), ("output", "an answer")):
        add(f"--{what}-tokens", metavar="N", type=float, help=f"of {of}, on average")
        add(f"--{what}-tokens-p95", metavar="N", type=float, help="that 19 of 20 stay within")
    add("--request-rate", metavar="X", type=float, help="requests a second, of many clients")
    add("--concurrency", metavar="N", type=int, help="or: requests under way at all times")
    add("--adapters", metavar="N", type=int, help="that requests are for (default: none)")
    add_virtual_tokens(add)


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--measure", metavar="N", type=int, help="run the N best for real, briefly, and compare")
    add("--output", metavar="DIR", help="write the plan there: all candidates, the settings file, "
        "a report and plots")  # fmt: skip


def add_virtual_tokens(add: Adder) -> None:
    add("--virtual-tokens", metavar="N", type=int, help="of each adapter, served or learned")


def numbers(text: str) -> tuple[int, ...]:
    """A list of an axis: 1,2,4."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers as 1,2,4") from None


def tokens(text: str) -> float:
    try:
        return count_of(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
