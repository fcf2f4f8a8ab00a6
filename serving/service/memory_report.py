"""Memory report: sizes of weights, KV cache and adapter rows, and the limit reached first.

The report is logged once at start, and is part of the response of GetServerInfo, so that an
operator can see the limit before an overload.
"""

from dataclasses import dataclass

from serving.config import CacheConfig, SchedulerConfig


@dataclass(frozen=True)
class MemoryReport:
    """Memory sizes of a server, and the setting that limits its concurrent requests."""

    weight_bytes: int
    kv_tokens: int
    # Requests that fit in the KV cache if each fills the context; blocks behind a window are free.
    full_context_requests: int
    # Number of adapter rows (one row for each virtual token) that fit on the device at once.
    adapter_rows: int
    binding_limit: str  # The setting that limits concurrent full-context requests.
    step_bytes: int = 0  # `Ready.step_bytes`.

    @classmethod
    def build(
        cls,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        weight_bytes: int,
        kv_tokens: int,
        full_context_requests: int,
        step_bytes: int = 0,
    ) -> "MemoryReport":
        return cls(
            weight_bytes,
            kv_tokens,
            full_context_requests,
            cache_config.adapter_rows_max,
            "kv_tokens_max"
            if full_context_requests < scheduler_config.running_requests_max
            else "running_requests_max",
            step_bytes,
        )

    def log_line(self) -> str:
        """Return the fields of the log line `ready`."""
        return (
            f"weights_mib={self.weight_bytes / 2**20:.1f} kv_tokens={self.kv_tokens} "
            f"full_context_requests={self.full_context_requests} "
            f"adapter_rows={self.adapter_rows} binding_limit={self.binding_limit}"
        )
