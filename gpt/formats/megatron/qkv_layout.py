"""QKV layout: the row order of fused query, key and value weights in old Megatron checkpoints.

The row order of a rank's weight depends on `checkpoint_version`:

- below 1: (3, heads, channels);
- from 1 to below 2: (heads, channels, 3);
- from 2 on, the current order: (query groups, queries of a group + key + value, channels).
"""

from gpt.checkpoint.logical_tensor import InMemoryTensor
from gpt.config import GPTConfig
from gpt.errors import CheckpointError

RankParts = list[InMemoryTensor]  # The parts of one logical tensor, by tensor parallel rank.
RowRun = tuple[InMemoryTensor, int, int, int]  # (part, first row, row count, row stride).


def current_qkv_rows(parts: RankParts, config: GPTConfig, version: float) -> list[RowRun]:
    """Return the row runs of all parts, in the current order of QKV rows.

    `version` is the checkpoint's `checkpoint_version`.
    """
    if version >= 2:
        return [(part, 0, part.shape[0], 1) for part in parts]
    if config.num_query_groups != config.num_attention_heads:
        raise CheckpointError(
            f"{parts[0].location}: checkpoint_version {version} does not support grouped-query "
            f"attention, but the config has num_query_groups {config.num_query_groups}; it must be "
            f"{config.num_attention_heads}, the number of attention heads"
        )
    channels = config.kv_channels
    heads = config.num_attention_heads // len(parts)  # The heads of one rank.
    runs: list[RowRun] = []
    for part in parts:
        for head in range(heads):
            for qkv_index in range(3):
                if version < 1:  # (3, heads, channels)
                    runs.append((part, (qkv_index * heads + head) * channels, channels, 1))
                else:  # (heads, channels, 3)
                    runs.append((part, head * 3 * channels + qkv_index, channels, 3))
    return runs
