"""Rows between two matmuls: which of them the Triton kernels compute."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gpt.linear
from gpt.linear import norm_activation
from gpt.linear.norm_activation import NORM_WIDTH_MAX, NormParameters


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernels_activate_rows_of_any_width(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    kernels = SimpleNamespace(
        activate_rows=lambda *_: launched.append("activate_rows"),
        quantize_rows=lambda *_: launched.append("quantize_rows"),
        norm_rows=lambda *_: launched.append("norm_rows"),
    )
    monkeypatch.setattr(norm_activation, "triton_unavailable_reason", lambda device: None)
    monkeypatch.setattr(gpt.linear, "triton_norm_activation", kernels, raising=False)
    norm = NormParameters(torch.ones(NORM_WIDTH_MAX), None, 1e-5, is_rms=True)
    with FakeTensorMode():
        wide, narrow = (
            torch.empty(3, width, dtype=dtype, device="cuda")
            for width in (2 * NORM_WIDTH_MAX, NORM_WIDTH_MAX)
        )
    norm_activation.activate_rows(wide, "gated_silu")
    norm_activation.quantize_rows(wide, "gated_silu")
    norm_activation.norm_rows(narrow, norm)
    assert launched == ["activate_rows", "quantize_rows", "norm_rows"]
    assert norm_activation._triton_module_for(wide, NORM_WIDTH_MAX) is None
