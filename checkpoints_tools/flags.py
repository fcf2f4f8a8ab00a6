"""Command-line flags of `preamble convert`, `inspect` and `verify`.

`add_source_flags` declares the flags for config fields that a checkpoint's files lack or record
wrongly. `preamble adapters check|import|export` have these flags too, from the same function;
`preamble serve` declares its own copies. The module does not import torch, so `--help` is fast.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from gpt.formats.overrides import read_overrides
from gpt.host_limits import usable_cores
from gpt.object_store.object_store import is_object_url

FORMATS = ("native", "megatron", "megatron-dist", "nemo", "hf")
DTYPES = ("float32", "bfloat16", "float16", "float64")
# With more than 8 threads the disk is the bottleneck.
DEFAULT_WORKERS = min(8, usable_cores())
WORKERS_HELP = (
    f"worker threads (default: one per CPU core, at most 8; {DEFAULT_WORKERS} on this machine)"
)


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--true-vocab-size",
        metavar="N",
        type=int,
        help="vocabulary size without padding rows, if the checkpoint does not record it",
    )
    parser.add_argument(
        "--config-json",
        metavar="FILE",
        help="file with a JSON object of config fields that the checkpoint lacks or records "
        "wrongly",
    )


def convert_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble convert",
        description="Convert a checkpoint to another format or parallel split. Weights are read "
        "in blocks, so the model need not fit in memory. The target appears only when it is "
        "complete on disk.",
    )
    add = parser.add_argument
    add("source", help="checkpoint to convert: a file or directory of any format")
    add("target", type=local_path, help="new directory, or for --to nemo a new .nemo file")
    add(
        "--to",
        choices=FORMATS,
        required=True,
        help="target format; nemo was tested only with Preamble's reader, not with NeMo",
    )
    add(
        "--model",
        choices=("gpt", "hybrid"),
        help="Megatron-Core's model class for --to megatron or megatron-dist: gpt (GPTModel) or "
        "hybrid (HybridModel) (default: gpt)",
    )
    add(
        "--tp",
        metavar="N",
        type=positive_int,
        default=1,
        help="tensor-parallel size of the target (default: 1)",
    )
    add(
        "--pp",
        metavar="N",
        type=positive_int,
        default=1,
        help="pipeline-parallel size of the target (default: 1)",
    )
    add(
        "--vpp",
        metavar="N",
        type=positive_int,
        default=1,
        help="virtual pipeline stages per pipeline rank (default: 1)",
    )
    add(
        "--ep",
        metavar="N",
        type=positive_int,
        default=1,
        help="expert-parallel size of the target (default: 1)",
    )
    add("--dtype", choices=DTYPES, help="dtype of the target's weights (default: as stored)")
    add(
        "--make-vocab-size-divisible-by",
        metavar="N",
        type=positive_int,
        help="pad the vocabulary to a multiple of N times --tp (default N: 128)",
    )
    add(
        "--megatron-spec",
        choices=("te", "local"),
        help="layer spec of Megatron-Core that the tensor names follow: te (Transformer Engine) or "
        "local (default: te)",
    )
    add(
        "--family",
        metavar="NAME",
        help="model_type for --to hf (default: a model_type that expresses the model exactly, "
        "preferably one whose published models have the same activation)",
    )
    add(
        "--shard-gb",
        metavar="X",
        type=positive_float,
        help="maximum size of a weight file in GB, for --to native (default: 4.3) or hf (default: "
        "5); a larger tensor gets a file of its own",
    )
    add("--tokenizer", metavar="PATH", help="tokenizer file or directory (default: the source's)")
    add(
        "--merge",
        metavar="ADAPTER",
        type=Path,
        help="write the model with the changes of this LoRA, DoRA or IA3 adapter in its weights",
    )
    add_source_flags(parser)
    add("--dry-run", action="store_true", help="print the plan, check the target, write nothing")
    add("--resume", action="store_true", help="continue an interrupted run")
    add(
        "--refuse-nan",
        action="store_true",
        help="fail if a weight is NaN or infinite, or overflows in the target's dtype",
    )
    add(
        "--prove",
        action="store_true",
        help="store a proof: reference logits that `serve` and `verify --prove` recompute and "
        "compare",
    )
    add("--workers", metavar="N", type=positive_int, default=DEFAULT_WORKERS, help=WORKERS_HELP)
    add(
        "--memory-mb",
        metavar="N",
        type=positive_int,
        default=1024,
        help="memory in MiB for tensors that must be read completely, such as transposed tensors "
        "(default: 1024)",
    )
    return parser


def inspect_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble inspect",
        description="Report a checkpoint's format, architecture, size and parallel split, the "
        "memory needed to serve it, and problems. Without --deep, only headers, small files and a "
        "few rows of the weights are read.",
    )
    parser.add_argument("source", help="checkpoint to inspect: a file or directory of any format")
    add_source_flags(parser)
    _add_report_flags(parser)
    return parser


def verify_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble verify",
        description="Compare two checkpoints of any format and parallel split bit by bit, or "
        "compare one checkpoint with the checksums in its manifest. Exit status: 1 if there is a "
        "difference, a fault or a failed proof, else 0.",
    )
    parser.add_argument("a", metavar="A", help="checkpoint to verify")
    parser.add_argument(
        "b",
        metavar="B",
        nargs="?",
        help="checkpoint to compare A with (default: compare A with its own checksums)",
    )
    add_source_flags(parser)
    _add_report_flags(parser)
    parser.add_argument(
        "--prove",
        action="store_true",
        help="compute reference logits with A and with B, and compare them with the logits that A "
        "stores as its proof",
    )
    return parser


def _add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--deep",
        action="store_true",
        help="read every byte, and report NaN and infinite values, unequal replicas and bad "
        "checksums",
    )
    parser.add_argument(
        "--workers", metavar="N", type=positive_int, default=DEFAULT_WORKERS, help=WORKERS_HELP
    )


def local_path(text: str) -> Path:
    """Return the path of a target, which no command writes into an object store."""
    if is_object_url(text):
        raise argparse.ArgumentTypeError(
            f"{text} is in an object store; give a local path, and copy the result into the store"
        )
    return Path(text)


def positive_int(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1; give at least 1")
    return number


def positive_float(text: str) -> float:
    """Parse a finite number above 0, for argparse."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return number


def source_overrides(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the names and values of the GPTConfig fields that `add_source_flags`' flags set."""
    return read_overrides(flags.config_json, flags.true_vocab_size)
