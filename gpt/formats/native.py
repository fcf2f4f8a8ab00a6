"""Preamble's own checkpoint: canonical tensors, whole and unsharded, in safetensors files.

The manifest, `preamble.json`, is written last: a directory without it is no checkpoint. It has the
config, and names the files; nothing else in the directory is looked at.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt.checkpoint.files.safetensors_file import open_safetensors
from gpt.checkpoint.logical_tensor import (
    Checkpoint,
    Logical,
    overridden,
    refuse_larger_vocabulary,
    stack,
)
from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.manifest import MANIFEST, NATIVE, read_manifest

TOKENIZER = "tokenizer"
# Beside them may lie a proof, which is of this form too.
WEIGHTS = re.compile(r"model-\d+-of-\d+\.safetensors")


def open_native(path: Path, changes: GPTConfig | Mapping[str, Any] | None = None) -> Checkpoint:
    """A directory whose manifest is of this form. `changes` are fields of GPTConfig to override."""
    manifest = read_manifest(path)
    if manifest.layout != NATIVE:
        raise CheckpointError(
            f"{path / MANIFEST} is of files in {manifest.layout} form, which are not here; copy the"
            " whole directory again"
        )
    config = manifest.config
    try:
        used = overridden(config, changes)
    except ConfigError as error:
        raise CheckpointError(f"{path / MANIFEST}: {error}") from None
    refuse_larger_vocabulary(path, used, config.vocab_size)
    tensors: dict[str, Logical] = {}
    weights = [path / name for name in manifest.files if WEIGHTS.fullmatch(name)]
    for file in weights:
        for name, stored in open_safetensors(file).items():
            if name in tensors:
                raise CheckpointError(f"{file} holds {name}, which another file holds too")
            tensors[name] = stack([(stored, 0, stored.shape[0] if stored.shape else 1)])
    if used.vocab_size < config.vocab_size:
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            if name in tensors:
                source = tensors[name].pieces[0].source
                tensors[name] = stack([(source, 0, used.vocab_size)])
    recorded = manifest.identity
    checkpoint = Checkpoint(
        *(path, "native", used, tensors, tuple(weights)),
        tokenizer=path / TOKENIZER if (path / TOKENIZER).is_dir() else None,
        notes=(recorded.note,) if recorded.note else (),
        identity=recorded if used == config else None,
    )
    checkpoint.check()
    return checkpoint
