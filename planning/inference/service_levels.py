"""What a server must keep under its load, and what its figures are worth: predicted or measured.

A limit is a figure's name and a number, and a margin is taken off it, since a prediction at its
edge breaks it half of the time. What cannot all be true together is refused. Knows no search.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gpt.errors import ConfigError
from planning.figures import say
from planning.inference.estimate import Workload
from planning.memory_ledger import FITS_SHARE

Objective = Literal["throughput", "latency", "gpus"]
# Tokens a second for each GPU; the time of a whole request; as few GPUs as keep the limits.
OBJECTIVES: tuple[Objective, ...] = ("throughput", "latency", "gpus")
LATENCIES = (
    *("ttft_ms_p50", "ttft_ms_p95", "itl_ms_p50", "itl_ms_p95"),
    *("request_ms_p50", "request_ms_p95"),
)
# A server is planned for at most this part of what it could answer: queues grow without end at 1,
# and clients come in bursts.
LOAD_MAX = 0.9
ANSWERED_MIN = 0.9  # Of the requests that come: a measurement that loses more had too many.


@dataclass(frozen=True)
class Limits:
    """None: no limit."""

    ttft_ms_p50: float | None = None
    ttft_ms_p95: float | None = None
    itl_ms_p50: float | None = None
    itl_ms_p95: float | None = None
    request_ms_p50: float | None = None
    request_ms_p95: float | None = None
    tokens_per_s_min: float | None = None  # Of all replicas together.
    gpus_max: int | None = None
    memory_fraction: float = FITS_SHARE  # Of a device's memory, that may be used.
    latency_margin: float = 0.10
    memory_margin: float = 0.05

    def __post_init__(self) -> None:
        for name in (*LATENCIES, "tokens_per_s_min", "gpus_max"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value:g}; it must be more than 0, and finite")
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(
                f"memory_fraction is {self.memory_fraction:g}; it must be more than 0, at most 1"
            )
        for name in ("latency_margin", "memory_margin"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"{name} is {value:g}; it must be from 0 to less than 1")
        for first, whole in (("ttft_ms_p50", "request_ms_p50"), ("ttft_ms_p95", "request_ms_p95")):
            self._check_order(first, whole)
        for figure in ("ttft_ms", "itl_ms", "request_ms"):
            self._check_order(f"{figure}_p50", f"{figure}_p95")

    def _check_order(self, smaller: str, larger: str) -> None:
        """A limit that another one makes idle is a mistake: who sets it believes that it counts."""
        low, high = getattr(self, smaller), getattr(self, larger)
        if low is not None and high is not None and low > high:
            raise ConfigError(
                f"{smaller} is {low:g} and {larger} is {high:g}, which it can never exceed; set "
                f"{smaller} to {high:g} at most"
            )

    def check(self, workload: Workload) -> None:
        """Refuse what this load cannot bring about on any machine."""
        rate, least = workload.request_rate, self.tokens_per_s_min
        if rate is not None and least is not None:
            most = rate * workload.output_tokens.mean
            if least > most:
                raise ConfigError(
                    f"tokens_per_s_min is {least:g}, and {rate:g} requests a second of "
                    f"{workload.output_tokens.mean:g} tokens ask for {most:g}; set at most that, "
                    f"or a request_rate of {least / workload.output_tokens.mean:.3g}"
                )

    @property
    def memory_share(self) -> float:
        """Of a device's memory, that a plan fills; less its margin."""
        return self.memory_fraction * (1 - self.memory_margin)

    def within(self, name: str) -> float | None:
        """A latency's limit with its margin."""
        limit: float | None = getattr(self, name)
        return None if limit is None else limit * (1 - self.latency_margin)

    def held(self, figures: Mapping[str, float]) -> "Iterator[Held]":
        """Each limit, beside what it is held against."""
        for name in LATENCIES:
            limit = self.within(name)
            if limit is not None:
                yield Held(name, figures.get(name, math.inf), limit, most=True)
        if self.tokens_per_s_min is not None:
            made = figures.get("tokens_per_s", 0.0)
            yield Held("tokens_per_s", made, self.tokens_per_s_min, most=False)


@dataclass(frozen=True)
class Held:
    """A figure and its limit, the margin taken off."""

    figure: str
    value: float
    limit: float
    most: bool  # Whether the limit is the most it may be; else the least.

    @property
    def slack(self) -> float:
        """The part of the limit that is left; below 0: it is broken."""
        if self.most:
            return 1 - self.value / self.limit
        return self.value / self.limit - 1

    def __str__(self) -> str:
        limit = say(self.figure, self.limit)
        bound = f"{limit} after the margin" if self.most else f"at least {limit}"
        return f"{self.figure} {say(self.figure, self.value)} of {bound}"


def broken(limits: Limits, workload: Workload, figures: Mapping[str, float]) -> str:
    """Which limit these figures break by most, in words; empty: none."""
    rate = workload.request_rate
    answered = figures.get("requests_per_s", 0.0)
    if rate is not None and answered < ANSWERED_MIN * rate:
        return f"answers {answered:.3g} of the {rate:g} requests/s that come"
    least = min(limits.held(figures), key=lambda one: one.slack, default=None)
    return str(least) if least is not None and least.slack < 0 else ""


def score(objective: Objective, workload: Workload, figures: Mapping[str, float]) -> float:
    """By the objective: more is better.

    Where requests come at a rate, all that answer them make the same tokens: then fewer GPUs is
    more for each, and among as many the quicker one is better.
    """
    request_ms = figures["request_ms_p95"]
    if objective == "latency":
        return -request_ms
    if objective == "gpus" or workload.request_rate is not None:
        each, total = figures["tokens_per_s_per_gpu"], figures["tokens_per_s"]
        return each / max(total, 1e-9) - 1e-12 * min(request_ms, 1e9)
    return figures["tokens_per_s_per_gpu"]
