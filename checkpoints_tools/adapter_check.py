"""`preamble adapters check`: whether a file is a good adapter, and (`--model`) one for this model.

The same reading and the same questions as a server's, asked before it is uploaded. What could not
be settled is told as a note.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gpt.adapter import check_adapter, open_adapter
from gpt.checkpoint import open_checkpoint
from gpt.digest import identify


def check_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble adapters check",
        description="Say whether an adapter's file can be used, and what it is.",
    )
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="ours, a PEFT directory, or a TGIS decoder.pt")
    add("--model", metavar="PATH", help="a checkpoint that it must be for")
    add("--json", action="store_true", help="print JSON")
    return parser


def check_command(argv: Sequence[str]) -> int:
    """`argv` begins after `check`."""
    flags = check_parser().parse_args(argv)
    adapter = open_adapter(flags.file)
    notes: tuple[str, ...] = ()
    if flags.model is not None:
        checkpoint = open_checkpoint(flags.model)
        notes = check_adapter(adapter, checkpoint.config, identify(checkpoint))
    rows, hidden = adapter.table.shape
    facts = {
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
    if flags.json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return 0
    for name, value in facts.items():
        for one in value if isinstance(value, list) else [value]:
            if one:
                # A card is anybody's text, and a terminal obeys what it is shown.
                shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(one))
                sys.stdout.write(f"{name.replace('_', ' '):16} {shown}\n")
    sys.stdout.write(f"good{' for this model' if flags.model else ''}\n")
    return 0
