"""KV cache size: the number of KV blocks that fit into a rank's free memory after loading.

The module measures the free memory of the device, or of the host and its cgroup, and divides it
with the functions of `serving.memory_budget`, which the planner uses too.
"""

import torch

from gpt.attention.kv_cache import KV_DTYPES
from gpt.costs.inference import kv_bytes_per_token
from gpt.dtypes import FLOAT_DTYPE_NAMES
from gpt.errors import ConfigError
from gpt.host_limits import available_memory_bytes
from gpt.model.gpt_model import GPT
from serving.config import CacheConfig, SchedulerConfig
from serving.memory_budget import (
    KVBlockLayout,
    kv_cache_bytes,
    running_kv_tokens_max,
    workspace_bytes,
)
from serving.worker.cuda_graphs import graph_bytes_max


def available_kv_blocks(
    model: GPT,
    scheduler_config: SchedulerConfig,
    cache_config: CacheConfig,
    *,
    ranks_sharing_memory: int = 1,
) -> int:
    """Return the number of KV blocks that fit into this rank's memory, block 0 included.

    `ranks_sharing_memory`: the number of ranks that share this host's or device's memory, this rank
    included. The ranks may get different numbers; all of them must use the smallest one.
    """
    block_tokens, model_config = cache_config.kv_block_tokens, model.config
    dtype = cache_config.kv_dtype
    if dtype not in KV_DTYPES:
        dtype = FLOAT_DTYPE_NAMES[model.dtype]
    layout = KVBlockLayout(
        block_tokens, kv_bytes_per_token(model_config, len(model.layers), model.mesh.tp, dtype)
    )
    free_bytes = _free_bytes(model) // ranks_sharing_memory
    if cache_config.kv_tokens_max is not None:
        blocks = layout.pool_blocks(cache_config.kv_tokens_max)
        if blocks * layout.block_bytes > free_bytes:
            raise ConfigError(
                f"kv_tokens_max is {cache_config.kv_tokens_max}, for which each rank needs "
                f"{blocks * layout.block_bytes} bytes, but {free_bytes} are free; set it to at "
                f"most {layout.token_capacity(layout.blocks_within(free_bytes))}, or remove it"
            )
        return blocks
    blocks = layout.blocks_within(_kv_budget_bytes(model, scheduler_config, free_bytes))
    if model.mesh.device.type == "cpu":
        tokens_max = running_kv_tokens_max(
            scheduler_config.running_requests_max,
            model_config.max_position_embeddings,
            block_tokens,
        )
        blocks = min(blocks, layout.pool_blocks(tokens_max))
    if blocks < 2:
        raise ConfigError(
            f"the KV cache needs at least 2 blocks of {block_tokens} tokens ({layout.block_bytes} "
            f"bytes per block), but the part of the free memory that it gets by default holds only "
            f"{blocks}; stop other processes, use more ranks (tp, pp), or set kv_tokens_max, with "
            "which it can get all free memory"
        )
    return blocks


def _kv_budget_bytes(model: GPT, scheduler_config: SchedulerConfig, free_bytes: int) -> int:
    """Return the bytes of the KV pool, out of the memory that is free after loading."""
    if model.mesh.device.type == "cpu":
        # No bytes are reserved for the workspace: the KV cache takes only HOST_MEMORY_FRACTION of
        # the free memory, and the workspace fits into the remaining memory.
        return kv_cache_bytes(free_bytes, 0, on_cpu=True)
    # No bytes are reserved for the adapter rows: they are allocated after the KV pool, from the
    # memory that DEVICE_MEMORY_FRACTION leaves.
    reserved_bytes = workspace_bytes(
        model.config,
        model.dtype.itemsize,
        step_tokens_max=scheduler_config.step_tokens_max,
        logits_rows=max(scheduler_config.running_requests_max, scheduler_config.speculate_rows_max),
    )
    reserved_bytes += graph_bytes_max(model, scheduler_config)
    return kv_cache_bytes(free_bytes, reserved_bytes, on_cpu=False)


def _free_bytes(model: GPT) -> int:
    if model.mesh.device.type == "cpu":
        return available_memory_bytes()
    free, _ = torch.cuda.mem_get_info(model.mesh.device)
    return free
