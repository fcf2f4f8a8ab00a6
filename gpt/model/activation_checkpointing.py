"""What the backward pass computes again instead of finding it kept.

Whole layers or the attention core, by choice (`Recompute`); and always, small functions of which
what comes in is enough (`from_inputs`). Randomness is counted, not drawn from a state, so that a
second run is the first one again. It knows no layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Recompute:
    """Nothing, attention's core, the first `layers` layers of what a stage holds, or all."""

    kind: Literal["none", "selective", "block", "full"] = "none"
    layers: int = 1

    def whole(self, place: int) -> bool:
        """Whether a layer is computed again, by its place among those at hand."""
        return self.kind == "full" or (self.kind == "block" and place < self.layers)

    @property
    def core(self) -> bool:
        return self.kind == "selective"


NOTHING = Recompute()


def again(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """`function(*arguments)`, of which the backward pass finds the arguments alone."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    made = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return cast(Tensor, made)


def from_inputs(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """`function(*tensors)`, which keeps these tensors, in their dtype, and nothing between."""
    if not torch.is_grad_enabled() or all(x is None or not x.requires_grad for x in tensors):
        return function(*tensors)
    return cast(Tensor, _FromInputs.apply(function, *tensors))  # type: ignore[no-untyped-call]


class _FromInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        tensors = [
            None if x is None else x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            y = ctx.function(*tensors)
        wanted = [x for x in tensors if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, grads[0]))
        return None, *(next(found) if need else None for need in needed)
