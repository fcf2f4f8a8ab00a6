"""Per-tenant rate limits: requests per second, tokens per second, and concurrent calls.

Token buckets limit the requests per second and the tokens per second. At admission, a request is
charged the most tokens that it can use: its prompt tokens and its maximum of new tokens. When the
request ends, the new tokens that it did not generate are refunded. A burst of long requests is
therefore refused before it runs. The capacity of a bucket is its gain in one second, but at least
1. A request that needs more than the capacity is admitted when the bucket is full; this makes the
level negative, which delays later requests. The module is independent of protocols and models.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

from gpt.errors import ConfigError
from serving.request import RefusedError, Request

RETRY_S_MAX = 3600.0  # Upper bound of retry delays.
# Retry delay of a call over calls_max. It is fixed, because the time at which a running call will
# end is unknown.
CALL_RETRY_S = 1.0


@dataclass(frozen=True)
class RateLimits:
    """The limits of a tenant. A limit of None is unlimited."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None  # Prompt tokens, virtual tokens included, and new tokens.
    calls_max: int | None = None  # Concurrent calls.

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{field.name} is {value}; it must be more than 0")


UNLIMITED = RateLimits()


class TokenBucket:
    """A token bucket: it gains `rate` per second; its capacity is `rate`, but at least 1.

    The level may become negative (debt).
    """

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self.capacity = max(rate, 1.0)
        self._level = self.capacity
        self._updated_at = now

    def level(self, now: float) -> float:
        """Return the current level. It is negative while the bucket is in debt."""
        return min(self.capacity, self._level + self.rate * max(0.0, now - self._updated_at))

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until the level is `amount`, at most RETRY_S_MAX.

        For an amount above the capacity: the seconds until the bucket is full.
        """
        # The tolerance absorbs rounding errors of many small refills.
        missing_amount = min(amount, self.capacity) - self.level(now) - 1e-9 * self.capacity
        return min(max(0.0, missing_amount / self.rate), RETRY_S_MAX)

    def consume(self, amount: float, now: float) -> None:
        """Subtract an amount; the level may become negative. A negative amount is a refund."""
        self._level = min(self.capacity, self.level(now) - amount)
        self._updated_at = max(self._updated_at, now)


class TenantQuota:
    """The current usage of one tenant, checked against its limits."""

    def __init__(self, tenant: str, limits: RateLimits, clock: Callable[[], float]) -> None:
        self._tenant = tenant
        self._clock = clock
        self.calls = 0
        self.limits = UNLIMITED
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.set_limits(limits)

    def set_limits(self, limits: RateLimits) -> None:
        """Replace the limits. The bucket of an unchanged rate keeps its level."""
        now = self._clock()
        if limits.requests_per_s != self.limits.requests_per_s:
            rate = limits.requests_per_s
            self._requests = None if rate is None else TokenBucket(rate, now)
        if limits.tokens_per_s != self.limits.tokens_per_s:
            rate = limits.tokens_per_s
            self._tokens = None if rate is None else TokenBucket(rate, now)
        self.limits = limits

    def acquire(self, *, count_request: bool = True, hold_slot: bool = True) -> None:
        """Acquire quota, or raise RATE_LIMITED and acquire nothing.

        `count_request`: take one request from the bucket. `hold_slot`: hold one of the `calls_max`
        slots for concurrent calls until `release`.
        """
        calls_max, now = self.limits.calls_max, self._clock()
        if hold_slot and calls_max is not None and self.calls >= calls_max:
            raise _rate_limited(
                f"tenant {self._tenant!r} has {self.calls} concurrent calls and may have "
                f"{calls_max} (calls_max); wait until one of them has ended",
                CALL_RETRY_S,
            )
        if count_request and self._requests is not None:
            wait_s = self._requests.wait_s(1, now)
            if wait_s > 0:
                raise _rate_limited(
                    f"tenant {self._tenant!r} has used its {self._requests.rate:g} requests per "
                    "second (requests_per_s); retry in "
                    f"{_format_seconds(wait_s)} s",
                    wait_s,
                )
            self._requests.consume(1, now)
        self.calls += hold_slot

    def release(self) -> None:
        """Release a slot for concurrent calls."""
        assert self.calls > 0, "release without acquire"
        self.calls -= 1

    def charge(self, prompt_tokens: int, new_tokens: int) -> None:
        """Charge a request's prompt tokens and its maximum of new tokens, or raise RATE_LIMITED."""
        if self._tokens is None:
            return
        requested_tokens, now = prompt_tokens + new_tokens, self._clock()
        wait_s = self._tokens.wait_s(requested_tokens, now)
        if wait_s > 0:
            tokens_left = math.floor(self._tokens.level(now))
            raise _rate_limited(
                f"the request needs {requested_tokens} tokens ({prompt_tokens} prompt tokens and "
                f"up to {new_tokens} new tokens), but the balance of tenant {self._tenant!r} is "
                f"{tokens_left} tokens, and grows by {self._tokens.rate:g} tokens per second "
                f"(tokens_per_s); retry in {_format_seconds(wait_s)} s",
                wait_s,
            )
        self._tokens.consume(requested_tokens, now)

    def refund(self, tokens: int) -> None:
        """Refund charged tokens that were not generated."""
        if self._tokens is not None:
            self._tokens.consume(-tokens, self._clock())


class TenantUsage:
    """One call's use of its tenant's quota.

    A tenant has `calls_max` slots for concurrent calls. A call takes one slot, and each further
    request that runs concurrently on the same call takes one more.
    """

    def __init__(self, quota: TenantQuota) -> None:
        self._quota = quota
        quota.acquire()
        self._requests_begun = 0
        self._requests_open = 0
        self._closed = False

    def begin_request(self) -> "RequestReservation":
        """Reserve quota for a request of this call.

        A request uses the slot of the call if no other request runs on the call; otherwise it takes
        another slot. The call's first request was counted when the call began (in `__init__`), so
        it is not taken from the bucket again.
        """
        hold_slot = self._requests_open > 0
        self._quota.acquire(count_request=self._requests_begun > 0, hold_slot=hold_slot)
        self._requests_begun += 1
        self._requests_open += 1
        return RequestReservation(self._quota, partial(self._end_request, hold_slot))

    def _end_request(self, hold_slot: bool) -> None:
        self._requests_open -= 1
        if hold_slot:
            self._quota.release()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._quota.release()


class RequestReservation:
    """The quota that one request has reserved until its end.

    `generated_tokens`: the new tokens that the request has generated so far.
    """

    def __init__(self, quota: TenantQuota, on_close: Callable[[], None]) -> None:
        self._quota = quota
        self._on_close = on_close
        self._prompt_tokens = 0
        self._new_tokens = 0
        self._sequences_per_answer = 1
        self.generated_tokens = 0
        self._closed = False

    def charge(self, request: Request) -> None:
        """Charge the request's tokens, or raise RATE_LIMITED."""
        prompt_tokens, new_tokens = count_request_tokens(request)
        self._quota.charge(prompt_tokens, new_tokens)
        self._prompt_tokens = prompt_tokens
        self._new_tokens = new_tokens
        self._sequences_per_answer = request.sequences_max // len(request.answers)

    def close(self, *, rejected: bool = False) -> None:
        """End the reservation and refund unused tokens, or all tokens of a `rejected` request."""
        if self._closed:
            return
        self._closed = True
        self._on_close()
        if rejected:
            unused_tokens = self._prompt_tokens + self._new_tokens
        else:
            # Beam search runs `_sequences_per_answer` sequences for each answer that it returns.
            used_tokens = self.generated_tokens * self._sequences_per_answer
            unused_tokens = self._new_tokens - used_tokens
        self._quota.refund(max(0, unused_tokens))


class QuotaTable:
    """The quotas of all tenants, created on first use; anonymous callers are unlimited."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_tenant: dict[str, TenantQuota] = {}

    def quota_for(self, tenant: str, limits: RateLimits) -> TenantQuota:
        quota = self._by_tenant.get(tenant)
        if quota is None:
            quota = self._by_tenant[tenant] = TenantQuota(tenant, limits, self._clock)
        elif quota.limits != limits:  # The tokens file has changed.
            quota.set_limits(limits)
        return quota


def count_request_tokens(request: Request) -> tuple[int, int]:
    """Return a request's number of prompt tokens and its maximum of new tokens.

    If several answers have the same prompt and adapter, this prompt is counted once. The prompt of
    an answer that another server has begun was counted there.
    """
    prompts = {
        (answer.adapter, answer.prompt) for answer in request.answers if not answer.resumed_tokens
    }
    new_tokens = sum(answer.new_tokens_max for answer in request.answers)
    # Beam search runs more sequences than it returns answers.
    new_tokens *= request.sequences_max // len(request.answers)
    return sum(len(prompt) for _, prompt in prompts), new_tokens


def _rate_limited(message: str, wait_s: float) -> RefusedError:
    # Responses state the delay in milliseconds. Rounding up lets a retry after the delay succeed.
    return RefusedError("RATE_LIMITED", message, retry_s=math.ceil(1000 * wait_s) / 1000)


def _format_seconds(wait_s: float) -> str:
    return f"{math.ceil(1000 * wait_s) / 1000:.3g}" if wait_s < 10 else f"{wait_s:.0f}"
