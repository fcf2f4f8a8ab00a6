"""gRPC transport: builds handlers from method tables, and writes google.rpc errors in trailers.

Each handler runs inside a call of the front end, with the deadline that the client set. The caller
is authenticated before a message is read, so that an unknown caller costs little. This module
also gives a code, a reason and google.rpc details to the errors that the gRPC library would report
itself (undecodable messages, internal errors). The module needs no generated service stubs: a
method is a name, a message type and a function.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from gpt.adapters.change_log import ChangeAction
from serving.admission.auth import Role
from serving.frontend.call import CallFailure, Frontend, to_call_failure
from serving.frontend.call_origin import CallOrigin
from serving.frontend.wire_messages import decompress, parse_message
from serving.request import RefusedError
from serving.service.error_reasons import DOMAIN

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
WriteMessage = Callable[[Message], Awaitable[None]]
# Unary, server streaming ("out"), client streaming ("in") and bidirectional streaming ("both").
Cardinality = Literal["unary", "out", "in", "both"]

# Limits for the trailers, since clients and proxies may reject metadata over 8 KiB. The trailers
# contain an error's message three times. In one of these copies, which is percent-encoded, a
# non-ASCII byte takes three bytes. The trailers contain the error's field twice; a caller may have
# sent a long field name.
ERROR_MESSAGE_BYTES_MAX = 1000
ERROR_FIELD_BYTES_MAX = 200
GRPC_LOGGER = "grpc._cython.cygrpc"  # Logger name of the gRPC library.
PROBE_BYTES_MAX = 64 << 10  # Bytes of a request to the health and reflection services.
# Time limit for sending the status to a slow reader.
ABORT_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class RpcMethod:
    """A gRPC method, with the function `handle` that serves it.

    `handle` takes a message (with cardinality "in" or "both": an iterator of messages) and the
    call, and returns a message. With cardinality "out" or "both" it also takes a `WriteMessage`,
    and returns None.
    """

    name: str
    request_type: type[Message]
    handle: Callable[..., Awaitable[Message | None]]
    cardinality: Cardinality = "unary"
    role: Role = "generate"
    # Accept calls even while the server drains or has `calls_max` open calls.
    while_draining: bool = False
    change: ChangeAction | None = None  # The change of an adapter that the method makes.
    is_probe: bool = False  # As in `Frontend.call`.


def probe_method(
    name: str, request_type: type[Message], handle: Callable[..., Awaitable[Message | None]]
) -> RpcMethod:
    """Return a method for probes: it costs no quota, and answers while the server drains."""
    return RpcMethod(name, request_type, handle, while_draining=True, is_probe=True)


def build_handler(
    frontend: Frontend, protocol: str, service: str, methods: Sequence[RpcMethod]
) -> grpc.GenericRpcHandler:
    """Build the handler of one gRPC service; `protocol` is the `wire` label in metrics."""
    logging.getLogger(GRPC_LOGGER).addFilter(_is_worth_logging)
    return grpc.method_handlers_generic_handler(
        service,
        {method.name: _method_handler(frontend, protocol, service, method) for method in methods},
    )


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for a record that only says that a client disconnected.

    The library logs a stack trace if it cannot send the final status of a successful call, because
    the client has disconnected.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


def _method_handler(frontend: Frontend, protocol: str, service: str, method: RpcMethod) -> Any:
    # For the gRPC library, every method has a stream of requests. Otherwise the library would read
    # the whole message of a unary request before `handle` authenticates the caller.
    handler_factory: Any = (
        grpc.stream_stream_rpc_method_handler
        if method.cardinality in ("out", "both")
        else grpc.stream_unary_rpc_method_handler
    )
    handle = build_call_function(frontend, protocol, service, method)
    return handler_factory(handle, response_serializer=_serialize)


def build_call_function(
    frontend: Frontend, protocol: str, service: str, method: RpcMethod
) -> Callable[[AsyncIterator[bytes], Any], Awaitable[Message | None]]:
    """Return the function that runs a call of a method.

    Its arguments are the messages of the client and the gRPC context. It returns the response, or
    None after it has written the responses or ended the call with an error.
    """
    name = f"{service}/{method.name}"
    attributes = {"rpc.system.name": "grpc", "rpc.method": name}

    async def handle(chunks: AsyncIterator[bytes], context: Context) -> Message | None:
        headers, deadline = _headers_of(context), _deadline_of(context)
        credential = headers.get("authorization")
        origin = CallOrigin(name, headers, attributes, peer=_peer_of(context))
        try:
            async with frontend.call(
                protocol,
                method.name,
                credential,
                deadline,
                while_draining=method.while_draining,
                is_probe=method.is_probe,
                origin=origin,
            ) as call:
                await call.require_role(method.role, method.change)
                messages = _parse_messages(method, chunks, frontend.message_bytes_max)
                request = (
                    messages
                    if method.cardinality in ("in", "both")
                    else await _read_request(messages, name, frontend.slow_reader_s)
                )
                if method.cardinality in ("out", "both"):
                    return await method.handle(
                        request, call, lambda message: call.send_part(_write(context, message))
                    )
                return await method.handle(request, call)
        except CallFailure as error:
            await abort(context, error)
            return None

    return handle


class ProbeInterceptor(grpc.aio.ServerInterceptor):
    """Bounds the requests of the gRPC library's own services: health and reflection.

    Their handlers parse messages in the library, which neither decompresses them (`wire_messages`)
    nor returns errors with a reason. The handlers of this module stay unchanged.
    """

    def __init__(self, slow_reader_s: float) -> None:
        self._slow_reader_s = slow_reader_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler

        async def handle(chunks: AsyncIterator[bytes], context: Context) -> Any:
            requests = _deserialize(chunks, handler.request_deserializer)
            name = handler_call_details.method
            try:
                request = (
                    requests
                    if handler.request_streaming
                    else await _read_request(requests, name, self._slow_reader_s)
                )
                return await _run_library_handler(handler, request, context)
            except RefusedError as error:
                await abort(context, to_call_failure(error))

        handler_factory: Any = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return handler_factory(handle, response_serializer=handler.response_serializer)


async def _deserialize(
    chunks: AsyncIterator[bytes], deserialize: Callable[[bytes], Message]
) -> AsyncIterator[Message]:
    async for data in chunks:
        if len(data) > PROBE_BYTES_MAX:
            raise RefusedError(
                "BODY_TOO_LARGE", f"the message is over {PROBE_BYTES_MAX} bytes, the limit here"
            )
        try:
            yield deserialize(decompress(data, PROBE_BYTES_MAX))
        except DecodeError:
            raise RefusedError("UNREADABLE", "the message is not a valid request") from None


async def _run_library_handler(handler: Any, request: Any, context: Context) -> Message | None:
    if not handler.response_streaming:
        response: Message = await handler.unary_unary(request, context)
        return response
    responses = (handler.stream_stream or handler.unary_stream)(request, context)
    if hasattr(responses, "__aiter__"):
        async for message in responses:
            await context.write(message)
    else:
        await responses  # This handler writes its responses itself.
    return None


async def _write(context: Context, message: Message) -> None:
    """Write a message; cancel the call if the client has disconnected."""
    try:
        await context.write(message)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


async def _parse_messages(
    method: RpcMethod, chunks: AsyncIterator[bytes], bytes_max: int
) -> AsyncIterator[Message]:
    """Parse messages; gRPC's own parsing would report errors as UNKNOWN, and log stack traces."""
    async for data in chunks:
        try:
            yield await parse_message(method.request_type, data, bytes_max)
        except DecodeError:
            raise RefusedError(
                "UNREADABLE",
                f"the {len(data)} bytes sent are not a valid request of {method.name}; build the "
                "message from this server's protos, which server reflection returns",
            ) from None


async def _read_request(messages: AsyncIterator[Message], method: str, timeout_s: float) -> Message:
    """Return the message of a call that sends one message; `method` is its name for errors."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(messages)
    except TimeoutError:
        raise RefusedError(
            "BODY_TOO_LATE", f"the message did not arrive within {timeout_s:g} s (slow_reader_s)"
        ) from None
    except StopAsyncIteration:
        raise RefusedError("UNREADABLE", f"the call has no message; {method} needs one") from None


def _deadline_of(context: Context) -> float | None:
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def _peer_of(context: Context) -> str:
    """Return the address of the client, such as 127.0.0.1:41234 or [::1]:41234."""
    return unquote(context.peer() or "").removeprefix("ipv4:").removeprefix("ipv6:")


def _headers_of(context: Context) -> dict[str, str]:
    """Return the text metadata of a call; for a repeated key, its first value."""
    headers: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            headers.setdefault(key, value)
    return headers


async def abort(context: Context, error: CallFailure) -> None:
    """End a call with an error status; cancel it instead if the status cannot be sent."""
    # The context and the error of `context.abort` refer to each other, and the latter to `error`.
    error.release_frames()
    is_slow_reader = error.reason.name == "SLOW_READER"
    try:
        # The status is sent after the messages that a slow reader has not read yet. Without a time
        # limit, sending it might never finish.
        async with asyncio.timeout(ABORT_TIMEOUT_S if is_slow_reader else None):
            await context.abort(error.reason.code, _error_text(error), error_trailers(error))
    except (grpc.aio.InternalError, TimeoutError):
        raise asyncio.CancelledError from None


def error_trailers(error: CallFailure) -> tuple[tuple[str, str | bytes], ...]:
    """Return an error's trailers: google.rpc details, and the delay for gRPC's retry policy."""
    field = _truncate(error.field or "", ERROR_FIELD_BYTES_MAX)
    metadata = {"field": field} if field else {}
    details: list[Message] = [ErrorInfo(reason=error.reason.name, domain=DOMAIN, metadata=metadata)]
    if field:
        violation = BadRequest.FieldViolation(field=field, description=_error_text(error))
        details.append(BadRequest(field_violations=[violation]))
    trailing_metadata: list[tuple[str, str | bytes]] = []
    if error.retry_s is not None:
        retry_delay = Duration()
        retry_delay.FromMilliseconds(round(1000 * error.retry_s))
        details.append(RetryInfo(retry_delay=retry_delay))
        # gRPC's retry policy: the client waits for this time before its retry.
        trailing_metadata.append(("grpc-retry-pushback-ms", str(round(1000 * error.retry_s))))
    status = Status(code=error.reason.code.value[0], message=_error_text(error))
    for detail in details:
        packed_detail = Packed()
        packed_detail.Pack(detail)
        status.details.append(packed_detail)
    return (*trailing_metadata, ("grpc-status-details-bin", status.SerializeToString()))


def _error_text(error: CallFailure) -> str:
    return _truncate(str(error), ERROR_MESSAGE_BYTES_MAX)


def _truncate(text: str, bytes_max: int) -> str:
    data = text.encode(errors="replace")
    if len(data) <= bytes_max:
        return data.decode()
    return data[:bytes_max].decode(errors="ignore") + "…"
