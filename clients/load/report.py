"""Report: what a load's calls took, as figures, as text, as JSON and as a picture.

Each figure is defined in docs/bench.md. A percentile is the value that so large a part of all does
not exceed, so it is always one that was measured. Sends nothing and knows no server.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from clients.load.generator import LoadError, Run, Sent, quantile

# An open loop whose calls begin later than this measures the generator as much as the server.
LATE_S_MAX = 0.01
CPU_SHARE_MAX = 0.9
SLO_NAMES = ("ttft", "itl", "e2e")
UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Spread:
    """Of many values, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread | None":
        """None: of nothing."""
        if not seconds:
            return None
        values = [1e3 * one for one in seconds]
        p50, p90, p95, p99 = (quantile(values, part) for part in (0.5, 0.9, 0.95, 0.99))
        mean = math.fsum(values) / len(values)
        return cls(mean, p50, p90, p95, p99, max(values), len(values))


@dataclass(frozen=True)
class Slo:
    """What a request must keep to be a good one: seconds by name (ttft, itl, e2e)."""

    limits: Mapping[str, float]

    @classmethod
    def of(cls, words: str) -> "Slo":
        """`ttft:200ms,itl:20ms`."""
        limits: dict[str, float] = {}
        for word in words.split(","):
            name, _, value = word.strip().partition(":")
            unit = next((one for one in UNITS if value.endswith(one)), "")
            try:
                limits[name] = float(value.removesuffix(unit)) * UNITS[unit]
            except (ValueError, KeyError):
                limits[name] = 0.0
            if name not in SLO_NAMES or not 0 < limits[name] < math.inf:
                raise LoadError(
                    f"--slo: {word!r} is not one of {', '.join(SLO_NAMES)}, a colon, and a time in "
                    "ms or s, as in ttft:200ms,itl:20ms"
                )
        return cls(limits)

    def kept(self, sent: Sent) -> bool:
        """One without a value, as an answer of one token has no time between them, keeps it."""
        values = {"ttft": sent.ttft_s, "itl": sent.tpot_s, "e2e": sent.e2e_s}
        if not sent.ok:
            return False
        return all((values[name] or 0.0) <= limit for name, limit in self.limits.items())


@dataclass(frozen=True)
class Report:
    """Rates are over `seconds`; times are of calls that ended well."""

    seconds: float
    sent: int
    ok: int
    errors: Mapping[str, int]  # By "CODE REASON".
    prompt_tokens: int  # Of random prompts; a dataset's are not counted here.
    tokens: int
    tokens_per_message: float
    requests_per_s: float
    tokens_per_s: float
    goodput_per_s: float | None  # Requests that keep the SLO.
    ttft_ms: Spread | None
    gap_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    refused_ms: Spread | None  # Of calls that ended badly.
    late_ms: Spread | None  # How late the generator itself was, in an open loop.
    generator_cpu_s: float
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, run: Run, slo: Slo | None = None) -> "Report":
        good = [one for one in run.sent if one.ok]
        bad = [one for one in run.sent if not one.ok]
        seconds = max(run.seconds, 1e-9)
        gaps = [gap for one in good for gap in one.gaps]
        tokens, messages = sum(one.tokens for one in good), sum(len(one.messages) for one in good)
        errors = Counter(f"{one.code} {one.reason}".strip() for one in bad)
        kept = None if slo is None else sum(map(slo.kept, run.sent)) / seconds
        late = Spread.of(run.late_s)
        return cls(
            seconds=run.seconds,
            sent=len(run.sent),
            ok=len(good),
            errors=dict(errors.most_common()),
            prompt_tokens=sum(one.prompt_tokens for one in good),
            tokens=tokens,
            tokens_per_message=tokens / max(1, messages),
            requests_per_s=len(good) / seconds,
            tokens_per_s=tokens / seconds,
            goodput_per_s=kept,
            ttft_ms=Spread.of([one.ttft_s for one in good if one.ttft_s is not None]),
            gap_ms=Spread.of([gap for gap, _ in gaps]),
            itl_ms=Spread.of([gap / count for gap, count in gaps for _ in range(count)]),
            tpot_ms=Spread.of([one.tpot_s for one in good if one.tpot_s is not None]),
            e2e_ms=Spread.of([one.e2e_s for one in good]),
            refused_ms=Spread.of([one.e2e_s for one in bad]),
            late_ms=late,
            generator_cpu_s=run.cpu_s,
            warnings=tuple(_warnings(run, late)),
        )

    def json(self) -> dict[str, object]:
        return asdict(self)

    def lines(self) -> list[str]:
        told = [
            f"requests          {self.ok:,} of {self.sent:,} ended well, in {self.seconds:.2f} s",
            f"requests/s        {self.requests_per_s:.2f}",
            f"tokens/s          {self.tokens_per_s:,.1f}  ({self.tokens:,} new tokens, "
            f"{self.tokens_per_message:.2f} in a message)",
        ]
        if self.goodput_per_s is not None:
            told.append(f"goodput           {self.goodput_per_s:.2f} requests/s keep the SLO")
        told += [f"errors            {count:,} x {name}" for name, count in self.errors.items()]
        heads = "".join(f"{head:>10}" for head in ("mean", "p50", "p90", "p95", "p99", "max"))
        told.append(f"{'ms':18}{heads}{'of':>10}")
        spreads = (
            ("first token", self.ttft_ms),
            ("message gap", self.gap_ms),
            ("inter-token", self.itl_ms),
            ("per request", self.tpot_ms),
            ("end to end", self.e2e_ms),
            ("ended badly", self.refused_ms),
            ("sent late by", self.late_ms),
        )
        for name, one in spreads:
            if one is not None:
                values = (one.mean, one.p50, one.p90, one.p95, one.p99, one.max)
                cells = "".join(f"{value:10.2f}" for value in values)
                told.append(f"{name:18}{cells}{one.count:10,}")
        share = 100 * self.generator_cpu_s / max(self.seconds, 1e-9)
        told.append(f"generator's CPU   {self.generator_cpu_s:.2f} s ({share:.0f} % of a core)")
        return told


def _warnings(run: Run, late: Spread | None) -> list[str]:
    told = []
    if late is not None and late.p99 > 1e3 * LATE_S_MAX:
        told.append(
            f"1 of 100 calls began {late.p99:.0f} ms or more after they were due: the generator is "
            "a bottleneck itself; give it a core, or spread the load over several"
        )
    if run.cpu_s > CPU_SHARE_MAX * run.seconds > 0:
        told.append(
            f"the generator used {100 * run.cpu_s / run.seconds:.0f} % of a core, and it has one: "
            "times are too long by its own work; spread the load over several"
        )
    return told


def check_plot() -> None:
    """Before anything is measured: whether a picture can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise LoadError(
            "--plot needs matplotlib, which is not installed; "
            "pip install 'preamble[plots]', or leave it out"
        ) from None


def plot(run: Run, path: Path) -> None:
    """How first tokens and gaps spread, and what the server made over time."""
    check_plot()
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    good = [one for one in run.sent if one.ok]
    figure = Figure(figsize=(12, 4), layout="constrained")
    first, gaps, rate = figure.subplots(1, 3)
    spreads = (
        (first, "first token", [one.ttft_s for one in good if one.ttft_s is not None]),
        (gaps, "between messages", [gap for one in good for gap, _ in one.gaps]),
    )
    for axes, name, seconds in spreads:
        values = sorted(1e3 * one for one in seconds)
        shares = [100 * (place + 1) / len(values) for place in range(len(values))]
        axes.step(values, shares, where="post")
        axes.set(xlabel=f"{name}, ms", ylabel="% of all, at most", ylim=(0, 100))
    width_s = max(run.seconds / 60, 1e-3)
    bins = Counter[int]()
    for one in good:
        for when, tokens in one.messages:
            bins[int(when / width_s)] += tokens
    places = range(int(run.seconds / width_s) + 1)
    rate.step([place * width_s for place in places], [bins[place] / width_s for place in places])
    rate.set(xlabel="s", ylabel="new tokens/s", ylim=(0, None))
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise LoadError(f"--plot: {path} cannot be written ({error})") from None
