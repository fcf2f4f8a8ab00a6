"""Application of Ray Serve for a model: its configuration, and the function that builds it.

The configuration has the format of Serve's config files and of `serveConfigV2` of KubeRay's
RayService. All nodes must have this package, and the paths of the settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.software_versions import preamble_version
from serving.config import ServerConfig
from serving.ray.grpc_services import SERVICER_FUNCTION
from serving.ray.scaling import POLICY

DEPLOYMENT = "replica"
# Settings that are paths of files or folders.
PATHS = (
    "model",
    "tokenizer",
    "config_json",
    "chat_template",
    "adapters",
    "adapter_imports",
    "adapter_mirror",
    "tokens",
    "flight_dir",
    "usage_file",
)
# Settings that a replica changes while it serves (`Replica.reconfigure`).
RECONFIGURABLE = ("calls_max", "slow_reader_s")
ROUTING_STATS_S = 1.0
METRICS_INTERVAL_S = 2.0  # Between the reports of a replica to the autoscaler; Serve's own is 10 s.
HEALTH_CHECK_S = 2.0
# After the calls of a replica have ended, it writes usage records and spans, and stops its ranks.
CLOSE_S = 15.0


@dataclass(frozen=True)
class Scale:
    """The number of replicas: fixed if `minimum` equals `maximum`."""

    minimum: int
    maximum: int
    initial: int
    up_after_s: float
    down_after_s: float


@dataclass(frozen=True)
class Ports:
    """The ports of Serve's proxies on each node."""

    grpc: int
    http: int


def build(args: dict[str, Any]) -> Any:
    """Return the application; Serve calls this function on a node of the cluster."""
    from ray import serve

    from serving.ray.replica import Replica

    return serve.deployment(name=DEPLOYMENT)(Replica).bind(args["settings"])


def application_config(
    name: str,
    config: ServerConfig,
    bundles: list[dict[str, float]],
    scale: Scale,
    surge_percent: int,
    *,
    haproxy: bool = False,
) -> dict[str, Any]:
    """Return the configuration of an application.

    `haproxy`: the proxies are HAProxy, which has no request router.

    If `args` changes, Serve replaces the replicas one after the other. It changes `user_config` and
    the number of replicas without a restart.
    """
    settings = changed_settings(config)
    deployment: dict[str, Any] = {
        "name": DEPLOYMENT,
        "placement_group_bundles": bundles,
        "placement_group_strategy": "PACK",
        "ray_actor_options": _actor_options(bundles[0]),
        "max_ongoing_requests": config.network_config.calls_max,
        "graceful_shutdown_timeout_s": config.network_config.drain_s + CLOSE_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": HEALTH_CHECK_S,
        "max_surge_percent": surge_percent,
        "user_config": {key: settings.pop(key) for key in RECONFIGURABLE if key in settings},
    }
    if not haproxy:
        deployment["request_router_config"] = {
            "request_router_class": "serving.ray.router:AdapterRouter",
            "request_routing_stats_period_s": ROUTING_STATS_S,
        }
    if scale.minimum == scale.maximum:
        deployment["num_replicas"] = scale.minimum
    else:
        deployment["autoscaling_config"] = {
            "min_replicas": scale.minimum,
            "initial_replicas": scale.initial,
            "max_replicas": scale.maximum,
            "upscale_delay_s": scale.up_after_s,
            "downscale_delay_s": scale.down_after_s,
            "metrics_interval_s": METRICS_INTERVAL_S,
            "look_back_period_s": 10.0,
            "policy": {"policy_function": POLICY},
        }
    return {
        "name": name,
        "route_prefix": f"/{name}",
        "import_path": "serving.ray.application:build",
        # A new version of Preamble also replaces the replicas.
        "args": {"version": preamble_version(), "settings": settings},
        "deployments": [deployment],
    }


def cluster_config(ports: Ports, applications: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the configuration of Serve with all its applications."""
    return {**proxy_options(ports), "applications": applications}


def proxy_options(ports: Ports) -> dict[str, Any]:
    """Return the options of Serve's proxies, which all applications share."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "127.0.0.1", "port": ports.http},
        "grpc_options": {"port": ports.grpc, "grpc_servicer_functions": [SERVICER_FUNCTION]},
    }


def changed_settings(config: ServerConfig) -> dict[str, Any]:
    """Return the settings that are not the defaults, with absolute paths."""
    settings = config.to_dict()
    defaults = ServerConfig(settings["model"]).to_dict()
    changed: dict[str, Any] = {}
    for key, value in settings.items():
        if key == "model" or value != defaults[key]:
            if key in PATHS:
                value = _absolute_path(value)
            elif key == "lora_modules":  # NAME=PATH
                value = [_absolute_module(module) for module in value]
            changed[key] = list(value) if isinstance(value, tuple) else value
    return changed


def _absolute_path(path: str) -> str:
    return path if "://" in path else str(Path(path).absolute())


def _absolute_module(module: str) -> str:
    name, separator, path = module.partition("=")
    return f"{name}={_absolute_path(path)}" if separator else module


def _actor_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Return the resources of the first bundle, which are those of the replica's actor."""
    options: dict[str, Any] = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    return {**options, "resources": others} if others else options
