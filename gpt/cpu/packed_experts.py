"""Packed mixture-of-experts layer on a CPU: its router, and one call for all experts of a batch.

The C code is in gpt/cpu/src/router.c and gpt/cpu/src/experts.c. The experts' weights are the panels
of `PackedLinear`, `Int8PackedLinear` or `Fp32PackedLinear`; they are not copied.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gpt.cpu.kernels import (
    INT,
    KEEP_GIL_ELEMENTS_MAX,
    KEEP_GIL_ROWS_MAX,
    POINTER,
    library,
    library_keeping_gil,
)
from gpt.cpu.packed_linear import PackedLinear, PackedWeight, RowAdapters, activation_code


class Experts(ctypes.Structure):
    """The struct Experts in gpt/cpu/src/experts.h."""

    _fields_ = (
        *((name, POINTER) for name in ("fc1", "fc2", "fc1_biases", "fc2_biases")),
        *((name, INT) for name in ("experts", "first_expert", "activation")),
    )


class Router(ctypes.Structure):
    """The struct Router in gpt/cpu/src/experts.h."""

    _fields_ = (
        ("weight", PackedWeight),
        *((name, POINTER) for name in ("bias", "expert_bias")),
        *((name, INT) for name in ("topk", "sigmoid", "pre_softmax")),
        ("scaling_factor", ctypes.c_double),
    )


@dataclass(frozen=True)
class ChoiceRule:
    """How a router chooses the experts of a token: fields of GPTConfig without `moe_router_`."""

    topk: int
    sigmoid: bool
    pre_softmax: bool
    scaling_factor: float


class PackedRouter:
    """The router of one layer."""

    def __init__(
        self,
        packed: PackedLinear,
        bias: Tensor | None,
        expert_bias: Tensor | None,
        rule: ChoiceRule,
    ) -> None:
        """`expert_bias` affects only the choice of the experts, not their weights."""
        self._rule = rule
        self._dtype = packed.input_dtype
        self._expert_bias = None if expert_bias is None else expert_bias.float().contiguous()
        # This object keeps the tensors allocated, because the library gets their addresses.
        self._references = (packed, bias)
        self.args = Router(
            packed.weight_args,
            None if bias is None else bias.data_ptr(),
            None if self._expert_bias is None else self._expert_bias.data_ptr(),
            rule.topk,
            rule.sigmoid,
            rule.pre_softmax,
            rule.scaling_factor,
        )

    def choose(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of each row's experts and their weights, both (rows, topk)."""
        logits, rows = router_logits.contiguous(), len(router_logits)
        assert logits.dtype == self._dtype and logits.shape == (rows, self.args.weight.columns)
        ids = torch.empty((rows, self._rule.topk), dtype=torch.int64)
        weights = torch.empty((rows, self._rule.topk))
        lib = library_keeping_gil() if rows <= KEEP_GIL_ROWS_MAX else library()
        assert lib is not None
        lib.preamble_choose_experts(
            ctypes.byref(self.args),
            logits.data_ptr(),
            rows,
            ids.data_ptr(),
            weights.data_ptr(),
            torch.get_num_threads(),
        )
        return ids, weights


class ExpertLinears(NamedTuple):
    """The packed weights and the biases of one expert."""

    fc1: PackedLinear
    fc1_bias: Tensor | None
    fc2: PackedLinear
    fc2_bias: Tensor | None


class PackedExperts:
    """The local experts of one layer: all of them, or with expert parallelism this rank's.

    The output of a token does not depend on the other tokens, bit for bit. The sums over channels
    and over a token's experts are in fp32; an output is rounded once.
    """

    def __init__(
        self, experts: Sequence[ExpertLinears], activation: str | None, *, first_expert: int = 0
    ) -> None:
        """`first_expert`: the number of the first of `experts`; other ranks compute the others.

        `activation`: as in `PackedLinear`; if it is gated, the weights of fc1 must be too.
        """
        # This object keeps the panels allocated, because the library gets their addresses.
        self._experts = list(experts)
        first = experts[0].fc1
        self._hidden_size = int(first.weight_args.channels)
        self._dtype = first.input_dtype
        self._expert_elements = first.numel + experts[0].fc2.numel
        self.numel = len(experts) * self._expert_elements
        self._arrays = (
            _weight_array([expert.fc1 for expert in experts]),
            _weight_array([expert.fc2 for expert in experts], fp32_output=True),
            _bias_array([expert.fc1_bias for expert in experts]),
            _bias_array([expert.fc2_bias for expert in experts]),
        )
        self.args = Experts(
            *(None if array is None else ctypes.addressof(array) for array in self._arrays),
            len(self._experts),
            first_expert,
            activation_code(activation, gated=bool(first.weight_args.gated)),
        )

    def __call__(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """Return the weighted sum of the outputs of each row's local experts.

        `topk_ids` (int64) and `topk_weights`: (rows, experts per token). `adapters`, which bf16 and
        int8 weights support, have fc1 and fc2 of each local expert, one after the other.
        """
        assert adapters is None or self._dtype == torch.bfloat16
        x, ids, weights = x.contiguous(), topk_ids.contiguous(), topk_weights.float().contiguous()
        rows, topk = ids.shape
        assert x.dtype == self._dtype and x.shape == (rows, self._hidden_size)
        assert ids.dtype == torch.int64 and weights.shape == ids.shape
        elements = min(rows * topk, len(self._experts)) * self._expert_elements
        keeps_gil = rows <= KEEP_GIL_ROWS_MAX and elements <= KEEP_GIL_ELEMENTS_MAX
        lib = library_keeping_gil() if keeps_gil else library()
        assert lib is not None
        y = torch.empty_like(x)
        lib.preamble_experts(
            ctypes.byref(self.args),
            x.data_ptr(),
            rows,
            ids.data_ptr(),
            weights.data_ptr(),
            topk,
            y.data_ptr(),
            torch.get_num_threads(),
            None if adapters is None else ctypes.byref(adapters.args),
        )
        return y


class SharedExpert(NamedTuple):
    """The shared expert of a layer, and the weight of the gate of its output, if it has one."""

    fc1: PackedLinear
    fc2: PackedLinear
    gate: PackedLinear | None


class MoELayerArgs(ctypes.Structure):
    """The struct MoELayer in gpt/cpu/src/experts.h."""

    _fields_ = (
        ("router", Router),
        ("experts", Experts),
        *((name, PackedWeight) for name in ("shared_fc1", "shared_fc2", "shared_gate")),
    )

    @classmethod
    def of(
        cls, router: PackedRouter, experts: PackedExperts, shared: SharedExpert | None
    ) -> "MoELayerArgs":
        """Return the arguments of a layer; they are valid only while the layer's objects exist."""
        args = cls(router=router.args, experts=experts.args)
        if shared is not None:
            args.shared_fc1, args.shared_fc2 = shared.fc1.weight_args, shared.fc2.weight_args
            args.shared_fc2.fp32_output = True  # A copy of `weight_args`.
            if shared.gate is not None:
                args.shared_gate = shared.gate.weight_args
        return args


def _weight_array(
    linears: Sequence[PackedLinear], *, fp32_output: bool = False
) -> "ctypes.Array[PackedWeight]":
    array = (PackedWeight * len(linears))(*(linear.weight_args for linear in linears))
    for weight in array:  # Copies of `weight_args`.
        weight.fp32_output |= fp32_output
    return array


def _bias_array(biases: Sequence[Tensor | None]) -> "ctypes.Array[ctypes.c_void_p] | None":
    addresses = [bias.data_ptr() for bias in biases if bias is not None]
    return (POINTER * len(addresses))(*addresses) if addresses else None
