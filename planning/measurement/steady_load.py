"""Steady-state load: runs a load and reports its latency and throughput in the steady window.

`python -m planning.measurement.steady_load` reads the load as JSON from stdin, sends and times its
requests as `preamble bench` does, and prints the figures as JSON. The steady window excludes the
start, when all clients arrive at once, and the end, when some clients have finished. The figures of
short loads are therefore comparable with each other and with predictions. The module does not
import torch.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.load.generator import (
    LengthSampler,
    LoadError,
    LoadRun,
    LoadSpec,
    ServerEndpoint,
    read_dataset,
    run_load,
)
from clients.load.percentiles import quantile

FAILED_FRACTION_MAX = 0.01  # If a larger fraction of the requests fails, the load has failed.


@dataclass(frozen=True)
class SteadyWindow:
    """The part of a run between two times."""

    run: LoadRun
    start_s: float
    end_s: float

    @classmethod
    def from_run(cls, load_run: LoadRun, concurrency: int | None) -> "SteadyWindow":
        """Find the steady window. `concurrency` is the number of clients; None: open loop.

        The window begins when the load is steady, and ends when the last request is due. If it
        would begin after half of the time from the start of the run to its end, the window is the
        whole run.
        """
        last_due_s = max(request.due_s for request in load_run.calls)
        end_times = sorted(request.ended_s for request in load_run.calls)
        if concurrency:
            # After the first `concurrency` requests have ended, the clients no longer start
            # requests at the same time.
            steady_s = end_times[min(concurrency, len(end_times)) - 1]
        else:
            steady_s = last_due_s / 10
        if steady_s > last_due_s / 2:
            return cls(load_run, 0.0, max(end_times))
        return cls(load_run, steady_s, last_due_s)

    def measured_figures(self) -> dict[str, float]:
        """Return the figures of the window, named as in a plan."""
        succeeded = [request for request in self.run.calls if request.ok]
        due_in_window = [
            request for request in succeeded if self.start_s <= request.due_s <= self.end_s
        ] or succeeded
        window_s = max(self.end_s - self.start_s, 1e-9)
        token_counts = [
            count
            for request in succeeded
            for when, count in request.messages
            if self.start_s < when <= self.end_s
        ]
        finished_count = sum(self.start_s < request.ended_s <= self.end_s for request in succeeded)
        # A gap before a message with n tokens counts as n gaps of gap / n seconds.
        gaps = [
            gap / count
            for request in succeeded
            for (gap, count), (when, _) in zip(
                request.message_gaps, request.messages[1:], strict=True
            )
            if self.start_s < when <= self.end_s
            for _ in range(count)
        ]
        return {
            "tokens_per_s": sum(token_counts) / window_s,
            "requests_per_s": finished_count / window_s,
            **_summary_figures(
                "ttft_ms",
                [request.ttft_s for request in due_in_window if request.ttft_s is not None],
            ),
            **_summary_figures("itl_ms", gaps),
            **_summary_figures("request_ms", [request.e2e_s for request in due_in_window]),
        }


def _summary_figures(name: str, seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    milliseconds = [1e3 * duration_s for duration_s in seconds]
    return {
        f"{name}_mean": math.fsum(milliseconds) / len(milliseconds),
        f"{name}_p50": quantile(milliseconds, 0.5),
        f"{name}_p95": quantile(milliseconds, 0.95),
    }


def run_job(job: dict[str, Any]) -> dict[str, float]:
    """Run a load and return its figures. Raise LoadError if too many requests failed."""
    concurrency: int | None = job["concurrency"]
    dataset = read_dataset(Path(job["dataset"]))
    work = LoadSpec(
        rate=job["rate"],
        concurrency=concurrency or 1,
        # Each prompt is sent at most once: a repeated prompt would be in the prefix cache.
        requests_max=len(dataset),
        duration_s=job["duration_s"],
        warmup_requests=0,  # The steady window excludes the start.
        prompt_length=LengthSampler("fixed", 1, 1),
        output_length=LengthSampler("fixed", 1, 1),
        dataset=dataset,
        adapters=("",),
        timeout_s=job["timeout_s"],
    )
    load_run = run_load(ServerEndpoint(job["address"]), work)
    failed = [request for request in load_run.calls if not request.ok]
    if len(failed) > FAILED_FRACTION_MAX * len(load_run.calls):
        first = f"{failed[0].code} {failed[0].reason}".strip()
        raise LoadError(
            f"{len(failed)} of {len(load_run.calls)} requests failed; the first error is: {first}"
        )
    return SteadyWindow.from_run(load_run, concurrency).measured_figures()


def main() -> int:
    try:
        figures = run_job(json.load(sys.stdin))
    except LoadError as error:
        sys.stderr.write(f"preamble load: {error}\n")
        return 1
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
