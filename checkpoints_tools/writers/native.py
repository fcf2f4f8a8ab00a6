"""Preamble's own form, written: canonical tensors, whole, in safetensors files.

Files are of a bounded size, so that one can be copied again by itself. It only plans.
The manifest, which makes the directory a checkpoint, is every format's and written elsewhere.
"""

from checkpoints_tools.layout.layout import Layout
from checkpoints_tools.layout.safetensors import Entry, safetensors_file, shard_name, shards
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.parallel.sharding import Part

SHARD_BYTES_MAX = 4 << 30


def layout(checkpoint: Checkpoint, *, shard_bytes_max: int = SHARD_BYTES_MAX) -> Layout:
    """`checkpoint` is in the dtype that is to be stored."""
    entries = []
    for name, logical in checkpoint.tensors.items():
        whole = Part(0, ((0, logical.shape[0]),), logical.shape[0])
        entries.append(Entry(name, name, whole, logical.shape, logical.dtype))
    runs = shards(entries, shard_bytes_max)
    files = [
        safetensors_file(shard_name("model", number, len(runs)), run)
        for number, run in enumerate(runs)
    ]
    return Layout("native", tuple(files))
