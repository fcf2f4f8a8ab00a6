"""Profiles of a server: what was planned for this model and machine, else what comes along."""

from pathlib import Path

import pytest
import yaml

from checkpoints_tools.conversion.convert import write_native
from gpt.config import GPTConfig
from planning.inference.calibration_file import Measured, Shape, StepCosts
from planning.inference.estimate import Lengths, Workload
from planning.inference.objective import Wish
from planning.inference.plan import plan_serving
from planning.inference.saved_plans import keep
from planning.inference.service_levels import Limits, Objective
from planning.inference.step_cost import Curve, Steps
from planning.plan import Plan
from serving.config import ServerConfig
from serving.profiles import PROFILE_FILES, machine, plan_file
from tests.support.models import MODERN, lively

STEPS = Steps(
    rows=Curve(((1, 0.001), (512, 0.02))),
    draws=Curve(((1, 0.0002), (64, 0.002))),
    context_s=1e-8,
    pair_s=1e-9,
    sequence_s=2e-5,
    step_s=1e-3,
)
NETWORK = MODERN.with_fields(max_position_embeddings=128)
PRESET = yaml.safe_load((PROFILE_FILES / "latency.yaml").read_text())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def costs(device: str, network: GPTConfig = NETWORK) -> StepCosts:
    measured = Measured(Shape.of(network), network.dtype, STEPS)
    return StepCosts("2026-01-01", device, "cpu", 8 << 30, 1e10, 1e10, models=(measured,))


def planned(objective: Objective, device: str) -> tuple[Plan, Wish]:
    there = costs(device)
    load = Workload(Lengths(20, 30), Lengths(10, 10), None, 6)
    wish = Wish(NETWORK, NETWORK.dtype, load, Limits(), there.cluster(), there, objective)
    return plan_serving(wish), wish


def test_a_server_starts_from_the_plan_for_its_model_and_machine(tmp_path: Path) -> None:
    write_native(lively(NETWORK), tmp_path / "model")
    plan, wish = planned("latency", machine("cpu").split(" of ")[1])
    path = keep(plan, wish)
    assert path is not None and plan.best is not None
    notes: list[str] = []
    given = {"model": str(tmp_path / "model")}
    config = ServerConfig.read(None, given, profile="latency", note=notes.append)
    for name in ("running_requests_max", "step_tokens_max", "prefill_stall_ms_max"):
        assert getattr(config, name) == plan.best.settings[name]
    # What a plan does not say, the profile that comes along does; and memory is as it is.
    assert config.queue_requests_max == PRESET["queue_requests_max"]
    assert config.kv_tokens_max is None
    assert f"from=plan file='{path}'" in notes[0]
    # Flags go before it, other tunings of the model share it, other profiles do not.
    assert (
        ServerConfig.read(None, {**given, "step_tokens_max": 99}, profile="latency").step_tokens_max
        == 99
    )
    write_native(lively(NETWORK, seed=1), tmp_path / "tuned")
    other = ServerConfig.read(None, {"model": str(tmp_path / "tuned")}, profile="latency")
    assert other.step_tokens_max == config.step_tokens_max
    ServerConfig.read(None, given, profile="throughput", note=notes.append)
    assert "preamble plan serve" in notes[1] and "--objective throughput" in notes[1]
    # What is planned for one rank says nothing of two.
    split = ServerConfig.read(None, {**given, "tp": 2}, profile="latency", note=notes.append)
    assert split.running_requests_max == PRESET["running_requests_max"]
    assert "another split than tp 2" in notes[2]


def test_only_what_is_known_of_this_machine_is_kept() -> None:
    elsewhere, wish = planned("latency", "a CPU that nobody has")
    assert keep(elsewhere, wish) is None
    here, wish = planned("gpus", machine("cpu").split(" of ")[1])
    assert keep(here, wish) is None  # No profile has that name.
    assert not plan_file(NETWORK, NETWORK.dtype, "cpu", "latency").exists()


def test_a_plan_that_cannot_be_read_keeps_no_server_from_starting(tmp_path: Path) -> None:
    write_native(lively(NETWORK), tmp_path / "model")
    file = plan_file(NETWORK, NETWORK.dtype, "cpu", "latency")
    file.parent.mkdir(parents=True)
    file.write_text("{running_requests_max: [")
    notes: list[str] = []
    given = {"model": str(tmp_path / "model")}
    config = ServerConfig.read(None, given, profile="latency", note=notes.append)
    assert config.running_requests_max == PRESET["running_requests_max"]
    assert "cannot be read" in notes[0]
    file.write_text("{running_requests_max: 3, model: other, host: 0.0.0.0}")
    config = ServerConfig.read(None, given, profile="latency")
    # Of a plan only what plans are about is taken.
    assert (config.running_requests_max, config.model, config.host) == (
        3,
        *given.values(),
        "127.0.0.1",
    )


def test_a_model_that_is_not_there_is_not_the_profiles_business() -> None:
    for model in ("nowhere", 7):
        config_of = {"model": model, "running_requests_max": 5}
        if isinstance(model, str):
            assert ServerConfig.read(None, config_of, profile="latency").running_requests_max == 5
        else:
            with pytest.raises(Exception, match="model is 7; it must be a text"):
                ServerConfig.read(None, config_of, profile="latency")
