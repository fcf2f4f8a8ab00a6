"""Activations of the MLP by name, gated (SwiGLU, GEGLU) and ungated."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from gpt.config import GPTConfig
from gpt.cpu.packed_linear import GATED_PREFIX
from gpt.model.activation_checkpointing import recompute_from_inputs

UNGATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}


def _gated_activation(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up


# The activations that may follow a linear. A gated activation returns activation(gate) * up; gate
# is the first half of the linear's output columns, up the second half.
ACTIVATIONS = UNGATED_ACTIVATIONS | {
    f"{GATED_PREFIX}{name}": partial(recompute_from_inputs, partial(_gated_activation, activation))
    for name, activation in UNGATED_ACTIVATIONS.items()
}


def activation_name(config: GPTConfig) -> str:
    """Return the key in ACTIVATIONS of the activation that follows fc1 in this model."""
    return f"{GATED_PREFIX}{config.activation}" if config.gated else config.activation
