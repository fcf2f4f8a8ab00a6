"""Reader of PyTorch Lightning `.ckpt` files of a NeMo 1 training run: one file per rank.

A file contains the model, its config, and the states of optimizers, loops and callbacks. The pickle
is read with inert stubs, and anything except data is refused. Tensors are memory-mapped, so the
tensors of optimizers are not read. The Megatron reader interprets the tensor names.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt.checkpoint.files.file_tree import Span, file_span
from gpt.checkpoint.files.torch_file import read_torch_span
from gpt.checkpoint.logical_tensor import Checkpoint, summarize_names
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.mappings.nemo_yaml import NemoConfig, unwrap_omegaconf
from gpt.formats.megatron.rank_files import RankFile, RankFiles
from gpt.formats.megatron.reader import join_ranks
from gpt.formats.nemo.reader import (
    RANK_FOLDER,
    assign_ranks,
    nemo1_config_inferrer,
    refuse_missing_chunks,
)
from gpt.settings import short_repr


def find_lightning(path: Path) -> dict[str, list[Path]] | None:
    """Return the `.ckpt` files by the name of the rank directory; None if there are none.

    - If `path` is a rank directory or contains rank directories: all files of all ranks.
    - If `path` is a file in a rank directory: the files with this name in all rank directories.
    - If `path` is a file in another directory: that file, as `mp_rank_00`.
    """
    if path.is_file() and path.suffix == ".ckpt":
        if not RANK_FOLDER.fullmatch(path.parent.name):
            return {"mp_rank_00": [path]}
        root = path.parent.parent
        pattern = path.name
    elif path.is_dir():
        root = path.parent if RANK_FOLDER.fullmatch(path.name) else path
        pattern = "*.ckpt"
    else:
        return None
    files_by_rank = {}
    for folder in sorted(root.iterdir()):
        if RANK_FOLDER.fullmatch(folder.name) and folder.is_dir():
            files = [file for file in sorted(folder.glob("*.ckpt")) if file.match(pattern)]
            files_by_rank[folder.name] = [file for file in files if file.is_file()]
    return {folder: files for folder, files in files_by_rank.items() if files} or None


def open_lightning(
    path: Path, overrides: GPTConfig | Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open the files of one training step. `overrides` replaces fields of GPTConfig."""
    files_by_rank = find_lightning(path) or {}
    names = sorted({file.name for rank_paths in files_by_rank.values() for file in rank_paths})
    if len(names) != 1:
        raise CheckpointError(
            f"{path} has {len(names)} checkpoints of a run ({summarize_names(names) or 'none'}); "
            "give the file of one checkpoint, in the directory of any rank"
        )
    span_by_folder = {folder: file_span(paths[0]) for folder, paths in files_by_rank.items()}
    first_span = span_by_folder[min(span_by_folder)]
    records = {span.path: read_torch_span(span) for span in span_by_folder.values()}
    fields = NemoConfig(
        _read_hyper_parameters(records[first_span.path], first_span),
        f"{first_span.path}: hyper_parameters",
    )
    split, span_by_rank = assign_ranks(path, span_by_folder, fields)
    version = 0.0 if fields.get("megatron_legacy") is True else 3.0
    rank_files = {
        rank: _to_rank_file(records[span.path], span, version)
        for rank, span in span_by_rank.items()
    }
    ranks = RankFiles(split, rank_files)
    refuse_missing_chunks(ranks, fields)
    checkpoint = join_ranks(ranks, path, overrides or {}, nemo1_config_inferrer(fields))
    note = "the files of a training run have no tokenizer: give a tokenizer file or directory"
    return replace(checkpoint, format="nemo", notes=(*checkpoint.notes, note))


def _read_hyper_parameters(record: object, span: Span) -> dict[str, Any]:
    hyper_parameters = (
        unwrap_omegaconf(record.get("hyper_parameters")) if isinstance(record, dict) else None
    )
    config = (
        hyper_parameters.get("cfg", hyper_parameters)
        if isinstance(hyper_parameters, dict)
        else None
    )
    if not isinstance(config, dict) or "num_layers" not in config:
        raise CheckpointError(
            f"{span.path} has no hyper_parameters that describe a GPT; it has another kind of "
            "model or is of an unsupported version: save it as .nemo"
        )
    return config


def _to_rank_file(record: object, span: Span, version: float) -> RankFile:
    """Convert the content of a rank's file.

    The keys `model0`, `model1`, ... are the chunks of a virtual pipeline; without a virtual
    pipeline, the key is `state_dict`.
    """
    state = record if isinstance(record, dict) else {}
    chunks: dict[int, Mapping[str, Any]] = {}
    for key, value in state.items():
        match = re.fullmatch(r"model(\d{1,4})", key) if isinstance(key, str) else None
        if match and isinstance(value, dict):
            chunks[int(match[1])] = value
    if not chunks and isinstance(state.get("state_dict"), dict):
        chunks[0] = state["state_dict"]
    if not chunks:
        keys = summarize_names([short_repr(key) for key in state]) or "nothing"
        raise CheckpointError(
            f"{span.path} has no state_dict; it contains {keys}: give a file with the model's "
            "weights"
        )
    return RankFile(span.path, None, version, None, chunks)
