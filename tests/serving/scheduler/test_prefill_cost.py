"""How much a prompt's token costs, from the steps that were."""

from random import Random

import pytest

from serving.scheduler.prefill_cost import Pace


def test_the_slope_is_found_whatever_a_step_costs_without_prompts() -> None:
    pace, random = Pace(), Random(0)
    for _ in range(200):
        tokens = random.choice([0, 0, 64, 512])
        pace.learn(tokens, (0.030 + 0.0002 * tokens) * random.uniform(0.9, 1.1))
    assert pace.token_s == pytest.approx(0.0002, rel=0.15)
    assert pace.tokens_within(0.015, 16) == pytest.approx(75, rel=0.2)


def test_at_least_one_block_whatever_it_costs() -> None:
    pace = Pace()
    assert pace.tokens_within(0.015, 16) == 16
    pace.learn(100, 10.0)
    pace.learn(0, 0.1)
    assert pace.tokens_within(0.015, 16) == 16


def test_it_follows_when_steps_become_slower() -> None:
    pace = Pace()
    for scale in (1, 5):
        for step in range(200):
            tokens = 100 * (step % 2)
            pace.learn(tokens, scale * (0.01 + 0.0001 * tokens))
    assert pace.token_s == pytest.approx(0.0005, rel=0.05)


def test_noise_alone_does_not_open_the_gate() -> None:
    pace = Pace()
    for step in range(100):  # Steps with prompts happened to be the quick ones.
        pace.learn(100 * (step % 2), 0.02 - 0.01 * (step % 2))
    assert 0 < pace.tokens_within(0.015, 1) <= 1000


def test_steps_that_are_all_alike_are_put_down_to_their_tokens() -> None:
    pace = Pace()
    for _ in range(10):
        pace.learn(100, 0.1)
    assert pace.token_s == pytest.approx(0.001)
