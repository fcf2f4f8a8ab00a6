"""`preamble adapters check`: validates adapter files, alone or against their base model.

The command checks a file before it is uploaded, with the functions that the server uses
(`open_adapter`, `check_adapter`). With --model it also replays the golden examples (recorded
outputs of an adapter), which shows whether resharding, an upgrade or another dtype changed the
adapter's outputs. If a property cannot be checked, a note says so.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_tools.flags import DTYPES, add_source_flags, positive_float, source_overrides
from gpt.adapters.adapter_file import Adapter, check_adapter, open_adapter
from gpt.adapters.golden_examples import GoldenReplay, replay_golden_examples
from gpt.checkpoint.digest import identify
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import ConfigError, PreambleError, printable
from gpt.formats.overrides import open_with_overrides
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model, parse_device
from gpt.parallel.mesh import Mesh
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer, open_tokenizer

# Adapter formats of other programs. Preamble can read these formats, and help texts list them.
FOREIGN_FORMATS = (
    "a PEFT directory, a TGIS decoder.pt, a NeMo 1 .nemo, a Megatron-Bridge checkpoint of LoRA"
)


def check_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble adapters check",
        description="Check whether adapter files are usable. With one FILE or with --json, also "
        "print the metadata of each adapter. With --model, replay the golden examples (recorded "
        "outputs) of each adapter. Exit status: 1 if a file is unusable or the output of a golden "
        "example differs, else 0.",
    )
    add = parser.add_argument
    add(
        "files",
        metavar="FILE",
        type=Path,
        nargs="+",
        help=f"adapter: {FOREIGN_FORMATS}, or Preamble's .safetensors file",
    )
    add_model_flags(parser, "base checkpoint that the adapters must match")
    add("--dtype", choices=DTYPES, help="compute dtype of the model (default: as stored)")
    add(
        "--device",
        default="cpu",
        help="device that replays the golden examples: cpu or cuda (default: cpu)",
    )
    add(
        "--tolerance",
        metavar="X",
        type=positive_float,
        help="maximum change of the mean log-probability per token of a golden example, in nats "
        "(default: depends on the dtype)",
    )
    add("--json", action="store_true", help="print one JSON object, or for several files a list")
    return parser


def add_model_flags(parser: argparse.ArgumentParser, model_help: str) -> None:
    add = parser.add_argument
    add("--model", metavar="PATH", help=model_help)
    add(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer file or directory (default: the tokenizer beside the checkpoint)",
    )
    add(
        "--task",
        metavar="T",
        help="task to read from a multi-task file: a number for PEFT, a name for NeMo",
    )
    add_source_flags(parser)


def open_base_checkpoint(flags: argparse.Namespace) -> Checkpoint | None:
    """Open the checkpoint that --model names; return None without --model."""
    if flags.model is None:
        return None
    return open_with_overrides(flags.model, source_overrides(flags), flags.tokenizer)


@dataclass(frozen=True)
class AdapterCheck:
    """The result of checking one file; `error` is empty if the file is usable."""

    file: Path
    adapter: Adapter | None = None
    notes: tuple[str, ...] = ()
    replay: GoldenReplay | None = None
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and (self.replay is None or self.replay.passed)


def check_command(argv: Sequence[str]) -> int:
    """Run `preamble adapters check`; `argv` are the arguments after `check`."""
    flags = check_parser().parse_args(argv)
    base = open_base_checkpoint(flags)
    if base is None and (flags.dtype or flags.tolerance):
        raise ConfigError(
            "--dtype or --tolerance is given, but both need a model; give --model too"
        )
    checker = _AdapterChecker(base, flags)
    checks = []
    for file in flags.files:
        try:
            checks.append(checker.check(file))
        except PreambleError as error:
            if len(flags.files) == 1:
                raise
            checks.append(AdapterCheck(file, error=str(error)))
    if flags.json:
        records = [_check_record(check) for check in checks]
        sys.stdout.write(json.dumps(records if len(records) > 1 else records[0], indent=2) + "\n")
    elif len(checks) == 1 and checks[0].adapter is not None:
        sys.stdout.write(format_adapter(checks[0].adapter, checks[0].notes))
        sys.stdout.write(_verdict_text(checks[0], flags.model) + "\n")
    else:
        for check in checks:
            sys.stdout.write(f"{printable(check.file.name)}: {_verdict_text(check, flags.model)}\n")
    for check in checks:
        for line in check.replay.mismatch_lines if check.replay else ():
            sys.stderr.write(printable(f"{check.file.name}: {line}") + "\n")
    return 0 if all(check.passed for check in checks) else 1


class _AdapterChecker:
    """Checks adapter files; with --model also against the base model.

    The model's weights are loaded when the first adapter with golden examples is checked.
    """

    def __init__(self, base: Checkpoint | None, flags: argparse.Namespace) -> None:
        self._base = base
        self._flags = flags
        self._identity = None if base is None else identify(base)
        self._model_and_tokenizer: tuple[GPT, Tokenizer] | None = None

    def check(self, file: Path) -> AdapterCheck:
        adapter = open_adapter(file, task=self._flags.task, base=self._base)
        if self._base is None:
            return AdapterCheck(file, adapter)
        config = self._base.config
        if self._flags.dtype is not None:
            config = config.with_fields(dtype=self._flags.dtype)
        notes = check_adapter(adapter, config, self._identity)
        if not adapter.card.golden:
            return AdapterCheck(file, adapter, notes)
        if self._model_and_tokenizer is None:
            self._model_and_tokenizer = self._load_model(self._base)
        golden_replay = replay_golden_examples(
            *self._model_and_tokenizer, adapter, tolerance=self._flags.tolerance
        )
        return AdapterCheck(file, adapter, notes, golden_replay)

    def _load_model(self, base: Checkpoint) -> tuple[GPT, Tokenizer]:
        mesh = Mesh.single(parse_device(self._flags.device))
        model = load_model(base, mesh, dtype=self._flags.dtype).eval()
        if base.tokenizer is None:
            return model, NullTokenizer(base.config.vocab_size)
        return model, open_tokenizer(base.tokenizer)


def _verdict_text(check: AdapterCheck, model: str | None) -> str:
    if check.error:
        return f"refused: {printable(check.error)}"
    golden_replay = check.replay
    golden_text = ""
    if golden_replay is not None:
        matches = golden_replay.checked - golden_replay.different - golden_replay.ties
        ties_text = f", {golden_replay.ties} near ties" if golden_replay.ties else ""
        golden_text = (
            f"; {matches} of {golden_replay.checked} golden examples match{ties_text}, largest "
            f"difference {golden_replay.logprob_difference_max:.2g} nats per token (tolerance "
            f"{golden_replay.tolerance:g})"
        )
    verdict = "good" if check.passed else "golden examples differ"
    return f"{verdict}{' for this model' if model and check.passed else ''}{golden_text}"


def _check_record(check: AdapterCheck) -> dict[str, Any]:
    if check.adapter is None:
        return {"file": str(check.file), "good": False, "refusal": check.error}
    record = {
        **adapter_record(check.adapter, check.notes),
        "file": str(check.file),
        "good": check.passed,
    }
    if check.replay is not None:
        record["golden"] = {
            "checked": check.replay.checked,
            "different": check.replay.different,
            "ties": check.replay.ties,
            "worst_logprob": check.replay.logprob_difference_max,
            "tolerance": check.replay.tolerance,
            "lines": list(check.replay.mismatch_lines),
        }
    return record


def adapter_record(adapter: Adapter, notes: Sequence[str]) -> dict[str, Any]:
    """Return the adapter's description as --json prints it; the keys must not change."""
    return {
        "name": adapter.card.name,
        "task": adapter.card.task,
        "method": adapter.card.method,
        "kind": adapter.card.kind,
        "virtual_tokens": len(adapter.table),
        **_table_record(adapter),
        **_linears_record(adapter),
        "digest": adapter.digest,
        "base_digest": adapter.card.base_digest,
        "created": adapter.card.created,
        "notes": [*notes],
    }


def _table_record(adapter: Adapter) -> dict[str, Any]:
    width = adapter.table.shape[1]
    if adapter.card.kind == "prefix":
        return {"numbers_a_token": width}
    if not len(adapter.table):
        return {"hidden_size": width}
    norm = round(float(adapter.table.norm(dim=1).max()), 4)
    return {"hidden_size": width, "row_norm_max": norm}


def _linears_record(adapter: Adapter) -> dict[str, Any]:
    if not adapter.linears:
        return {}
    return {
        "linears": len(adapter.linears),
        "rank_max": adapter.rank,
        "bytes": adapter.nbytes,
        "invocation": list(adapter.card.invocation),
    }


def format_adapter(adapter: Adapter, notes: Sequence[str]) -> str:
    """Format `adapter_record` as text, one line per value; empty values are omitted."""
    record = adapter_record(adapter, notes)
    if record.get("invocation"):
        record["invocation"] = " ".join(map(str, record["invocation"]))
    lines = []
    for name, value in record.items():
        for element in value if isinstance(value, list) else [value]:
            if element:
                lines.append(f"{name.replace('_', ' '):16} {printable(str(element))}\n")
    return "".join(lines)
