"""KV groups: the layers of each window in groups of about equal size, spread over the depth."""

from random import Random

import pytest

from gpt.kv_groups import (
    SequenceBlocks,
    cached_tokens_max,
    kv_groups,
    layers_per_block,
    window_blocks_max,
)
from tests.support.models import CLASSIC


def group_sizes(layers: int, is_windowed: list[bool]) -> list[tuple[int | None, int]]:
    pattern = tuple(is_windowed[i % len(is_windowed)] for i in range(layers))
    config = CLASSIC.with_fields(
        num_layers=layers, window_size=8, window_layers=pattern, moe_layers=()
    )
    groups = kv_groups(config)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(layers))
    for group in groups:
        assert {config.layers[layer].window_size for layer in group.layers} == {group.window}
    return [(group.window, len(group.layers)) for group in groups]


def test_layers_with_equal_windows_are_one_group() -> None:
    assert group_sizes(6, [False]) == [(None, 6)]
    assert group_sizes(6, [True]) == [(8, 6)]


@pytest.mark.parametrize(
    ("layers", "pattern", "sizes"),
    [
        (24, [True, False], [(None, 12), (8, 12)]),  # GPT-OSS 20B.
        (26, [True] * 5 + [False], [(None, 4), *[(8, 4)] * 4, *[(8, 3)] * 2]),  # Gemma 3 1B.
        (5, [True, False], [(None, 2), (8, 2), (8, 1)]),
        (9, [True, False], [(None, 4), (8, 5)]),
    ],
)
def test_frequent_windows_have_several_groups(
    layers: int, pattern: list[bool], sizes: list[tuple[int | None, int]]
) -> None:
    actual = group_sizes(layers, pattern)
    assert sorted(actual, key=str) == sorted(sizes, key=str)
    assert actual[0][0] is None


def test_the_groups_are_about_equal_in_each_pipeline_stage() -> None:
    pattern = tuple(layer % 6 != 5 for layer in range(62))
    config = CLASSIC.with_fields(num_layers=62, window_size=8, window_layers=pattern, moe_layers=())
    groups = kv_groups(config)
    assert len(groups) == 7 and layers_per_block(groups, range(62)) == 10
    stages = range(0, 31), range(31, 62)
    assert [layers_per_block(groups, stage) for stage in stages] == [5, 5]


def test_a_sequence_holds_the_blocks_of_its_new_tokens_and_of_its_window() -> None:
    for window in range(1, 12):
        for new_tokens in range(1, 9):
            spans = [
                (end - 1) // 4 - (end - new_tokens - window + 1) // 4 + 1 for end in range(40, 44)
            ]
            assert window_blocks_max(window, new_tokens, 4) == max(spans)


def test_a_group_with_a_window_keeps_the_window_and_one_block() -> None:
    groups = kv_groups(
        CLASSIC.with_fields(num_layers=2, moe_layers=(), window_size=8, window_layers=(True, False))
    )
    assert [cached_tokens_max(group, 100, 4) for group in groups] == [100, 12]
    assert [cached_tokens_max(group, 10, 4) for group in groups] == [10, 10]


def random_groups(draw: Random) -> SequenceBlocks:
    windows = [draw.choice([None, 1, 3, 8, 30]) for _ in range(draw.randint(1, 5))]
    return SequenceBlocks(tuple(windows), block_tokens=draw.choice([1, 4, 5]))


def attended_blocks(blocks: SequenceBlocks, planned: int, computed: int) -> int:
    """The blocks with a token that tokens from `computed` on attend to or are written to."""
    return sum(
        len(
            {
                token // blocks.block_tokens
                for token in range(0 if window is None else computed - window + 1, planned)
                if token >= 0
            }
        )
        for window in blocks.windows
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_sequence_holds_the_blocks_that_its_tokens_attend_to(seed: int) -> None:
    draw = Random(seed)
    blocks = random_groups(draw)
    new_tokens_max = draw.randint(1, 9)
    held_counts = []
    for computed in range(70):
        for new_tokens in range(1, new_tokens_max + 1):
            held = blocks.held(computed + new_tokens, computed)
            assert held == attended_blocks(blocks, computed + new_tokens, computed)
            assert held <= blocks.held_max(computed + new_tokens, new_tokens_max)
            if computed + new_tokens <= 70:
                held_counts.append(held)
    # The window of the last tokens has been at all offsets in a block.
    assert max(held_counts) == blocks.held_max(70, new_tokens_max)


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_sequence_fits_alone_and_one_more_block_does_not(seed: int) -> None:
    draw = Random(seed)
    blocks = random_groups(draw)
    for pool_blocks in range(1, 60):
        tokens_max = blocks.tokens_max(pool_blocks)
        peaks = [blocks.held(tokens + 1, tokens) for tokens in range(400)]
        tokens_that_fit = next(
            (tokens for tokens, peak in enumerate(peaks) if peak > pool_blocks), None
        )
        assert tokens_max == tokens_that_fit
