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


# The last response of a stream that has an error. Serve passes the status and the trailers on with
# messages only, so this one brings them to the proxy, where `ProxyHandler` removes it. No protobuf
# message begins with a zero byte.
TRAILERS_ONLY = ResponseMessage(b"\0")


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
    """Register the methods with a proxy of Serve, which replaces their functions."""
    handlers: dict[str, Any] = {}
    for method in service_methods():
        full_name = f"{method.service}/{method.name}"
        handlers[f"/{full_name}"] = _handler_factory(method)(
            _unreachable, request_deserializer=partial(RequestMessage, full_name)
        )
    server.add_generic_rpc_handlers((ProxyHandler(handlers),))


class ProxyHandler(grpc.GenericRpcHandler):
    """The handlers of all methods, with the functions by which a proxy calls a replica.

    If the replica of a call is lost, Serve reports INTERNAL. Clients do not repeat such a call, so
    this class reports UNAVAILABLE, as gRPC does if a server is lost. An error that a replica itself
    reports has details. In a stream, TRAILERS_ONLY comes before the status of such an error.
    """

    def __init__(self, handlers: dict[str, Any]) -> None:
        self._method_handlers = handlers  # Serve replaces this attribute.

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = self._method_handlers.get(str(handler_call_details.method))
        if handler is None:
            return None
        kind = f"{_KINDS[handler.request_streaming]}_{_KINDS[handler.response_streaming]}"
        function = getattr(handler, kind)

        async def call(request: Any, context: Any) -> Any:
            response = await function(request, context)
            _set_lost_status(context)
            return response

        async def call_stream(request: Any, context: Any) -> Any:
            async for response in function(request, context):
                if response != TRAILERS_ONLY.data:
                    yield response
            _set_lost_status(context)

        return handler._replace(**{kind: call_stream if handler.response_streaming else call})


_KINDS = {False: "unary", True: "stream"}
DETAILS_KEY = "grpc-status-details-bin"


def _set_lost_status(context: Any) -> None:
    is_internal = context.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INTERNAL.value[0])
    trailers = context.trailing_metadata() or ()
    if is_internal and not any(key == DETAILS_KEY for key, _ in trailers):
        context.set_code(grpc.StatusCode.UNAVAILABLE)


def _handler_factory(method: ServiceMethod) -> Any:
    factories: dict[tuple[bool, bool], Any] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return factories[method.has_request_stream, method.has_response_stream]


def _unreachable(request: object, context: object) -> None:
    raise AssertionError("Serve's proxy replaces this function")
