"""Transformer Engine's linears, norms included, made from a loaded model's own parameters.

The one module that imports it, and only when it is asked for. Its modules are told of no tensor
ranks: sums over those stay with gpt/parallel/mesh.py. Nothing is loaded into them by name, so the
state that they keep beside their parameters, a pickle in checkpoints, is never read.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.backends import norm_activation
from gpt.backends.fused_linear import drop_weight, ending, mlps
from gpt.model.gpt_model import GPT
from gpt.model.layers import ColumnLinear, Linear, RowLinear

# How numbers are narrowed, as the setting calls it and as Transformer Engine does.
RECIPES: dict[str, str | None] = {
    "none": None,  # Not at all: its products in the model's own dtype.
    "current": "Float8CurrentScaling",  # One scale for all rows of a step.
    "delayed": "DelayedScaling",  # One that earlier steps had; answers depend on those.
    "block": "Float8BlockScaling",  # One for 128 numbers of a row.
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_ROWS = 8  # Narrow products take a multiple of so many rows,
FP8_CHANNELS = 16  # of so many channels, and make a multiple of so many columns.


@dataclass(frozen=True)
class Engine:
    """What is used of the package."""

    pytorch: ModuleType
    recipes: ModuleType


@cache
def find() -> Engine | str:
    """The package, or why it cannot be used.

    It raises more than ImportError: RuntimeError where only the outer package is installed or a
    library of CUDA is missing, OSError for its own library, AssertionError if versions disagree.
    """
    try:
        pytorch = import_module("transformer_engine.pytorch")
        return Engine(pytorch, import_module("transformer_engine.common.recipe"))
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def swap(model: GPT, engine: Engine, recipe: str, narrow: Collection[int]) -> int:
    """Its products in all layers, narrow in those numbered; bytes that are freed.

    A weight is gone before the next one is copied.
    """
    freed, how = 0, _Making(engine, recipe)
    for block in model.blocks:
        attention, eight = block.self_attention, block.layer in narrow
        linears: list[Linear] = [attention.linear_qkv, attention.linear_proj]
        for mlp in mlps(block):
            linears += [mlp.linear_fc1, mlp.linear_fc2]
        for linear in linears:
            freed += how.swap(linear, narrow=eight)
    return freed


class _Making:
    """Modules of one recipe."""

    def __init__(self, engine: Engine, recipe: str) -> None:
        self._te, name = engine.pytorch, RECIPES[recipe]
        self._recipe: Any = None if name is None else getattr(engine.recipes, name)()
        self._delayed = recipe == "delayed"

    def swap(self, linear: Linear, *, narrow: bool) -> int:
        weight = linear.weight
        fits = all(size % FP8_CHANNELS == 0 for size in weight.shape)
        narrow = narrow and fits and self._recipe is not None
        module = self._made(linear, narrow=narrow)
        size = weight.nbytes
        product = Product(
            module,
            self._context if narrow else nullcontext,
            biased=isinstance(linear, ColumnLinear) and linear.bias is not None,
            narrow=narrow,
        )
        linear.product = product
        if isinstance(linear, RowLinear):
            linear.ending = ending()
        elif isinstance(linear, ColumnLinear) and linear.layer_norm_weight is not None:
            linear.whole = product.whole
        drop_weight(linear)
        return size // 2 if narrow and not self._delayed and size == 2 * weight.numel() else 0

    def _made(self, linear: Linear, *, narrow: bool) -> Any:
        """A module of theirs with what ours holds; a row-split one's bias is added after sums."""
        column = isinstance(linear, ColumnLinear)
        weight, bias = linear.weight, linear.bias if column else None
        columns, channels = weight.shape
        options: dict[str, Any] = {
            "bias": bias is not None,
            "params_dtype": weight.dtype,
            "parallel_mode": None,
            "device": weight.device,
        }
        held: dict[str, Tensor | None] = {"weight": weight, "bias": bias}
        kind = self._te.Linear
        if isinstance(linear, ColumnLinear) and linear.layer_norm_weight is not None:
            kind = self._te.LayerNormLinear
            options |= {
                "eps": linear.config.layernorm_epsilon,
                "normalization": linear.config.normalization,
                "zero_centered_gamma": linear.config.layernorm_zero_centered_gamma,
            }
            held["layer_norm_weight"] = linear.layer_norm_weight
            held["layer_norm_bias"] = linear.layer_norm_bias
        # Scales of the delayed recipe are learned from wide weights, so those stay.
        with self._narrow_parameters() if narrow and not self._delayed else nullcontext():
            module = kind(channels, columns, **options)
        with torch.no_grad():
            for name, value in held.items():
                if value is not None:
                    getattr(module, name).copy_(value)
        module.requires_grad_(False)
        # Of a module that is not in training the delayed recipe would never see a number.
        return module.train(self._delayed and narrow)

    def _context(self) -> AbstractContextManager[Any]:
        """Where its products are narrow; older versions have another name for it."""
        made: AbstractContextManager[Any]
        if hasattr(self._te, "autocast"):
            made = self._te.autocast(enabled=True, recipe=self._recipe)
        else:
            made = self._te.fp8_autocast(enabled=True, fp8_recipe=self._recipe)
        return made

    @contextmanager
    def _narrow_parameters(self) -> Iterator[None]:
        new = getattr(self._te, "quantized_model_init", None)
        with (new or self._te.fp8_model_init)(enabled=True, recipe=self._recipe):
            yield


class Product:
    """One of its modules, as a linear's product."""

    def __init__(
        self,
        module: Any,
        context: Callable[[], AbstractContextManager[Any]],
        *,
        biased: bool,  # Whether the bias is in the module already.
        narrow: bool,
    ) -> None:
        self.module, self._context = module, context
        self._biased, self._narrow = biased, narrow

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        y = self._rows(x)
        if bias is not None and not self._biased:
            y = y + bias
        if activation is not None:
            y = norm_activation.activated(y, activation)
        return y if residual is None else residual + y

    def whole(self, x: Tensor, activation: str | None) -> Tensor:
        """With the norm in front, which is the module's too."""
        return self(x, None, activation, None)

    def _rows(self, x: Tensor) -> Tensor:
        rows = len(x)
        if self._narrow and rows % FP8_ROWS:
            x = F.pad(x, (0, 0, 0, -rows % FP8_ROWS))
        with self._context():
            y: Tensor = self.module(x)
        return y[:rows]
