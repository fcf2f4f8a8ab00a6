"""Routers of other projects for OpenAI's API, each in front of the same replicas.

The packages vllm-router, sglang-router and smg have the routers; `make clients-tools` installs each
into an environment of its own, because two of them contain a module `smg`.
"""

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.client_environments import environment
from tests.support.servers import WAIT_S, Server, eventually, free_ports

READY_S = 60.0
# A router notices within seconds that a replica is lost or back.
_HEALTH_FLAGS = (
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "5"),
    *("--health-failure-threshold", "2", "--health-success-threshold", "1"),
    *("--worker-startup-check-interval", "1"),
)


@dataclass(frozen=True)
class Router:
    """How to start a router, and what it can do."""

    name: str  # Of its package.
    command: tuple[str, ...]  # In the folder `bin` of its environment.
    affinity_header: str
    passes_adapters: bool = True  # Whether it passes on models that it does not know.
    # The router's name of the model comes from a label, because listing models needs a token.
    needs_label: bool = False

    @contextmanager
    def run(self, servers: Sequence[Server], model: str, folder: Path) -> Iterator["RunningRouter"]:
        """Run the router in front of these servers of a model."""
        program, *arguments = self.command
        port, metrics_port = free_ports(2)
        command = [str(environment(self.name) / "bin" / program), *arguments]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        command += _HEALTH_FLAGS
        urls = [f"http://{server.http_address}" for server in servers]
        if not self.needs_label:
            command += ["--worker-urls", *urls]
        router = RunningRouter(self, f"127.0.0.1:{port}")
        with (folder / f"{self.name}.log").open("w") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
            try:
                eventually(router.answers, READY_S)
                if self.needs_label:
                    for url in urls:
                        labels = {"served_model_name": model}
                        router.request("/workers", {"url": url, "labels": labels})
                eventually(lambda: router.healthy() == len(servers), READY_S)
                yield router
            finally:
                process.kill()
                process.wait()


@dataclass(frozen=True)
class RunningRouter:
    router: Router
    address: str

    def request(self, path: str, body: object = None) -> Any:
        """Return the JSON of a response; a request with a body is a POST."""
        request = urllib.request.Request(f"http://{self.address}{path}")
        if body is not None:
            request.add_header("Content-Type", "application/json")
            request.data = json.dumps(body).encode()
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return json.load(response)

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.request("/workers")["workers"]
        return workers

    def healthy(self) -> int:
        """Return the number of replicas that the router uses."""
        return sum(worker["is_healthy"] for worker in self.workers())

    def answers(self) -> bool:
        try:
            self.workers()
        except (urllib.error.URLError, ConnectionError):
            return False
        return True


VLLM_ROUTER = Router("vllm-router", ("vllm-router", "--policy", "consistent_hash"), "x-session-id")
SGLANG_ROUTER = Router(
    "sglang-router",
    (
        *("python", "-m", "sglang_router.launch_router"),
        *("--policy", "manual", "--assignment-mode", "min_group"),
    ),
    "x-smg-routing-key",
)
SMG = Router(
    "smg",
    (
        *("smg", "launch", "--enable-igw", "--policy", "consistent_hashing"),
        *("--routing-key-headers", "x-preamble-affinity", "--load-monitor-interval", "1"),
    ),
    "x-preamble-affinity",
    passes_adapters=False,
    needs_label=True,
)
ROUTERS = (VLLM_ROUTER, SGLANG_ROUTER, SMG)
