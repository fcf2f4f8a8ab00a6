"""The `inspect` and `verify` commands with JSON output, and checkpoints for them.

The command runs as for a user; the tests need its stderr to be empty.
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


def json_command(command: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """`preamble COMMAND ... --json`: the exit code and the object."""

    def call(*arguments: str | Path) -> tuple[int, Any]:
        code = preamble.main([command, *map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        assert err == "", err
        return code, json.loads(out)

    return call


def read_weights(source: Checkpoint) -> dict[str, Tensor]:
    return {name: source.read(name) for name in source.tensors}


def write_native_model(
    folder: Path, config: GPTConfig, tensors: dict[str, Tensor] | None = None
) -> Path:
    """A random model, or these tensors, as a native checkpoint."""
    write_native((config, tensors) if tensors else lively(config), folder)
    return folder
