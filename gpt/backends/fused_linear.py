"""The layers of a model that only answers on a GPU, with as few kernels as their seams allow.

A product ends with its bias and, where the library can, its activation. What a row-split linear
made is summed, added and normed for the linear behind it in one pass, so a dense layer is four
products, attention, and two such passes. Layers may be in fp8: then those passes narrow the rows.
"""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.backends import norm_activation
from gpt.backends.fp8_linear import Fp8
from gpt.backends.norm_activation import Narrow, Norm, Rows
from gpt.model.gpt_model import GPT, Block
from gpt.model.layers import MLP, ColumnLinear, Ending, Linear, Normed, Product, activation_of

# Ends a product inside the library: at these two, and nowhere but on a GPU, it is that one.
EPILOGUE = "gelu_tanh"


class Wide:
    """A weight as it lies, and the product with it."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        if activation == EPILOGUE and bias is not None and x.is_cuda:
            y = torch._addmm_activation(bias, x, self._weight.t(), use_gelu=True)
        else:
            y = F.linear(x, self._weight, bias)
            if activation is not None:
                y = norm_activation.activated(y, activation)
        return y if residual is None else residual + y


class Ahead:
    """Rows that were normed by whoever made them, for the linear that reads them next."""

    def __init__(self) -> None:
        self._of: Tensor | None = None
        self._rows: Rows | None = None

    def put(self, x: Tensor, rows: Rows) -> None:
        self._of, self._rows = x, rows

    def take(self, x: Tensor) -> Rows | None:
        """Of these very rows, once; whatever else is kept is nobody's any more."""
        rows = self._rows if self._of is x else None
        self._of = self._rows = None
        return rows


def unfit(model: GPT) -> str | None:
    """Why the layers of this model stay as they are."""
    if model.dtype not in norm_activation.DTYPES:
        return f"its dtype is {model.dtype}"
    if any(parameter.requires_grad for parameter in model.parameters()):
        return "its weights are to be trained"
    if model.mesh.sequence_parallel:
        return "its rows are shared out over tensor ranks"
    return None


def fuse(model: GPT, narrow: Collection[int] = ()) -> int:
    """Swap the products of all layers, those numbered in `narrow` for fp8; bytes that are freed.

    A weight is gone before the next one is narrowed.
    """
    freed, ahead, blocks = 0, Ahead(), model.blocks
    for block in blocks:
        eight = block.layer in narrow
        attention = block.self_attention
        for linear in (attention.linear_qkv, attention.linear_proj):
            freed += _swap(linear, narrow=eight)
        for mlp in mlps(block):
            activation = activation_of(mlp.config)
            freed += _swap(mlp.linear_fc1, narrow=eight, leaves=activation)
            freed += _swap(mlp.linear_fc2, narrow=eight, begins=activation)
    for place, block in enumerate(blocks):
        after = blocks[place + 1].self_attention.linear_qkv if place + 1 < len(blocks) else None
        reader = None  # Of what attention came to. With a parallel residual nobody norms that.
        _norm_first(block.self_attention.linear_qkv, ahead)
        if isinstance(block.mlp, MLP):
            _norm_first(block.mlp.linear_fc1, ahead)
            block.mlp.linear_fc2.ending = ending(after, ahead)
            reader = None if block.config.parallel_residual else block.mlp.linear_fc1
        block.self_attention.linear_proj.ending = ending(reader, ahead)
    return freed


def mlps(block: Block) -> list[MLP]:
    """Those of a layer: one, or its experts'."""
    return [module for module in block.mlp.modules() if isinstance(module, MLP)]


def drop_weight(module: nn.Module) -> None:
    """Another holds it, or what it became."""
    module._parameters["weight"] = None


def norm_before(linear: ColumnLinear) -> Norm | None:
    """The norm that is a linear's first step."""
    scale = linear.layer_norm_weight
    return None if scale is None else Norm.of(scale, linear.layer_norm_bias, linear.config)


def _swap(
    linear: Linear, *, narrow: bool, begins: str | None = None, leaves: str | None = None
) -> int:
    if not narrow:
        linear.product = Wide(linear.weight)
        return 0
    size = linear.weight.nbytes
    linear.product = product = Fp8(linear.weight, begins=begins, leaves=leaves)
    drop_weight(linear)
    return size - product.nbytes


def _norm_first(linear: ColumnLinear, ahead: Ahead) -> None:
    """Let a linear with a norm take rows that are normed already."""
    norm, product = norm_before(linear), linear.product
    assert product is not None
    if norm is not None:
        linear.whole = _whole(norm, product, linear.bias, ahead)


def _whole(norm: Norm, product: Product, bias: Tensor | None, ahead: Ahead) -> Normed:
    narrow = isinstance(product, Fp8)

    def whole(x: Tensor, activation: str | None) -> Tensor:
        rows = ahead.take(x)
        if rows is None:
            rows = norm_activation.normed(x, norm, narrow=narrow)
        if isinstance(product, Fp8):
            return product(rows, bias, activation, None)
        assert not isinstance(rows, Narrow), "whoever narrowed these took another for the reader"
        return product(rows, bias, activation, None)

    return whole


def ending(reader: ColumnLinear | None = None, ahead: Ahead | None = None) -> Ending:
    """What follows a row-split product whose sum the `reader` norms next; None: something else."""
    norm = None if reader is None else norm_before(reader)
    narrow = reader is not None and isinstance(reader.product, Fp8)

    def ends(y: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        total, rows = norm_activation.added(y, bias, x, norm, narrow=narrow)
        if ahead is not None and rows is not None:
            ahead.put(total, rows)
        return total

    return ends
