"""Unquantized matmul of a fused linear, with bias and activation; few rows in one Triton kernel.

On a GPU, the matmul of up to ROWS_MAX rows reads its weight once and computes little. A Triton
kernel (gpt/linear/triton_few_rows.py) computes it without the second kernel that cuBLAS needs for a
sum of partial products. Elsewhere torch computes the matmul; this is also the kernels' reference.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.linear import norm_activation
from gpt.model.linear import OutputAllocator
from gpt.triton_runtime.availability import triton_unavailable_reason

# The activation that torch._addmm_activation fuses into a matmul with bias on a GPU.
EPILOGUE_ACTIVATION = "gelu_tanh"
# Limits of the Triton kernels. The number of channels must be a multiple of CHANNEL_ALIGNMENT, so
# that each load of the weight reads 16 aligned bytes.
ROWS_MAX = 8
# Numbers of rows that launch all kernels: one row has a kernel of its own.
COMPILED_ROWS = (1, 2)
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
CHANNEL_ALIGNMENT = 16
# The compute capability for which the kernels' block sizes are chosen.
CAPABILITY = (9, 0)
# The smallest weight that the kernels read. The time of a smaller one is that of its launch, which
# takes the host longer in Triton than in torch.
WEIGHT_BYTES_MIN = 4 << 20

# The arguments and the output are those of `multiply_in_torch`.
Multiply = Callable[[Tensor, Tensor, Tensor | None, str | None, Tensor | None], Tensor]


class UnquantizedMatmul:
    """A matmul with an unquantized weight."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._multiply_few_rows = _few_rows_kernel_for(weight)
        self._is_compiled = False

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: str | None, out: Tensor | None = None
    ) -> Tensor:
        if self._multiply_few_rows is not None:
            if not self._is_compiled:
                # The first step of a server has many rows. The kernels are compiled in this step,
                # because a compilation would stop a later step of few rows for too long.
                self._is_compiled = True
                for rows in COMPILED_ROWS:
                    dummy_x = x.new_zeros(rows, x.shape[1])
                    self._multiply_few_rows(dummy_x, self._weight, bias, activation, None)
            if 0 < x.shape[0] <= ROWS_MAX:
                return self._multiply_few_rows(x, self._weight, bias, activation, out)
        return multiply_in_torch(x, self._weight, bias, activation, out)

    def allocate_output(self, rows: int, allocate: OutputAllocator) -> Tensor | None:
        """Allocate the `out` of a call for a number of rows; None if there is no memory."""
        return allocate(rows, len(self._weight), self._weight.dtype)


def multiply_in_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor | None = None,
) -> Tensor:
    """Return activation(x @ weight.T + bias); without a bias or an activation, it is left out.

    `out`: memory for the output of a linear without bias and activation.
    """
    if out is not None:
        assert bias is None and activation is None
        return torch.mm(x, weight.t(), out=out)
    if activation == EPILOGUE_ACTIVATION and bias is not None and x.is_cuda:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    y = F.linear(x, weight, bias)
    return y if activation is None else norm_activation.activate_rows(y, activation)


def _few_rows_kernel_for(weight: Tensor) -> Multiply | None:
    """Return the function that launches the Triton kernels; None: they are not for this weight."""
    if not weight.is_cuda or weight.dtype not in KERNEL_DTYPES or not weight.is_contiguous():
        return None
    has_aligned_rows = weight.shape[1] % CHANNEL_ALIGNMENT == 0
    is_aligned = has_aligned_rows and weight.storage_offset() % CHANNEL_ALIGNMENT == 0
    if not is_aligned or weight.nbytes < WEIGHT_BYTES_MIN:
        return None
    if torch.cuda.get_device_capability(weight.device) != CAPABILITY:
        return None
    if triton_unavailable_reason(weight.device) is not None:
        return None
    from gpt.linear import triton_few_rows

    return triton_few_rows.multiply
