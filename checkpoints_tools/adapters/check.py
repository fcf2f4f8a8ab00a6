"""`preamble adapters check`: whether files are good adapters, and (`--model`) ones for this model.

The same reading and the same questions as a server's, asked before they are uploaded. Golden
examples are replayed by the model as it is now: after a reshard, an upgrade, in another dtype. What
could not be settled is told as a note.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_tools.flags import DTYPES, above_zero, add_source_flags, source_changes
from gpt.adapters.adapter_file import Adapter, check_adapter, open_adapter
from gpt.adapters.golden_examples import Replay, replay
from gpt.checkpoint.digest import identify
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import ConfigError, PreambleError
from gpt.formats.overrides import open_overridden
from gpt.model.gpt_model import GPT
from gpt.model.loading import device_of, load_model
from gpt.parallel.mesh import Mesh
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer, open_tokenizer

# What is read besides our own files.
FOREIGN = "a PEFT directory, a TGIS decoder.pt, a .nemo of prompt learning"


def check_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble adapters check",
        description="Say whether adapters' files can be used, and what they are. With --model "
        "their golden examples are replayed. 1: one cannot be used, or does not say what it said.",
    )
    add = parser.add_argument
    add("files", metavar="FILE", type=Path, nargs="+", help=f"{FOREIGN}, or ours")
    add_model_flags(parser, "a checkpoint that they must be for")
    add("--dtype", choices=DTYPES, help="what the model computes in (default: as stored)")
    add("--device", default="cpu", help="cpu or cuda, for golden examples (default: cpu)")
    add("--tolerance", metavar="X", type=above_zero,
        help="nats that an answer's tokens may move, on average (default: by dtype)")  # fmt: skip
    add("--json", action="store_true", help="print JSON: an object, of several files a list")
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


@dataclass(frozen=True)
class Checked:
    """A file, and what came of it."""

    file: Path
    adapter: Adapter | None = None
    notes: tuple[str, ...] = ()
    replay: Replay | None = None
    refusal: str = ""

    @property
    def good(self) -> bool:
        return not self.refusal and (self.replay is None or self.replay.passed)


def check_command(argv: Sequence[str]) -> int:
    """`argv` begins after `check`."""
    flags = check_parser().parse_args(argv)
    base = model_of(flags)
    if base is None and (flags.dtype or flags.tolerance):
        raise ConfigError("--dtype and --tolerance are for golden examples; give --model too")
    bench = _Bench(base, flags)
    found = []
    for file in flags.files:
        try:
            found.append(bench.check(file))
        except PreambleError as error:
            if len(flags.files) == 1:
                raise
            found.append(Checked(file, refusal=str(error)))
    if flags.json:
        told = [_record(one) for one in found]
        sys.stdout.write(json.dumps(told if len(told) > 1 else told[0], indent=2) + "\n")
    elif len(found) == 1 and found[0].adapter is not None:
        sys.stdout.write(sheet(found[0].adapter, found[0].notes))
        sys.stdout.write(_verdict(found[0], flags.model) + "\n")
    else:
        for one in found:
            sys.stdout.write(f"{_plain(one.file.name)}: {_verdict(one, flags.model)}\n")
    for one in found:
        for line in one.replay.lines if one.replay else ():
            sys.stderr.write(_plain(f"{one.file.name}: {line}") + "\n")
    return 0 if all(one.good for one in found) else 1


class _Bench:
    """The model that files are checked against, whose weights are loaded if examples need them."""

    def __init__(self, base: Checkpoint | None, flags: argparse.Namespace) -> None:
        self._base, self._flags = base, flags
        self._identity = None if base is None else identify(base)
        self._running: tuple[GPT, Tokenizer] | None = None

    def check(self, file: Path) -> Checked:
        adapter = open_adapter(file, task=self._flags.task, base=self._base)
        if self._base is None:
            return Checked(file, adapter)
        config = self._base.config
        if self._flags.dtype is not None:
            config = config.with_fields(dtype=self._flags.dtype)
        notes = check_adapter(adapter, config, self._identity)
        if not adapter.card.golden:
            return Checked(file, adapter, notes)
        if self._running is None:
            self._running = self._start(self._base)
        replayed = replay(*self._running, adapter, tolerance=self._flags.tolerance)
        return Checked(file, adapter, notes, replayed)

    def _start(self, base: Checkpoint) -> tuple[GPT, Tokenizer]:
        mesh = Mesh.single(device_of(self._flags.device))
        model = load_model(base, mesh, dtype=self._flags.dtype).eval()
        if base.tokenizer is None:
            return model, NullTokenizer(base.config.vocab_size)
        return model, open_tokenizer(base.tokenizer)


def _verdict(one: Checked, model: str | None) -> str:
    if one.refusal:
        return f"refused: {_plain(one.refusal)}"
    told = one.replay
    what = ""
    if told is not None:
        same = told.checked - told.different - told.ties
        ties = f", {told.ties} near ties" if told.ties else ""
        what = (
            f"; {same} of {told.checked} golden examples the same{ties}, the worst "
            f"{told.worst_logprob:.2g} nats a token off (tolerance {told.tolerance:g})"
        )
    good = "good" if one.good else "it does not say what it said"
    return f"{good}{' for this model' if model and one.good else ''}{what}"


def _record(one: Checked) -> dict[str, Any]:
    if one.adapter is None:
        return {"file": str(one.file), "good": False, "refusal": one.refusal}
    record = {**facts(one.adapter, one.notes), "file": str(one.file), "good": one.good}
    if one.replay is not None:
        record["golden"] = {
            "checked": one.replay.checked,
            "different": one.replay.different,
            "ties": one.replay.ties,
            "worst_logprob": one.replay.worst_logprob,
            "tolerance": one.replay.tolerance,
            "lines": list(one.replay.lines),
        }
    return record


def facts(adapter: Adapter, notes: Sequence[str]) -> dict[str, Any]:
    rows, width = adapter.table.shape
    prefix = adapter.card.kind == "prefix"
    norm = round(float(adapter.table.norm(dim=1).max()), 4)
    return {
        "name": adapter.card.name,
        "task": adapter.card.task,
        "method": adapter.card.method,
        "kind": adapter.card.kind,
        "virtual_tokens": rows,
        **({"numbers_a_token": width} if prefix else {"hidden_size": width, "row_norm_max": norm}),
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
                lines.append(f"{name.replace('_', ' '):16} {_plain(str(one))}\n")
    return "".join(lines)


def _plain(text: str) -> str:
    """A card is anybody's text, and a terminal obeys what it is shown."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
