"""Native mixture-of-experts layer on a CPU: the router, and all experts of a layer in one call.

The C library chooses the experts, and computes a grouped matmul over the tokens sorted by expert,
from the experts' packed weights. `TorchExperts` in gpt/model/moe.py is the reference. In a decoder
step, `FusedDecoder` computes whole MoE layers with the arguments that `layer_args` returns.
"""

import ctypes
import logging
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.cpu.packed_adapter import adapter_of_each_row
from gpt.cpu.packed_experts import (
    ChoiceRule,
    ExpertLinears,
    MoELayerArgs,
    PackedExperts,
    PackedRouter,
    SharedExpert,
)
from gpt.cpu.packed_linear import (
    AdaptedLinear,
    Fp32PackedLinear,
    PackedLinear,
    RowAdapters,
    packed_numel,
)
from gpt.linear.cpu_linear import CpuLinear
from gpt.linear_adapter import AdaptedRows, ModelAdapter
from gpt.model.activation import packed_activation_name
from gpt.model.gpt_model import GPT
from gpt.model.linear import Linear
from gpt.model.mlp import MLP
from gpt.model.moe import ExpertsBackend, MoELayer, TorchExperts, router_bias
from gpt.parallel.mesh import Mesh

log = logging.getLogger(__name__)


class CpuExperts(ExpertsBackend):
    """Computes the experts of one layer in inference, from their packed weights."""

    def __init__(
        self,
        experts: dict[int, MLP],
        router: PackedRouter,
        config: GPTConfig,
        mesh: Mesh,
        reference: TorchExperts,
    ) -> None:
        """`experts`: this rank's, by their global numbers, which are consecutive.

        `reference` computes the rows with terms of adapters in fp32, for which the library has no
        terms.
        """
        super().__init__(mesh)
        self._linears = expert_linears(experts)
        self.router = router
        self._reference = reference
        # Several ranks may hold parts of the same expert; one of them adds the bias of fc2.
        adds_fc2_bias = mesh.in_stage.expert_tp_rank == 0
        self.packed = PackedExperts(
            [
                ExpertLinears(
                    _packed(mlp.linear_fc1),
                    mlp.linear_fc1.bias,
                    _packed(mlp.linear_fc2),
                    mlp.linear_fc2.bias if adds_fc2_bias else None,
                )
                for mlp in experts.values()
            ],
            packed_activation_name(config),
            first_expert=min(experts),
        )

    def sum_experts(self, x: Tensor, router_logits: Tensor) -> Tensor:
        topk_ids, weights = self.router.choose(router_logits)
        return self.packed(x, topk_ids, weights)

    def sum_adapted_experts(
        self, x: Tensor, router_logits: Tensor, adapted_rows: Sequence[AdaptedRows]
    ) -> Tensor:
        if x.dtype == torch.float32:
            return self._reference.replace_adapted_rows(self, x, router_logits, adapted_rows)
        topk_ids, weights = self.router.choose(router_logits)
        adapters = RowAdapters(
            adapter_of_each_row([adapted.rows for adapted in adapted_rows], len(x)),
            [adapted_linears(self._linears, adapted.adapter) for adapted in adapted_rows],
        )
        return self.packed(x, topk_ids, weights, adapters)


def use_native_experts(model: GPT) -> None:
    """Compute the experts of a model with packed weights in the C library, if it supports them."""
    layers = [layer.mlp for layer in model.decoder_layers if isinstance(layer.mlp, MoELayer)]
    if not layers:
        return
    reason = _unsupported_reason(model.config, layers)
    if reason is not None:
        log.info("event=experts backend=torch reason=%r", reason)
        return
    for layer in layers:
        router_linear = _pack_small(cast(Tensor, layer.router.weight))
        router = PackedRouter(
            router_linear, layer.router_linear_bias, router_bias(layer.router), _rule(layer.config)
        )
        reference = layer.experts_backend
        assert isinstance(reference, TorchExperts), "the default backend of a loaded model"
        layer.use_experts_backend(
            CpuExperts(layer.local_experts, router, layer.config, layer.mesh, reference)
        )
        layer.use_router_backend(CpuLinear(router_linear))
    log.info("event=experts backend=native reason=%r", "one call computes all experts of a layer")


def expert_linears(experts: Mapping[int, MLP]) -> list[Linear]:
    """Return the linears of experts in the order in which the library has an adapter's terms."""
    return [linear for mlp in experts.values() for linear in (mlp.linear_fc1, mlp.linear_fc2)]


def adapted_linears(
    linears: Sequence[Linear | None], adapter: ModelAdapter
) -> "ctypes.Array[AdaptedLinear]":
    """Return the library's arguments for the changes of `linears` by an adapter, which is packed.

    Linears that it does not change, and None, have no changes.
    """
    args = (AdaptedLinear * len(linears))()
    for index, linear in enumerate(linears):
        if linear is not None and linear.name in adapter:
            args[index] = _packed_linear(linear).pack_terms(adapter[linear.name]).args
    return args


def layer_args(layer: MoELayer) -> tuple[MoELayerArgs, list[object]]:
    """Return the library's arguments for a layer with `CpuExperts`, and what keeps them valid."""
    backend, shared = layer.experts_backend, layer.shared_experts
    assert isinstance(backend, CpuExperts)
    packed_shared: SharedExpert | None = None
    if shared is not None:
        gate = cast("Tensor | None", getattr(shared, "gate_weight", None))
        packed_shared = SharedExpert(
            _packed(shared.linear_fc1),
            _packed(shared.linear_fc2),
            None if gate is None else _pack_small(gate),
        )
    args = MoELayerArgs.of(backend.router, backend.packed, packed_shared)
    return args, [backend.router, backend.packed, packed_shared]


def _rule(config: GPTConfig) -> ChoiceRule:
    return ChoiceRule(
        config.moe_router_topk,
        config.moe_router_score_function == "sigmoid",
        config.moe_router_pre_softmax,
        config.moe_router_topk_scaling_factor,
    )


def _pack_small(weight: Tensor) -> PackedLinear:
    """Pack a weight with few output columns, in its dtype also in a model with int8 weights."""
    linear_type = Fp32PackedLinear if weight.dtype == torch.float32 else PackedLinear
    return linear_type(weight, torch.zeros(packed_numel(weight), dtype=weight.dtype))


def _unsupported_reason(config: GPTConfig, layers: list[MoELayer]) -> str | None:
    if config.hidden_size % 2 and layers[0].router.weight.dtype != torch.float32:
        return "the C library has no router for an odd hidden_size"
    linears = (
        linear
        for layer in layers
        for mlp in layer.local_experts.values()
        for linear in (mlp.linear_fc1, mlp.linear_fc2)
    )
    if not all(isinstance(linear.backend, CpuLinear) for linear in linears):
        return "the experts' weights are not packed by the C library"
    return None


def _packed(linear: Linear) -> PackedLinear:
    return _packed_linear(linear).packed


def _packed_linear(linear: Linear) -> CpuLinear:
    assert isinstance(linear.backend, CpuLinear), "_unsupported_reason refuses other backends"
    return linear.backend
