"""gRPC health checking and server reflection.

This module adds the method `List` to the gRPC library's health service. It registers the library's
reflection service twice: as v1alpha, and as v1, which some clients require. The names of the
server's other services are arguments, so this module does not depend on them.
"""

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from protos.foreign.descriptor_pools import load_package, reflection_pool

HEALTH_STATUS = health_pb2.HealthCheckResponse
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


class HealthService:
    """The health service: `Check`, `Watch` and `List` report the status of each service name."""

    def __init__(self) -> None:
        self._servicer: Any = health.aio.HealthServicer()
        self._statuses: dict[str, int] = {}

    async def set_status(self, name: str, *, up: bool) -> None:
        status = HEALTH_STATUS.SERVING if up else HEALTH_STATUS.NOT_SERVING
        self._statuses[name] = status
        await self._servicer.set(name, status)

    def add_to_server(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        pb = load_package("health")

        async def list_health(request: Any, context: Any) -> Any:
            response = pb.HealthListResponse()
            for name, status in self._statuses.items():
                response.statuses[name].status = status
            return response

        handler: Any = grpc.unary_unary_rpc_method_handler(
            list_health,
            pb.HealthListRequest.FromString,
            lambda response: response.SerializeToString(),
        )
        _add_generic_handler(server, health.SERVICE_NAME, {"List": handler})


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Enable server reflection for these services and for the health and reflection services."""
    names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION_V1]
    pool: Any = _MethodAwarePool(reflection_pool(names))
    reflection.enable_server_reflection(names, server, pool=pool)
    servicer = reflection.aio.ReflectionServicer(names, pool=pool)
    # The messages of v1 and v1alpha have the same encoding.
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    _add_generic_handler(server, REFLECTION_V1, {"ServerReflectionInfo": handler})


def _add_generic_handler(server: grpc.aio.Server, service: str, methods: dict[str, Any]) -> None:
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))


class _MethodAwarePool:
    """A descriptor pool that also finds a file by a method's full name; some clients need this."""

    def __init__(self, pool: DescriptorPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, name: str) -> Any:
        try:
            return self._pool.FindFileContainingSymbol(name)
        except KeyError:
            service, _, method = name.rpartition(".")
            descriptor = self._pool.FindServiceByName(service)
            if method not in descriptor.methods_by_name:
                raise
            return descriptor.file
