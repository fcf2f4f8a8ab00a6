"""Configurations of Serve: `preamble ray deploy --print`, and the manifest for KubeRay."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import preamble
from tests.support.servers import ROOT

MANIFEST = ROOT / "deploy" / "kubernetes" / "rayservice.yaml"


def print_config(capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    assert preamble.main(["ray", "deploy", *flags, "--print"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def deployment(config: Any) -> Any:
    return config["applications"][0]["deployments"][0]


def test_the_manifest_has_the_output_of_the_command_in_its_comment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comment = [
        line.removeprefix("#") for line in MANIFEST.read_text().splitlines() if line[:1] == "#"
    ]
    lines = [line.removeprefix("   ") for line in comment if line.startswith("   ")]
    command = " ".join(line.rstrip("\\").strip() for line in lines[:2]).split()
    settings = tmp_path / "ray.yaml"
    settings.write_text("\n".join(lines[2:]))
    assert command[:3] == ["preamble", "ray", "deploy"]
    flags = [str(settings) if word == "ray.yaml" else word for word in command[3:]]
    config = print_config(capsys, *flags[:-1])
    assert config["applications"][0]["args"].pop("version")
    document = next(yaml.safe_load_all(MANIFEST.read_text()))
    assert yaml.safe_load(document["spec"]["serveConfigV2"]) == config


def test_relative_paths_become_absolute_and_urls_stay(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("model", "--insecure", "--adapters", "adapters", "--tokenizer", "s3://bucket/tokens")
    settings = print_config(capsys, *flags)["applications"][0]["args"]["settings"]
    assert settings["model"] == str(Path("model").absolute())
    assert settings["adapters"] == str(Path("adapters").absolute())
    assert settings["tokenizer"] == "s3://bucket/tokens"
    modules = ("--lora-modules", "mood=folder/mood", "sum=/adapters/sum")
    settings = print_config(capsys, "model", "--insecure", "--adapters", "a", *modules)
    lora_modules = settings["applications"][0]["args"]["settings"]["lora_modules"]
    assert lora_modules == [f"mood={Path('folder/mood').absolute()}", "sum=/adapters/sum"]


def test_haproxy_takes_the_place_of_the_router(capsys: pytest.CaptureFixture[str]) -> None:
    routed = deployment(print_config(capsys, "model", "--insecure"))
    assert routed.pop("request_router_config")
    assert deployment(print_config(capsys, "model", "--insecure", "--haproxy")) == routed


def test_a_replica_has_time_to_close_after_its_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("drain_s: 20.0\n")
    config = print_config(capsys, "model", "--insecure", "--config", str(settings))
    assert deployment(config)["graceful_shutdown_timeout_s"] == 35.0


def test_settings_that_change_while_serving_do_not_restart_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("calls_max: 100\nslow_reader_s: 7.0\nnew_tokens_default: 5\n")
    config = print_config(capsys, "m", "--config", str(settings), "--insecure")
    assert deployment(config)["user_config"] == {"calls_max": 100, "slow_reader_s": 7.0}
    fixed_settings = config["applications"][0]["args"]["settings"]
    assert fixed_settings == {
        "model": str(Path("m").absolute()),
        "new_tokens_default": 5,
        "insecure": True,
    }


@pytest.mark.parametrize(
    ("flags", "scaling"),
    [
        ((), {"num_replicas": 1}),
        (("--replicas", "3"), {"num_replicas": 3}),
        (("--max", "4"), {"min": 1, "start": 1, "max": 4}),
        (("--min", "0", "--max", "4"), {"min": 0, "start": 1, "max": 4}),
        (("--min", "1", "--max", "4", "--replicas", "2"), {"min": 1, "start": 2, "max": 4}),
    ],
)
def test_the_number_of_replicas_is_fixed_or_follows_the_load(
    flags: tuple[str, ...], scaling: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    values = deployment(print_config(capsys, "m", "--insecure", *flags))
    automatic = values.get("autoscaling_config")
    if automatic is None:
        assert {"num_replicas": values["num_replicas"]} == scaling
    else:
        names = {"min": "min_replicas", "start": "initial_replicas", "max": "max_replicas"}
        assert {name: automatic[key] for name, key in names.items()} == scaling


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "there are no tokens; set tokens in the --config file"),
        (("--insecure", "--min", "3", "--max", "2"), "--max at least 1"),
        (("--insecure", "--max", "0"), "--max at least 1"),
        (("--insecure", "--tp", "4", "--node-ranks", "3"), "--node-ranks is 3"),
        (("--insecure", "--node-ranks", "0"), "--node-ranks is 0; it must be at least 1"),
        (("--insecure", "--rank-cpus", "-1"), "--rank-cpus is -1; it must be a number"),
        (("--insecure", "--rank-cpus", "nan"), "--rank-cpus is nan; it must be a number"),
        (("--insecure", "--rank-gpus", "inf"), "--rank-gpus is inf; it must be a number"),
        (("--insecure", "--rank-cpus", "0"), "give at least one of them"),
        (("--insecure", "--max", "2", "--scale-up-after", "-1"), "--scale-up-after is -1"),
        (("--insecure", "--wait", "nan"), "--wait is nan; it must be a number"),
        (("--insecure", "--surge", "101"), "--surge is 101; it must be from 0 to 100"),
        (("--insecure", "--name", "a/b"), "--name is 'a/b'; it must have 1 to 63 letters"),
        (("--insecure", "--name", "a#b"), "--name is 'a#b'; it must have 1 to 63 letters"),
        (("--insecure", "--name", ""), "--name is ''; it must have 1 to 63 letters"),
        (("--insecure", "--port", "0"), "--port is 0; it must be from 1 to 65535"),
        (("--insecure", "--http-port", "70000"), "--http-port is 70000; it must be from 1"),
        (("--insecure", "--port", "8000"), "--port and --http-port are both 8000"),
    ],
)
def test_a_deployment_that_cannot_serve_is_refused(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preamble.main(["ray", "deploy", "m", *flags, "--print"]) == 1
    assert message in capsys.readouterr().err


def test_without_ray_the_other_actions_name_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # As if it were not installed.
    assert preamble.main(["ray", "status"]) == 1
    assert "run pip install 'preamble[ray]'" in capsys.readouterr().err
