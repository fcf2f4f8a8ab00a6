"""QKV layout: the row order of fused query, key and value weights in old Megatron checkpoints.

The row order depends on `checkpoint_version`. Versions below 1 have (3, heads, channels), versions
from 1 to below 2 have (heads, channels, 3), and versions from 2 on have the current order, (groups,
queries + 2, channels), which also supports query groups.
"""

from gpt.checkpoint.logical_tensor import InMemoryTensor
from gpt.config import GPTConfig
from gpt.errors import CheckpointError

RankParts = list[InMemoryTensor]  # Parts of one logical tensor, by tensor parallel rank.
RowRun = tuple[InMemoryTensor, int, int, int]  # A part, its first row, row count, row stride.


def current_qkv_rows(parts: RankParts, config: GPTConfig, version: float) -> list[RowRun]:
    """Return runs of rows of all parts that are together in the current order.

    `version` is the checkpoint's `checkpoint_version`.
    """
    if version >= 2:
        return [(part, 0, part.shape[0], 1) for part in parts]
    if config.num_query_groups != config.num_attention_heads:
        raise CheckpointError(
            f"{parts[0].location}: checkpoint_version {version} does not support query groups, but "
            f"the config has {config.num_query_groups}; correct num_query_groups"
        )
    d, heads = config.kv_channels, config.num_attention_heads // len(parts)
    runs: list[RowRun] = []
    for part in parts:
        for head in range(heads):
            for qkv_index in range(3):
                if version < 1:  # (3, heads, channels)
                    runs.append((part, (qkv_index * heads + head) * d, d, 1))
                else:  # (heads, channels, 3)
                    runs.append((part, head * 3 * d + qkv_index, d, 3))
    return runs
