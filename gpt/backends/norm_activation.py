"""What stands between two products: a sum, a norm, an activation, in one pass over each row.

In Triton where there is a GPU and Triton can be had (gpt/backends/triton_norm_activation.py), else
in torch, its twin. Rows may leave in e4m3 with a scale for each, as products in fp8 read them.
Within, numbers are fp32 at least, and are rounded once. Nothing here knows of weights, ranks or
layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.config import GPTConfig
from gpt.cpu.packed_linear import GATED
from gpt.model.layers import PLAIN_ACTIVATIONS

NARROW = torch.float8_e4m3fn
NARROW_MAX = 448.0  # The largest number of that type.
LEAST = 1e-12  # A row's largest number counts as at least this, so that zeros have a scale.
MULTIPLE = 16  # Products in fp8 want so many channels, or a multiple.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # That the kernels serve.
WIDTH_MAX = 32768  # Of a row that is normed: it stays in registers.


@dataclass(frozen=True)
class Narrow:
    """Rows in e4m3: what is meant is what is stored, times the scale of its row."""

    numbers: Tensor  # (T, channels), padded with zeros to a multiple of MULTIPLE.
    scales: Tensor  # (T, 1), fp32

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes


Rows = Tensor | Narrow


@dataclass(frozen=True)
class Norm:
    """LayerNorm, or RMSNorm, with a scale that is not around zero, and perhaps a shift."""

    scale: Tensor  # fp32 at least, as the shift.
    shift: Tensor | None
    epsilon: float
    rms: bool

    @staticmethod
    def of(scale: Tensor, shift: Tensor | None, config: GPTConfig) -> "Norm":
        """A module's parameters, in the words of its config."""
        wide = torch.promote_types(scale.dtype, torch.float32)
        scale = scale.detach().to(wide) + (1 if config.layernorm_zero_centered_gamma else 0)
        rms = config.normalization == "RMSNorm"
        kept = None if rms or shift is None else shift.detach().to(wide)
        return Norm(scale, kept, config.layernorm_epsilon, rms)


def added(
    y: Tensor, bias: Tensor | None, x: Tensor, norm: Norm | None, *, narrow: bool = False
) -> tuple[Tensor, Rows | None]:
    """`x` with a product and its bias added, and that normed, if there is a norm."""
    found = _kernels(x)
    if found is not None:
        return found.added(y, bias, x, norm, narrow)  # type: ignore[no-any-return]
    wide = x.to(_wide(x)) + y
    total = (wide if bias is None else wide + bias).to(x.dtype)
    return total, None if norm is None else normed(total, norm, narrow=narrow)


def normed(x: Tensor, norm: Norm, *, narrow: bool = False) -> Rows:
    """Each row normed."""
    found = _kernels(x)
    if found is not None:
        return found.normed(x, norm, narrow)  # type: ignore[no-any-return]
    shape = (x.shape[-1],)
    if norm.rms:
        y = F.rms_norm(x.to(_wide(x)), shape, norm.scale, norm.epsilon)
    else:
        y = F.layer_norm(x.to(_wide(x)), shape, norm.scale, norm.shift, norm.epsilon)
    return in_e4m3(y) if narrow else y.to(x.dtype)


def activated(x: Tensor, activation: str) -> Tensor:
    """Rows after an activation; one with gates halves them."""
    found = _kernels(x)
    if found is not None:
        return found.activated(x, activation)  # type: ignore[no-any-return]
    return _activated(x, activation).to(x.dtype)


def narrowed(x: Tensor, activation: str | None = None) -> Narrow:
    """Rows, after an activation if there is one, in e4m3."""
    found = _kernels(x)
    if found is not None:
        return found.narrowed(x, activation)  # type: ignore[no-any-return]
    return in_e4m3(x.to(_wide(x)) if activation is None else _activated(x, activation))


def in_e4m3(x: Tensor) -> Narrow:
    """By the largest number of each row, in torch alone; a row that is not finite stays so."""
    largest = x.abs().amax(-1, keepdim=True).float().clamp_min(LEAST)
    numbers = F.pad(x * (NARROW_MAX / largest), (0, -x.shape[-1] % MULTIPLE)).to(NARROW)
    return Narrow(numbers, largest / NARROW_MAX)


def kernels_missing() -> str | None:
    """Why there are none in Triton; None: there are."""
    found = _found()
    return found if isinstance(found, str) else None


def _activated(x: Tensor, activation: str) -> Tensor:
    x = x.to(_wide(x))
    act: Callable[[Tensor], Tensor] = PLAIN_ACTIVATIONS[activation.removeprefix(GATED)]
    if not activation.startswith(GATED):
        return act(x)
    gate, up = x.chunk(2, dim=-1)
    return act(gate) * up


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _kernels(x: Tensor) -> ModuleType | None:
    """Those in Triton, if they serve such rows."""
    if not x.is_cuda or x.dtype not in DTYPES or x.shape[-1] > WIDTH_MAX:
        return None
    found = _found()
    return None if isinstance(found, str) else found


@cache
def _found() -> ModuleType | str:
    try:
        from gpt.backends import triton_norm_activation
    except Exception as error:  # A broken one raises whatever it likes.
        return f"{type(error).__name__}: {error}"
    return triton_norm_activation
