"""Memory budget of a serving rank: the bytes of its KV cache and workspace, and its KV blocks.

A rank sizes its KV pool (`serving.worker.kv_cache_size`) with these functions from the memory that
is free after loading. The planner predicts the size with the same functions from the memory size of
a device. A rank on a device measures the memory of a step (`serving.worker.memory_profile`); the
planner estimates it (`workspace_bytes`). The module does not import torch.
"""

from dataclasses import dataclass

from gpt.config import GPTConfig
from gpt.errors import ConfigError

# Default tokens per KV block. `gpt.attention.kv_cache.BLOCK_TOKENS` (32) is the block size of
# generation and tuning without a server.
KV_BLOCK_TOKENS = 16
# Default size of the memory for the adapters' weights on each rank, and its unit.
ADAPTER_MEMORY_MB = 256
ADAPTER_PAGE_BYTES = 4096
ADAPTER_ROWS_MAX = 4096  # Default size of the adapter row pool, in virtual tokens.
# Logits for prompt scores are computed in chunks of at most this many bytes.
SCORED_BYTES_MAX = 64 << 20
# Sampling and scoring hold up to this many fp32 copies of the logits.
LOGITS_COPIES_MAX = 4
# Fraction of a host's free memory for the KV pools of all its ranks. The remaining memory is for
# the workspace, the page cache and other processes.
HOST_MEMORY_FRACTION = 0.25
# Fraction of a device's free memory for the KV pools, the steps and the CUDA graphs of its ranks
# together (`kv_cache_bytes`). The remaining memory is for fragmentation of torch's allocator, and
# for what libraries allocate later.
DEVICE_MEMORY_FRACTION = 0.9


@dataclass(frozen=True)
class KVBlockLayout:
    """The size of one rank's KV blocks. Every KV pool has a block 0, which no sequence uses."""

    block_tokens: int
    # Summed over the KV heads, and over the rank's layers in one KV group (gpt/kv_groups.py).
    bytes_per_token: int
    # KV groups. A token has a block in each of them, until the block is behind the group's window.
    groups: int = 1

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.bytes_per_token

    def pool_blocks(self, tokens: int) -> int:
        """Return the number of blocks, block 0 included, of a pool for `tokens` tokens.

        No block is assumed to be behind a window.
        """
        return self.groups * -(-tokens // self.block_tokens) + 1

    def blocks_within(self, kv_bytes: int) -> int:
        """Return the number of blocks that fit into `kv_bytes` bytes."""
        return kv_bytes // self.block_bytes

    def token_capacity(self, blocks: int) -> int:
        """Return the number of tokens that fit into a pool. `blocks` includes block 0."""
        return max(0, blocks - 1) // self.groups * self.block_tokens


def kv_cache_bytes(memory_bytes: int, reserved_bytes: int, *, on_cpu: bool) -> int:
    """Return the bytes of a rank's default KV cache.

    - On a CPU: HOST_MEMORY_FRACTION * (memory_bytes - reserved_bytes), because other processes and
      the page cache need memory too.
    - On a device: DEVICE_MEMORY_FRACTION * memory_bytes - reserved_bytes.

    `memory_bytes`: the rank's free memory after loading; in the planner, its total memory.
    `reserved_bytes`: what must fit beside the KV cache. For a server on a device, this is the
    measured memory of the largest step and the CUDA graphs; on a CPU, it is 0. In the planner, it
    is the weights and the workspace.
    """
    if on_cpu:
        return int(HOST_MEMORY_FRACTION * max(0, memory_bytes - reserved_bytes))
    return max(0, int(DEVICE_MEMORY_FRACTION * memory_bytes) - reserved_bytes)


def running_kv_tokens_max(running_requests_max: int, context_tokens: int, block_tokens: int) -> int:
    """Return the KV tokens of `running_requests_max` requests that each fill their context.

    Each context is rounded up to whole blocks. The default KV cache on a CPU has at most this
    capacity, because more blocks would only extend the prefix cache, at the expense of the page
    cache.
    """
    return running_requests_max * -(-context_tokens // block_tokens) * block_tokens


def workspace_bytes(
    model_config: GPTConfig,
    dtype_bytes: int,
    *,
    step_tokens_max: int,
    logits_rows: int,
    adapter_rows: int = 0,
) -> int:
    """Estimate the bytes of a step's temporary tensors and of `adapter_rows` adapter rows.

    The temporary tensors are the hidden states of `step_tokens_max` tokens, the logits of
    `logits_rows` rows and the logits of scored prompts. Attention scores need no bytes of their
    own, because they are freed before the logits are computed.
    """
    activation_width = 8 * model_config.hidden_size + 3 * model_config.ffn_hidden_size
    activation_bytes = 2 * step_tokens_max * activation_width * dtype_bytes
    logits_bytes = LOGITS_COPIES_MAX * 4 * logits_rows * model_config.vocab_size
    scored_bytes = LOGITS_COPIES_MAX * SCORED_BYTES_MAX
    adapter_bytes = adapter_rows * model_config.hidden_size * dtype_bytes
    return activation_bytes + logits_bytes + scored_bytes + adapter_bytes


def check_step_tokens(running_requests_max: int, step_tokens_max: int) -> None:
    """Raise ConfigError if a step's token budget is less than the number of running requests."""
    if running_requests_max > step_tokens_max:
        raise ConfigError(
            f"running_requests_max is {running_requests_max}, but a step has only "
            f"{step_tokens_max} tokens (step_tokens_max) and each running request needs one; "
            "raise step_tokens_max or lower running_requests_max"
        )
