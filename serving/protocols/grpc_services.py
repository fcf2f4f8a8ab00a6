"""gRPC service table: the services and methods of all protocols.

Each protocol translates between its messages and the types of `serving.request`. gRPC's own health
and reflection services are in `serving.frontend.health_reflection`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import grpc

from serving.frontend.call import Frontend
from serving.frontend.grpc_transport import RpcMethod, build_handler
from serving.protocols.kserve import service as kserve
from serving.protocols.preamble import adapters, admin, generation
from serving.protocols.tgis import service as tgis


class GrpcService(NamedTuple):
    """A gRPC service: the `wire` label of its metrics, its full name and its methods."""

    protocol: str
    service: str
    methods: Sequence[RpcMethod]


def all_services() -> list[GrpcService]:
    """Return every gRPC service of this server except gRPC's own health and reflection services."""
    return [
        GrpcService("preamble", generation.SERVICE, generation.methods()),
        GrpcService("preamble", adapters.SERVICE, adapters.methods()),
        GrpcService("preamble", admin.SERVICE, admin.methods()),
        GrpcService("kserve", kserve.SERVICE, kserve.methods()),
        GrpcService("tgis", tgis.SERVICE, tgis.methods()),
    ]


def handlers(frontend: Frontend) -> list[grpc.GenericRpcHandler]:
    """Return one gRPC handler per service."""
    return [build_handler(frontend, *service) for service in all_services()]
