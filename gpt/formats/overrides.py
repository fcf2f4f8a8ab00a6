"""What a user knows better than a checkpoint's files, as programs are told it.

A file of fields, the true size of the vocabulary, a tokenizer: each is named in the message that
asks for it. A key that is none is refused here, where the file that has it can still be named;
whether a value can be is the reader's business.
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
    """Fields of GPTConfig; empty where nothing is given."""
    changes = _read(Path(config_json)) if config_json is not None else {}
    if true_vocab_size is None:
        return changes
    if true_vocab_size < 1:
        raise ConfigError(
            f"--true-vocab-size is {true_vocab_size}; it must be a whole number of at least 1"
        )
    if changes.get("vocab_size", true_vocab_size) != true_vocab_size:
        raise ConfigError(
            f"--true-vocab-size is {true_vocab_size}, but vocab_size in {config_json} is "
            f"{changes['vocab_size']!r}; give one of them"
        )
    return {**changes, "vocab_size": true_vocab_size}


def open_overridden(
    path: str, changes: Mapping[str, Any], tokenizer: str | None = None
) -> "Checkpoint":
    """A checkpoint as its user describes it."""
    from gpt.formats.registry import open_checkpoint

    checkpoint = open_checkpoint(path, changes)
    if tokenizer is None:
        return checkpoint
    if not Path(tokenizer).exists():
        raise ConfigError(
            f"the tokenizer {tokenizer} does not exist; give its file, or the directory that has it"
        )
    return replace(checkpoint, tokenizer=Path(tokenizer))


def _read(path: Path) -> dict[str, Any]:
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
        raise ConfigError(f"--config-json: {path} is not a JSON object of fields and values")
    known = [field.name for field in fields(GPTConfig)]
    for key in record:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            way = f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known)}"
            raise ConfigError(f"--config-json: {path} has an unknown key {key[:60]!r}; {way}")
    return record
