"""Host time of an eager layer: both ways to launch reach the driver with the same kernels."""

from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="no Triton: make tools"),
]


@pytest.mark.parametrize("fp8", [False, True])
def test_our_launches_and_triton_s_reach_the_driver(fp8: bool) -> None:
    from bench.suites.host_time import LLAMA_LAYERS, measure_layer

    ours, tritons = (
        measure_layer(LLAMA_LAYERS, 1, fp8=fp8, first=False, triton=triton)
        for triton in (False, True)
    )
    assert ours.launches == tritons.launches
    assert 5 <= ours.launches <= 12
    assert min(ours.microseconds, tritons.microseconds) > 0
