"""A stub of Transformer Engine: its published constructors and parameters, computed in torch.

It accepts only the options of the real one, records every argument, and refuses FP8 matmuls of the
shapes that the real one refuses. Its extra state must not be requested. It follows these rules of
the real one, whose source `tests/support/wheel_signatures.py` checks:

- `reset_parameters`: an FP8 weight that is created while gradients are enabled is also stored
  transposed, so it takes two bytes per element.
- `quantize_weight`: an unquantized weight is quantized in every FP8 call, unless
  `is_first_microbatch` is False. An FP8 weight is not.
- `autocast_exit`: the scales of delayed scaling are updated only while gradients are enabled.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FP8_MAX = 448.0
CREATED: list["Linear"] = []
# The modules that ran with delayed scaling in the current `autocast`.
_DELAYED: list["Linear"] = []
_STATE: dict[str, Any] = {"narrow": None, "narrow_parameters": None}


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        tp_group: object = None,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        assert not sequence_parallel and tp_group is None and tp_size == 1 and not return_bias
        self.arguments = {
            "bias": bias,
            "parallel_mode": parallel_mode,
            "params_dtype": params_dtype,
        }
        self.device = torch.device(device)
        self.dtype = params_dtype
        self.weight = self._fresh(out_features, in_features)
        self.bias = self._fresh(out_features) if bias else torch.empty(0)
        self.fp8_parameters = _STATE["narrow_parameters"]
        self.is_stored_transposed = self.fp8_parameters is not None and torch.is_grad_enabled()
        self.fp8_calls: list[object] = []
        self.weight_casts = 0
        # The scale and the largest input of delayed scaling.
        self.input_scale, self.input_max = 1.0, 0.0
        CREATED.append(self)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weight in the real module."""
        if self.fp8_parameters is None:
            return self.weight.nbytes
        return self.weight.numel() * (2 if self.is_stored_transposed else 1)

    def _fresh(self, *shape: int) -> nn.Parameter:
        """A parameter with values that must be overwritten."""
        return nn.Parameter(torch.full(shape, float("nan"), dtype=self.dtype, device=self.device))

    def norm(self, x: Tensor) -> Tensor:
        return x

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        recipe, x = _STATE["narrow"], self.norm(inp)
        if recipe is not None:
            is_mxfp8 = isinstance(recipe, MXFP8BlockScaling)
            rows, channels = (32, 32) if is_mxfp8 else (8, 16)
            assert len(x) % rows == 0 and all(size % channels == 0 for size in self.weight.shape)
            if self.fp8_parameters is None and is_first_microbatch is not False:
                self.weight_casts += 1
        else:
            assert self.fp8_parameters is None, "narrow parameters outside of autocast"
        if isinstance(recipe, DelayedScaling):
            self.input_max = float(x.abs().max())
            x = (x * self.input_scale).clamp(-FP8_MAX, FP8_MAX) / self.input_scale
            _DELAYED.append(self)
        self.fp8_calls.append(recipe)
        return F.linear(x, self.weight, self.bias if self.arguments["bias"] else None)

    def update_delayed_scale(self) -> None:
        self.input_scale = FP8_MAX / self.input_max

    def get_extra_state(self) -> NoReturn:
        raise AssertionError("the state beside the parameters is a pickle")

    def set_extra_state(self, state: object) -> NoReturn:
        raise AssertionError("the state beside the parameters is a pickle")


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            device=device,
        )
        assert not return_layernorm_output
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.layer_norm_weight = self._fresh(in_features)
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = self._fresh(in_features)

    def norm(self, x: Tensor) -> Tensor:
        scale = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        if self.normalization == "RMSNorm":
            return F.rms_norm(x, (x.shape[-1],), scale, self.eps)
        return F.layer_norm(x, (x.shape[-1],), scale, self.layer_norm_bias, self.eps)


@contextmanager
def autocast(enabled: bool = True, *, recipe: object = None) -> Iterator[None]:
    assert enabled and _STATE["narrow"] is None
    _STATE["narrow"] = recipe
    yield
    _STATE["narrow"] = None
    if torch.is_grad_enabled():
        for module in _DELAYED:
            module.update_delayed_scale()
    _DELAYED.clear()


@contextmanager
def quantized_model_init(enabled: bool = True, recipe: object = None) -> Iterator[None]:
    assert enabled and _STATE["narrow_parameters"] is None
    _STATE["narrow_parameters"] = recipe
    yield
    _STATE["narrow_parameters"] = None


class Float8CurrentScaling:
    pass


class DelayedScaling:
    pass


class Float8BlockScaling:
    pass


class MXFP8BlockScaling:
    pass


RECIPES: tuple[type, ...] = (
    Float8CurrentScaling,
    DelayedScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
)


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    return (True, "") if return_reason else True


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    return (True, "") if return_reason else True


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Answer as on a GPU of the Hopper generation."""
    reason = "Device compute capability 10.0 or higher required for MXFP8 execution."
    return (False, reason) if return_reason else False


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    autocast,
    quantized_model_init,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
)


def install(patch: pytest.MonkeyPatch) -> list[Linear]:
    """Install the stub as transformer_engine; returns the created modules."""
    pytorch = ModuleType("transformer_engine.pytorch")
    recipes = ModuleType("transformer_engine.common.recipe")
    for module_class in (Linear, LayerNormLinear):
        setattr(pytorch, module_class.__name__, module_class)
    for recipe in RECIPES:
        setattr(recipes, recipe.__name__, recipe)
    for function in FUNCTIONS:
        setattr(pytorch, function.__name__, function)
    for name in ("transformer_engine", "transformer_engine.common"):
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.setitem(sys.modules, pytorch.__name__, pytorch)
    patch.setitem(sys.modules, recipes.__name__, recipes)
    CREATED.clear()
    return CREATED
