"""Services of the replicas: all methods of the server, and messages that keep their method."""

import pickle

import grpc
import grpc.aio
import pytest

from serving.protocols.grpc_services import all_services
from serving.ray.grpc_services import RequestMessage, ServiceMethod, add_services, service_methods


def test_the_methods_are_those_of_the_server() -> None:
    streams = {"unary": (False, False), "out": (False, True), "in": (True, False)}
    streams["both"] = (True, True)
    methods = {
        ServiceMethod(service.service, method.name, *streams[method.cardinality])
        for service in all_services()
        for method in service.methods
    }
    served = set(service_methods())
    assert served <= methods
    # The server also answers these methods, with the reason why it does not have them.
    assert {method.service for method in methods - served} == {"inference.GRPCInferenceService"}


def test_methods_of_the_same_name_have_the_same_kind() -> None:
    """Serve has one method for all services."""
    kinds: dict[str, set[tuple[bool, bool]]] = {}
    for method in service_methods():
        kind = (method.has_request_stream, method.has_response_stream)
        kinds.setdefault(method.name, set()).add(kind)
    assert all(len(kind) == 1 for kind in kinds.values())
    # A stream of requests has no message that names the method before the call is authenticated.
    streamed = [method.name for method in service_methods() if method.has_request_stream]
    assert len(streamed) == len(set(streamed))


class RecordingServer:
    """Records the handlers, as a proxy of Serve does."""

    def __init__(self) -> None:
        self.handlers: dict[str, grpc.RpcMethodHandler] = {}  # type: ignore[type-arg]

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler]) -> None:
        self.handlers |= handlers[0]._method_handlers  # type: ignore[attr-defined]


@pytest.mark.parametrize("service", ["preamble.v1.GenerationService", "fmaas.GenerationService"])
def test_a_message_keeps_the_full_name_of_its_method(service: str) -> None:
    server = RecordingServer()
    add_services(None, server)
    handler = server.handlers[f"/{service}/Generate"]
    assert handler.request_deserializer is not None
    message = handler.request_deserializer(b"bytes")
    assert pickle.loads(pickle.dumps(message)) == RequestMessage(f"{service}/Generate", b"bytes")
