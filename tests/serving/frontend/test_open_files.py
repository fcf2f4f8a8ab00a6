"""Connections and the limit of open files, each case in a process of its own."""

import subprocess
import sys

import pytest

from tests.support.servers import ROOT

CODE = """
import logging, resource, sys
from serving.config import NetworkConfig
from serving.frontend.open_files import fit_connections
soft, hard, metrics_port = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
logging.basicConfig(stream=sys.stdout, format="%(message)s")
config = fit_connections(NetworkConfig(
    connections_max=300, http_connections_max=100, metrics_port=metrics_port or None
))
print(config.connections_max, config.http_connections_max,
      resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def fit(soft: int, hard: int, metrics_port: int = 0) -> list[str]:
    arguments = [sys.executable, "-c", CODE, str(soft), str(hard), str(metrics_port)]
    completed = subprocess.run(
        arguments, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    return completed.stdout.splitlines()


def test_soft_limit_is_raised_only_as_far_as_connections_need_it() -> None:
    (line,) = fit(64, 4000)
    connections, http_connections, limit = map(int, line.split())
    assert (connections, http_connections) == (300, 100) and 900 < limit < 1000
    assert fit(2000, 4000) == ["300 100 2000"]


@pytest.mark.parametrize(("metrics_port", "http_servers"), [(0, 1), (9002, 2)])
def test_bounds_are_reduced_to_a_low_hard_limit(metrics_port: int, http_servers: int) -> None:
    warning, line = fit(64, 200, metrics_port)
    connections, http_connections, limit = map(int, line.split())
    assert limit == 200
    assert connections + http_servers * http_connections <= limit / 2
    assert connections > 2 * http_connections > 8
    assert f"event=connections_reduced files_max=200 connections_max={connections}" in warning
    assert "ulimit -Hn" in warning


ACCEPT_CODE = """
import asyncio, logging, os, resource, socket, sys, urllib.request
from serving.config import NetworkConfig
from serving.frontend.http_transport import HttpServer, TextPage, page_handlers
from serving.frontend.open_files import log_accept_errors
logging.basicConfig(stream=sys.stdout, format="%(message)s")

async def main():
    log_accept_errors(asyncio.get_running_loop())
    routes = {"/page": page_handlers(lambda: TextPage(200, b"page"))}
    async with HttpServer(NetworkConfig(http_port=0), routes) as server:
        address = ("127.0.0.1", server.port)
        unaccepted = [socket.create_connection(address) for _ in range(20)]
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, 4000))
        await asyncio.sleep(2.5)
        for client in unaccepted:
            client.close()
        print("closed")
        def get():
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/page") as page:
                return page.read()
        print(await asyncio.to_thread(get))
asyncio.run(main())
"""


def test_accept_without_descriptors_pauses_quietly_and_recovers() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", ACCEPT_CODE], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    warning, closed, page = completed.stdout.splitlines()
    assert warning.startswith("event=accept_paused reason=") and closed == "closed"
    assert page == "b'page'", completed.stderr
    assert completed.stderr == ""
