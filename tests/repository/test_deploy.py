"""Deployment files agree with the server: manifests, profiles, alerts, dashboard and runbook.

These files name flags, settings, ports, error reasons and metrics of the server. The tests compare
them with the tables of the server. Tests that need the programs of Prometheus are in
tests/third_party_clients/test_prometheus.py, those of the other Kubernetes manifests in
test_kubernetes_manifests.py.
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
from gpt.settings import setting_fields
from serving.__main__ import main, serve_parser
from serving.config import ServerConfig
from serving.profiles import PRESETS_FOLDER, PROFILES
from serving.service.error_reasons import REASONS
from tests.support.manifests import manifests
from tests.support.servers import ROOT

DEPLOY = ROOT / "deploy"
SHUTDOWN_S = 15  # Time that a pod needs to stop, in addition to preStop and drain.
DEFAULTS = ServerConfig("model")


@cache
def objects() -> dict[str, Any]:
    """Return the objects of preamble.yaml, its autoscaler and monitor; each kind has one object."""
    objects_by_kind: dict[str, Any] = {}
    for item in manifests():
        if item.file in ("preamble.yaml", "hpa.yaml", "podmonitor.yaml"):
            assert item.kind not in objects_by_kind, f"two objects of kind {item.kind}"
            objects_by_kind[item.kind] = item.object
    return objects_by_kind


def pod() -> Any:
    return objects()["Deployment"]["spec"]["template"]["spec"]


def container() -> Any:
    (spec,) = pod()["containers"]
    return spec


def deployed_config() -> ServerConfig:
    """Return the config that the server reads from the pod's arguments and settings file."""
    flags = vars(serve_parser().parse_args(container()["args"]))
    assert flags.pop("config") == "/config/config.yaml"
    preset = yaml.safe_load((DEPLOY / f"config/{flags.pop('profile')}.yaml").read_text())
    file = yaml.safe_load(objects()["ConfigMap"]["data"]["config.yaml"])
    set_flags = {name: value for name, value in flags.items() if value is not None}
    assert not file.keys() & set_flags.keys()
    return ServerConfig(**{**preset, **file, **set_flags})


@cache
def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def headings(text: str, under: str) -> set[str]:
    """Return the titles of the deepest heading level in the section `## under` of a document."""
    sections = re.split(r"^## ", text, flags=re.M)
    (section,) = [section for section in sections if section.startswith(f"{under}\n")]
    deepest = max(re.findall(r"^#+", section, flags=re.M), key=len)
    return set(re.findall(rf"^{deepest} (.+)$", section, flags=re.M))


RUNBOOK = (ROOT / "docs/operations.md").read_text()


def test_the_runbook_has_an_entry_for_each_error_reason() -> None:
    assert headings(RUNBOOK, "Reasons") == set(REASONS)


@pytest.mark.parametrize("reason", REASONS.values(), ids=lambda reason: reason.name)
def test_the_entry_of_an_error_reason_has_its_grpc_and_http_codes(reason: Any) -> None:
    entry = RUNBOOK.split(f"\n#### {reason.name}\n")[1].split("\n#")[0]
    codes = re.search(r"\(([A-Z_]+), (\d+)[,;)]", " ".join(entry.split()))
    assert codes is not None and codes.groups() == (reason.code.name, str(reason.status))
    retried = re.search(
        rf"\({reason.code.name}, {reason.status}, retry\)", entry.replace("\n", " ")
    )
    assert (retried is not None) == (reason.retry_s is not None)


def test_each_alert_links_to_its_entry_in_the_runbook() -> None:
    names = [rule["alert"] for rule in alerts() if "alert" in rule]
    assert len(names) == len(set(names)) and headings(RUNBOOK, "Alerts") == set(names)
    for rule in alerts():
        if "alert" in rule:
            anchor = f"docs/operations.md#{rule['alert'].lower()}"
            assert rule["annotations"]["runbook"] == anchor
            assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_each_alert_has_test_cases_in_which_it_fires_and_does_not_fire() -> None:
    tests = yaml.safe_load((DEPLOY / "prometheus/alerts_test.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    firing = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert firing == silent == {rule["alert"] for rule in alerts() if "alert" in rule}


def test_link_targets_of_the_documents_exist() -> None:
    for name in ("operations.md", "metrics.md"):
        text = (ROOT / "docs" / name).read_text()
        for target in re.findall(r"\]\(([^)]+)\)", text):
            file, _, anchor = target.partition("#")
            path = ROOT / "docs" / file if file else ROOT / "docs" / name
            assert path.exists(), f"{name}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.M)
                slugs = {
                    re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles
                }
                assert anchor in slugs, f"{name}: {target}"


@pytest.mark.parametrize("name", PROFILES)
def test_the_config_file_and_flags_override_a_profile(name: str, tmp_path: Path) -> None:
    preset = yaml.safe_load((PRESETS_FOLDER / f"{name}.yaml").read_text())
    config = ServerConfig.read(None, {"model": "m"}, profile=name)
    assert {key: config.to_dict()[key] for key in preset} == preset
    assert all(value != DEFAULTS.to_dict()[key] for key, value in preset.items())
    file = tmp_path / "settings.yaml"
    file.write_text("{queue_requests_max: 7, step_tokens_max: 300, drain_s: 3}")
    flags = {"model": "m", "step_tokens_max": 400, "tp": None}
    config = ServerConfig.read(str(file), flags, profile=name)
    assert (
        config.scheduler_config.queue_requests_max,
        config.scheduler_config.step_tokens_max,
        config.network_config.drain_s,
    ) == (7, 400, 3)
    assert config.scheduler_config.running_requests_max == preset["running_requests_max"]


def test_an_unknown_profile_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_parser().parse_args(["m", "--profile", "fast"])
    assert "latency" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="cannot be read"):
        ServerConfig.read(None, {"model": "m"}, profile="fast")


def test_the_serve_command_applies_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("step_tokens_max: 100")
    arguments = ["serve", "m", "--config", str(file)]
    assert main([*arguments, "--profile", "throughput"]) == 1
    assert "running_requests_max is 256, but a step has only 100" in capsys.readouterr().err
    assert main([*arguments, "--profile", "latency"]) == 1
    assert "running_requests_max" not in capsys.readouterr().err


def test_the_runbook_lists_the_settings_of_the_profiles_with_their_values() -> None:
    presets = [yaml.safe_load((PRESETS_FOLDER / f"{name}.yaml").read_text()) for name in PROFILES]
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", RUNBOOK, flags=re.M)
    assert {row[0] for row in rows} == set(presets[0]) | set(presets[1])
    for setting, latency, default, throughput in rows:
        server_default = DEFAULTS.to_dict()[setting]
        values = [
            presets[0].get(setting, server_default),
            server_default,
            presets[1].get(setting, server_default),
        ]
        assert [float(latency), float(default), float(throughput)] == values


def test_the_wheel_contains_the_profiles() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "deploy.config" in setuptools["packages"]
    assert setuptools["package-data"]["deploy.config"] == ["*.yaml"]
    assert PRESETS_FOLDER == DEPLOY / "config"


def test_settings_in_the_documents_exist() -> None:
    other_names = {
        "kv_tokens",
        "adapter_rows",
        "full_context_requests",
        "weights_mib",
        "binding_limit",
    }
    other_names |= {"service_class", "round_robin", "kserve_http", "model_name"}
    other_names |= {"trace_id", "request_id"}  # Labels of exemplars.
    other_names |= {"metric_relabel_configs"}  # Of Prometheus.
    surface = json.loads((ROOT / "tests/golden/surface.json").read_text())
    other_names |= {
        label for family in surface["server"]["metrics"].values() for label in family["labels"]
    }
    metric_prefixes = ("preamble_", "process_", "python_", "tgi_", "nv_")
    settings = set(setting_fields(ServerConfig))
    for text in (RUNBOOK, (ROOT / "docs/metrics.md").read_text()):
        words = re.findall(r"`([a-z]+(?:_[a-z]+)+)`", text)
        names = {word for word in words if not word.startswith(metric_prefixes)}
        assert not names - settings - other_names


def test_the_pod_has_tls_tokens_and_json_logs() -> None:
    config = deployed_config()
    security = config.security_config
    assert not security.insecure and security.tls_cert and security.tls_key and security.tokens
    assert config.observability_config.log_format == "json"


def test_the_ports_of_all_deployment_files_agree_with_the_server() -> None:
    config, defaults = deployed_config().network_config, DEFAULTS.network_config
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"grpc": config.port, "http": config.http_port, "metrics": config.metrics_port}
    assert (config.port, config.http_port) == (defaults.port, defaults.http_port)
    for port in objects()["Service"]["spec"]["ports"]:
        assert port["port"] == ports[port["targetPort"]]
    annotations = objects()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.metrics_port)
    (scrape,) = objects()["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert (
        scrape["port"] in ports
        and scrape["path"] == annotations["prometheus.io/path"] == "/metrics"
    )
    exposed = re.search(r"^EXPOSE (.+)$", (DEPLOY / "Containerfile").read_text(), flags=re.M)
    assert exposed is not None and {*map(int, exposed[1].split())} == {*ports.values()}
    local = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())["scrape_configs"]
    assert local[0]["static_configs"][0]["targets"] == [f"127.0.0.1:{defaults.http_port}"]


def test_probes_use_health_paths_on_the_metrics_port_which_needs_no_token() -> None:
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        http_get = container()[probe]["httpGet"]
        page = "ready" if probe == "readinessProbe" else "live"
        assert http_get == {"path": f"/health/{page}", "port": "metrics"}


def test_the_termination_grace_period_is_longer_than_the_drain() -> None:
    program, seconds = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    needed_s = int(seconds) + deployed_config().network_config.drain_s + SHUTDOWN_S
    assert pod()["terminationGracePeriodSeconds"] >= needed_s
    strategy = objects()["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert strategy["maxUnavailable"] == 0


def test_every_path_in_the_servers_config_is_on_a_mounted_volume() -> None:
    config, mounts = deployed_config(), container()["volumeMounts"]
    volumes = {volume["name"] for volume in pod()["volumes"]}
    assert {mount["name"] for mount in mounts} == volumes
    paths = [
        config.model_config.model,
        config.adapter_config.adapters,
        config.security_config.tls_cert,
        config.security_config.tls_key,
        config.security_config.tokens,
    ]
    for path in [*paths, config.observability_config.flight_dir, "/config/config.yaml"]:
        assert any(f"{path}/".startswith(f"{mount['mountPath']}/") for mount in mounts), path
    (adapters,) = [
        mount for mount in mounts if mount["mountPath"] == config.adapter_config.adapters
    ]
    assert not adapters.get("readOnly")  # The server writes uploads to this mount.


def test_selectors_match_the_labels_of_the_pods() -> None:
    labels = objects()["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert objects()["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert objects()["Service"]["spec"]["selector"] == labels
    for kind in ("PodDisruptionBudget", "PodMonitor"):
        assert objects()[kind]["spec"]["selector"]["matchLabels"] == labels
    target = objects()["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["name"] == objects()["Deployment"]["metadata"]["name"]


def test_the_image_starts_the_server_as_the_unprivileged_user_of_the_pod() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    assert "exec preamble serve" in text and "STOPSIGNAL SIGTERM" in text
    user = re.search(r"^USER (\d+)$", text, flags=re.M)
    assert user is not None and int(user[1]) == pod()["securityContext"]["runAsUser"]
    patch = yaml.safe_load((DEPLOY / "kubernetes/cuda.yaml").read_text())
    (patched,) = patch["spec"]["template"]["spec"]["containers"]
    assert patched["name"] == container()["name"]


def test_panels_of_the_dashboard_do_not_overlap_and_have_queries() -> None:
    board = json.loads((DEPLOY / "grafana/preamble.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    used_cells: set[tuple[int, int]] = set()
    for panel in panels:
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert not cells & used_cells and max(x for x, _ in cells) < 24, panel["title"]
        used_cells |= cells
        assert panel["type"] == "row" or panel["targets"]
