"""A real Envoy in front of replicas, with the configuration in deploy/ or one of a test."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from bench.harness.envoy_process import CONFIG, envoy_process, set_endpoints
from clients.client import CallError, Client
from clients.transport import Tls
from tests.support.client_environments import environment
from tests.support.servers import Server, eventually, free_port

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
    addresses = {
        name: [server.ready_field(name) for server in servers] for name in ("grpc", "http")
    }
    set_endpoints(config, addresses, policy)
    with run_envoy(config, folder) as address:
        yield address


@contextmanager
def run_envoy(config: Any, folder: Path) -> Iterator[str]:
    """Run Envoy; yield its address when it forwards a call of gRPC, with or without TLS."""
    (listener,) = config["static_resources"]["listeners"]
    tls = _client_tls(listener)
    with envoy_process(envoy_binary(), config, folder, free_port()) as address:
        eventually(lambda: _answers(address, tls), READY_S)
        yield address


def _client_tls(listener: Any) -> Tls | None:
    """The credentials of a client that trusts the certificate of the listener."""
    socket = listener["filter_chains"][0].get("transport_socket")
    if socket is None:
        return None
    (certificate,) = socket["typed_config"]["common_tls_context"]["tls_certificates"]
    return Tls.read(roots=certificate["certificate_chain"]["filename"])


def _answers(address: str, tls: Tls | None) -> bool:
    """Return whether a server answers, even if it wants a token."""
    with Client(address, 1.0, tls=tls) as client:
        try:
            client.info()
        except CallError as error:
            return error.code == "UNAUTHENTICATED"
    return True
