"""Weights in the order in which the CPU reads them: faster products for a model that only answers.

Our library in C, or else oneDNN, multiplies by a weight that was brought into its own layout, and
adds the bias, the activation and the residual while the result is in registers. `pack` swaps a
loaded model's weights, one at a time, so that none is held twice; only a tied embedding stays, for
it is looked up too.
"""

import logging
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from gpt.backends.cpu_decoder import Walk, norm_before, norm_of
from gpt.backends.quantization_check import Drift, Gate, judge
from gpt.cpu import int8_linear, packed_linear
from gpt.cpu.exact_argmax import Shortlist
from gpt.cpu.huge_pages import zeros
from gpt.cpu.int8_linear import Int8Panels
from gpt.cpu.kernels import attends_prompts
from gpt.cpu.packed_linear import Norm, Panels
from gpt.model import layers
from gpt.model.gpt_model import GPT
from gpt.model.layers import ACTIVATIONS, MLP, ColumnLinear, Linear, Normed, Product

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


def pack(model: GPT, *, int8: bool = False) -> None:
    """Swap a loaded model's weights for packed ones, where that helps; it cannot train then.

    `int8`: for bytes, and nobody is told what that changes. See `pack_as_bytes`.
    """
    if int8:
        int8_linear.refuse_unfit(model.mesh.device, model.dtype)
    reason = _unfit(model)
    if reason is not None and not int8:
        log.info("event=weights_not_packed reason=%r", reason)
        return
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    gated = {m.linear_fc1 for m in model.modules() if isinstance(m, MLP) and m.config.gated}
    # No list of the weights may outlive this line, or none of them would go.
    packing = _Packing(
        [model.head_weight] * model.last,
        [(one.weight, one in gated) for one in linears],
        int8=int8,
    )
    if model.last:
        model.product = product = packing.product(model.head_weight, wide=True)
        if model.mesh.tp == 1 and isinstance(product, Panels):
            last = norm_of(cast(layers.Norm, model.decoder.final_layernorm))
            model.whole = _normed(product, last, None)
            model.likeliest = partial(product.best, norm=last, columns=model.config.vocab_size)
            if not int8:  # Beside a head in bytes there is nothing that would be quicker.
                tokens = model.head_weight[: model.config.vocab_size]
                model.shortlist = Shortlist.of(tokens, product, last)
                del tokens
        if model.output_layer is not None:
            _drop_weight(model.output_layer)
    for module in linears:
        module.product = product = packing.product(module.weight, gated=module in gated)
        _drop_weight(module)
        # With one tensor rank nothing happens between a linear and the norm in front of it.
        if isinstance(module, ColumnLinear) and isinstance(product, Panels) and model.mesh.tp == 1:
            norm = norm_before(module)
            module.whole = None if norm is None else _normed(product, norm, module.bias)
    if packing.ours and model.mesh.tp == 1 and Walk.fits(model.config):
        model.walk = Walk(model)
    form = "int8" if int8 else "panels" if packing.ours else "onednn"
    log.info("event=weights_packed form=%s shortlist=%s", form, model.shortlist is not None)


def pack_as_bytes(model: GPT, divergence_max: float | None = None) -> Drift | None:
    """Pack for weights of one byte, and refuse what that changes too much.

    All ranks must call together. The last stage knows what it changed.
    """
    int8_linear.refuse_unfit(model.mesh.device, model.dtype)
    gate = Gate(model, divergence_max)
    pack(model, int8=True)
    drift = gate.drift(model)
    judge(drift, "weights int8")
    return drift


def weight_bytes(model: GPT) -> int:
    """What a model's weights take that are as they were stored, or ours."""
    products = [module.product for module in model.modules() if isinstance(module, Linear)]
    held = [one.nbytes for one in (*products, model.product) if isinstance(one, Panels)]
    return sum(parameter.nbytes for parameter in model.parameters()) + sum(held)


def batch_invariant(model: GPT) -> bool:
    """Whether a row's numbers are the same to the bit in whatever batch: all products are ours.

    A runner of experts' rows takes them in lots that depend on the batch.
    """
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    ours = all(isinstance(module.product, Panels) for module in linears)
    # A machine with less has torch attend to prompts, some together.
    return ours and model.config.num_experts == 0 and attends_prompts()


def _normed(product: Panels, norm: Norm, bias: Tensor | None) -> Normed:
    """The product of rows that are normed first."""
    return lambda x, activation: product(x, bias, activation, None, norm=norm)


class _Packing:
    """Where packed weights lie: in our library's layout if it can take them all, else oneDNN's."""

    def __init__(
        self, heads: list[Tensor], linears: list[tuple[Tensor, bool]], *, int8: bool
    ) -> None:
        """`linears`: and whether they have gates."""
        self._kind: type[Panels] = Int8Panels if int8 else Panels
        self._size = int8_linear.size if int8 else packed_linear.size
        every = [(head, False) for head in heads] + linears
        self.ours = int8 or all(packed_linear.multiplies(weight) for weight, _ in every)
        numbers = sum(self._size(weight, gated=gated) for weight, gated in every)
        # In one piece, so that it may lie in huge pages. It takes no memory until it is filled.
        self._left: Tensor | None = None
        if self.ours:
            dtype = torch.uint8 if int8 else torch.bfloat16
            self._left = zeros((numbers,), dtype, torch.device("cpu"))

    def product(self, weight: Tensor, *, wide: bool = False, gated: bool = False) -> Product:
        """`wide`: the results may as well stay fp32, as logits do."""
        if self._left is None:
            return Packed(weight)
        size = self._size(weight, gated=gated)
        mine, self._left = self._left[:size], self._left[size:]
        return self._kind(weight, mine, wide=wide, gated=gated)


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
    weights = (module.weight for module in model.modules() if isinstance(module, Linear))
    theirs = dtype == torch.bfloat16 and not all(map(packed_linear.multiplies, weights))
    if theirs and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this machine has no products of bf16, and the library in C none for it"
    return None
