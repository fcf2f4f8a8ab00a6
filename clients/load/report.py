"""Load report: time to first token, inter-token latency, throughput, SLO goodput and errors.

The report is written as text, JSON or a plot. docs/bench.md defines each figure. Percentiles are
measured values (nearest rank, without interpolation).
"""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from clients.load.generator import CallRecord, LoadError, LoadRun
from clients.load.percentiles import quantile

# The start delay of a call is its actual start minus its scheduled start. If the p99 of the start
# delays is above this limit, the report warns that the generator is a bottleneck.
START_DELAY_S_MAX = 0.01
# Limit of the generator's CPU use, as a fraction of a core. Above it, the report warns that the
# measured times include delays of the generator.
CPU_SHARE_MAX = 0.9
SLO_NAMES = ("ttft", "itl", "e2e")
UNIT_SECONDS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class LatencySummary:
    """Mean and percentiles of many durations, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    count: int

    @classmethod
    def from_seconds(cls, seconds: Sequence[float]) -> "LatencySummary | None":
        """Summarize durations in seconds; return None for an empty list."""
        if not seconds:
            return None
        values = [1e3 * duration_s for duration_s in seconds]
        p50, p90, p95, p99 = (quantile(values, fraction) for fraction in (0.5, 0.9, 0.95, 0.99))
        mean = math.fsum(values) / len(values)
        return cls(mean, p50, p90, p95, p99, max(values), len(values))


@dataclass(frozen=True)
class Slo:
    """Service level objective of a request: limits in seconds, by name (ttft, itl, e2e).

    The limit `itl` applies to the request's mean time per output token (`CallRecord.tpot_s`).
    """

    limits: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parse a list such as `ttft:200ms,itl:20ms`."""
        limits: dict[str, float] = {}
        for target in text.split(","):
            name, _, value = target.strip().partition(":")
            unit = next((suffix for suffix in UNIT_SECONDS if value.endswith(suffix)), "")
            try:
                limits[name] = float(value.removesuffix(unit)) * UNIT_SECONDS[unit]
            except (ValueError, KeyError):
                limits[name] = 0.0
            if name not in SLO_NAMES or not 0 < limits[name] < math.inf:
                raise LoadError(
                    f"--slo: {target!r} is not NAME:TIME; NAME is one of {', '.join(SLO_NAMES)}, "
                    "TIME has the unit ms or s, as in ttft:200ms,itl:20ms"
                )
        return cls(limits)

    def is_met(self, call: CallRecord) -> bool:
        """Return whether a call succeeded within all limits.

        If the call does not have a time, the limit on it counts as met: a call with one token, for
        example, has no itl.
        """
        times_s = {"ttft": call.ttft_s, "itl": call.tpot_s, "e2e": call.e2e_s}
        if not call.ok:
            return False
        return all((times_s[name] or 0.0) <= limit for name, limit in self.limits.items())


@dataclass(frozen=True)
class LoadReport:
    """Figures of a load. Rates are counts divided by `seconds`, the duration of the load.

    Token counts and latencies are those of successful calls. The exceptions are `refused_ms`, for
    failed calls, and `late_ms`, for all calls.
    """

    seconds: float
    sent: int
    ok: int
    errors: Mapping[str, int]  # Number of failed calls, by "CODE REASON".
    prompt_tokens: int  # Counts prompts of token ids only; the tokens of texts are unknown.
    tokens: int
    tokens_per_message: float
    requests_per_s: float
    tokens_per_s: float
    goodput_per_s: float | None  # Requests per second that meet the SLO; None: no SLO is given.
    ttft_ms: LatencySummary | None
    gap_ms: LatencySummary | None
    itl_ms: LatencySummary | None
    tpot_ms: LatencySummary | None
    e2e_ms: LatencySummary | None
    refused_ms: LatencySummary | None  # Duration of failed calls.
    late_ms: LatencySummary | None  # Delays of calls' starts behind the schedule; open loop only.
    generator_cpu_s: float
    warnings: tuple[str, ...]

    @classmethod
    def from_run(cls, run: LoadRun, slo: Slo | None = None) -> "LoadReport":
        succeeded = [call for call in run.calls if call.ok]
        failed = [call for call in run.calls if not call.ok]
        seconds = max(run.seconds, 1e-9)
        gaps = [gap for call in succeeded for gap in call.message_gaps]
        tokens = sum(call.tokens for call in succeeded)
        messages = sum(len(call.messages) for call in succeeded)
        errors = Counter(f"{call.code} {call.reason}".strip() for call in failed)
        goodput = None if slo is None else sum(map(slo.is_met, run.calls)) / seconds
        start_delay_summary = LatencySummary.from_seconds(run.start_delays_s)
        return cls(
            seconds=run.seconds,
            sent=len(run.calls),
            ok=len(succeeded),
            errors=dict(errors.most_common()),
            prompt_tokens=sum(call.prompt_tokens for call in succeeded),
            tokens=tokens,
            tokens_per_message=tokens / max(1, messages),
            requests_per_s=len(succeeded) / seconds,
            tokens_per_s=tokens / seconds,
            goodput_per_s=goodput,
            ttft_ms=LatencySummary.from_seconds(
                [call.ttft_s for call in succeeded if call.ttft_s is not None]
            ),
            gap_ms=LatencySummary.from_seconds([gap for gap, _ in gaps]),
            itl_ms=LatencySummary.from_seconds(
                [gap / count for gap, count in gaps for _ in range(count)]
            ),
            tpot_ms=LatencySummary.from_seconds(
                [call.tpot_s for call in succeeded if call.tpot_s is not None]
            ),
            e2e_ms=LatencySummary.from_seconds([call.e2e_s for call in succeeded]),
            refused_ms=LatencySummary.from_seconds([call.e2e_s for call in failed]),
            late_ms=start_delay_summary,
            generator_cpu_s=run.cpu_s,
            warnings=tuple(_warnings(run, start_delay_summary)),
        )

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def text_lines(self) -> list[str]:
        lines = [
            f"requests          {self.ok:,} of {self.sent:,} succeeded in {self.seconds:.2f} s",
            f"requests/s        {self.requests_per_s:.2f}",
            f"tokens/s          {self.tokens_per_s:,.1f}  ({self.tokens:,} new tokens, "
            f"{self.tokens_per_message:.2f} per message)",
        ]
        if self.goodput_per_s is not None:
            lines.append(f"goodput           {self.goodput_per_s:.2f} requests/s within the SLO")
        lines += [f"errors            {count:,} x {name}" for name, count in self.errors.items()]
        header = "".join(f"{column:>10}" for column in ("mean", "p50", "p90", "p95", "p99", "max"))
        lines.append(f"{'ms':18}{header}{'count':>10}")
        spreads = (
            ("first token", self.ttft_ms),
            ("message gap", self.gap_ms),
            ("inter-token", self.itl_ms),
            ("per request", self.tpot_ms),
            ("end to end", self.e2e_ms),
            ("failed calls", self.refused_ms),
            ("start delay", self.late_ms),
        )
        for name, summary in spreads:
            if summary is not None:
                values = (
                    summary.mean,
                    summary.p50,
                    summary.p90,
                    summary.p95,
                    summary.p99,
                    summary.max,
                )
                cells = "".join(f"{value:10.2f}" for value in values)
                lines.append(f"{name:18}{cells}{summary.count:10,}")
        cpu_percent = 100 * self.generator_cpu_s / max(self.seconds, 1e-9)
        lines.append(
            f"generator's CPU   {self.generator_cpu_s:.2f} s ({cpu_percent:.0f} % of a core)"
        )
        return lines


def _warnings(run: LoadRun, start_delay_summary: LatencySummary | None) -> list[str]:
    warnings = []
    if start_delay_summary is not None and start_delay_summary.p99 > 1e3 * START_DELAY_S_MAX:
        warnings.append(
            f"1 of 100 calls started {start_delay_summary.p99:.0f} ms or more late: the generator "
            "is a bottleneck; give it a CPU core, or split the load over several generators"
        )
    if run.cpu_s > CPU_SHARE_MAX * run.seconds > 0:
        warnings.append(
            f"the generator used {100 * run.cpu_s / run.seconds:.0f} % of its CPU core: the times "
            "include its own delays; split the load over several generators"
        )
    return warnings


def check_plot() -> None:
    """Raise a LoadError if matplotlib is missing. Call this before the load starts."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise LoadError(
            "--plot needs matplotlib, which is not installed; "
            "pip install 'preamble[plots]', or remove --plot"
        ) from None


def draw_plot(run: LoadRun, path: Path) -> None:
    """Plot the distributions of TTFT and of gaps between messages, and tokens/s over time."""
    check_plot()
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    succeeded = [call for call in run.calls if call.ok]
    figure = Figure(figsize=(12, 4), layout="constrained")
    ttft_axes, gap_axes, rate_axes = figure.subplots(1, 3)
    spreads = (
        (ttft_axes, "first token", [call.ttft_s for call in succeeded if call.ttft_s is not None]),
        (gap_axes, "between messages", [gap for call in succeeded for gap, _ in call.message_gaps]),
    )
    for axes, name, seconds in spreads:
        values = sorted(1e3 * duration_s for duration_s in seconds)
        shares = [100 * (index + 1) / len(values) for index in range(len(values))]
        axes.step(values, shares, where="post")
        axes.set(xlabel=f"{name}, ms", ylabel="cumulative share, %", ylim=(0, 100))
    width_s = max(run.seconds / 60, 1e-3)
    bins = Counter[int]()
    for call in succeeded:
        for time_s, tokens in call.messages:
            bins[int(time_s / width_s)] += tokens
    bin_indices = range(int(run.seconds / width_s) + 1)
    rate_axes.step(
        [index * width_s for index in bin_indices], [bins[index] / width_s for index in bin_indices]
    )
    rate_axes.set(xlabel="s", ylabel="new tokens/s", ylim=(0, None))
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise LoadError(f"--plot: {path} cannot be written ({error})") from None
