"""Kubernetes manifests agree with the server, with each other, and with the types of their kinds.

Flags, settings, ports, paths, metrics and labels are compared with the server's own tables; fields
of custom resources with the tables in tests/support/kubernetes_schemas. The checks with schemas of
packages are in tests/scale_out/test_kubernetes_schemas.py, which is slow, and the tests of
preamble.yaml alone in tests/repository/test_deploy.py.
"""

import json
import re
import shlex
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from clients.servers import AFFINITY_HEADER
from gpt.errors import ConfigError
from gpt.settings import parse_settings
from ptuning.config import TuneConfig
from serving.__main__ import serve_parser
from serving.config import ServerConfig
from tests.support.kubernetes_types import (
    PICKER_TABLE,
    check_object,
    check_value,
    kinds,
    picker_faults,
    read_table,
)
from tests.support.manifests import (
    FOLDER,
    ContainerOfPod,
    Manifest,
    manifest,
    manifests,
    preamble_containers,
)
from tests.support.servers import ROOT

SHUTDOWN_S = 15  # Time that a pod needs to stop, in addition to preStop and drain.
# Time for which torchrun waits for all nodes of a static rendezvous (`LaunchConfig.rdzv_timeout`).
RENDEZVOUS_S = 900
LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
# Labels that controllers add to pods.
ADDED_LABELS = {*LEADER}
# Labels of Prometheus itself.
SCRAPE_LABELS = {"job", "pod", "namespace"}
PICKER_SPECS = (
    "queuedRequestsSpec",
    "runningRequestsSpec",
    "kvUsageSpec",
    "loraSpec",
    "cacheBlockSizeSpec",
    "cacheNumBlocksSpec",
)
# Volumes that KServe mounts: the model.
KSERVE_MODEL = "/mnt/models"
# Ray's containers run no command of Preamble: tests/serving/ray/test_application.py compares their
# settings.
OTHER_KINDS = ("ClusterTrainingRuntime", "RayService")
SERVERS = [item for item in preamble_containers() if item.manifest.kind not in OTHER_KINDS]
FRONTENDS = [item for item in SERVERS if "readinessProbe" in item.container]


@cache
def surface() -> Any:
    return json.loads((ROOT / "tests/golden/surface.json").read_text())["server"]


def serve_arguments(container: Any) -> list[str]:
    """Return the arguments after `preamble serve`."""
    words = container.get("command", []) + container.get("args", [])
    if words[0] != "torchrun":
        return list(words)
    module = words.index("-m")
    assert words[module + 1 : module + 3] == ["preamble", "serve"]
    return list(words[module + 3 :])


def torchrun_flags(container: Any) -> dict[str, str]:
    words = container["command"]
    assert words[0] == "torchrun"
    flags = {}
    for word in words[1:]:
        name, _, value = word.removeprefix("--").partition("=")
        flags[name] = value
    return flags


def settings_of(item: ContainerOfPod) -> dict[str, Any]:
    """Return the settings file of a container: the ConfigMap of its volume `config`."""
    (volume,) = [volume for volume in item.pod["volumes"] if volume["name"] == "config"]
    config_map = manifest("ConfigMap", volume["configMap"]["name"], item.manifest.file)
    (text,) = config_map["data"].values()
    settings = yaml.safe_load(text)
    assert isinstance(settings, dict)
    return settings


def config_of(item: ContainerOfPod) -> ServerConfig:
    return server_config(serve_arguments(item.container), settings_of(item))


def server_config(arguments: list[str], settings: dict[str, Any]) -> ServerConfig:
    flags = vars(serve_parser().parse_args(arguments))
    assert flags.pop("config") == "/config/config.yaml"
    profile = flags.pop("profile")
    preset = yaml.safe_load((ROOT / f"deploy/config/{profile}.yaml").read_text())
    set_flags = {name: value for name, value in flags.items() if value is not None}
    assert not settings.keys() & set_flags.keys()
    return parse_settings(ServerConfig, {**preset, **settings, **set_flags}, profile)


def port_numbers(item: ContainerOfPod) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in item.container.get("ports", ())}


def pods_with(labels: dict[str, str]) -> list[ContainerOfPod]:
    """Return the containers of the pods that a selector selects."""
    own_labels = {key: value for key, value in labels.items() if key not in ADDED_LABELS}
    return [item for item in SERVERS if own_labels.items() <= {*item.labels.items()}]


def objects_of_kind(kind: str) -> list[Manifest]:
    return [item for item in manifests() if item.kind == kind]


def picker_configs() -> Iterator[tuple[Any, list[str]]]:
    """Yield each picker's configuration with the flags of its containers."""
    text = manifest("ConfigMap", "preamble-picker")["data"]["config.yaml"]
    pod = manifest("Deployment", "preamble-picker")["spec"]["template"]["spec"]
    for container in pod["containers"]:
        yield yaml.safe_load(text), container["args"]
    service = manifest("LLMInferenceService", "preamble")
    yield service["spec"]["router"]["scheduler"]["config"]["inline"], []


def seconds(duration: str) -> float:
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    parts = re.findall(r"([\d.]+)(ms|s|m|h)", duration)
    return sum(float(number) * units[unit] for number, unit in parts)


def metric_faults(text: str) -> list[str]:
    """Return the metrics and labels in a text that the server, or the picker, does not have."""
    picker_metrics = read_table(PICKER_TABLE)["metrics"]
    labels_by_metric = {
        name: {*family["labels"]} for name, family in surface()["metrics"].items()
    } | {name: {*labels} for name, labels in picker_metrics.items()}
    faults = []
    names = r"\b((?:preamble|vllm:|llm_d_epp)_?[a-z_]*_[a-z_]+)(?:\{([^}]*)\})?"
    for name, selector in re.findall(names, text):
        if name not in labels_by_metric:
            faults.append(f"no metric {name}")
            continue
        labels = set(re.findall(r"(\w+)\s*=", selector))
        faults += [
            f"{name} has no label {label}"
            for label in labels - labels_by_metric[name] - SCRAPE_LABELS
        ]
    return faults


CUSTOM_RESOURCES = [item for item in manifests() if f"{item.api_version} {item.kind}" in kinds()]


@pytest.mark.parametrize("item", CUSTOM_RESOURCES, ids=str)
def test_fields_of_custom_resources_are_in_the_tables(item: Manifest) -> None:
    assert not check_object(item.object).faults


def test_each_table_is_used() -> None:
    used = {f"{item.api_version} {item.kind}" for item in manifests()}
    used |= {f"{config['apiVersion']} {config['kind']}" for config, _ in picker_configs()}
    assert kinds().keys() <= used


LWS = manifest("LeaderWorkerSet", "preamble-lws")


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("spec.leaderWorkerTemplate.sise", 2, "unknown field 'sise'"),
        ("spec.replicas", "2", "'2' is no integer"),
        ("spec.startupPolicy", "Ready", "'Ready' is none of LeaderCreated, LeaderReady"),
        ("spec.leaderWorkerTemplate.workerTemplate", None, "workerTemplate is required"),
    ],
)
def test_a_planted_fault_in_an_object_is_found(path: str, value: Any, fault: str) -> None:
    planted = deepcopy(LWS)
    *parents, name = path.split(".")
    node = planted
    for parent in parents:
        node = node[parent]
    if value is None:
        del node[name]
    else:
        node[name] = value
    (message,) = check_object(planted).faults
    assert fault in message


def test_pickers_know_the_plugins_parameters_and_flags() -> None:
    for config, flags in picker_configs():
        assert not picker_faults(config, flags)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("interval: 1s", "intervall: 1s", "unknown field 'intervall'"),
        ("interval: 1s", "interval: 1", "1 is no duration"),
        ("- type: queue-scorer", "- type: queue-depth-scorer", "no plugin of the table"),
        ("pluginRef: queue-scorer", "pluginRef: queue", "pluginRef: queue is no plugin"),
        ("featureGates: [flowControl]", "featureGates: [flow]", "featureGates: flow"),
    ],
)
def test_a_planted_fault_in_the_pickers_configuration_is_found(
    old: str, new: str, fault: str
) -> None:
    text = manifest("ConfigMap", "preamble-picker")["data"]["config.yaml"]
    assert old in text
    flags = ["--allow-experimental-plugins"]
    faults = picker_faults(yaml.safe_load(text.replace(old, new)), flags)
    assert any(fault in message for message in faults)
    assert not picker_faults(yaml.safe_load(text), flags)
    assert picker_faults(yaml.safe_load(text), ["--pool=preamble"]) == [
        "plugins: session-affinity-scorer needs --allow-experimental-plugins",
        "flag --pool",
    ]


def test_pickers_read_metrics_of_the_server_as_gauges() -> None:
    for config, _ in picker_configs():
        plugins = {plugin["type"]: plugin for plugin in config["plugins"]}
        parameters = plugins["core-metrics-extractor"]["parameters"]
        (engine,) = parameters["engineConfigs"]
        assert parameters["defaultEngine"] == engine["name"] == "preamble"
        assert engine.keys() == {"name", *PICKER_SPECS}
        for spec in PICKER_SPECS:
            assert surface()["metrics"][engine[spec]]["type"] == "gauge"
        labels = {"running_lora_adapters", "waiting_lora_adapters", "max_lora"}
        assert labels <= surface()["metrics"][engine["loraSpec"]]["labels"].keys()


def test_pickers_prefer_adapters_to_queue_and_kv_cache() -> None:
    for config, _ in picker_configs():
        (profile,) = config["schedulingProfiles"]
        weights = {plugin["pluginRef"]: plugin.get("weight") for plugin in profile["plugins"]}
        session_weight = weights.pop("session-affinity-scorer", 3)
        assert session_weight == 3
        assert weights == {
            "lora-affinity-scorer": 3,
            "queue-scorer": 2,
            "kv-cache-utilization-scorer": 2,
            "max-score-picker": None,
        }


def test_pickers_scrape_the_metrics_port_before_their_metrics_are_stale() -> None:
    for config, _ in picker_configs():
        plugins = {plugin["type"]: plugin for plugin in config["plugins"]}
        scrape = plugins["metrics-data-source"]["parameters"]
        ports = {config_of(item).network_config.metrics_port for item in FRONTENDS}
        assert ports == {scrape["port"]}
        # Servers with stale metrics count as full.
        if "utilization-detector" in plugins:
            threshold = plugins["utilization-detector"]["parameters"]["metricsStalenessThreshold"]
            assert seconds(threshold) >= 3 * seconds(scrape["interval"])


def test_the_header_of_the_pickers_is_that_of_the_clients() -> None:
    text = manifest("ConfigMap", "preamble-picker")["data"]["config.yaml"]
    plugins = {plugin["type"]: plugin for plugin in yaml.safe_load(text)["plugins"]}
    sources = plugins["session-affinity-scorer"]["parameters"]["sessionIdConfig"]["sources"]
    assert sources[0] == {"header": AFFINITY_HEADER}


@pytest.mark.parametrize("item", SERVERS, ids=str)
def test_flags_and_settings_of_each_container_are_those_of_the_server(item: ContainerOfPod) -> None:
    config = config_of(item)
    assert config.observability_config.log_format == "json"
    security = config.security_config
    assert security.insecure or (security.tls_cert and security.tls_key and security.tokens)


def test_settings_of_the_pool_differ_only_in_the_security() -> None:
    text = manifest("ConfigMap", "preamble-pool-1")["data"]["config.yaml"]
    settings = yaml.safe_load(text)
    (leader,) = [item for item in FRONTENDS if item.manifest.file == "lws.yaml"]
    config = server_config(serve_arguments(leader.container), settings)
    assert config.security_config.insecure and config.security_config.tokens
    other_settings = {key: value for key, value in settings.items() if key != "insecure"}
    group_settings = settings_of(leader)
    assert other_settings == {
        key: value for key, value in group_settings.items() if not key.startswith("tls_")
    }


@pytest.mark.parametrize("argument", ["--tensor-parallel-size=2", "--http-port=http"])
def test_a_planted_flag_is_found(argument: str) -> None:
    (leader,) = [item for item in FRONTENDS if item.manifest.file == "lws.yaml"]
    with pytest.raises(SystemExit):
        server_config([*serve_arguments(leader.container), argument], settings_of(leader))


def test_a_planted_setting_is_found() -> None:
    (leader,) = [item for item in FRONTENDS if item.manifest.file == "lws.yaml"]
    with pytest.raises(ConfigError, match="drain_seconds"):
        server_config(
            serve_arguments(leader.container), {**settings_of(leader), "drain_seconds": 60}
        )


@pytest.mark.parametrize("item", SERVERS, ids=str)
def test_every_path_of_the_settings_is_on_a_mounted_volume(item: ContainerOfPod) -> None:
    config, mounts = config_of(item), item.container["volumeMounts"]
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in item.pod["volumes"]}
    paths = [
        config.model_config.model,
        config.adapter_config.adapters,
        config.security_config.tls_cert,
        config.security_config.tls_key,
        config.security_config.tokens,
        config.observability_config.flight_dir,
        "/config/config.yaml",
    ]
    folders = [f"{mount['mountPath']}/" for mount in mounts] + [f"{KSERVE_MODEL}/"]
    for path in filter(None, paths):
        assert any(f"{path}/".startswith(folder) for folder in folders), path


@pytest.mark.parametrize("item", FRONTENDS, ids=str)
def test_probes_ask_the_metrics_port_which_needs_no_token(item: ContainerOfPod) -> None:
    config, ports = config_of(item), port_numbers(item)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        http_get = item.container[probe]["httpGet"]
        page = "ready" if probe == "readinessProbe" else "live"
        assert http_get["path"] == f"/health/{page}"
        port = ports.get(http_get["port"], http_get["port"])
        assert port == config.network_config.metrics_port
        assert http_get.get("scheme", "HTTP") == "HTTP"


@pytest.mark.parametrize("item", SERVERS, ids=str)
def test_ports_of_containers_are_those_of_the_settings(item: ContainerOfPod) -> None:
    network = config_of(item).network_config
    expected = {"grpc": network.port, "http": network.http_port, "metrics": network.metrics_port}
    ports = port_numbers(item)
    if "rendezvous" in ports:
        assert ports.pop("rendezvous") == int(torchrun_flags(item.container)["master-port"])
    assert ports.items() <= expected.items()


def test_ports_of_an_inference_service_are_those_of_the_runtime() -> None:
    (runtime,) = [item for item in SERVERS if item.manifest.kind == "ServingRuntime"]
    network = config_of(runtime).network_config
    model = manifest("InferenceService", "preamble")["spec"]["predictor"]["model"]
    ports = {port["name"]: port["containerPort"] for port in model["ports"]}
    assert ports == {"http1": network.http_port, "h2c": network.port}
    spec = runtime.manifest.object["spec"]
    assert model["runtime"] == runtime.manifest.name
    assert model["modelFormat"]["name"] in [item["name"] for item in spec["supportedModelFormats"]]
    assert model["protocolVersion"] in spec["protocolVersions"] == ["v2", "grpc-v2"]
    assert spec["annotations"]["prometheus.kserve.io/port"] == str(network.metrics_port)


@pytest.mark.parametrize("item", SERVERS, ids=str)
def test_the_grace_period_is_longer_than_the_drain(item: ContainerOfPod) -> None:
    program, wait_s = item.container["lifecycle"]["preStop"]["exec"]["command"]
    drain_s = config_of(item).network_config.drain_s
    pod = item.pod
    if item.manifest.kind == "ServingRuntime":
        pod = manifest("InferenceService", "preamble")["spec"]["predictor"]
    assert program == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= int(wait_s) + drain_s + SHUTDOWN_S
    if item.container.get("command", [""])[0] == "torchrun":
        # torchrun kills its ranks after this time.
        assert int(torchrun_flags(item.container)["shutdown-timeout"]) >= drain_s + SHUTDOWN_S


GROUPS = [
    (
        LWS["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"],
        LWS["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"],
        LWS["spec"]["leaderWorkerTemplate"]["size"],
    ),
    (
        manifest("LLMInferenceService", "preamble")["spec"]["template"],
        manifest("LLMInferenceService", "preamble")["spec"]["worker"],
        manifest("LLMInferenceService", "preamble")["spec"]["parallelism"]["pipeline"],
    ),
]


@pytest.mark.parametrize(("leader", "worker", "size"), GROUPS, ids=["lws", "llminferenceservice"])
def test_pods_of_a_group_form_one_static_rendezvous(leader: Any, worker: Any, size: int) -> None:
    """The front end is on node 0, which is the leader only in torchrun's static rendezvous."""
    import torch.distributed.run as torchrun

    (leader_container,), (worker_container,) = leader["containers"], worker["containers"]
    for key in ("command", "args", "image", "resources", "volumeMounts", "lifecycle"):
        assert leader_container[key] == worker_container[key]
    assert leader["volumes"] == worker["volumes"]
    flags = torchrun_flags(leader_container)
    assert flags["nnodes"] == "$(LWS_GROUP_SIZE)"
    assert flags["node-rank"] == "$(LWS_WORKER_INDEX)"
    assert flags["master-addr"] == "$(LWS_LEADER_ADDRESS)"
    words = " ".join([*leader_container["command"][1:], *leader_container["args"]])
    variables = {"$(LWS_GROUP_SIZE)": str(size), "$(LWS_WORKER_INDEX)": "1"}
    for name, value in variables.items():
        words = words.replace(name, value)
    arguments = torchrun.parse_args(shlex.split(words))
    assert arguments.rdzv_backend == "static" and arguments.node_rank == 1
    parallel = config_of(
        next(item for item in SERVERS if item.container == leader_container)
    ).parallel_config
    assert parallel.ranks == size * int(arguments.nproc_per_node)
    gpus = leader_container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == arguments.nproc_per_node
    # Workers have no front end to probe.
    assert not {key for key in worker_container if "Probe" in key or key == "ports"}
    # The front end starts only when all pods have joined.
    probe = leader_container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= RENDEZVOUS_S + 60


def test_a_group_does_not_wait_for_its_leader_and_starts_again_as_a_whole() -> None:
    spec = LWS["spec"]
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    # LeaderWorkerSet creates a headless service with its own name.
    assert LWS["metadata"]["name"] not in [item.name for item in objects_of_kind("Service")]


def test_services_pools_and_monitors_select_only_pods_with_a_frontend() -> None:
    selectors = [item.object["spec"]["selector"] for item in objects_of_kind("Service")]
    for kind in ("InferencePool", "PodMonitor"):
        selectors += [
            item.object["spec"]["selector"]["matchLabels"] for item in objects_of_kind(kind)
        ]
    # KubeRay adds the label ray.io/serve to the pods with a front end.
    others = ({"app": "preamble-picker"}, {"app": "preamble-ray", "ray.io/serve": "true"})
    selectors = [selector for selector in selectors if selector not in others]
    assert len(selectors) == 6
    for selector in selectors:
        pods = pods_with(selector)
        assert pods
        group = any("LeaderWorkerSet" in item.manifest.kind for item in pods)
        assert (LEADER.items() <= selector.items()) == group


def test_ports_of_services_pools_and_monitors_are_those_of_their_pods() -> None:
    for item in [*objects_of_kind("Service"), *objects_of_kind("PodMonitor")]:
        spec = item.object["spec"]
        if "picker" in item.name:
            pod = manifest("Deployment", "preamble-picker")["spec"]["template"]["spec"]
            containers = pod["containers"]
        elif item.name == "preamble-ray":
            cluster = manifest("RayService", "preamble-ray")["spec"]["rayClusterConfig"]
            (group,) = cluster["workerGroupSpecs"]
            assert group["template"]["metadata"]["labels"]["app"] == spec["selector"]["app"]
            containers = group["template"]["spec"]["containers"]
        else:
            selector = spec["selector"].get("matchLabels", spec["selector"])
            containers = [pod.container for pod in pods_with(selector) if "ports" in pod.container]
        ports = {
            port["name"]: port["containerPort"]
            for container in containers
            for port in container["ports"]
        }
        for port in spec.get("ports", ()):
            assert port["port"] == ports[port["targetPort"]]
        for scrape in spec.get("podMetricsEndpoints", ()):
            assert scrape["port"] in ports and scrape["path"] == "/metrics"
    for item in objects_of_kind("InferencePool"):
        spec = item.object["spec"]
        (frontend,) = [
            pod for pod in pods_with(spec["selector"]["matchLabels"]) if pod in FRONTENDS
        ]
        protocol = {"http": "http", "kubernetes.io/h2c": "grpc"}[spec["appProtocol"]]
        assert spec["targetPorts"] == [{"number": port_numbers(frontend)[protocol]}]


def test_each_pool_has_a_picker_of_its_own() -> None:
    pod = manifest("Deployment", "preamble-picker")["spec"]["template"]["spec"]
    service = manifest("Service", "preamble-picker")
    ports = [port["port"] for port in service["spec"]["ports"]]
    pickers = {}
    for container in pod["containers"]:
        flags = dict(
            flag.removeprefix("--").split("=") for flag in container["args"] if "=" in flag
        )
        pickers[flags["pool-name"]] = int(flags["grpc-port"])
        numbers = [port["containerPort"] for port in container["ports"]]
        names = ("grpc-port", "grpc-health-port", "metrics-port")
        assert numbers == [int(flags[name]) for name in names]
        for probe in ("livenessProbe", "readinessProbe"):
            assert container[probe]["grpc"]["port"] == int(flags["grpc-health-port"])
    for item in objects_of_kind("InferencePool"):
        reference = item.object["spec"]["endpointPickerRef"]
        assert reference["name"] == service["metadata"]["name"]
        assert pickers.pop(item.name) == reference["port"]["number"] in ports
    assert not pickers


def test_the_route_sends_the_calls_of_each_service_to_its_pool() -> None:
    grpc_rule, http_rule = manifest("HTTPRoute", "preamble")["spec"]["rules"]
    services = {match["path"]["value"].removeprefix("/") for match in grpc_rule["matches"]}
    assert services <= {*surface()["grpc"]["services"]}
    assert grpc_rule["backendRefs"][0]["name"] == "preamble-grpc"
    pools = [item.name for item in objects_of_kind("InferencePool")]
    assert {rule["backendRefs"][0]["name"] for rule in (grpc_rule, http_rule)} == {*pools}


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/kubernetes").glob("*.yaml")), ids=str)
def test_metrics_in_manifests_are_those_of_the_server_and_the_picker(path: Path) -> None:
    assert not metric_faults(path.read_text())


def test_a_planted_metric_is_found() -> None:
    text = (ROOT / "deploy/kubernetes/keda.yaml").read_text()
    assert "preamble_scheduler_waiting_requests" in text
    assert metric_faults(text.replace("waiting_requests", "queued_requests")) == [
        "no metric preamble_scheduler_queued_requests"
    ]
    assert metric_faults(text.replace("inference_pool", "pool")) == [
        "llm_d_epp_flow_control_queue_size has no label pool"
    ]


def test_autoscaling_counts_running_requests_as_activity() -> None:
    spec = manifest("ScaledObject", "preamble")["spec"]
    target = spec["scaleTargetRef"]
    (deployment,) = [
        item for item in objects_of_kind(target["kind"]) if item.name == target["name"]
    ]
    assert deployment.api_version == target["apiVersion"]
    triggers = {}
    for trigger in spec["triggers"]:
        metadata = trigger["metadata"]
        assert trigger["type"] == "prometheus"
        assert not check_value(metadata, "keda_prometheus", "PrometheusTrigger", "metadata").faults
        assert float(metadata["activationThreshold"]) < float(metadata["threshold"])
        triggers[trigger["name"]] = metadata
    assert triggers.keys() == {"waiting", "running", "held"}
    assert spec["idleReplicaCount"] == 0 < spec["minReplicaCount"] < spec["maxReplicaCount"]
    # Otherwise the replicas would never be enough.
    (server,) = [item for item in FRONTENDS if item.manifest.file == "preamble.yaml"]
    running_max = config_of(server).scheduler_config.running_requests_max
    assert float(triggers["running"]["threshold"]) < running_max


def test_the_queue_of_the_picker_waits_longer_than_a_start() -> None:
    text = manifest("ConfigMap", "preamble-picker")["data"]["config.yaml"]
    config = yaml.safe_load(text)
    assert config["featureGates"] == ["flowControl"]
    scaling = manifest("ScaledObject", "preamble")["spec"]
    assert seconds(config["flowControl"]["defaultRequestTTL"]) > 10 * scaling["pollingInterval"]


def test_the_job_runs_the_tuning_settings_on_all_its_ranks() -> None:
    runtime = manifest("ClusterTrainingRuntime", "preamble-tune")["spec"]
    job = manifest("TrainJob", "mood")["spec"]
    assert job["runtimeRef"] == {"name": "preamble-tune"}
    (replicated_job,) = runtime["template"]["spec"]["replicatedJobs"]
    # Trainer sets the variables of torchrun in the container `node` of the job `node`.
    assert replicated_job["name"] == "node"
    labels = replicated_job["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = replicated_job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "node"
    assert container["command"] == ["torchrun", "-m", "preamble", "tune", "/config/task.yaml"]
    text = manifest("ConfigMap", "preamble-tune-mood")["data"]["task.yaml"]
    config = parse_settings(TuneConfig, yaml.safe_load(text), "task.yaml")
    parallel = config.parallel_config
    trainer = job["trainer"]
    ranks = parallel.tp * parallel.pp * parallel.dp
    assert ranks == trainer["numNodes"] * trainer["numProcPerNode"]
    assert trainer["numProcPerNode"] % parallel.tp == 0  # Tensor parallelism inside a node.
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == str(trainer["numProcPerNode"])
    folders = [f"{mount['mountPath']}/" for mount in container["volumeMounts"]]
    files = yaml.safe_load(text)
    for key in ("model", "data", "validation", "output", "run"):
        assert any(f"{files[key]}/".startswith(folder) for folder in folders), key
    # Restarted pods resume the run.
    assert config.output_config.run and runtime["template"]["spec"]["failurePolicy"]["maxRestarts"]


@pytest.mark.parametrize("item", list(preamble_containers()), ids=str)
def test_containers_are_unprivileged(item: ContainerOfPod) -> None:
    context = item.container["securityContext"]
    assert not context["allowPrivilegeEscalation"] and context["readOnlyRootFilesystem"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    user = {**item.pod.get("securityContext", {}), **context}
    assert user["runAsNonRoot"] and user["runAsUser"] == 10001


def test_config_maps_of_volumes_exist() -> None:
    names = {item.name for item in objects_of_kind("ConfigMap")}
    for path in (ROOT / "deploy/kubernetes").glob("*.yaml"):
        used = set(re.findall(r"configMap: \{name: ([\w-]+)\}", path.read_text()))
        assert used <= names


def test_only_the_group_of_the_pod_reads_its_secrets() -> None:
    """The server refuses a file of tokens that every user can read."""
    text = "\n".join(path.read_text() for path in FOLDER.glob("*.yaml"))
    volumes = re.findall(r"secret: (\{secretName: .*\})", text)
    assert len(volumes) > 4
    assert {yaml.safe_load(volume).get("defaultMode") for volume in volumes} == {0o440}
