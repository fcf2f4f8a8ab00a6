"""All attention kernels of a matrix of shapes compile for GPUs: no error, few spilled registers."""

from importlib.util import find_spec

import pytest

from tests.support.triton_compiled import MATRIX_CASES, SHARED_BYTES, resources_with

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(find_spec("triton") is None, reason="no Triton: make tools"),
]

# By compute capability, channels and dtype of the model: the bytes that a thread may spill.
# Other kernels spill none.
SPILLED_BYTES_MAX = {
    (80, 256, "bfloat16"): 8,
    (80, 256, "float16"): 8,
    (80, 64, "float32"): 8,  # With 48 queries per KV head.
    (90, 80, "float32"): 8,  # With 12 queries per KV head.
    (100, 80, "float32"): 8,
}


@pytest.mark.parametrize("case", MATRIX_CASES)
def test_the_kernels_compile_within_the_limits_of_a_gpu(case: str) -> None:
    capability, _, _, channels, dtype, _ = case.split()
    spilled_bytes_max = SPILLED_BYTES_MAX.get((int(capability), int(channels), dtype), 0)
    for kernel, resources in resources_with("3.6.0", case).items():
        assert resources["spilled_bytes"] <= spilled_bytes_max, kernel
        assert resources["shared_bytes"] <= SHARED_BYTES[int(capability)], kernel
