"""Kernels between matmuls against their torch references, in Triton's interpreter.

tests/gpt/linear/test_triton_norm_activation.py runs it in a process of its own. The interpreter's
casts to e4m3 do not round as a GPU's do, so FP8 values are compared before the cast; tests on a GPU
check the cast itself.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.cpu.packed_linear import GATED_PREFIX
from gpt.fp8_rows import ABSMAX_MIN, FP8_ALIGNMENT, FP8_MAX, Fp8Rows
from gpt.linear import norm_activation, triton_norm_activation
from gpt.linear.norm_activation import NormParameters
from gpt.model.activation import UNGATED_ACTIVATIONS
from tests.support.attention_cases import patch_interpreter

patch_interpreter()

NAMES = list(UNGATED_ACTIVATIONS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 16, 30, 100]


def is_close(got: Tensor, want: Tensor) -> bool:
    """Close within the dtype's precision; the interpreter's bf16 casts truncate, in norms twice."""
    digits = {torch.bfloat16: 2**-6, torch.float16: 2**-9}.get(got.dtype, 1e-5)
    return got.dtype == want.dtype and torch.allclose(
        got.double(), want.double(), rtol=digits, atol=digits
    )


def allocate_unquantized(x: Tensor, width: int) -> Fp8Rows:
    """An allocation for FP8 rows before the cast."""
    return Fp8Rows.allocate(len(x), width, x.device, torch.float32)


def assert_same_rows(quantized: Fp8Rows, exact: Tensor) -> bool:
    """Compare FP8 values and scales with the rows that were quantized."""
    want = norm_activation.quantize_e4m3(exact)
    numbers = exact * (FP8_MAX / exact.abs().amax(-1, keepdim=True).clamp_min(ABSMAX_MIN))
    width = exact.shape[1]
    return (
        quantized.values.shape == want.values.shape
        and torch.allclose(quantized.scales, want.scales, rtol=1e-5)
        and torch.allclose(quantized.values[:, :width], numbers, rtol=1e-4, atol=1e-3)
        and not quantized.values[:, width:].any()
    )


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def random_norm(width: int, *, rms: bool) -> NormParameters:
    shift = None if rms else torch.randn(width)
    return NormParameters(torch.rand(width) + 0.5, shift, 1e-5, rms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rms", [False, True])
def test_residual_add_and_norm_agree_with_torch(width: int, rms: bool, dtype: torch.dtype) -> None:
    x, y = (torch.randn(3, width).to(dtype) for _ in range(2))
    norm = random_norm(width, rms=rms)
    for bias in (None, torch.randn(width).to(dtype)):
        for norm_or_none in (None, norm):
            output, rows = triton_norm_activation.add_norm(y, bias, x, norm_or_none, fp8=False)
            want, expected_rows = norm_activation.add_norm(y, bias, x, norm_or_none)
            assert torch.equal(output, want) or is_close(output, want)
            assert (rows is None) == (norm_or_none is None)
            if isinstance(rows, Tensor) and isinstance(expected_rows, Tensor):
                assert is_close(rows, expected_rows)
    normed = triton_norm_activation.norm_rows(x, norm, fp8=False)
    plain = norm_activation.norm_rows(x, norm)
    assert isinstance(normed, Tensor) and isinstance(plain, Tensor) and is_close(normed, plain)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rms", [False, True])
def test_norm_to_e4m3_agrees_with_torch(width: int, rms: bool) -> None:
    x = torch.randn(3, width)
    norm = random_norm(width, rms=rms)
    quantized = allocate_unquantized(x, width)
    triton_norm_activation._launch_add_norm(x, norm, quantized, None)
    exact = norm_activation.norm_rows(x, norm)
    assert isinstance(exact, Tensor) and assert_same_rows(quantized, exact)


@pytest.mark.parametrize("single_block_size_max", [16, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*NAMES, *(f"{GATED_PREFIX}{name}" for name in NAMES)])
def test_activations_agree_with_torch(
    name: str, dtype: torch.dtype, single_block_size_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows of several blocks, the last block not full, and with e4m3 output also of one block.
    monkeypatch.setattr(triton_norm_activation, "SINGLE_BLOCK_SIZE_MAX", single_block_size_max)
    monkeypatch.setattr(triton_norm_activation, "BLOCK_SIZE", 16)
    monkeypatch.setattr(triton_norm_activation, "SPLIT_BLOCK_SIZE_MAX", 16)
    x = 3 * torch.randn(3, 76).to(dtype)
    assert is_close(
        triton_norm_activation.activate_rows(x, name), norm_activation.activate_rows(x, name)
    )
    exact = norm_activation.activate_rows(x.float(), name)
    quantized = allocate_unquantized(x, exact.shape[1])
    triton_norm_activation._launch_activation(x, name, quantized)
    assert assert_same_rows(quantized, exact)


@pytest.mark.parametrize("width", WIDTHS)
def test_quantization_to_e4m3_keeps_the_values(width: int) -> None:
    x = torch.randn(4, width)
    x[2] = 0
    quantized = allocate_unquantized(x, width)
    triton_norm_activation._launch_activation(x, None, quantized)
    assert assert_same_rows(quantized, x)
    assert quantized.values.shape[1] % FP8_ALIGNMENT == 0
    assert not quantized.values[2].any()


@pytest.mark.parametrize("name", [None, *NAMES, f"{GATED_PREFIX}silu"])
def test_nan_rows_do_not_leak_into_other_rows(name: str | None) -> None:
    x = torch.randn(3, 32)
    x[1, 5] = float("nan")
    quantized = allocate_unquantized(x, 32 // (1 + (name or "").startswith(GATED_PREFIX)))
    triton_norm_activation._launch_activation(x, name, quantized)
    finite: Any = (quantized.values * quantized.scales).isfinite().all(-1)
    assert finite.tolist() == [True, False, True]
    if name is not None:
        assert triton_norm_activation.activate_rows(x, name).isfinite().all(-1).tolist() == [
            True,
            False,
            True,
        ]
    norm = random_norm(32, rms=True)
    rows = triton_norm_activation.norm_rows(x, norm, fp8=False)
    assert isinstance(rows, Tensor)
    assert rows.isfinite().all(-1).tolist() == [True, False, True]
