"""Servers of a client: a channel and stubs for each address, and the choice of one for an attempt.

With `balance="adapter"`, calls for the same adapter go to the same server as long as it answers, so
each adapter is loaded, and its prefix is cached, on one server: rendezvous hashing chooses among
the addresses, and gRPC's ring hash among the servers to which one address resolves. Every client
makes the same choice. A proxy can do the same with the header AFFINITY_HEADER.
"""

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, get_args

from clients.transport import CallError, Tls, channel_options
from protos.preamble.v1 import adapters_pb2_grpc, admin_pb2_grpc, generation_pb2_grpc

Balance = Literal["round_robin", "adapter"]
AFFINITY_HEADER = "x-preamble-affinity"
# Addresses that gRPC has in addition to HOST:PORT. Some of them contain commas.
GRPC_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "xds:")
# A server that was unreachable is not chosen for this time, while others are left.
UNREACHABLE_S = 5.0


class Server:
    """One address of a client, with the stubs of its channel."""

    def __init__(self, address: str, channel: Any) -> None:
        self.address = address
        self.channel = channel
        self.generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self.adapters = adapters_pb2_grpc.AdapterServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.unreachable_until = 0.0  # On the monotonic clock.


# Returns a method of a server's stubs.
Method = Callable[[Server], Any]


class Servers:
    """The servers of a client."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        open_channel: Callable[[str, list[tuple[str, Any]]], Any],
        tls: Tls | None,
        balance: Balance,
        tenant: str,
    ) -> None:
        """`open_channel` returns the channel to an address, with these options."""
        if balance not in get_args(Balance):
            choices = ", ".join(get_args(Balance))
            raise ValueError(f"balance is {balance!r}; choose one of: {choices}")
        options = channel_options(tls)
        if balance == "adapter":
            options.append(("grpc.service_config", _ring_hash_config()))
        self._balance = balance
        self._tenant = tenant
        self._turns = itertools.count()
        self.all = [
            Server(address, open_channel(address, options))
            for address in split_addresses(addresses)
        ]

    def route(self, adapter: str) -> "Route":
        """Return the route of a call for an adapter, or for the base model ("")."""
        name = adapter.partition("@")[0]
        return Route(self, f"{self._tenant}/{name}" if name else "")

    def choose(self, affinity: str, failed: Collection[Server]) -> Server:
        """Return the server for an attempt; those in `failed` only if there are no others."""
        now = time.monotonic()
        candidates = [server for server in self.all if server not in failed] or self.all
        candidates = [
            server for server in candidates if server.unreachable_until <= now
        ] or candidates
        if affinity and self._balance == "adapter":
            return max(candidates, key=lambda server: _weight(server.address, affinity))
        return candidates[next(self._turns) % len(candidates)]


class Route:
    """The servers of the attempts of one call."""

    def __init__(self, servers: Servers, affinity: str) -> None:
        self._servers = servers
        self._affinity = affinity
        self._failed: list[Server] = []
        self._server: Server | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata by which a proxy can choose the server."""
        return ((AFFINITY_HEADER, self._affinity),) if self._affinity else ()

    def next_server(self) -> Server:
        self._server = self._servers.choose(self._affinity, self._failed)
        return self._server

    def record_failure(self, error: CallError) -> bool:
        """Record the error of an attempt; return whether the next server was not called yet."""
        assert self._server is not None
        if error.is_connection_loss:
            self._server.unreachable_until = time.monotonic() + UNREACHABLE_S
        self._failed.append(self._server)
        return any(server not in self._failed for server in self._servers.all)


def split_addresses(addresses: str | Sequence[str]) -> list[str]:
    """Return the addresses of `HOST:PORT,HOST:PORT`, or of a sequence."""
    if isinstance(addresses, str):
        is_single = addresses.startswith(GRPC_SCHEMES)
        addresses = [addresses] if is_single else addresses.split(",")
    if not addresses:
        raise ValueError("there is no address; give at least one HOST:PORT")
    return list(addresses)


def _weight(address: str, affinity: str) -> bytes:
    return hashlib.sha256(f"{address}\n{affinity}".encode()).digest()


def _ring_hash_config() -> str:
    # gRPC reads the variable when a channel gets its first addresses. Without it, calls would hang.
    os.environ.setdefault("GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY", "true")
    policy = {"ring_hash_experimental": {"requestHashHeader": AFFINITY_HEADER}}
    return json.dumps({"loadBalancingConfig": [policy]})
