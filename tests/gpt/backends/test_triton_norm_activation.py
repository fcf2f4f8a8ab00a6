"""Our Triton kernels between products without a GPU: interpreted, and compiled for GPUs."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from gpt.backends.norm_activation import Norm
from tests.support.triton_compiled import SHARED_BYTES, Launched, compiled

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: make tools"),
]


def test_in_the_interpreter_they_equal_their_twins() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/support/norm_activation_cases.py",
        ],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.filterwarnings("default:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 12288])
def test_they_compile_for_gpus(
    width: int,
    dtype: torch.dtype,
    narrow: bool,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if narrow and capability < 89:
        pytest.skip("such a GPU has no numbers of eight bits")
    from gpt.backends import triton_norm_activation, triton_row_kernels

    spied = []
    for name in ("end_row", "activate"):
        spied.append(Launched(getattr(triton_row_kernels, name)))
        monkeypatch.setattr(triton_row_kernels, name, spied[-1])
    x, numbers = torch.zeros(3, width, dtype=dtype), torch.ones(width)
    for shift in (None, numbers):
        norm = Norm(numbers, shift, 1e-5, rms=shift is None)
        triton_norm_activation.normed(x, norm, narrow)
        for bias in (None, x[0]):
            triton_norm_activation.added(x, bias, x, norm, narrow)
    triton_norm_activation.added(x, None, x, None, narrow=False)
    for name in ("gelu", "gelu_tanh", "silu", "relu2", "gated_gelu", "gated_silu"):
        rows = torch.zeros(3, 2 * width, dtype=dtype)
        if narrow:
            triton_norm_activation.narrowed(rows, name)
        else:
            triton_norm_activation.activated(rows, name)
    if capability >= 89:
        triton_norm_activation.narrowed(x, None)
    assert len(spied[0].calls) == 7 and len(spied[1].calls) >= 6
    for one in spied:
        assert all(shared <= SHARED_BYTES[capability] for shared in compiled(one, capability))
