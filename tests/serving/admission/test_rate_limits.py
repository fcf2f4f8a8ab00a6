"""Rate limits of tenants: with a clock that the tests advance, and a simple reference count.

That every protocol applies them is tested in tests/serving/admission/test_auth.py with a real
server.
"""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.errors import ConfigError
from gpt.sampling_params import SamplingParams
from serving.admission.rate_limits import (
    QuotaTable,
    RateLimits,
    TenantQuota,
    TenantUsage,
    TokenBucket,
    count_request_tokens,
)
from serving.request import AnswerSpec, BeamSearchParams, RefusedError, Request


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def quota(clock: Clock, **limits: Any) -> TenantQuota:
    return QuotaTable(clock).quota_for("crew", RateLimits(**limits))


def request(prompt: int, new: int, answers: int = 1, **fields: Any) -> Request:
    answer = AnswerSpec(tuple(range(prompt)), SamplingParams(max_new_tokens=new))
    return Request((answer,) * answers, **fields)


def refusal(work: Any) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        work()
    assert caught.value.reason == "RATE_LIMITED"
    return caught.value


def test_requests_over_the_rate_get_the_exact_retry_time(clock: Clock) -> None:
    tenant_quota = quota(clock, requests_per_s=4)
    for _ in range(4):
        tenant_quota.acquire()
    error = refusal(tenant_quota.acquire)
    assert str(error) == (
        "tenant 'crew' has used its 4 requests per second (requests_per_s); retry in 0.25 s"
    )
    assert error.retry_s == 0.25
    clock.now += 0.24
    refusal(tenant_quota.acquire)
    clock.now += 0.01
    tenant_quota.acquire()
    refusal(tenant_quota.acquire)


def test_rates_below_one_per_second_admit_a_first_request(clock: Clock) -> None:
    tenant_quota = quota(clock, requests_per_s=0.1)
    tenant_quota.acquire()
    assert refusal(tenant_quota.acquire).retry_s == 10
    clock.now += 10
    tenant_quota.acquire()


def test_concurrent_calls_count_until_they_end(clock: Clock) -> None:
    tenant_quota = quota(clock, calls_max=2)
    tenant_quota.acquire()
    tenant_quota.acquire()
    error = refusal(tenant_quota.acquire)
    assert "'crew' has 2 concurrent calls and may have 2 (calls_max)" in str(error)
    assert error.retry_s
    tenant_quota.release()
    tenant_quota.acquire()


def test_concurrency_refusals_do_not_consume_the_rate(clock: Clock) -> None:
    tenant_quota = quota(clock, calls_max=1, requests_per_s=2)
    tenant_quota.acquire()
    for _ in range(10):
        refusal(tenant_quota.acquire)
    tenant_quota.release()
    tenant_quota.acquire()


def test_tokens_are_charged_up_front_and_unused_ones_refunded(clock: Clock) -> None:
    tenant_quota = quota(clock, tokens_per_s=1000)
    ordered = TenantUsage(tenant_quota).begin_request()
    ordered.charge(request(100, 500))
    error = refusal(lambda: TenantUsage(tenant_quota).begin_request().charge(request(300, 300)))
    assert "the request needs 600 tokens (300 prompt tokens and up to 300 new tokens)" in str(error)
    assert (
        "but the balance of tenant 'crew' is 400 tokens, and grows by 1000 tokens per second "
        "(tokens_per_s)"
    ) in str(error)
    assert error.retry_s == 0.2

    ordered.generated_tokens = 10
    ordered.close()
    ordered.close()  # Closing again refunds nothing.

    TenantUsage(tenant_quota).begin_request().charge(request(300, 300))
    refusal(lambda: TenantUsage(tenant_quota).begin_request().charge(request(1, 291)))
    TenantUsage(tenant_quota).begin_request().charge(request(1, 289))


def test_requests_larger_than_the_bucket_need_a_full_bucket_and_leave_a_debt(clock: Clock) -> None:
    tenant_quota = quota(clock, tokens_per_s=100)
    TenantUsage(tenant_quota).begin_request().charge(request(50, 450))  # The bucket was full.
    assert (
        refusal(lambda: TenantUsage(tenant_quota).begin_request().charge(request(1, 0))).retry_s
        == 4.01
    )
    clock.now += 4.01
    TenantUsage(tenant_quota).begin_request().charge(request(1, 0))
    assert (
        refusal(lambda: TenantUsage(tenant_quota).begin_request().charge(request(500, 500))).retry_s
        == 1
    )


def test_requests_that_never_ran_are_refunded(clock: Clock) -> None:
    tenant_quota = quota(clock, tokens_per_s=100)
    ordered = TenantUsage(tenant_quota).begin_request()
    ordered.charge(request(50, 50))
    ordered.close(rejected=True)
    TenantUsage(tenant_quota).begin_request().charge(request(50, 50))


def test_the_first_request_of_a_call_is_not_counted_twice(clock: Clock) -> None:
    tenant_quota = quota(clock, calls_max=2, requests_per_s=3)
    usage = TenantUsage(tenant_quota)
    first_request = usage.begin_request()
    second_request = usage.begin_request()
    assert tenant_quota.calls == 2
    refusal(usage.begin_request)
    second_request.close()
    first_request.close()
    third_request = usage.begin_request()  # Sequential requests need no second call slot.
    assert tenant_quota.calls == 1
    third_request.close()
    usage.close()
    usage.close()
    assert tenant_quota.calls == 0
    refusal(lambda: TenantUsage(tenant_quota))  # The three requests of this second are used.


def test_a_shared_prompt_is_charged_once_per_request(clock: Clock) -> None:
    assert count_request_tokens(request(10, 5, answers=3)) == (10, 15)
    beams = BeamSearchParams(width=4, answers=2)
    assert count_request_tokens(request(10, 5, answers=2, beams=beams)) == (10, 20)
    first_adapter = AnswerSpec(tuple(range(10)), SamplingParams(max_new_tokens=1), adapter="a@1")
    second_adapter = AnswerSpec(tuple(range(10)), SamplingParams(max_new_tokens=1), adapter="b@1")
    assert count_request_tokens(Request((first_adapter, second_adapter))) == (20, 2)


def test_changed_limits_apply_at_once_and_keep_usage(clock: Clock) -> None:
    quotas = QuotaTable(clock)
    tenant_quota = quotas.quota_for("crew", RateLimits(requests_per_s=2))
    tenant_quota.acquire()
    tenant_quota.acquire()
    assert quotas.quota_for("crew", RateLimits(requests_per_s=2, calls_max=5)) is tenant_quota
    refusal(tenant_quota.acquire)
    quotas.quota_for("crew", RateLimits(requests_per_s=3))
    tenant_quota.acquire()
    assert tenant_quota.calls == 3
    quotas.quota_for("crew", RateLimits(calls_max=3))
    refusal(tenant_quota.acquire)


def test_tenants_have_separate_quotas(clock: Clock) -> None:
    quotas = QuotaTable(clock)
    quotas.quota_for("crew", RateLimits(calls_max=1)).acquire()
    quotas.quota_for("guests", RateLimits(calls_max=1)).acquire()
    refusal(quotas.quota_for("crew", RateLimits(calls_max=1)).acquire)


def test_non_positive_limits_are_refused_by_name() -> None:
    for value in (0, -1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="tokens_per_s"):
            RateLimits(tokens_per_s=value)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.floats(0.5, 50),
    st.lists(st.tuples(st.floats(0, 2), st.floats(0.1, 80)), max_size=40),
)
def test_usage_never_exceeds_rate_plus_burst_plus_one_request(
    rate: float, steps: list[tuple[float, float]]
) -> None:
    now = 0.0
    bucket = TokenBucket(rate, 0.0)
    taken = 0.0
    for pause, amount in steps:
        now += pause
        wait_s = bucket.wait_s(amount, now)
        if wait_s > 0:
            # The time in the refusal is exact: just before it there is no capacity, then there is.
            assert bucket.wait_s(amount, now + wait_s * 1.000001 + 1e-9) == 0
            continue
        assert taken <= rate * now + bucket.capacity * (1 + 1e-6)
        bucket.consume(amount, now)
        taken += amount


def test_a_resumed_answer_is_charged_for_its_new_tokens_only() -> None:
    answer = AnswerSpec((1, 2, 3), SamplingParams(max_new_tokens=10), resumed_tokens=(4, 5))
    assert count_request_tokens(Request((answer,))) == (0, 8)
