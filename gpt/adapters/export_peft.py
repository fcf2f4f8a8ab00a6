"""PEFT and TGIS export: an adapter as a PEFT directory, or as decoder.pt of TGIS's prompt store.

Both formats support virtual tokens only before the text; a template with virtual tokens after text
is refused. Notes list the card fields that the target format does not have. The directory is
written atomically. The module opens no checkpoint; it uses only the base model that the caller
passes.
"""

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from gpt.adapters.card import Adapter
from gpt.adapters.import_peft import PREFIX_TUNING, PROMPT_EMBEDDINGS_KEY
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import AdapterError
from gpt.files.atomic_files import stage_folder
from gpt.tokenizers.tokenizer import open_tokenizer

EMBEDDING_KEY = "embedding.word_embeddings.weight"
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
TGIS_FILES = ("decoder.pt",)
BRIDGE_FILES = (".metadata", "__0_0.distcp", "metadata.json", "common.pt", "run_config.yaml")
# `write_export` replaces an existing directory only if it has no files with other names.
REPLACEABLE_FILES = {*PEFT_FILES, *TGIS_FILES, *BRIDGE_FILES, "adapter_model.bin"}


@dataclass(frozen=True)
class AdapterExport:
    """The files of an adapter in another format, and notes for the user."""

    files: Mapping[str, bytes]  # The content of each file, by name.
    notes: tuple[str, ...]  # Card fields that the format lacks, and instructions.


def convert_to_peft(
    adapter: Adapter, base: Checkpoint | None, base_name: str | None
) -> AdapterExport:
    """Convert an adapter to PEFT's prompt tuning or prefix tuning."""
    table, notes = _leading_rows(adapter, base)
    rows, width = table.shape
    config: dict[str, object] = {
        "task_type": "CAUSAL_LM",  # Without task_type PEFT loads the prompt but does not use it.
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
    weights = safetensors.torch.save({PROMPT_EMBEDDINGS_KEY: table}, {"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    files = dict(zip(PEFT_FILES, (text.encode(), weights), strict=True))
    return AdapterExport(files, (*notes, *lost_field_notes(adapter)))


def _prefix_config(adapter: Adapter, base: Checkpoint | None) -> dict[str, object]:
    """Return PEFT's config of a prefix; the numbers of layers and KV heads come from the model."""
    if base is None:
        raise AdapterError(
            f"adapter {adapter.card.name!r} is a prefix, and PEFT needs its numbers of layers and "
            "heads; give the base model with --model"
        )
    model_config = base.config
    return {
        "peft_type": PREFIX_TUNING,
        "token_dim": model_config.num_query_groups * model_config.kv_channels,
        "num_layers": model_config.num_layers,
        "num_attention_heads": model_config.num_query_groups,
        "prefix_projection": False,  # The table has final keys and values; PEFT needs no MLP.
    }


def check_rows_only(adapter: Adapter, format_name: str) -> None:
    """Refuse an adapter for a format that supports only the kind "rows"."""
    if adapter.linears:
        raise AdapterError(
            f"adapter {adapter.card.name!r} changes linears, which {format_name} does not support; "
            "export it with --to peft"
        )
    if adapter.card.kind == "prefix":
        raise AdapterError(
            f"adapter {adapter.card.name!r} is a prefix, which {format_name} does not support; "
            "export it with --to peft"
        )


def convert_to_tgis(adapter: Adapter, base: Checkpoint | None) -> AdapterExport:
    """Convert an adapter to `decoder.pt`, a single matrix.

    TGIS uses the name of the directory that contains `decoder.pt` as the prompt id.
    """
    check_rows_only(adapter, "TGIS")
    table, notes = _leading_rows(adapter, base)
    content = io.BytesIO()
    torch.save(table, content)
    return AdapterExport({TGIS_FILES[0]: content.getvalue()}, (*notes, *lost_field_notes(adapter)))


def lost_field_notes(adapter: Adapter) -> tuple[str, ...]:
    """Return a note with the non-empty card fields that PEFT and TGIS do not support."""
    card = adapter.card
    unsupported_fields = {
        "template": card.template is not None and card.template.fields,
        "stop strings": card.stop,
        "max_new_tokens": card.max_new_tokens,
    }
    names = [name for name, content in unsupported_fields.items() if content]
    return (f"the format has no field for the {' and the '.join(names)}",) if names else ()


def _leading_rows(adapter: Adapter, base: Checkpoint | None) -> tuple[Tensor, tuple[str, ...]]:
    """Return the rows in template order, and notes that tell the user how to tokenize prompts.

    If the template places the begin-of-text token before the virtual tokens (bos "first"), the
    token's embedding becomes the first row.
    """
    template = adapter.card.template
    if template is None:
        return adapter.table, ()
    row_ranges = [part for part in template.parts if isinstance(part, range)]
    if list(template.parts[: len(row_ranges)]) != row_ranges:
        raise AdapterError(
            f"adapter {adapter.card.name!r} has virtual tokens after text of its template, but the "
            "format supports virtual tokens only before the text; train the adapter with all "
            "virtual tokens before the text"
        )
    table = torch.cat([adapter.table[row_range.start : row_range.stop] for row_range in row_ranges])
    if template.bos == "text":
        return table, ("tokenize texts with a begin-of-text token; the rows are before this token",)
    tokenize_note = "tokenize texts without special tokens (add_special_tokens=False)"
    if template.bos == "none":
        return table, (tokenize_note,)
    table = torch.cat([bos_row(adapter, base, "before"), table])
    return table, (f"the first row is the begin-of-text token, so {tokenize_note}",)


def bos_row(adapter: Adapter, base: Checkpoint | None, side: str) -> Tensor:
    """Return the embedding of the begin-of-text token, which becomes an extra row.

    `side`, for error messages: whether the token is "before" or "after" the virtual tokens.
    """
    name = adapter.card.name
    other_side = {"before": "after", "after": "before"}[side]
    if base is None:
        raise AdapterError(
            f"adapter {name!r} has the begin-of-text token {side} its virtual tokens, but the "
            f"format allows it only {other_side} them; give the base model with --model, and the "
            "token is stored as a row"
        )
    bos_id = open_tokenizer(base.tokenizer).bos_id if base.tokenizer is not None else None
    if bos_id is None or not 0 <= bos_id < base.config.vocab_size:
        raise AdapterError(
            f"adapter {name!r} has the begin-of-text token {side} its virtual tokens, but the "
            f"tokenizer of {base.path} has no such token; give the tokenizer that the adapter was "
            "trained with"
        )
    return base.tensors[EMBEDDING_KEY].read_sample(bos_id, 1, base.config.hidden_size).float()


def check_export_target(folder: Path, *, overwrite: bool) -> None:
    """Refuse a path that `write_export` would refuse; call this before a long conversion."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise AdapterError(f"{folder} exists and is not a directory; choose another path")
    file_names = sorted(entry.name for entry in os.scandir(folder))
    if file_names and not overwrite:
        raise AdapterError(
            f"{folder} exists already and contains {file_names[0]}; give --overwrite, or choose "
            "another path"
        )
    foreign_files = [name for name in file_names if name not in REPLACEABLE_FILES]
    if foreign_files:
        raise AdapterError(
            f"{folder} contains {foreign_files[0]}, which is not an adapter file, so the "
            "directory is not overwritten; choose another path"
        )


def write_export(export: AdapterExport, folder: Path, *, overwrite: bool = False) -> None:
    """Write the directory atomically."""
    try:
        check_export_target(folder, overwrite=overwrite)
        with stage_folder(folder, overwrite=overwrite) as partial_folder:
            for name, content in export.files.items():
                (partial_folder / name).write_bytes(content)
    except OSError as error:
        raise AdapterError(
            f"{folder} cannot be written: {error.strerror}; give a path in an existing, writable "
            "directory with free space"
        ) from None
