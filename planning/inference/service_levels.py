"""Service-level objectives (SLOs): latency and throughput limits with margins, and the score.

Predicted and measured figures are checked in the same way. A margin is subtracted from each latency
limit, because the real latency is above its prediction half of the time. A limit that has no effect
because of another limit raises an error. The search is in `planning.inference.search`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gpt.errors import ConfigError
from planning.figures import format_figure
from planning.inference.estimate import Workload
from planning.memory_ledger import FITS_SHARE

Objective = Literal["throughput", "latency", "gpus"]
# throughput: the most tokens per second per GPU. latency: the shortest duration of a request (95th
# percentile). gpus: the fewest GPUs that satisfy the limits.
OBJECTIVES: tuple[Objective, ...] = ("throughput", "latency", "gpus")
LATENCIES = (
    "ttft_ms_p50",
    "ttft_ms_p95",
    "itl_ms_p50",
    "itl_ms_p95",
    "request_ms_p50",
    "request_ms_p95",
)
# A plan loads a server with at most this fraction of its capacity. Requests arrive at random times,
# so with a fraction of 1 the queue would grow without bound.
UTILIZATION_MAX = 0.9
# If a server answers less than this fraction of the arriving requests, it is overloaded.
ANSWERED_FRACTION_MIN = 0.9


@dataclass(frozen=True)
class ServiceLimits:
    """The limits of a serving plan. None means no limit."""

    ttft_ms_p50: float | None = None
    ttft_ms_p95: float | None = None
    itl_ms_p50: float | None = None
    itl_ms_p95: float | None = None
    request_ms_p50: float | None = None
    request_ms_p95: float | None = None
    tokens_per_s_min: float | None = None  # Minimum total of all replicas.
    gpus_max: int | None = None
    memory_fraction: float = FITS_SHARE  # Maximum of used memory / memory of a device.
    latency_margin: float = 0.10  # Fraction of each latency limit.
    memory_margin: float = 0.05  # Fraction of `memory_fraction`.

    def __post_init__(self) -> None:
        for name in (*LATENCIES, "tokens_per_s_min", "gpus_max"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value:g}; it must be more than 0, and finite")
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(
                f"memory_fraction is {self.memory_fraction:g}; it must be more than 0 and at most 1"
            )
        for name in ("latency_margin", "memory_margin"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"{name} is {value:g}; it must be at least 0 and less than 1")
        for percentile in ("p50", "p95"):
            self._check_order(f"ttft_ms_{percentile}", f"request_ms_{percentile}")
        for figure in ("ttft_ms", "itl_ms", "request_ms"):
            self._check_order(f"{figure}_p50", f"{figure}_p95")

    def _check_order(self, smaller: str, larger: str) -> None:
        """Raise ConfigError if the limit of `smaller` is above the limit of `larger`.

        The figure `smaller` is never above the figure `larger`. A limit of `smaller` above the
        limit of `larger` would therefore have no effect.
        """
        low, high = getattr(self, smaller), getattr(self, larger)
        if low is not None and high is not None and low > high:
            raise ConfigError(
                f"the limit {smaller} is {low:g} and has no effect, since the limit {larger} is "
                f"{high:g}; set {smaller} to at most {high:g}"
            )

    def check_workload(self, workload: Workload) -> None:
        """Raise ConfigError if no machine can reach `tokens_per_s_min` with this workload."""
        rate, tokens_per_s_min = workload.request_rate, self.tokens_per_s_min
        if rate is not None and tokens_per_s_min is not None:
            tokens_per_s_max = rate * workload.output_tokens.mean
            if tokens_per_s_min > tokens_per_s_max:
                raise ConfigError(
                    f"tokens_per_s_min is {tokens_per_s_min:g}, but {rate:g} requests/s of "
                    f"{workload.output_tokens.mean:g} tokens are only {tokens_per_s_max:g} "
                    f"tokens/s; set tokens_per_s_min to at most {tokens_per_s_max:g}, or "
                    "request_rate to at least "
                    f"{tokens_per_s_min / workload.output_tokens.mean:.3g}"
                )

    @property
    def usable_memory_share(self) -> float:
        """`memory_fraction` minus its margin: the fraction of a device's memory to fill."""
        return self.memory_fraction * (1 - self.memory_margin)

    def limit_with_margin(self, name: str) -> float | None:
        """Return the limit of a latency minus its margin; None: no limit."""
        limit: float | None = getattr(self, name)
        return None if limit is None else limit * (1 - self.latency_margin)

    def check_figures(self, figures: Mapping[str, float]) -> "Iterator[LimitCheck]":
        """Yield the comparison of each limit with its figure. A missing figure violates its limit.

        Latency limits are reduced by their margin. The throughput limit has no margin.
        """
        for name in LATENCIES:
            limit = self.limit_with_margin(name)
            if limit is not None:
                yield LimitCheck(name, figures.get(name, math.inf), limit, is_maximum=True)
        if self.tokens_per_s_min is not None:
            tokens_per_s = figures.get("tokens_per_s", 0.0)
            yield LimitCheck("tokens_per_s", tokens_per_s, self.tokens_per_s_min, is_maximum=False)


@dataclass(frozen=True)
class LimitCheck:
    """The comparison of a figure with its limit."""

    figure: str
    value: float
    limit: float  # For a latency, the requested limit minus its margin.
    is_maximum: bool  # True: an upper limit; False: a lower limit.

    @property
    def slack(self) -> float:
        """The unused fraction of the limit; negative if the limit is violated."""
        if self.is_maximum:
            return 1 - self.value / self.limit
        return self.value / self.limit - 1

    def __str__(self) -> str:
        value = format_figure(self.figure, self.value)
        limit = format_figure(self.figure, self.limit)
        bound = "limit minus its margin" if self.is_maximum else "minimum"
        return f"{self.figure} is {value}; the {bound} is {limit}"


def violated_limit(limits: ServiceLimits, workload: Workload, figures: Mapping[str, float]) -> str:
    """Describe overload, or else the most violated limit. Return "" if there is neither."""
    rate = workload.request_rate
    requests_per_s = figures.get("requests_per_s", 0.0)
    if rate is not None and requests_per_s < ANSWERED_FRACTION_MIN * rate:
        return f"answers only {requests_per_s:.3g} of {rate:g} requests/s"
    tightest = min(limits.check_figures(figures), key=lambda check: check.slack, default=None)
    return str(tightest) if tightest is not None and tightest.slack < 0 else ""


def score(objective: Objective, workload: Workload, figures: Mapping[str, float]) -> float:
    """Return the score for an objective; higher is better.

    With a fixed request rate, all candidates generate the same number of tokens per second. The
    objective "throughput" is then the same as "gpus": fewer GPUs score higher. Candidates with the
    same number of GPUs are ordered by the duration of a request.
    """
    request_ms = figures["request_ms_p95"]
    if objective == "latency":
        return -request_ms
    if objective == "gpus" or workload.request_rate is not None:
        per_gpu, total = figures["tokens_per_s_per_gpu"], figures["tokens_per_s"]
        # per_gpu / total is 1 / GPUs. The second term is too small to outweigh a GPU.
        return per_gpu / max(total, 1e-9) - 1e-12 * min(request_ms, 1e9)
    return figures["tokens_per_s_per_gpu"]
