"""The memory for keys and values: blocks of tokens, allocated once.

A pool holds the blocks of this rank's layers and KV heads. Who owns a block is not known here:
a batch says which blocks a sequence reads and which slots its new tokens fill.
"""

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.sharding import local_groups

BLOCK_TOKENS = 16


class KVPool:
    """Keys and values of `blocks` blocks, for each layer (blocks, tokens, groups, channels)."""

    def __init__(
        self,
        config: GPTConfig,
        layers: range,
        blocks: int,
        *,
        tp: int = 1,
        block_tokens: int = BLOCK_TOKENS,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = layers
        self.block_tokens = block_tokens
        groups = local_groups(config, tp)
        shape = (len(layers), 2, blocks, block_tokens, groups, config.kv_channels)
        self._memory = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a global layer."""
        keys, values = self._memory[layer - self.layers.start]
        return keys, values
