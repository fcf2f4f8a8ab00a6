"""`preamble adapters check`: whether a file is a good adapter, and (`--model`) one for this model.

The same reading and the same questions as a server's, asked before it is uploaded. What could not
be settled is told as a note.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints_tools.flags import add_source_flags, source_changes
from gpt.adapter import Adapter, check_adapter, open_adapter
from gpt.digest import identify
from gpt.logical import Checkpoint
from gpt.overrides import open_overridden

# What is read besides our own files.
FOREIGN = "a PEFT directory, a TGIS decoder.pt, a .nemo of prompt learning"


def check_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble adapters check",
        description="Say whether an adapter's file can be used, and what it is.",
    )
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help=f"{FOREIGN}, or ours")
    add_model_flags(parser, "a checkpoint that it must be for")
    add("--json", action="store_true", help="print JSON")
    return parser


def add_model_flags(parser: argparse.ArgumentParser, text: str) -> None:
    add = parser.add_argument
    add("--model", metavar="PATH", help=text)
    add("--tokenizer", metavar="PATH", help="the model's, where none lies beside it")
    add("--task", metavar="T", help="of a file with several: PEFT's number, or NeMo's name")
    add_source_flags(parser)


def model_of(flags: argparse.Namespace) -> Checkpoint | None:
    """The checkpoint that the flags name, if they do."""
    if flags.model is None:
        return None
    return open_overridden(flags.model, source_changes(flags), flags.tokenizer)


def check_command(argv: Sequence[str]) -> int:
    """`argv` begins after `check`."""
    flags = check_parser().parse_args(argv)
    base = model_of(flags)
    adapter = open_adapter(flags.file, task=flags.task, base=base)
    notes: tuple[str, ...] = ()
    if base is not None:
        notes = check_adapter(adapter, base.config, identify(base))
    if flags.json:
        sys.stdout.write(json.dumps(facts(adapter, notes), indent=2) + "\n")
        return 0
    sys.stdout.write(sheet(adapter, notes))
    sys.stdout.write(f"good{' for this model' if flags.model else ''}\n")
    return 0


def facts(adapter: Adapter, notes: Sequence[str]) -> dict[str, Any]:
    rows, hidden = adapter.table.shape
    return {
        "name": adapter.card.name,
        "task": adapter.card.task,
        "method": adapter.card.method,
        "virtual_tokens": rows,
        "hidden_size": hidden,
        "row_norm_max": round(float(adapter.table.norm(dim=1).max()), 4),
        "digest": adapter.digest,
        "base_digest": adapter.card.base_digest,
        "created": adapter.card.created,
        "notes": [*notes],
    }


def sheet(adapter: Adapter, notes: Sequence[str]) -> str:
    """The same for a person."""
    lines = []
    for name, value in facts(adapter, notes).items():
        for one in value if isinstance(value, list) else [value]:
            if one:
                # A card is anybody's text, and a terminal obeys what it is shown.
                shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(one))
                lines.append(f"{name.replace('_', ' '):16} {shown}\n")
    return "".join(lines)
