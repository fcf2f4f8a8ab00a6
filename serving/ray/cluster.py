"""A Ray cluster with Serve: deploys applications, reads their state, drains nodes.

Serve's public functions deploy single applications. Those with a configuration, as KubeRay deploys
them, are all deployed together by Serve's controller, so this module first reads the configurations
of the others.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray._private.state import available_resources_per_node
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

from gpt.errors import ConfigError, first_line
from serving.ray.application import DEPLOYMENT, Ports, cluster_config, proxy_options
from serving.ray.grpc_services import SERVICER_FUNCTION
from serving.ray.placement import NodeResources, describe_shortage

DRAIN_REASON_PREEMPTION = 2  # The node will go away at the deadline, whatever runs there.
REPLICA_GROUP_PREFIX = "SERVE_REPLICA::"
LOCK_NAME = "preamble_deployment_lock"
LOCK_WAIT_S = 120.0  # A deployment holds the lock for seconds, longer if it starts Serve.
REMOVAL_S_MAX = 3600.0  # Limits the wait for the drain of a removed application.
REMOVAL_POLL_S = 0.5


@dataclass(frozen=True)
class ReplicaState:
    """A replica: its state in Serve, and the node of its front end."""

    name: str
    state: str
    node: str


@dataclass(frozen=True)
class ApplicationState:
    """An application: its state, its replicas, and what the waiting ones lack."""

    name: str
    state: str
    message: str
    target: int
    replicas: tuple[ReplicaState, ...]
    shortages: tuple[str, ...]

    @property
    def running(self) -> int:
        return sum(replica.state == "RUNNING" for replica in self.replicas)

    @property
    def is_complete(self) -> bool:
        return self.state == "RUNNING" and self.running >= self.target

    def lines(self) -> Iterator[str]:
        """Yield the lines of `preamble ray status`."""
        yield f"{self.name}: {self.state}, {self.running} of {self.target} replicas run"
        if self.message:
            yield f"  {' '.join(self.message.split())}"
        for replica in self.replicas:
            yield f"  replica {replica.name} {replica.state} {replica.node}".rstrip()
        for shortage in self.shortages:
            yield f"  a replica waits: it {shortage}"


def connect(address: str) -> None:
    """Connect to the cluster from one of its nodes."""
    try:
        ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({first_line(error)}); run this command "
            "on a node of the cluster, and give --address HOST:PORT of its head"
        ) from None


def node_resources() -> list[NodeResources]:
    """Return the resources of the nodes that are alive."""
    free = available_resources_per_node()
    return [
        NodeResources(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def deploy(application: dict[str, Any], ports: Ports) -> None:
    """Deploy an application or change it; the other applications stay as they are."""
    with _deployment_lock():
        _start_serve(ports)
        client = _client()
        _check_proxies(ray.get(client._controller.get_grpc_config.remote()), ports)
        others = [
            details["deployed_app_config"]
            for name, details in client.get_serve_details()["applications"].items()
            if name != application["name"] and details.get("deployed_app_config")
        ]
        config = cluster_config(ports, [*others, application])
        client.deploy_apps(ServeDeploySchema.model_validate(config))


def _start_serve(ports: Ports) -> None:
    """Start Serve with its proxies, unless it runs."""
    try:
        serve.start(**proxy_options(ports))
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise ConfigError(
            f"the proxies of Ray Serve did not start ({first_line(error)}); "
            "logs/serve/controller_*.log in the folder of the Ray session says why; deploy again"
        ) from None


def _check_proxies(running: Any, ports: Ports) -> None:
    """Raise ConfigError if Serve runs with other options, which cannot be changed."""
    if SERVICER_FUNCTION not in running.grpc_servicer_functions:
        raise ConfigError(
            "Ray Serve already runs in this cluster without the gRPC services of Preamble, and "
            "cannot add them while it runs; run `serve shutdown`, or start Serve with "
            f"grpc_servicer_functions: [{SERVICER_FUNCTION}]"
        )
    if running.port != ports.grpc:
        raise ConfigError(
            f"Ray Serve already runs in this cluster with the gRPC port {running.port}, and cannot "
            f"change it while it runs; deploy with --port {running.port}, or run `serve shutdown`"
        )


class DeploymentLock:
    """A named actor without methods. Names are unique in a cluster, so only one process has it."""


@contextmanager
def _deployment_lock() -> Iterator[None]:
    """Exclude other deployments: each submits all applications, and would revert the others.

    Serve itself can also be started only once. Ray ends the actor if this process is killed, so
    that the lock is released.
    """
    actor_class: Any = ray.remote(num_cpus=0)(DeploymentLock)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            lock = actor_class.options(name=LOCK_NAME).remote()
            break
        except ValueError:  # The name is taken.
            if time.monotonic() > deadline:
                raise ConfigError("another deployment is in progress; try again") from None
            time.sleep(0.2)
    try:
        yield
    finally:
        ray.kill(lock)


def wait_until_complete(name: str, timeout_s: float) -> Iterator[ApplicationState]:
    """Yield the state of an application whenever it changes, until it is complete or has failed."""
    deadline = time.monotonic() + timeout_s
    last: ApplicationState | None = None
    while True:
        state = application_states().get(name)
        if state is not None and state != last:
            yield state
            last = state
            if state.is_complete or state.state == "DEPLOY_FAILED":
                return
        if time.monotonic() > deadline:
            return
        time.sleep(0.5)


def application_states() -> dict[str, ApplicationState]:
    """Return the state of the applications of Preamble, by name."""
    details = _client().get_serve_details()
    shortages = _shortages()
    return {
        name: _application_state(name, application, shortages.get(name, []))
        for name, application in details["applications"].items()
        if DEPLOYMENT in application["deployments"]
        or (application.get("deployed_app_config") or {}).get("import_path")
        == "serving.ray.application:build"
    }


def _application_state(
    name: str, application: Mapping[str, Any], shortages: list[str]
) -> ApplicationState:
    deployment = application["deployments"].get(DEPLOYMENT, {})
    replicas = [
        ReplicaState(replica["replica_id"], replica["state"].value, replica.get("node_ip") or "")
        for replica in deployment.get("replicas", [])
    ]
    return ApplicationState(
        name,
        application["status"].value,
        deployment.get("message") or application.get("message", ""),
        deployment.get("target_num_replicas") or 0,
        tuple(replicas),
        tuple(shortages),
    )


def _shortages() -> dict[str, list[str]]:
    """Return what the replicas of each application lack that wait for their placement group."""
    nodes = node_resources()
    shortages: dict[str, list[str]] = {}
    for group in ray.util.placement_group_table().values():
        if group["state"] != "PENDING" or not group["name"].startswith(REPLICA_GROUP_PREFIX):
            continue
        application = group["name"].removeprefix(REPLICA_GROUP_PREFIX).partition("#")[0]
        text = describe_shortage(list(group["bundles"].values()), nodes)
        shortages.setdefault(application, []).append(text or "is about to be placed")
    return shortages


def drain_node(node: str, deadline_s: float) -> None:
    """Move the replicas of a node to other nodes; the node ends after the deadline.

    `node`: its address, or its ID in Ray.
    """
    alive = [candidate for candidate in ray.nodes() if candidate["Alive"]]
    matches = [
        candidate["NodeID"]
        for candidate in alive
        if node in (candidate["NodeManagerAddress"], candidate["NodeID"])
    ]
    if len(matches) != 1:
        choices = ", ".join(
            f"{candidate['NodeManagerAddress']} ({candidate['NodeID']})" for candidate in alive
        )
        count = "no node is" if not matches else f"{len(matches)} nodes are"
        raise ConfigError(f"{count} {node}; give the address or the ID of one of: {choices}")
    gcs_client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    deadline_ms = round(1000 * (time.time() + deadline_s))
    is_accepted, reason = gcs_client.drain_node(
        matches[0], DRAIN_REASON_PREEMPTION, "preamble ray drain", deadline_ms
    )
    if not is_accepted:
        raise ConfigError(f"Ray refuses to drain {node}: {reason}; try again later")


def remove(name: str) -> None:
    """Finish the calls of an application, then end its replicas."""
    if name not in application_states():
        raise ConfigError(f"no application is called {name!r}; `preamble ray status` lists them")
    # The wait of Serve itself ends after 60 s, which a drain can exceed.
    serve.delete(name, _blocking=False)
    deadline = time.monotonic() + REMOVAL_S_MAX
    while name in application_states():
        if time.monotonic() > deadline:
            raise ConfigError(f"{name!r} is still being removed; see `preamble ray status`")
        time.sleep(REMOVAL_POLL_S)


def _client() -> Any:
    try:
        return _get_global_client()
    except RayServeException:
        raise ConfigError(
            "Ray Serve does not run in this cluster; deploy a model with `preamble ray deploy`"
        ) from None
