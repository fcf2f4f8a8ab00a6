"""Weights in the order in which the CPU reads them: faster products for a model that only answers.

Our library in C, or else oneDNN, multiplies by a weight that was brought into its own layout, and
adds the bias, the activation and the residual while the result is in registers. `pack` swaps a
loaded model's weights, one at a time, so that none is held twice; only a tied embedding stays, for
it is looked up too.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpt import kernels
from gpt.kv import zeros
from gpt.layers import ACTIVATIONS, ColumnLinear, Linear, Product
from gpt.model import GPT

log = logging.getLogger(__name__)

# In these the packed products were measured to be faster.
DTYPES = (torch.bfloat16, torch.float32)
# The layout is chosen for so many rows, and serves any number of them.
ROWS = 32
# Activations that end a product, as oneDNN calls them.
FUSED = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}


class Packed:
    """A weight in oneDNN's layout, and the product with it."""

    def __init__(self, weight: Tensor) -> None:
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        product, weight = torch.ops.mkldnn._linear_pointwise, self._weight
        y: Tensor
        if residual is not None and activation is None:
            y = product.binary(x, residual, weight, bias, "add")
            return y
        name, algorithm = FUSED.get(activation or "", ("none", ""))
        y = product(x, weight, bias, name, [], algorithm)
        if activation is not None and activation not in FUSED:
            y = ACTIVATIONS[activation](y)
        return y if residual is None else residual + y


class Paneled:
    """A weight in our library's layout, and the product with it."""

    def __init__(self, weight: Tensor, memory: Tensor, *, wide: bool) -> None:
        self._panels = kernels.Panels(weight, memory, wide=wide)

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        if activation in kernels.ACTIVATIONS:
            return self._panels.multiply(x, bias, activation, residual)
        y = ACTIVATIONS[activation](self._panels.multiply(x, bias, None, None))
        return y if residual is None else residual + y

    def after(
        self, norm: kernels.Norm, bias: Tensor | None
    ) -> Callable[[Tensor, str | None], Tensor]:
        """The product of rows that are normed first."""
        multiply = self._panels.multiply

        def whole(x: Tensor, activation: str | None) -> Tensor:
            if activation in kernels.ACTIVATIONS:
                return multiply(x, bias, activation, None, norm=norm)
            return ACTIVATIONS[activation](multiply(x, bias, None, None, norm=norm))

        return whole


def pack(model: GPT) -> None:
    """Swap a loaded model's weights for packed ones, where that helps; it cannot train then."""
    reason = _unfit(model)
    if reason is not None:
        log.info("event=weights_not_packed reason=%r", reason)
        return
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    # No list of the weights may outlive this line, or none of them would go.
    heads = [model.head_weight] if model.last else []
    packed = _packing([*(module.weight for module in linears), *heads])
    if model.last:
        model.product = packed(model.head_weight, True)
        if model.output_layer is not None:
            _drop_weight(model.output_layer)
    for module in linears:
        module.product = product = packed(module.weight, False)
        _drop_weight(module)
        if isinstance(module, ColumnLinear) and isinstance(product, Paneled) and model.mesh.tp == 1:
            _join_norm(module, product)


def batch_invariant(model: GPT) -> bool:
    """Whether a row's numbers are the same to the bit in whatever batch: all products are ours.

    A runner of experts' rows takes them in lots that depend on the batch.
    """
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    return model.config.num_experts == 0 and all(
        isinstance(module.product, Paneled) for module in linears
    )


def _join_norm(module: ColumnLinear, product: Paneled) -> None:
    """With one tensor rank nothing happens between a linear and the norm in front of it."""
    config, scale = module.config, module.layer_norm_weight
    if scale is None:
        return
    if config.layernorm_zero_centered_gamma:
        scale = scale.float() + 1
    rms = config.normalization == "RMSNorm"
    shift = None if rms else module.layer_norm_bias
    norm = kernels.Norm(scale, shift, config.layernorm_epsilon, rms=rms)
    module.whole = product.after(norm, module.bias)


def _packing(weights: list[Tensor]) -> Callable[[Tensor, bool], Product]:
    """How to pack these; whether a product's results may as well stay fp32, as logits do."""
    if not all(kernels.multiplies(weight) for weight in weights):
        return lambda weight, _wide: Packed(weight)
    # In one piece, so that it may lie in huge pages. It takes no memory until it is filled.
    sizes = [kernels.panels_size(weight) for weight in weights]
    memory = zeros((sum(sizes),), torch.bfloat16, torch.device("cpu"))
    left = [memory]

    def paneled(weight: Tensor, wide: bool) -> Product:
        size = kernels.panels_size(weight)
        mine, left[0] = left[0][:size], left[0][size:]
        return Paneled(weight, mine, wide=wide)

    return paneled


def _drop_weight(module: nn.Module) -> None:
    module._parameters["weight"] = None


def _unfit(model: GPT) -> str | None:
    """Why this model stays as it is."""
    device, dtype = model.mesh.device.type, model.dtype
    if device != "cpu":
        return f"its device is {device}"
    if dtype not in DTYPES:
        return f"its dtype is {dtype}"
    if any(parameter.requires_grad for parameter in model.parameters()):
        return "its weights are to be trained"
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this torch cannot pack weights"
    return None
