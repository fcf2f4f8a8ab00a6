"""Outputs and gradients of functions in bf16, and their errors against fp64."""

import torch
from torch import Tensor

# Limit of the relative error against fp64: a few bf16 roundings of 2^-9 each.
ERROR_MAX = 5e-3


def relative_error(tensor: Tensor, exact: Tensor) -> float:
    return float((tensor.double() - exact).norm() / exact.norm())


def output_and_gradients(y: Tensor, dy: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype))]
