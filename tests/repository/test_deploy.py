"""What is deployed is what the server has: manifests, profiles, alerts, dashboard and runbook.

All of them name flags, settings, ports, reasons and series of the server, so each is held against
the server's own tables. What needs Prometheus' own programs is in tests/e2e/test_prometheus.py.
"""

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpt.errors import ConfigError
from serving.__main__ import main, serve_parser
from serving.config import ServerConfig
from serving.profiles import PROFILE_FILES, PROFILES
from serving.service.error_reasons import REASONS
from tests.support.servers import ROOT

DEPLOY = ROOT / "deploy"
SPARE_S = 15  # Of the time to end, beyond preStop and drain.
DEFAULTS = ServerConfig("model")


@cache
def objects() -> dict[str, Any]:
    """Every Kubernetes object, by kind."""
    found: dict[str, Any] = {}
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for one in yaml.safe_load_all(path.read_text()):
            if "kind" in one:
                assert one["kind"] not in found, f"two of {one['kind']}"
                found[one["kind"]] = one
    return found


def pod() -> Any:
    return objects()["Deployment"]["spec"]["template"]["spec"]


def container() -> Any:
    (only,) = pod()["containers"]
    return only


def deployed() -> ServerConfig:
    """What the pod's arguments and its settings file make, read by the server itself."""
    flags = vars(serve_parser().parse_args(container()["args"]))
    assert flags.pop("config") == "/config/config.yaml"
    preset = yaml.safe_load((DEPLOY / f"config/{flags.pop('profile')}.yaml").read_text())
    file = yaml.safe_load(objects()["ConfigMap"]["data"]["config.yaml"])
    given = {name: value for name, value in flags.items() if value is not None}
    assert not file.keys() & given.keys()
    return ServerConfig(**{**preset, **file, **given})


@cache
def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def headings(text: str, under: str) -> set[str]:
    """Titles of the deepest kind in the part of a document that begins with `## under`."""
    part = re.split(r"^## ", text, flags=re.M)
    (section,) = [one for one in part if one.startswith(f"{under}\n")]
    deepest = max(re.findall(r"^#+", section, flags=re.M), key=len)
    return set(re.findall(rf"^{deepest} (.+)$", section, flags=re.M))


RUNBOOK = (ROOT / "docs/operations.md").read_text()


def test_every_reason_and_no_other_has_an_entry() -> None:
    assert headings(RUNBOOK, "Reasons") == set(REASONS)


@pytest.mark.parametrize("reason", REASONS.values(), ids=lambda reason: reason.name)
def test_an_entry_says_the_codes_that_callers_see(reason: Any) -> None:
    entry = RUNBOOK.split(f"\n#### {reason.name}\n")[1].split("\n#")[0]
    codes = re.search(r"\(([A-Z_]+), (\d+)[,;)]", " ".join(entry.split()))
    assert codes is not None and codes.groups() == (reason.code.name, str(reason.status))
    retried = re.search(
        rf"\({reason.code.name}, {reason.status}, retry\)", entry.replace("\n", " ")
    )
    assert (retried is not None) == (reason.retry_s is not None)


def test_every_alert_and_no_other_has_an_entry_that_it_names() -> None:
    named = [rule["alert"] for rule in alerts() if "alert" in rule]
    assert len(named) == len(set(named)) and headings(RUNBOOK, "Alerts") == set(named)
    for rule in alerts():
        if "alert" in rule:
            anchor = f"docs/operations.md#{rule['alert'].lower()}"
            assert rule["annotations"]["runbook"] == anchor
            assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    tests = yaml.safe_load((DEPLOY / "prometheus/alerts_test.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    quiet = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert fires == quiet == {rule["alert"] for rule in alerts() if "alert" in rule}


def test_links_of_the_documents_lead_somewhere() -> None:
    for name in ("operations.md", "metrics.md"):
        text = (ROOT / "docs" / name).read_text()
        for target in re.findall(r"\]\(([^)]+)\)", text):
            file, _, anchor = target.partition("#")
            path = ROOT / "docs" / file if file else ROOT / "docs" / name
            assert path.exists(), f"{name}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.M)
                slugs = {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in titles}
                assert anchor in slugs, f"{name}: {target}"


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_under_the_file_and_the_flags(name: str, tmp_path: Path) -> None:
    preset = yaml.safe_load((PROFILE_FILES / f"{name}.yaml").read_text())
    alone = ServerConfig.read(None, {"model": "m"}, profile=name)
    assert {key: getattr(alone, key) for key in preset} == preset
    assert all(value != getattr(DEFAULTS, key) for key, value in preset.items())
    file = tmp_path / "settings.yaml"
    file.write_text("{queue_requests_max: 7, step_tokens_max: 300, drain_s: 3}")
    flags = {"model": "m", "step_tokens_max": 400, "tp": None}
    mixed = ServerConfig.read(str(file), flags, profile=name)
    assert (mixed.queue_requests_max, mixed.step_tokens_max, mixed.drain_s) == (7, 400, 3)
    assert mixed.running_requests_max == preset["running_requests_max"]


def test_a_profile_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_parser().parse_args(["m", "--profile", "fast"])
    assert "latency" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="cannot be read"):
        ServerConfig.read(None, {"model": "m"}, profile="fast")


def test_the_command_takes_the_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("step_tokens_max: 100")
    words = ["serve", "m", "--config", str(file)]
    assert main([*words, "--profile", "throughput"]) == 1
    assert "running_requests_max is 256, and a step has 100" in capsys.readouterr().err
    assert main([*words, "--profile", "latency"]) == 1
    assert "running_requests_max" not in capsys.readouterr().err


def test_the_runbook_has_each_knob_of_the_profiles_with_its_values() -> None:
    presets = [yaml.safe_load((PROFILE_FILES / f"{name}.yaml").read_text()) for name in PROFILES]
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", RUNBOOK, flags=re.M)
    assert {row[0] for row in rows} == set(presets[0]) | set(presets[1])
    for knob, latency, default, throughput in rows:
        own = getattr(DEFAULTS, knob)
        values = [presets[0].get(knob, own), own, presets[1].get(knob, own)]
        assert [float(latency), float(default), float(throughput)] == values


def test_the_wheel_carries_the_profiles() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "deploy.config" in setuptools["packages"]
    assert setuptools["package-data"]["deploy.config"] == ["*.yaml"]
    assert PROFILE_FILES == DEPLOY / "config"


def test_settings_that_the_documents_name_exist() -> None:
    others = {"kv_tokens", "adapter_rows", "full_context_requests", "weights_mib", "binding_limit"}
    others |= {"service_class", "round_robin"}
    known = set(ServerConfig.__dataclass_fields__)
    for text in (RUNBOOK, (ROOT / "docs/metrics.md").read_text()):
        words = re.findall(r"`([a-z]+(?:_[a-z]+)+)`", text)
        names = {
            word for word in words if not word.startswith(("preamble_", "process_", "python_"))
        }
        assert not names - known - others


def test_the_pods_settings_are_the_servers() -> None:
    config = deployed()
    assert not config.insecure and config.tls_cert and config.tls_key and config.tokens
    assert config.log_format == "json"


def test_ports_agree_with_the_server_and_among_each_other() -> None:
    config = deployed()
    ports = {one["name"]: one["containerPort"] for one in container()["ports"]}
    assert ports == {"grpc": config.port, "http": config.http_port, "metrics": config.metrics_port}
    assert (config.port, config.http_port) == (DEFAULTS.port, DEFAULTS.http_port)
    for one in objects()["Service"]["spec"]["ports"]:
        assert one["port"] == ports[one["targetPort"]]
    notes = objects()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(config.metrics_port)
    (scrape,) = objects()["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert scrape["port"] in ports and scrape["path"] == notes["prometheus.io/path"] == "/metrics"
    exposed = re.search(r"^EXPOSE (.+)$", (DEPLOY / "Containerfile").read_text(), flags=re.M)
    assert exposed is not None and {*map(int, exposed[1].split())} == {*ports.values()}
    local = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())["scrape_configs"]
    assert local[0]["static_configs"][0]["targets"] == [f"127.0.0.1:{DEFAULTS.http_port}"]


def test_probes_ask_pages_that_there_are_at_a_port_that_needs_no_token() -> None:
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container()[probe]["httpGet"]
        page = "ready" if probe == "readinessProbe" else "live"
        assert asked == {"path": f"/health/{page}", "port": "metrics"}


def test_there_is_time_to_drain() -> None:
    word, seconds = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    needed_s = int(seconds) + deployed().drain_s + SPARE_S
    assert pod()["terminationGracePeriodSeconds"] >= needed_s
    strategy = objects()["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert strategy["maxUnavailable"] == 0


def test_every_path_that_the_server_is_told_is_mounted() -> None:
    config, mounts = deployed(), container()["volumeMounts"]
    volumes = {one["name"] for one in pod()["volumes"]}
    assert {one["name"] for one in mounts} == volumes
    paths = [config.model, config.adapters, config.tls_cert, config.tls_key, config.tokens]
    for path in [*paths, config.flight_dir, "/config/config.yaml"]:
        assert any(f"{path}/".startswith(f"{one['mountPath']}/") for one in mounts), path
    (adapters,) = [one for one in mounts if one["mountPath"] == config.adapters]
    assert not adapters.get("readOnly")  # Uploads are written there.


def test_selectors_find_the_pods() -> None:
    labels = objects()["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert objects()["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert objects()["Service"]["spec"]["selector"] == labels
    for kind in ("PodDisruptionBudget", "PodMonitor"):
        assert objects()[kind]["spec"]["selector"]["matchLabels"] == labels
    target = objects()["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["name"] == objects()["Deployment"]["metadata"]["name"]


def test_the_image_starts_the_server_as_somebody_without_rights() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    assert "exec preamble serve" in text and "STOPSIGNAL SIGTERM" in text
    user = re.search(r"^USER (\d+)$", text, flags=re.M)
    assert user is not None and int(user[1]) == pod()["securityContext"]["runAsUser"]
    patch = yaml.safe_load((DEPLOY / "kubernetes/cuda.yaml").read_text())
    (patched,) = patch["spec"]["template"]["spec"]["containers"]
    assert patched["name"] == container()["name"]


def test_the_dashboard_is_whole() -> None:
    board = json.loads((DEPLOY / "grafana/preamble.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["targets"]
