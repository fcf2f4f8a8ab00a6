"""Replicas of one model on fixed ports.

A replica can be killed and started again at the same address, as an orchestrator would do.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import yaml

from tests.support.servers import (
    ROOT,
    Server,
    command,
    free_ports,
    server_process,
)


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
