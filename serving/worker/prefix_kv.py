"""Prefix KV: writes the keys and values of prefix adapters into blocks of the paged KV cache.

A prefix adapter (prefix tuning) has a prefix row for each of its virtual tokens: the keys and
values of all layers and KV heads. No forward pass computes these tokens. The scheduler allocates
blocks for them as for prompt tokens, and each rank copies the part of its own layers and KV heads
into these blocks before the forward pass. From then on these blocks are like all other blocks:
attention reads them, and the prefix cache shares them. Adapters of soft prompts have adapter rows
(embeddings) instead, which the model runner copies into the adapter pool.
"""

import torch

from gpt.attention.kv_cache import KVPool, prefix_shard
from gpt.device_transfers import to_device
from gpt.model.gpt_model import GPT
from serving.messages import PrefixKVWrite


def write_prefix_kv(pool: KVPool, model: GPT, prefix_write: PrefixKVWrite) -> None:
    """Write this rank's part (layers and KV heads) of the prefix rows in `prefix_write`."""
    mesh, model_config = model.mesh, model.config
    rows = torch.frombuffer(bytearray(prefix_write.data), dtype=torch.float32)
    rows = rows.view(prefix_write.count, model_config.prefix_width)
    own_part = prefix_shard(rows, model_config, model.layers, mesh.tp_rank, mesh.tp)
    values = to_device(own_part, mesh.device)
    start = prefix_write.start % pool.block_tokens
    for group, blocks in enumerate([prefix_write.blocks, *prefix_write.other_group_blocks]):
        pool.write_tokens(blocks, start, values, group)
