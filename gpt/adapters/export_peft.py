"""An adapter as other programs read it: a directory of HF PEFT's, or one of TGIS's prompt store.

Both know what stands before a text, and nothing else: a template whose rows stand elsewhere is
refused, and what their formats have no place for is returned as notes. The directory appears whole
or not at all. Knows no model but the checkpoint that it is given.
"""

import io
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from gpt.adapters.card import Adapter
from gpt.adapters.import_peft import PREFIX, PROMPTS
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import AdapterError
from gpt.tokenizers.tokenizer import open_tokenizer

EMBEDDING = "embedding.word_embeddings.weight"
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
TGIS_FILES = ("decoder.pt",)
# What a directory may have that `overwrite` replaces; it is no other's then.
REPLACED = {*PEFT_FILES, *TGIS_FILES, "adapter_model.bin"}


@dataclass(frozen=True)
class Export:
    files: Mapping[str, bytes]
    notes: tuple[str, ...]  # What the format does not hold, and its user must do.


def as_peft(adapter: Adapter, base: Checkpoint | None, base_name: str | None) -> Export:
    """Prompt or prefix tuning, as PEFT loads it for any causal model of the same weights and
    vocabulary.
    """
    table, notes = _leading(adapter, base)
    rows, width = table.shape
    config: dict[str, object] = {
        "task_type": "CAUSAL_LM",  # Without it PEFT loads the prompt, and never uses it.
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "num_virtual_tokens": rows,
        "num_transformer_submodules": 1,
    }
    if adapter.card.kind == "prefix":
        config |= _prefix_config(adapter, base)
    else:
        config |= {
            "peft_type": "PROMPT_TUNING",
            "token_dim": width,
            "prompt_tuning_init": "RANDOM",
        }
        if base is not None:
            config["num_layers"] = base.config.num_layers
            config["num_attention_heads"] = base.config.num_attention_heads
    weights = safetensors.torch.save({PROMPTS: table}, {"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    files = dict(zip(PEFT_FILES, (text.encode(), weights), strict=True))
    return Export(files, (*notes, *_lost(adapter)))


def _prefix_config(adapter: Adapter, base: Checkpoint | None) -> dict[str, object]:
    """Where a layer ends in the table, only the model says. Heads are those that have keys."""
    if base is None:
        raise AdapterError(
            f"adapter {adapter.card.name!r} is keys and values of layers, and PEFT must be told "
            "how many layers and heads there are; give its model with --model"
        )
    network = base.config
    return {
        "peft_type": PREFIX,
        "token_dim": network.num_query_groups * network.kv_channels,
        "num_layers": network.num_layers,
        "num_attention_heads": network.num_query_groups,
        "prefix_projection": False,  # What it made is in the table.
    }


def refuse_prefix(adapter: Adapter, format: str) -> None:
    """For formats that only have rows where an embedding's would stand."""
    if adapter.card.kind == "prefix":
        raise AdapterError(
            f"adapter {adapter.card.name!r} is keys and values of layers, for which {format} has "
            "no place; export it --to peft"
        )


def as_tgis(adapter: Adapter, base: Checkpoint | None) -> Export:
    """`decoder.pt`, a bare matrix; the directory's name is the prompt's id there."""
    refuse_prefix(adapter, "TGIS")
    table, notes = _leading(adapter, base)
    content = io.BytesIO()
    torch.save(table, content)
    return Export({TGIS_FILES[0]: content.getvalue()}, (*notes, *_lost(adapter)))


def _lost(adapter: Adapter) -> tuple[str, ...]:
    card = adapter.card
    parts = {
        "template": card.template is not None and card.template.fields,
        "stop strings": card.stop,
        "max_new_tokens": card.max_new_tokens,
    }
    lost = [name for name, value in parts.items() if value]
    return (f"that format has no place for the {' and the '.join(lost)}",) if lost else ()


def _leading(adapter: Adapter, base: Checkpoint | None) -> tuple[Tensor, tuple[str, ...]]:
    """The rows in the order in which they stand before the text, and what its tokens must be."""
    template = adapter.card.template
    if template is None:
        return adapter.table, ()
    runs = [part for part in template.parts if isinstance(part, range)]
    if list(template.parts[: len(runs)]) != runs:
        raise AdapterError(
            f"adapter {adapter.card.name!r} has virtual tokens after some of its text, and the "
            "format only knows those before all of it; train it with all of them at the front"
        )
    table = torch.cat([adapter.table[run.start : run.stop] for run in runs])
    if template.bos == "text":
        return table, ("a begin-of-text token stands after the rows and before the text",)
    plain = "tokenize texts without special tokens (add_special_tokens=False)"
    if template.bos == "none":
        return table, (plain,)
    table = torch.cat([begin_row(adapter, base, "before"), table])
    return table, (f"the first row is the begin-of-text token, so {plain}",)


def begin_row(adapter: Adapter, base: Checkpoint | None, where: str) -> Tensor:
    """The begin-of-text token, which stands before or after the rows, as a row of its own."""
    name, other = adapter.card.name, {"before": "after", "after": "before"}[where]
    if base is None:
        raise AdapterError(
            f"adapter {name!r} has a begin-of-text token {where} its virtual ones, and the format "
            f"only one {other} them; give its model with --model, and the token becomes a row"
        )
    token = open_tokenizer(base.tokenizer).bos_id if base.tokenizer is not None else None
    if token is None or not 0 <= token < base.config.vocab_size:
        raise AdapterError(
            f"adapter {name!r} has a begin-of-text token {where} its virtual ones, and the "
            f"tokenizer of {base.path} has none; give the tokenizer that it was trained with"
        )
    return base.tensors[EMBEDDING].corner(token, 1, base.config.hidden_size).float()


def check_export(folder: Path, *, overwrite: bool) -> None:
    """Refuse a place that is taken, as `write_export` would, before anything is computed."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise AdapterError(f"{folder} exists, and is no directory; choose another place")
    held = sorted(entry.name for entry in os.scandir(folder))
    if held and not overwrite:
        raise AdapterError(
            f"{folder} exists already, with {held[0]} in it; give --overwrite, or another place"
        )
    others = [name for name in held if name not in REPLACED]
    if others:
        raise AdapterError(
            f"{folder} holds {others[0]}, which is not an adapter's; it is not overwritten: choose "
            "another place"
        )


def write_export(export: Export, folder: Path, *, overwrite: bool = False) -> None:
    """Make the directory: it is there with all of its files, or not at all."""
    hidden = f".{folder.name}.{secrets.token_hex(4)}"
    part, old = folder.with_name(f"{hidden}.part"), folder.with_name(f"{hidden}.old")
    try:
        check_export(folder, overwrite=overwrite)
        part.mkdir()
        for name, content in export.files.items():
            with open(part / name, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        _sync(part)
        if folder.exists():
            folder.rename(old)
        try:
            part.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise AdapterError(
            f"{folder} cannot be written: {error.strerror}; give a place in a directory that "
            "exists, is writable and has room"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Names, too, must survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
