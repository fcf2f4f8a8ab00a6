"""Lightning's files of a NeMo 1 training run: one `.ckpt` for each rank, with the config inside.

They hold far more than a model: optimizers, loops, callbacks. The whole pickle is read with
stand-ins, and what is not data in it is refused; but of the tensors only the model's are looked at.
It knows no names of tensors.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt.checkpoint.files.file_tree import Span, whole_file
from gpt.checkpoint.files.torch_zip import read_archive
from gpt.checkpoint.logical_tensor import Checkpoint, some
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.mappings.nemo_yaml import Fields, unwrapped
from gpt.formats.megatron.rank_files import Ranks, Saved
from gpt.formats.megatron.reader import join_ranks
from gpt.formats.nemo.reader import RANK, all_ranks, asks_of, refuse_lost_chunks


def find_lightning(path: Path) -> dict[str, list[Path]] | None:
    """The `.ckpt` files by their rank's directory; None if there are none.

    Of a file, those of the same name on all ranks.
    """
    if path.is_file() and path.suffix == ".ckpt":
        if not RANK.fullmatch(path.parent.name):
            return {"mp_rank_00": [path]}
        root, pattern = path.parent.parent, path.name
    elif path.is_dir():
        root, pattern = path.parent if RANK.fullmatch(path.name) else path, "*.ckpt"
    else:
        return None
    found = {}
    for folder in sorted(root.iterdir()):
        if RANK.fullmatch(folder.name) and folder.is_dir():
            files = [file for file in sorted(folder.glob("*.ckpt")) if file.match(pattern)]
            found[folder.name] = [file for file in files if file.is_file()]
    return {folder: files for folder, files in found.items() if files} or None


def open_lightning(path: Path, changes: GPTConfig | Mapping[str, Any] | None = None) -> Checkpoint:
    """The files of one step. `changes` are fields of GPTConfig that override their config."""
    found = find_lightning(path) or {}
    names = sorted({file.name for files in found.values() for file in files})
    if len(names) != 1:
        raise CheckpointError(
            f"{path} holds {len(names)} checkpoints of a run ({some(names) or 'none'}); give the "
            "file of one of them, in the directory of any rank"
        )
    files = {folder: whole_file(held[0]) for folder, held in found.items()}
    first = files[min(files)]
    records = {span.path: read_archive(span) for span in files.values()}
    fields = Fields(_config(records[first.path], first), f"{first.path}: hyper_parameters")
    split, places = all_ranks(path, files, fields)
    version = 0.0 if fields.get("megatron_legacy") is True else 3.0
    saved = {place: _saved(records[s.path], s, version) for place, s in places.items()}
    ranks = Ranks(split, saved)
    refuse_lost_chunks(ranks, fields)
    checkpoint = join_ranks(ranks, path, changes or {}, asks_of(fields))
    note = "a training run's own files have no tokenizer: give one as a file or a directory"
    return replace(checkpoint, format="nemo", notes=(*checkpoint.notes, note))


def _config(record: object, span: Span) -> dict[str, Any]:
    hyper = unwrapped(record.get("hyper_parameters")) if isinstance(record, dict) else None
    config = hyper.get("cfg", hyper) if isinstance(hyper, dict) else None
    if not isinstance(config, dict) or "num_layers" not in config:
        raise CheckpointError(
            f"{span.path} has no hyper_parameters that describe a GPT; it is another kind of "
            "model's, or a file that only its own version opens: save it as .nemo"
        )
    return config


def _saved(record: object, span: Span, version: float) -> Saved:
    """A rank's state; the chunks of a virtual pipeline have keys of their own."""
    values = record if isinstance(record, dict) else {}
    chunks: dict[int, Mapping[str, Any]] = {}
    for key, value in values.items():
        match = re.fullmatch(r"model(\d{1,4})", str(key))
        if match and isinstance(value, dict):
            chunks[int(match[1])] = value
    if not chunks and isinstance(values.get("state_dict"), dict):
        chunks[0] = values["state_dict"]
    if not chunks:
        keys = some([str(key) for key in values]) or "nothing"
        raise CheckpointError(f"{span.path} has no state_dict, but {keys}; it holds no model")
    return Saved(span.path, None, version, None, chunks)
