"""Native writer: plans safetensors files with canonical, unsharded tensors.

File sizes are bounded, so that little must be copied again if a file is damaged. The module only
plans; it reads no weights. A native checkpoint also has a manifest, which
`checkpoints_tools/conversion/convert.py` writes.
"""

from checkpoints_tools.layout.layout import Layout
from checkpoints_tools.layout.safetensors import (
    SafetensorsEntry,
    plan_safetensors_file,
    shard_file_name,
    split_into_shards,
)
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.parallel.weight_sharding import ShardSpec

SHARD_BYTES_MAX = 4 << 30  # Default of --shard-gb.


def plan_layout(checkpoint: Checkpoint, *, shard_bytes_max: int = SHARD_BYTES_MAX) -> Layout:
    """Plan the target's files; `checkpoint` already has the target's dtype."""
    entries = []
    for name, logical in checkpoint.tensors.items():
        full_part = ShardSpec(0, ((0, logical.shape[0]),), logical.shape[0])
        entries.append(SafetensorsEntry(name, (name,), full_part, logical.shape, logical.dtype))
    shards = split_into_shards(entries, shard_bytes_max)
    files = [
        plan_safetensors_file(shard_file_name("model", index, len(shards)), shard)
        for index, shard in enumerate(shards)
    ]
    return Layout("native", tuple(files))
