"""Memory ledger of one GPU: bytes of weights, KV cache, activations and so on, and a verdict.

A plan leaves some memory free, because allocators fragment and libraries allocate memory that no
formula counts. By default a plan fits if it needs at most 0.90 of the memory, is tight up to 0.97,
and is rejected above 0.97.
"""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fits", "tight", "over"]

FITS_SHARE = 0.90
TIGHT_SHARE = 0.97


def tight_share(memory_fraction: float) -> float:
    """Return the largest share of the memory that a tight plan may use.

    The share is TIGHT_SHARE. But if the user sets `memory_fraction` below its default (FITS_SHARE),
    a tight plan may use at most `memory_fraction`.
    """
    return TIGHT_SHARE if memory_fraction >= FITS_SHARE else memory_fraction


@dataclass(frozen=True)
class MemoryLedger:
    """Bytes by purpose, on the device that needs the most memory."""

    capacity: int
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0  # Training: activations of stage 0, which stores the most micro-batches.
    kv: int = 0  # The KV cache.
    adapters: int = 0  # The memory of a server for linear adapters.
    workspace: int = 0  # CUDA context, communication buffers, temporary tensors.

    @property
    def total(self) -> int:
        training_state = self.weights + self.gradients + self.optimizer
        serving_state = self.kv + self.adapters
        return training_state + self.activations + serving_state + self.workspace

    @property
    def verdict(self) -> Verdict:
        share = self.total / self.capacity
        if share <= FITS_SHARE:
            return "fits"
        return "tight" if share <= TIGHT_SHARE else "over"
