"""SmolLM2-135M-Instruct, a small real model with a chat template, as a checkpoint for tests."""

from pathlib import Path

from gpt.files.atomic_files import stage_folder
from tests.support.client_environments import run_program
from tests.support.servers import ROOT

CHECKPOINT = ROOT / "build" / "smollm2"
NAME = CHECKPOINT.name


def smollm2_checkpoint() -> Path:
    """The checkpoint in bf16, which is written once; skips the test without its package."""
    if not CHECKPOINT.exists():
        with stage_folder(CHECKPOINT) as staged:
            run_program("smollm2", "dequantize_smollm2.py", str(staged))
    return CHECKPOINT
