"""Plans for serving: what is recommended keeps the limits, beats the others, and can be started."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from planning.hardware import Cluster, find_device
from planning.inference.calibration_file import Measured, Shape, StepCosts
from planning.inference.estimate import Lengths, Workload
from planning.inference.objective import POSTURES, Wish
from planning.inference.plan import plan_serving
from planning.inference.search import _Search, search_serving, splits
from planning.inference.service_levels import LATENCIES, Limits, Objective
from planning.inference.step_cost import Curve, Steps
from planning.model_presets import find_preset
from planning.plan import Plan
from serving.config import ServerConfig

TALK = Workload(Lengths(60, 100), Lengths(12, 20), None, 8)
FREE = Limits()


@cache
def model(name: str = "5b") -> GPTConfig:
    return find_preset(name)


def wish(
    gpus: int = 2,
    workload: Workload = TALK,
    limits: Limits = FREE,
    objective: Objective = "throughput",
    *,
    name: str = "5b",
    fill: bool = False,
) -> Wish:
    cluster = Cluster(find_device("a100-80g"), gpus, min(8, gpus))
    return Wish(model(name), "float16", workload, limits, cluster, None, objective, fill)


@cache
def plan(asked: Wish) -> Plan:
    return plan_serving(asked, "MODEL")


def test_every_prediction_keeps_littles_law() -> None:
    open_loop = replace(TALK, concurrency=None, request_rate=6.0)
    for workload in (TALK, open_loop):
        played = [one for one in search_serving(wish(workload=workload)).all if one.estimate]
        assert len(played) > 5
        for one in played:
            known, told = one.estimate, one.figures
            assert known is not None
            inside = known.requests_per_s * known.request_ms.mean / 1000
            assert known.concurrency == pytest.approx(inside, rel=0.1), one.split
            inside = told["requests_per_s"] * told["request_ms_mean"] / 1000
            assert told["concurrency"] == pytest.approx(inside, rel=0.06), one.split


@pytest.mark.parametrize("objective", ["throughput", "gpus"])
def test_nothing_in_the_whole_grid_is_better_than_what_is_recommended(objective: Objective) -> None:
    asked = wish(limits=Limits(itl_ms_p95=16), objective=objective)
    found, whole = search_serving(asked), _Search(asked)
    for tp, pp in splits(asked.model, 2, asked.gpus):
        for replicas in range(1, asked.gpus // (tp * pp) + 1):
            for batch in (2, 4, 6, 8, 12):
                for posture in POSTURES:
                    whole._try((tp, pp), replicas, batch, posture)
    assert found.best is not None
    best = whole._score(found.best)
    others = [whole._score(one) for one in whole.candidates.values() if one.standing == "fits"]
    assert max(others) <= best + 0.02 * abs(best)


def test_what_is_recommended_keeps_each_limit_with_its_margin() -> None:
    limits = Limits(itl_ms_p95=25, ttft_ms_p95=300, request_ms_p95=600, latency_margin=0.2)
    made = plan(wish(limits=limits))
    assert made.best is not None
    kept = [name for name in LATENCIES if getattr(limits, name) is not None]
    for row in made.rows:
        if row.standing in ("best", "fits"):
            assert all(row.figures[name] <= 0.8 * getattr(limits, name) for name in kept)
    assert made.binding[0].startswith(min(kept, key=lambda name: _left(made, name, limits)))


def _left(made: Plan, name: str, limits: Limits) -> float:
    assert made.best is not None
    return 1 - made.best.figures[name] / float(getattr(limits, name))


def test_what_fits_has_the_memory_that_was_allowed_and_no_more() -> None:
    for share in (0.3, 0.9):
        made = plan(wish(limits=Limits(memory_fraction=share, memory_margin=0.1)))
        fits = [row for row in made.rows if row.standing in ("best", "fits")]
        assert fits
        for row in fits:
            assert row.memory is not None
            assert row.memory.total <= share * 0.9 * row.memory.capacity


@settings(max_examples=3, deadline=None, derandomize=True)
@given(callers=st.integers(2, 12), output=st.integers(5, 20), limit=st.sampled_from([20.0, 60.0]))
def test_more_gpus_never_make_less(callers: int, output: int, limit: float) -> None:
    workload = Workload(Lengths(50, 100), Lengths(output, output), None, callers)
    before = 0.0
    for gpus in (1, 2, 4):
        asked = wish(gpus, workload, Limits(itl_ms_p95=limit))
        made = [one for one in search_serving(asked).all if one.standing in ("best", "fits")]
        most = max((one.figures["tokens_per_s"] for one in made), default=0.0)
        assert most >= 0.98 * before
        before = most


def test_more_tensor_ranks_make_a_single_request_quicker() -> None:
    alone = replace(TALK, concurrency=1)
    rows = plan(wish(8, alone, objective="latency", name="20b")).rows
    times = [
        min(
            row.figures["request_ms_p50"]
            for row in rows
            if row.settings["tp"] == tp and row.settings["pp"] == 1 and row.figures
        )
        for tp in (1, 2, 4)
    ]
    assert times == sorted(times, reverse=True)


def test_the_fewest_gpus_are_as_few_as_answer_what_comes() -> None:
    few = replace(TALK, concurrency=None, request_rate=4.0)
    many = replace(TALK, concurrency=None, request_rate=300.0)
    plans = [plan(wish(2, load, objective="gpus")) for load in (few, many)]
    counts = [made.best.figures["gpus"] for made in plans if made.best is not None]
    assert counts[0] == 1 < counts[1]
    for row in plans[1].rows:
        if row.standing in ("best", "fits"):
            assert row.figures["gpus"] >= counts[1]


# ------------------------------------------------------------------------------- nothing fits


def test_where_weights_do_not_fit_the_split_that_holds_them_is_named_and_does() -> None:
    made = plan(wish(2, name="175b"))
    assert made.best is None and "weights take" in made.advice[0]
    assert made.advice[1].startswith("TP2 PP3, 6 GPUs, is the smallest split")
    assert plan(wish(6, name="175b")).best is not None
    assert made.command == made.settings_yaml == ""


def test_where_keys_and_values_do_not_fit_it_says_how_many_do() -> None:
    long = replace(TALK, input_tokens=Lengths(1900, 1900))
    made = plan(wish(1, long, Limits(memory_fraction=0.144)))
    assert made.best is None
    assert "room for keys and values of" in made.advice[0], made.advice


def test_on_a_machine_of_its_own_a_batch_is_as_large_as_its_memory_holds_and_pays() -> None:
    rows, draws = Curve(((1, 0.01), (512, 0.1))), Curve(((1, 0.002), (64, 0.004)))
    steps = Steps(rows, draws, context_s=1e-8, pair_s=1e-9, sequence_s=2e-5, step_s=1e-3)
    network = model("5b").with_fields(num_layers=2, moe_layers=(False, False))
    measured = Measured(Shape.of(network), "float32", steps)
    costs = StepCosts("", "", "cpu", 16 << 30, 1e11, 1e10, models=(measured,))
    callers = 64
    load = Workload(Lengths(60, 100), Lengths(12, 20), None, callers)
    asked = Wish(network, "float32", load, Limits(), costs.cluster(), costs)
    best = search_serving(asked).best
    # Of the room for one request of the longest context some less would be taken.
    assert best is not None and best.split.running_requests_max == callers


def test_where_a_latency_is_too_short_the_shortest_is_named_and_can_be_kept() -> None:
    made = plan(wish(limits=Limits(itl_ms_p95=1)))
    assert made.best is None and "no candidate has ITL p95 under" in made.advice[0]
    assert "reading the weights alone" in made.advice[0]
    floor = float(made.advice[0].split(" could be kept")[0].split()[-2])
    assert plan(wish(limits=Limits(itl_ms_p95=floor))).best is not None


def test_where_too_much_is_asked_for_it_says_what_it_takes() -> None:
    crowd = replace(TALK, concurrency=None, request_rate=2000.0)
    made = plan(wish(2, crowd))
    assert made.best is None and "it takes" in made.advice[0] and "2 may be used" in made.advice[0]
    made = plan(wish(1, limits=Limits(tokens_per_s_min=50_000)))
    assert made.best is None and "replicas" in made.advice[0]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"itl_ms_p95": -1.0}, "more than 0"),
        ({"memory_fraction": 1.5}, "at most 1"),
        ({"latency_margin": 1.0}, "less than 1"),
        ({"itl_ms_p50": 40.0, "itl_ms_p95": 20.0}, "set itl_ms_p50 to 20 at most"),
        ({"ttft_ms_p95": 40.0, "request_ms_p95": 20.0}, "set ttft_ms_p95 to 20 at most"),
        ({"tokens_per_s_min": math.inf}, "finite"),
    ],
)
def test_limits_that_cannot_be_are_refused(limits: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Limits(**limits)  # type: ignore[arg-type]


def test_a_load_that_cannot_bring_what_is_asked_for_is_refused() -> None:
    slow = replace(TALK, concurrency=None, request_rate=2.0)
    with pytest.raises(ConfigError, match="ask for 24; set at most that, or a request_rate of 83"):
        wish(workload=slow, limits=Limits(tokens_per_s_min=1000))
    with pytest.raises(ConfigError, match="the model's context is 2048"):
        wish(workload=replace(TALK, input_tokens=Lengths(3000, 4000)))


# ------------------------------------------------------------------------------------- its outputs


def test_the_settings_file_is_one_that_a_server_reads(tmp_path: Path) -> None:
    tuned = replace(TALK, adapters=100, virtual_tokens=50)
    made = plan(wish(4, tuned, name="20b"))
    assert made.best is not None and made.command.startswith("preamble serve --config ")
    file = tmp_path / "serve_config.yaml"
    file.write_text(made.settings_yaml)
    read = ServerConfig.read(str(file), {})
    for name, value in made.best.settings.items():
        if name != "replicas":
            assert getattr(read, name) == value
    assert (read.device, read.dtype, read.adapter_rows_max) == ("cuda", "float16", 5000)
    assert made.settings_yaml.startswith(f"# {made.best.name}\n# predicted: ")


def test_every_candidate_has_a_name_of_its_own_and_what_is_refused_a_reason() -> None:
    made = plan(wish(4, limits=Limits(itl_ms_p95=20)))
    names = [row.name for row in made.rows]
    assert len(set(names)) == len(names)
    assert all(bool(row.reason) == (row.standing == "rejected") for row in made.rows)
    assert made.why_not and all(": " in line for line in made.why_not)
    assert made.best is not None and made.best is made.rows[0]
