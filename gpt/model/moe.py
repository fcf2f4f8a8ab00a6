"""Mixture-of-experts layer: top-k router, experts divided over ranks, shared expert.

An experts backend (`ExpertsBackend`) computes the experts that the router chooses. The default is
`TorchExperts`; for inference, gpt/linear/grouped_experts.py has one for a GPU, and
gpt/linear/cpu_experts.py one for a CPU.

Without expert parallelism, every expert is split over the tensor ranks like a dense MLP. With
expert parallelism, a rank holds whole experts, or parts of some experts (`RankInStage` in
gpt/parallel/weight_sharding.py). In both cases all ranks of the stage have all rows and their
router logits, each rank computes the outputs of its experts, and an all-reduce sums them. This
sends as much as a dense MLP with tensor parallelism. An all-to-all would send each row to the ranks
of its experts, but no rank lacks a row.

With sequence parallelism, the router computes the router logits of this rank's rows, and
`to_column_parallel` gathers the rows and their router logits. Each rank computes only a part of the
output; therefore the backward pass of `to_column_parallel` sums the gradients of the rows and of
the router logits over the tensor ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.config import GPTConfig
from gpt.linear_adapter import AdaptedRows, AdapterKernels, BatchAdapters
from gpt.model.adapted_linear import select_adapted_rows
from gpt.model.build_context import BuildContext
from gpt.model.linear import LinearBackend, TorchLinear
from gpt.model.mlp import MLP
from gpt.model.residual_dropout import Residual
from gpt.parallel.mesh import Mesh
from gpt.parallel.tensor_parallel import from_row_parallel, to_column_parallel


class ExpertsBackend(ABC):
    """Base class of experts backends. An instance computes the experts of one layer."""

    # Whether `forward` without adapters reads no value on the host, so that a CUDA graph can
    # capture it.
    is_capturable: bool = False

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh.expert_mesh

    def forward(
        self,
        x: Tensor,
        router_logits: Tensor,
        tokens: int,
        adapted_rows: Sequence[AdaptedRows] = (),
    ) -> Tensor:
        """Return the weighted sum of the outputs of each row's experts, over all tensor ranks.

        The shared expert is not included. `x` and `router_logits` have this rank's rows of the
        batch, which has `tokens` rows. `adapted_rows`: the adapters that change this rank's experts
        of the layer; other ranks may have others.
        """
        # In inference all ranks have all rows.
        if self._mesh.sequence_parallel or torch.is_grad_enabled():
            x = to_column_parallel(x, self._mesh, tokens)
            router_logits = to_column_parallel(router_logits, self._mesh, tokens)
        sums = (
            self.sum_adapted_experts(x, router_logits, adapted_rows)
            if adapted_rows
            else self.sum_experts(x, router_logits)
        )
        return from_row_parallel(sums, self._mesh)

    @abstractmethod
    def sum_experts(self, x: Tensor, router_logits: Tensor) -> Tensor:
        """Return the weighted sums of the outputs of this rank's experts, for all rows."""

    @abstractmethod
    def sum_adapted_experts(
        self, x: Tensor, router_logits: Tensor, adapted_rows: Sequence[AdaptedRows]
    ) -> Tensor:
        """Return the sums of `sum_experts` with the terms of adapters."""


class TorchExperts(ExpertsBackend):
    """Computes one expert after the other: the reference of other backends, and for training.

    The host waits for the number of rows of each expert.
    """

    def __init__(
        self, experts: dict[int, MLP], router: nn.Module, config: GPTConfig, mesh: Mesh
    ) -> None:
        """`experts`: this rank's, by their global numbers."""
        super().__init__(mesh)
        self._experts = experts
        self._router = router
        self._config = config
        # Several ranks may hold parts of the same expert; one of them adds the bias of fc2.
        self._adds_fc2_bias = mesh.in_stage.expert_tp_rank == 0

    def sum_experts(self, x: Tensor, router_logits: Tensor) -> Tensor:
        return self.sum_adapted_experts(x, router_logits, ())

    def sum_adapted_experts(
        self, x: Tensor, router_logits: Tensor, adapted_rows: Sequence[AdaptedRows]
    ) -> Tensor:
        weights = routing_weights(router_logits, router_bias(self._router), self._config)
        y = torch.zeros_like(x)
        if self._mesh.ep > 1 and torch.is_grad_enabled():
            # All ranks sum the gradients of x and of the router logits, even if the router sends no
            # row to the experts of this rank.
            y = 0 * (x + weights.sum(-1, keepdim=True))
        for expert_id, expert in self._experts.items():
            rows = weights[:, expert_id].nonzero().squeeze(-1)
            if len(rows):
                bias = expert.linear_fc2.bias if self._adds_fc2_bias else None
                # An adapter acts on those of its rows that the router sends to the expert.
                adapters = select_adapted_rows(adapted_rows, rows)
                if adapters:  # An output scale changes the bias, too.
                    output = expert.partial_output(x[rows], bias, adapters)
                else:
                    output = expert.partial_output(x[rows])
                    output = output if bias is None else output + bias
                y = y.index_add(0, rows, output * weights[rows, expert_id].unsqueeze(-1))
        return y

    def replace_adapted_rows(
        self,
        backend: ExpertsBackend,
        x: Tensor,
        router_logits: Tensor,
        adapted_rows: Sequence[AdaptedRows],
    ) -> Tensor:
        """Return the sums of `sum_adapted_experts`, of which `backend` computes rows without terms.

        So an adapter does not change the results of other rows, not even by their rounding.
        """
        if any(adapted.rows is None for adapted in adapted_rows):
            return self.sum_adapted_experts(x, router_logits, adapted_rows)
        rows = torch.cat([adapted.rows for adapted in adapted_rows if adapted.rows is not None])
        own = self.sum_adapted_experts(
            x[rows], router_logits[rows], select_adapted_rows(adapted_rows, rows)
        )
        is_other = torch.ones(len(x), dtype=torch.bool, device=x.device)
        is_other[rows] = False
        y = torch.empty_like(x)
        if bool(is_other.any()):
            y[is_other] = backend.sum_experts(x[is_other], router_logits[is_other])
        return y.index_copy_(0, rows, own)


class MoELayer(nn.Module):
    """The router, the experts and the optional shared expert of one layer."""

    def __init__(self, build: BuildContext, layer: int) -> None:
        super().__init__()
        self.name = name = f"decoder.layers.{layer}.mlp"
        self.config = build.config
        self.mesh = build.mesh
        self.router = nn.Module()
        build.allocate_parameters(self.router, f"{name}.router")
        self.router_backend: LinearBackend = TorchLinear(cast(Tensor, self.router.weight))
        self.experts = nn.Module()
        self.experts.local_experts = nn.ModuleDict(
            {
                str(expert): MLP(build, f"{name}.experts.local_experts.{expert}")
                for expert in build.mesh.in_stage.local_experts(build.config)
            }
        )
        self.experts_backend: ExpertsBackend = TorchExperts(
            self.local_experts, self.router, self.config, self.mesh
        )
        self.shared_experts: MLP | None = None
        if build.config.moe_shared_expert_intermediate_size:
            self.shared_experts = MLP(build, f"{name}.shared_experts")
            if build.config.moe_shared_expert_gate:
                build.allocate_parameters(self.shared_experts, f"{name}.shared_experts")

    @property
    def local_experts(self) -> dict[int, MLP]:
        """This rank's experts, or parts of experts, by global number; without the shared expert."""
        experts = cast(nn.ModuleDict, self.experts.local_experts)
        return {int(number): cast(MLP, expert) for number, expert in experts.items()}

    @property
    def router_linear_bias(self) -> Tensor | None:
        """The bias of the router's linear, which is part of the router logits."""
        return cast("Tensor | None", getattr(self.router, "bias", None))

    def use_experts_backend(self, backend: ExpertsBackend) -> None:
        """Compute the experts with `backend`; the shared expert stays a dense MLP."""
        self.experts_backend = backend

    def use_router_backend(self, backend: LinearBackend) -> None:
        """Compute the router logits with `backend`, which has its own copy of the weight."""
        self.router_backend = backend
        self.router._parameters["weight"] = None

    def forward(
        self,
        x: Tensor,
        tokens: int,
        residual: Residual | None = None,
        adapters: BatchAdapters = (),
    ) -> Tensor:
        router_logits = self.router_backend.forward(x, self.router_linear_bias, None, None)
        y = self.experts_backend.forward(x, router_logits, tokens, self._expert_rows(adapters))
        if self.shared_experts is not None:
            shared_output = self.shared_experts(x, tokens, None, adapters)
            if self.config.moe_shared_expert_gate:
                gate = cast(Tensor, self.shared_experts.gate_weight)
                shared_output = shared_output * torch.sigmoid(F.linear(x, gate))
            y = y + shared_output
        return y if residual is None else residual.add_output(y)

    def _expert_rows(self, adapters: BatchAdapters) -> Sequence[AdaptedRows]:
        """Return the adapters that change this rank's experts of this layer."""
        adapted_rows = adapters.expert_rows if isinstance(adapters, AdapterKernels) else adapters
        return [adapted for adapted in adapted_rows if self.name in adapted.moe_layers]


def router_bias(router: nn.Module) -> Tensor | None:
    """Return the router's expert bias, which some models have."""
    return cast("Tensor | None", getattr(router, "expert_bias", None))


def routing_weights(router_logits: Tensor, bias: Tensor | None, config: GPTConfig) -> Tensor:
    """Return the weight of each expert for each token, (T, experts); 0 for experts not chosen."""
    topk_ids, topk_weights = choose_experts(router_logits, bias, config)
    weights = torch.zeros_like(router_logits, dtype=topk_weights.dtype)
    return weights.scatter(-1, topk_ids, topk_weights).to(router_logits.dtype)


def choose_experts(
    router_logits: Tensor, bias: Tensor | None, config: GPTConfig
) -> tuple[Tensor, Tensor]:
    """Return the numbers of each token's experts and their weights, both (T, experts per token).

    The weights are in at least fp32. `bias`, the router's expert bias, affects only the choice of
    the experts, not their weights. Of experts with equal scores, the one with the lowest number is
    chosen first.
    """
    compute_dtype = torch.promote_types(router_logits.dtype, torch.float32)
    logits = router_logits.to(compute_dtype)
    is_sigmoid = config.moe_router_score_function == "sigmoid"
    if is_sigmoid:
        expert_scores = logits.sigmoid()
    else:
        expert_scores = logits.softmax(-1) if config.moe_router_pre_softmax else logits
    if bias is None:
        topk_weights, topk_ids = _top_scores(expert_scores, config)
    else:
        selection_scores = expert_scores + bias.to(compute_dtype)
        _, topk_ids = _top_scores(selection_scores, config)
        topk_weights = expert_scores.gather(-1, topk_ids)
    if is_sigmoid and config.moe_router_topk > 1:
        topk_weights = topk_weights / (topk_weights.sum(-1, keepdim=True) + 1e-20)
    elif not is_sigmoid and not config.moe_router_pre_softmax:
        topk_weights = topk_weights.softmax(-1)
    factor = config.moe_router_topk_scaling_factor
    return topk_ids, topk_weights if factor == 1.0 else topk_weights * factor


def _top_scores(scores: Tensor, config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Return each token's largest scores in descending order, and their experts."""
    # A stable sort, because `torch.topk` does not define the order of equal scores, which are
    # frequent in bf16.
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    topk = config.moe_router_topk
    return values[..., :topk], ids[..., :topk]
