"""Gradient reduction over ranks after a step's backward passes (Megatron's finalize_model_grads).

The replication of a trainable tensor over the ranks determines the reductions of its gradient:

- A replica's gradient may cover only the rank's own tokens (sequence parallelism), attention heads,
  MLP channels or experts' biases. Such gradients are summed over the tensor-parallel ranks.
- If there are fewer KV heads than tensor-parallel ranks, a KV head has replicas. The gradients of
  its keys and values are summed over the ranks that have the KV head.
- The gradients of a word embedding that is tied to the output layer are summed over the first and
  the last pipeline stage.
- All gradients are summed over the data-parallel ranks.

Only this module records how each tensor is replicated over the ranks. It also computes the gradient
norm, in which each set of replicas counts once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.bottleneck_adapter import TENSOR_PREFIX
from gpt.config import GPTConfig
from gpt.linear_parts import LOCAL_EXPERTS
from gpt.model.gpt_model import GPT
from gpt.parallel.adaptable_linears import AdaptableLinear
from gpt.parallel.collectives import sum_over_expert_ranks
from gpt.parallel.mesh import Mesh
from gpt.parallel.pipeline_communication import receive_from_stage, send_to_stage
from gpt.parallel.weight_sharding import ShardRule, parameter_specs
from ptuning.linears.trainable_linears import TrainableLinears

WORD_EMBEDDING = "embedding.word_embeddings.weight"
# With sequence parallelism, a rank's gradient of these replicated parameters covers only the rank's
# own tokens.
SEQUENCE_PARALLEL_SUFFIXES = (
    "norm_weight",
    "norm_bias",
    "layernorm.weight",
    "layernorm.bias",
    "linear_proj.bias",
    "linear_fc2.bias",
    "router.weight",
    "gate_weight",
)
# A rank's gradient of these replicated parameters covers only the rank's own attention heads, or
# its own channels of the MLP.
PARTIAL_SUFFIXES = (
    "q_layernorm.weight",
    "q_layernorm.bias",
    "k_layernorm.weight",
    "k_layernorm.bias",
    "activation_func.alpha_p",
    "activation_func.alpha_n",
)
# Pre-training updates the expert bias by expert load, not by gradients, so it is not trained here.
# The other parameters are constants of the activation xIELU.
UNTRAINED_SUFFIXES = ("expert_bias", "activation_func.beta", "activation_func.eps")


class Replication(Enum):
    """How a tensor is distributed over the tensor-parallel ranks."""

    SPLIT = "each rank has its own shard"
    KV_GROUPS = "a QKV weight: sharded queries, replicated keys and values (fewer KV heads than tp)"
    KV_HEADS = "keys and values only, replicated (fewer KV heads than tp)"
    REPLICATED = "replicas with equal gradients"
    PARTIAL = "replicas, each with the gradient of its own tokens, heads, channels or biases"
    EXPERT_PARTIAL = "as PARTIAL, on the ranks that share an expert (fewer than tp)"


@dataclass(frozen=True)
class TrainableTensor:
    """A trainable tensor of this rank, in the dtype of the forward pass."""

    name: str
    value: Tensor
    replication: Replication
    # Whether this is the last pipeline stage's copy of the tied embedding. The gradient norm counts
    # only the first stage's copy.
    is_tied_copy: bool = False
    rate_factor: float = 1.0  # The learning rate of the tensor is this multiple of its group's.
    # Index of the task group that trains the tensor (`TuneConfig.task_groups`). The gradients of a
    # group have a norm of their own.
    group: int = 0


def trainable_encoder_tensors(
    named_parameters: Iterable[tuple[str, Tensor]], split_names: Iterable[str]
) -> list[TrainableTensor]:
    """Return a prompt encoder's parameters as trainable tensors.

    `split_names` are the parameters that are sharded over the tensor-parallel ranks.
    """
    split_set = set(split_names)
    return [
        TrainableTensor(
            name, value, Replication.SPLIT if name in split_set else Replication.REPLICATED
        )
        for name, value in named_parameters
    ]


def trainable_prefix_tensors(
    named_parameters: Iterable[tuple[str, Tensor]], config: GPTConfig, mesh: Mesh
) -> list[TrainableTensor]:
    """Return a prefix's parameters, the keys and values of this rank, as trainable tensors."""
    replication = Replication.KV_HEADS if config.num_query_groups < mesh.tp else Replication.SPLIT
    return [TrainableTensor(name, value, replication) for name, value in named_parameters]


def trainable_linear_tensors(
    linears: TrainableLinears, config: GPTConfig, mesh: Mesh, lora_plus_ratios: Sequence[float]
) -> list[TrainableTensor]:
    """Return the adapter weights of this rank as trainable tensors; each task is a group.

    `lora_plus_ratios`: for each task, the learning rate of the matrices B, as a multiple of the
    others'.
    """
    return [
        TrainableTensor(
            parameter_name,
            value,
            _linear_replication(linear.linear, linear.part, name, config, mesh),
            rate_factor=lora_plus_ratios[linear.task] if name == "lora_b" else 1.0,
            group=linear.task,
        )
        for parameter_name, linear, name, value in linears.named_tensors()
    ]


def _linear_replication(
    linear: AdaptableLinear, part: str, tensor_name: str, config: GPTConfig, mesh: Mesh
) -> Replication:
    """Return how a tensor of the change of a linear is distributed over the tensor ranks.

    A tensor of the side that the base weight does not split is whole on each rank. A rank's
    gradient of it covers only the rank's own output columns (A) or input channels (B and the
    factors of the outputs of a row-parallel linear, which are applied before the sum). A bottleneck
    is applied after the sum, to all rows, or with sequence parallelism to the rank's own rows.
    """
    if tensor_name.startswith(TENSOR_PREFIX):
        return Replication.PARTIAL if mesh.sequence_parallel else Replication.REPLICATED
    is_input = tensor_name in ("lora_a", "input_scale")
    if linear.is_row_parallel != is_input:
        if linear.expert is None or mesh.ep == 1:
            return Replication.PARTIAL
        return Replication.EXPERT_PARTIAL
    has_kv_replicas = linear.rule is ShardRule.QKV and config.num_query_groups < mesh.tp
    if not has_kv_replicas or part == "query":
        return Replication.SPLIT
    return Replication.KV_HEADS if part else Replication.KV_GROUPS


def trainable_model_tensors(chunks: Sequence[GPT]) -> list[TrainableTensor]:
    """Set requires_grad on this rank's model parameters; return them as trainable tensors.

    The parameters of `UNTRAINED_SUFFIXES` are omitted.
    """
    config, mesh = chunks[0].config, chunks[0].mesh
    is_tied = mesh.pp > 1 and not config.untie_embeddings_and_output_weights
    parameter_table, trainables = parameter_specs(config), []
    for chunk in chunks:
        for name, value in chunk.named_parameters():
            if name.endswith(UNTRAINED_SUFFIXES):
                continue
            value.requires_grad_()
            is_tied_copy = is_tied and name == WORD_EMBEDDING and chunk.is_last_stage
            replication = _replication(name, parameter_table[name].shard_rule, config, mesh)
            trainables.append(TrainableTensor(name, value, replication, is_tied_copy))
    return trainables


def reduce_gradient(
    trainable: TrainableTensor, grad: Tensor, model_config: GPTConfig, mesh: Mesh
) -> None:
    """Reduce `grad`, this rank's gradient of a trainable tensor, over the ranks in place.

    All ranks that have the tensor must call this function together.
    """
    if trainable.replication is Replication.PARTIAL and mesh.tp > 1:
        _all_reduce(grad, mesh, mesh.tp_group)
    if trainable.replication is Replication.EXPERT_PARTIAL and mesh.in_stage.expert_tp > 1:
        grad.copy_(sum_over_expert_ranks(grad, mesh))
    if trainable.replication in (Replication.KV_GROUPS, Replication.KV_HEADS):
        _sum_kv_replicas(_replicated_rows(trainable, grad, model_config), model_config, mesh)
    if (
        trainable.name == WORD_EMBEDDING
        and mesh.pp > 1
        and not model_config.untie_embeddings_and_output_weights
    ):
        _sum_tied_embedding(grad, mesh)
    if mesh.dp > 1:
        _all_reduce(grad, mesh, mesh.dp_group)


def squared_norm_share(
    trainable: TrainableTensor, grad: Tensor, model_config: GPTConfig, mesh: Mesh
) -> float:
    """Return this rank's share of the squared norm of a reduced gradient.

    The shares of all ranks sum to the squared norm, in which replicas count once.
    """
    if mesh.dp_rank or trainable.is_tied_copy:
        return 0.0
    if trainable.replication in (Replication.REPLICATED, Replication.PARTIAL) and mesh.tp_rank:
        return 0.0
    if trainable.replication is Replication.EXPERT_PARTIAL and mesh.in_stage.expert_tp_rank:
        return 0.0
    squares = float(grad.double().square().sum())
    if trainable.replication in (Replication.KV_GROUPS, Replication.KV_HEADS):
        replicated_squares = float(
            _replicated_rows(trainable, grad, model_config).double().square().sum()
        )
        # A KV head has tp / num_query_groups replicas, so each rank counts only the share
        # num_query_groups / tp of the squares of its replica.
        squares -= replicated_squares * (1 - model_config.num_query_groups / mesh.tp)
    return squares


def _replication(name: str, shard_rule: ShardRule, config: GPTConfig, mesh: Mesh) -> Replication:
    if config.num_query_groups < mesh.tp and shard_rule is ShardRule.QKV:
        return Replication.KV_GROUPS
    if config.num_query_groups < mesh.tp and shard_rule is ShardRule.KV_HEADS:
        return Replication.KV_HEADS
    if shard_rule is not ShardRule.REPLICATED:
        return Replication.SPLIT
    covers_own_tokens = mesh.sequence_parallel and name.endswith(SEQUENCE_PARALLEL_SUFFIXES)
    covers_own_part = name.endswith(PARTIAL_SUFFIXES)
    # One rank adds the bias of an expert, so the gradients of the other ranks are zero.
    is_added_once = LOCAL_EXPERTS in name and name.endswith("linear_fc2.bias")
    is_partial = covers_own_tokens or covers_own_part or is_added_once
    return Replication.PARTIAL if is_partial else Replication.REPLICATED


def _all_reduce(grad: Tensor, mesh: Mesh, group: dist.ProcessGroup | None) -> None:
    buffer = grad.cpu() if mesh.stages_through_host else grad
    dist.all_reduce(buffer, group=group)
    if buffer is not grad:
        grad.copy_(buffer)


def _replicated_rows(trainable: TrainableTensor, grad: Tensor, model_config: GPTConfig) -> Tensor:
    """Return the part of a gradient that belongs to replicated keys and values.

    For KV_HEADS, this is the whole gradient. For a QKV weight (KV_GROUPS), it is the last rows: the
    key and the value of the rank's only KV head.
    """
    return (
        grad
        if trainable.replication is Replication.KV_HEADS
        else grad[-2 * model_config.kv_channels :]
    )


def _sum_kv_replicas(grad: Tensor, model_config: GPTConfig, mesh: Mesh) -> None:
    """Sum the gradients of a KV head over its replicas.

    The gradient of a replica covers only the queries of its rank.
    """
    ranks_per_kv_head = mesh.tp // model_config.num_query_groups
    buffer = (grad.cpu() if mesh.stages_through_host else grad).contiguous()
    gathered = [torch.empty_like(buffer) for _ in range(mesh.tp)]
    dist.all_gather(gathered, buffer, group=mesh.tp_group)
    first_rank = mesh.tp_rank // ranks_per_kv_head * ranks_per_kv_head
    grad.copy_(torch.stack(gathered[first_rank : first_rank + ranks_per_kv_head]).sum(0))


def _sum_tied_embedding(grad: Tensor, mesh: Mesh) -> None:
    """Sum the gradients of a tied embedding over the first and the last pipeline stage."""
    other_stage = mesh.pp - 1 if mesh.pp_rank == 0 else 0
    shape, dtype = tuple(grad.shape), grad.dtype
    if mesh.pp_rank == 0:
        send_to_stage(grad, mesh, other_stage)
        grad += receive_from_stage(shape, dtype, mesh, other_stage)
    else:
        received = receive_from_stage(shape, dtype, mesh, other_stage)
        send_to_stage(grad, mesh, other_stage)
        grad += received
