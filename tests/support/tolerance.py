"""Error limits of results in fp32, bf16 or fp16, derived from the computation.

A limit is derived, not fitted: from the unit roundoff of a dtype, from the number of terms of a
sum, and from the slope of an activation. So it holds for every shape that is drawn.
"""

import torch
from torch import Tensor

from gpt.cpu.packed_linear import GATED_PREFIX
from gpt.model.activation import ACTIVATIONS, UNGATED_ACTIVATIONS

# Rounding errors of a sum have either sign: with n of them, the error of the sum exceeds
# 8 sqrt(n) by chance once in 10^13 (Higham and Mary, 2019), and never exceeds n.
SIGMAS = 8.0
# GELU and SiLU in C, in units of |x| u: the polynomials of erf (1.5e-7, Abramowitz and Stegun) and
# of exp (2.3e-7) are some 3 u and 4 u off, and ten operations after them round by u each.
ACTIVATION_ROUNDOFFS = 16.0
# The largest slope of GELU and SiLU is 1.13.
SLOPE_MAX = 1.13


def roundoff(dtype: torch.dtype) -> float:
    """u: the relative error of rounding to nearest is at most this."""
    return torch.finfo(dtype).eps / 2


def exact_matmul(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of a matmul in fp64, and the sums of the absolute values."""
    x = x.double()
    weight = weight.double()
    return x @ weight.t(), x.abs() @ weight.abs().t()


def sum_limit(magnitudes: Tensor, terms: int) -> Tensor:
    """The error limit of an fp32 sum. `magnitudes`: the sums of the terms' absolute values."""
    limit: Tensor = min(terms, SIGMAS * terms**0.5) * roundoff(torch.float32) * magnitudes
    return limit


def activated(y: Tensor, input_error: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """An activation of exact inputs (fp64), and its error limit if the input's is `far`."""
    if activation.startswith(GATED_PREFIX):
        gate, up = y.chunk(2, -1)
        gate_error, up_error = input_error.chunk(2, -1)
        gate, gate_error = activated(gate, gate_error, activation.removeprefix(GATED_PREFIX))
        # The error of a product: each factor's error times the other factor.
        error = gate.abs() * up_error + gate_error * up.abs() + gate_error * up_error
        return gate * up, error + roundoff(torch.float32) * (gate * up).abs()
    if activation == "relu2":
        # (y + e)^2 - y^2 = 2 y e + e^2: a square doubles the relative error.
        error = 2 * y.abs() * input_error + input_error**2 + roundoff(torch.float32) * y**2
    else:
        error = SLOPE_MAX * input_error + ACTIVATION_ROUNDOFFS * roundoff(torch.float32) * y.abs()
    return UNGATED_ACTIVATIONS[activation](y), error


def epilogue_limits(
    sums: Tensor,
    magnitudes: Tensor,
    terms: int,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The exact output of a matmul's epilogue (fp64), and the error limit of a result of `dtype`.

    The sums are in fp32 until the end; `magnitudes` are those of `sum_limit`.
    """
    assert activation is None or activation in ACTIVATIONS
    y = sums
    if bias is not None:
        y = y + bias.double()
        magnitudes = magnitudes + bias.double().abs()
        terms = terms + 1
    error = sum_limit(magnitudes, terms)
    if activation is not None:
        y, error = activated(y, error, activation)
    if residual is not None:
        y = y + residual.double()
        error = error + roundoff(torch.float32) * (y.abs() + error)
    # The value that is rounded at the end is computed, and may be `far` off already.
    return y, error + roundoff(dtype) * (y.abs() + error)


def assert_within(output: Tensor, want: Tensor, limit: Tensor) -> None:
    """No value exceeds its own error limit; values that are not finite fail."""
    error = (output.double() - want).abs()
    worst = (error / limit.clamp(min=torch.finfo(torch.float64).tiny)).nan_to_num(torch.inf)
    assert bool((error <= limit).all()), f"{float(worst.max()):.3g} times the limit"
