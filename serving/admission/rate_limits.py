"""How much a tenant may ask for: calls at once, requests a second, tokens a second.

Tokens are charged when they are asked for, and what was not made of them is given back at the end:
so a burst of long requests is seen before any of it runs. A rate has a bucket that holds a second's
worth; one that asks for more waits for a full bucket, and what it owes is paid by those behind it.
Knows no wire and no model.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

from gpt.errors import ConfigError
from serving.request import RefusedError, Request

RETRY_S_MAX = 3600.0  # A wish with room for it: nobody comes back to the millisecond after that.
CALL_RETRY_S = 1.0  # When a call will end is not known.


@dataclass(frozen=True)
class Limits:
    """None: no limit of its own."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None  # Of prompts, virtual ones included, and of answers.
    calls_max: int | None = None  # At once.

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{field.name} is {value}; it must be more than 0")


UNLIMITED = Limits()


class Bucket:
    """So much a second. It holds a second's worth, one request at least, and can be owed to."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate, self.size = rate, max(rate, 1.0)
        self._level, self._at = self.size, now

    def level(self, now: float) -> float:
        """What is in it; less than nothing where it is owed to."""
        return min(self.size, self._level + self.rate * max(0.0, now - self._at))

    def wait_s(self, amount: float, now: float) -> float:
        """Until so much may be taken; more than it holds: until it is full."""
        # A sum of many small steps is seldom the whole.
        lacking = min(amount, self.size) - self.level(now) - 1e-9 * self.size
        return min(max(0.0, lacking / self.rate), RETRY_S_MAX)

    def take(self, amount: float, now: float) -> None:
        """More than there is becomes a debt; less than nothing is given back."""
        self._level = min(self.size, self.level(now) - amount)
        self._at = max(self._at, now)


class Quota:
    """Of one tenant: what it has taken, held against its limits."""

    def __init__(self, tenant: str, limits: Limits, clock: Callable[[], float]) -> None:
        self._tenant, self._clock = tenant, clock
        self.calls = 0
        self.limits = UNLIMITED
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.limit(limits)

    def limit(self, limits: Limits) -> None:
        """Other limits, from now on. A rate that stays the same keeps what was taken of it."""
        now = self._clock()
        if limits.requests_per_s != self.limits.requests_per_s:
            rate = limits.requests_per_s
            self._requests = None if rate is None else Bucket(rate, now)
        if limits.tokens_per_s != self.limits.tokens_per_s:
            rate = limits.tokens_per_s
            self._tokens = None if rate is None else Bucket(rate, now)
        self.limits = limits

    def enter(self, *, counted: bool = True, placed: bool = True) -> None:
        """A request that begins: one more of this second's, and a place until `leave`.

        Refused, it has taken nothing.
        """
        most, now = self.limits.calls_max, self._clock()
        if placed and most is not None and self.calls >= most:
            raise _limited(
                f"tenant {self._tenant!r} has {self.calls} calls at once, and may have {most} "
                "(calls_max); wait until one of them has ended",
                CALL_RETRY_S,
            )
        if counted and self._requests is not None:
            wait_s = self._requests.wait_s(1, now)
            if wait_s > 0:
                raise _limited(
                    f"tenant {self._tenant!r} has made its {self._requests.rate:g} requests a "
                    f"second (requests_per_s); there is room for this one in {_told(wait_s)} s",
                    wait_s,
                )
            self._requests.take(1, now)
        self.calls += placed

    def leave(self) -> None:
        assert self.calls > 0, "more calls ended than began"
        self.calls -= 1

    def charge(self, prompt_tokens: int, new_tokens: int) -> None:
        """What a request asks for, or a refusal."""
        if self._tokens is None:
            return
        asked, now = prompt_tokens + new_tokens, self._clock()
        wait_s = self._tokens.wait_s(asked, now)
        if wait_s > 0:
            left = self._tokens.level(now)
            raise _limited(
                f"this asks for {asked} tokens ({prompt_tokens} of prompts, {new_tokens} new ones "
                f"at most), and tenant {self._tenant!r} has {math.floor(left)} left of its "
                f"{self._tokens.rate:g} a second (tokens_per_s); there is room for it in "
                f"{_told(wait_s)} s",
                wait_s,
            )
        self._tokens.take(asked, now)

    def give_back(self, tokens: int) -> None:
        """What was charged and not made."""
        if self._tokens is not None:
            self._tokens.take(-tokens, self._clock())


class Tab:
    """What a call has of its tenant's quota: its place, and one more for each request but one."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        quota.enter()
        self._begun, self._open = 0, 0
        self._closed = False

    def begin(self) -> "Ordered":
        """A request of the call; the first one is what the call itself was counted for."""
        placed = self._open > 0
        self._quota.enter(counted=self._begun > 0, placed=placed)
        self._begun += 1
        self._open += 1
        return Ordered(self._quota, partial(self._end, placed))

    def _end(self, placed: bool) -> None:
        self._open -= 1
        if placed:
            self._quota.leave()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._quota.leave()


class Ordered:
    """One request, from its refusal or its charge to its end. `made`: its new tokens so far."""

    def __init__(self, quota: Quota, end: Callable[[], None]) -> None:
        self._quota, self._end = quota, end
        self._prompt, self._new, self._factor = 0, 0, 1
        self.made = 0
        self._closed = False

    def charge(self, request: Request) -> None:
        """What it asks for, or a refusal."""
        prompt, new = asked_of(request)
        self._quota.charge(prompt, new)
        self._prompt, self._new = prompt, new
        self._factor = request.places // len(request.answers)

    def close(self, *, void: bool = False) -> None:
        """It is over, and what it did not make is given back; `void`: it never ran."""
        if self._closed:
            return
        self._closed = True
        self._end()
        left = self._prompt + self._new if void else self._new - self.made * self._factor
        self._quota.give_back(max(0, left))


class Quotas:
    """Each tenant's, from its first call on. Whoever is nobody in particular has none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quotas: dict[str, Quota] = {}

    def of(self, tenant: str, limits: Limits) -> Quota:
        quota = self._quotas.get(tenant)
        if quota is None:
            quota = self._quotas[tenant] = Quota(tenant, limits, self._clock)
        elif quota.limits != limits:  # The file of tokens says something else by now.
            quota.limit(limits)
        return quota


def asked_of(request: Request) -> tuple[int, int]:
    """A request's tokens: of its prompts, each once however many answers it has, and new ones."""
    prompts = {(answer.adapter, answer.prompt) for answer in request.answers}
    new = sum(answer.sampling.max_new_tokens for answer in request.answers)
    # Beams make more than what they tell of.
    new *= request.places // len(request.answers)
    return sum(len(prompt) for _, prompt in prompts), new


def _limited(message: str, wait_s: float) -> RefusedError:
    # Upwards, to the millisecond that a wire tells: who comes back then must fit.
    return RefusedError("RATE_LIMITED", message, retry_s=math.ceil(1000 * wait_s) / 1000)


def _told(wait_s: float) -> str:
    return f"{math.ceil(1000 * wait_s) / 1000:.3g}" if wait_s < 10 else f"{wait_s:.0f}"
