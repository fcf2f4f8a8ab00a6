"""Profiles of a server: a saved plan for this model and machine, else the built-in profile."""

from pathlib import Path

import pytest
import yaml

from checkpoints_tools.conversion.convert import write_native
from gpt.config import GPTConfig
from planning.inference.calibration_file import Calibration, MeasuredModel, ModelShape
from planning.inference.estimate import LengthDistribution, Workload
from planning.inference.plan import plan_serving
from planning.inference.requirements import Requirements
from planning.inference.saved_plans import save_plan
from planning.inference.service_levels import Objective, ServiceLimits
from planning.inference.step_cost import PiecewiseLinear, StepCostModel
from planning.plan import Plan
from serving.config import ServerConfig
from serving.profiles import PRESETS_FOLDER, describe_machine, plan_file
from tests.support.models import MODERN, lively

STEPS = StepCostModel(
    rows=PiecewiseLinear(((1, 0.001), (512, 0.02))),
    draws=PiecewiseLinear(((1, 0.0002), (64, 0.002))),
    context_s=1e-8,
    pair_s=1e-9,
    sequence_s=2e-5,
    step_s=1e-3,
)
NETWORK = MODERN.with_fields(max_position_embeddings=128)
PRESET = yaml.safe_load((PRESETS_FOLDER / "latency.yaml").read_text())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def costs(device: str, network: GPTConfig = NETWORK) -> Calibration:
    measured = MeasuredModel(ModelShape.from_config(network), network.dtype, STEPS)
    return Calibration("2026-01-01", device, "cpu", 8 << 30, 1e10, 1e10, models=(measured,))


def search_plan(objective: Objective, device: str) -> tuple[Plan, Requirements]:
    calibration = costs(device)
    load = Workload(LengthDistribution(20, 30), LengthDistribution(10, 10), None, 6)
    requirements = Requirements(
        NETWORK,
        NETWORK.dtype,
        load,
        ServiceLimits(),
        calibration.as_cluster(),
        calibration,
        objective,
    )
    return plan_serving(requirements), requirements


def test_servers_use_the_plan_for_their_model_and_machine(tmp_path: Path) -> None:
    write_native(lively(NETWORK), tmp_path / "model")
    plan, requirements = search_plan("latency", describe_machine("cpu").split(" of ")[1])
    path = save_plan(plan, requirements)
    assert path is not None and plan.best is not None
    notes: list[str] = []
    settings = {"model": str(tmp_path / "model")}
    config = ServerConfig.read(None, settings, profile="latency", on_note=notes.append)
    for name in ("running_requests_max", "step_tokens_max", "prefill_stall_ms_max"):
        assert config.to_dict()[name] == plan.best.settings[name]
    # The built-in profile fills in what the plan does not set; memory settings stay.
    assert config.scheduler_config.queue_requests_max == PRESET["queue_requests_max"]
    assert config.cache_config.kv_tokens_max is None
    assert f"from=plan file='{path}'" in notes[0]
    # Flags override it; other tunings of the model share it, other profiles do not.
    assert (
        ServerConfig.read(
            None, {**settings, "step_tokens_max": 99}, profile="latency"
        ).scheduler_config.step_tokens_max
        == 99
    )
    write_native(lively(NETWORK, seed=1), tmp_path / "tuned")
    tuned_config = ServerConfig.read(None, {"model": str(tmp_path / "tuned")}, profile="latency")
    assert tuned_config.scheduler_config.step_tokens_max == config.scheduler_config.step_tokens_max
    ServerConfig.read(None, settings, profile="throughput", on_note=notes.append)
    assert "preamble plan serve" in notes[1] and "--objective throughput" in notes[1]
    # A plan for one rank does not apply to two.
    split = ServerConfig.read(None, {**settings, "tp": 2}, profile="latency", on_note=notes.append)
    assert split.scheduler_config.running_requests_max == PRESET["running_requests_max"]
    assert "a different split, not for tp 2" in notes[2]


def test_only_plans_for_this_machine_are_saved() -> None:
    foreign_plan, requirements = search_plan("latency", "a CPU that nobody has")
    assert save_plan(foreign_plan, requirements) is None
    local_plan, requirements = search_plan("gpus", describe_machine("cpu").split(" of ")[1])
    assert save_plan(local_plan, requirements) is None  # No profile has that name.
    assert not plan_file(NETWORK, NETWORK.dtype, "cpu", "latency").exists()


def test_unreadable_plans_are_ignored(tmp_path: Path) -> None:
    write_native(lively(NETWORK), tmp_path / "model")
    file = plan_file(NETWORK, NETWORK.dtype, "cpu", "latency")
    file.parent.mkdir(parents=True)
    file.write_text("{running_requests_max: [")
    notes: list[str] = []
    settings = {"model": str(tmp_path / "model")}
    config = ServerConfig.read(None, settings, profile="latency", on_note=notes.append)
    assert config.scheduler_config.running_requests_max == PRESET["running_requests_max"]
    assert "cannot be read" in notes[0]
    file.write_text("{running_requests_max: 3, model: other, host: 0.0.0.0}")
    config = ServerConfig.read(None, settings, profile="latency")
    # Only the settings of a plan are applied.
    assert (
        config.scheduler_config.running_requests_max,
        config.model_config.model,
        config.network_config.host,
    ) == (
        3,
        *settings.values(),
        "127.0.0.1",
    )


def test_profiles_ignore_missing_models() -> None:
    for model in ("nowhere", 7):
        config_of = {"model": model, "running_requests_max": 5}
        if isinstance(model, str):
            assert (
                ServerConfig.read(
                    None, config_of, profile="latency"
                ).scheduler_config.running_requests_max
                == 5
            )
        else:
            with pytest.raises(Exception, match="model is 7; it must be a text"):
                ServerConfig.read(None, config_of, profile="latency")
