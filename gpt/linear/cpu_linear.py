"""CPU linear backends: the C library's packed weights (bf16, int8), and oneDNN's layout."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.cpu.packed_adapter import PackedTerms, adapter_of_each_row, pack_adapter
from gpt.cpu.packed_bottleneck import pack_bottleneck
from gpt.cpu.packed_linear import CpuNorm, Fp32PackedLinear, PackedLinear, RowAdapters
from gpt.linear.norm_activation import NormParameters
from gpt.linear_adapter import LinearTerm
from gpt.model.activation import ACTIVATIONS, activate_packed
from gpt.model.adapted_linear import RowTerms, adapted_product
from gpt.model.linear import Linear, LinearBackend
from gpt.model.norm import Norm

# oneDNN selects the weight layout that is best for this number of input rows. The layout works with
# any number of rows.
LAYOUT_ROWS = 32
# The activations that oneDNN fuses into a linear, with oneDNN's names (activation, algorithm).
FUSED_ACTIVATIONS = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}


class CpuLinear(LinearBackend):
    """The C library's GEMM with a packed weight, and the norm before the GEMM, if any."""

    def __init__(self, packed: PackedLinear, norm: CpuNorm | None = None) -> None:
        self.packed = packed
        self.norm = norm
        self.includes_norm = norm is not None

    def forward(
        self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        return self.packed(x, bias, activation, residual, norm=self.norm)

    def forward_adapted(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        terms: RowTerms,
    ) -> Tensor:
        if isinstance(self.packed, Fp32PackedLinear):
            return self._forward_adapted_fp32(x, bias, activation, terms)
        packed_terms = [self.pack_terms(row_group) for _, row_group in terms]
        adapters = RowAdapters(
            adapter_of_each_row([rows for rows, _ in terms], len(x)),
            [packed.args for packed in packed_terms],
        )
        return self.packed(x, bias, activation, residual, norm=self.norm, adapters=adapters)

    def _forward_adapted_fp32(
        self, x: Tensor, bias: Tensor | None, activation: str | None, terms: RowTerms
    ) -> Tensor:
        """Compute `forward_adapted` in torch: the library has no terms for a weight in fp32."""
        assert isinstance(self.packed, Fp32PackedLinear)
        weight = self.packed.unpacked()
        y = adapted_product(x, terms, lambda rows: F.linear(rows, weight), bias)
        return activate_packed(y, activation, self.packed.gate_limits)

    def prepare_terms(
        self, terms: Sequence[LinearTerm], dtype: torch.dtype
    ) -> Sequence[LinearTerm]:
        bottleneck = terms[0].bottleneck
        if bottleneck is not None:
            return [LinearTerm(bottleneck=pack_bottleneck(bottleneck))]
        if isinstance(self.packed, Fp32PackedLinear):
            return super().prepare_terms(terms, dtype)
        return [self.pack_terms(terms)]

    def pack_terms(self, terms: Sequence[LinearTerm]) -> PackedTerms:
        """Return the terms in the layout of the C library; terms that have it are not copied."""
        if isinstance(terms[0], PackedTerms):
            return terms[0]
        return pack_adapter({"": (terms, self.packed.weight_args)})[""]


class OneDnnLinear(LinearBackend):
    """A matmul by oneDNN, with a weight in oneDNN's layout."""

    def __init__(self, weight: Tensor) -> None:
        self._packed_weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(
            weight.detach(), LAYOUT_ROWS
        )

    def forward(
        self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        onednn_linear, packed_weight = torch.ops.mkldnn._linear_pointwise, self._packed_weight
        y: Tensor
        if residual is not None and activation is None:
            y = onednn_linear.binary(x, residual, packed_weight, bias, "add")
            return y
        name, algorithm = FUSED_ACTIVATIONS.get(activation or "", ("none", ""))
        y = onednn_linear(x, packed_weight, bias, name, [], algorithm)
        if activation is not None and activation not in FUSED_ACTIVATIONS:
            y = ACTIVATIONS[activation](y)
        return y if residual is None else residual + y


def make_input_norm(linear: Linear) -> CpuNorm | None:
    """Return the norm in `linear`, converted to a `CpuNorm`; None if `linear` contains no norm."""
    norm = NormParameters.before_linear(linear)
    return None if norm is None else _make_cpu_norm(norm)


def make_norm(norm: Norm) -> CpuNorm:
    """Return a `CpuNorm` with the parameters of a norm module."""
    return _make_cpu_norm(NormParameters.from_module(norm.weight, norm.bias, norm.config))


def _make_cpu_norm(norm: NormParameters) -> CpuNorm:
    return CpuNorm(norm.scale, norm.shift, norm.epsilon, rms=norm.is_rms)
