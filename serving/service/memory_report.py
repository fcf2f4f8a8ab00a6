"""Ledger: what a server's memory is spent on, what that allows, and which limit is met first.

Said once at start, and in ServerInfo, so that nobody has to find it out by overload.
"""

from dataclasses import dataclass

from serving.config import ServerConfig


@dataclass(frozen=True)
class Ledger:
    weight_bytes: int
    kv_tokens: int
    full_context_requests: int  # That fit if each fills the model's context.
    adapter_rows: int  # On the device at once.
    binding_limit: str  # The setting that more requests at once would meet first.

    @classmethod
    def of(
        cls, config: ServerConfig, weight_bytes: int, kv_tokens: int, context_tokens: int
    ) -> "Ledger":
        full = kv_tokens // context_tokens
        return cls(
            weight_bytes,
            kv_tokens,
            full,
            config.adapter_rows_max,
            "kv_tokens_max" if full < config.running_requests_max else "running_requests_max",
        )

    def line(self) -> str:
        """As it is said at the start."""
        return (
            f"weights_mib={self.weight_bytes / 2**20:.1f} kv_tokens={self.kv_tokens} "
            f"full_context_requests={self.full_context_requests} "
            f"adapter_rows={self.adapter_rows} binding_limit={self.binding_limit}"
        )
