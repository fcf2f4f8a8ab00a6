"""Discovery: what gRPC itself has clients ask of any server: how it is, and what it serves.

The library's health, with the list that it lacks; its reflection, under the newer name too, which
some clients know alone. Knows no service: names come from whoever starts the server.
"""

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from protos.foreign import described, package

STATUS = health_pb2.HealthCheckResponse
NEWER = "grpc.reflection.v1.ServerReflection"


class Health:
    """Each name's health: one by one, watched, or all at once."""

    def __init__(self) -> None:
        self._checks: Any = health.aio.HealthServicer()
        self._told: dict[str, int] = {}

    async def tell(self, name: str, *, up: bool) -> None:
        status = STATUS.SERVING if up else STATUS.NOT_SERVING
        self._told[name] = status
        await self._checks.set(name, status)

    def serve(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._checks, server)
        pb = package("health")

        async def listed(request: Any, context: Any) -> Any:
            response = pb.HealthListResponse()
            for name, status in self._told.items():
                response.statuses[name].status = status
            return response

        handler: Any = grpc.unary_unary_rpc_method_handler(
            listed, pb.HealthListRequest.FromString, lambda told: told.SerializeToString()
        )
        _add(server, health.SERVICE_NAME, {"List": handler})


def reflect(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Have clients ask for these services, and for gRPC's own."""
    names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME, NEWER]
    pool: Any = _Pool(described(names))
    reflection.enable_server_reflection(names, server, pool=pool)
    servicer = reflection.aio.ReflectionServicer(names, pool=pool)
    # The messages of both versions are the same bytes.
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    _add(server, NEWER, {"ServerReflectionInfo": handler})


def _add(server: grpc.aio.Server, service: str, methods: dict[str, Any]) -> None:
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))


class _Pool:
    """A pool that finds a service's file by a method's name too, as clients ask for it."""

    def __init__(self, pool: DescriptorPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, name: str) -> Any:
        try:
            return self._pool.FindFileContainingSymbol(name)
        except KeyError:
            service, _, method = name.rpartition(".")
            found = self._pool.FindServiceByName(service)
            if method not in found.methods_by_name:
                raise
            return found.file
