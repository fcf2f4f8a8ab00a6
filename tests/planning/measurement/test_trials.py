"""Candidates of real plans, run for real: our server under a load, and `tune` for a few steps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clients.client import Client
from clients.options import Options
from gpt.settings import read_yaml
from planning.inference.calibration_file import Measured, Shape, StepCosts
from planning.inference.estimate import Lengths, Workload
from planning.inference.objective import Wish
from planning.inference.plan import plan_serving
from planning.inference.service_levels import Limits
from planning.inference.step_cost import Curve, Steps
from planning.measurement.child_command import child
from planning.measurement.rounds import measure
from planning.measurement.serving_trial import ServingTrial
from planning.measurement.tuning_trial import TuningTrial
from planning.plan import Axis, Plan, Row
from serving.profiles import machine
from tests.support.servers import CONFIG, write_checkpoint
from tests.support.tuning_settings import write_settings

pytestmark = pytest.mark.slow  # Each candidate is a process that loads torch.


def wish() -> Wish:
    steps = Steps(
        rows=Curve(((1, 0.001), (512, 0.02))),
        draws=Curve(((1, 0.0002), (64, 0.002))),
        context_s=1e-8,
        pair_s=1e-9,
        sequence_s=2e-5,
        step_s=1e-3,
    )
    device = machine("cpu").split(" of ")[1]
    measured = Measured(Shape.of(CONFIG), "float32", steps)
    costs = StepCosts("2026-01-01", device, "cpu", 8 << 30, 1e10, 1e10, models=(measured,))
    load = Workload(Lengths(20, 30), Lengths(12, 16), None, 4, adapters=2, virtual_tokens=5)
    return Wish(CONFIG, "float32", load, Limits(itl_ms_p95=5000), costs.cluster(), costs)


def test_servers_are_run_and_one_starts_from_the_file_of_the_best(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", tokenizer=False)
    asked = wish()
    plan = plan_serving(asked, str(model))
    assert plan.best is not None
    # More keys and values than any machine has: what a real server says to that is the reason.
    huge = {**plan.rows[1].settings, "kv_tokens_max": 10**12}
    rows = [plan.rows[0], replace(plan.rows[1], settings=huge, name="huge")]
    trial = ServingTrial(asked, model, efforts=(8,), start_s=120)
    made = measure(replace(plan, rows=rows), trial, tmp_path / "plan", 2, lambda line: None)
    assert made.best is not None and made.best.measured
    figures = made.best.measured
    inside = figures["requests_per_s"] * figures["request_ms_mean"] / 1000
    assert inside == pytest.approx(4, rel=0.25)  # Little's law, of so short a load.
    (failed,) = [row for row in made.rows if row.standing == "failed"]
    assert failed.reason.startswith("kv_tokens_max is 1000000000000")
    file = tmp_path / "serve_config.yaml"
    file.write_text(made.settings_yaml)
    words: list[str | Path] = ["preamble", "serve", "--config", file]
    words += ["--port", "0", "--http-port", "0"]
    with child(words, tmp_path / "log") as server:
        address = server.line(120).split("grpc=")[1].split()[0]
        with Client(address, 20.0) as client:
            assert len(client.generate("3 5 7", Options(max_new_tokens=4)).token_ids) == 4


def test_tunings_are_run_and_one_that_cannot_be_is_a_row(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    base = read_yaml(write_settings(tmp_path, model))
    rows = [
        Row(f"TP{tp}", "fits", {"tp": tp}, {"tokens_per_s": 100.0 * tp, "iteration_s": 0.1})
        for tp in (3, 1)
    ]
    axes = Axis("iteration_s", "step", "low"), Axis("tokens_per_s", "tokens/s", "high")
    trial = TuningTrial(
        base=base,
        settings=lambda row: {**base, **row.settings},
        settled=lambda plan, best: plan,
        efforts=(3,),
        start_s=120,
    )
    said: list[str] = []
    made = measure(Plan("training", [], "", rows, *axes), trial, tmp_path / "plan", 2, said.append)
    assert made.best is not None and made.best.name == "TP1"
    assert made.best.measured["iteration_s"] > 0 and made.best.measured["tokens_per_s"] > 0
    (failed,) = [row for row in made.rows if row.standing == "failed"]
    assert failed.name == "TP3" and "3" in failed.reason, json.dumps(said)
    assert not list((tmp_path / "plan" / "runs").glob("*/adapters"))
