"""Activation checkpointing (selective, block, full): activations recomputed in the backward pass.

`RecomputePolicy` selects what is recomputed: all layers (full), some layers (block), or the
attention core (selective). Independently of the policy, `recompute_from_inputs` recomputes gated
activations, RMSNorms and norms with a zero-centered gamma. No random state is saved, because
dropout is counter-based: a recomputation draws the same masks. The module does not import the
layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class RecomputePolicy:
    """What the backward pass recomputes.

    - none: nothing.
    - selective: the attention core of each layer.
    - block: the first `layers` layers of each model chunk. A stage has one chunk by default.
    - full: all layers.
    """

    kind: Literal["none", "selective", "block", "full"] = "none"
    layers: int = 1

    def recomputes_layer(self, index: int) -> bool:
        """Return whether the layer with this index in its model chunk is recomputed."""
        return self.kind == "full" or (self.kind == "block" and index < self.layers)

    @property
    def recomputes_core_attention(self) -> bool:
        return self.kind == "selective"


NO_RECOMPUTE = RecomputePolicy()


def checkpointed(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Return `function(*arguments)`; autograd saves only the arguments.

    The backward pass recomputes the function, and computes the gradients of the arguments and of
    the parameters that the function uses.
    """
    if not torch.is_grad_enabled():
        return function(*arguments)
    output = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return cast(Tensor, output)


def recompute_from_inputs(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Return `function(*tensors)`; autograd saves only these tensors.

    The backward pass recomputes the function, and computes the gradients of these tensors only.
    With `checkpointed`, the parameters that the function uses get gradients too.
    """
    if not torch.is_grad_enabled() or all(x is None or not x.requires_grad for x in tensors):
        return function(*tensors)
    return cast(Tensor, _RecomputeFromInputs.apply(function, *tensors))  # type: ignore[no-untyped-call]


class _RecomputeFromInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs_grad = ctx.needs_input_grad[1:]
        tensors = [
            None if x is None else x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, needs_grad, strict=True)
        ]
        with torch.enable_grad():
            y = ctx.function(*tensors)
        differentiable = [x for x in tensors if x is not None and x.requires_grad]
        input_grads = iter(torch.autograd.grad(y, differentiable, grads[0]))
        return None, *(next(input_grads) if need else None for need in needs_grad)
