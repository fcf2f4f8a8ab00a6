"""Decode keys: sums over requests that stay below windows, reach them, or are beyond them."""

from random import Random

import pytest

from gpt.costs.attention_span import AttentionSpan
from planning.inference.decode_keys import DecodeKeys


@pytest.mark.parametrize("seed", range(10))
def test_sums_equal_those_of_single_requests(seed: int) -> None:
    draw = Random(seed)
    windows = draw.sample([None, 1, 7, 20, 60], draw.randint(1, 3))
    span = AttentionSpan(tuple((window, draw.randint(1, 4)) for window in windows))
    decode_keys = DecodeKeys(span)
    tokens_by_number: dict[int, int] = {}
    for number in range(40):
        tokens = draw.randint(0, 50)
        tokens_by_number[number] = tokens
        decode_keys.add(number, tokens, tokens + draw.randint(30, 40))
        if draw.random() < 0.3:
            removed = draw.choice(list(tokens_by_number))
            decode_keys.remove(removed)
            del tokens_by_number[removed]
        for steps in (1, draw.randint(1, 10)):
            expected = sum(span.pairs(count, count + steps) for count in tokens_by_number.values())
            assert decode_keys.pairs(steps) == pytest.approx(expected)
        if draw.random() < 0.2:
            steps = draw.randint(1, 3)
            decode_keys.advance(steps)
            tokens_by_number = {key: count + steps for key, count in tokens_by_number.items()}


def test_the_last_token_attends_to_the_keys_of_one_more_pair() -> None:
    span = AttentionSpan(((None, 1), (5, 3)))
    for tokens in range(1, 12):
        assert span.keys(tokens) == span.pairs(tokens - 1, tokens)
        assert span.pairs(0, tokens) == sum(span.keys(count) for count in range(1, tokens + 1))
