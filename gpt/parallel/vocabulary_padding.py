"""Vocabulary padding: padded vocabulary size, rows of each tensor rank, refusal of missing rows.

The embedding and the LM head have one row per token, split evenly over the tensor ranks. So the
vocabulary is padded at its end with rows of zeros: in memory to a multiple of the number of ranks,
in Megatron's files to a multiple of 128 times that number. The config's `vocab_size` and the
logical tensors exclude the padding; readers and writers remove and add it. `GPT.compute_logits`
removes the logits of padding, and `vocab_parallel_cross_entropy` masks them. The module computes
with plain integers and does not import torch.
"""

from pathlib import Path

from gpt.errors import CheckpointError

# Megatron pads the vocabulary to a multiple of VOCABULARY_MULTIPLE * tensor-parallel size.
VOCABULARY_MULTIPLE = 128


def padded_vocab_size(vocab_size: int, tp: int, multiple: int = 1) -> int:
    """Return `vocab_size` rounded up to a multiple of `multiple * tp`."""
    divisor = multiple * tp
    return -(-vocab_size // divisor) * divisor


def local_vocab_range(vocab_size: int, local_rows: int, rank: int) -> tuple[int, int]:
    """Return the tokens whose rows are on tensor rank `rank`: from the first up to the second.

    `local_rows` is the number of rows on each rank. The rows after this range are padding.
    """
    start = rank * local_rows
    return min(vocab_size, start), min(vocab_size, start + local_rows)


def refuse_larger_vocabulary(path: Path, vocab_size: int, rows: int) -> None:
    """Refuse an overridden vocab_size above the number of embedding rows.

    Only padding rows can be removed; rows cannot be added.
    """
    if vocab_size > rows:
        raise CheckpointError(
            f"{path}: vocab_size is set to {vocab_size}, but the embedding has only {rows} "
            f"rows; set it to at most {rows}"
        )
