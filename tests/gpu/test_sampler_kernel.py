"""The sampler's Triton kernel on a CUDA device: the cases of tests/support/sampling_cases.py."""

import pytest
import torch

pytest.importorskip("msgspec", reason="msgspec is not installed, and the sampler needs it")
pytest.importorskip("triton", reason="Triton is not installed")

from tests.support import sampling_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]

test_tokens_equal_the_reference_up_to_rounding = (
    sampling_cases.test_tokens_equal_the_reference_up_to_rounding
)
test_tokens_do_not_depend_on_the_batch = sampling_cases.test_tokens_do_not_depend_on_the_batch
test_equal_logits_remain_or_are_removed_together = (
    sampling_cases.test_equal_logits_remain_or_are_removed_together
)
test_a_row_without_finite_weights_has_a_valid_token = (
    sampling_cases.test_a_row_without_finite_weights_has_a_valid_token
)
