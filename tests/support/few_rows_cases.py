"""The kernels of a linear with few rows against their torch reference, in Triton's interpreter.

tests/gpt/linear/test_unquantized_matmul.py runs it in a process of its own.
"""

import pytest
import torch
from torch import Tensor

from gpt.cpu.packed_linear import GATED_PREFIX
from gpt.linear import triton_few_rows
from gpt.linear.unquantized_matmul import ROWS_MAX, multiply_in_torch
from gpt.model.activation import UNGATED_ACTIVATIONS
from tests.support.attention_cases import patch_interpreter

patch_interpreter()

NAMES = [prefix + name for name in UNGATED_ACTIVATIONS for prefix in ("", GATED_PREFIX)]


def check(rows: int, columns: int, channels: int, activation: str | None, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows + columns + channels)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    x, weight = draw(rows, channels), draw(columns, channels) / 16
    bias_or_none = draw(columns) if bias else None
    y = triton_few_rows.multiply(x, weight, bias_or_none, activation)
    wide_bias = None if bias_or_none is None else bias_or_none.double()
    want = multiply_in_torch(x.double(), weight.double(), wide_bias, activation)
    # The interpreter's bf16 casts truncate.
    assert y.dtype == x.dtype
    assert torch.allclose(y.double(), want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("activation", [None, *NAMES])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_activations_agree_with_torch(rows: int, activation: str | None, bias: bool) -> None:
    check(rows, 44, 272, activation, bias)


@pytest.mark.parametrize("rows", [1, 3, ROWS_MAX])
@pytest.mark.parametrize(
    ("columns", "channels"), [(1, 16), (70, 512), (33, 1040), (6, 4096), (7, 2064)]
)
def test_shapes_agree_with_torch(rows: int, columns: int, channels: int) -> None:
    check(rows, columns, channels, None, bias=True)


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    x, weight = torch.randn(ROWS_MAX, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    x[1] = float("nan")
    together = triton_few_rows.multiply(x, weight, None, None)
    two_rows = triton_few_rows.multiply(x[2:4], weight, None, None)
    assert torch.equal(together[2:4], two_rows)
    assert together[1].isnan().all() and together[[0, 2]].isfinite().all()


def test_nan_in_one_row_stays() -> None:
    x = torch.randn(1, 2064).bfloat16()
    x[0, -1] = float("nan")
    assert triton_few_rows.multiply(x, torch.randn(7, 2064).bfloat16(), None, None).isnan().all()
