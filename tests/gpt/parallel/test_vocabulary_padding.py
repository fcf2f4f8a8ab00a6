"""Vocabulary padding: padded sizes, rows of each tensor rank, refusal of missing rows."""

from pathlib import Path

import pytest

from gpt.errors import CheckpointError
from gpt.parallel.vocabulary_padding import (
    local_vocab_range,
    padded_vocab_size,
    refuse_larger_vocabulary,
)


def test_sizes_are_rounded_up_to_the_multiple() -> None:
    assert [padded_vocab_size(size, 2) for size in (100, 101, 102)] == [100, 102, 102]
    assert padded_vocab_size(50257, 8, 128) == 51200


def test_ranks_divide_the_vocabulary_and_the_last_ones_may_have_only_padding() -> None:
    assert [local_vocab_range(5, 2, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def test_more_tokens_than_rows_are_refused() -> None:
    refuse_larger_vocabulary(Path("model"), 100, 100)
    with pytest.raises(CheckpointError, match=r"vocab_size is set to 101, .* only 100 rows"):
        refuse_larger_vocabulary(Path("model"), 101, 100)
