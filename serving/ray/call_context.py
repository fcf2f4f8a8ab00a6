"""Context of a gRPC call in a replica: metadata, messages and status for the front end's handlers.

The handlers of `serving.frontend.grpc_transport` read metadata, write messages and end calls with
an error through a gRPC context. In a replica the client is connected to a proxy of Ray Serve, which
passes the metadata on, and takes messages and the status from the deployment's method.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from serving.ray.grpc_services import TRAILERS_ONLY, RequestMessage, ResponseMessage

# A handler of `serving.frontend.grpc_transport`.
Handler = Callable[[AsyncIterator[bytes], Any], Awaitable[Message | None]]


class CallAbortedError(Exception):
    """Ends a handler after `CallContext.abort`."""


class CallContext:
    """The context of one call. `serve_context`: Serve's context, which it returns to the proxy."""

    def __init__(self, serve_context: Any) -> None:
        self._serve_context = serve_context
        self._responses: asyncio.Queue[ResponseMessage | None] = asyncio.Queue()

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        metadata: Sequence[tuple[str, str | bytes]] = self._serve_context.invocation_metadata()
        return metadata

    def time_remaining(self) -> float | None:
        # Serve does not pass the deadline on. The proxy cancels the call when it is exceeded.
        return None

    def peer(self) -> str:
        return str(self._serve_context.peer())

    async def write(self, message: Message) -> None:
        self._responses.put_nowait(ResponseMessage(message.SerializeToString()))
        await self._responses.join()  # The handler does not run ahead of Serve.

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str,
        trailing_metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        self._serve_context.set_code(code)
        self._serve_context.set_details(details)
        self._serve_context.set_trailing_metadata(list(trailing_metadata))
        raise CallAbortedError

    async def run_unary(self, handler: Handler, messages: AsyncIterator[bytes]) -> ResponseMessage:
        """Run the handler of a call with one response.

        After an error the response is empty. The proxy sends the status instead: it would lose the
        trailers of an exception.
        """
        try:
            message = await handler(messages, self)
        except CallAbortedError:
            return ResponseMessage()
        assert message is not None
        return ResponseMessage(message.SerializeToString())

    async def run_stream(
        self, handler: Handler, messages: AsyncIterator[bytes]
    ) -> AsyncIterator[ResponseMessage]:
        """Run the handler of a call with several responses, and yield them.

        After an error the last response is TRAILERS_ONLY, which the client does not get.
        """
        task = asyncio.ensure_future(self._run_to_end(handler, messages))
        task.add_done_callback(lambda _: self._responses.put_nowait(None))
        try:
            while (response := await self._responses.get()) is not None:
                yield response
                self._responses.task_done()
            await task  # Raises the error of a bug.
        finally:
            task.cancel()

    async def _run_to_end(self, handler: Handler, messages: AsyncIterator[bytes]) -> None:
        try:
            await handler(messages, self)
        except CallAbortedError:
            self._responses.put_nowait(TRAILERS_ONLY)


async def single_message(request: RequestMessage) -> AsyncIterator[bytes]:
    """Yield the message of a call with one request."""
    yield request.data
