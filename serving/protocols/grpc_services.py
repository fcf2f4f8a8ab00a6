"""The gRPC services of a server: a table of every protocol's methods.

Each protocol is a thin translation between its messages and `serving.request`. Those that gRPC
itself brings, health and reflection, are in `serving.frontend.health_reflection`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import grpc

from serving.frontend.call import Front
from serving.frontend.grpc_transport import Method, handler
from serving.protocols.kserve import service as kserve
from serving.protocols.preamble import adapters, admin, generation
from serving.protocols.tgis import service as tgis


class Wire(NamedTuple):
    """A gRPC service: what metrics call its surface, its full name, its methods."""

    name: str
    service: str
    methods: Sequence[Method]


def wires() -> list[Wire]:
    """Every gRPC service of this server, but for those that gRPC itself brings."""
    return [
        Wire("preamble", generation.SERVICE, generation.methods()),
        Wire("preamble", adapters.SERVICE, adapters.methods()),
        Wire("preamble", admin.SERVICE, admin.methods()),
        Wire("kserve", kserve.SERVICE, kserve.methods()),
        Wire("tgis", tgis.SERVICE, tgis.methods()),
    ]


def handlers(front: Front) -> list[grpc.GenericRpcHandler]:
    return [handler(front, *wire) for wire in wires()]
