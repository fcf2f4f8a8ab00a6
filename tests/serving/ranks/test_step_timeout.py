"""Limits that are learned: long where steps are long, short where they are not."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.ranks.step_timeout import FLOOR_S, IDLE_S, Patience


def learned(*steps: tuple[int, int, float], stages: int = 1) -> Patience:
    """Patience that has seen steps of (tokens, context, seconds)."""
    patience = Patience(None, first_s=300.0, stages=stages)
    last_s = 0.0
    for tokens, context, seconds in steps:
        patience.note(tokens, context, last_s)
        last_s = seconds
    patience.note(0, 0, last_s)
    return patience


def limit_s(patience: Patience, tokens: int, context: int) -> float:
    patience.note(tokens, context, 0.0)
    return patience.limit_s()


def test_the_first_step_may_take_as_long_as_a_warm_up() -> None:
    patience = Patience(None, first_s=300.0)
    assert patience.limit_s() == FLOOR_S + IDLE_S  # Nothing runs.
    assert limit_s(patience, 512, 0) == 300.0


def test_quick_steps_leave_the_floor_and_slow_ones_ten_times_themselves() -> None:
    assert limit_s(learned(*[(4, 100, 0.005)] * 50), 4, 100) == FLOOR_S
    assert limit_s(learned(*[(4, 100, 0.8)] * 50), 4, 100) >= 8.0


def test_a_fixed_limit_is_kept_whatever_was_learned() -> None:
    patience = Patience(1.5, first_s=300.0)
    for _ in range(9):
        patience.note(4, 0, 60.0)
    assert patience.limit_s() == 1.5
    patience.note(0, 0, 60.0)
    assert patience.limit_s() == 1.5 + IDLE_S


def test_a_long_prompt_after_decoding_alone_is_given_its_time() -> None:
    """Decoding takes 10 ms a token; a chunk of 2,000 at 5 ms each is legal."""
    assert limit_s(learned(*[(1, 50, 0.010)] * 256), 2000, 0) > 10.0


def test_a_prompt_as_large_as_one_before_may_take_ten_times_as_long() -> None:
    seen = learned((4096, 0, 10.0), *[(1, 4096, 0.03)] * 60)
    assert limit_s(seen, 4096, 0) >= 100.0
    # The one long step is forgotten as a measure of the usual one.
    assert limit_s(learned((4096, 0, 10.0), *[(1, 9, 0.03)] * 200), 1, 9) < 10.0


def test_a_look_back_that_is_longer_than_any_before_is_given_its_time() -> None:
    """Decoding at 100 tokens takes 10 ms, at 100,000 a thousand times as much at most."""
    assert limit_s(learned(*[(1, 100, 0.010)] * 50), 1, 100_000) >= 100.0


def test_with_two_stages_the_longer_of_two_steps_in_flight_counts() -> None:
    patience = learned((64, 0, 0.1), *[(1, 9, 0.01)] * 200, stages=2)
    assert limit_s(patience, 640, 0) > 9.0
    assert limit_s(patience, 1, 9) > 9.0
    assert limit_s(patience, 1, 9) < 3.0
    assert limit_s(patience, 640, 0) > 9.0
    assert limit_s(patience, 0, 0) == FLOOR_S + IDLE_S  # Nothing is in flight any more.


sizes = st.tuples(st.integers(1, 4096), st.integers(0, 100_000))


@given(
    steps=st.lists(sizes, min_size=1, max_size=20),
    fixed_ms=st.floats(0, 50),
    token_ms=st.floats(0.01, 20),
    context_us=st.floats(0, 50),
)
@settings(max_examples=50, deadline=None)
def test_no_step_of_an_engine_with_an_even_pace_is_ever_too_long(
    steps: list[tuple[int, int]], fixed_ms: float, token_ms: float, context_us: float
) -> None:
    """Once it has seen the largest chunk, as a warm-up shows it."""
    patience = Patience(None, first_s=300.0)

    def seconds(tokens: int, context: int) -> float:
        return (fixed_ms + token_ms * tokens) / 1e3 + context_us * context / 1e6

    last_s = 0.0
    for tokens, context in [(4096, 0), (4096, 100_000), *steps]:
        patience.note(tokens, context, last_s)
        last_s = seconds(tokens, context)
        assert last_s < patience.limit_s()
