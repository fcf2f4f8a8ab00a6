"""The flags of `convert`, `inspect` and `verify`.

Those that tell what a checkpoint's files do not are the same for all three, and for `serve`.
Nothing that takes long is imported.
"""

import argparse
import math
import os
from typing import Any

from gpt.formats.overrides import read_overrides

FORMATS = ("native", "megatron", "megatron-dist", "nemo", "hf")
DTYPES = ("float32", "bfloat16", "float16", "float64")
# Beyond it the disk is the limit.
WORKERS = min(8, os.cpu_count() or 1)
HELP_WORKERS = f"threads (default: one for each processor, at most 8; here {WORKERS})"


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--true-vocab-size",
        metavar="N",
        type=int,
        help="tokens of the vocabulary without the rows that pad it, where the files do not say",
    )
    parser.add_argument(
        "--config-json",
        metavar="FILE",
        help="a JSON object of the model's fields that the files lack or have wrong",
    )


def convert_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble convert",
        description="Write a checkpoint of any format and split in another. Memory stays small "
        "whatever the model's size; the target appears when all of it is on the disk.",
    )
    add = parser.add_argument
    add("source", help="the checkpoint, as the training cluster left it")
    add("target", help="a directory that is not there yet; for --to nemo a file, x.nemo")
    add("--to", choices=FORMATS, required=True,
        help="the target's format; nemo is read back by Preamble only")  # fmt: skip
    add(
        "--tp",
        metavar="N",
        type=at_least_one,
        default=1,
        help="tensor ranks of the target (default: 1)",
    )
    add("--pp", metavar="N", type=at_least_one, default=1, help="pipeline ranks (default: 1)")
    add(
        "--vpp",
        metavar="N",
        type=at_least_one,
        default=1,
        help="virtual stages of each (default: 1)",
    )
    add("--ep", metavar="N", type=at_least_one, default=1, help="expert ranks (default: 1)")
    add("--dtype", choices=DTYPES, help="of the target's weights (default: as stored)")
    add("--make-vocab-size-divisible-by", metavar="N", type=at_least_one,
        help="pad the vocabulary to a multiple of this times --tp (default: 128)")  # fmt: skip
    add("--megatron-spec", choices=("te", "local"),
        help="names as in Transformer Engine's layers, or in local ones (default: te)")  # fmt: skip
    add("--family", metavar="NAME", help="the model_type for --to hf (default: what fits)")
    add("--shard-gb", metavar="X", type=above_zero, help="size of one file (default: 4; hf: 5)")
    add("--tokenizer", metavar="PATH", help="a file or directory (default: the source's)")
    add_source_flags(parser)
    add("--dry-run", action="store_true", help="print the plan and stop")
    add("--resume", action="store_true", help="go on where a killed run stopped")
    add("--refuse-nan", action="store_true", help="stop at weights that are not finite")
    add("--prove", action="store_true",
        help="store a few logits, which serve and verify --prove replay")  # fmt: skip
    add("--workers", metavar="N", type=at_least_one, default=WORKERS, help=HELP_WORKERS)
    add("--memory-mb", metavar="N", type=at_least_one, default=1024,
        help="for tensors that are turned on the way (default: 1024)")  # fmt: skip
    return parser


def inspect_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble inspect",
        description="Say what a checkpoint is: its format, architecture, size and split, what it "
        "takes to serve it, and what looks wrong. Without --deep no more than headers is read.",
    )
    parser.add_argument("source", help="the checkpoint, as the training cluster left it")
    add_source_flags(parser)
    _add_reading_flags(parser)
    return parser


def verify_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble verify",
        description="Hold two checkpoints of any format and split against each other, bit for bit; "
        "or one against the checksums that Preamble wrote beside it. 0: equal, 1: different.",
    )
    parser.add_argument("a", metavar="A", help="a checkpoint")
    parser.add_argument("b", metavar="B", nargs="?", help="another (default: A's own checksums)")
    add_source_flags(parser)
    _add_reading_flags(parser)
    parser.add_argument(
        "--prove",
        action="store_true",
        help="compute the logits that A's proof has, with A and with B, and compare them",
    )
    return parser


def _add_reading_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--deep",
        action="store_true",
        help="read every byte: values that are not finite, copies that are not equal, checksums",
    )
    parser.add_argument(
        "--workers", metavar="N", type=at_least_one, default=WORKERS, help=HELP_WORKERS
    )


def at_least_one(word: str) -> int:
    """A number of things that cannot be none, for argparse."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is not at least 1")
    return number


def above_zero(word: str) -> float:
    number = float(word)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{word} is not above 0")
    return number


def source_changes(flags: argparse.Namespace) -> dict[str, Any]:
    """The fields of GPTConfig that the flags give; empty where they give none."""
    return read_overrides(flags.config_json, flags.true_vocab_size)
