"""Calibration of a machine: step timing, the fit of step costs, the file, and step pricing.

The fit is checked on steps with known parts. No test depends on real durations: a counter replaces
the clock.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from clients.load.generator import CallRecord, LoadRun
from clients.load.report import LoadReport
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from gpt.costs.attention_span import AttentionSpan
from gpt.errors import ConfigError, PreambleError
from planning.cli.calibrate import make_parser, run, summary_lines
from planning.hardware import DEVICES, Cluster
from planning.inference.calibration_file import (
    Calibration,
    MeasuredModel,
    ModelShape,
    read_calibration,
    write_calibration,
)
from planning.inference.model_split import ModelSplit
from planning.inference.step_cost import PiecewiseLinear, StepCostModel
from planning.inference.step_pricing import price_steps
from planning.measurement.calibrate import CalibrationOptions, calibrate, fit_overhead
from planning.measurement.step_timing import StepShape, fit_step_costs, step_shapes, time_model
from tests.support.models import CLASSIC, MODERN

STEPS = StepCostModel(
    rows=PiecewiseLinear(((1.0, 0.010), (8.0, 0.012), (64.0, 0.030), (512.0, 0.200))),
    draws=PiecewiseLinear(((1.0, 0.002), (64.0, 0.008))),
    context_s=1e-6,
    pair_s=2e-8,
    sequence_s=1e-4,
    step_s=0.0,
)


def config_of_size(layers: int, width: int, heads: int) -> GPTConfig:
    return GPTConfig(
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        vocab_size=1000,
        max_position_embeddings=1024,
    )


SMALL = config_of_size(4, 256, 4)
LARGE = config_of_size(8, 1024, 16)
COSTS = Calibration(
    date="2026-01-01T00:00:00Z",
    device="a CPU of a kind",
    kind="cpu",
    memory_bytes=16 << 30,
    flops=1e11,
    bandwidth_bytes=1e10,
    versions={"torch": "2.0"},
    request_s=0.004,
    models=(
        MeasuredModel(ModelShape.from_config(SMALL), "float32", STEPS, name="small"),
        MeasuredModel(
            ModelShape.from_config(LARGE), "float32", replace(STEPS, rows=STEPS.rows.scaled_by(20))
        ),
    ),
)
CPU = COSTS.as_cluster()


def test_piecewise_linear_interpolates_and_extrapolates() -> None:
    curve = PiecewiseLinear(((1.0, 1.0), (3.0, 5.0), (5.0, 6.0)))
    assert [curve.interpolate(x) for x in (0.5, 1, 2, 3, 4, 7)] == [1.0, 1.0, 3.0, 5.0, 5.5, 7.0]
    assert PiecewiseLinear(((2.0, 4.0),)).interpolate(9) == 4.0
    summed = PiecewiseLinear.sum_curves([curve, PiecewiseLinear(((1.0, 1.0), (5.0, 9.0)))])
    assert [summed.interpolate(x) for x in (1, 3, 5)] == [2.0, 10.0, 15.0]


# ------------------------------------------------------------------------------------- the file


def test_failed_calibration_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "taken.yaml").mkdir()
    for name in ("taken.yaml", "nowhere/c.yaml"):
        with pytest.raises(ConfigError, match=r"cannot write.*--output"):
            write_calibration(COSTS, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["taken.yaml"]


def test_written_calibration_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    write_calibration(COSTS, path)
    assert read_calibration(path) == COSTS
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.yaml"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.pop("format"), "format"),
        (lambda record: record.update(format=99), "99"),
        (lambda record: record.pop("models"), "models must be a list"),
        (lambda record: record.update(models=[{"dtype": "float32"}]), "has no mapping 'steps'"),
        (lambda record: record["models"][0]["steps"].update(rows=[]), "rows"),
        (lambda record: record["models"][0]["steps"].update(draws=[[2, 1], [1, 1]]), "draws"),
        (lambda record: record["models"][0]["shape"].pop("vocab"), "vocab"),
        (lambda record: record.update(flops=-1.0), "flops"),
        (lambda record: record.update(colour="red"), "colour"),
    ],
)
def test_broken_calibration_raises_config_error(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.yaml"
    write_calibration(COSTS, path)
    record = yaml.safe_load(path.read_text())
    change(record)
    path.write_text(yaml.safe_dump(record))
    with pytest.raises(ConfigError, match=message) as caught:
        read_calibration(path)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------- step costs


def test_measured_model_uses_its_own_step_costs() -> None:
    step_prices = price_steps(SMALL, "float32", ModelSplit(1, 1), CPU, COSTS)
    assert step_prices.steps == STEPS and step_prices.request_s == COSTS.request_s
    assert (
        step_prices.confidence.source == "calibrated"
        and step_prices.confidence.error == COSTS.error
    )


def test_interpolated_model_lies_between_neighbours_with_a_wider_error() -> None:
    middle_model = config_of_size(8, 512, 8)
    weights = ModelShape.from_config(middle_model).layer_weights
    step_prices = price_steps(middle_model, "float32", ModelSplit(1, 1), CPU, COSTS)
    rates = [
        measured_model.steps.rows.interpolate(8) / measured_model.shape.layer_weights
        for measured_model in (
            *COSTS.models,
            MeasuredModel(ModelShape.from_config(middle_model), "", step_prices.steps),
        )
    ]
    assert min(rates[:2]) < rates[2] < max(rates[:2])
    assert (
        ModelShape.from_config(SMALL).layer_weights
        < weights
        < ModelShape.from_config(LARGE).layer_weights
    )
    assert step_prices.confidence.error > COSTS.error


@pytest.mark.parametrize(
    ("model", "dtype", "message"),
    [
        (config_of_size(8, 8192, 64), "float32", "far"),
        (SMALL, "bfloat16", "float32, not in bfloat16"),
    ],
)
def test_extrapolated_step_costs_have_a_note(model: GPTConfig, dtype: str, message: str) -> None:
    confidence = price_steps(model, dtype, ModelSplit(1, 1), CPU, COSTS).confidence
    assert message in confidence.note and confidence.error > 2 * COSTS.error


def test_linear_step_costs_are_recovered_from_two_sizes() -> None:
    """If a layer's cost is linear in its weights, two sizes determine all others."""

    def steps_of(model: GPTConfig) -> StepCostModel:
        shape = ModelShape.from_config(model)
        layer_s = 1e-4 + 1e-9 * shape.layer_weights / shape.layers
        attended = shape.layers * (shape.kv_width + shape.query_width)
        return StepCostModel(
            rows=PiecewiseLinear(
                ((1.0, shape.layers * layer_s), (64.0, 3 * shape.layers * layer_s))
            ),
            draws=PiecewiseLinear(((1.0, 1e-4 + 1e-10 * shape.vocab * shape.hidden),)),
            context_s=1e-10 * attended,
            pair_s=1e-11 * shape.layers * shape.query_width,
            sequence_s=1e-4,
            step_s=1e-3,
        )

    measured_configs = [config_of_size(8, width, width // 64) for width in (128, 512, 1024)]
    models = tuple(
        MeasuredModel(ModelShape.from_config(measured_config), "float32", steps_of(measured_config))
        for measured_config in measured_configs
    )
    costs = replace(COSTS, models=models)
    for model in (config_of_size(3, 256, 4), config_of_size(24, 768, 12), config_of_size(2, 64, 1)):
        predicted = price_steps(model, "float32", ModelSplit(1, 1), CPU, costs).steps
        expected = steps_of(model)
        for rows in (1, 30, 64):
            assert predicted.step_seconds(rows, 1, 9, 9, 1) == pytest.approx(
                expected.step_seconds(rows, 1, 9, 9, 1)
            )


def test_ranks_of_one_cpu_share_its_cores() -> None:
    single_rank, two_ranks = (
        price_steps(LARGE, "float32", split, CPU, COSTS).steps
        for split in (ModelSplit(1, 1), ModelSplit(2, 1))
    )
    assert two_ranks.rows.interpolate(64) > single_rank.rows.interpolate(64)


def test_halving_the_bytes_halves_the_step_time() -> None:
    cluster = Cluster(DEVICES["a100-80g"], 1)
    model = config_of_size(48, 6144, 48)
    bf16_step, fp32_step = (
        price_steps(model, dtype, ModelSplit(1, 1), cluster, None)
        for dtype in ("bfloat16", "float32")
    )
    assert fp32_step.steps.rows.interpolate(1) == pytest.approx(
        2 * bf16_step.steps.rows.interpolate(1), rel=0.01
    )
    assert bf16_step.confidence.source == "spec-sheet"
    # 22 B parameters of 2 bytes, at 2.04 TB/s at most.
    weights = ModelShape.from_config(model).layer_weights
    assert weights == 12 * 48 * 6144**2
    assert 1.0 < bf16_step.steps.rows.interpolate(1) / (weights * 2 / 2.039e12) < 1.5


def test_model_shape_counts_active_weights() -> None:
    assert (
        ModelShape.from_config(CLASSIC).layer_weights
        == 12 * CLASSIC.num_layers * CLASSIC.hidden_size**2
    )
    h = MODERN.hidden_size
    d = MODERN.kv_channels
    f = MODERN.ffn_hidden_size
    attention = h * d * (2 * MODERN.num_attention_heads + 2 * MODERN.num_query_groups)
    assert ModelShape.from_config(MODERN).layer_weights == MODERN.num_layers * (
        attention + 3 * h * f
    )
    experts = CLASSIC.with_fields(num_experts=8, moe_router_topk=2, moe_layers=())
    plain = ModelShape.from_config(CLASSIC).layer_weights
    routed = ModelShape.from_config(experts).layer_weights
    assert routed - plain == CLASSIC.num_layers * 8 * CLASSIC.hidden_size**2


# ------------------------------------------------------------------------------------- the parts


def seconds_of(kind: StepShape, steps: StepCostModel, window: int = 1 << 20) -> float:
    """The duration of a step of a model; half of its layers have the window."""
    positions = range(kind.context + 1, kind.context + kind.tokens + 1)
    keys = kind.sequences * sum((position + min(position, window)) / 2 for position in positions)
    decodes = kind.tokens == 1
    context = keys if decodes else 0
    pairs = 0 if decodes else keys
    draws = kind.sequences if kind.samples else 0
    return steps.step_seconds(kind.rows, draws, context, pairs, kind.sequences)


@pytest.mark.parametrize("window", [1 << 20, 100])
def test_fit_recovers_step_cost_parts(window: int) -> None:
    """The cost of a key does not depend on the windows."""
    fitted = fit_step_costs(
        {kind: seconds_of(kind, STEPS, window) for kind in step_shapes(SMALL)},
        AttentionSpan(((None, 3), (window, 3))),
    )
    assert fitted.context_s == pytest.approx(STEPS.context_s)
    assert fitted.pair_s == pytest.approx(STEPS.pair_s)
    assert fitted.sequence_s == pytest.approx(STEPS.sequence_s, rel=0.01)
    for rows in (1, 4, 16, 100, 512):
        assert fitted.rows.interpolate(rows) == pytest.approx(
            STEPS.rows.interpolate(rows), rel=0.01
        )
        assert fitted.draws.interpolate(rows) == pytest.approx(
            STEPS.draws.interpolate(rows), rel=0.01
        )


def test_fitted_curve_is_monotone_despite_noise() -> None:
    durations = {kind: seconds_of(kind, STEPS) for kind in step_shapes(SMALL)}
    slow = next(kind for kind in durations if kind.rows == 4 and not kind.samples)
    durations[slow] *= 1.5
    fitted = fit_step_costs(durations)
    times = [fitted.rows.interpolate(rows) for rows in range(1, 600)]
    assert times == sorted(times)


@pytest.mark.parametrize("model", [MODERN, config_of_size(1, 32, 2)], ids=["short", "long"])
def test_time_model_returns_step_costs(model: GPTConfig) -> None:
    torch.set_num_threads(1)
    ticks: Iterator[int] = count()
    measured_model = time_model(
        random_init_checkpoint(model, 0),
        device="cpu",
        dtype="float32",
        seconds=0.15,
        clock=lambda: next(ticks) * 0.01,
    )
    steps = measured_model.measured.steps
    assert (
        measured_model.measured.shape == ModelShape.from_config(model)
        and measured_model.measured.dtype == "float32"
    )
    # With this clock each step takes one tick, whatever its size.
    assert steps.rows.interpolate(1) == pytest.approx(0.01, rel=0.01)
    assert steps.context_s == pytest.approx(0, abs=1e-9)
    assert steps.pair_s == pytest.approx(0, abs=1e-9)


def load_report(itl_s: float, ttft_s: float) -> LoadReport:
    """A load report of requests with these latencies."""
    messages = [(ttft_s + number * itl_s, 1) for number in range(9)]
    call = CallRecord(
        0.0, first_token_s=ttft_s, last_token_s=messages[-1][0], ended_s=1.0, messages=messages
    )
    return LoadReport.from_run(LoadRun([call], 1.0, 0.0, open_loop=False))


def test_overhead_is_latency_minus_step_time() -> None:
    reports = {}
    for streams in (1, 4, 16, 32):
        alone_s = STEPS.step_seconds(streams, streams, streams * 56, 0, streams)
        prompt_s = STEPS.step_seconds(32, 1, 0, 528, 1)
        more_s = 0.0004 + 0.00015 * streams
        first_s = prompt_s + 0.00055 + 0.003
        reports[streams] = load_report(alone_s + more_s, first_s)
    long_s = STEPS.step_seconds(256, 1, 0, 256 * 257 // 2, 1) + 0.00055 + 0.003 + 224 * 2e-5
    overhead = fit_overhead(STEPS, reports, load_report(0.01, long_s))
    assert overhead is not None
    assert overhead.prompt_token_s == pytest.approx(2e-5)
    assert overhead.request_s == pytest.approx(0.003 - 32 * 2e-5)
    overhead = fit_overhead(STEPS, reports)
    assert overhead is not None
    assert overhead.step_s == pytest.approx(0.0004)
    assert overhead.sequence_s == pytest.approx(0.00015)
    assert overhead.request_s == pytest.approx(0.003)


@pytest.mark.slow
def test_calibrate_command_writes_a_calibration(tmp_path: Path) -> None:
    messages: list[str] = []
    aims = CalibrationOptions(
        dtype="float32", seconds=0.5, reference_models=((32, 2, 2), (64, 2, 2))
    )
    costs = calibrate(aims, messages.append)
    assert [model.shape.hidden for model in costs.models] == [32, 64]
    # The size of each figure depends on the load of the machine.
    assert min(costs.request_s, costs.models[0].steps.step_s) >= 0
    assert costs.flops > 0 and costs.versions["torch"] == torch.__version__
    assert len(messages) == 3
    write_calibration(costs, tmp_path / "c.yaml")
    reread = read_calibration(tmp_path / "c.yaml")
    assert summary_lines(reread)[-1].startswith("2 x 64")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "--seconds is 0.0"),
        (["nowhere", "--seconds", "1"], "nowhere does not exist"),
        (["--output", "nowhere/c.yaml"], "is not a directory"),
        (["--dtype", "float12"], "float12"),
    ],
)
def test_invalid_calibration_arguments_raise(arguments: list[str], message: str) -> None:
    with pytest.raises(PreambleError, match=message) as caught:
        run(make_parser().parse_args(arguments), lambda line: None)
    assert "\n" not in str(caught.value)


def test_calibration_is_printed_as_text_and_json() -> None:
    summary = summary_lines(COSTS)
    assert "a CPU of a kind, 1 threads, 17.2 GB" in summary[0] and "4.0 ms" in summary[1]
    # 10 ms per row, 2 of its head, and 0.1 per sequence.
    assert summary[3].split()[:3] == ["small", "float32", "12.10"]
