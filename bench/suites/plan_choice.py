"""Plan choice benchmark: the planner's choice compared with all configurations of a grid.

The configurations of a grid and the choices of the planner are measured under the same load. The
choice for throughput should be close to the best configuration. The choice under a limit on
inter-token latency should meet the limit. Configurations run in interleaved rounds; figures are
medians.
"""

import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from bench.harness.server_process import saved_random_checkpoint
from bench.harness.targets import verdict_of
from gpt.config import GPTConfig
from planning.inference.estimate import LengthDistribution, ServingSplit, Workload, estimate_serving
from planning.inference.plan import plan_serving
from planning.inference.requirements import PREFILL_PRESETS, Requirements
from planning.inference.search import serving_figures
from planning.inference.service_levels import ServiceLimits
from planning.measurement.calibrate import CalibrationOptions, calibrate
from planning.measurement.serving_trial import ServingTrial
from planning.plan import Plan, Row, SettingValue

# Minimum of (tokens/s of the planner's choice) / (tokens/s of the best configuration).
BEST_SHARE_MIN = 0.92
# The limit on ITL p95 is this factor times the median of the grid's predictions.
ITL_LIMIT_FACTOR = 1.2


@dataclass(frozen=True)
class PlanChoiceSizes:
    """Sizes of the calibration, the load and the grid; tests use smaller ones."""

    rounds: int = 3
    seconds: float = 6.0  # Measuring time of model steps in the calibration.
    load_seconds: int = 12  # Duration of the load, per configuration and round.
    callers: int = 32  # Concurrent calls of the load.
    batches: Sequence[int] = (4, 8, 16, 32)
    prompt_tokens: tuple[float, float] = (160.0, 246.0)  # Mean and 95th percentile.
    new_tokens: tuple[float, float] = (64.0, 93.0)  # Mean and 95th percentile.


@dataclass(frozen=True)
class _PlanGrid:
    """Builds the rows of the grid, and plans for the same requirements."""

    sizes: PlanChoiceSizes
    requirements: Requirements
    model: Path

    def plan(self, limits: ServiceLimits) -> Plan:
        return plan_serving(replace(self.requirements, limits=limits), str(self.model))

    def grid(self) -> Iterator[Row]:
        """Yield all combinations of batch size and prefill preset."""
        request_tokens = round(sum((*self.sizes.prompt_tokens, *self.sizes.new_tokens)))
        for batch in self.sizes.batches:
            for preset in PREFILL_PRESETS:
                step_tokens = max(batch, preset.step_tokens_max)
                kv_tokens = batch * request_tokens // 16 * 16 + 16
                yield self.build_row(
                    ServingSplit(
                        1, 1, 1, batch, step_tokens, kv_tokens, preset.prefill_stall_ms_max
                    )
                )

    def build_row(self, split: ServingSplit) -> Row:
        requirements = self.requirements
        estimate = estimate_serving(
            requirements.model,
            requirements.dtype,
            requirements.workload,
            split,
            requirements.cluster,
            requirements.calibration,
        )
        settings: dict[str, SettingValue] = {
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
        return Row(name, "fits", settings, serving_figures(requirements.workload, split, estimate))


def run_suite(network: GPTConfig, sizes: PlanChoiceSizes = PlanChoiceSizes()) -> Iterator[str]:
    with saved_random_checkpoint(network) as model, tempfile.TemporaryDirectory() as folder:
        options = CalibrationOptions(model=model, seconds=sizes.seconds, reference_models=())
        costs = calibrate(options, lambda line: None)
        workload = Workload(
            LengthDistribution(*sizes.prompt_tokens),
            LengthDistribution(*sizes.new_tokens),
            None,
            sizes.callers,
        )
        requirements = Requirements(
            network, network.dtype, workload, ServiceLimits(), costs.as_cluster(), costs
        )
        plan_grid = _PlanGrid(sizes, requirements, model)
        rows = list(plan_grid.grid())
        # 20 % above the median prediction, because the planner subtracts a margin from the limit.
        limit_ms = ITL_LIMIT_FACTOR * median(row.figures["itl_ms_p95"] for row in rows)
        picks = [
            plan_grid.plan(ServiceLimits()).best,
            plan_grid.plan(ServiceLimits(itl_ms_p95=limit_ms)).best,
        ]
        if None in picks:
            yield f"no configuration chosen for ITL p95 <= {limit_ms:.1f} ms: {verdict_of(False)}"
        rows += [row for row in picks if row is not None]
        trial = ServingTrial(requirements, model, (sizes.load_seconds,))
        medians = yield from _measure_rows(
            rows, sizes, lambda row: dict(trial.run(row, sizes.load_seconds, Path(folder)))
        )
    yield from _format_table(rows, medians)
    yield from pick_verdicts(rows, medians, limit_ms, picks)


def pick_verdicts(
    rows: Sequence[Row],
    medians: Sequence[Mapping[str, float]],
    limit_ms: float,
    picks: Sequence[Row | None],
) -> Iterator[str]:
    """Judge the choice for throughput and the choice under the latency limit."""
    throughput_pick, latency_pick = picks
    if throughput_pick is not None:
        tokens_per_s = medians[rows.index(throughput_pick)]["tokens_per_s"]
        share = tokens_per_s / max(figures["tokens_per_s"] for figures in medians)
        yield (
            f"chosen for throughput: {throughput_pick.name}, "
            f"{100 * share:.1f} % of the best of {len(rows)}; "
            f"target >= {100 * BEST_SHARE_MIN:g} %: {verdict_of(share >= BEST_SHARE_MIN)}"
        )
    if latency_pick is not None:
        itl_ms = medians[rows.index(latency_pick)]["itl_ms_p95"]
        yield (
            f"chosen for ITL p95 <= {limit_ms:.1f} ms: {latency_pick.name}, "
            f"{itl_ms:.1f} ms; "
            f"target <= {limit_ms:.1f} ms: {verdict_of(itl_ms <= limit_ms)}"
        )


def _measure_rows(
    rows: Sequence[Row], sizes: PlanChoiceSizes, measure_row: Callable[[Row], dict[str, float]]
) -> Generator[str, None, list[dict[str, float]]]:
    """Measure all rows in interleaved rounds; return the medians in the order of `rows`."""
    rounds: list[list[dict[str, float]]] = [[] for _ in rows]
    for round_index in range(sizes.rounds):
        for row, samples in zip(rows, rounds, strict=True):
            samples.append(measure_row(row))
        yield f"round {round_index + 1} of {sizes.rounds}: {len(rows)} configurations measured"
    return [
        {name: median(sample[name] for sample in samples) for name in samples[0]}
        for samples in rounds
    ]


def _format_table(rows: Sequence[Row], medians: Sequence[dict[str, float]]) -> Iterator[str]:
    yield f"{'':28} {'tokens/s':>18} {'ITL p95, ms':>18} {'TTFT p95, ms':>18}"
    for row, figures in zip(rows, medians, strict=True):
        cells = [
            f"{figures[name]:9,.1f} ({row.figures[name]:,.1f})".rjust(18)
            for name in ("tokens_per_s", "itl_ms_p95", "ttft_ms_p95")
        ]
        yield f"{row.name[:28]:28} {' '.join(cells)}"
    yield "measured (predicted)"
