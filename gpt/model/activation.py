"""Activations of the MLP by name, gated (SwiGLU, GEGLU) and ungated."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.config import QUICK_GELU_FACTOR, GPTConfig
from gpt.cpu import packed_linear
from gpt.cpu.packed_linear import GATED_PREFIX, NO_LIMITS, GateLimits
from gpt.model.activation_checkpointing import recompute_from_inputs

# The activations that the kernels of all linear backends compute. The C library for CPUs computes
# `_OTHER_ACTIVATIONS` too.
UNGATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "relu": F.relu,
}

_OTHER_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": lambda x: x * torch.sigmoid(QUICK_GELU_FACTOR * x),
}
_ALL_ACTIVATIONS = UNGATED_ACTIVATIONS | _OTHER_ACTIVATIONS
assert _ALL_ACTIVATIONS.keys() == set(packed_linear.ACTIVATIONS) - {None}


def _gated_activation(
    activation: Callable[[Tensor], Tensor], x: Tensor, limit: float = 0.0, offset: float = 0.0
) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return activation(gate) * (up + offset if offset else up)


# The activations that may follow a linear. A gated activation returns activation(gate) * up; gate
# is the first half of the linear's output columns, up the second half.
ACTIVATIONS = UNGATED_ACTIVATIONS | {
    f"{GATED_PREFIX}{name}": partial(recompute_from_inputs, partial(_gated_activation, activation))
    for name, activation in UNGATED_ACTIVATIONS.items()
}


def activation_name(config: GPTConfig) -> str | None:
    """Return the key in ACTIVATIONS of the activation that follows fc1 in this model.

    None: not all linear backends compute this activation; torch does (`MLP`).
    """
    is_plain = not (config.activation_func_clamp_value or config.glu_linear_offset)
    if not is_plain or config.activation not in UNGATED_ACTIVATIONS:
        return None
    return f"{GATED_PREFIX}{config.activation}" if config.gated else config.activation


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Return the xIELU of `x` (https://arxiv.org/abs/2411.13010), whose parameters are learned."""
    return recompute_from_inputs(_xielu, x, alpha_p, alpha_n, beta, eps)


def _xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    wide, alpha_p, alpha_n, beta, eps = (
        value.to(compute_dtype) for value in (x, alpha_p, alpha_n, beta, eps)
    )
    positive = F.softplus(alpha_p) * wide * wide
    negative = (beta + F.softplus(alpha_n)) * (torch.expm1(torch.minimum(wide, eps)) - wide)
    return (torch.where(wide > 0, positive, negative) + beta * wide).to(x.dtype)


def packed_activation_name(config: GPTConfig) -> str | None:
    """Return the name of the activation that follows fc1 for a `PackedLinear`.

    None: the C library does not compute it; torch does (`MLP`). The limits of a gated activation
    belong to the packed weight (`gate_limits`).
    """
    if config.activation not in _ALL_ACTIVATIONS:
        return None
    return f"{GATED_PREFIX}{config.activation}" if config.gated else config.activation


def activate_packed(x: Tensor, name: str | None, limits: GateLimits) -> Tensor:
    """Return in torch what a `PackedLinear` computes of its product for an activation's name."""
    if name is None:
        return x
    activation = _ALL_ACTIVATIONS[name.removeprefix(GATED_PREFIX)]
    return (
        _gated_activation(activation, x, *limits)
        if name.startswith(GATED_PREFIX)
        else activation(x)
    )


def gate_limits(config: GPTConfig) -> GateLimits:
    """Return the limits of fc1 in a `PackedLinear`."""
    if not config.gated:
        return NO_LIMITS
    return GateLimits(config.activation_func_clamp_value, config.glu_linear_offset)


def torch_activation(config: GPTConfig, x: Tensor) -> Tensor:
    """Return the activation of `x`, the output of fc1; the activation has no parameters."""
    activation = _ALL_ACTIVATIONS[config.activation]
    if not config.gated:
        return activation(x)
    gated = partial(
        _gated_activation,
        activation,
        limit=config.activation_func_clamp_value,
        offset=config.glu_linear_offset,
    )
    return recompute_from_inputs(gated, x)
