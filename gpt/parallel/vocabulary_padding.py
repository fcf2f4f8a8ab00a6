"""Vocabulary padding: padded vocabulary size, and the token ids of each tensor rank.

The embedding and the LM head have one row per token id, split evenly over the `tp` tensor ranks.
Therefore both are padded with rows of zeros after the last token: in memory to a multiple of `tp`
rows, in Megatron's files to a multiple of `128 * tp` rows. The config's `vocab_size` and the
logical tensors exclude the padding; readers of checkpoints remove it, and writers add it.
`GPT.compute_logits` removes the logits of the padding, and `vocab_parallel_cross_entropy` masks
them. The module computes with plain integers and does not import torch.
"""

from pathlib import Path

from gpt.errors import CheckpointError

# Megatron pads the vocabulary to a multiple of VOCABULARY_MULTIPLE * tp.
VOCABULARY_MULTIPLE = 128


def padded_vocab_size(vocab_size: int, tp: int, multiple: int = 1) -> int:
    """Return `vocab_size` rounded up to a multiple of `multiple * tp`."""
    divisor = multiple * tp
    return -(-vocab_size // divisor) * divisor


def local_vocab_range(vocab_size: int, local_rows: int, rank: int) -> tuple[int, int]:
    """Return the token ids whose rows are on tensor rank `rank`, as (start, stop).

    `local_rows` is the number of rows on each rank. The rank's rows after this range are padding.
    """
    start = rank * local_rows
    return min(vocab_size, start), min(vocab_size, start + local_rows)


def refuse_larger_vocabulary(path: Path, vocab_size: int, rows: int) -> None:
    """Raise CheckpointError if an overridden vocab_size exceeds the number of embedding rows.

    A smaller vocab_size is allowed: the rows from vocab_size on are then removed as padding.
    """
    if vocab_size > rows:
        raise CheckpointError(
            f"{path}: vocab_size is set to {vocab_size}, but the embedding has only {rows} "
            f"rows; set it to at most {rows}"
        )
