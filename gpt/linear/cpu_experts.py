"""Native experts: an experts backend that computes a layer's experts on a CPU in one call.

The C library computes a grouped matmul over the tokens sorted by expert, from the experts' packed
weights. `TorchExperts` in gpt/model/moe.py is the reference.
"""

import logging

from torch import Tensor

from gpt.config import GPTConfig
from gpt.cpu.packed_experts import ExpertLinears, PackedExperts
from gpt.cpu.packed_linear import PackedLinear
from gpt.linear.cpu_linear import CpuLinear
from gpt.model.activation import activation_name
from gpt.model.gpt_model import GPT
from gpt.model.linear import Linear
from gpt.model.mlp import MLP
from gpt.model.moe import ExpertsBackend, MoELayer, choose_experts, router_bias
from gpt.parallel.mesh import Mesh
from gpt.parallel.tensor_parallel import from_row_parallel

log = logging.getLogger(__name__)


class CpuExperts(ExpertsBackend):
    """Computes the experts of one layer in inference, from their packed weights."""

    def __init__(
        self, experts: dict[int, MLP], expert_bias: Tensor | None, config: GPTConfig, mesh: Mesh
    ) -> None:
        """`experts`: this rank's, by their global numbers, which are consecutive.

        `expert_bias`: the router's, which affects the choice of experts; None without one.
        """
        self._expert_bias = expert_bias
        self._config = config
        self._mesh = mesh.expert_mesh
        # Several ranks may hold parts of the same expert; one of them adds the bias of fc2.
        adds_fc2_bias = mesh.in_stage.expert_tp_rank == 0
        self._packed = PackedExperts(
            [
                ExpertLinears(
                    _packed(mlp.linear_fc1),
                    mlp.linear_fc1.bias,
                    _packed(mlp.linear_fc2),
                    mlp.linear_fc2.bias if adds_fc2_bias else None,
                )
                for mlp in experts.values()
            ],
            activation_name(config),
            first_expert=min(experts),
        )

    def forward(self, x: Tensor, router_logits: Tensor, tokens: int) -> Tensor:
        assert not self._mesh.sequence_parallel, "each rank needs all rows"
        topk_ids, weights = choose_experts(router_logits, self._expert_bias, self._config)
        return from_row_parallel(self._packed(x, topk_ids, weights), self._mesh)


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
        layer.use_experts_backend(
            CpuExperts(layer.local_experts, router_bias(layer.router), layer.config, layer.mesh)
        )
    log.info("event=experts backend=native reason=%r", "one call computes all experts of a layer")


def _unsupported_reason(config: GPTConfig, layers: list[MoELayer]) -> str | None:
    if activation_name(config) is None:
        return f"the C library does not compute the activation {config.activation} of the experts"
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
    assert isinstance(linear.backend, CpuLinear), "_unsupported_reason refuses other backends"
    return linear.backend.packed
