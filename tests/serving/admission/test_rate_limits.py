"""Limits of a tenant: against a clock that the tests turn, and a slow twin that counts by hand.

That every wire holds to them is tests/serving/admission/test_auth.py's business, with a real
server.
"""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.errors import ConfigError
from gpt.sampling_params import Sampling
from serving.admission.rate_limits import Bucket, Limits, Quota, Quotas, Tab, asked_of
from serving.request import Answer, BeamRule, RefusedError, Request


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def quota(clock: Clock, **limits: Any) -> Quota:
    return Quotas(clock).of("crew", Limits(**limits))


def request(prompt: int, new: int, answers: int = 1, **rest: Any) -> Request:
    answer = Answer(tuple(range(prompt)), Sampling(max_new_tokens=new))
    return Request((answer,) * answers, **rest)


def refusal(work: Any) -> RefusedError:
    with pytest.raises(RefusedError) as told:
        work()
    assert told.value.reason == "RATE_LIMITED"
    return told.value


def test_requests_over_the_rate_are_told_when_there_is_room_and_then_there_is(clock: Clock) -> None:
    one = quota(clock, requests_per_s=4)
    for _ in range(4):
        one.enter()
    told = refusal(one.enter)
    assert str(told) == (
        "tenant 'crew' has made its 4 requests a second (requests_per_s); there is room for this "
        "one in 0.25 s"
    )
    assert told.retry_s == 0.25
    clock.now += 0.24
    refusal(one.enter)
    clock.now += 0.01
    one.enter()
    refusal(one.enter)


def test_a_rate_below_one_a_second_still_lets_one_in(clock: Clock) -> None:
    one = quota(clock, requests_per_s=0.1)
    one.enter()
    assert refusal(one.enter).retry_s == 10
    clock.now += 10
    one.enter()


def test_calls_at_once_are_counted_until_they_leave(clock: Clock) -> None:
    one = quota(clock, calls_max=2)
    one.enter()
    one.enter()
    told = refusal(one.enter)
    assert "'crew' has 2 calls at once, and may have 2 (calls_max)" in str(told)
    assert told.retry_s
    one.leave()
    one.enter()


def test_a_refusal_for_calls_at_once_takes_nothing_of_the_rate(clock: Clock) -> None:
    one = quota(clock, calls_max=1, requests_per_s=2)
    one.enter()
    for _ in range(10):
        refusal(one.enter)
    one.leave()
    one.enter()


def test_tokens_are_charged_as_asked_and_given_back_as_not_made(clock: Clock) -> None:
    one = quota(clock, tokens_per_s=1000)
    ordered = Tab(one).begin()
    ordered.charge(request(100, 500))
    told = refusal(lambda: Tab(one).begin().charge(request(300, 300)))
    assert "this asks for 600 tokens (300 of prompts, 300 new ones at most)" in str(told)
    assert "'crew' has 400 left of its 1000 a second (tokens_per_s)" in str(told)
    assert told.retry_s == 0.2

    ordered.made = 10
    ordered.close()
    ordered.close()  # No second time.

    Tab(one).begin().charge(request(300, 300))
    refusal(lambda: Tab(one).begin().charge(request(1, 291)))
    Tab(one).begin().charge(request(1, 289))


def test_more_than_a_second_s_worth_waits_for_a_full_bucket_and_is_paid_off(clock: Clock) -> None:
    one = quota(clock, tokens_per_s=100)
    Tab(one).begin().charge(request(50, 450))  # The bucket was full.
    assert refusal(lambda: Tab(one).begin().charge(request(1, 0))).retry_s == 4.01
    clock.now += 4.01
    Tab(one).begin().charge(request(1, 0))
    assert refusal(lambda: Tab(one).begin().charge(request(500, 500))).retry_s == 1


def test_a_request_that_never_ran_is_given_back_whole(clock: Clock) -> None:
    one = quota(clock, tokens_per_s=100)
    ordered = Tab(one).begin()
    ordered.charge(request(50, 50))
    ordered.close(void=True)
    Tab(one).begin().charge(request(50, 50))


def test_a_call_s_first_request_is_the_call_itself_and_others_count_beside_it(clock: Clock) -> None:
    one = quota(clock, calls_max=2, requests_per_s=3)
    tab = Tab(one)
    first = tab.begin()
    second = tab.begin()
    assert one.calls == 2
    refusal(tab.begin)
    second.close()
    first.close()
    third = tab.begin()  # One after the other they need no place but the call's.
    assert one.calls == 1
    third.close()
    tab.close()
    tab.close()
    assert one.calls == 0
    refusal(lambda: Tab(one))  # The three of this second are made.


def test_a_prompt_counts_once_and_each_of_its_answers(clock: Clock) -> None:
    assert asked_of(request(10, 5, answers=3)) == (10, 15)
    beams = BeamRule(width=4, answers=2)
    assert asked_of(request(10, 5, answers=2, beams=beams)) == (10, 20)
    other = Answer(tuple(range(10)), Sampling(max_new_tokens=1), adapter="a@1")
    same = Answer(tuple(range(10)), Sampling(max_new_tokens=1), adapter="b@1")
    assert asked_of(Request((other, same))) == (20, 2)


def test_other_limits_hold_at_once_and_the_same_rate_keeps_what_was_taken(clock: Clock) -> None:
    quotas = Quotas(clock)
    one = quotas.of("crew", Limits(requests_per_s=2))
    one.enter()
    one.enter()
    assert quotas.of("crew", Limits(requests_per_s=2, calls_max=5)) is one
    refusal(one.enter)
    quotas.of("crew", Limits(requests_per_s=3))
    one.enter()
    assert one.calls == 3
    quotas.of("crew", Limits(calls_max=3))
    refusal(one.enter)


def test_tenants_have_nothing_to_do_with_each_other(clock: Clock) -> None:
    quotas = Quotas(clock)
    quotas.of("crew", Limits(calls_max=1)).enter()
    quotas.of("guests", Limits(calls_max=1)).enter()
    refusal(quotas.of("crew", Limits(calls_max=1)).enter)


def test_a_limit_of_nothing_is_refused_by_name() -> None:
    for value in (0, -1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="tokens_per_s"):
            Limits(tokens_per_s=value)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.floats(0.5, 50),
    st.lists(st.tuples(st.floats(0, 2), st.floats(0.1, 80)), max_size=40),
)
def test_over_any_time_no_more_is_taken_than_the_rate_a_full_bucket_and_one_request(
    rate: float, steps: list[tuple[float, float]]
) -> None:
    now, bucket, taken = 0.0, Bucket(rate, 0.0), 0.0
    for pause, amount in steps:
        now += pause
        wait_s = bucket.wait_s(amount, now)
        if wait_s > 0:
            # What it said holds: a moment before there is no room, and then there is.
            assert bucket.wait_s(amount, now + wait_s * 1.000001 + 1e-9) == 0
            continue
        assert taken <= rate * now + bucket.size * (1 + 1e-6)
        bucket.take(amount, now)
        taken += amount
