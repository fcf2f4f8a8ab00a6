"""Transformer Engine backend: replaces the linears of a loaded model, with their norms.

Only this module imports Transformer Engine, and only on request. The Transformer Engine modules get
no tensor-parallel group, because gpt/parallel does the all-reduces. The parameters are copied from
the model's linears one by one. `load_state_dict` is not used: it would read Transformer Engine's
extra state, which is a pickle.
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

from gpt.linear import norm_activation
from gpt.linear.fused_linear import layer_mlps
from gpt.model.gpt_model import GPT
from gpt.model.linear import ColumnParallelLinear, Linear, LinearBackend

# Transformer Engine's quantization recipe for each value of te_recipe.
RECIPES: dict[str, str | None] = {
    "none": None,  # No quantization: matmuls in the model's dtype.
    "current": "Float8CurrentScaling",  # One scale per tensor, from the current step.
    "delayed": "DelayedScaling",  # One scale per tensor, from earlier steps.
    # One scale per 1 x 128 elements of the input rows, and per 128 x 128 elements of the weight.
    "block": "Float8BlockScaling",
}
FP8_ROW_ALIGNMENT = 8  # fp8 matmuls need a multiple of this number of rows.
FP8_CHANNEL_ALIGNMENT = 16  # fp8 matmuls need a multiple of this number of channels and columns.


@dataclass(frozen=True)
class TransformerEngine:
    """The modules of the Transformer Engine package that this backend uses."""

    pytorch: ModuleType
    recipes: ModuleType


@cache
def import_transformer_engine() -> TransformerEngine | str:
    """Return the package, or the reason why it is unavailable.

    The import can raise more than ImportError: RuntimeError if only the meta package is installed
    or a CUDA library is missing, OSError if the package's library cannot be loaded, and
    AssertionError if versions do not match.
    """
    try:
        pytorch = import_module("transformer_engine.pytorch")
        return TransformerEngine(pytorch, import_module("transformer_engine.common.recipe"))
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def replace_linears(
    model: GPT, engine: TransformerEngine, recipe: str, fp8_layers: Collection[int]
) -> int:
    """Replace the linears of all layers, with fp8 weights in `fp8_layers`; return the bytes freed.

    Each weight is freed before the next one is copied.
    """
    freed_bytes, builder = 0, _LinearBuilder(engine, recipe)
    for layer in model.decoder_layers:
        attention, is_fp8 = layer.self_attention, layer.layer in fp8_layers
        linears: list[Linear] = [attention.linear_qkv, attention.linear_proj]
        for mlp in layer_mlps(layer):
            linears += [mlp.linear_fc1, mlp.linear_fc2]
        for linear in linears:
            freed_bytes += builder.replace_linear(linear, fp8=is_fp8)
    return freed_bytes


class _LinearBuilder:
    """Builds the backends of a model's linears, for one recipe."""

    def __init__(self, engine: TransformerEngine, recipe: str) -> None:
        self._te_pytorch, name = engine.pytorch, RECIPES[recipe]
        self._recipe: Any = None if name is None else getattr(engine.recipes, name)()
        self._is_delayed = recipe == "delayed"

    def replace_linear(self, linear: Linear, *, fp8: bool) -> int:
        """Make a Transformer Engine module compute `linear`; return the bytes freed.

        Even with `fp8`, the linear stays unquantized if its sizes are not aligned or the recipe is
        "none".
        """
        weight = linear.weight
        is_aligned = all(size % FP8_CHANNEL_ALIGNMENT == 0 for size in weight.shape)
        fp8 = fp8 and is_aligned and self._recipe is not None
        module = self._make_module(linear, fp8=fp8)
        weight_bytes = weight.nbytes
        backend = TransformerEngineLinear(
            module,
            self._fp8_autocast if fp8 else nullcontext,
            has_bias=isinstance(linear, ColumnParallelLinear) and linear.bias is not None,
            includes_norm=_has_input_norm(linear),
            fp8=fp8,
        )
        linear.use_backend(backend)
        # fp8 halves a 16-bit weight. Delayed scaling keeps the unquantized weight.
        is_halved = fp8 and not self._is_delayed and weight_bytes == 2 * weight.numel()
        return weight_bytes // 2 if is_halved else 0

    def _make_module(self, linear: Linear, *, fp8: bool) -> Any:
        """Return a Transformer Engine module with the parameters of `linear`.

        The module has no bias for a row-parallel linear, whose bias is added after the all-reduce.
        """
        is_column = isinstance(linear, ColumnParallelLinear)
        weight, bias = linear.weight, linear.bias if is_column else None
        columns, channels = weight.shape
        options: dict[str, Any] = {
            "bias": bias is not None,
            "params_dtype": weight.dtype,
            "parallel_mode": None,
            "device": weight.device,
        }
        parameters: dict[str, Tensor | None] = {"weight": weight, "bias": bias}
        module_type = self._te_pytorch.Linear
        if isinstance(linear, ColumnParallelLinear) and _has_input_norm(linear):
            module_type = self._te_pytorch.LayerNormLinear
            options |= {
                "eps": linear.config.layernorm_epsilon,
                "normalization": linear.config.normalization,
                "zero_centered_gamma": linear.config.layernorm_zero_centered_gamma,
            }
            parameters["layer_norm_weight"] = linear.layer_norm_weight
            parameters["layer_norm_bias"] = linear.layer_norm_bias
        # With delayed scaling, the module needs unquantized weights to compute the scales.
        with self._fp8_parameters() if fp8 and not self._is_delayed else nullcontext():
            module = module_type(channels, columns, **options)
        with torch.no_grad():
            for name, value in parameters.items():
                if value is not None:
                    getattr(module, name).copy_(value)
        module.requires_grad_(False)
        # Delayed scaling records maxima only in training mode.
        return module.train(self._is_delayed and fp8)

    def _fp8_autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager that enables fp8; older versions name it fp8_autocast."""
        context: AbstractContextManager[Any]
        if hasattr(self._te_pytorch, "autocast"):
            context = self._te_pytorch.autocast(enabled=True, recipe=self._recipe)
        else:
            context = self._te_pytorch.fp8_autocast(enabled=True, fp8_recipe=self._recipe)
        return context

    @contextmanager
    def _fp8_parameters(self) -> Iterator[None]:
        model_init = getattr(self._te_pytorch, "quantized_model_init", None)
        with (model_init or self._te_pytorch.fp8_model_init)(enabled=True, recipe=self._recipe):
            yield


class TransformerEngineLinear(LinearBackend):
    """A linear computed by a module of Transformer Engine."""

    def __init__(
        self,
        module: Any,
        context: Callable[[], AbstractContextManager[Any]],
        *,
        has_bias: bool,  # Whether the module contains the bias.
        includes_norm: bool,  # Whether the module contains the norm.
        fp8: bool,
    ) -> None:
        self.module = module
        self._context = context
        self._has_bias = has_bias
        self.includes_norm = includes_norm
        self._fp8 = fp8

    def forward(
        self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        y = self._run_padded(x)
        if residual is not None:
            assert activation is None, "a row-parallel linear has no activation"
            assert not self._has_bias, "the module of a row-parallel linear has no bias"
            return self.add_residual(y, bias, residual)
        if bias is not None and not self._has_bias:
            y = y + bias
        if activation is not None:
            y = norm_activation.activate_rows(y, activation)
        return y

    def add_residual(self, y: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        residual_sum, _ = norm_activation.add_norm(y, bias, residual, None)
        return residual_sum

    def _run_padded(self, x: Tensor) -> Tensor:
        rows = len(x)
        if self._fp8 and rows % FP8_ROW_ALIGNMENT:
            x = F.pad(x, (0, 0, 0, -rows % FP8_ROW_ALIGNMENT))
        with self._context():
            y: Tensor = self.module(x)
        return y[:rows]


def _has_input_norm(linear: Linear) -> bool:
    return isinstance(linear, ColumnParallelLinear) and linear.layer_norm_weight is not None
