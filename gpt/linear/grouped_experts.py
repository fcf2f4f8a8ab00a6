"""Grouped experts: an experts backend that computes all experts of an MoE layer in two matmuls.

The rows are sorted by expert, and a grouped matmul multiplies each group of rows by the weight of
its expert: torch's, or for few rows a Triton kernel (gpt/linear/triton_experts.py). The offsets of
the groups stay on the device, so the host never waits, and no shape depends on values. The weights
of all experts are stacked in one tensor; the experts' parameters become views of it. `TorchExperts`
in gpt/model/moe.py is the reference.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.config import GPTConfig
from gpt.linear.norm_activation import activate_rows
from gpt.linear_adapter import AdaptedRows
from gpt.model.activation import activation_name
from gpt.model.gpt_model import GPT
from gpt.model.linear import Linear
from gpt.model.mlp import MLP
from gpt.model.moe import ExpertsBackend, MoELayer, TorchExperts, choose_experts, router_bias
from gpt.parallel.mesh import Mesh
from gpt.triton_runtime.availability import triton_unavailable_reason

DTYPE = torch.bfloat16  # The only dtype of torch's grouped kernel.
ALIGNMENT = 8  # Rows of the weights must have a multiple of 16 bytes.
EXPERTS_MAX = 1023
# The mean number of pairs of a token and an expert, by expert, up to which Triton kernels compute
# the experts. On an H100 they are faster than torch up to a mean of 16, and slower with 64.
TRITON_PAIRS_PER_EXPERT = 16
# The major compute capabilities with a grouped kernel (Hopper, Blackwell). On other GPUs, torch
# reads the offsets on the host, and multiplies one group after the other.
CAPABILITY_MAJORS = (9, 10)


class GroupedExperts(ExpertsBackend):
    """Computes the experts of one layer in inference, from their stacked parameters."""

    is_capturable = True

    def __init__(
        self, experts: dict[int, MLP], router: nn.Module, config: GPTConfig, mesh: Mesh
    ) -> None:
        """Stack the parameters of `experts`, which become views.

        `experts`: this rank's, by their global numbers, which are consecutive.
        """
        super().__init__(mesh)
        self._reference = TorchExperts(experts, router, config, mesh)
        self._router = router
        self._config = config
        activation = activation_name(config)
        assert activation is not None, "fused_linear.unsupported_reason refuses these activations"
        self._activation = activation
        self._fc1_weight, self._fc1_bias = _stack_linears(
            [mlp.linear_fc1 for mlp in experts.values()]
        )
        self._fc2_weight, fc2_bias = _stack_linears([mlp.linear_fc2 for mlp in experts.values()])
        # Several ranks may hold parts of the same expert; one of them adds the biases.
        self._added_fc2_bias = fc2_bias if mesh.in_stage.expert_tp_rank == 0 else None
        self._first_expert = min(experts)
        self._has_all_experts = len(experts) == config.num_experts
        self._local_ids = torch.arange(len(experts), device=self._fc1_weight.device)

    def sum_experts(self, x: Tensor, router_logits: Tensor) -> Tensor:
        in_triton = self._is_faster_in_triton(x)
        compute = self._compute_in_triton if in_triton else self._compute_in_torch
        weights, outputs = compute(x, router_logits)
        return torch.bmm(weights.unsqueeze(1), outputs.view(*weights.shape, -1)).squeeze(1)

    def sum_adapted_experts(
        self, x: Tensor, router_logits: Tensor, adapted_rows: Sequence[AdaptedRows]
    ) -> Tensor:
        return self._reference.replace_adapted_rows(self, x, router_logits, adapted_rows)

    def compile_kernels(self) -> None:
        """Compile all Triton kernels of the layer, so that no step of a request compiles one."""
        from gpt.linear import triton_experts

        experts, hidden_size = self._config.num_experts, self._config.hidden_size
        pairs = triton_experts.FEW_PAIRS_PER_EXPERT * experts + 1
        for tokens in (1, -(-pairs // self._config.moe_router_topk)):
            x = self._fc1_weight.new_zeros(tokens, hidden_size)
            self._compute_in_triton(x, x.new_zeros(tokens, experts))

    def _is_faster_in_triton(self, x: Tensor) -> bool:
        pairs = len(x) * self._config.moe_router_topk
        return pairs <= TRITON_PAIRS_PER_EXPERT * self._config.num_experts and _has_triton(x.device)

    def _compute_in_triton(self, x: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what `_compute_in_torch` computes, in four launches."""
        from gpt.linear import triton_experts

        ids, weights = triton_experts.choose_experts(
            router_logits, router_bias(self._router), self._config
        )
        order, group_ends = triton_experts.sort_by_expert(
            self._local_numbers(ids), len(self._local_ids)
        )
        hidden = triton_experts.project_tokens(
            x, self._fc1_weight, self._fc1_bias, order, group_ends, self._activation
        )
        outputs = triton_experts.project_sorted_rows(
            hidden,
            self._fc2_weight,
            self._added_fc2_bias,
            order,
            group_ends,
            has_all_pairs=self._has_all_experts,
        )
        return weights, outputs

    def _compute_in_torch(self, x: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts, (T, experts per token), and their outputs.

        The outputs have a row for each pair of a token and one of its experts. The rows of other
        ranks' experts are zero.
        """
        topk_ids, weights = choose_experts(router_logits, router_bias(self._router), self._config)
        # A stable sort: the rows of an expert keep their order, as in the reference. The pairs of
        # other ranks' experts come after the last group.
        ids, order = self._local_numbers(topk_ids.flatten()).sort(stable=True)
        group_ends = torch.searchsorted(ids, self._local_ids, right=True, out_int32=True)
        is_remote = ids >= len(self._local_ids)
        ids = ids.clamp(max=len(self._local_ids) - 1)
        hidden = F.grouped_mm(
            x.index_select(0, order // topk_ids.shape[1]),
            self._fc1_weight.transpose(1, 2),
            offs=group_ends,
        )
        if self._fc1_bias is not None:
            hidden = hidden + self._fc1_bias.index_select(0, ids)
        hidden = activate_rows(hidden, self._activation)
        y = F.grouped_mm(hidden, self._fc2_weight.transpose(1, 2), offs=group_ends)
        if self._added_fc2_bias is not None:
            y = y + self._added_fc2_bias.index_select(0, ids)
        if not self._has_all_experts:
            # The grouped matmul writes no row after the last group.
            y = y.masked_fill(is_remote.unsqueeze(1), 0)
        # Each index of `order` occurs once, so the copy needs no atomics and is deterministic.
        return weights.to(x.dtype), torch.empty_like(y).index_copy_(0, order, y)

    def _local_numbers(self, ids: Tensor) -> Tensor:
        """Return the experts' numbers among this rank's; larger numbers are of other ranks."""
        if self._has_all_experts:
            return ids
        return (ids - self._first_expert) % self._config.num_experts


def group_experts(layer: MoELayer) -> None:
    """Make grouped matmuls compute the experts of a layer.

    The memory of the unstacked parameters is returned to the device, so at most one layer's
    experts are in memory twice.
    """
    backend = GroupedExperts(layer.local_experts, layer.router, layer.config, layer.mesh)
    if _has_triton(layer.mesh.device):
        backend.compile_kernels()
    layer.use_experts_backend(backend)
    if layer.mesh.device.type == "cuda":
        torch.cuda.empty_cache()


def unsupported_reason(model: GPT) -> str | None:
    """Return why grouped matmuls cannot compute the experts of this model; None if they can."""
    return unsupported_model_reason(model) or unsupported_device_reason(model.mesh.device)


def unsupported_model_reason(model: GPT) -> str | None:
    """Return why the grouped kernel does not support the dtype or the shapes of a model."""
    if model.dtype != DTYPE:
        return f"the model's dtype is {model.dtype}; grouped matmuls need bfloat16"
    config = model.config
    if config.num_experts > EXPERTS_MAX:
        return f"the model has {config.num_experts} experts; a grouped matmul has {EXPERTS_MAX}"
    for layer in model.decoder_layers:
        if isinstance(layer.mlp, MoELayer):
            expert = next(iter(layer.mlp.local_experts.values()))
            for weight in (expert.linear_fc1.weight, expert.linear_fc2.weight):
                if any(size % ALIGNMENT for size in weight.shape):
                    shape = " x ".join(map(str, weight.shape))
                    return (
                        f"each expert has a {shape} weight on a rank; grouped matmuls need "
                        f"multiples of {ALIGNMENT}"
                    )
    return None


@cache
def unsupported_device_reason(device: torch.device) -> str | None:
    """Return why a device has no grouped kernel; None if a test matmul is correct."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in CAPABILITY_MAJORS:
        return f"the GPU's compute capability is {major}.{minor}; grouped matmuls need 9.0 or 10.0"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=generator).to(device, DTYPE)
    weights = torch.randn(3, 32, 64, generator=generator).to(device, DTYPE)
    group_ends = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
    try:
        product = F.grouped_mm(x, weights.transpose(1, 2), offs=group_ends)
    except RuntimeError as error:
        reason = (str(error).splitlines() or ["no message"])[0]
        return f"a test matmul raised an error in torch {torch.__version__} ({reason})"
    reference = torch.cat(
        [x[:2].float() @ weights[0].float().t(), x[2:].float() @ weights[2].float().t()]
    )
    error_max = float((product - reference).abs().max())
    # An output is a sum of 64 products of magnitudes around 1, rounded to bf16.
    return None if error_max < 0.25 else f"a test matmul had an error of {error_max:.3g}"


def _has_triton(device: torch.device) -> bool:
    return device.type == "cuda" and triton_unavailable_reason(device) is None


def _stack_linears(linears: list[Linear]) -> tuple[Tensor, Tensor | None]:
    """Stack the weights and the biases; without biases, the second tensor is None."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return _stack([linear.weight for linear in linears]), _stack(biases) if biases else None


def _stack(parameters: list[Tensor]) -> Tensor:
    """Return one tensor of all parameters; each parameter becomes a view of it."""
    stacked = parameters[0].new_empty(len(parameters), *parameters[0].shape)
    for values, parameter in zip(stacked, parameters, strict=True):
        values.copy_(parameter.detach())
        parameter.data = values
    return stacked
