"""Mixture of experts: a router chooses a few MLPs for each token and weighs their outputs.

Every expert is split over the tensor ranks like a dense MLP, so that any number of experts works at
any split. The router reads this rank's own rows; its scores then enter with the rows, which
makes gradients add up over tensor ranks with and without sequence parallelism.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.config import GPTConfig
from gpt.model.layers import MLP, Build, Onto
from gpt.parallel.mesh import enter, leave


class Experts(nn.Module):
    """The experts of a layer and, if the network has one, the expert that all tokens share."""

    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        name = f"decoder.layers.{layer}.mlp"
        self.config, self.mesh = build.config, build.mesh
        self.router = nn.Module()
        build.fill(self.router, f"{name}.router")
        self.experts = nn.Module()
        self.experts.local_experts = nn.ModuleList(
            MLP(build, f"{name}.experts.local_experts.{expert}")
            for expert in range(build.config.num_experts)
        )
        self.shared_experts: MLP | None = None
        if build.config.moe_shared_expert_intermediate_size:
            self.shared_experts = MLP(build, f"{name}.shared_experts")
            if build.config.moe_shared_expert_gate:
                build.fill(self.shared_experts, f"{name}.shared_experts")

    def forward(self, x: Tensor, tokens: int, onto: Onto | None = None) -> Tensor:
        scores = F.linear(x, cast(Tensor, self.router.weight))
        weights = self._route(scores)
        y = leave(self._sum_experts(enter(x, self.mesh, tokens), scores, tokens), self.mesh)
        biases = [expert.linear_fc2.bias for expert in self._experts()]
        if biases[0] is not None:
            y = y + weights @ torch.stack([cast(Tensor, bias) for bias in biases])
        if self.shared_experts is not None:
            shared = self.shared_experts(x, tokens)
            if self.config.moe_shared_expert_gate:
                gate = cast(Tensor, self.shared_experts.gate_weight)
                shared = shared * torch.sigmoid(F.linear(x, gate))
            y = y + shared
        return y if onto is None else onto.add(y)

    def _sum_experts(self, x: Tensor, scores: Tensor, tokens: int) -> Tensor:
        """This rank's summand of all experts' weighted outputs, for all rows."""
        weights = self._route(enter(scores, self.mesh, tokens))
        y = torch.zeros_like(x)
        for number, expert in enumerate(self._experts()):
            rows = weights[:, number].nonzero().squeeze(-1)
            if len(rows):
                out = expert.partial(x[rows]) * weights[rows, number].unsqueeze(-1)
                y = y.index_add(0, rows, out)
        return y

    def _experts(self) -> list[MLP]:
        return [cast(MLP, e) for e in cast(nn.ModuleList, self.experts.local_experts)]

    def _route(self, scores: Tensor) -> Tensor:
        bias = cast("Tensor | None", getattr(self.router, "expert_bias", None))
        return route(scores, bias, self.config)


def route(scores: Tensor, bias: Tensor | None, config: GPTConfig) -> Tensor:
    """The weight of each expert for each token, zero for those not chosen: (T, experts)."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    logits = scores.to(wide)
    sigmoid = config.moe_router_score_function == "sigmoid"
    if sigmoid:
        values = logits.sigmoid()
    else:
        values = logits.softmax(-1) if config.moe_router_pre_softmax else logits
    choice = values if bias is None else values + bias.to(wide)
    chosen = choice.topk(config.moe_router_topk, dim=-1).indices
    picked = values.gather(-1, chosen)
    if sigmoid and config.moe_router_topk > 1:
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
    elif not sigmoid and not config.moe_router_pre_softmax:
        picked = picked.softmax(-1)
    picked = picked * config.moe_router_topk_scaling_factor
    return torch.zeros_like(values).scatter(-1, chosen, picked).to(scores.dtype)
