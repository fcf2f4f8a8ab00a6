"""Ray cluster: several nodes on this machine, and `preamble ray` commands on them.

Ray is not installed in .venv, but in an environment of its own, like a third-party client; `make
clients-tools` installs it under build/clients. This module is also the program of the cluster's
process, which runs with that environment and reads commands as lines of JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
OBJECT_STORE_BYTES = 100_000_000
COMMAND_S = 300.0  # Against hangs.


def find_ray() -> Path | None:
    """Return Python in the environment of Ray; None: it is not installed."""
    folder = ROOT / "build/clients/ray"
    return folder / "bin/python" if (folder / "installed").exists() else None


class RayCluster:
    """A cluster in a process of its own.

    `port`: of the head, which is the first node. `variables`: environment variables of all nodes.
    `head_cpus`: CPUs of the head for replicas.
    """

    def __init__(
        self,
        python: Path,
        folder: Path,
        port: int,
        variables: Mapping[str, str] = MappingProxyType({}),
        head_cpus: int = 0,
    ) -> None:
        self.python = python
        self._head_cpus = head_cpus
        self.folder = folder
        self.address = f"127.0.0.1:{port}"
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONSAFEPATH": "1",
            "RAY_memory_usage_threshold": "0.99",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            # By default, workers have a lower priority than other processes of the machine, and the
            # controller replaces a proxy that does not answer within seconds.
            "RAY_worker_niceness": "0",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
            "RAY_gcs_storage": "rocksdb",
            "RAY_gcs_storage_path": str(folder / "gcs"),
            **variables,
        }
        self._log = (folder / "cluster.log").open("w")
        (folder / "gcs").mkdir()
        self._process = subprocess.Popen(
            [python, Path(__file__), str(port)],
            cwd=folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.start_head()

    def add_node(self, **resources: float) -> str:
        """Add a node with these resources, such as CPU=2; return its ID in Ray."""
        return str(self._call("add", **resources))

    def remove_node(self, node: str) -> None:
        """Kill all processes of a node."""
        self._call("remove", node=node)

    def replicas(self) -> dict[str, list[str]]:
        """The names of the replicas by state, as `preamble ray status` prints them."""
        states: dict[str, list[str]] = self._call("replicas")
        return states

    def kill_head(self) -> None:
        self._call("kill_head")

    def start_head(self) -> None:
        self._call("head", cpus=self._head_cpus)

    def run(
        self, *words: str | Path, timeout_s: float = COMMAND_S
    ) -> "subprocess.CompletedProcess[str]":
        """Run `preamble ray` on a node of this cluster."""
        return subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def command(self, *words: str | Path) -> list[str]:
        command = [str(self.python), "-m", "preamble", "ray", *map(str, words)]
        return command if "--print" in command else [*command, "--address", self.address]

    @property
    def environment(self) -> dict[str, str]:
        return self._environment

    def close(self) -> None:
        with suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()  # Its end stops the cluster.
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, action: str, **arguments: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"action": action, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the cluster has ended; see {self.folder / 'cluster.log'}"
        return json.loads(line)


def run_cluster(port: int) -> None:
    """The program: start and stop nodes as standard input says."""
    import ray
    from ray.cluster_utils import Cluster

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints to standard output.
    cluster = Cluster()
    nodes: dict[str, Any] = {}
    options: dict[str, Any] = {
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    for line in sys.stdin:
        command = json.loads(line)
        action = command.pop("action")
        answer: object = None
        if action == "head":
            cluster.add_node(num_cpus=command["cpus"], gcs_server_port=port, **options)
        elif action == "replicas":
            answer = _replicas(cluster.address)
        elif action == "kill_head":
            ray.shutdown()
            cluster.remove_node(cluster.head_node, allow_graceful=False)
        elif action == "add":
            node = cluster.add_node(
                num_cpus=command.pop("CPU", 0),
                num_gpus=command.pop("GPU", 0),
                resources=command,
                **options,
            )
            nodes[node.node_id] = node
            answer = node.node_id
        elif action == "remove":
            cluster.remove_node(nodes.pop(command["node"]), allow_graceful=False)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    ray.shutdown()
    cluster.shutdown()


def _replicas(address: str) -> dict[str, list[str]]:
    import ray

    from serving.ray.cluster import application_states, connect

    if not ray.is_initialized():
        connect(address)
    states: dict[str, list[str]] = {}
    for application in application_states().values():
        for replica in application.replicas:
            states.setdefault(replica.state, []).append(replica.name)
    return states


if __name__ == "__main__":
    run_cluster(int(sys.argv[1]))
