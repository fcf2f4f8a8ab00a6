"""What the tests of `inspect` and `verify` share: a command that answers in JSON, and its subjects.

The command is called as a user calls it; talk on stderr would be a fault, so there must be none.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import preamble
from checkpoints_tools.conversion.convert import write_native
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from tests.support.models import lively

Run = Callable[..., tuple[int, Any]]


def answering(command: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """`preamble COMMAND ... --json`: the exit code and the object."""

    def call(*words: str | Path) -> tuple[int, Any]:
        code = preamble.main([command, *map(str, words), "--json"])
        out, err = capsys.readouterr()
        assert err == "", err
        return code, json.loads(out)

    return call


def weights(source: Checkpoint) -> dict[str, Tensor]:
    return {name: source.read(name) for name in source.tensors}


def native(folder: Path, config: GPTConfig, tensors: dict[str, Tensor] | None = None) -> Path:
    """A lively model, or these tensors, in Preamble's own form."""
    write_native((config, tensors) if tensors else lively(config), folder)
    return folder
