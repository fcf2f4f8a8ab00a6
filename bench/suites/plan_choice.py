"""What the planner picks for our server, held against measuring everything there is to pick.

A grid of settings is measured under one load, the plan's pick among them. For throughput it should
be near the best of all; for a limit on the time between tokens it should keep that. Configurations
take turns; of each the median of its rounds counts.
"""

import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from bench.harness.server_process import random_checkpoint
from bench.harness.targets import verdict
from gpt.config import GPTConfig
from planning.inference.estimate import Lengths, ServingSplit, Workload, estimate_serving
from planning.inference.objective import POSTURES, Wish
from planning.inference.plan import plan_serving
from planning.inference.search import figures_of
from planning.inference.service_levels import Limits
from planning.measurement.calibrate import Aims, calibrate
from planning.measurement.serving_trial import ServingTrial
from planning.plan import Cell, Plan, Row

SHARE_MIN = 0.92
LIMIT = 1.2


@dataclass(frozen=True)
class Sizes:
    rounds: int = 3
    seconds: float = 6.0  # For the model's steps.
    load_s: int = 12  # Of each configuration, each time.
    callers: int = 32
    batches: Sequence[int] = (4, 8, 16, 32)
    prompt: tuple[float, float] = (160.0, 246.0)  # Mean and 95th percentile of tokens.
    new: tuple[float, float] = (64.0, 93.0)


@dataclass(frozen=True)
class _Bench:
    sizes: Sizes
    wish: Wish
    model: Path

    def plan(self, limits: Limits) -> Plan:
        return plan_serving(replace(self.wish, limits=limits), str(self.model))

    def grid(self) -> Iterator[Row]:
        """Batches, and how much of a step prompts may have."""
        longest = round(sum((*self.sizes.prompt, *self.sizes.new)))
        for batch in self.sizes.batches:
            for posture in POSTURES:
                step = max(batch, posture.step_tokens)
                kv_tokens = batch * longest // 16 * 16 + 16
                yield self.row(ServingSplit(1, 1, 1, batch, step, kv_tokens, posture.stall_ms))

    def row(self, split: ServingSplit) -> Row:
        wish = self.wish
        found = estimate_serving(
            wish.model, wish.dtype, wish.workload, split, wish.cluster, wish.costs
        )
        settings: dict[str, Cell] = {
            "tp": 1,
            "pp": 1,
            "replicas": 1,
            "running_requests_max": split.running_requests_max,
            "step_tokens_max": split.step_tokens_max,
            "prefill_stall_ms_max": split.prefill_stall_ms_max,
            "kv_tokens_max": split.kv_tokens or 0,
        }
        name = (
            f"batch {split.running_requests_max} steps {split.step_tokens_max}"
            f"/{split.prefill_stall_ms_max:g} ms"
        )
        return Row(name, "fits", settings, figures_of(wish.workload, split, found))


def lines(network: GPTConfig, sizes: Sizes = Sizes()) -> Iterator[str]:
    with random_checkpoint(network) as model, tempfile.TemporaryDirectory() as folder:
        aims = Aims(model=model, seconds=sizes.seconds, plain=())
        costs = calibrate(aims, lambda line: None)
        workload = Workload(Lengths(*sizes.prompt), Lengths(*sizes.new), None, sizes.callers)
        wish = Wish(network, network.dtype, workload, Limits(), costs.cluster(), costs)
        bench = _Bench(sizes, wish, model)
        rows = list(bench.grid())
        # In the middle of what can be had, and a little more for the planner's margin.
        limit_ms = LIMIT * median(one.figures["itl_ms_p95"] for one in rows)
        picks = [bench.plan(Limits()).best, bench.plan(Limits(itl_ms_p95=limit_ms)).best]
        if None in picks:
            yield f"nothing was picked for {limit_ms:.1f} ms between tokens: {verdict(False)}"
        rows += [one for one in picks if one is not None]
        trial = ServingTrial(wish, model, (sizes.load_s,))
        found = yield from _measured(
            rows, sizes, lambda row: dict(trial.run(row, sizes.load_s, Path(folder)))
        )
    yield from _told(rows, found)
    yield from judged(rows, found, limit_ms, picks)


def judged(
    rows: Sequence[Row],
    found: Sequence[Mapping[str, float]],
    limit_ms: float,
    picks: Sequence[Row | None],
) -> Iterator[str]:
    """Of the pick for throughput, and of the one for the limit."""
    fast, quick = picks
    if fast is not None:
        made = found[rows.index(fast)]["tokens_per_s"]
        share = made / max(one["tokens_per_s"] for one in found)
        yield (
            f"picked for throughput: {fast.name}, {100 * share:.1f} % of the best of {len(rows)}; "
            f"target >= {100 * SHARE_MIN:g} %: {verdict(share >= SHARE_MIN)}"
        )
    if quick is not None:
        came_ms = found[rows.index(quick)]["itl_ms_p95"]
        yield (
            f"picked for {limit_ms:.1f} ms between tokens (p95): {quick.name}, {came_ms:.1f} ms; "
            f"target <= {limit_ms:.1f} ms: {verdict(came_ms <= limit_ms)}"
        )


def _measured(
    rows: Sequence[Row], sizes: Sizes, run: Callable[[Row], dict[str, float]]
) -> Generator[str, None, list[dict[str, float]]]:
    """Each in turn, and again; returns the medians, in the rows' order."""
    rounds: list[list[dict[str, float]]] = [[] for _ in rows]
    for turn in range(sizes.rounds):
        for row, some in zip(rows, rounds, strict=True):
            some.append(run(row))
        yield f"round {turn + 1} of {sizes.rounds}: {len(rows)} configurations measured"
    return [{name: median(one[name] for one in some) for name in some[0]} for some in rounds]


def _told(rows: Sequence[Row], found: Sequence[dict[str, float]]) -> Iterator[str]:
    yield f"{'':28} {'tokens/s':>18} {'ms between, p95':>18} {'ms to first, p95':>18}"
    for row, one in zip(rows, found, strict=True):
        cells = [
            f"{one[name]:9,.1f} ({row.figures[name]:,.1f})".rjust(18)
            for name in ("tokens_per_s", "itl_ms_p95", "ttft_ms_p95")
        ]
        yield f"{row.name[:28]:28} {' '.join(cells)}"
    yield "measured, and in brackets what was predicted"
