"""Triton paged attention without a GPU: in Triton's interpreter, and compiled for GPUs."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from gpt.attention.kv_cache import FP8_DTYPE
from tests.support.paged_steps import case
from tests.support.triton_compiled import SHARED_BYTES, Launched, compiled

ROOT = Path(__file__).resolve().parents[3]
CASES, PARTS = 30, 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: make tools"),
]


@pytest.mark.parametrize("part", range(PARTS))
def test_random_steps_in_the_interpreter_equal_the_reference(part: int) -> None:
    case_count = CASES // PARTS
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.attention_cases",
            str(part * case_count),
            str(case_count),
        ],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.filterwarnings("default:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("heads", "dtype", "fp8_kv", "capability"),
    [
        ((4, 1, 128), torch.bfloat16, False, 90),
        ((4, 1, 128), torch.bfloat16, True, 90),
        ((1, 8, 256), torch.bfloat16, False, 90),
        ((1, 48, 64), torch.bfloat16, True, 90),
        ((2, 4, 128), torch.bfloat16, False, 80),
        ((4, 1, 256), torch.float32, False, 90),
        ((2, 1, 80), torch.float32, False, 80),
    ],
)
def test_the_kernels_compile_for_gpus_and_fit_their_shared_memory(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    fp8_kv: bool,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gpt.attention import triton_kernels, triton_paged

    kernels = []
    for name in ("attend_single", "attend_tile", "merge_segments", "append_kv"):
        kernel = Launched(getattr(triton_kernels, name))
        kernels.append(kernel)
        monkeypatch.setattr(triton_kernels, name, kernel)
    attention = triton_paged.TritonAttention(torch.ones(1, 2) if fp8_kv else None)
    for lengths, window in (([1, 1], None), ([2, 2], None), ([200, 1], 64)):
        step = case(lengths, [300] * 2, heads, 16, dtype)
        kv = step.kv.to(FP8_DTYPE) if fp8_kv else step.kv
        attention.store(step.k, step.v, step.batch, kv)
        attention.attend(step.q, step.k, step.v, step.batch, kv, window)
    assert sum(len(kernel.calls) for kernel in kernels) > 6
    for kernel in kernels:
        assert all(shared <= SHARED_BYTES[capability] for shared in compiled(kernel, capability))
