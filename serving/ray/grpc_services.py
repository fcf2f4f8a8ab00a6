"""gRPC services of the replicas, for the gRPC proxies of Ray Serve.

Serve calls a method of the deployment by the last part of the gRPC method's name, and different
services have methods of the same name. Its proxies therefore do not parse requests: they wrap the
bytes of a message in a `RequestMessage`, which also has the full name of the method. The replica
parses the message. The services come from their descriptors, because a proxy must not load torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import FileDescriptor

from protos.foreign.descriptor_pools import load_package
from protos.preamble.v1 import adapters_pb2, admin_pb2, generation_pb2

# The import path of `add_services` for Serve's option `grpc_servicer_functions`.
SERVICER_FUNCTION = "serving.ray.grpc_services.add_services"


@dataclass(frozen=True)
class RequestMessage:
    """A message of a client, as it arrived."""

    method: str  # Full name, such as preamble.v1.GenerationService/Generate.
    data: bytes


@dataclass(frozen=True)
class ResponseMessage:
    """A message for the client. Serve serializes it as it would serialize a protobuf message."""

    data: bytes = b""

    def SerializeToString(self) -> bytes:
        return self.data


class ServiceMethod(NamedTuple):
    """A gRPC method of the replicas."""

    service: str
    name: str
    has_request_stream: bool
    has_response_stream: bool


def service_methods() -> list[ServiceMethod]:
    """Return the methods of all services."""
    return [
        ServiceMethod(
            service.full_name, method.name, method.client_streaming, method.server_streaming
        )
        for file in _files()
        for service in file.services_by_name.values()
        for method in service.methods
    ]


def _files() -> Iterator[FileDescriptor]:
    for stub in (generation_pb2, adapters_pb2, admin_pb2):
        yield stub.DESCRIPTOR
    for stem in ("kserve", "tgis"):
        yield load_package(stem).file


def add_services(servicer: object, server: Any) -> None:
    """Register the methods with a proxy of Serve, which replaces their handlers."""
    handlers: dict[str, dict[str, Any]] = {}
    for method in service_methods():
        handler: Any = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[method.has_request_stream, method.has_response_stream]
        full_name = f"{method.service}/{method.name}"
        handlers.setdefault(method.service, {})[method.name] = handler(
            _unreachable, request_deserializer=partial(RequestMessage, full_name)
        )
    for service, service_handlers in handlers.items():
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, service_handlers),)
        )


def _unreachable(request: object, context: object) -> None:
    raise AssertionError("Serve's proxy replaces this handler")
