"""The sampler's Triton kernel without a GPU: interpreted, and its variants counted."""

from importlib.util import find_spec

import pytest
import torch

from tests.support.interpreted_cases import check_interpreted_cases

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton: make tools")


@pytest.mark.slow
def test_the_interpreted_kernel_equals_the_reference_sampler() -> None:
    check_interpreted_cases("tests/support/sampling_cases.py")


@pytest.mark.parametrize("vocabulary", [50257, 151936])
def test_the_number_of_rows_selects_no_kernel_variant(vocabulary: int) -> None:
    from serving.worker.triton_sampler import sample_rows
    from tests.support.triton_compiled import recorded_launches

    with recorded_launches() as launches:
        for rows in (1, 2, 8, 63, 256):
            for dtype in (torch.bfloat16, torch.float64):
                sample_rows(
                    torch.zeros(1, vocabulary, dtype=dtype).expand(rows, -1).contiguous(),
                    torch.zeros(rows, 5, dtype=torch.float64),
                    torch.zeros(rows, dtype=torch.int64),
                )
    assert [launch.name for launch in launches.values()] == ["sample_row"] * 2
