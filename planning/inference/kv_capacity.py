"""KV cache capacity: number of requests, and length of a request, that fit in a KV cache.

The size of a KV cache, like the server's `kv_tokens_max`, is its number of tokens with full
attention. In a model with windows, more tokens fit, because the server frees the blocks behind the
windows. The counts of blocks are those of the server's scheduler. The module does not import torch.
"""

from functools import lru_cache

from gpt.config import GPTConfig
from gpt.kv_groups import UNLIMITED_TOKENS, SequenceBlocks, kv_groups
from serving.memory_budget import KV_BLOCK_TOKENS


@lru_cache(maxsize=64)
def sequence_blocks(model: GPTConfig) -> SequenceBlocks:
    return SequenceBlocks(tuple(group.window for group in kv_groups(model)), KV_BLOCK_TOKENS)


def requests_that_fit(model: GPTConfig, kv_tokens: int, request_tokens: int) -> int:
    """Return the number of requests with `request_tokens` tokens that the KV cache holds at once.

    The requests decode. The keys and values of the last token of a request are not computed.
    """
    blocks = sequence_blocks(model)
    return blocks.count(kv_tokens, 0) // blocks.count_max(max(1, request_tokens - 1), 1)


def request_tokens_max(model: GPTConfig, kv_tokens: int) -> int:
    """Return the largest number of tokens of a request that the server accepts."""
    blocks = sequence_blocks(model)
    tokens_max = blocks.tokens_max(blocks.count(kv_tokens, 0))
    return UNLIMITED_TOKENS if tokens_max is None else tokens_max + 1


def kv_tokens_for_requests(
    model: GPTConfig, requests: int, request_tokens: int, step_tokens_max: int = 1
) -> int:
    """Return the size of a KV cache for `requests` requests with `request_tokens` tokens.

    Each request has one more block to grow into, and one of them has a prefill chunk.
    """
    blocks = sequence_blocks(model)
    tokens = request_tokens + KV_BLOCK_TOKENS
    prefill_blocks = blocks.count_max(tokens, step_tokens_max) - blocks.count_max(tokens, 1)
    total_blocks = requests * blocks.count_max(tokens, 1) + prefill_blocks
    return -(-total_blocks // len(blocks.windows)) * KV_BLOCK_TOKENS
