"""The wires: each a thin translation between one protocol and `serving.request`."""

from collections.abc import Sequence
from typing import NamedTuple

import grpc

from serving.front import Front
from serving.rpc import Method, handler
from serving.wires import adapters, admin, generation, kserve, tgis


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
