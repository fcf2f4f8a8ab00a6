"""Pods as network namespaces: processes with an address, a host name and a hosts file of their own.

A bridge in one more namespace connects the pods, so the host's network does not change. A process
of a pod sees its own network, host name and /etc/hosts, but shares files and process IDs with the
tests. A holder process keeps the namespaces of a pod; it ends when the tests end.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Self

from tests.support.servers import ROOT

NETWORK = "10.99.0."
NAMESPACES = ("--net", "--uts", "--mount")
_CLONE_NEWNET = 0x40000000
PROBE_PORT = 29000
PROBE_S = 60.0
LISTEN = (
    "import socket; server = socket.create_server(('', PORT)); print(flush=True); server.accept()"
)
CONNECT = "import socket; socket.create_connection(ADDRESS, 10).close()"


@cache
def unavailable_reason() -> str | None:
    """Return why this machine has no network namespaces that reach each other; None if it has."""
    try:
        with PodNetwork(["listener", "caller"], Path("/dev/null")) as network:
            _connect_pods(*network.pods)
    except (OSError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", "") or ""
        return f"no network namespaces: {error} {stderr}".strip()
    return None


def _connect_pods(listener: "Pod", caller: "Pod") -> None:
    """Connect from one pod to another: a bridge may exist, but a packet filter may block it."""
    address = f"('{listener.address}', {PROBE_PORT})"
    with listener.start_python(LISTEN.replace("PORT", str(PROBE_PORT))) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            with caller.start_python(CONNECT.replace("ADDRESS", address)) as call:
                _, stderr = call.communicate(timeout=PROBE_S)
            if call.returncode:
                last_line = stderr.strip().rpartition("\n")[2]
                raise OSError(f"a pod cannot connect to another: {last_line}")
        finally:
            server.kill()


class Pod:
    """A pod: its name and its address."""

    def __init__(self, name: str, address: str, holder: int) -> None:
        self.name = name
        self.address = address
        self._holder = holder

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO[str] | int,
        folder: Path,
    ) -> "subprocess.Popen[str]":
        """Start a process in the pod."""
        enter = ["nsenter", "--target", str(self._holder), *NAMESPACES, f"--wd={folder}", "--"]
        return subprocess.Popen(
            [*enter, *command], env=environment, stdout=output, stderr=output, text=True
        )

    def start_python(self, program: str) -> "subprocess.Popen[str]":
        """Start a Python program in the pod, with pipes for its output."""
        return self.start([sys.executable, "-c", program], os.environ, subprocess.PIPE, ROOT)


class PodNetwork:
    """Pods with the given names. `hosts` is the file that they have as /etc/hosts."""

    def __init__(self, names: Sequence[str], hosts: Path) -> None:
        self._names = names
        self._hosts = hosts
        self._resources = ExitStack()
        self._bridge = 0
        self.pods: list[Pod] = []

    def __enter__(self) -> Self:
        try:
            self._create()
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Open sockets in the pods' network during the block: those of this thread."""
        with open("/proc/thread-self/ns/net") as own, open(f"/proc/{self._bridge}/ns/net") as other:
            _set_network(other.fileno())
            try:
                yield
            finally:
                _set_network(own.fileno())

    def _create(self) -> None:
        self._bridge = self._hold()
        self._in_namespace(self._bridge, "ip", "link", "add", "bridge", "type", "bridge")
        self._in_namespace(self._bridge, "ip", "addr", "add", f"{NETWORK}1/24", "dev", "bridge")
        self._in_namespace(self._bridge, "ip", "link", "set", "bridge", "up")
        for number, name in enumerate(self._names):
            holder = self._hold()
            address = f"{NETWORK}{number + 2}"
            end = f"pod{number}"
            veth = ("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns")
            self._in_namespace(self._bridge, *veth, str(holder))
            self._in_namespace(self._bridge, "ip", "link", "set", end, "master", "bridge", "up")
            self._in_namespace(holder, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
            self._in_namespace(holder, "ip", "link", "set", "eth0", "up")
            self._in_namespace(holder, "ip", "link", "set", "lo", "up")
            self._in_namespace(holder, "hostname", name)
            self._in_namespace(holder, "mount", "--bind", str(self._hosts), "/etc/hosts")
            self.pods.append(Pod(name, address, holder))

    def _hold(self) -> int:
        """Return the ID of a process with new namespaces, which reads stdin until it is closed."""
        holder = subprocess.Popen(
            ["unshare", *NAMESPACES, "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._resources.callback(holder.communicate)
        assert holder.stdout is not None and holder.stderr is not None
        if not holder.stdout.readline():
            raise OSError(holder.stderr.read().decode().strip())
        return holder.pid

    def _in_namespace(self, holder: int, *command: str) -> None:
        enter = ["nsenter", "--target", str(holder), *NAMESPACES, "--"]
        subprocess.run([*enter, *command], check=True, capture_output=True, text=True)


def _set_network(descriptor: int) -> None:
    """Move this thread into another network namespace; `os.setns` needs Python 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
