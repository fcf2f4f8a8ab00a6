"""A stand-in for Transformer Engine: its constructors and parameters as published, sums in torch.

It takes no option that the real one has not, forgets nothing that it was given, and refuses narrow
products whose shapes the real one refuses. Nobody may ask for the state beside its parameters.
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

MADE: list["Linear"] = []
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
        self.given = {"bias": bias, "parallel_mode": parallel_mode, "params_dtype": params_dtype}
        self.device, self.dtype = torch.device(device), params_dtype
        self.weight = self._fresh(out_features, in_features)
        self.bias = self._fresh(out_features) if bias else torch.empty(0)
        self.narrow_parameters = _STATE["narrow_parameters"]
        self.narrow_calls: list[object] = []
        MADE.append(self)

    def _fresh(self, *shape: int) -> nn.Parameter:
        """What must be overwritten."""
        return nn.Parameter(torch.full(shape, float("nan"), dtype=self.dtype, device=self.device))

    def norm(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        recipe = _STATE["narrow"]
        if recipe is not None:
            assert len(x) % 8 == 0 and all(size % 16 == 0 for size in self.weight.shape)
        else:
            assert self.narrow_parameters is None, "narrow parameters outside of autocast"
        self.narrow_calls.append(recipe)
        return F.linear(self.norm(x), self.weight, self.bias if self.given["bias"] else None)

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
        self.eps, self.normalization, self.around_one = eps, normalization, zero_centered_gamma
        self.layer_norm_weight = self._fresh(in_features)
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = self._fresh(in_features)

    def norm(self, x: Tensor) -> Tensor:
        scale = self.layer_norm_weight + 1 if self.around_one else self.layer_norm_weight
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
    """Put it where the real one would be; the list of what will be made. `old`: with old names."""
    pytorch = ModuleType("transformer_engine.pytorch")
    recipes = ModuleType("transformer_engine.common.recipe")
    for one in (Linear, LayerNormLinear):
        setattr(pytorch, one.__name__, one)
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
    MADE.clear()
    return MADE
