"""A load by stdin, in a process of its own: `python -m planning.measurement.steady_load`.

It sends and times as `preamble bench` does. What it tells is of the time in which the load was
steady: not of its beginning, when all callers come at once, nor of its end, when some have gone. So
short loads can be compared, and held against what was predicted. No torch.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.load.generator import Length, LoadError, Run, Where, Work, quantile, read_dataset, run

LOST_MAX = 0.01  # Of the calls: more of them failed, and what is left tells little.


@dataclass(frozen=True)
class Steady:
    """Between two moments of a run."""

    run: Run
    since: float
    until: float

    @classmethod
    def of(cls, done: Run, concurrency: int | None) -> "Steady":
        """`concurrency`: of a closed loop."""
        until = max(one.due for one in done.sent)
        ends = sorted(one.end for one in done.sent)
        # When as many have ended as began together, those that run are of all ages.
        first = ends[min(concurrency, len(ends)) - 1] if concurrency else until / 10
        if first > until / 2:
            return cls(done, 0.0, max(ends))  # Too short for that: all of it, then.
        return cls(done, first, until)

    def figures(self) -> dict[str, float]:
        good = [one for one in self.run.sent if one.ok]
        seen = [one for one in good if self.since <= one.due <= self.until] or good
        span = max(self.until - self.since, 1e-9)
        messages = [
            count for one in good for when, count in one.messages if self.since < when <= self.until
        ]
        ended = sum(self.since < one.end <= self.until for one in good)
        gaps = [
            gap / count
            for one in good
            for (gap, count), (when, _) in zip(one.gaps, one.messages[1:], strict=True)
            if self.since < when <= self.until
            for _ in range(count)
        ]
        return {
            "tokens_per_s": sum(messages) / span,
            "requests_per_s": ended / span,
            **_spread("ttft_ms", [one.ttft_s for one in seen if one.ttft_s is not None]),
            **_spread("itl_ms", gaps),
            **_spread("request_ms", [one.e2e_s for one in seen]),
        }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = [1e3 * one for one in seconds]
    return {
        f"{name}_mean": math.fsum(values) / len(values),
        f"{name}_p50": quantile(values, 0.5),
        f"{name}_p95": quantile(values, 0.95),
    }


def loaded(job: dict[str, Any]) -> dict[str, float]:
    """The figures of one load; a LoadError where too many calls failed."""
    concurrency: int | None = job["concurrency"]
    dataset = read_dataset(Path(job["dataset"]))
    work = Work(
        rate=job["rate"],
        concurrency=concurrency or 1,
        requests_max=len(dataset),  # A prompt that comes twice would be known the second time.
        duration_s=job["duration_s"],
        warmup_requests=0,  # They would take the first lines; the beginning is left out instead.
        prompt=Length("fixed", 1, 1),
        new=Length("fixed", 1, 1),
        dataset=dataset,
        adapters=("",),
        timeout_s=job["timeout_s"],
    )
    done = run(Where(job["address"]), work)
    bad = [one for one in done.sent if not one.ok]
    if len(bad) > LOST_MAX * len(done.sent):
        first = f"{bad[0].code} {bad[0].reason}".strip()
        raise LoadError(f"{len(bad)} of {len(done.sent)} requests failed: {first}")
    return Steady.of(done, concurrency).figures()


def main() -> int:
    try:
        figures = loaded(json.load(sys.stdin))
    except LoadError as error:
        sys.stderr.write(f"preamble load: {error}\n")
        return 1
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
