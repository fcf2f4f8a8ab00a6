"""A stub of Transformer Engine: its published constructors and parameters, computed in torch.

It accepts only the options of the real one, records every argument, and refuses FP8 matmuls of the
shapes that the real one refuses. Its extra state must not be requested.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CREATED: list["Linear"] = []
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
        self.fp8_calls: list[object] = []
        CREATED.append(self)

    def _fresh(self, *shape: int) -> nn.Parameter:
        """A parameter with values that must be overwritten."""
        return nn.Parameter(torch.full(shape, float("nan"), dtype=self.dtype, device=self.device))

    def norm(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        recipe = _STATE["narrow"]
        if recipe is not None:
            assert len(x) % 8 == 0 and all(size % 16 == 0 for size in self.weight.shape)
        else:
            assert self.fp8_parameters is None, "narrow parameters outside of autocast"
        self.fp8_calls.append(recipe)
        return F.linear(self.norm(x), self.weight, self.bias if self.arguments["bias"] else None)

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
        **others: Any,
    ) -> None:
        super().__init__(in_features, out_features, **others)
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


def fp8_autocast(enabled: bool, fp8_recipe: object) -> AbstractContextManager[None]:
    return autocast(enabled, recipe=fp8_recipe)


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


def install(patch: pytest.MonkeyPatch, *, old: bool = False) -> list[Linear]:
    """Install the stub as transformer_engine; returns the created modules. `old`: old names."""
    pytorch = ModuleType("transformer_engine.pytorch")
    recipes = ModuleType("transformer_engine.common.recipe")
    for module_class in (Linear, LayerNormLinear):
        setattr(pytorch, module_class.__name__, module_class)
    for kind in (Float8CurrentScaling, DelayedScaling, Float8BlockScaling):
        setattr(recipes, kind.__name__, kind)
    if old:
        vars(pytorch).update(fp8_autocast=fp8_autocast, fp8_model_init=quantized_model_init)
    else:
        vars(pytorch).update(autocast=autocast, quantized_model_init=quantized_model_init)
    for name in ("transformer_engine", "transformer_engine.common"):
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.setitem(sys.modules, pytorch.__name__, pytorch)
    patch.setitem(sys.modules, recipes.__name__, recipes)
    CREATED.clear()
    return CREATED
