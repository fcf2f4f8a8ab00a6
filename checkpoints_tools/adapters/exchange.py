"""`preamble adapters import` and `export`: our file from others' adapters, and theirs from ours.

What another format does not say comes by flags and goes onto the card: the template, stops, the
base. A target is written whole or not at all, and what lies there stays unless it may go.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from checkpoints_tools.adapters.check import FOREIGN, add_model_flags, facts, model_of, sheet
from checkpoints_tools.flags import at_least_one
from gpt.adapters.adapter_file import (
    SUFFIX,
    Adapter,
    Card,
    build_adapter,
    check_adapter,
    check_folder,
    open_adapter,
    parse_name,
    publish_adapter,
    save_adapter,
)
from gpt.adapters.export_nemo import as_nemo, check_nemo, write_nemo
from gpt.adapters.export_peft import as_peft, as_tgis, check_export, write_export
from gpt.adapters.prompt_template import BOS, MARK, Template
from gpt.checkpoint.digest import identify
from gpt.checkpoint.logical_tensor import Checkpoint, Identity
from gpt.errors import AdapterError, ConfigError, RequestError
from gpt.tokenizers.tokenizer import open_tokenizer

TEMPLATE_BYTES_MAX = 1 << 20


def import_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble adapters import",
        description="Make our one file of an adapter that another program trained.",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help=f"{FOREIGN}, or our own file")
    add("target", metavar="TARGET", type=Path,
        help="a new .safetensors file, or a directory, for the name's next version")  # fmt: skip
    add_model_flags(parser, "the checkpoint that it was trained on: checked, and on the card")
    add("--name", metavar="NAME", help="the adapter's (default: the target's, or the source's)")
    add("--description", metavar="TEXT", help="what it is for, in a few words")
    add("--template", metavar="TEXT",
        help="the prompt with its {field}s, as in training; @FILE reads a file. The virtual tokens "
        "stand before it, or at <|VIRTUAL_PROMPT_0|>")  # fmt: skip
    add("--truncate-field", metavar="NAME", help="the field that loses its end if all is too long")
    add("--bos", choices=BOS,
        help="where a begin-of-text token stands (default: before the text if --model's tokenizer "
        "begins texts with one, else nowhere)")  # fmt: skip
    add("--stop", metavar="TEXT", action="append", help="end answers at this text, unless told")
    add("--max-new-tokens", metavar="N", type=at_least_one, help="of an answer, unless told")
    add("--overwrite", action="store_true", help="replace a target that is there")
    add("--json", action="store_true", help="print JSON")
    return parser


def import_command(argv: Sequence[str]) -> int:
    """`argv` begins after `import`."""
    flags = import_parser().parse_args(argv)
    target = flags.target
    _check_place(target, overwrite=flags.overwrite)
    base = model_of(flags)
    found = open_adapter(flags.source, task=flags.task, base=base)
    identity = None if base is None else identify(base)
    adapter = build_adapter(_card(found, flags, base, identity), found.table)
    notes: tuple[str, ...] = ()
    if base is not None:
        # The one that was read, which may say of which model it is, and that this is not it.
        check_adapter(found, base.config, identity)
        notes = check_adapter(adapter, base.config, identity)
    elif not adapter.card.base_digest:
        notes = ("no --model was given, so nothing says which model it is for",)
    if target.is_dir():
        target = publish_adapter(adapter, target)
    else:
        save_adapter(adapter, target, overwrite=flags.overwrite)
    notes = tuple(dict.fromkeys((*adapter.card.notes, *notes)))
    if flags.json:
        told = {"file": str(target), **facts(adapter, notes)}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        sys.stdout.write(f"{'file':16} {target}\n{sheet(adapter, notes)}")
    return 0


def _check_place(target: Path, *, overwrite: bool) -> None:
    """Before a model is read, which takes longer."""
    if target.is_dir():
        check_folder(target)
    elif target.exists() and not overwrite:
        raise AdapterError(f"{target} exists already; give --overwrite, or another name")
    elif target.suffix != SUFFIX or not target.parent.is_dir():
        raise AdapterError(
            f"{target} cannot be written; give a directory that is there, or a {SUFFIX} file in one"
        )


def _card(
    found: Adapter, flags: argparse.Namespace, base: Checkpoint | None, identity: Identity | None
) -> Card:
    """What the source says, and over it what the flags say."""
    card = replace(
        found.card,
        name=_name(flags, found),
        template=_template(found, flags, base),
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


def _name(flags: argparse.Namespace, found: Adapter) -> str:
    """Without a version, which is the file's name's."""
    try:
        if flags.name is not None:
            given = parse_name(flags.name)
            if given.version is not None:
                raise ConfigError(
                    f"--name is {flags.name!r}; leave the version out, as the file's name has it"
                )
            return given.name
        return found.card.name if flags.target.is_dir() else parse_name(flags.target.stem).name
    except RequestError as error:
        raise ConfigError(f"{error}; give a --name") from None


def _template(
    found: Adapter, flags: argparse.Namespace, base: Checkpoint | None
) -> Template | None:
    wished = {"truncate_field": flags.truncate_field, "bos": flags.bos}
    wished = {name: value for name, value in wished.items() if value is not None}
    if flags.template is None:
        template = found.card.template
        if template is None and wished:
            raise ConfigError(
                f"{flags.source} has no template, whose the flags {', '.join(wished)} are; give "
                "--template too"
            )
        return template if template is None or not wished else replace(template, **wished)
    text = _text(flags.template)
    text = text if MARK in text else f"{MARK}0|>{text}"
    if "bos" not in wished and base is not None and base.tokenizer is not None:
        wished["bos"] = "text" if open_tokenizer(base.tokenizer).adds_bos else "none"
    return Template(text, (len(found.table),), **wished)


def _text(given: str) -> str:
    if not given.startswith("@"):
        return given
    path = Path(given[1:])
    try:
        with open(path, "rb") as file:
            text = file.read(TEMPLATE_BYTES_MAX + 1)
        if len(text) > TEMPLATE_BYTES_MAX:
            raise ConfigError(f"--template: {path} is over {TEMPLATE_BYTES_MAX} bytes; shorten it")
        return text.decode()
    except OSError as error:
        raise ConfigError(f"--template: {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--template: {path} is not UTF-8; save it so") from None


def export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preamble adapters export",
        description="Write an adapter as another program reads it: a new directory, or a .nemo.",
    )
    add = parser.add_argument
    add("source", metavar="FILE", type=Path, help="an adapter's file, as `preamble tune` writes")
    add("target", metavar="TARGET", type=Path,
        help="a directory that is not there yet; of NeMo a .nemo file")  # fmt: skip
    add("--to", choices=("peft", "tgis", "nemo"), required=True,
        help="PEFT's prompt tuning, a decoder.pt of TGIS's prompt store, or NeMo's prompt learning "
        "(1.20 to 1.22)")  # fmt: skip
    add_model_flags(parser, "the checkpoint that it was trained on: checked, and told to PEFT")
    add("--base-name", metavar="NAME",
        help="what PEFT's config calls the model, or the .nemo where NeMo looks for it (default: "
        "nothing)")  # fmt: skip
    add("--overwrite", action="store_true", help="replace an adapter that is there")
    return parser


def export_command(argv: Sequence[str]) -> int:
    """`argv` begins after `export`."""
    flags = export_parser().parse_args(argv)
    check = check_nemo if flags.to == "nemo" else check_export
    check(flags.target, overwrite=flags.overwrite)
    base = model_of(flags)
    adapter = open_adapter(flags.source, task=flags.task, base=base)
    notes: tuple[str, ...] = ()
    if base is not None:
        notes = check_adapter(adapter, base.config, identify(base))
    if flags.to == "peft":
        export = as_peft(adapter, base, flags.base_name)
    elif flags.to == "nemo":
        export = as_nemo(adapter, base, flags.base_name)
    else:
        export = as_tgis(adapter, base)
    write = write_nemo if flags.to == "nemo" else write_export
    write(export, flags.target, overwrite=flags.overwrite)
    for note in (*notes, *export.notes):
        sys.stderr.write(f"note: {note}\n")
    sys.stdout.write(f"{flags.target}\n")
    return 0
