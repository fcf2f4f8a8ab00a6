"""Adapters as NeMo saves them, and the command that imports and exports adapters."""

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import preamble

V = 3
WIDTH = 48
TABLE = torch.arange(12, dtype=torch.float32).reshape(V, 4) / 8 + 0.125
TEXT = "<|VIRTUAL_PROMPT_0|>{question} is<|VIRTUAL_PROMPT_1|> {answer}"
TASK = {
    "taskname": "mood",
    "prompt_template": TEXT,
    "total_virtual_tokens": V,
    "virtual_token_splits": [2, 1],
    "truncate_field": "question",
    "answer_only_loss": True,
    "answer_field": "answer",
}
CONFIG_1 = {"task_templates": [TASK], "data": {"add_bos": True, "add_eos": True}}


def run_adapters_command(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, str, str]:
    code = preamble.main(["adapters", *map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out, output.err


def write_nemo_adapter(
    folder: Path, state: Any, config: Any = CONFIG_1, rank: str = "", pack: str = "w"
) -> Path:
    """An adapter of NeMo: rank 0's weights and a config, in a tar or a directory."""
    path = folder / "p.nemo"
    members = path if pack == "dir" else folder / "members"
    (members / rank).mkdir(parents=True)
    torch.save(state, members / rank / "model_weights.ckpt")
    (members / "model_config.yaml").write_text(yaml.safe_dump(config))
    if pack != "dir":
        with tarfile.open(path, pack) as archive:  # type: ignore[call-overload]
            archive.add(members, ".")
    return path
