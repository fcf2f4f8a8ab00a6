"""What training keeps on the fullest GPU of a split, item by item.

The closed forms are `gpt.costs.training`; here they are put together for a stage. Layers' results
stand alone, as the literature counts them; what the embedding and the head keep, a layer that is
computed again, and what programs take for themselves are workspace.
"""

from dataclasses import dataclass

from gpt.config import GPTConfig
from gpt.costs.training import (
    Kept,
    Recompute,
    Trainable,
    edge_activation_bytes,
    layer_activation_bytes,
    layers_in_flight,
    stage_parameters,
    state_bytes,
)
from planning.hardware import Device
from planning.memory_ledger import Ledger

# A context, libraries, and the buffers of communicators.
CONTEXT_BYTES = 1_500_000_000


@dataclass(frozen=True)
class Held:
    """What a rank is to keep."""

    config: GPTConfig
    sequence: int
    batch: int
    micro_batches: int
    pp: int
    vpp: int
    recompute: Recompute
    recompute_layers: int
    kept: Kept
    adapter: int  # Parameters that learn, where the model's own do not.
    shards: int  # Ranks that share an optimizer's state.
    dtype: str

    @property
    def trainable(self) -> Trainable:
        return self.kept.trainable


def memory(held: Held, device: Device) -> Ledger:
    """Of the first stage, which keeps most micro-batches; what the last holds more is workspace."""
    first, last = _stage(held, device, 0), _stage(held, device, held.pp - 1)
    more = max(0, last.total - first.total)
    return Ledger(
        capacity=first.capacity,
        weights=first.weights,
        gradients=first.gradients,
        optimizer=first.optimizer,
        activations=first.activations,
        workspace=first.workspace + more,
    )


def _stage(held: Held, device: Device, stage: int) -> Ledger:
    parameters = stage_parameters(held.config, held.kept.tp, held.pp, stage)
    adapter = held.adapter if stage == 0 else 0
    states = state_bytes(parameters, held.trainable, adapter, held.shards, held.dtype)
    edges = edge_activation_bytes(held.config, held.batch, held.sequence, held.pp, held.kept)
    workspace = CONTEXT_BYTES + _again(held)
    workspace += edges[0] if stage == 0 else 0
    workspace += edges[1] if stage == held.pp - 1 else 0
    return Ledger(
        capacity=device.memory_bytes,
        weights=round(states.weights),
        gradients=round(states.gradients),
        optimizer=round(states.optimizer),
        activations=round(_activations(held, stage)),
        workspace=round(workspace),
    )


def _layer(held: Held, recompute: Recompute) -> float:
    return layer_activation_bytes(held.config, held.batch, held.sequence, recompute, held.kept)


def _activations(held: Held, stage: int) -> float:
    layers = held.config.num_layers
    flight = layers_in_flight(layers, held.pp, held.micro_batches, held.vpp, stage)
    if held.recompute != "block":
        return flight * _layer(held, held.recompute)
    share = held.recompute_layers / -(-layers // held.pp)
    return flight * (share * _layer(held, "full") + (1 - share) * _layer(held, "none"))


def _again(held: Held) -> float:
    """The results of one layer that is being computed again."""
    match held.recompute:
        case "none":
            return 0.0
        case "selective":
            return _layer(held, "none") - _layer(held, "selective")
        case "block" | "full":
            return _layer(held, "none")
