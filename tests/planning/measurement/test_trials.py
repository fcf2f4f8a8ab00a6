"""Trials of plan candidates: a real server under load, and a few real steps of `tune`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clients.client import Client
from clients.options import Options
from gpt.settings import read_yaml
from planning.inference.calibration_file import Calibration, MeasuredModel, ModelShape
from planning.inference.estimate import LengthDistribution, Workload
from planning.inference.plan import plan_serving
from planning.inference.requirements import Requirements
from planning.inference.service_levels import ServiceLimits
from planning.inference.step_cost import PiecewiseLinear, StepCostModel
from planning.measurement.child_command import run_child
from planning.measurement.rounds import measure_plan
from planning.measurement.serving_trial import ServingTrial
from planning.measurement.tuning_trial import TuningTrial
from planning.plan import Axis, Plan, Row
from serving.profiles import describe_machine
from tests.support.servers import CONFIG, write_checkpoint
from tests.support.tuning_settings import write_settings

pytestmark = pytest.mark.slow  # Each candidate is a process that loads torch.


def chat_requirements() -> Requirements:
    steps = StepCostModel(
        rows=PiecewiseLinear(((1, 0.001), (512, 0.02))),
        draws=PiecewiseLinear(((1, 0.0002), (64, 0.002))),
        context_s=1e-8,
        pair_s=1e-9,
        sequence_s=2e-5,
        step_s=1e-3,
    )
    device = describe_machine("cpu").split(" of ")[1]
    measured_model = MeasuredModel(ModelShape.from_config(CONFIG), "float32", steps)
    costs = Calibration("2026-01-01", device, "cpu", 8 << 30, 1e10, 1e10, models=(measured_model,))
    load = Workload(
        LengthDistribution(20, 30),
        LengthDistribution(12, 16),
        None,
        4,
        adapters=2,
        virtual_tokens=5,
    )
    return Requirements(
        CONFIG, "float32", load, ServiceLimits(itl_ms_p95=5000), costs.as_cluster(), costs
    )


def test_serving_candidates_are_measured_and_the_best_settings_start_a_server(
    tmp_path: Path,
) -> None:
    model = write_checkpoint(tmp_path / "model", tokenizer=False)
    requirements = chat_requirements()
    plan = plan_serving(requirements, str(model))
    assert plan.best is not None
    # A KV cache larger than any machine's memory: the server's error is the reason.
    huge = {**plan.rows[1].settings, "kv_tokens_max": 10**12}
    rows = [plan.rows[0], replace(plan.rows[1], settings=huge, name="huge")]
    trial = ServingTrial(requirements, model, efforts=(8,), start_timeout_s=120)
    measured = measure_plan(
        replace(plan, rows=rows), trial, tmp_path / "plan", 2, lambda line: None
    )
    assert measured.best is not None and measured.best.measured
    figures = measured.best.measured
    concurrent_requests = figures["requests_per_s"] * figures["request_ms_mean"] / 1000
    assert concurrent_requests == pytest.approx(4, rel=0.25)  # Little's law, for a short load.
    (failed,) = [row for row in measured.rows if row.feasibility == "failed"]
    assert failed.reason.startswith("kv_tokens_max is 1000000000000")
    file = tmp_path / "serve_config.yaml"
    file.write_text(measured.settings_yaml)
    arguments: list[str | Path] = ["preamble", "serve", "--config", file]
    arguments += ["--port", "0", "--http-port", "0"]
    with run_child(arguments, tmp_path / "log") as server:
        address = server.read_first_line(120).split("grpc=")[1].split()[0]
        with Client(address, 20.0) as client:
            assert len(client.generate("3 5 7", Options(max_new_tokens=4)).token_ids) == 4


def test_tuning_candidates_are_measured_and_failures_become_rows(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    base = read_yaml(write_settings(tmp_path, model))
    rows = [
        Row(f"TP{tp}", "fits", {"tp": tp}, {"tokens_per_s": 100.0 * tp, "iteration_s": 0.1})
        for tp in (3, 1)
    ]
    axes = Axis("iteration_s", "step", "low"), Axis("tokens_per_s", "tokens/s", "high")
    trial = TuningTrial(
        base_settings=base,
        settings_of_row=lambda row: {**base, **row.settings},
        make_final_plan=lambda plan, best: plan,
        efforts=(3,),
        start_timeout_s=120,
    )
    messages: list[str] = []
    measured = measure_plan(
        Plan("training", [], "", rows, *axes), trial, tmp_path / "plan", 2, messages.append
    )
    assert measured.best is not None and measured.best.name == "TP1"
    assert measured.best.measured["iteration_s"] > 0 and measured.best.measured["tokens_per_s"] > 0
    (failed,) = [row for row in measured.rows if row.feasibility == "failed"]
    assert failed.name == "TP3" and "3" in failed.reason, json.dumps(messages)
    assert not list((tmp_path / "plan" / "runs").glob("*/adapters"))
