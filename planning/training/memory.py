"""Training memory: weights, gradients, optimizer states and activations of the fullest GPU.

The formulas are in `gpt.costs.training` and `gpt.costs.activation_memory`; this module combines
them for a pipeline stage. As in the literature, "activations" are only the stored tensors of the
layers. The workspace consists of the tensors of the embedding and the LM head, the tensors of a
layer during recomputation, and the memory of libraries.
"""

from dataclasses import dataclass

from gpt.config import GPTConfig
from gpt.costs.activation_memory import (
    edge_activation_bytes,
    layer_activation_bytes,
    layers_in_flight,
)
from gpt.costs.training import (
    RecomputeMode,
    Trainable,
    TrainingSetup,
    stage_parameters,
    state_bytes,
)
from planning.hardware import Device
from planning.memory_ledger import MemoryLedger

# CUDA context, libraries, and NCCL buffers.
CONTEXT_BYTES = 1_500_000_000


@dataclass(frozen=True)
class RankWorkload:
    """The quantities that a rank's memory depends on."""

    config: GPTConfig
    sequence: int  # Number of tokens of a sequence.
    batch: int  # Number of sequences of a micro-batch.
    micro_batches: int  # Number of micro-batches of one pipeline in one step.
    pp: int
    vpp: int
    recompute: RecomputeMode
    recompute_layers: int  # Number of recomputed layers per stage, for recompute "block".
    activation_layout: TrainingSetup
    adapter_parameters: int  # Number of trainable parameters of an adapter; 0: no adapter.
    optimizer_shards: int  # Number of ranks over which the optimizer state is sharded.
    dtype: str

    @property
    def trainable(self) -> Trainable:
        return self.activation_layout.trainable


def training_memory(workload: RankWorkload, device: Device) -> MemoryLedger:
    """Return the memory ledger of the first stage, which stores the most micro-batches.

    If the last stage needs more memory in total, the difference is added to the workspace.
    """
    first = _stage_ledger(workload, device, 0)
    last = _stage_ledger(workload, device, workload.pp - 1)
    last_stage_excess = max(0, last.total - first.total)
    return MemoryLedger(
        capacity=first.capacity,
        weights=first.weights,
        gradients=first.gradients,
        optimizer=first.optimizer,
        activations=first.activations,
        workspace=first.workspace + last_stage_excess,
    )


def _stage_ledger(workload: RankWorkload, device: Device, stage: int) -> MemoryLedger:
    parameters = stage_parameters(
        workload.config, workload.activation_layout.tp, workload.pp, stage
    )
    adapter_parameters = workload.adapter_parameters if stage == 0 else 0
    states = state_bytes(
        parameters,
        workload.trainable,
        adapter_parameters,
        workload.optimizer_shards,
        workload.dtype,
    )
    embedding_bytes, head_bytes = edge_activation_bytes(
        workload.config, workload.batch, workload.sequence, workload.pp, workload.activation_layout
    )
    workspace = CONTEXT_BYTES + _recompute_buffer_bytes(workload)
    if stage == 0:
        workspace += embedding_bytes
    if stage == workload.pp - 1:
        workspace += head_bytes
    return MemoryLedger(
        capacity=device.memory_bytes,
        weights=round(states.weights),
        gradients=round(states.gradients),
        optimizer=round(states.optimizer),
        activations=round(_activation_bytes(workload, stage)),
        workspace=round(workspace),
    )


def _layer_activation_bytes(workload: RankWorkload, recompute: RecomputeMode) -> float:
    return layer_activation_bytes(
        workload.config, workload.batch, workload.sequence, recompute, workload.activation_layout
    )


def _activation_bytes(workload: RankWorkload, stage: int) -> float:
    layers = workload.config.num_layers
    in_flight_layers = layers_in_flight(
        layers, workload.pp, workload.micro_batches, workload.vpp, stage
    )
    if workload.recompute != "block":
        return in_flight_layers * _layer_activation_bytes(workload, workload.recompute)
    recomputed_share = workload.recompute_layers / -(-layers // workload.pp)
    return in_flight_layers * (
        recomputed_share * _layer_activation_bytes(workload, "full")
        + (1 - recomputed_share) * _layer_activation_bytes(workload, "none")
    )


def _recompute_buffer_bytes(workload: RankWorkload) -> float:
    """Return the bytes that the activations of one layer add while the layer is recomputed."""
    match workload.recompute:
        case "none":
            return 0.0
        case "selective":
            return _layer_activation_bytes(workload, "none") - _layer_activation_bytes(
                workload, "selective"
            )
        case "block" | "full":
            return _layer_activation_bytes(workload, "none")
