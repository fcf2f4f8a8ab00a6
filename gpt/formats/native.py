"""Preamble's native checkpoint: canonical, unsharded tensors in safetensors files.

The manifest, `preamble.json`, has the config and the list of files; weight files that it does not
list are ignored. The manifest is written last, so a directory without a manifest is not a complete
checkpoint.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt.checkpoint.files.object_checkpoint import open_weights
from gpt.checkpoint.logical_tensor import Checkpoint, LogicalTensor, apply_overrides, concat_rows
from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.manifest import MANIFEST, NATIVE, read_manifest
from gpt.parallel.vocabulary_padding import refuse_larger_vocabulary

TOKENIZER_FOLDER = "tokenizer"
# The pattern excludes the proof (stored reference logits), a safetensors file without weights.
WEIGHT_FILE_NAME = re.compile(r"model-\d+-of-\d+\.safetensors")


def open_native(path: Path, overrides: GPTConfig | Mapping[str, Any] | None = None) -> Checkpoint:
    """Open a directory with a native manifest. `overrides` replaces fields of GPTConfig."""
    manifest = read_manifest(path)
    if manifest.layout != NATIVE:
        raise CheckpointError(
            f"{path / MANIFEST} is the manifest of a {manifest.layout} checkpoint, not of a native "
            "checkpoint; copy the whole directory again"
        )
    config = manifest.config  # The config without the overrides.
    try:
        effective_config = apply_overrides(config, overrides)
    except ConfigError as error:
        raise CheckpointError(f"{path / MANIFEST}: {error}") from None
    refuse_larger_vocabulary(path, effective_config.vocab_size, config.vocab_size)
    tensors: dict[str, LogicalTensor] = {}
    weight_files = [path / name for name in manifest.files if WEIGHT_FILE_NAME.fullmatch(name)]
    for file in weight_files:
        for name, stored in open_weights(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"{file} contains {name}, which another file contains too; convert the "
                    "checkpoint again"
                )
            tensors[name] = concat_rows([(stored, 0, stored.shape[0] if stored.shape else 1)])
    if effective_config.vocab_size < config.vocab_size:
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            if name in tensors:
                source = tensors[name].slices[0].source
                tensors[name] = concat_rows([(source, 0, effective_config.vocab_size)])
    identity = manifest.identity
    checkpoint = Checkpoint(
        path,
        "native",
        effective_config,
        tensors,
        tuple(weight_files),
        tokenizer=path / TOKENIZER_FOLDER if (path / TOKENIZER_FOLDER).is_dir() else None,
        notes=(identity.note,) if identity.note else (),
        identity=identity if effective_config == config else None,
    )
    checkpoint.check()
    return checkpoint
