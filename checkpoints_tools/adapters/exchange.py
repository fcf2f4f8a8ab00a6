"""`preamble adapters import` and `export`: convert adapters from and to PEFT, TGIS and NeMo.

The flags of `import` set the metadata (card fields) that a foreign format does not record: the
prompt template, the stop strings, the base model. A target is written completely or not at all, and
an existing target is replaced only with --overwrite.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from checkpoints_tools.adapters.check import (
    FOREIGN_FORMATS,
    adapter_record,
    add_model_flags,
    format_adapter,
    open_base_checkpoint,
)
from checkpoints_tools.flags import local_path, positive_int
from checkpoints_tools.layout.layout import ParallelSplit
from checkpoints_tools.writers.huggingface_config import choose_family
from checkpoints_tools.writers.nemo_config import check_supported, model_config
from gpt.adapters.adapter_file import (
    SUFFIX,
    Adapter,
    Card,
    build_adapter,
    check_adapter,
    check_publish_directory,
    open_adapter,
    parse_name,
    publish_adapter,
    recording_upload,
    save_adapter,
)
from gpt.adapters.change_log import AdapterChangeLog
from gpt.adapters.export_bridge import convert_linears_to_bridge
from gpt.adapters.export_nemo import check_nemo_target, convert_to_nemo, write_nemo
from gpt.adapters.export_nemo_linears import convert_linears_to_nemo
from gpt.adapters.export_peft import (
    check_export_target,
    convert_to_peft,
    convert_to_tgis,
    write_export,
)
from gpt.adapters.export_peft_linears import convert_linears_to_peft
from gpt.adapters.prompt_template import BOS_POSITIONS, VIRTUAL_PROMPT_MARK, PromptTemplate
from gpt.checkpoint.digest import identify
from gpt.checkpoint.logical_tensor import Checkpoint, ModelIdentity
from gpt.config import GPTConfig
from gpt.errors import AdapterError, ConfigError, RequestError
from gpt.formats.huggingface.families.registry import FAMILIES
from gpt.formats.huggingface.reader import read_family_name
from gpt.tokenizers.tokenizer import open_tokenizer

TEMPLATE_BYTES_MAX = 1 << 20
COMMAND = "adapters import"  # The author in the change log.


def import_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble adapters import",
        description="Convert an adapter trained by another program to Preamble's adapter file.",
    )
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        type=Path,
        help=f"adapter: {FOREIGN_FORMATS}, or Preamble's .safetensors file",
    )
    add(
        "target",
        metavar="TARGET",
        type=local_path,
        help="new .safetensors file; or an existing directory, where the adapter becomes "
        "NAME@N.safetensors with the next free version number N",
    )
    add_model_flags(
        parser,
        "base checkpoint of the adapter; the adapter is checked against this checkpoint, and the "
        "adapter file records the checkpoint's digest",
    )
    add(
        "--name",
        metavar="NAME",
        help="adapter name (default: from the target's file name; if the target is a directory, "
        "the source's name)",
    )
    add("--description", metavar="TEXT", help="short description of the adapter's task")
    add(
        "--template",
        metavar="TEXT",
        help="prompt template with {field} placeholders, as in training; @FILE reads it from a "
        "file. The virtual tokens are inserted at <|VIRTUAL_PROMPT_0|>, or before the text if the "
        "template does not contain this marker",
    )
    add(
        "--truncate-field",
        metavar="NAME",
        help="field that is truncated at its end if the prompt is too long",
    )
    add(
        "--bos",
        choices=BOS_POSITIONS,
        help="position of the BOS token: none, first (before everything) or text (after leading "
        "virtual tokens). Default with --template: text if the tokenizer of --model adds a BOS "
        "token, else none; without --template: as in SOURCE",
    )
    add(
        "--stop",
        metavar="TEXT",
        action="append",
        help="default stop string, for requests without stop strings; may be repeated",
    )
    add(
        "--max-new-tokens",
        metavar="N",
        type=positive_int,
        help="default of max_new_tokens, for requests that do not set it",
    )
    add("--overwrite", action="store_true", help="replace an existing target")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def import_command(argv: Sequence[str]) -> int:
    """Run `preamble adapters import`; `argv` are the arguments after `import`."""
    flags = import_parser().parse_args(argv)
    target = flags.target
    _check_target(target, overwrite=flags.overwrite)
    base = open_base_checkpoint(flags)
    source_adapter = open_adapter(flags.source, task=flags.task, base=base)
    identity = None if base is None else identify(base)
    adapter = build_adapter(
        _build_card(source_adapter, flags, base, identity),
        source_adapter.table,
        source_adapter.linears,
    )
    notes: tuple[str, ...] = ()
    if base is not None:
        # Also check the source adapter, because its card may record a base model that is not
        # --model. The new card always records --model.
        check_adapter(source_adapter, base.config, identity)
        notes = check_adapter(adapter, base.config, identity)
    elif not adapter.card.base_digest:
        notes = ("the adapter does not record its base model; give --model to record it",)
    if target.is_dir():
        target = publish_adapter(adapter, target, COMMAND)
    else:
        _save_file(adapter, target, overwrite=flags.overwrite)
    notes = tuple(dict.fromkeys((*adapter.card.notes, *notes)))
    if flags.json:
        record = {"file": str(target), **adapter_record(adapter, notes)}
        sys.stdout.write(json.dumps(record, indent=2) + "\n")
    else:
        sys.stdout.write(f"{'file':16} {target}\n{format_adapter(adapter, notes)}")
    return 0


def _save_file(adapter: Adapter, target: Path, *, overwrite: bool) -> None:
    """Write the target file; in an adapter directory, the change log records it."""
    try:
        version = parse_name(target.stem).version or 1
    except RequestError:  # No server reads a file with such a name.
        return save_adapter(adapter, target, overwrite=overwrite)
    with recording_upload(target.parent, target.stem, COMMAND) as change:
        change.begin(version, None, adapter.digest)
        save_adapter(adapter, target, overwrite=overwrite)
        change.finish(None)


def _check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse an unusable target, before the command reads the model, which can take long."""
    if target.is_dir():
        check_publish_directory(target)
        # The target is an adapter directory from now on, or one of its tenants' folders.
        if AdapterChangeLog.find(target) is None:
            AdapterChangeLog(target).create_folder()
    elif target.exists() and not overwrite:
        raise AdapterError(f"{target} already exists; give --overwrite, or choose another name")
    elif target.suffix != SUFFIX or not target.parent.is_dir():
        raise AdapterError(
            f"cannot write {target}, because its name does not end in {SUFFIX} or its directory "
            f"does not exist; give an existing directory, or a new {SUFFIX} file in an existing "
            "directory"
        )


def _build_card(
    source_adapter: Adapter,
    flags: argparse.Namespace,
    base: Checkpoint | None,
    identity: ModelIdentity | None,
) -> Card:
    """Return the card of the source adapter with the changes that the flags request."""
    card = replace(
        source_adapter.card,
        name=_adapter_name(flags, source_adapter),
        template=_prompt_template(source_adapter, flags, base),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if flags.description is not None:
        card = replace(card, task=flags.description)
    if flags.stop is not None:
        card = replace(card, stop=tuple(flags.stop))
    if flags.max_new_tokens is not None:
        card = replace(card, max_new_tokens=flags.max_new_tokens)
    if identity is not None:
        card = replace(card, base_digest=identity.digest, base_fingerprint=identity.fingerprint)
    return card


def _adapter_name(flags: argparse.Namespace, source_adapter: Adapter) -> str:
    """Return the adapter's name without a version; only the file name has the version."""
    try:
        if flags.name is not None:
            parsed_name = parse_name(flags.name)
            if parsed_name.version is not None:
                raise ConfigError(
                    f"--name is {flags.name!r}; remove the version, which belongs to the file name"
                )
            return parsed_name.name
        return (
            source_adapter.card.name
            if flags.target.is_dir()
            else parse_name(flags.target.stem).name
        )
    except RequestError as error:
        raise ConfigError(f"{error}; give a valid --name") from None


def _prompt_template(
    source_adapter: Adapter, flags: argparse.Namespace, base: Checkpoint | None
) -> PromptTemplate | None:
    overrides = {"truncate_field": flags.truncate_field, "bos": flags.bos}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    if flags.template is None:
        template = source_adapter.card.template
        if not overrides:
            return template
        if template is None:
            raise ConfigError(
                f"{flags.source} has no prompt template, so {', '.join(overrides)} cannot be set; "
                "give --template too"
            )
        return replace(template, **overrides)
    text = _read_template_text(flags.template)
    rows = len(source_adapter.table)
    if VIRTUAL_PROMPT_MARK not in text and rows:
        text = f"{VIRTUAL_PROMPT_MARK}0|>{text}"
    if "bos" not in overrides and base is not None and base.tokenizer is not None:
        overrides["bos"] = "text" if open_tokenizer(base.tokenizer).adds_bos else "none"
    return PromptTemplate(text, (rows,) if rows else (), **overrides)


def _read_template_text(argument: str) -> str:
    """Return the template text of the flag `--template TEXT` or `--template @FILE`."""
    if not argument.startswith("@"):
        return argument
    path = Path(argument[1:])
    try:
        with open(path, "rb") as file:
            text = file.read(TEMPLATE_BYTES_MAX + 1)
        if len(text) > TEMPLATE_BYTES_MAX:
            raise ConfigError(
                f"--template: {path} has more than {TEMPLATE_BYTES_MAX} bytes; shorten it"
            )
        return text.decode()
    except OSError as error:
        raise ConfigError(
            f"--template: {path} cannot be read ({error.strerror}); give a readable file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"--template: {path} is not UTF-8; save it as UTF-8") from None


def export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble adapters export",
        description="Convert an adapter to the format of another program.",
    )
    add = parser.add_argument
    add("source", metavar="FILE", type=Path, help="adapter file, as `preamble tune` writes it")
    add(
        "target",
        metavar="TARGET",
        type=local_path,
        help="new directory, or for --to nemo a new .nemo file",
    )
    add(
        "--to",
        choices=("peft", "tgis", "nemo", "bridge"),
        required=True,
        help="PEFT, a decoder.pt for TGIS's prompt store, or NeMo: prompt learning of NeMo 1.20 to "
        "1.22, and LoRA and IA3 of NeMo 1; bridge: LoRA of Megatron-Bridge",
    )
    add_model_flags(
        parser,
        "base checkpoint of the adapter; the adapter is checked against this checkpoint, and "
        "PEFT's config describes the checkpoint's architecture",
    )
    add(
        "--base-name",
        metavar="NAME",
        help="base model name in PEFT's config, or path of the base .nemo for NeMo (default: none)",
    )
    add(
        "--family",
        metavar="NAME",
        choices=sorted(FAMILIES),
        help="model family of Hugging Face that has the modules of a LoRA or IA3 adapter in PEFT "
        "(default: of --model; for a Megatron checkpoint, the family that `preamble convert` "
        "writes)",
    )
    add(
        "--tp",
        metavar="N",
        type=positive_int,
        default=1,
        help="tensor-parallel size of a LoRA or IA3 adapter for NeMo (default: 1)",
    )
    add("--overwrite", action="store_true", help="replace an existing target")
    return parser


def export_command(argv: Sequence[str]) -> int:
    """Run `preamble adapters export`; `argv` are the arguments after `export`."""
    flags = export_parser().parse_args(argv)
    check_target = check_nemo_target if flags.to == "nemo" else check_export_target
    check_target(flags.target, overwrite=flags.overwrite)
    base = open_base_checkpoint(flags)
    adapter = open_adapter(flags.source, task=flags.task, base=base)
    notes: tuple[str, ...] = ()
    if base is not None:
        notes = check_adapter(adapter, base.config, identify(base))
    if flags.to == "peft" and adapter.linears:
        family = None if base is None else _family_name(base, flags.family)
        export = convert_linears_to_peft(adapter, base, flags.base_name, family)
    elif flags.to == "nemo" and adapter.linears:
        model = {} if base is None else _nemo_model_config(base.config, flags.tp)
        export = convert_linears_to_nemo(adapter, base, model, flags.base_name, flags.tp)
    elif flags.to == "bridge":
        export = convert_linears_to_bridge(adapter, base)
    elif flags.to == "peft":
        export = convert_to_peft(adapter, base, flags.base_name)
    elif flags.to == "nemo":
        export = convert_to_nemo(adapter, base, flags.base_name)
    else:
        export = convert_to_tgis(adapter, base)
    write = write_nemo if flags.to == "nemo" else write_export
    write(export, flags.target, overwrite=flags.overwrite)
    for note in (*notes, *export.notes):
        sys.stderr.write(f"note: {note}\n")
    sys.stdout.write(f"{flags.target}\n")
    return 0


def _family_name(base: Checkpoint, requested_family: str | None) -> str:
    """Return the Hugging Face model family whose module names PEFT uses."""
    if requested_family is not None:
        return requested_family
    if base.format == "huggingface":
        return read_family_name(base.path)
    return choose_family(base.config, base.path).family


def _nemo_model_config(config: GPTConfig, tp: int) -> dict[str, Any]:
    """Return NeMo's config fields of the base model."""
    split = ParallelSplit(tp=tp)
    check_supported(config, split)
    return model_config(config, split)
