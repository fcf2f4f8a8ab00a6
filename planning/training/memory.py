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
from gpt.costs.linear_adapter import (
    LinearAdapterCost,
    LinearAdapterSpec,
    lowest_layer,
    stage_costs,
)
from gpt.costs.training import (
    RecomputeMode,
    Trainable,
    TrainingSetup,
    layer_widths,
    stage_parameters,
    state_bytes,
)
from gpt.parallel.pipeline_stages import stage_layers
from planning.hardware import Device
from planning.memory_ledger import MemoryLedger

# CUDA context, libraries, and NCCL buffers.
CONTEXT_BYTES = 1_500_000_000


@dataclass(frozen=True)
class RankWorkload:
    """The quantities that a rank's memory depends on."""

    config: GPTConfig
    sequence: int  # Number of tokens of a sequence that have a backward pass.
    batch: int  # Number of sequences of a micro-batch.
    micro_batches: int  # Number of micro-batches of one pipeline in one step.
    pp: int
    vpp: int
    recompute: RecomputeMode
    recompute_layers: int  # Number of recomputed layers per stage, for recompute "block".
    activation_layout: TrainingSetup
    # Number of trainable parameters of an adapter at the embeddings; 0: no such adapter.
    adapter_parameters: int
    optimizer_shards: int  # Number of ranks over which the optimizer state is sharded.
    dtype: str
    linears: LinearAdapterSpec | None = None  # The adapter weights that are trained.
    linear_adapters: int = 1  # Number of adapters with such changes.
    context: int = 0  # Number of tokens before `sequence` that have no backward pass.

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
    if workload.linears is not None:
        adapter_parameters = _linears_cost(workload, workload.linears, stage).trained
        adapter_parameters *= workload.linear_adapters
    states = state_bytes(
        parameters,
        workload.trainable,
        adapter_parameters,
        workload.optimizer_shards,
        workload.dtype,
        "" if workload.linears is None else "float32",
    )
    embedding_bytes, head_bytes = edge_activation_bytes(
        workload.config, workload.batch, workload.sequence, workload.pp, workload.activation_layout
    )
    workspace = CONTEXT_BYTES + _recompute_buffer_bytes(workload, stage)
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


def _linears_cost(
    workload: RankWorkload, linears: LinearAdapterSpec, stage: int
) -> LinearAdapterCost:
    tp = workload.activation_layout.tp
    return stage_costs(workload.config, linears, tp, workload.pp, workload.vpp)[stage]


def _backward_layers(workload: RankWorkload, stage: int) -> int:
    """Return the number of layers of a stage that have a backward pass."""
    chunks = stage_layers(workload.config.num_layers, workload.pp, vpp=workload.vpp)[stage]
    layers = [layer for chunk in chunks for layer in chunk]
    if workload.linears is None:
        return len(layers)
    lowest = lowest_layer(workload.config, workload.linears)
    return sum(layer >= lowest for layer in layers)


def _layer_activation_bytes(workload: RankWorkload, recompute: RecomputeMode, stage: int) -> float:
    """Return the activation bytes of one layer and micro-batch.

    It is the mean of the layers of a stage that have a backward pass, or 0 if there are none.
    """
    layers = _backward_layers(workload, stage)
    if not layers:
        return 0.0
    layer_bytes = layer_activation_bytes(
        workload.config,
        workload.batch,
        workload.sequence,
        recompute,
        workload.activation_layout,
    )
    if workload.linears is None:
        return layer_bytes
    layer_bytes += _context_bytes(workload, recompute)
    if recompute != "full":
        layer_bytes += _adapter_activation_bytes(workload, workload.linears, stage) / layers
    return layer_bytes


def _adapter_activation_bytes(
    workload: RankWorkload, linears: LinearAdapterSpec, stage: int
) -> float:
    """Return the bytes that changed linears keep, in all layers of a stage."""
    cost = _linears_cost(workload, linears, stage)
    activations = cost.activations_per_token
    if workload.activation_layout.flash:
        activations -= cost.attention_outputs_per_token  # `layer_activation_bytes` counts them.
    return 2 * workload.batch * workload.sequence * activations


def _context_bytes(workload: RankWorkload, recompute: RecomputeMode) -> float:
    """Return the bytes of a layer's keys and values of the tokens without a backward pass."""
    layout, w = workload.activation_layout, layer_widths(workload.config)
    context = workload.batch * workload.context
    elements = 2 * 2 * w.keys * context
    if recompute == "none" and not layout.flash:
        # The scores of the other tokens for these keys, as in `layer_activation_bytes`.
        elements += 5 * w.heads * context * workload.sequence
    return elements / layout.tp


def _activation_bytes(workload: RankWorkload, stage: int) -> float:
    num_layers = workload.config.num_layers
    in_flight_layers = layers_in_flight(
        num_layers, workload.pp, workload.micro_batches, workload.vpp, stage
    )
    stage_layer_count = -(-num_layers // workload.pp)
    if workload.linears is not None:
        in_flight_layers *= _backward_layers(workload, stage) / stage_layer_count
    if workload.recompute != "block":
        return in_flight_layers * _layer_activation_bytes(workload, workload.recompute, stage)
    recomputed_share = workload.recompute_layers / stage_layer_count
    return in_flight_layers * (
        recomputed_share * _layer_activation_bytes(workload, "full", stage)
        + (1 - recomputed_share) * _layer_activation_bytes(workload, "none", stage)
    )


def _recompute_buffer_bytes(workload: RankWorkload, stage: int) -> float:
    """Return the bytes that the activations of one layer add while the layer is recomputed."""
    match workload.recompute:
        case "none":
            return 0.0
        case "selective":
            return _layer_activation_bytes(workload, "none", stage) - _layer_activation_bytes(
                workload, "selective", stage
            )
        case "block" | "full":
            return _layer_activation_bytes(workload, "none", stage)
