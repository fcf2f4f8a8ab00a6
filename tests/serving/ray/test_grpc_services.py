"""Services of the replicas: all methods of the server, and messages that keep their method."""

import asyncio
import pickle
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.preamble.v1 import generation_pb2
from serving.protocols.grpc_services import all_services
from serving.ray.call_context import CallContext, single_message
from serving.ray.grpc_services import (
    ProxyHandler,
    RequestMessage,
    ServiceMethod,
    add_services,
    service_methods,
)


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


class RecordingContext:
    """Records the status of a call, as the context of Serve or of its proxy does."""

    def __init__(self) -> None:
        self.status: grpc.StatusCode | None = None
        self.trailers: list[tuple[str, str | bytes]] = []

    def set_code(self, code: grpc.StatusCode) -> None:
        self.status = code

    def set_details(self, details: str) -> None:
        pass

    def set_trailing_metadata(self, trailers: list[tuple[str, str | bytes]]) -> None:
        self.trailers = trailers

    def code(self) -> grpc.StatusCode | None:
        return self.status

    def trailing_metadata(self) -> list[tuple[str, str | bytes]]:
        return self.trailers


@pytest.mark.parametrize("count", [0, 2])
def test_a_stream_that_ends_with_an_error_has_only_its_messages(count: int) -> None:
    """The replica's last response brings the status to the proxy, which does not send it."""
    context = RecordingContext()

    async def handler(messages: AsyncIterator[bytes], call: Any) -> None:
        for number in range(count):
            await call.write(generation_pb2.GenerateStreamResponse(index=number + 1))
        await call.abort(grpc.StatusCode.UNAVAILABLE, "loading", [("reason", "LOADING")])

    async def function(request: object, _: object) -> AsyncIterator[bytes]:
        messages = single_message(RequestMessage("", b""))
        async for response in CallContext(context).run_stream(handler, messages):
            yield response.SerializeToString()

    async def collect() -> list[bytes]:
        server = RecordingServer()
        add_services(None, server)
        name = "/preamble.v1.GenerationService/GenerateStream"
        server.handlers[name] = grpc.unary_stream_rpc_method_handler(function)
        details: Any = SimpleNamespace(method=name)
        call = ProxyHandler(server.handlers).service(details).unary_stream
        return [message async for message in call(None, context)]

    messages = [generation_pb2.GenerateStreamResponse.FromString(m) for m in asyncio.run(collect())]
    assert [message.index for message in messages] == list(range(1, count + 1))
    assert context.status is grpc.StatusCode.UNAVAILABLE
    assert context.trailers == [("reason", "LOADING")]
