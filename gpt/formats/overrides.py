"""User overrides of a checkpoint: `--config-json`, `--true-vocab-size` and the tokenizer.

If a checkpoint does not record a value, the reader's error message asks for one of these flags.
This module refuses unknown keys in the file of `--config-json`, with an error that names the file.
The readers, which do not know the file, check the values.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.config import GPTConfig
from gpt.errors import ConfigError

if TYPE_CHECKING:
    from gpt.checkpoint.logical_tensor import Checkpoint

FILE_BYTES_MAX = 16 << 20


def read_overrides(config_json: str | None, true_vocab_size: int | None) -> dict[str, Any]:
    """Return the fields of GPTConfig that the flags override; empty if both flags are absent."""
    overrides = _read_config_json(Path(config_json)) if config_json is not None else {}
    if true_vocab_size is None:
        return overrides
    if true_vocab_size < 1:
        raise ConfigError(
            f"--true-vocab-size is {true_vocab_size}; it must be a whole number of at least 1"
        )
    if overrides.get("vocab_size", true_vocab_size) != true_vocab_size:
        raise ConfigError(
            f"--true-vocab-size is {true_vocab_size}, but vocab_size in {config_json} is "
            f"{overrides['vocab_size']!r}; remove one of them"
        )
    return {**overrides, "vocab_size": true_vocab_size}


def open_with_overrides(
    path: str, overrides: Mapping[str, Any], tokenizer: str | None = None
) -> "Checkpoint":
    """Open a checkpoint with the user's config fields.

    `tokenizer` replaces the checkpoint's tokenizer; None: no replacement.
    """
    from gpt.formats.registry import open_checkpoint

    checkpoint = open_checkpoint(path, overrides)
    if tokenizer is None:
        return checkpoint
    if not Path(tokenizer).exists():
        raise ConfigError(
            f"the tokenizer {tokenizer} does not exist; give a tokenizer file, or the directory "
            "that contains it"
        )
    return replace(checkpoint, tokenizer=Path(tokenizer))


def _read_config_json(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            record = json.loads(file.read(FILE_BYTES_MAX))
    except OSError as error:
        raise ConfigError(
            f"--config-json: {path} cannot be read ({error.strerror}); give a file that exists"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config-json: {path} is not JSON ({error}); correct it") from None
    if not isinstance(record, dict):
        raise ConfigError(
            f"--config-json: {path} is not a JSON object; it must map field names to values"
        )
    field_names = [field.name for field in fields(GPTConfig)]
    for key in record:
        if key not in field_names:
            close_matches = difflib.get_close_matches(key, field_names, n=1)
            hint = (
                f"did you mean {close_matches[0]!r}?"
                if close_matches
                else f"choose one of: {', '.join(field_names)}"
            )
            raise ConfigError(f"--config-json: {path} has an unknown key {key[:60]!r}; {hint}")
    return record
