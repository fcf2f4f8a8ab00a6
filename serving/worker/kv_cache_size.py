"""KV cache size: the number of KV blocks that fit into a rank's free memory after loading.

On a device, `serving.worker.memory_profile` measures the memory of the largest steps; the KV cache
gets a part of the memory that they leave. On a CPU the module measures the free memory of the host
and its cgroup. The parts are those of `serving.memory_budget`, which the planner uses too.
"""

import logging
from dataclasses import dataclass

from gpt.attention.kv_cache import KV_DTYPES
from gpt.costs.inference import kv_bytes_per_token
from gpt.dtypes import FLOAT_DTYPE_NAMES
from gpt.errors import ConfigError
from gpt.host_limits import available_memory_bytes
from gpt.kv_groups import kv_groups, layers_per_block
from gpt.model.gpt_model import GPT
from serving.config import CacheConfig, SchedulerConfig
from serving.memory_budget import KVBlockLayout, kv_cache_bytes, running_kv_tokens_max
from serving.worker.cuda_graphs import graph_bytes_max
from serving.worker.memory_profile import profile_step_memory

log = logging.getLogger(__name__)

# The settings that can be lowered to reduce the memory of a step.
STEP_SETTINGS = (
    "step_tokens_max, running_requests_max, speculate_rows_max, adapter_rows_max, adapter_memory_mb"
)


@dataclass(frozen=True)
class KVCacheSize:
    """The KV blocks of a rank, and the memory of its largest step."""

    blocks: int  # Block 0 included.
    step_bytes: int = 0  # 0 on a CPU, where it is not measured.


def available_kv_blocks(
    model: GPT,
    scheduler_config: SchedulerConfig,
    cache_config: CacheConfig,
    *,
    ranks_sharing_memory: int = 1,
) -> int:
    """Return the number of KV blocks that fit into this rank's memory, block 0 included.

    On a device this runs the largest steps, with collectives, so all ranks must call this together.
    `ranks_sharing_memory`: the number of ranks that share this host's or device's memory, this rank
    included. The ranks may get different numbers; all of them must use the smallest one.
    """
    return size_kv_cache(
        model, scheduler_config, cache_config, ranks_sharing_memory=ranks_sharing_memory
    ).blocks


def size_kv_cache(
    model: GPT,
    scheduler_config: SchedulerConfig,
    cache_config: CacheConfig,
    *,
    ranks_sharing_memory: int = 1,
) -> KVCacheSize:
    """Return the result of `available_kv_blocks`, and the memory of the largest step."""
    layout = _block_layout(model, cache_config)
    if model.mesh.device.type == "cpu":
        free_bytes = available_memory_bytes() // ranks_sharing_memory
        return KVCacheSize(_host_blocks(model, scheduler_config, cache_config, layout, free_bytes))
    memory = profile_step_memory(model, scheduler_config, cache_config)
    free_bytes = memory.free_bytes // ranks_sharing_memory
    graph_bytes = graph_bytes_max(model, scheduler_config, cache_config.adapter_pages)
    if graph_bytes:
        graph_bytes += layout.block_bytes  # The scratch block of padding rows.
    if cache_config.kv_tokens_max is not None:
        blocks = _blocks_of_setting(
            layout, cache_config.kv_tokens_max, free_bytes - memory.step_bytes - graph_bytes
        )
    else:
        reserved_bytes = memory.step_bytes + graph_bytes
        kv_bytes = kv_cache_bytes(free_bytes, reserved_bytes, on_cpu=False)
        blocks = _default_blocks(layout, kv_bytes, STEP_SETTINGS)
    log.info(
        "event=device_memory weights_mib=%.1f step_mib=%.1f other_mib=%.1f graphs_mib=%.1f "
        "kv_mib=%.1f free_mib=%.1f",
        *(
            size / 2**20
            for size in (
                memory.allocated_bytes,
                memory.step_bytes,
                memory.other_bytes,
                graph_bytes,
                blocks * layout.block_bytes,
                memory.free_bytes,
            )
        ),
    )
    return KVCacheSize(blocks, memory.step_bytes)


def _block_layout(model: GPT, cache_config: CacheConfig) -> KVBlockLayout:
    dtype = cache_config.kv_dtype
    if dtype not in KV_DTYPES:
        dtype = FLOAT_DTYPE_NAMES[model.dtype]
    groups = kv_groups(model.config)
    layers = layers_per_block(groups, model.layers)
    return KVBlockLayout(
        cache_config.kv_block_tokens,
        kv_bytes_per_token(model.config, layers, model.mesh.tp, dtype),
        len(groups),
    )


def _host_blocks(
    model: GPT,
    scheduler_config: SchedulerConfig,
    cache_config: CacheConfig,
    layout: KVBlockLayout,
    free_bytes: int,
) -> int:
    """Return the number of blocks on a CPU.

    No bytes are reserved for the memory of a step: the KV cache takes only HOST_MEMORY_FRACTION of
    the free memory, and the memory of a step fits into the remaining memory.
    """
    if cache_config.kv_tokens_max is not None:
        return _blocks_of_setting(layout, cache_config.kv_tokens_max, free_bytes)
    blocks = _default_blocks(layout, kv_cache_bytes(free_bytes, 0, on_cpu=True))
    tokens_max = running_kv_tokens_max(
        scheduler_config.running_requests_max,
        model.config.max_position_embeddings,
        layout.block_tokens,
    )
    return min(blocks, layout.pool_blocks(tokens_max))


def _blocks_of_setting(layout: KVBlockLayout, kv_tokens_max: int, free_bytes: int) -> int:
    """Return the number of blocks for `kv_tokens_max` tokens, which must fit into the memory."""
    blocks = layout.pool_blocks(kv_tokens_max)
    if blocks * layout.block_bytes > free_bytes:
        raise ConfigError(
            f"kv_tokens_max is {kv_tokens_max}, for which each rank needs "
            f"{blocks * layout.block_bytes} bytes, but {max(0, free_bytes)} are available; set it "
            f"to at most {layout.token_capacity(layout.blocks_within(free_bytes))}, or remove it"
        )
    return blocks


def _default_blocks(layout: KVBlockLayout, kv_bytes: int, step_settings: str = "") -> int:
    """Return the number of blocks in `kv_bytes`, which must be at least 2.

    `step_settings`: the settings that can be lowered to reduce the memory of a step.
    """
    blocks = layout.blocks_within(kv_bytes)
    if blocks < 2:
        lower = f", lower {step_settings}" if step_settings else ""
        raise ConfigError(
            f"the KV cache needs at least 2 blocks of {layout.block_tokens} tokens "
            f"({layout.block_bytes} bytes per block), but the part of the free memory that it gets "
            f"by default holds only {blocks}; stop other processes, use more ranks (tp, pp)"
            f"{lower}, or set kv_tokens_max, with which it can also get the part that is kept back"
        )
    return blocks
