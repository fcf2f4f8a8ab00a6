"""Adapter memory: sizes of linear adapters in a server's memory, and the adapters that fit.

A server on a GPU reserves its adapter memory (`adapter_memory_mb`) at the start; on a CPU it uses
the pages that adapters have needed. A running sequence holds its adapter in it until it ends. The
sizes in pages are those of the server's scheduler. The module does not import torch.
"""

from dataclasses import dataclass

from gpt.config import DTYPE_BYTES, GPTConfig
from gpt.costs.linear_adapter import LinearAdapterSpec, served_bytes
from planning.inference.model_split import ModelSplit
from serving.memory_budget import ADAPTER_MEMORY_MB, ADAPTER_PAGE_BYTES


@dataclass(frozen=True)
class ServedAdapters:
    """The linear adapters that the requests of a load use."""

    spec: LinearAdapterSpec
    count: int = 1  # Each request chooses one of them at random.
    # Maximum number of different adapters in use at the same time, if the choice is not random;
    # None: no maximum.
    distinct_max: int | None = None

    def distinct(self, requests: float) -> float:
        """Return the mean number of different adapters of `requests` requests."""
        drawn = float(self.count * (1 - (1 - 1 / self.count) ** requests))
        return min(drawn, requests, self.distinct_max or drawn)

    def resident(self, running_requests_max: int) -> int:
        """Return the number of adapters that all running requests together may hold in memory."""
        return min(self.count, running_requests_max, self.distinct_max or self.count)

    def rank_bytes(self, model: GPTConfig, dtype: str, split: ModelSplit) -> int:
        """Return the bytes of one adapter on the rank that needs the most, in whole pages."""
        nbytes = served_bytes(model, self.spec, split.tp, split.pp, DTYPE_BYTES[dtype], split.ep)
        return -(-nbytes // ADAPTER_PAGE_BYTES) * ADAPTER_PAGE_BYTES

    def memory_mb(self, model: GPTConfig, dtype: str, split: ModelSplit, count: int) -> int:
        """Return the smallest `adapter_memory_mb` that holds `count` adapters."""
        return -(-count * self.rank_bytes(model, dtype, split) // 1_000_000)

    def capacity(
        self, model: GPTConfig, dtype: str, split: ModelSplit, memory_mb: int = ADAPTER_MEMORY_MB
    ) -> int:
        """Return the number of adapters that `adapter_memory_mb` holds."""
        memory_pages = memory_mb * 1_000_000 // ADAPTER_PAGE_BYTES
        return memory_pages // (self.rank_bytes(model, dtype, split) // ADAPTER_PAGE_BYTES)


def server_memory_mb(planned_mb: int | None) -> int:
    """Return the server's `adapter_memory_mb`: the planned size, or the default if it is larger."""
    return max(ADAPTER_MEMORY_MB, planned_mb or 0)
