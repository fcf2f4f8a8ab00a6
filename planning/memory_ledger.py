"""What the fullest device holds, item by item, and whether that is too much.

A bare sum is never the gate: allocators fragment and libraries take what nobody counted, so a plan
fits up to nine tenths of the memory, is tight up to 0.97, and is not tried above.
"""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fits", "tight", "over"]

FITS_SHARE = 0.90
TIGHT_SHARE = 0.97


def tight_share(allowed: float) -> float:
    """Of the memory, where that share of it may be used: who allows less than is usual means it."""
    return TIGHT_SHARE if allowed >= FITS_SHARE else allowed


@dataclass(frozen=True)
class Ledger:
    """Bytes on the device that holds most."""

    capacity: int
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0  # Training: of the first stage, which keeps most micro-batches.
    kv: int = 0
    workspace: int = 0  # Context, communication buffers, temporary results.

    @property
    def total(self) -> int:
        parts = self.weights + self.gradients + self.optimizer
        return parts + self.activations + self.kv + self.workspace

    @property
    def verdict(self) -> Verdict:
        share = self.total / self.capacity
        return "fits" if share <= FITS_SHARE else "tight" if share <= TIGHT_SHARE else "over"
