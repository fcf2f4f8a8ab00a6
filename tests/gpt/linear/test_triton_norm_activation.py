"""Triton row kernels without a GPU: interpreted, and compiled for GPUs."""

from importlib.util import find_spec

import pytest
import torch

from gpt.linear.norm_activation import NormParameters
from tests.support.interpreted_cases import check_interpreted_cases
from tests.support.triton_compiled import SHARED_BYTES, recorded_launches

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: make tools"),
]


def test_interpreted_kernels_equal_the_torch_references() -> None:
    check_interpreted_cases("tests/support/norm_activation_cases.py")


@pytest.mark.filterwarnings("default:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 12288])
def test_kernels_compile_for_gpus(
    width: int,
    dtype: torch.dtype,
    fp8: bool,
    capability: int,
) -> None:
    if fp8 and capability < 89:
        pytest.skip("a GPU of this compute capability has no fp8")
    from gpt.linear import triton_norm_activation

    x, scale = torch.zeros(3, width, dtype=dtype), torch.ones(width)
    with recorded_launches(capability) as launches:
        for shift in (None, scale):
            norm = NormParameters(scale, shift, 1e-5, is_rms=shift is None)
            triton_norm_activation.norm_rows(x, norm, fp8)
            for bias in (None, x[0]):
                triton_norm_activation.add_norm(x, bias, x, norm, fp8)
        triton_norm_activation.add_norm(x, None, x, None, fp8=False)
        for name in ("gelu", "gelu_tanh", "silu", "relu2", "relu", "gated_gelu", "gated_silu"):
            rows = torch.zeros(3, 2 * width, dtype=dtype)
            if fp8:
                triton_norm_activation.quantize_rows(rows, name)
            else:
                triton_norm_activation.activate_rows(rows, name)
        if fp8:
            triton_norm_activation.quantize_rows(x, None)
    names = [launch.name for launch in launches.values()]
    assert names.count("add_norm_row") == 7 and names.count("activate_row") == 7 + fp8
    for launch in launches.values():
        assert launch.compile().shared_bytes <= SHARED_BYTES[capability]
