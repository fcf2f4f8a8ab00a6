"""A machine's calibration: steps are timed and taken apart, kept in a file, and found again there.

Taking apart is checked on steps whose parts are known. Nothing here depends on how long anything
takes: where a clock is needed, it is one that counts.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from clients.load.generator import Run, Sent
from clients.load.report import Report
from gpt.checkpoint.random_init import fresh
from gpt.config import GPTConfig
from gpt.errors import ConfigError, PreambleError
from planning.cli.calibrate import lines_of, make_parser, run
from planning.hardware import DEVICES, Cluster
from planning.inference.calibration_file import (
    Measured,
    Shape,
    StepCosts,
    read_calibration,
    write_calibration,
)
from planning.inference.step_cost import Curve, Steps
from planning.inference.step_pricing import price
from planning.measurement.calibrate import Aims, calibrate, overhead_of
from planning.measurement.step_timing import Kind, fitted, kinds_of, time_model
from tests.support.models import CLASSIC, MODERN

STEPS = Steps(
    rows=Curve(((1.0, 0.010), (8.0, 0.012), (64.0, 0.030), (512.0, 0.200))),
    draws=Curve(((1.0, 0.002), (64.0, 0.008))),
    context_s=1e-6,
    pair_s=2e-8,
    sequence_s=1e-4,
    step_s=0.0,
)


def sized(layers: int, width: int, heads: int) -> GPTConfig:
    return GPTConfig(
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        vocab_size=1000,
        max_position_embeddings=1024,
    )


SMALL, LARGE = sized(4, 256, 4), sized(8, 1024, 16)
COSTS = StepCosts(
    date="2026-01-01T00:00:00Z",
    device="a CPU of a kind",
    kind="cpu",
    memory_bytes=16 << 30,
    flops=1e11,
    bandwidth_bytes=1e10,
    versions={"torch": "2.0"},
    request_s=0.004,
    models=(
        Measured(Shape.of(SMALL), "float32", STEPS, name="small"),
        Measured(Shape.of(LARGE), "float32", replace(STEPS, rows=STEPS.rows.scaled(20))),
    ),
)
CPU = COSTS.cluster()


def test_a_curve_is_straight_between_its_points_and_beyond_the_last() -> None:
    curve = Curve(((1.0, 1.0), (3.0, 5.0), (5.0, 6.0)))
    assert [curve.at(x) for x in (0.5, 1, 2, 3, 4, 7)] == [1.0, 1.0, 3.0, 5.0, 5.5, 7.0]
    assert Curve(((2.0, 4.0),)).at(9) == 4.0
    both = Curve.sum([curve, Curve(((1.0, 1.0), (5.0, 9.0)))])
    assert [both.at(x) for x in (1, 3, 5)] == [2.0, 10.0, 15.0]


# ------------------------------------------------------------------------------------- the file


def test_a_calibration_that_finds_no_room_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken.yaml").mkdir()
    for name in ("taken.yaml", "nowhere/c.yaml"):
        with pytest.raises(ConfigError, match=r"cannot be written.*--output"):
            write_calibration(COSTS, tmp_path / name)
    assert [one.name for one in tmp_path.iterdir()] == ["taken.yaml"]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    write_calibration(COSTS, path)
    assert read_calibration(path) == COSTS
    assert [one.name for one in tmp_path.iterdir()] == ["calibration.yaml"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: record.pop("format"), "format"),
        (lambda record: record.update(format=99), "99"),
        (lambda record: record.pop("models"), "models must be a list"),
        (lambda record: record.update(models=[{"dtype": "float32"}]), "lacks steps"),
        (lambda record: record["models"][0]["steps"].update(rows=[]), "rows"),
        (lambda record: record["models"][0]["steps"].update(draws=[[2, 1], [1, 1]]), "draws"),
        (lambda record: record["models"][0]["shape"].pop("vocab"), "vocab"),
        (lambda record: record.update(flops=-1.0), "flops"),
        (lambda record: record.update(colour="red"), "colour"),
    ],
)
def test_a_broken_file_is_refused_in_a_sentence(
    change: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.yaml"
    write_calibration(COSTS, path)
    record = yaml.safe_load(path.read_text())
    change(record)
    path.write_text(yaml.safe_dump(record))
    with pytest.raises(ConfigError, match=said) as caught:
        read_calibration(path)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------- what steps cost


def test_a_model_that_was_measured_has_its_own_steps() -> None:
    found = price(SMALL, "float32", 1, 1, CPU, COSTS)
    assert found.steps == STEPS and found.request_s == COSTS.request_s
    assert found.trust.source == "calibrated" and found.trust.error == COSTS.error


def test_a_model_between_two_sizes_lies_between_them_and_is_trusted_less() -> None:
    between = sized(8, 512, 8)
    weights = Shape.of(between).layer_weights
    found = price(between, "float32", 1, 1, CPU, COSTS)
    rates = [
        one.steps.rows.at(8) / one.shape.layer_weights
        for one in (*COSTS.models, Measured(Shape.of(between), "", found.steps))
    ]
    assert min(rates[:2]) < rates[2] < max(rates[:2])
    assert Shape.of(SMALL).layer_weights < weights < Shape.of(LARGE).layer_weights
    assert found.trust.error > COSTS.error


@pytest.mark.parametrize(
    ("model", "dtype", "said"),
    [
        (sized(8, 8192, 64), "float32", "far"),
        (SMALL, "bfloat16", "float32, not in bfloat16"),
    ],
)
def test_what_is_far_from_what_was_measured_is_said(
    model: GPTConfig, dtype: str, said: str
) -> None:
    trust = price(model, dtype, 1, 1, CPU, COSTS).trust
    assert said in trust.note and trust.error > 2 * COSTS.error


def test_a_line_of_sizes_is_found_again_from_two_of_them() -> None:
    """Where a layer costs something and each weight something more, any size follows."""

    def steps_of(model: GPTConfig) -> Steps:
        shape = Shape.of(model)
        layer_s = 1e-4 + 1e-9 * shape.layer_weights / shape.layers
        seen = shape.layers * (shape.kv_width + shape.query_width)
        return Steps(
            rows=Curve(((1.0, shape.layers * layer_s), (64.0, 3 * shape.layers * layer_s))),
            draws=Curve(((1.0, 1e-4 + 1e-10 * shape.vocab * shape.hidden),)),
            context_s=1e-10 * seen,
            pair_s=1e-11 * shape.layers * shape.query_width,
            sequence_s=1e-4,
            step_s=1e-3,
        )

    known = [sized(8, width, width // 64) for width in (128, 512, 1024)]
    models = tuple(Measured(Shape.of(one), "float32", steps_of(one)) for one in known)
    costs = replace(COSTS, models=models)
    for model in (sized(3, 256, 4), sized(24, 768, 12), sized(2, 64, 1)):
        found, real = price(model, "float32", 1, 1, CPU, costs).steps, steps_of(model)
        for rows in (1, 30, 64):
            assert found.seconds(rows, 1, 9, 9, 1) == pytest.approx(real.seconds(rows, 1, 9, 9, 1))


def test_ranks_of_one_cpu_share_its_cores() -> None:
    alone, split = (price(LARGE, "float32", *one, CPU, COSTS).steps for one in ((1, 1), (2, 1)))
    assert split.rows.at(64) > alone.rows.at(64)


def test_half_the_bytes_are_read_in_half_the_time() -> None:
    cluster = Cluster(DEVICES["a100-80g"], 1)
    model = sized(48, 6144, 48)
    narrow, wide = (price(model, one, 1, 1, cluster, None) for one in ("bfloat16", "float32"))
    assert wide.steps.rows.at(1) == pytest.approx(2 * narrow.steps.rows.at(1), rel=0.01)
    assert narrow.trust.source == "spec-sheet"
    # 22 B parameters of 2 bytes, at 2.04 TB/s and less.
    weights = Shape.of(model).layer_weights
    assert weights == 12 * 48 * 6144**2
    assert 1.0 < narrow.steps.rows.at(1) / (weights * 2 / 2.039e12) < 1.5


def test_a_shape_counts_what_a_token_passes() -> None:
    assert Shape.of(CLASSIC).layer_weights == 12 * CLASSIC.num_layers * CLASSIC.hidden_size**2
    h, d, f = MODERN.hidden_size, MODERN.kv_channels, MODERN.ffn_hidden_size
    attention = h * d * (2 * MODERN.num_attention_heads + 2 * MODERN.num_query_groups)
    assert Shape.of(MODERN).layer_weights == MODERN.num_layers * (attention + 3 * h * f)
    experts = CLASSIC.with_fields(num_experts=8, moe_router_topk=2, moe_layers=())
    plain, routed = Shape.of(CLASSIC).layer_weights, Shape.of(experts).layer_weights
    assert routed - plain == CLASSIC.num_layers * 8 * CLASSIC.hidden_size**2


# ------------------------------------------------------------------------------------- the parts


def seconds_of(kind: Kind, steps: Steps) -> float:
    decodes = kind.tokens == 1
    context = kind.sequences * (kind.past + 1) if decodes else 0
    pairs = 0 if decodes else kind.tokens * (2 * kind.past + kind.tokens + 1) // 2
    draws = kind.sequences if kind.draws else 0
    return steps.seconds(kind.rows, draws, context, pairs, kind.sequences)


def test_parts_of_steps_are_found_again() -> None:
    found = fitted({kind: seconds_of(kind, STEPS) for kind in kinds_of(SMALL)})
    assert found.context_s == pytest.approx(STEPS.context_s)
    assert found.pair_s == pytest.approx(STEPS.pair_s)
    assert found.sequence_s == pytest.approx(STEPS.sequence_s, rel=0.01)
    for rows in (1, 4, 16, 100, 512):
        assert found.rows.at(rows) == pytest.approx(STEPS.rows.at(rows), rel=0.01)
        assert found.draws.at(rows) == pytest.approx(STEPS.draws.at(rows), rel=0.01)


def test_noise_does_not_make_more_take_less() -> None:
    took = {kind: seconds_of(kind, STEPS) for kind in kinds_of(SMALL)}
    slow = next(kind for kind in took if kind.rows == 4 and not kind.draws)
    took[slow] *= 1.5
    found = fitted(took)
    times = [found.rows.at(rows) for rows in range(1, 600)]
    assert times == sorted(times)


@pytest.mark.parametrize("model", [MODERN, sized(1, 32, 2)], ids=["short", "long"])
def test_a_models_steps_are_timed(model: GPTConfig) -> None:
    torch.set_num_threads(1)
    ticks: Iterator[int] = count()
    timed = time_model(
        fresh(model, 0),
        device="cpu",
        dtype="float32",
        seconds=0.15,
        clock=lambda: next(ticks) * 0.01,
    )
    steps = timed.measured.steps
    assert timed.measured.shape == Shape.of(model) and timed.measured.dtype == "float32"
    # By this clock each step takes a tick, whatever is in it.
    assert steps.rows.at(1) == pytest.approx(0.01, rel=0.01)
    assert steps.context_s == pytest.approx(0, abs=1e-9)
    assert steps.pair_s == pytest.approx(0, abs=1e-9)


def reported(itl_s: float, ttft_s: float) -> Report:
    """Of a call whose tokens came so."""
    messages = [(ttft_s + place * itl_s, 1) for place in range(9)]
    sent = Sent(0.0, first=ttft_s, last=messages[-1][0], end=1.0, messages=messages)
    return Report.of(Run([sent], 1.0, 0.0, open_loop=False))


def test_what_a_server_adds_is_what_it_takes_longer_than_its_steps() -> None:
    reports = {}
    for streams in (1, 4, 16, 32):
        alone_s = STEPS.seconds(streams, streams, streams * 56, 0, streams)
        prompt_s = STEPS.seconds(32, 1, 0, 528, 1)
        more_s = 0.0004 + 0.00015 * streams
        first_s = prompt_s + 0.00055 + 0.003
        reports[streams] = reported(alone_s + more_s, first_s)
    long_s = STEPS.seconds(256, 1, 0, 256 * 257 // 2, 1) + 0.00055 + 0.003 + 224 * 2e-5
    found = overhead_of(STEPS, reports, reported(0.01, long_s))
    assert found is not None
    assert found.token_s == pytest.approx(2e-5)
    assert found.request_s == pytest.approx(0.003 - 32 * 2e-5)
    found = overhead_of(STEPS, reports)
    assert found is not None
    assert found.step_s == pytest.approx(0.0004)
    assert found.sequence_s == pytest.approx(0.00015)
    assert found.request_s == pytest.approx(0.003)


@pytest.mark.slow
def test_a_machine_is_calibrated_and_told(tmp_path: Path) -> None:
    said: list[str] = []
    aims = Aims(dtype="float32", seconds=0.5, plain=((32, 2, 2), (64, 2, 2)))
    costs = calibrate(aims, said.append)
    assert [one.shape.hidden for one in costs.models] == [32, 64]
    # How large each figure is depends on what else the machine does.
    assert min(costs.request_s, costs.models[0].steps.step_s) >= 0
    assert costs.flops > 0 and costs.versions["torch"] == torch.__version__
    assert len(said) == 3
    write_calibration(costs, tmp_path / "c.yaml")
    again = read_calibration(tmp_path / "c.yaml")
    assert lines_of(again)[-1].startswith("2 x 64")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "0"], "--seconds is 0.0"),
        (["nowhere", "--seconds", "1"], "nowhere does not exist"),
        (["--output", "nowhere/c.yaml"], "no directory"),
        (["--dtype", "float12"], "float12"),
    ],
)
def test_what_cannot_be_calibrated_is_said_in_a_sentence(words: list[str], said: str) -> None:
    with pytest.raises(PreambleError, match=said) as caught:
        run(make_parser().parse_args(words), lambda line: None)
    assert "\n" not in str(caught.value)


def test_a_calibration_is_told_in_lines_and_read_by_programs() -> None:
    told = lines_of(COSTS)
    assert "a CPU of a kind, 1 threads, 17.2 GB" in told[0] and "4.0 ms" in told[1]
    # 10 ms of a row, 2 of its head, and 0.1 of a sequence.
    assert told[3].split()[:3] == ["small", "float32", "12.10"]
