"""gRPC: from a table of methods to handlers, each of which runs inside a call of the front.

What the library would answer in its own words (bytes that are no message, a fault of ours) ends
with a code, a reason and details of google.rpc here. Serves any package, generated or not: a method
is a name, a kind of message and a function.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from serving.admission.auth import Role
from serving.frontend.call import Ended, Front
from serving.frontend.call_origin import Came
from serving.request import RefusedError
from serving.service.error_reasons import DOMAIN

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Write = Callable[[Message], Awaitable[None]]
# Of what passes: one message each way, many out, many in, many both ways.
Kind = Literal["unary", "out", "in", "both"]

# Metadata may be refused from 8 KiB on. A message is in there three times, once with three bytes
# for each that is not ASCII; a field, which can be a name of the caller's, twice.
MESSAGE_BYTES_MAX = 1000
FIELD_BYTES_MAX = 200
LIBRARY = "grpc._cython.cygrpc"  # What it logs as.
GOODBYE_S = 1.0  # How long a client that reads nothing may take to be told that its call is over.


@dataclass(frozen=True)
class Method:
    """`answer` takes a message (or an iterator over them) and the call; "out" and "both" a `Write`
    too, and return nothing.
    """

    name: str
    request: type[Message]
    answer: Callable[..., Awaitable[Message | None]]
    kind: Kind = "unary"
    role: Role = "generate"
    draining: bool = False  # Whether it is answered while the server drains.


def handler(
    front: Front, wire: str, service: str, methods: Sequence[Method]
) -> grpc.GenericRpcHandler:
    """To be added to a server; `wire` names this surface in metrics."""
    logging.getLogger(LIBRARY).addFilter(_is_news)
    return grpc.method_handlers_generic_handler(
        service, {method.name: _handler(front, wire, service, method) for method in methods}
    )


def _is_news(record: logging.LogRecord) -> bool:
    """Whether it is worth a line. That a client was gone when its call ended well is not: the
    library logs a stack for it, and that is after our part of the call.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


def _handler(front: Front, wire: str, service: str, method: Method) -> Any:
    name = f"{service}/{method.name}"
    facts = {"rpc.system.name": "grpc", "rpc.method": name}

    async def answer(sent: Any, context: Context) -> Message | None:
        headers, deadline = _headers(context), _deadline(context)
        credential, came = headers.get("authorization"), Came(name, headers, facts)
        try:
            async with front.call(
                wire, method.name, credential, deadline, draining=method.draining, came=came
            ) as call:
                call.caller.must(method.role)
                read = _messages if method.kind in ("in", "both") else _message
                given = read(method, sent)
                if method.kind in ("out", "both"):
                    return await method.answer(
                        given, call, lambda message: call.send(_written(context, message))
                    )
                return await method.answer(given, call)
        except Ended as ended:
            await abort(context, ended)
            return None

    make: Mapping[Kind, Any] = {
        "unary": grpc.unary_unary_rpc_method_handler,
        "out": grpc.unary_stream_rpc_method_handler,
        "in": grpc.stream_unary_rpc_method_handler,
        "both": grpc.stream_stream_rpc_method_handler,
    }
    return make[method.kind](answer, response_serializer=_bytes)


async def _written(context: Context, message: Message) -> None:
    """A client that has gone is now and then seen here first, before the call is cancelled."""
    try:
        await context.write(message)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()


async def _messages(method: Method, sent: AsyncIterator[bytes]) -> AsyncIterator[Message]:
    async for data in sent:
        yield _message(method, data)


def _message(method: Method, data: bytes) -> Message:
    """The library's own reading would end the call as UNKNOWN, and log a stack for each."""
    try:
        return method.request.FromString(data)
    except DecodeError:
        raise RefusedError(
            "UNREADABLE",
            f"the {len(data)} bytes sent are no request of {method.name}; make them from this "
            "server's protos, which reflection tells",
        ) from None


def _deadline(context: Context) -> float | None:
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def _headers(context: Context) -> dict[str, str]:
    """The metadata that are texts; of one that comes twice the first."""
    headers: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            headers.setdefault(key, value)
    return headers


async def abort(context: Context, ended: Ended) -> None:
    """End a call badly. Where nobody hears it any more the library would log a stack for each."""
    slow = ended.reason.name == "SLOW_READER"
    try:
        # What a slow reader has not read stands before this; the library keeps both for it.
        async with asyncio.timeout(GOODBYE_S if slow else None):
            await context.abort(ended.reason.code, _text(ended), trailers(ended))
    except (grpc.aio.InternalError, TimeoutError):
        raise asyncio.CancelledError from None


def trailers(ended: Ended) -> tuple[tuple[str, str | bytes], ...]:
    """What else is said of a bad end: for google.rpc's readers, and for gRPC's own retries."""
    field = _cut(ended.field or "", FIELD_BYTES_MAX)
    facts = {"field": field} if field else {}
    details: list[Message] = [ErrorInfo(reason=ended.reason.name, domain=DOMAIN, metadata=facts)]
    if field:
        violation = BadRequest.FieldViolation(field=field, description=_text(ended))
        details.append(BadRequest(field_violations=[violation]))
    said: list[tuple[str, str | bytes]] = []
    if ended.retry_s is not None:
        wait = Duration()
        wait.FromMilliseconds(round(1000 * ended.retry_s))
        details.append(RetryInfo(retry_delay=wait))
        # A client that is set up to retry waits this long first.
        said.append(("grpc-retry-pushback-ms", str(round(1000 * ended.retry_s))))
    status = Status(code=ended.reason.code.value[0], message=_text(ended))
    for detail in details:
        packed = Packed()
        packed.Pack(detail)
        status.details.append(packed)
    return (*said, ("grpc-status-details-bin", status.SerializeToString()))


def _text(ended: Ended) -> str:
    return _cut(str(ended), MESSAGE_BYTES_MAX)


def _cut(text: str, bytes_max: int) -> str:
    data = text.encode(errors="replace")
    if len(data) <= bytes_max:
        return data.decode()
    return data[:bytes_max].decode(errors="ignore") + "…"
