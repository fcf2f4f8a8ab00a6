"""Mixture-of-experts layer: top-k router, experts split over tensor ranks, shared expert.

Every expert is split over the tensor ranks like a dense MLP. The model does not use expert
parallelism, so the number of ranks need not divide the number of experts. With sequence
parallelism, the router computes the router logits of this rank's rows, and `to_column_parallel`
gathers the rows and their router logits. Each rank computes only a part of every expert; therefore
the backward pass of `to_column_parallel` sums the gradients of the rows and of the router logits
over the tensor ranks.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.config import GPTConfig
from gpt.model.build_context import BuildContext
from gpt.model.mlp import MLP
from gpt.model.residual_dropout import Residual
from gpt.parallel.tensor_parallel import from_row_parallel, to_column_parallel


class MoELayer(nn.Module):
    """The router, the experts and the optional shared expert of one layer."""

    def __init__(self, build: BuildContext, layer: int) -> None:
        super().__init__()
        name = f"decoder.layers.{layer}.mlp"
        self.config = build.config
        self.mesh = build.mesh
        self.router = nn.Module()
        build.allocate_parameters(self.router, f"{name}.router")
        self.experts = nn.Module()
        self.experts.local_experts = nn.ModuleList(
            MLP(build, f"{name}.experts.local_experts.{expert}")
            for expert in range(build.config.num_experts)
        )
        self.shared_experts: MLP | None = None
        if build.config.moe_shared_expert_intermediate_size:
            self.shared_experts = MLP(build, f"{name}.shared_experts")
            if build.config.moe_shared_expert_gate:
                build.allocate_parameters(self.shared_experts, f"{name}.shared_experts")

    def forward(self, x: Tensor, tokens: int, residual: Residual | None = None) -> Tensor:
        router_logits = F.linear(x, cast(Tensor, self.router.weight))
        weights = self._routing_weights(router_logits)
        y = from_row_parallel(
            self._sum_experts(to_column_parallel(x, self.mesh, tokens), router_logits, tokens),
            self.mesh,
        )
        # The biases of fc2 are added once, after the sum over tensor ranks.
        biases = [expert.linear_fc2.bias for expert in self._local_experts()]
        if biases[0] is not None:
            y = y + weights @ torch.stack([cast(Tensor, bias) for bias in biases])
        if self.shared_experts is not None:
            shared_output = self.shared_experts(x, tokens)
            if self.config.moe_shared_expert_gate:
                gate = cast(Tensor, self.shared_experts.gate_weight)
                shared_output = shared_output * torch.sigmoid(F.linear(x, gate))
            y = y + shared_output
        return y if residual is None else residual.add_output(y)

    def _sum_experts(self, x: Tensor, router_logits: Tensor, tokens: int) -> Tensor:
        """Return the weighted sum of all experts' outputs, before the sum over tensor ranks."""
        weights = self._routing_weights(to_column_parallel(router_logits, self.mesh, tokens))
        y = torch.zeros_like(x)
        for expert_id, expert in enumerate(self._local_experts()):
            rows = weights[:, expert_id].nonzero().squeeze(-1)
            if len(rows):
                expert_output = expert.partial_output(x[rows]) * weights[rows, expert_id].unsqueeze(
                    -1
                )
                y = y.index_add(0, rows, expert_output)
        return y

    def _local_experts(self) -> list[MLP]:
        return [cast(MLP, expert) for expert in cast(nn.ModuleList, self.experts.local_experts)]

    def _routing_weights(self, router_logits: Tensor) -> Tensor:
        bias = cast("Tensor | None", getattr(self.router, "expert_bias", None))
        return routing_weights(router_logits, bias, self.config)


def routing_weights(router_logits: Tensor, bias: Tensor | None, config: GPTConfig) -> Tensor:
    """Return the weight of each expert for each token, (T, experts); 0 for experts not chosen.

    `bias`, the router's expert bias, affects only the choice of the experts, not their weights.
    """
    compute_dtype = torch.promote_types(router_logits.dtype, torch.float32)
    logits = router_logits.to(compute_dtype)
    is_sigmoid = config.moe_router_score_function == "sigmoid"
    if is_sigmoid:
        expert_scores = logits.sigmoid()
    else:
        expert_scores = logits.softmax(-1) if config.moe_router_pre_softmax else logits
    selection_scores = expert_scores if bias is None else expert_scores + bias.to(compute_dtype)
    topk_ids = selection_scores.topk(config.moe_router_topk, dim=-1).indices
    topk_weights = expert_scores.gather(-1, topk_ids)
    if is_sigmoid and config.moe_router_topk > 1:
        topk_weights = topk_weights / (topk_weights.sum(-1, keepdim=True) + 1e-20)
    elif not is_sigmoid and not config.moe_router_pre_softmax:
        topk_weights = topk_weights.softmax(-1)
    topk_weights = topk_weights * config.moe_router_topk_scaling_factor
    return (
        torch.zeros_like(expert_scores).scatter(-1, topk_ids, topk_weights).to(router_logits.dtype)
    )
