"""Adapters of NeMo's making, and the command that imports and exports them."""

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import preamble

V, WIDTH = 3, 48
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


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = preamble.main(["adapters", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def nemo(folder: Path, state: Any, config: Any = CONFIG_1, rank: str = "", pack: str = "w") -> Path:
    """As NeMo saves it: rank 0's weights and a config, in a tar, compressed, or a directory."""
    made = folder / "p.nemo"
    place = made if pack == "dir" else folder / "members"
    (place / rank).mkdir(parents=True)
    torch.save(state, place / rank / "model_weights.ckpt")
    (place / "model_config.yaml").write_text(yaml.safe_dump(config))
    if pack != "dir":
        with tarfile.open(made, pack) as archive:  # type: ignore[call-overload]
            archive.add(place, ".")
    return made
