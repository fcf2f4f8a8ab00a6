"""Transformer Engine backend: replaces the linears of a loaded model, with their norms.

Only this module imports Transformer Engine, and only on request. The Transformer Engine modules get
no tensor-parallel group, because gpt/parallel does the all-reduces. The parameters are copied from
the model's linears one by one. `load_state_dict` is not used: it would read Transformer Engine's
extra state, which is a pickle.

The fp8 weights are quantized once, when the modules are created, and the modules hold no other
copy. Transformer Engine quantizes an unquantized weight again in every step, unless the caller
passes `is_first_microbatch`; it ignores this argument for weights that are already quantized. The
recipe `DelayedScaling` is not offered: its scales are updated only while gradients are enabled, so
in inference they would stay at 1.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.linear import norm_activation
from gpt.linear.fused_linear import layer_mlps
from gpt.linear.norm_activation import NormParameters
from gpt.model.gpt_model import GPT
from gpt.model.linear import ColumnParallelLinear, Linear, LinearBackend


@dataclass(frozen=True)
class Recipe:
    """A quantization recipe of Transformer Engine, and the sizes that its matmuls need."""

    class_name: str  # In transformer_engine.common.recipe.
    # Function of transformer_engine.pytorch that tells whether the GPU supports the recipe.
    availability_function: str
    row_alignment: int = 8  # The number of input rows must be a multiple of this.
    channel_alignment: int = 16  # Both sizes of the weight must be multiples of this.


# The recipe for each value of te_recipe. None: no quantization, matmuls in the model's dtype.
RECIPES: Mapping[str, Recipe | None] = MappingProxyType(
    {
        "none": None,
        # One scale per tensor, from the current step.
        "current": Recipe("Float8CurrentScaling", "is_fp8_available"),
        # One scale per 1 x 128 elements of the input rows, and per 128 x 128 elements of the
        # weight.
        "block": Recipe("Float8BlockScaling", "is_fp8_block_scaling_available"),
        # One scale, a power of two, per 1 x 32 elements of the input rows and of the weight.
        "mxfp8": Recipe("MXFP8BlockScaling", "is_mxfp8_available", 32, 32),
    }
)


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
        recipes = import_module("transformer_engine.common.recipe")
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if not hasattr(pytorch, "autocast"):
        return "Transformer Engine is older than 2.9"
    return TransformerEngine(pytorch, recipes)


def unsupported_recipe_reason(engine: TransformerEngine, recipe_name: str) -> str | None:
    """Return why this GPU does not support the recipe; None if it does."""
    recipe = RECIPES[recipe_name]
    if recipe is None:
        return None
    is_available, reason = getattr(engine.pytorch, recipe.availability_function)(return_reason=True)
    return None if is_available else str(reason)


def replace_linears(
    model: GPT, engine: TransformerEngine, recipe: str, fp8_layers: Collection[int]
) -> int:
    """Replace the linears of all layers, with fp8 weights in `fp8_layers`; return the bytes freed.

    Each weight is freed before the next one is copied. The bytes freed are measured by torch's CUDA
    allocator, so they are 0 on a CPU.
    """
    # On a CPU, the count of torch's current CUDA device does not change.
    device = model.mesh.device if model.mesh.device.type == "cuda" else None
    bytes_before, builder = torch.cuda.memory_allocated(device), _LinearBuilder(engine, recipe)
    for layer in model.decoder_layers:
        attention, is_fp8 = layer.self_attention, layer.layer in fp8_layers
        linears: list[Linear] = [attention.linear_qkv, attention.linear_proj]
        for mlp in layer_mlps(layer):
            linears += [mlp.linear_fc1, mlp.linear_fc2]
        for linear in linears:
            builder.replace_linear(linear, fp8=is_fp8)
    return bytes_before - torch.cuda.memory_allocated(device)


class _LinearBuilder:
    """Builds the backends of a model's linears, for one recipe."""

    def __init__(self, engine: TransformerEngine, recipe_name: str) -> None:
        self._te_pytorch, self._recipe = engine.pytorch, RECIPES[recipe_name]
        self._te_recipe: Any = None
        if self._recipe is not None:
            self._te_recipe = getattr(engine.recipes, self._recipe.class_name)()

    def replace_linear(self, linear: Linear, *, fp8: bool) -> None:
        """Make a Transformer Engine module compute `linear`.

        Even with `fp8`, the linear stays unquantized if its sizes are not aligned or the recipe is
        "none".
        """
        recipe = self._recipe if fp8 else None
        if recipe and any(size % recipe.channel_alignment for size in linear.weight.shape):
            recipe = None
        backend = TransformerEngineLinear(
            self._make_module(linear, fp8=recipe is not None),
            nullcontext if recipe is None else self._fp8_autocast,
            has_bias=isinstance(linear, ColumnParallelLinear) and linear.bias is not None,
            norm=NormParameters.before_linear(linear),
            row_alignment=1 if recipe is None else recipe.row_alignment,
        )
        linear.use_backend(backend)

    @torch.no_grad()
    def _make_module(self, linear: Linear, *, fp8: bool) -> Any:
        """Return a Transformer Engine module with the parameters of `linear`.

        The module has no bias for a row-parallel linear, whose bias is added after the all-reduce.
        Without `no_grad`, the module would also store each fp8 weight transposed, for a backward
        pass.
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
        with self._fp8_parameters() if fp8 else nullcontext():
            module = module_type(channels, columns, **options)
        for name, value in parameters.items():
            if value is not None:
                getattr(module, name).copy_(value)
        module.requires_grad_(False)
        return module.eval()

    def _fp8_autocast(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._te_pytorch.autocast(
            enabled=True, recipe=self._te_recipe
        )
        return context

    def _fp8_parameters(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._te_pytorch.quantized_model_init(
            enabled=True, recipe=self._te_recipe
        )
        return context


class TransformerEngineLinear(LinearBackend):
    """A linear computed by a module of Transformer Engine."""

    def __init__(
        self,
        module: Any,
        context: Callable[[], AbstractContextManager[Any]],
        *,
        has_bias: bool,  # Whether the module contains the bias.
        norm: NormParameters | None,  # The norm that the module contains.
        row_alignment: int,  # Input rows are padded to a multiple of this number.
    ) -> None:
        self.module = module
        self._context = context
        self._has_bias = has_bias
        self.includes_norm = norm is not None
        self._norm = norm
        # The output of the last `input_rows`, and the rows before the norm.
        self._normed: tuple[Tensor, Tensor] | None = None
        self._row_alignment = row_alignment

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

    def input_rows(self, x: Tensor) -> Tensor:
        if self._norm is None:
            return x
        normed = norm_activation.norm_rows(x, self._norm)
        assert isinstance(normed, Tensor)
        self._normed = normed, x
        return normed

    def multiply(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        normed, self._normed = self._normed, None
        if self._norm is None:
            y = self._run_padded(rows)
        elif normed is not None and normed[0] is rows:
            y = self._run_padded(normed[1])
        else:  # Scaled rows. The module would apply its norm to them.
            y = F.linear(
                rows, _wide_weight(self.module), self.module.bias if self._has_bias else None
            )
        if self._has_bias:
            return y if bias is not None else y - self.module.bias
        return y if bias is None else y + bias

    def activate(self, y: Tensor, activation: str) -> Tensor:
        return norm_activation.activate_rows(y, activation)

    def add_residual(self, y: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        residual_sum, _ = norm_activation.add_norm(y, bias, residual, None)
        return residual_sum

    def _run_padded(self, x: Tensor) -> Tensor:
        rows = len(x)
        padding = -rows % self._row_alignment
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        with self._context():
            y: Tensor = self.module(x)
        return y[:rows]


def _wide_weight(module: Any) -> Tensor:
    """Return the weight of a module in its own dtype; a quantized weight is dequantized."""
    weight: Tensor = module.weight
    if type(weight) in (Tensor, nn.Parameter):
        return weight
    return weight.dequantize().to(weight.dtype)


def _has_input_norm(linear: Linear) -> bool:
    return isinstance(linear, ColumnParallelLinear) and linear.layer_norm_weight is not None
